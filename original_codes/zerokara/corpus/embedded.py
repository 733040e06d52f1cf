"""The embedded corpus: real English prose that every installation has, so that the line can be tried offline.

In: the sources of the standard library and of the installed packages, and the topics of `help()`. Nothing is imported;
docstrings and comments are found by parsing. Out: JSON lines ``{"text": ..., "source": "networkx.generators.trees"}``.
A document is a module: the paragraphs of its docstrings and comments that are prose, in their order. Left out are
tests, vendored and generated code, licences, paragraphs seen before, and what a package has beyond
`MAX_PACKAGE_CHARACTERS`, so that no package drowns the others. The same installation gives the same bytes.

``python -m zerokara.corpus.embedded OUTPUT.jsonl`` writes it, unless the file is there already.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import os
import re
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import orjson

from zerokara.durable import atomic_file
from zerokara.progress import bytes_text, seconds_text
from zerokara.resources import available_cores

MAX_PACKAGE_CHARACTERS = 400_000
MIN_DOCUMENT_CHARACTERS = 200
MAX_SOURCE_BYTES = 1_000_000
"""Larger sources are generated tables."""
_SKIPPED_FOLDERS = re.compile(
    r"tests?|testing|.*_tests?|conftest|_?vendor(ed|ized)?|third_party|externals?|extern|examples?|node_modules|"
    r"locale|__pycache__|site-packages|dist-packages|lib2to3|.*\.(dist|egg)-info",
    re.IGNORECASE,
)
_SKIPPED_PACKAGES = frozenset({"pip", "debugpy", "idlelib", "turtledemo", "pydoc_data", "zerokara"})
_SKIPPED_FILES = re.compile(r"test_.*|.*_tests?|conftest|.*_pb2(_grpc)?|setup", re.IGNORECASE)
_COMMENTS = re.compile(r"^[ \t]*#(?: .*)?\n(?:[ \t]*#(?: .*)?\n)*", re.MULTILINE)
_COMMENT_MARK = re.compile(r"^[ \t]*# ?", re.MULTILINE)
_LICENCE = re.compile(r"copyright|licen[cs]ed under|redistribution and use|permission is hereby granted", re.IGNORECASE)

MIN_WORDS, MIN_SHARE = 5, 0.6
"""Of a sentence; of a paragraph, in sentences: what is left of one with less would not be read as one text."""
MIN_PLAIN_WORDS, MIN_FUNCTION_WORDS = 0.85, 0.15
"""Shares of a sentence's words: those written as words are, which names of code are not; those that hold a sentence
together, which an enumeration lacks."""
_FUNCTION_WORD = re.compile(
    "an?|and|are|as|at|be|but|by|can|for|from|has|have|if|in|is|its?|not|of|on|one|or|so|than|that|the|their|then|there|"
    "they|this|to|was|we|were|when|which|will|with|you",
    re.IGNORECASE,
)
_PLAIN_WORD = re.compile(r"[A-Za-z]?[a-z]+(?:['-][A-Za-z]?[a-z]+)*|I|A")
_MARKUP = (
    (re.compile(r":[a-z:+-]+:`~[^`]*?([^`.]+)`"), r"\1"),  # :class:`~package.Name`
    (re.compile(r"(?::[a-z:+-]+:)?`([^`<]+?)\s*<[^`>]*>`_*"), r"\1"),  # `text <target>`_
    (re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), r"\1"),  # [text](target)
    (re.compile(r"(?::[a-z:+-]+:)?``?([^`]+)``?_*"), r"\1"),  # :func:`name`, ``code``
    (re.compile(r"(?<!\w)(\*\*|\*|__|_)(\S(?:.*?\S)?)\1(?!\w)"), r"\2"),  # *emphasis*
    (re.compile("[\u2018\u2019]"), "'"),
    (re.compile("[\u201c\u201d]"), '"'),
)
_MARKED = re.compile("[`*_\\[\u2018\u2019\u201c\u201d]")
_ITEM = re.compile(r"\s*(?:[-*+•]|\(?\d+[.)])\s+(?=\S)")
_NO_PROSE = re.compile(r"\s*(?:[:@]\w|>>>|\.\.|[|+=~^#$%>]|[-=~^\"'*`]{3,})")
"""Fields such as `:param x:`, doctests, directives, tables, the lines under headings."""
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[A-Z\"'(])")
_WORDS_AND_PUNCTUATION = re.compile(r"[A-Z][A-Za-z ,.;:'\"!?()-]*[.!?][\"')]*")


def write(path: Path) -> bool:
    """Write the corpus, unless there is a file of this name; tells whether it was written."""
    if path.exists():
        return False
    with atomic_file(path) as file:
        for document in documents():
            file.write(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))
    return True


def documents() -> Iterator[dict[str, str]]:
    """All documents, in a fixed order."""
    seen: set[str] = set()
    with ProcessPoolExecutor(available_cores()) as pool:
        for modules in pool.map(_of_package, *zip(*_packages(), strict=True)):
            for source, paragraphs in modules:
                # A paragraph that another package has too is left out here; one that the package repeats, earlier.
                yield from _document(source, [part for part in paragraphs if part not in seen])
                seen.update(paragraphs)
    topics = _library_folders()[0] / "pydoc_data" / "topics.py"  # the pages of help("FOR"): the language reference
    for statement in ast.parse(topics.read_bytes()).body if topics.is_file() else []:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            for name, text in ast.literal_eval(statement.value).items():
                yield from _document(f"topic {name}", list(prose(text)))


def _document(source: str, paragraphs: Sequence[str]) -> Iterator[dict[str, str]]:
    text = "\n".join(paragraphs)
    if len(text) >= MIN_DOCUMENT_CHARACTERS:
        yield {"text": text, "source": source}


def _library_folders() -> list[Path]:
    """The standard library, then the folders of installed packages."""
    paths = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    return list(dict.fromkeys(Path(path) for path in paths))


def _packages() -> Iterator[tuple[Path, list[Path]]]:
    """Each top-level package, then each single module beside them: the folder that it stands in, and its sources.

    The sources of a package have an order that spreads over it, so that the limit does not cut it off at a letter.
    """
    for folder in _library_folders():
        single = []
        for item in sorted(folder.iterdir()):
            if item.name in _SKIPPED_PACKAGES or _SKIPPED_FOLDERS.fullmatch(item.name):
                continue
            if item.is_dir():
                paths = (
                    (hashlib.sha256(str(path.relative_to(folder)).encode()).digest(), path) for path in _sources(item)
                )
                yield folder, [path for _, path in sorted(paths)]
            elif item.suffix == ".py" and not _SKIPPED_FILES.fullmatch(item.stem) and not item.stem.startswith("__"):
                single.append(item)
        yield from ((folder, [module]) for module in single)


def _sources(package: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(package):
        subfolders[:] = [name for name in subfolders if not _SKIPPED_FOLDERS.fullmatch(name)]
        for name in names:
            if name.endswith(".py") and not _SKIPPED_FILES.fullmatch(name.removesuffix(".py")):
                yield Path(folder, name)


def _of_package(root: Path, sources: Sequence[Path]) -> list[tuple[str, list[str]]]:
    """(module, its paragraphs) for the modules of a package, up to the limit."""
    found, characters, seen = [], 0, set[str]()
    for source in sources:
        paragraphs = [part for part in dict.fromkeys(_paragraphs(source)) if part not in seen]
        seen.update(paragraphs)
        names = source.relative_to(root).with_suffix("").parts
        found.append((".".join(names[:-1] if names[-1] == "__init__" else names), paragraphs))
        characters += sum(map(len, paragraphs))
        if characters >= MAX_PACKAGE_CHARACTERS:
            break
    return found


def _paragraphs(path: Path) -> Iterator[str]:
    """The prose of a source's docstrings and comments, in its order."""
    if path.stat().st_size > MAX_SOURCE_BYTES:
        return
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return  # Packages carry sources for other versions of Python, and templates.
    texts = list(_docstrings(tree))
    for block in _COMMENTS.finditer(source):  # on lines of their own, neighbours joined
        texts.append((source.count("\n", 0, block.start()) + 1, _COMMENT_MARK.sub("", block[0])))
    for _, text in sorted(texts):
        if not _LICENCE.search(text):
            yield from prose(text)


