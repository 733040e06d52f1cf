"""The proof that an exported model is the trained one: logits, arg max, greedy continuation, loading report.

Stock transformers, with the folder read back from disk (`stock`), and our model, with the weights of the checkpoint
rounded as the export rounds them (`streamed`), compute the same tokens in fp32, one after the other; neither is ever in
memory as a whole. Transformers continue prompts greedily with their cache; ours reads each prompt with its continuation
once, and every token of it must be ours' likeliest in its place. Two values closer to each other than twice the largest
difference between the models are a *tie*: either may win, which is counted and not held against the export.

Shape suffixes: S sequence, V real vocabulary.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokara.errors import RunError
from zerokara.huggingface import reference
from zerokara.huggingface.continuations import Continued
from zerokara.huggingface.families import TORCH_DTYPES
from zerokara.huggingface.streamed import StreamedModel
from zerokara.huggingface.windows import BF16_SHARE, Windows
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Prompt

TOLERANCE = 1e-4
"""Largest difference of a logit. Rounding of fp32 alone gives about 1e-6 to 1e-5 at logits of some units (float32 has
7 digits and some thousand terms are added in another order); any wrong rule gives 0.1 and more."""
SPREAD = 0.5
"""Standard deviation of the logits under which equality says little: flat logits agree whatever the rules do."""
_MIN_BF16_POSITIONS = 32


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
    bf16_positions: int
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


def prove(
    folder: Path,
    weights: Mapping[str, Tensor],
    shape: ModelShape,
    dtype: str,
    windows: Windows,
    prompts: list[Prompt],
    num_sampled: int = 0,
) -> tuple[LogitProof, Continued]:
    """Compare the exported `folder`, saved in `dtype`, with the trained `weights`; also gives what it says.

    Raises:
        RunError: there is no text to compare on.
    """
    if not windows.tokens:
        raise RunError("the proof has no text: not one document of two tokens came from the check corpus")
    in_bf16 = windows.first(max(_MIN_BF16_POSITIONS, windows.positions // BF16_SHARE))
    found = reference.compute(folder, TORCH_DTYPES[dtype], shape, windows, in_bf16, prompts, num_sampled)
    _give_memory_back()

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(TORCH_DTYPES[dtype]).float()

    ours = StreamedModel(weights, shape, reference.device(), rounded if dtype != "fp32" else lambda tensor: tensor)
    said = found.continued
    spoken = windows.and_more(said.prompts, [tokens[:-1] for tokens in said.greedy])
    logits = spoken.through(ours.logits, "proof, trained model")
    trained = [logits_SV[: len(window)] for logits_SV, window in zip(logits, in_bf16.tokens, strict=False)]
    if dtype != "fp32":
        unrounded = StreamedModel(weights, shape, reference.device())
        trained = in_bf16.through(unrounded.logits, "proof, trained model before rounding")
    _give_memory_back()
    return _compared(found, windows, logits[: len(windows.tokens)], logits[len(windows.tokens) :], trained, shape), said


def _compared(
    found: reference.Exported,
    windows: Windows,
    expected: list[Tensor],
    spoken: list[Tensor],
    trained: list[Tensor],
    shape: ModelShape,
) -> LogitProof:
    faults, notes = list(found.complaints), []
    for name, value, must in (
        ("tied output matrix", found.tied, shape.tie_word_embeddings),
        ("tie_word_embeddings in config.json", found.config_tied, shape.tie_word_embeddings),
        ("vocabulary", found.vocab_size, shape.vocab_size),
    ):
        if value != must:
            faults.append(f"{name} is {value}, must be {must}")
    difference, worst = _largest_difference(found.logits, expected, windows)
    if not difference < TOLERANCE:
        faults.append(f"logits differ by {difference:.3g}, at most {TOLERANCE:g} is allowed; {worst}")
    argmax_ties, argmax_faults = _compare_argmax(found.logits, expected, 2 * min(difference, TOLERANCE))
    greedy_ties, greedy_faults = _compare_greedy(found.continued, spoken, 2 * TOLERANCE)
    faults += argmax_faults + greedy_faults
    std = torch.cat([part.flatten() for part in expected]).std().item()
    if std < SPREAD:
        notes.append(f"the logits' standard deviation is {std:.2f}: on so flat a model equality says little")
    in_bf16 = list(zip(found.bf16_logits, trained, strict=True))
    bf16_positions = sum(len(logits_SV) for logits_SV in trained)
    same = sum(int((a.argmax(-1) == b.argmax(-1)).sum()) for a, b in in_bf16)
    return LogitProof(
        positions=windows.positions,
        windows=len(windows.tokens),
        tolerance=TOLERANCE,
        max_difference=difference,
        logit_std=std,
        argmax_ties=argmax_ties,
        greedy_prompts=len(found.continued.greedy),
        greedy_tokens=sum(map(len, found.continued.greedy)),
        greedy_ties=greedy_ties,
        tied_output=found.tied,
        bf16_positions=bf16_positions,
        bf16_max_difference=max(float((a - b).abs().max()) for a, b in in_bf16),
        bf16_argmax_equal=same / bf16_positions,
        notes=notes,
        faults=faults,
    )


def _give_memory_back() -> None:
    """Return freed memory to the system: glibc would keep what the next model does not need."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


def _largest_difference(logits: list[Tensor], expected: list[Tensor], windows: Windows) -> tuple[float, str]:
    """The largest difference and where it is; infinite when the shapes or a number are wrong."""
    largest, worst = -1.0, ""
    for number, (found_SV, must_SV) in enumerate(zip(logits, expected, strict=True)):
        if found_SV.shape != must_SV.shape:
            return float("inf"), f"logits have shape {list(found_SV.shape)}, must have {list(must_SV.shape)}"
        difference_SV = (found_SV - must_SV).abs().nan_to_num(nan=float("inf"))
        here = float(difference_SV.max())
        if here > largest:
            position, token = divmod(int(difference_SV.argmax()), must_SV.shape[1])
            largest = here
            worst = (
                f"worst at window {number}, position {position} (token {windows.tokens[number][position]}), "
                f"logit of token {token}: {float(found_SV[position, token]):.6g} exported, "
                f"{float(must_SV[position, token]):.6g} trained"
            )
    return largest, worst


def _compare_argmax(logits: list[Tensor], expected: list[Tensor], tie: float) -> tuple[int, list[str]]:
    ties, faults = 0, []
    for number, (found_SV, must_SV) in enumerate(zip(logits, expected, strict=True)):
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


def _compare_greedy(said: Continued, expected: list[Tensor], tie: float) -> tuple[int, list[str]]:
    """Each token that transformers chose must be the likeliest that ours has in its place, or tie with it."""
    ties, faults = 0, []
    for prompt, tokens, logits_SV in zip(said.prompts, said.greedy, expected, strict=True):
        after_SV = logits_SV[len(prompt.decoder_ids) - 1 :]
        for at, (token, row_V) in enumerate(zip(tokens, after_SV, strict=True)):
            best = int(row_V.argmax())
            if token == best:
                continue
            if token < len(row_V) and float(row_V[best] - row_V[token]) <= tie:
                ties += 1
                continue
            what = prompt.encoder_ids or prompt.decoder_ids
            faults.append(f"greedy continuation of {what} differs at token {at}: {token} exported, {best} trained")
            break  # what follows a wrong token says nothing more
    return ties, faults
