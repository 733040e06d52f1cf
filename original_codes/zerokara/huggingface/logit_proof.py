"""The proof that an exported model is the trained one: logits, arg max, greedy continuations, loading report.

Stock transformers, with the folder read back from disk (`reference`), and our model, with the weights of the checkpoint
rounded as the export rounds them (`streamed_model`), compute the same tokens in fp32, one after the other; neither is
ever in memory as a whole. Transformers continue prompts greedily with their cache; our model reads each prompt with its
continuation in one forward pass, and every token of it must be the arg max there. Two logits closer to each other than
twice the allowed difference between the models are a *tie*: either may win, which is counted and is no fault.

Shape suffixes: S sequence, V real vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokara.errors import RunError
from zerokara.huggingface import reference
from zerokara.huggingface.continuations import GeneratedTokens
from zerokara.huggingface.families import TORCH_DTYPES
from zerokara.huggingface.streamed_model import StreamedModel
from zerokara.huggingface.windows import BF16_SHARE, Windows
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Prompt

TOLERANCE = 1e-4
"""Largest allowed difference of a logit. Rounding of fp32 alone gives about 1e-6 to 1e-5 at logits of some units (fp32
has 7 digits, and some thousand terms are added in another order); any wrong rule gives 0.1 and more."""
SPREAD = 0.5
"""Standard deviation of the logits below which equality means little: flat logits agree whatever the rules do."""
_MIN_BF16_POSITIONS = 32


@dataclass(frozen=True)
class LogitProof:
    """The comparison in numbers; the proof holds when `faults` is empty."""

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
    """Stock transformers computing in bf16 against the trained weights in fp32: the error of bf16."""
    bf16_argmax_equal: float
    """Top-1 agreement: share of positions."""
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether there are no faults."""
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
) -> tuple[LogitProof, GeneratedTokens]:
    """Compare the exported `folder`, saved in `dtype`, with the trained `weights`; also returns what it generates.

    Raises:
        RunError: there is no text to compare on.
    """
    if not windows.tokens:
        raise RunError("the proof has no text: check_corpus gave no document of at least two tokens")
    bf16_windows = windows.first(max(_MIN_BF16_POSITIONS, windows.positions // BF16_SHARE))
    saved_as = TORCH_DTYPES[dtype]
    found = reference.compute(folder, saved_as, shape, windows, bf16_windows, prompts, num_sampled)
    device = reference.device()
    trained = StreamedModel(weights, shape, device, lambda tensor: tensor.to(saved_as).float())
    generated = found.generated
    with_generated = windows.with_prompts(generated.prompts, [tokens[:-1] for tokens in generated.greedy])
    logits = with_generated.through(trained.logits, "proof, trained model")
    expected, after_prompts = logits[: len(windows.tokens)], logits[len(windows.tokens) :]
    if dtype == "fp32":
        unrounded = [logits_SV[: len(window)] for logits_SV, window in zip(logits, bf16_windows.tokens, strict=False)]
    else:
        model = StreamedModel(weights, shape, device)
        unrounded = bf16_windows.through(model.logits, "proof, trained model before rounding")
    return _compared(found, windows, expected, after_prompts, unrounded), generated


def _compared(
    found: reference.ReferenceOutput,
    windows: Windows,
    expected: list[Tensor],
    after_prompts: list[Tensor],
    unrounded: list[Tensor],
) -> LogitProof:
    faults, notes = list(found.faults), []
    difference, worst = _largest_difference(found.logits, expected, windows)
    if not difference < TOLERANCE:
        faults.append(f"logits differ by {difference:.3g}, at most {TOLERANCE:g} is allowed; {worst}")
    greedy_ties, greedy_faults = compare_greedy(found.generated, after_prompts, 2 * TOLERANCE)
    faults += greedy_faults
    std = torch.cat([part.flatten() for part in expected]).std().item()
    if std < SPREAD:
        notes.append(f"the logits' standard deviation is {std:.2f}: equality means little for logits this flat")
    bf16_positions = sum(map(len, unrounded))
    return LogitProof(
        positions=windows.positions,
        windows=len(windows.tokens),
        tolerance=TOLERANCE,
        max_difference=difference,
        logit_std=std,
        # Where no logit differs by more than the tolerance, two that change their order are a tie.
        argmax_ties=windows.positions - _num_equal_argmax(found.logits, expected),
        greedy_prompts=len(found.generated.greedy),
        greedy_tokens=sum(map(len, found.generated.greedy)),
        greedy_ties=greedy_ties,
        tied_output=found.is_tied,
        bf16_positions=bf16_positions,
        bf16_max_difference=max(
            float((a_SV - b_SV).abs().max()) for a_SV, b_SV in zip(found.bf16_logits, unrounded, strict=True)
        ),
        bf16_argmax_equal=_num_equal_argmax(found.bf16_logits, unrounded) / bf16_positions,
        notes=notes,
        faults=faults,
    )


def _largest_difference(logits: list[Tensor], expected: list[Tensor], windows: Windows) -> tuple[float, str]:
    """The largest difference and where it is; infinite when the shapes or a number are wrong."""
    largest, worst = -1.0, ""
    for number, (exported_SV, trained_SV) in enumerate(zip(logits, expected, strict=True)):
        if exported_SV.shape != trained_SV.shape:
            return float("inf"), f"logits have shape {list(exported_SV.shape)}, must have {list(trained_SV.shape)}"
        difference_SV = (exported_SV - trained_SV).abs().nan_to_num(nan=float("inf"))
        here = float(difference_SV.max())
        if here > largest:
            position, token = divmod(int(difference_SV.argmax()), trained_SV.shape[1])
            largest = here
            worst = (
                f"worst at window {number}, position {position} (token {windows.tokens[number][position]}), "
                f"logit of token {token}: {float(exported_SV[position, token]):.6g} exported, "
                f"{float(trained_SV[position, token]):.6g} trained"
            )
    return largest, worst


def _num_equal_argmax(logits: list[Tensor], others: list[Tensor]) -> int:
    return sum(int((a_SV.argmax(-1) == b_SV.argmax(-1)).sum()) for a_SV, b_SV in zip(logits, others, strict=True))


def compare_greedy(generated: GeneratedTokens, expected: list[Tensor], tie: float) -> tuple[int, list[str]]:
    """Compare each token that transformers chose with the arg max of our model there; returns ties and faults."""
    ties, faults = 0, []
    for prompt, tokens, logits_SV in zip(generated.prompts, generated.greedy, expected, strict=True):
        after_SV = logits_SV[len(prompt.decoder_ids) - 1 :]
        for at, (token, row_V) in enumerate(zip(tokens, after_SV, strict=True)):
            best = int(row_V.argmax())
            if token == best:
                continue
            if token < len(row_V) and float(row_V[best] - row_V[token]) <= tie:
                ties += 1
                continue
            faults.append(
                f"greedy continuation of {prompt.encoder_ids or prompt.decoder_ids} differs at token {at}: "
                f"{token} exported, {best} trained"
            )
            break  # after a wrong token the two read different text
    return ties, faults
