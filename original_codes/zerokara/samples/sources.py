"""Where each source lies in the training tokens: one after another, as step 2 wrote them and its manifest says.

A source is an entry of `input_jsonl`. Example, sources of 100 and 40 tokens: tokens 0 … 99 and 100 … 139 of the .bin.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerokara import manifest
from zerokara.errors import Fault, UserError
from zerokara.tokens.header import read_header
from zerokara.tokens.layout import TokenPaths, bin_path


@dataclass(frozen=True)
class Source:
    """One source's training documents."""

    name: str
    """Its entry of `input_jsonl`, as it was when step 2 ran."""
    first_token: int
    """Where it begins in the .bin."""
    num_tokens: int
    num_valid_tokens: int = 0
    """Of its validation documents, which lie in their own .bin in the same order."""

    @property
    def end_token(self) -> int:
        """Where the next source begins."""
        return self.first_token + self.num_tokens


def read_sources(output_prefix: str) -> tuple[Source, ...]:
    """Read the sources from the manifest of step 2, and see that together they are the .bin.

    Raises:
        UserError: step 2 has not ended, or its manifest and the .bin do not agree.
    """
    paths = TokenPaths(output_prefix)
    header, data = read_header(paths.train), bin_path(paths.train)
    sources: list[Source] = []
    for each in manifest.read(paths.manifest).facts.get("sources", []):
        first = sources[-1].end_token if sources else 0
        sources.append(Source(each["entry"], first, each["train"]["tokens"], each.get("valid", {}).get("tokens", 0)))
    there, known = data.stat().st_size // header.id_bytes, sum(source.num_tokens for source in sources)
    if there != known:
        rule = f"says that the sources have {known:,} training tokens; {data} holds {there:,}"
        raise UserError(Fault(str(paths.manifest), rule, remedy="make both again: step 2 with --redo"))
    return tuple(sources)
