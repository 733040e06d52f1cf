"""What step 2 knows of a tokenizer without opening it: plain values, which any process can be sent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerokara.errors import Fault, UserError


@dataclass(frozen=True)
class TokenizerFacts:
    """The values of an `Encoder` that another process has open."""

    model_path: Path
    """The `.model` file."""
    vocab_size: int
    """Number of ids."""
    eos_id: int
    """The id that ends a document."""
    run_characters: int
    """As `Encoder.run_characters`."""
    sha256: str
    """Content hash of the file."""


def check_exists(model_path: Path) -> None:
    """Check that there is a tokenizer file.

    Raises:
        UserError: there is none, or it is empty.
    """
    if not model_path.is_file():
        raise UserError(Fault(str(model_path), "there is no such tokenizer file", remedy="make one with step 1"))
    if not model_path.stat().st_size:
        raise UserError(Fault(str(model_path), "the tokenizer file is empty", remedy="make one with step 1"))
