"""Which encoder does the work of step 2, in terms that a process can hand on and hold without loading any encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from zerokara.errors import Fault, UserError

if TYPE_CHECKING:
    from zerokara.tokenizer.encoder import Encoder
    from zerokara.tokenizer.stand_in import StandIn


class Tokenizer(Protocol):
    """What is asked of an `Encoder` where nothing is encoded."""

    @property
    def model_path(self) -> Path:
        """The `.model` file."""
        ...

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        ...

    @property
    def eos_id(self) -> int:
        """The id of the end of a document."""
        ...

    @property
    def run_characters(self) -> int:
        """As `Encoder.run_characters`."""
        ...

    @property
    def sha256(self) -> str:
        """The content hash of the file."""
        ...


@dataclass(frozen=True)
class TokenizerFacts:
    """A `Tokenizer` that another process has opened."""

    model_path: Path
    vocab_size: int
    eos_id: int
    run_characters: int
    sha256: str


def facts_of(tokenizer: Tokenizer) -> TokenizerFacts:
    """The facts, to be handed to another process."""
    return TokenizerFacts(
        tokenizer.model_path, tokenizer.vocab_size, tokenizer.eos_id, tokenizer.run_characters, tokenizer.sha256
    )


@dataclass(frozen=True)
class Opener:
    """Opens an encoder in any process: picklable, and equal where the encoders are."""

    model_path: Path
    quick: bool = False
    """Whether the stand-in is meant."""
    run_characters: int | None = None
    """`Encoder.run_characters`, where it is known."""

    def __call__(self) -> Encoder | StandIn:
        """Open it."""
        from zerokara.tokenizer.encoder import Encoder
        from zerokara.tokenizer.stand_in import StandIn

        return StandIn(self.model_path) if self.quick else Encoder(self.model_path, self.run_characters)


@dataclass(frozen=True)
class Choice:
    """The encoder that does the work."""

    encoder: Any
    """Opened, for this process; None where another process has it."""
    open_encoder: Callable[[], Any]
    """Opens it in any other; most often an `Opener`."""
    name: str
    """`sentencepiece` or `gigatoken`, with the version."""
    word: str
    """Why this one, for the log."""


def plain(tokenizer: Tokenizer, word: str) -> Choice:
    """SentencePiece itself."""
    opener = Opener(tokenizer.model_path, run_characters=tokenizer.run_characters)
    return Choice(tokenizer, opener, f"sentencepiece {version_of('sentencepiece')}", word)


def version_of(package: str) -> str:
    """The version of an installed package."""
    from importlib.metadata import version  # the workers need it not, and it takes as long as the rest of this module

    return version(package)


class StandInDiffersError(Exception):
    """The stand-in gave other ids than SentencePiece, after it had been proved equal on a sample."""

    def __init__(self, excerpt: str) -> None:
        super().__init__(excerpt)
        self.excerpt = excerpt


def check_there(model_path: Path) -> None:
    """Check that there is a tokenizer file.

    Raises:
        UserError: there is none, or it is empty.
    """
    if not model_path.is_file():
        raise UserError(Fault(str(model_path), "there is no such tokenizer file", remedy="make one with step 1"))
    if not model_path.stat().st_size:
        raise UserError(Fault(str(model_path), "the tokenizer file is empty", remedy="make one with step 1"))
