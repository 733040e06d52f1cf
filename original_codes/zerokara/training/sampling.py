"""What the model writes while it is trained: the prompts of `sample_prompts`, continued at each validation.

Each prompt is continued twice: greedily, and by chance (temperature 0.8, of the likeliest tokens that make up 0.95 of
the probability, the same dice at every step). Where training fills gaps, a prompt has some ("The <extra_id_0> barks."),
or gets one at its end, and what the decoder writes is shown. Other special tokens and the padding rows of the
vocabulary never come; the end of a document ends a text. Training's own dice are not touched, and no weight is.

Every token is a forward pass over all texts so far, without a cache: simple, the same for every family, and as dear as
training on ``2 × prompts × (prompt + sample_tokens) × sample_tokens / 6`` tokens (a forward pass is a third of a step,
and the texts are on average half as long). All processes take part, since under ZeRO 3 and tensor parallelism none has
the whole model; the first one draws, and tells the others.

``samples.md`` in the run folder, one part for each step, texts as blocks of code: none can look like a part, or be
shown as markup by a viewer or TensorBoard::

    ## step 100

    **`Once upon a time`**

    greedy:

        and the
        end

    sampled:

        ...
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed
from torch import Tensor

from zerokara import markdown
from zerokara.durable import write_text
from zerokara.samples.objective import Objective, Prompt, side_by_side
from zerokara.tokenizer.encoder import Encoder

FILE_NAME = "samples.md"
TEMPERATURE = 0.8
TOP_P = 0.95
_PART = re.compile(r"^## step (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Sample:
    """A prompt and how the model goes on, without the prompt."""

    prompt: str
    greedy: str
    sampled: str


class Sampler:
    """The prompts of a run."""

    def __init__(
        self,
        encoder: Encoder,
        objective: Objective,
        prompts: Sequence[str],
        num_tokens: int,
        seed: int,
        device: torch.device,
    ):
        self._encoder, self._texts, self._device, self._seed = encoder, prompts, device, seed
        self._num_tokens = min(num_tokens, objective.lengths.input - 1)
        self._prompts = [objective.prompt(encoder, prompt, self._num_tokens) for prompt in prompts]
        self._never = sorted({encoder.unk_id, *encoder.control_ids} - {encoder.eos_id, *objective.marks})

    def __call__(self, module: torch.nn.Module) -> list[Sample]:
        """Continue every prompt; every process must call it."""
        prompts = [prompt for prompt in self._prompts for _ in range(2)]  # the greedy one, then the other
        written: list[list[int]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        dice = [np.random.default_rng([self._seed, number]) for number in range(len(self._prompts))]
        module.eval()
        with torch.no_grad():
            for _ in range(self._num_tokens):
                for row, token in enumerate(self._drawn(self._last_logits(module, prompts, written), dice)):
                    ended[row] |= token == self._encoder.eos_id
                    if not ended[row]:
                        written[row].append(token)
                if all(ended):
                    break
        module.train()
        found = [self._encoder.decode_continuation(tokens) for tokens in written]
        return [Sample(*each) for each in zip(self._texts, found[0::2], found[1::2], strict=True)]

    def _last_logits(self, module: torch.nn.Module, prompts: Sequence[Prompt], written: Sequence[list[int]]) -> Tensor:
        """What each text goes on with, [B, padded V]."""
        first, named = side_by_side(prompts, written, self._encoder.eos_id)
        arrays = {name: torch.from_numpy(array).to(self._device) for name, array in named.items()}
        logits_B1V: Tensor = module(torch.from_numpy(first).to(self._device), **arrays)
        return logits_B1V.squeeze(1)

    def _drawn(self, logits_BV: Tensor, dice: Sequence[np.random.Generator]) -> list[int]:
        """The next token of each row, drawn by the first process for all.

        Logits of two processes may differ in their last digits; where one text then ended here and not there, these
        processes would wait for each other for ever.
        """
        drawn = torch.zeros(len(logits_BV), dtype=torch.int64)
        if torch.distributed.get_rank() == 0:
            logits = logits_BV[:, : self._encoder.vocab_size].double().cpu().numpy()
            logits[:, self._never] = -np.inf
            for row, row_logits in enumerate(logits):
                drawn[row] = by_chance(row_logits, dice[row // 2]) if row % 2 else int(row_logits.argmax())
        drawn = drawn.to(self._device)
        torch.distributed.broadcast(drawn, src=0)
        return [int(token) for token in drawn.tolist()]


def by_chance(logits: np.ndarray, dice: np.random.Generator) -> int:
    """A token drawn at `TEMPERATURE` from the likeliest ones, the fewest that together reach `TOP_P`."""
    scaled = np.exp((logits - logits.max()) / TEMPERATURE)
    order = np.argsort(-scaled, kind="stable")
    sums = np.cumsum(scaled[order])
    num_kept = int(np.searchsorted(sums, TOP_P * sums[-1])) + 1
    kept = sums[:num_kept]
    return int(order[np.searchsorted(kept, dice.random() * kept[-1], side="right")])


def as_markdown(samples: Sequence[Sample]) -> str:
    """The samples of one step."""
    parts = []
    for sample in samples:
        begun = markdown.code(sample.prompt) if sample.prompt.strip() else "(the start of a document)"
        parts.append(f"**{begun}**")
        parts += [
            f"{name}:\n\n{markdown.indented(text)}"
            for name, text in (("greedy", sample.greedy), ("sampled", sample.sampled))
        ]
    return "\n\n".join(parts) + "\n"


def add(run_dir: Path, step: int, samples: Sequence[Sample]) -> None:
    """Add the samples of a step to ``samples.md``, in place of any that stand there of this step or later ones."""
    forget_after(run_dir, step - 1)
    path = run_dir / FILE_NAME
    before = path.read_text(encoding="utf-8") if path.exists() else "# What the model wrote\n"
    write_text(path, f"{before}\n## step {step}\n\n{as_markdown(samples)}")


def forget_after(run_dir: Path, step: int) -> None:
    """Drop what was written behind `step`: those steps will be trained again."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8")
    later = next((part for part in _PART.finditer(text) if int(part[1]) > step), None)
    if later:
        write_text(path, text[: later.start()].rstrip("\n") + "\n")


def excerpt(text: str, characters: int = 100) -> str:
    """The beginning of a text, in one line."""
    line = _one_line(text)
    return line if len(line) <= characters else line[: characters - 1] + "…"


def _one_line(text: str) -> str:
    return " ".join(text.split())
