"""Sample texts during training: the model continues each of `sample_prompts` at each validation.

Each prompt is continued twice: greedily, and sampled with the same random numbers at every step. For span corruption
the decoder's output is shown. Neither training's random numbers nor any weight is touched.

There is no cache: every token is a forward pass over all texts so far. So every family can be sampled, and no process
needs the whole model, which under ZeRO 3 or tensor parallelism might not fit. It costs as much as training on
``2 × prompts × (prompt + sample_tokens) × sample_tokens / 6`` tokens.

``samples.md`` in the run folder has a section ``## step 100`` for each step. Texts are blocks of code: none can look
like a section, or be rendered as markup by a viewer or TensorBoard.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from zerokara.base.durable import write_file
from zerokara.base.progress import indented
from zerokara.config.pretrain_config import RunConfig
from zerokara.config.settings import resolved
from zerokara.huggingface.generation import arguments
from zerokara.samples.objective import Objective, Prompt
from zerokara.samples.packed_examples import Pairs
from zerokara.tokenizer.encoder import Encoder

FILE_NAME = "samples.md"
TEMPERATURE, TOP_P = 0.8, 0.95
_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""cuDNN prepares each new length anew, 23 to 37 ms, at every token that is sampled."""
_SECTION = re.compile(r"^## step (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Sample:
    """A prompt and the model's two continuations, without the prompt."""

    prompt: str
    greedy: str
    sampled: str


class Sampler:
    """The prompts of a run."""

    def __init__(self, encoder: Encoder, objective: Objective | Pairs, config: RunConfig, device: torch.device):
        self._encoder, self._seed, self._device = encoder, config.seed, device
        self._texts = resolved(config.sample_prompts)
        self._num_tokens = min(config.sample_tokens, objective.lengths.input - 1)
        prompts = [objective.prompt(encoder, text, self._num_tokens) for text in self._texts]
        self._prompts = [prompt for prompt in prompts for _ in range(2)]  # greedy, then sampled
        self._never = sorted(encoder.special_ids - {encoder.eos_id, *objective.sentinel_ids})

    def __call__(self, module: torch.nn.Module) -> list[Sample]:
        """Continue every prompt; every process must call it."""
        end, generator = self._encoder.eos_id, torch.Generator().manual_seed(self._seed)
        written: list[list[int]] = [[] for _ in self._prompts]
        module.eval()
        with torch.no_grad(), sdpa_kernel(_WITHOUT_CUDNN):
            for _ in range(self._num_tokens):
                pairs = zip(self._prompts, written, strict=True)
                texts = [Prompt(prompt.encoder_ids, prompt.decoder_ids + new) for prompt, new in pairs]
                ids, named = arguments(texts, self._device, "encoder_attention_mask_BS", "decoder_input_ids_BT")
                at_B = torch.tensor([len(text.decoder_ids) - 1 for text in texts], device=self._device)
                logits_BV = module(ids, **named, at_B=at_B)[:, 0]
                chosen_B = torch.zeros(len(written), dtype=torch.int64)
                # The first process chooses for all. Logits of two processes may differ in their last digits: a text
                # could end in one of them and not in the other, and they would wait for each other forever.
                if torch.distributed.get_rank() == 0:
                    logits_BV = logits_BV[:, : self._encoder.vocab_size].double().cpu()
                    logits_BV = logits_BV.nan_to_num(0.0, 1e9, -1e9)  # a broken model is sampled too
                    logits_BV[:, self._never] = -torch.inf
                    chosen_B[0::2] = logits_BV[0::2].argmax(dim=-1)
                    chosen_B[1::2] = sample_top_p(logits_BV[1::2], generator)
                chosen_B = chosen_B.to(self._device)
                torch.distributed.broadcast(chosen_B, src=0)
                for tokens, token in zip(written, chosen_B.tolist(), strict=True):
                    tokens.append(token)
                if all(end in tokens for tokens in written):
                    break
        module.train()
        decoded = [self._encoder.decode_continuation(list(takewhile(end.__ne__, tokens))) for tokens in written]
        return [Sample(*texts) for texts in zip(self._texts, decoded[0::2], decoded[1::2], strict=True)]


def sample_top_p(logits_BV: Tensor, generator: torch.Generator) -> Tensor:
    """Sample a token of each row at `TEMPERATURE` from the smallest set of tokens whose probability reaches `TOP_P`."""
    sorted_BV, order_BV = (logits_BV / TEMPERATURE).softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    sorted_BV[sorted_BV.cumsum(dim=-1) - sorted_BV >= TOP_P] = 0
    return order_BV.gather(1, torch.multinomial(sorted_BV, 1, generator=generator)).squeeze(1)


def as_markdown(samples: Sequence[Sample]) -> str:
    """The samples of one step as Markdown."""
    parts = []
    for sample in samples:
        prompt = sample.prompt if sample.prompt.strip() else "(the start of a document)"
        for name, text in (("**prompt:**", prompt), ("greedy:", sample.greedy), ("sampled:", sample.sampled)):
            parts.append(f"{name}\n\n{indented(text)}")
    return "\n\n".join(parts) + "\n"


def add(run_dir: Path, step: int, samples: Sequence[Sample]) -> None:
    """Add the samples of a step to ``samples.md``; they replace those of this and later steps."""
    path = run_dir / FILE_NAME
    text = path.read_text(encoding="utf-8") if path.exists() else "# What the model wrote\n"
    later = (section.start() for section in _SECTION.finditer(text) if int(section[1]) >= step)
    before = text[: next(later, None)].rstrip("\n")
    write_file(path, f"{before}\n\n## step {step}\n\n{as_markdown(samples)}")


def excerpt(text: str, max_characters: int = 100) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= max_characters else line[: max_characters - 1] + "…"
