"""No text of a corpus, whatever is in it, keeps a pattern busy: each takes a time in proportion to the text.

The patterns are found in the source: one that meets no text of users is named in `NEVER`, and all others are run.
"""

import ast
import importlib
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from string import ascii_letters, digits
from typing import Any, get_args

import pytest
from tokenizers import Regex, normalizers

pytest.importorskip("datatrove")

from zerokara.base.errors import redacted
from zerokara.cleaning import rules, stages
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.corpus import token_hashes
from zerokara.evaluation import overlap, scoring
from zerokara.tokenizer import morphemes, report, sampling

MEGABYTE = 1_000_000
SIZES = MEGABYTE // 64, MEGABYTE // 8
"""Of the texts that a pattern meets: on a fast processor a shorter one hides what is quadratic."""
PACKAGE = Path(__file__).resolve().parents[2] / "original_codes" / "zerokara"

NEVER = {
    "checkpoint/folders.py": "_NAME _INTERRUPTED_REPLACEMENT _LEFTOVER",
    "config/convert_config.py": "rules",
    "config/loading.py": "_unknown",
    "config/settings.py": "key_of fault",
    "config/tokenizer_config.py": "_RESERVED_NAME rules",
    "config/writing.py": "_groups write_values",
    "corpus/embedded.py": "_SKIPPED _LICENCE _MARKUP _PARAGRAPH _FUNCTION_WORD prose",
    "corpus/find.py": "_AT_WORK _ABOUT _ADDRESS _TEST",
    "base/errors.py": "check_hub_token",
    "evaluation/results.py": "_result",
    "examples/chat_template.py": "_NUMBERED MARK _CHANCE auto_source",
    "huggingface/from_hf.py": "carried",
    "huggingface/model_folder.py": "BUFFERS tensors _refusal",
    "huggingface/proof.py": "_LAYER",
    "tokenizer/fast_encoder.py": "_unproved_json",
    "tokenizer/hugging_face.py": "_BYTE_PIECE",
    "tokenizer/trainer_process.py": "_PHASE _MERGE_LINE",
    "tokenizer/training.py": "_TOO_SMALL",
    "training/logbook.py": "_OTHER_CHIP peak_flops",
    "training/nodes/machines.py": "of _slurm_endpoint",
    "training/planning/processors.py": "_listed_gpus",
    "training/sample_texts.py": "_SECTION",
    "training/worker.py": "_KERNELS",
}
"""Patterns that meet settings, names of files, programs and what they print, by the name or function that has them."""
BOUNDED = {
    "cleaning/rules.py": "_measure",
    "corpus/token_hashes.py": "tokens_per_word",
    "base/errors.py": "_NOT_SHOWN redacted",
    "samples/objective.py": "_GRAPHEME",
    "tokenizer/morphemes.py": "_GRAPHEME morphemes",
}
"""Patterns that meet the beginning of a text, or a line of limited length; `FUNCTIONS` has the functions."""