_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _docstrings(node: _Documented) -> Iterator[tuple[int, str]]:
    """(line, docstring) of a module, its classes and its functions."""
    if text := ast.get_docstring(node, clean=False):
        yield node.body[0].lineno, text
    for child in node.body:
        if isinstance(child, _Documented):
            yield from _docstrings(child)


def prose(text: str) -> Iterator[str]:
    """The paragraphs of a docstring that are prose, each on one line, or what of its sentences is."""
    for paragraph in _runs_of_lines(text):
        if _MARKED.search(paragraph):  # most have none
            for pattern, replacement in _MARKUP:
                paragraph = pattern.sub(replacement, paragraph)
        plain = " ".join(paragraph.split())
        sentences = [sentence for sentence in _SENTENCE_END.split(plain) if _is_prose(sentence)]
        if sentences and sum(map(len, sentences)) >= MIN_SHARE * len(plain):
            yield " ".join(sentences)


def _runs_of_lines(text: str) -> Iterator[str]:
    """Runs of lines with the same indentation, each joined to one line; without literal blocks and what is no prose."""
    lines: list[str] = []
    indentation, literal = 0, -1
    for line in [*inspect.cleandoc(text).split("\n"), ""]:
        depth = len(line) - len(line.lstrip())
        if literal >= 0:  # inside a block that is shown as it stands, until the indentation falls back
            if not line.strip() or depth > literal:
                continue
            literal = -1
        item = _ITEM.match(line)
        depth = item.end() if item else depth
        breaks = not line.strip() or bool(item) or bool(_NO_PROSE.match(line))
        if lines and (breaks or depth != indentation):
            yield " ".join(lines)
            lines = []
        if breaks and not item:
            continue
        indentation = depth
        lines.append(line[depth:].strip())
        if lines[-1].endswith("::"):
            literal = indentation
            yield " ".join(lines)[:-1]
            lines = []


def _is_prose(sentence: str) -> bool:
    words = [word.strip(",.;:'\"!?()") for word in sentence.split()]
    return (
        len(words) >= MIN_WORDS
        and _WORDS_AND_PUNCTUATION.fullmatch(sentence) is not None
        and sum(_PLAIN_WORD.fullmatch(word) is not None for word in words) >= MIN_PLAIN_WORDS * len(words)
        and sum(_FUNCTION_WORD.fullmatch(word) is not None for word in words) >= MIN_FUNCTION_WORDS * len(words)
        and sentence.count("(") == sentence.count(")")
        and sentence.count('"') % 2 == 0
    )


def main(argv: Sequence[str]) -> int:
    """Command line; gives the exit code."""
    parser = argparse.ArgumentParser(description="Write the embedded corpus: the documentation that Python came with.")
    parser.add_argument("output", type=Path, metavar="OUTPUT.jsonl")
    path: Path = parser.parse_args(argv).output
    started = time.monotonic()
    is_new = write(path)
    took = f"written in {seconds_text(time.monotonic() - started)}" if is_new else "there already"
    print(f"embedded corpus: {path}: {bytes_text(path.stat().st_size)}, {took}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
