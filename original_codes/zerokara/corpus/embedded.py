"""The embedded corpus: real English prose that every installation has, so that the line can be tried offline.

In: the sources of the standard library and of the installed packages, and the topics of `help()`. Nothing is imported;
docstrings and comments are found by parsing. Out: JSON lines ``{"text": ..., "source": "networkx.generators.trees"}``.
A document is a module: the paragraphs of its docstrings and comments, in their order, as far as they are prose
(`prose`). Left out are tests, vendored and generated code, licences, paragraphs seen before, and what a package has
beyond `MAX_PACKAGE_CHARACTERS`, so that no package drowns the others. The same installation gives the same bytes.

``python -m zerokara.corpus.embedded OUTPUT.jsonl`` writes it, unless it is there already.
"""

from __future__ import annotations

import argparse
import ast
import filecmp
import hashlib
import os
import platform
import re
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from zerokara import manifest
from zerokara.corpus.prose import prose
from zerokara.durable import atomic_file
from zerokara.errors import Fault, UserError
from zerokara.progress import bytes_text, seconds_text
from zerokara.resources import available_cores

MAX_PACKAGE_CHARACTERS = 400_000
MIN_DOCUMENT_CHARACTERS = 200
MAX_SOURCE_BYTES = 1_000_000
"""Larger sources are generated tables."""
STEP = "embedded corpus"
FORMAT = 2
"""Raised when the same installation would give other documents."""
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

Package = tuple[Path, tuple[Path, ...]]
"""The folder that the package stands in, and its sources in the order in which they are taken."""


def documents() -> Iterator[dict[str, str]]:
    """All documents, in a fixed order."""
    seen: set[bytes] = set()
    with ProcessPoolExecutor(available_cores()) as pool:
        for texts in pool.map(_package_documents, _packages()):
            for source, parts in texts:
                # A paragraph that another package has too is left out here; one that the package repeats, earlier.
                text = "\n".join(part for part in parts if not _seen_before(part, seen))
                if len(text) >= MIN_DOCUMENT_CHARACTERS:
                    yield {"text": text, "source": source}
    yield from _topics(_library_folders()[0] / "pydoc_data" / "topics.py")


def write(path: Path) -> bool:
    """Write the corpus, unless it is there, made from the same installation; tells whether it was written.

    Raises:
        UserError: another file has this name, or the corpus was changed since.
    """
    manifest_path = path.with_suffix(".manifest.json")
    work = manifest.StepSpec(STEP, {"format": FORMAT, "installation": installation()})
    done = manifest.read(manifest_path) if manifest_path.exists() else None
    ours = done.outputs.get("corpus", []) if done and done.step == STEP else []
    is_ours = any(manifest.is_unchanged(record, manifest_path) for record in ours)
    other = done is not None and done.settings != work.settings
    if manifest.already_done(manifest_path, work, redo=other):
        return False
    started, count = time.monotonic(), 0
    with atomic_file(path) as file:
        for document in documents():
            file.write(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))
            count += 1
        file.flush()
        # Equal: a start that was killed before it wrote the manifest.
        if path.exists() and not is_ours and not filecmp.cmp(file.name, path, shallow=False):
            rule = "was not written here as it is now"
            raise UserError(Fault(str(path), rule, remedy="move it away, or name another file"))
    seconds = time.monotonic() - started
    manifest.write(manifest_path, work, {"corpus": path}, {"documents": count, "bytes": path.stat().st_size}, seconds)
    return True


def installation() -> str:
    """A fingerprint of the Python and of the packages there, with their versions."""
    names = {item.name for folder in _library_folders()[1:] for item in folder.glob("*.dist-info")}
    return hashlib.sha256("\n".join([platform.python_version(), *sorted(names)]).encode()).hexdigest()


def _library_folders() -> list[Path]:
    """The standard library, then the folders of installed packages."""
    paths = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    return list(dict.fromkeys(Path(path) for path in paths))


def _packages() -> list[Package]:
    """Top-level packages and the single modules beside them, for each folder of libraries."""
    packages: list[Package] = []
    for folder in _library_folders():
        single: list[Path] = []
        for item in sorted(folder.iterdir()):
            if item.name in _SKIPPED_PACKAGES or _SKIPPED_FOLDERS.fullmatch(item.name):
                continue
            if item.is_dir():
                sources = sorted(_sources(item))
                if sources:
                    packages.append((folder, tuple(_scattered(sources, folder))))
            elif item.suffix == ".py" and not _SKIPPED_FILES.fullmatch(item.stem) and not item.stem.startswith("__"):
                single.append(item)
        packages.extend((folder, (module,)) for module in single)
    return packages


def _sources(package: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(package):
        subfolders[:] = [name for name in subfolders if not _SKIPPED_FOLDERS.fullmatch(name)]
        for name in names:
            if name.endswith(".py") and not _SKIPPED_FILES.fullmatch(name.removesuffix(".py")):
                yield Path(folder, name)


def _scattered(sources: Sequence[Path], root: Path) -> list[Path]:
    """A fixed order that spreads over the package, so that the limit does not cut it off at a letter."""
    return sorted(sources, key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest())


def _package_documents(package: Package) -> list[tuple[str, list[str]]]:
    """(module, its paragraphs) for the modules of a package, up to the limit."""
    root, sources = package
    found, characters, seen = [], 0, set[bytes]()
    for source in sources:
        paragraphs = [part for part in _paragraphs(source) if not _seen_before(part, seen)]
        if not paragraphs:
            continue
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
    texts = sorted([*_docstrings(tree), *_comments(source)])
    for _, text in texts:
        if not _LICENCE.search(text):
            yield from prose(text)


_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _docstrings(node: _Documented) -> Iterator[tuple[int, str]]:
    """(line, docstring) of a module, its classes and its functions."""
    text = ast.get_docstring(node, clean=False)
    if text:
        yield node.body[0].lineno, text
    for child in node.body:
        if isinstance(child, _Documented):
            yield from _docstrings(child)


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the comments that stand on lines of their own, neighbours joined."""
    for block in _COMMENTS.finditer(source):
        yield source.count("\n", 0, block.start()) + 1, _COMMENT_MARK.sub("", block[0])


def _seen_before(text: str, seen: set[bytes]) -> bool:
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=12).digest()
    if digest in seen:
        return True
    seen.add(digest)
    return False


def _topics(path: Path) -> Iterator[dict[str, str]]:
    """The pages of `help("FOR")` and its like: the language reference, in plain text."""
    if not path.is_file():
        return
    for statement in ast.parse(path.read_bytes()).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            topics: dict[str, Any] = ast.literal_eval(statement.value)
            for name, text in topics.items():
                paragraphs = "\n".join(prose(text))
                if len(paragraphs) >= MIN_DOCUMENT_CHARACTERS:
                    yield {"text": paragraphs, "source": f"topic {name}"}


def main(argv: Sequence[str]) -> int:
    """Command line; gives the exit code."""
    parser = argparse.ArgumentParser(description="Write the embedded corpus: the documentation that Python came with.")
    parser.add_argument("output", type=Path, metavar="OUTPUT.jsonl")
    path: Path = parser.parse_args(argv).output
    started = time.monotonic()
    try:
        made = write(path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    facts = manifest.read(path.with_suffix(".manifest.json")).facts
    size = f"{facts['documents']:,} documents, {bytes_text(facts['bytes'])}"
    took = f"written in {seconds_text(time.monotonic() - started)}" if made else "there already"
    print(f"embedded corpus: {path}: {size}, {took}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
