"""The proof that an exported model is the trained one: logits, arg max, greedy continuation, loading report (X1).

Our model, with the weights of the checkpoint rounded as the export rounds them, and stock transformers, with the
folder read back from disk, compute the same tokens in fp32. Ours goes first and leaves memory before the other is
loaded, so that the proof needs one fp32 copy of the weights at a time. Two values closer to each other than twice the
largest difference between the models are a *tie*: either may win, which is counted and not held against the export.

Shape suffixes: B batch, S sequence, V real vocabulary.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokara.errors import RunError
from zerokara.export.families import TORCH_DTYPES
from zerokara.model import megatron, parallel
from zerokara.model.shapes import ModelShape
from zerokara.progress import Progress

TOLERANCE = 1e-4
"""Largest difference of a logit. Rounding of fp32 alone gives about 1e-6 to 1e-5 at logits of some units (float32 has
7 digits and some thousand terms are added in another order); any wrong rule gives 0.1 and more."""
SPREAD = 0.5
"""Standard deviation of the logits under which equality says little: flat logits agree whatever the rules do."""
NEW_TOKENS = 24
"""Length of the greedy continuations; at least 20 are asked for."""
LOGITS_BUDGET = 32_000_000
"""Logits held in memory at once, 128 MB of fp32: with a large vocabulary fewer tokens are compared."""
MAX_POSITIONS = 2048
"""Tokens compared at most: a wrong rule shows at once, and a large model on a CPU takes seconds for each hundred."""


@dataclass(frozen=True)
class Greedy:
    """A continuation by plain full forward passes; `gaps` are the leads of each token over the second best."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


@dataclass(frozen=True)
class Reference:
    """What our model computes; logits per window [S, V], fp32, on the CPU."""

    windows: list[list[int]]
    logits: list[Tensor]
    trained_logits: list[Tensor]
    """Of the unrounded fp32 weights; the same tensors as `logits` when the export keeps fp32."""
    greedy: list[Greedy]


