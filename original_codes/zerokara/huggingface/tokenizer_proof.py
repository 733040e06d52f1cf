"""Proof that the Hugging Face tokenizer gives the ids that training used, on the user's own text and on hard strings.

In: the encoder that training used, a folder with `tokenizer.json`, texts. Out: a `TokenizerProof`, which the export
prints, and without which it fails. The folder is loaded by stock `AutoTokenizer`, and called with
`split_special_tokens=True`, so that text is text; transformers 5.23 hands that to tokenizers' `encode_special_tokens`.
By default it reads "</s>" in a text as the control token, as its users expect; T5's sentinel tokens are compared that
way.

Equal means the same ids. For unigram models a line may be a *tie*: the same text in other pieces with the same total
score (in float64, within 1e-6 relative), which two correct implementations may break differently. Models of step 1
have scores that sum without rounding, so that both break ties alike; other models do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import fsum, isclose
from pathlib import Path
from typing import Any

from zerokara.progress import Progress
from zerokara.tokenizer.compatibility import hard_texts
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.model_file import NEWLINE, PieceType

TIE_TOLERANCE = 1e-6
MAX_TIE_SHARE = 0.001
"""Ties tolerated, as a share of the lines compared."""
MAX_SHOWN = 10
"""Failures and ties kept as examples."""
MAX_TEXT_CHARACTERS = 100_000
"""A longer text is compared line by line only: as a whole it would take the vendor too long."""
_BATCH = 256


@dataclass
class TokenizerProof:
    """The result of a comparison."""

    lines: int = 0
    """Lines of the given texts that were compared one by one."""
    whole_texts: int = 0
    """Texts of several lines that were also compared as a whole."""
    hard_texts: int = 0
    """Hard texts compared; their ties are tolerated, their failures are among the failures."""
    equal: int = 0
    """Lines with the same ids."""
    ties: int = 0
    """Lines that differ by a tie only (unigram)."""
    num_failures: int = 0
    failures: list[str] = field(default_factory=list)
    """The first differences that are not ties: of ids, or of the text that they decode to."""
    tie_examples: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the tokenizer gives the ids of training, so that it may be published."""
        return not self.num_failures and self.ties <= max(1, MAX_TIE_SHARE * self.lines)

    def __str__(self) -> str:
        text = (
            f"{self.lines:,} lines: {self.equal:,} equal, {self.ties:,} ties, {self.num_failures:,} failures; "
            f"also {self.whole_texts:,} whole texts and {self.hard_texts} hard texts"
        )
        if self.num_failures:
            return f"{text}; first failure: {self.failures[0]}"
        return text if self.ok else f"{text}; more ties than {MAX_TIE_SHARE:.1%} of the lines: {self.tie_examples[0]}"

    def as_json(self, examples: bool = False) -> dict[str, Any]:
        """All counts, and whether the proof holds; `examples` adds texts that differ."""
        names = ("lines", "whole_texts", "hard_texts", "equal", "ties")
        counts = {"holds": self.ok, **{name: getattr(self, name) for name in names}, "failures": self.num_failures}
        return counts | ({"examples": [*self.failures, *self.tie_examples]} if examples else {})


def prove(encoder: Encoder, hf_folder: Path, texts: Iterable[str], max_lines: int = 10_000) -> TokenizerProof:
    """Compare the two on the hard texts, and on the given texts until `max_lines` lines are done.

    A text of several lines is compared line by line and as a whole.
    """
    hard = hard_texts(encoder)
    proof, theirs = TokenizerProof(hard_texts=len(hard)), load(hf_folder)
    _compare(proof, encoder, theirs, hard)
    for sentinel in encoder.sentinel_ids:  # as users spell one: its one id, without a space before it
        text = f"a {encoder.piece(sentinel)} b"
        ours = [*encoder.encode("a").tolist(), sentinel, *encoder.encode(" b").tolist()]
        found = list(theirs(text, add_special_tokens=False)["input_ids"])
        if found != ours:
            proof.num_failures += 1
            _keep(proof.failures, "ids", text, ours, found)
    remaining = iter(texts)
    with Progress("comparing token ids", total=max_lines, unit="line") as progress:
        while proof.lines < max_lines and (batch := list(islice(remaining, _BATCH))):
            wholes = [text for text in batch if NEWLINE in text and len(text) <= MAX_TEXT_CHARACTERS]
            _compare(proof, encoder, theirs, wholes)
            proof.whole_texts += len(wholes)
            single = [line for text in batch for line in text.split(NEWLINE)][: max_lines - proof.lines]
            num_equal, num_tied = _compare(proof, encoder, theirs, single)
            proof.equal += num_equal
            proof.ties += num_tied
            proof.lines += len(single)
            progress.advance(len(single))
            progress.note(ties=proof.ties, failures=proof.num_failures)
    return proof


def load(hf_folder: Path) -> Any:
    """Load the tokenizer as any user of the folder does."""
    from transformers import AutoTokenizer  # seconds to import

    return AutoTokenizer.from_pretrained(str(hf_folder), local_files_only=True, trust_remote_code=False)


def _compare(proof: TokenizerProof, encoder: Encoder, theirs: Any, texts: Sequence[str]) -> tuple[int, int]:
    """Compare the texts, and keep in `proof` what fails; returns how many are equal, and how many are ties."""
    num_equal = num_tied = 0
    # Not verbose: a text longer than the context length is no fault here.
    asked = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    found = theirs(list(texts), **asked, return_attention_mask=False)["input_ids"] if texts else []
    for text, our_array, their_ids in zip(texts, encoder.encode_many(texts), found, strict=True):
        ours = our_array.tolist()
        if ours != their_ids and _is_tie(encoder, ours, their_ids):
            num_tied += 1
            _keep(proof.tie_examples, "tie", text, ours, their_ids)
        elif ours != their_ids:
            proof.num_failures += 1
            _keep(proof.failures, "ids", text, ours, their_ids)
        # Each decodes <unk> differently, and it is no text of the user anyway.
        elif encoder.unk_id not in ours and theirs.decode(ours, skip_special_tokens=True) != encoder.decode(ours):
            proof.num_failures += 1
            _keep(proof.failures, "decoded text", text, ours, their_ids)
        else:
            num_equal += 1
    return num_equal, num_tied


def _is_tie(encoder: Encoder, ours: list[int], theirs: list[int]) -> bool:
    """Whether these different ids are the same text in other pieces of the same total score."""
    pieces = encoder.model.pieces

    def total(ids: list[int]) -> float:
        return fsum(pieces[i].score for i in ids if pieces[i].type is PieceType.NORMAL)

    def fixed(ids: list[int]) -> list[int]:
        """Bytes, symbols and line ends."""
        return [i for i in ids if pieces[i].type is not PieceType.NORMAL]

    if not encoder.model.is_unigram or encoder.decode(ours) != encoder.decode(theirs) or fixed(ours) != fixed(theirs):
        return False
    return isclose(total(ours), total(theirs), rel_tol=TIE_TOLERANCE)


def _keep(examples: list[str], what: str, text: str, ours: list[int], theirs: list[int]) -> None:
    """Keep a text for which the two differ in `what`, with the ids around the first that differs."""
    if len(examples) < MAX_SHOWN:
        pairs = enumerate(zip(ours, theirs, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
        window = slice(max(0, place - 3), place + 5)
        shown = text if len(text) <= 80 else text[:77] + "..."
        examples.append(f"{what} of {shown!r} at token {place}: ours {ours[window]}, theirs {theirs[window]}")
