"""The messages that the documents quote are those of the code: a reader searches for what was printed."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSERTED = "\0"
EMPHASIS = {"and its gradient", "ゼロから: from zero.", "position in the run", "With `bpe`"}
"""Italics that are no messages."""
OTHERS = {"No package metadata was found for vllm", "torchvision::nms does not exist", "Internal Server Error"}
OTHERS |= {"terminate called without an active exception"}
"""Messages of other programs."""


def quotes(text: str, is_english: bool) -> Iterator[str]:
    """Italics of a page: all in the first column of a table, and in English those of three words or more."""
    for line in re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines():
        column = line.split(" | ")[0] if line.startswith("|") else ""
        for quoted in re.findall(r"(?<![\w*])\*(?![*\s])((?:[^*\n]|\*\*)+?)\*(?!\*)", line):
            is_message = f"*{quoted}*" in column or (is_english and len(quoted.split()) >= 3)
            if is_message and quoted not in EMPHASIS | OTHERS:
                yield quoted


def literals(tree: ast.AST) -> Iterator[str]:
    """Texts of a module; of an f-string with `INSERTED` in place of what is computed."""
    notes = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings are not printed
    inside = notes | {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else INSERTED for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def is_printed(quoted: str, texts: list[str]) -> bool:
    pattern = re.compile(".+".join(re.escape(part.strip()) for part in re.split("…", quoted)), re.DOTALL)
    return any(pattern.search(text) for text in texts)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    python = [*(ROOT / "original_codes/zerokara").rglob("*.py"), *ROOT.glob("*.py")]
    found = [text for path in python for text in literals(ast.parse(path.read_text(encoding="utf-8")))]
    return [*found, *(line for path in ROOT.glob("*.sh") for line in path.read_text(encoding="utf-8").splitlines())]


PAGES = sorted(
    {*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")} - {ROOT / "docs" / "CHANGELOG.md"}
)  # which tells of earlier ones


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_quoted_message_is_one_of_the_code(path: Path, texts: list[str]) -> None:
    page = path.read_text(encoding="utf-8")
    is_english = path.name.count(".") == 1
    assert not [quoted for quoted in quotes(page, is_english) if not is_printed(quoted, texts)]


def test_a_message_that_nothing_prints_is_found() -> None:
    rows = ["| *belongs to … run* (step 3) | *Another* one. |", "|---|---|", "| loss | *is never said here* |"]
    page = "\n".join([*rows, "*well known words too*"])
    assert [*quotes(page, True)] == ["belongs to … run", "is never said here", "well known words too"]
    assert [*quotes(page, False)] == ["belongs to … run"]
    texts = [*literals(ast.parse("def f():\n    'is never said here'\n    print(f'belongs to the {name} run', a)"))]
    assert [is_printed(quoted, texts) for quoted in quotes(page, True)] == [True, False, False]
    assert not is_printed("belongs to the right run", texts), "what is computed is … in a quote"