@dataclass(frozen=True)
class LogitProof:
    """The comparison in numbers; it holds when `faults` is empty."""

    positions: int
    windows: int
    tolerance: float
    max_difference: float
    logit_std: float
    argmax_ties: int
    greedy_prompts: int
    greedy_tokens: int
    greedy_ties: int
    tied_output: bool
    bf16_max_difference: float
    """Stock transformers computing in bf16 against the trained fp32 weights in fp32: what bf16 costs."""
    bf16_argmax_equal: float
    """Share of positions."""
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against the export."""
        return not self.faults

    def as_json(self) -> dict[str, Any]:
        """All numbers, and whether the proof holds."""
        return {"holds": self.holds, **asdict(self)}


def device() -> torch.device:
    """Where the proof computes: a GPU, where there is one, also for megatron-core, which asks for it."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def windows_within_budget(documents: Sequence[Sequence[int]], shape: ModelShape) -> list[list[int]]:
    """Cut documents into windows of at most `seq_len` tokens, as many as the budget of logits allows."""
    left = min(MAX_POSITIONS, max(2, LOGITS_BUDGET // shape.padded_vocab_size))
    windows = []
    for document in documents:
        for start in range(0, len(document), shape.seq_len):
            window = [int(token) for token in document[start : start + min(shape.seq_len, left)]]
            if len(window) > 1:
                windows.append(window)
                left -= len(window)
            if left < 2:
                return windows
    return windows


def reference(
    weights: Mapping[str, Tensor],
    shape: ModelShape,
    dtype: str,
    windows: list[list[int]],
    prompts: list[list[int]],
) -> Reference:
    """Compute with our own module what the export must reproduce.

    Raises:
        RunError: there is no text to compare on.
    """
    if not windows:
        raise RunError("the proof has no text: not one document of two tokens came from the check corpus")
    parallel.start_alone()
    model = _our_model(weights, shape).to(device()).eval()
    with torch.inference_mode(), Progress("proof, trained model", unit="window") as progress:
        trained = [_our_logits(model, window, shape, progress) for window in windows]
        logits = trained
        if dtype != "fp32":
            for parameter in model.parameters():
                parameter.copy_(parameter.to(TORCH_DTYPES[dtype]))
            logits = [_our_logits(model, window, shape, progress) for window in windows]
        greedy = [_our_greedy(model, prompt, shape, progress) for prompt in prompts if prompt]
    del model
    _give_memory_back()
    return Reference(windows, logits, trained, greedy)


def load(folder: Path) -> tuple[Any, list[str]]:
    """Load an exported folder in fp32 with stock transformers; also gives what loading complained about."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    complaints = [f"loading reports {name}: {sorted(map(str, found))}" for name, found in report.items() if found]
    return model.to(device()).eval(), complaints


def compare(model: Any, complaints: list[str], expected: Reference, shape: ModelShape) -> LogitProof:
    """Compare stock transformers' `model` with ours; afterwards the model is in bf16."""
    faults, notes = list(complaints), []
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    for name, found, must in (
        ("tied output matrix", tied, shape.tie_word_embeddings),
        ("tie_word_embeddings in config.json", model.config.tie_word_embeddings, shape.tie_word_embeddings),
        ("vocabulary", model.config.vocab_size, shape.vocab_size),
    ):
        if found != must:
            faults.append(f"{name} is {found}, must be {must}")
    with Progress("proof, exported model", len(expected.windows), unit="window") as progress:
        logits = [_hf_logits(model, window, progress) for window in expected.windows]
    difference, worst = _largest_difference(logits, expected)
    if not difference < TOLERANCE:
        faults.append(f"logits differ by {difference:.3g}, at most {TOLERANCE:g} is allowed; {worst}")
    argmax_ties, argmax_faults = _compare_argmax(logits, expected, 2 * min(difference, TOLERANCE))
    greedy_ties, greedy_faults = _compare_greedy(model, expected, 2 * TOLERANCE)
    faults += argmax_faults + greedy_faults
    std = torch.cat([part.flatten() for part in expected.logits]).std().item()
    if std < SPREAD:
        notes.append(f"the logits' standard deviation is {std:.2f}: on so flat a model equality says little")
    model.to(torch.bfloat16)
    with Progress("proof, exported model in bf16", len(expected.windows), unit="window") as progress:
        bf16 = [_hf_logits(model, window, progress) for window in expected.windows]
    trained = expected.trained_logits
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in zip(bf16, trained, strict=True))
    positions = sum(len(window) for window in expected.windows)
    return LogitProof(
        positions=positions,
        windows=len(expected.windows),
        tolerance=TOLERANCE,
        max_difference=difference,
        logit_std=std,
        argmax_ties=argmax_ties,
        greedy_prompts=len(expected.greedy),
        greedy_tokens=sum(len(each.tokens) for each in expected.greedy),
        greedy_ties=greedy_ties,
        tied_output=tied,
        bf16_max_difference=max(float((a - b).abs().max()) for a, b in zip(bf16, trained, strict=True)),
        bf16_argmax_equal=same / positions,
        notes=notes,
        faults=faults,
    )


def _our_model(weights: Mapping[str, Tensor], shape: ModelShape) -> megatron.Decoder:
    """Build our module and fill it tensor by tensor."""
    model = megatron.build(shape)
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys(), "the rules were checked against these weights"
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    return model


def _give_memory_back() -> None:
    """Return freed memory to the system: glibc would keep a model's worth of it while the next model takes its own."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _our_logits(model: megatron.Decoder, window: list[int], shape: ModelShape, progress: Progress) -> Tensor:
    progress.advance()
    logits_BSV = model(torch.tensor([window], device=device()))
    # The rows that pad the vocabulary never win (M4), and the exported model does not have them.
    return logits_BSV[0, :, : shape.vocab_size].float().cpu()


def _hf_logits(model: Any, window: list[int], progress: Progress) -> Tensor:
    progress.advance()
    with torch.inference_mode():
        return model(torch.tensor([window], device=device())).logits[0].float().cpu()


def _our_greedy(model: megatron.Decoder, prompt: list[int], shape: ModelShape, progress: Progress) -> Greedy:
    new_tokens = min(NEW_TOKENS, shape.seq_len - 1)
    prompt = prompt[-(shape.seq_len - new_tokens) :]
    tokens: list[int] = []
    gaps: list[float] = []
    for _ in range(new_tokens):
        best = _our_logits(model, prompt + tokens, shape, progress)[-1].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
    return Greedy(prompt, tokens, gaps)


def _largest_difference(logits: list[Tensor], expected: Reference) -> tuple[float, str]:
    """The largest difference and where it is; infinite when the shapes or a number are wrong."""
    largest, worst = -1.0, ""
    for number, (found_SV, must_SV) in enumerate(zip(logits, expected.logits, strict=True)):
        if found_SV.shape != must_SV.shape:
            return float("inf"), f"logits have shape {list(found_SV.shape)}, must have {list(must_SV.shape)}"
        difference_SV = (found_SV - must_SV).abs().nan_to_num(nan=float("inf"))
        here = float(difference_SV.max())
        if here > largest:
            position, token = divmod(int(difference_SV.argmax()), must_SV.shape[1])
            largest = here
            worst = (
                f"worst at window {number}, position {position} (token {expected.windows[number][position]}), "
                f"logit of token {token}: {float(found_SV[position, token]):.6g} exported, "
                f"{float(must_SV[position, token]):.6g} trained"
            )
    return largest, worst


def _compare_argmax(logits: list[Tensor], expected: Reference, tie: float) -> tuple[int, list[str]]:
    ties, faults = 0, []
    for number, (found_SV, must_SV) in enumerate(zip(logits, expected.logits, strict=True)):
        if found_SV.shape != must_SV.shape:
            continue
        found_S, must_S = found_SV.argmax(-1), must_SV.argmax(-1)
        for position in (found_S != must_S).nonzero().flatten().tolist():
            row_V = must_SV[position]
            if float(row_V[must_S[position]] - row_V[found_S[position]]) <= tie:
                ties += 1
            else:
                faults.append(
                    f"the likeliest token differs at window {number}, position {position}: "
                    f"{int(found_S[position])} exported, {int(must_S[position])} trained"
                )
    if len(faults) > 1:
        faults = [f"{faults[0]} (and at {len(faults) - 1} more positions)"]
    return ties, faults


def _compare_greedy(model: Any, expected: Reference, tie: float) -> tuple[int, list[str]]:
    from transformers import GenerationConfig

    ties, faults = 0, []
    own = model.generation_config
    for each in expected.greedy:
        # Generation goes on beyond eos, so that all prompts give the same number of tokens to compare.
        model.generation_config = GenerationConfig(
            do_sample=False, max_new_tokens=len(each.tokens), pad_token_id=own.pad_token_id
        )
        prompt_BS = torch.tensor([each.prompt], device=device())
        found = model.generate(prompt_BS, attention_mask=torch.ones_like(prompt_BS))[0, len(each.prompt) :].tolist()
        if found == each.tokens:
            continue
        at = next((i for i, (a, b) in enumerate(zip(found, each.tokens, strict=False)) if a != b), len(found))
        if at < len(found) and each.gaps[at] <= tie:
            ties += 1
        else:
            faults.append(
                f"greedy continuation of {each.prompt} differs from token {at} on: "
                f"{found[at : at + 5]} exported, {each.tokens[at : at + 5]} trained"
            )
    model.generation_config = own
    return ties, faults
