"""The range of training tokens that each source has in the .bin: one after another, in the order of the manifest.

A source is an entry of `input_jsonl`. Example, sources of 100 and 40 tokens: tokens 0 … 99 and 100 … 139 of the .bin.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerokara import manifest
from zerokara.errors import Fault, UserError
from zerokara.tokens.indexed import read_header
from zerokara.tokens.layout import TokenPaths, bin_path


@dataclass(frozen=True)
class TokenSource:
    """The training tokens of one source."""

    name: str
    """Its entry of `input_jsonl`, as it was when step 2 ran."""
    first_token: int
    """Index of its first token in the .bin."""
    num_tokens: int
    num_valid_tokens: int = 0
    """Tokens of its validation documents, which have a .bin of their own, in the same order."""

    @property
    def end_token(self) -> int:
        """Index of the next source's first token."""
        return self.first_token + self.num_tokens


def read_sources(output_prefix: str) -> tuple[TokenSource, ...]:
    """Read the sources from the manifest of step 2, and check that together they make up the .bin.

    Raises:
        UserError: step 2 has not finished, or its manifest and the .bin disagree.
    """
    paths = TokenPaths(output_prefix)
    header, data = read_header(paths.train), bin_path(paths.train)
    sources: list[TokenSource] = []
    for each in manifest.read(paths.manifest).facts.get("sources", []):
        first = sources[-1].end_token if sources else 0
        sources.append(
            TokenSource(each["entry"], first, each["train"]["tokens"], each.get("valid", {}).get("tokens", 0))
        )
    num_tokens, expected = data.stat().st_size // header.id_bytes, sum(source.num_tokens for source in sources)
    if num_tokens != expected:
        rule = f"lists {expected:,} training tokens; {data} holds {num_tokens:,}"
        raise UserError(Fault(str(paths.manifest), rule, remedy="tokenize again: step 2 with --redo"))
    return tuple(sources)