def _repeated(text: str, before: str = "", after: str = "") -> Callable[[int], str]:
    return lambda size: before + text * (size // len(text.encode())) + after


NASTY = {
    "base64": cache(lambda size: "".join(Random(1).choices(ascii_letters + digits + "+/", k=size))),
    "nested brackets": lambda size: "(" * (size // 2) + ")" * (size // 2),
    **{
        text: _repeated(text)
        for text in (
            "ab-", "1.1.", "%E3%81%82", "/usr/lib/x", "x=y&", "01 23-456 ", "7", "a@a.a@a.", "a", "_", "1.2.3.4:",
            "<a href=", "\\", "\n", "\r", ".)]”", "가", "春の海", "👨\u200d👩", "🇧", "\u200b", "\ue000",
        )
    },
    **{
        f"a, many {text!r}, a": _repeated(text, "a", "a")
        for text in (" ", "\t", "!", ".", "-", "\u0323\u0301", "\u2581", "\n ")
    },
}  # fmt: skip
"""Texts of a given number of bytes, by what they are made of."""


def uses(tree: ast.AST, holder: str = "") -> Iterator[tuple[str, ast.expr]]:
    """The patterns in a module: the name or the function that holds each, and the expression that it is."""
    for node in ast.iter_child_nodes(tree):
        inner = holder
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inner = node.name
        elif isinstance(node, ast.Assign) and not holder:
            inner = ast.unparse(node.targets[0])
        function = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if re.fullmatch(r"(re|regex)\.(compile|search|match|fullmatch|findall|finditer|subn?|split)", function):
            assert isinstance(node, ast.Call)
            yield inner, node if function.endswith("compile") else node.args[0]
        elif isinstance(node, ast.Attribute) and node.attr == "regex":  # of a library
            yield inner, node
        elif isinstance(node, ast.Call) and any(ast.unparse(each) == "'Regex'" for each in node.args):
            yield inner, node.args[0]
        elif isinstance(node, ast.Dict) and "'Regex'" in [ast.unparse(key) for key in node.keys if key]:
            yield inner, node.values[0]
        yield from uses(node, inner)


FOUND = [
    (path.relative_to(PACKAGE).as_posix(), holder, each)
    for path in sorted(PACKAGE.rglob("*.py"))
    for holder, each in uses(ast.parse(path.read_text(encoding="utf-8")))
]


def _runs(pattern: Any) -> list[Callable[[str], object]]:
    """Whatever can be done with a pattern."""
    if isinstance(pattern, str | bytes):
        pattern = re.compile(pattern)
    is_bytes = isinstance(pattern.pattern, bytes)

    def content(text: str) -> Any:
        return text.encode() if is_bytes else text

    return [
        lambda text: deque(pattern.finditer(content(text)), 0),
        lambda text: pattern.fullmatch(content(text)),
    ]


def patterns() -> Iterator[tuple[str, list[Callable[[str], object]]]]:
    """What is done with each pattern that meets texts."""
    for path, holder, expression in FOUND:
        if holder in f"{NEVER.get(path, '')} {BOUNDED.get(path, '')}".split():
            continue
        module = importlib.import_module(f"zerokara.{path.removesuffix('.py').replace('/', '.')}")
        value = eval(ast.unparse(expression), vars(module))
        if path == "huggingface/tokenizer_json.py":
            yield f"{path} {value}", [normalizers.Replace(Regex(value), "").normalize_str]
        else:
            yield f"{path} {holder}", _runs(value)


@cache
def seconds_per_byte() -> float:
    """Time of a pass that is surely linear, on this machine as busy as it is."""
    text = "\n ab" * 50_000
    return min(_seconds(_runs(r"\w")[0], text) for _ in range(3)) / len(text)


def _seconds(work: Callable[[str], object], text: str) -> float:
    started = time.process_time()
    work(text)
    return time.process_time() - started


def too_slow(work: Callable[[str], object], make: Callable[[int], str], most: float, *sizes: int) -> bool:
    """True if the work on a text of one of the sizes takes `most` times as long as a linear pass."""
    for size in sizes:
        text = make(size)
        allowed = most * seconds_per_byte() * size + 0.01
        if _seconds(work, text) > allowed:
            seconds_per_byte.cache_clear()  # the machine may have become slower since
            if min(_seconds(work, text) for _ in range(2)) > max(allowed, most * seconds_per_byte() * size):
                return True
    return False


def _morphemes(text: str) -> None:
    config = TokenizerConfig(user_defined_symbols=["aa", "a"])
    for line in sampling.sentences_of(text):
        morphemes.morphemes(line, lambda line: ((n, n + 1) for n in range(len(line))), config)


def _own_lines(text: str) -> None:
    stages.own_lines(text.split("\n"), lambda key: True)


def _owners(text: str) -> None:
    index = token_hashes.NgramIndex([(owner, token_hashes.hashes_of(text), 1) for owner in (0, 1)], 13)
    deque(index.owners_of(token_hashes.hashes_of(text)), 0)


FUNCTIONS: list[Callable[[str], object]] = [
    *(rules._filter(name, {}) for name in get_args(rules.FilterName)),
    rules.damage_of,
    rules.language_of,
    lambda text: rules.ftfy.fix_text(text[:300]),
    token_hashes.composed,
    lambda text: token_hashes.hashes_of(text, with_signs=True),
    _owners,
    _own_lines,
    lambda text: [*sampling.passages_of(text), *sampling.sentences_of(text)],
    _morphemes,
    lambda text: report.example_lines([text], 3),
    overlap.normalized,
    lambda text: scoring.chrf([text], [text]),
    redacted,
]
"""What texts go through with the loops of Python, and patterns of libraries."""


def test_every_exception_is_there() -> None:
    held = {(path, holder) for path, holder, _ in FOUND}
    named = {
        (path, holder) for each in (NEVER, BOUNDED) for path, holders in each.items() for holder in holders.split()
    }
    assert len(held - named) >= 17 and not named - held


def test_patterns_are_linear() -> None:
    slow = [
        f"{name} on {kind}"
        for name, runs in patterns()
        for kind, make in NASTY.items()
        if any(too_slow(run, make, 20, *SIZES) for run in runs)
    ]
    assert not slow, "\n".join(slow)


def test_functions_are_linear() -> None:
    slow = [
        f"{work} on {kind}"
        for work in FUNCTIONS
        for kind, make in NASTY.items()
        if too_slow(work, make, 500, MEGABYTE // 256, MEGABYTE // 64)
    ]
    assert not slow, "\n".join(slow)


def test_a_pattern_that_is_not_is_found() -> None:
    for pattern, kind in ((r"[a-z]+@", "a"), (r" *x", "a, many ' ', a"), (r"(\w+-)*\.", "ab-")):
        assert too_slow(_runs(pattern)[0], NASTY[kind], 20, *SIZES)
    program = "def f(t):\n    re.sub(rf'{A}', '', t)\nB = regex.compile('x')"
    assert {holder for holder, _ in uses(ast.parse(program))} == {"f", "B"}
