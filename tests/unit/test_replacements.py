"""What the package replaces of libraries in the running process: docs/architecture.md lists all of it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "original_codes/zerokara"
TREES = {
    path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")
}


@cache
def imported_from(tree: ast.AST) -> tuple[frozenset[str], frozenset[str]]:
    """Names that a module imports from a library, also by way of a module of ours, and those of ours."""
    foreign, own = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            path = f"{node.module}".removeprefix("zerokara").lstrip(".").replace(".", "/")
            through = imported_from(TREES[f"{path}.py"])[0] if f"{path}.py" in TREES else set()
            is_own = f"{node.module}".split(".")[0] == "zerokara"
            for alias in node.names:
                (own if is_own and alias.name not in through else foreign).add(alias.asname or alias.name)
    return frozenset(foreign), frozenset(own)


def assignments(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Attributes that a module sets, in an assignment, a deletion or by setattr, and the values; and sys.modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete | ast.AugAssign | ast.AnnAssign):
            targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
            for target in (each for one in targets for each in ast.walk(one)):
                if isinstance(target, ast.Attribute | ast.Subscript) and not isinstance(target.ctx, ast.Load):
                    whole = target.value if isinstance(target, ast.Subscript) else target
                    yield ast.unparse(whole), getattr(node, "value", None)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            place, name = node.args[:2]
            yield f"{ast.unparse(place)}.{ast.unparse(name).strip(chr(39))}", node.args[-1]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("sys.modules."):
            yield "sys.modules", None


OWN = {"_origin", "_model", "activate", "compiled"}
"""Attributes that objects of ours give each other."""


def replacements(tree: ast.AST) -> set[str]:
    """What a module replaces of libraries: attributes of their modules; methods and private state of their objects."""
    (foreign, own), found = imported_from(tree), set[str]()
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    called = {each.name for each in classes if "__call__" in {getattr(item, "name", "") for item in each.body}}
    called |= {
        name for name, each in functions.items() if sum(isinstance(n, ast.FunctionDef) for n in ast.walk(each)) > 1
    }
    for whole, value in assignments(tree):
        root, _, attribute = whole.rpartition(".")
        text = ast.unparse(value.func if isinstance(value, ast.Call) else value) if value else ""
        makers = {"partial", *called} if isinstance(value, ast.Call) else functions.keys()
        is_method = isinstance(value, ast.Lambda) or text in makers
        is_private = attribute.startswith("_") and root != "cls"
        is_theirs = root.split(".")[0] in foreign or is_method or is_private
        if root not in ("", "self", *own) and is_theirs and attribute not in OWN and whole != "os.environ":
            found.add(attribute)
    return found


def test_the_page_lists_what_is_replaced_of_libraries() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `([\w/]+\.py)` \| (`.+?) \| ", text.partition("Replaced in the running process")[2], re.MULTILINE
    )
    listed: dict[str, set[str]] = {}
    for path, names in rows:
        listed.setdefault(path, set()).update(name.rpartition(".")[2] for name in re.findall("`(.+?)`", names))
    found = {path: names for path, tree in TREES.items() if (names := replacements(tree))}
    assert found == listed


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("from deepspeed.runtime import utils\ndef f():\n    utils.norm, a = g, 3", "norm"),
        ("from zerokara.model.megatron_core import rope_utils as r\nr.rotate = 1", "rotate"),
        ("import transformers.utils\nsetattr(transformers.utils, 'norm', 3)", "norm"),
        ("def f(layer):\n    layer.forward = lambda x: x", "forward"),
        ("class A:\n    def f(self):\n        self.model.norm = partial(g, 3)", "norm"),
        ("def f(model):\n    model._parameters['a'] = 3", "_parameters"),
        ("class A:\n    def f(self, a):\n        self.f, a.size = partial(g, 3), 3", None),
        ("from zerokara.model import loss\nloss.fused = [3]", None),
    ],
)
def test_a_replacement_is_found(program: str, name: str | None) -> None:
    assert replacements(ast.parse(program)) == ({name} if name else set())
