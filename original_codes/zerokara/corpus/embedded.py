"""The embedded corpus: real English prose that every installation has, so that the line can be tried offline.

``python -m zerokara.corpus.embedded OUTPUT.jsonl`` writes it, unless the file exists: JSON lines ``{"text": ...,
"source": "networkx.generators.trees"}``, one for each module of the standard library and of the installed packages,
none of which is imported: the paragraphs of its docstrings that are prose. Left out are tests, vendored code, licences,
repeated paragraphs, and all beyond `MAX_PACKAGE_CHARACTERS` of a package. The same installation gives the same bytes.
"""

import hashlib
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import orjson

from zerokara.base.durable import atomic_file
from zerokara.base.progress import bytes_text

MAX_PACKAGE_CHARACTERS = 500_000
MIN_DOCUMENT_CHARACTERS = 200
MAX_SOURCE_BYTES = 1_000_000
"""Larger sources are generated tables."""
MIN_WORDS, MIN_FUNCTION_WORDS = 5, 0.2
"""Minimum words of a paragraph, and share of function words, which names of code and enumerations lack."""
_SKIPPED = re.compile(
    r"tests?|testing|test_.*|.*_tests?|conftest|setup|examples?|_?vendor(ed|ized)?|third_party|externals?|extern|"
    r".*_pb2(_grpc)?|.*\.(dist|egg)-info|(site|dist)-packages|pip|idlelib|pydoc_data|zerokara",
    re.IGNORECASE,
)
"""Folders and modules, at any depth."""
_LICENCE = re.compile(r"copyright|licen[cs]ed under|redistribution and use|permission is hereby granted", re.IGNORECASE)
_MARKUP = re.compile(r":[a-z:+-]+:(?=`)|[`*~]")
_PARAGRAPH = re.compile(r"[A-Z](?:[A-Za-z0-9 ,.;:'\"!?()-]|\n(?=[A-Za-z\"'(]))*[.!?][\"')]*")
"""Words and punctuation on lines that are not indented: no fields, lists, tables, doctests or blocks of code."""
_FUNCTION_WORD = re.compile(
    r"\b(?:an?|and|are|as|at|be|but|by|can|for|from|has|have|if|in|is|its?|not|of|on|one|or|so|than|that|the|their|"
    r"then|there|they|this|to|was|we|were|when|which|will|with|you)\b",
    re.IGNORECASE,
)


def documents() -> Iterator[dict[str, str]]:
    """All documents, in a fixed order: those of the standard library, then those of the installed packages."""
    seen: set[str] = set()
    for folder in dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")):
        for item in sorted(folder.iterdir()):
            characters = 0
            for path in _sources(item):
                if characters >= MAX_PACKAGE_CHARACTERS:
                    break
                docstrings = path.read_text(encoding="utf-8", errors="replace").split('"""')[1::2]
                parts = (part for docstring in docstrings for part in prose(docstring) if part not in seen)
                text = "\n".join(dict.fromkeys(parts))
                if len(text) >= MIN_DOCUMENT_CHARACTERS:
                    seen.update(text.split("\n"))
                    characters += len(text)
                    names = path.relative_to(folder).with_suffix("").parts
                    yield {"text": text, "source": ".".join(names).removesuffix(".__init__")}


def _sources(item: Path) -> list[Path]:
    """The sources of a package, in an order that spreads over it, so that the limit does not cut it off at a letter."""
    if _SKIPPED.fullmatch(item.stem):
        return []
    found = {}
    for path in item.rglob("*.py") if item.is_dir() else [item] if item.suffix == ".py" else []:
        names = path.relative_to(item.parent)
        if not any(map(_SKIPPED.fullmatch, names.with_suffix("").parts)) and path.stat().st_size <= MAX_SOURCE_BYTES:
            found[hashlib.sha256(str(names).encode()).digest()] = path
    return [path for _, path in sorted(found.items())]


def prose(docstring: str) -> Iterator[str]:
    """The paragraphs of a docstring that are prose, each on one line; none of a licence."""
    if _LICENCE.search(docstring):
        return
    for paragraph in re.split(r"\n\s*\n", _MARKUP.sub("", inspect.cleandoc(docstring))):
        words = paragraph.split()
        if len(words) < MIN_WORDS or not _PARAGRAPH.fullmatch(paragraph.rstrip()):
            continue
        if len(_FUNCTION_WORD.findall(paragraph)) >= MIN_FUNCTION_WORDS * len(words):
            yield " ".join(words)


def main(path: Path) -> None:
    """Write the corpus, unless there is a file of this name."""
    if not path.exists():
        with atomic_file(path) as file:
            for document in documents():
                file.write(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))
    print(f"embedded corpus: {path}: {bytes_text(path.stat().st_size)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
