"""The rules of the house, checked on the source itself: floors, borders to vendors, sizes, shipped YAML."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from zerokara.config.architectures import ARCHITECTURES, Name
from zerokara.config.convert_config import ConvertConfig
from zerokara.config.evaluate_config import EvaluateConfig
from zerokara.config.finetune_config import FinetuneConfig
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.tokenizer_config import TokenizerConfig

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "original_codes"
PACKAGE = SOURCE / "zerokara"
MODULES = sorted(PACKAGE.rglob("*.py"))

FLOORS = {
    "steps": 7,
    "finetuning": 6,
    "training": 4,
    "forecast": 5,
    "publishing": 5,
    "evaluation": 5,
    "huggingface": 4,
    "examples": 3,
    "samples": 3,
    "model": 3,
    "tokens": 3,
    "tokenizer": 3,
    "corpus": 2,
    "checkpoint": 2,
    "config": 1,
    "errors": 0,
    "durable": 0,
    "file_lock": 0,
    "manifest": 0,
    "progress": 0,
    "resources": 0,
}
"""Where each room stands; it may import its own floor and those below."""

CHAMBERS = {"": 4, "nodes": 3, "processes": 2, "planning": 1, "monitoring": 1, "compute": 0}
"""The rooms within training/, which is the largest; the empty name is what lies in training/ itself."""

PACKAGE_LINES, PACKAGE_FILES = 27_994, 171
"""Size of the package. A change that makes it larger raises them on purpose, and says why; one that makes it smaller
lowers them."""
SLACK_LINES, SLACK_FILES = 200, 3
"""How far below them the package may be."""
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 80

VENDOR_BORDERS = {
    "deepspeed": re.compile(r"training/compute/zero\.py"),
    "megatron": re.compile(r"model/megatron_core\.py"),
}
"""The files that may name a vendor."""

TORCH_FREE = ("corpus", "tokens", "tokenizer", "config", "samples", "examples")
"""Rooms whose modules may be imported without waiting for torch: they import it inside functions, if at all."""

SHIPPED_FOLDERS = (".ci", "benchmarks", "docs", "model_configs", "original_codes", "tests")


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Full dotted names that a module imports anywhere, also late inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which floor is meant"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floor_faults(path: str, source: str) -> list[str]:
    """What breaks the floors in the module `path` (relative to the package)."""
    room = Path(path).parts[0].removesuffix(".py")
    faults = []
    for name in imported_names(ast.parse(source)):
        parts = name.split(".")
        if parts[0] != "zerokara" or len(parts) < 2 or parts[1] not in FLOORS or parts[1] == room:
            continue
        if room == "__init__" or parts[1] == "steps" or FLOORS[parts[1]] > FLOORS[room]:
            faults.append(f"{path} imports {name}, which stands above it")
    return faults


def chamber_faults(path: str, source: str) -> list[str]:
    """What breaks the floors within training/ in the module `path` of it."""
    chamber = path.split("/")[1] if path.count("/") == 2 else ""
    faults = []
    for name in imported_names(ast.parse(source)):
        parts = name.split(".")
        if parts[:2] != ["zerokara", "training"]:
            continue
        other = parts[2] if parts[2] in CHAMBERS else ""
        if other != chamber and CHAMBERS[other] >= CHAMBERS[chamber]:
            faults.append(f"{path} imports {name}, which does not stand below it")
    return faults


def vendor_faults(path: str, source: str) -> list[str]:
    """Imports of a vendor outside its border in the module `path`."""
    vendors = {name.split(".")[0] for name in imported_names(ast.parse(source))}
    return [
        f"{path} imports {vendor}"
        for vendor, border in VENDOR_BORDERS.items()
        if vendor in vendors and not border.fullmatch(path)
    ]


def early_imports(tree: ast.Module) -> Iterator[str]:
    """Packages imported as soon as the module is (not inside a function, nor for type checking only)."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (name.split(".")[0] for name in imported_names(node))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def long_functions(source: str) -> list[str]:
    return [
        f"{node.name} has {length} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def shipped_files(*endings: str) -> list[Path]:
    """Files of the repository that are ours: not what tools or steps made."""
    found = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in SHIPPED_FOLDERS:
        found += [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return sorted(path for path in found if path.name.endswith(endings))


def config_class(path: Path) -> type:
    keys = {line.split(":")[0] for line in path.read_text(encoding="utf-8").splitlines()}
    if "input_model_dir" in keys:
        return ConvertConfig
    if "models" in keys:
        return EvaluateConfig
    if "train_data" in keys:
        return FinetuneConfig
    return TokenizerConfig if "character_coverage" in keys or "output_dir" in keys else PretrainConfig


def test_imports_go_down_by_floors() -> None:
    assert {Path(relative(path)).parts[0].removesuffix(".py") for path in MODULES} - {"__init__"} <= FLOORS.keys()
    faults = [fault for path in MODULES for fault in floor_faults(relative(path), path.read_text(encoding="utf-8"))]
    assert not faults, "\n".join(faults)


def reached(rooms: dict[str, set[str]], room: str) -> set[str]:
    """Rooms that one imports, itself or by way of others."""
    found: set[str] = set()
    waiting = [room]
    while waiting:
        new = rooms.get(waiting.pop(), set()) - found
        found |= new
        waiting += new
    return found


def round_trips(rooms: dict[str, set[str]]) -> list[str]:
    """Rooms that import themselves by way of others."""
    return [room for room in rooms if room in reached(rooms, room)]


def room_imports() -> dict[str, set[str]]:
    """Each room, and those that it imports."""
    rooms: dict[str, set[str]] = {room: set() for room in FLOORS}
    for path in MODULES:
        room = Path(relative(path)).parts[0].removesuffix(".py")
        names = [name.split(".") for name in imported_names(ast.parse(path.read_bytes()))]
        rooms.setdefault(room, set()).update(name[1] for name in names if name[0] == "zerokara" and name[1] in FLOORS)
        rooms[room].discard(room)
    return rooms


def test_imports_never_go_round() -> None:
    assert not round_trips(room_imports())
    assert round_trips({"tokens": {"samples"}, "samples": {"model"}, "model": {"tokens"}, "corpus": {"model"}})
    assert not round_trips({"samples": {"tokens", "config"}, "tokens": {"config"}, "config": set()})


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


def module_imports() -> dict[str, set[str]]:
    """Each module, and those that it imports anywhere."""
    modules = {path: ".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in MODULES}
    names = {name.removesuffix(".__init__") for name in modules.values()}
    found: dict[str, set[str]] = {}
    for path, name in modules.items():
        imported = {each for each in imported_names(ast.parse(path.read_bytes())) if each.startswith("zerokara.")}
        found[name.removesuffix(".__init__")] = {
            each if each in names else each.rpartition(".")[0] for each in imported
        } & names
    return found


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert not round_trips(module_imports())


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("model/shape.py", "from zerokara.training import engine"),
        ("model/shape.py", "def f():\n    import zerokara.huggingface.weight_rules"),
        ("config/loading.py", "from zerokara import corpus"),
        ("huggingface/card.py", "from zerokara.steps.convert import main"),
        ("errors.py", "import zerokara.config"),
    ],
)
def test_an_import_upwards_is_found(path: str, line: str) -> None:
    assert len(floor_faults(path, line)) == 1


def test_an_import_downwards_is_fine() -> None:
    assert not floor_faults(
        "steps/train.py", "from zerokara.training.loop import train_step\nfrom zerokara import manifest"
    )


def test_imports_within_training_go_down() -> None:
    inside = [path for path in MODULES if relative(path).startswith("training/")]
    assert {path.parent.name for path in inside} - {"training"} == CHAMBERS.keys() - {""}
    faults = [fault for path in inside for fault in chamber_faults(relative(path), path.read_text(encoding="utf-8"))]
    assert not faults, "\n".join(faults)
    assert chamber_faults("training/compute/engine.py", "from zerokara.training.planning import schedule")
    assert chamber_faults("training/monitoring/step_metrics.py", "def f():\n    from zerokara.training import session")
    assert not chamber_faults("training/loop.py", "from zerokara.training import compute, guards")


def test_each_vendor_stays_behind_its_border() -> None:
    faults = [fault for path in MODULES for fault in vendor_faults(relative(path), path.read_text(encoding="utf-8"))]
    assert not faults, "\n".join(faults)


def test_a_vendor_outside_its_border_is_found() -> None:
    assert vendor_faults("training/loop.py", "def f():\n    import deepspeed")
    assert vendor_faults("huggingface/weights.py", "from megatron.core import parallel_state")
    assert not vendor_faults("training/compute/zero.py", "import deepspeed")
    assert not vendor_faults("model/megatron_core.py", "from megatron.core.transformer import spec_utils")


def test_settings_are_imported_from_their_own_modules() -> None:
    """`zerokara.config` itself holds nothing: a name that is taken from it would be missed only when it is used."""
    modules = {path.stem for path in (PACKAGE / "config").glob("*.py")}
    faults = []
    for path in shipped_files(".py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            module = getattr(node, "module", None)
            if (module == "zerokara" and "config" in names) or (module == "zerokara.config" and names - modules):
                faults.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}")
    assert not faults, "\n".join(faults)


def test_light_rooms_do_not_wait_for_torch() -> None:
    faults = [
        relative(path)
        for path in MODULES
        if Path(relative(path)).parts[0] in TORCH_FREE
        and {"torch", "transformers", "deepspeed", "megatron"} & set(early_imports(ast.parse(path.read_bytes())))
    ]
    assert not faults, faults
    assert "torch" in set(early_imports(ast.parse("try:\n    import torch.nn\nexcept ImportError:\n    torch = None")))
    assert "torch" not in set(early_imports(ast.parse("def f():\n    import torch")))


def test_the_package_does_not_grow_unnoticed() -> None:
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in MODULES)
    assert PACKAGE_LINES - SLACK_LINES <= lines <= PACKAGE_LINES
    assert PACKAGE_FILES - SLACK_FILES <= len(MODULES) <= PACKAGE_FILES


def test_modules_and_functions_fit_in_a_readers_head() -> None:
    faults = []
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        if (lines := source.count("\n")) > MAX_MODULE_LINES:
            faults.append(f"{relative(path)} has {lines} lines")
        faults += [f"{relative(path)}: {fault}" for fault in long_functions(source)]
    assert not faults, "\n".join(faults)
    assert long_functions("def f():\n" + "    pass\n" * MAX_FUNCTION_LINES)


def test_no_room_for_leftovers() -> None:
    leftovers = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert not [relative(path) for path in MODULES if leftovers & set(Path(relative(path)).with_suffix("").parts)]


@pytest.mark.parametrize(
    "path",
    [path for path in shipped_files(".yaml") if not path.name.startswith(".")],
    ids=lambda path: path.relative_to(ROOT).as_posix(),
)
def test_every_yaml_loads(path: Path) -> None:
    load(config_class(path), path)


def test_nothing_names_a_place_on_one_machine() -> None:
    place = re.compile(r"(?<![\w.~}])/(work|root|home/\w+|mnt|Users)/")
    faults = []
    for path in shipped_files(".py", ".sh", ".md", ".yaml", ".json", ".toml", ".lock", ".ipynb", ".jinja", "run"):
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if place.search(line):
                faults.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not faults, "\n".join(faults)
    assert place.search('open("/root/x")') and place.search(" /home/me/x") and not place.search("a/root/b")


def test_every_text_file_is_opened_as_utf8() -> None:
    """Python's default encoding is the machine's; a text of ours must not depend on it."""
    faults = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            given = {keyword.arg for keyword in node.keywords}
            if name in ("read_text", "write_text") and isinstance(node.func, ast.Attribute) and "encoding" not in given:
                faults.append(f"{relative(path)}:{node.lineno}")
            elif name == "open" and isinstance(node.func, ast.Name) and "encoding" not in given:
                mode = next((k.value for k in node.keywords if k.arg == "mode"), None) or (node.args[1:2] or [None])[0]
                if not (isinstance(mode, ast.Constant) and "b" in str(mode.value)):
                    faults.append(f"{relative(path)}:{node.lineno}")
    assert not faults, "\n".join(faults)


def test_no_code_comes_with_a_model() -> None:
    """Every folder is opened without the code that it may bring, without pickles, and without the network."""
    calls = [
        (relative(path), node)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    opening = [(path, node) for path, node in calls if getattr(node.func, "attr", "") == "from_pretrained"]
    assert len(opening) >= 3
    for path, node in opening:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        wanted = {"trust_remote_code": "False", "local_files_only": "True"}
        assert wanted.items() <= given.items(), f"{path}:{node.lineno}"
    unsafe = {"torch.load", "pickle.load", "pickle.loads", "joblib.load", "yaml.load"}
    assert not [(path, node.lineno) for path, node in calls if ast.unparse(node.func) in unsafe]


def pickles(source: str) -> list[str]:
    """What in a module pickles, or has torch pickle for a collective: whoever reads a pickle runs what it says."""
    tree = ast.parse(source)
    said = {str(getattr(node, key)) for node in ast.walk(tree) for key in ("id", "attr") if hasattr(node, key)}
    said |= {part for name in imported_names(tree) for part in name.split(".")}
    unsafe = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?|c?pickle|dill|cloudpickle")
    return sorted(name for name in said if unsafe.fullmatch(name))


def test_processes_send_each_other_no_pickles() -> None:
    used = {relative(path): pickles(path.read_text(encoding="utf-8")) for path in MODULES}
    assert not {path: names for path, names in used.items() if names}
    assert pickles("torch.distributed.broadcast_object_list(found)") and pickles("def f():\n    import pickle")
    assert pickles("from torch.distributed import all_gather_object")


def test_training_knows_no_task() -> None:
    """It is handed an objective, samples and validations."""
    above = re.compile(r"zerokara\.(examples|evaluation|finetuning|config\.finetune)")
    for path in sorted((PACKAGE / "training").rglob("*.py")):
        names = [name for name in imported_names(ast.parse(path.read_bytes())) if above.match(name)]
        assert not names, f"{relative(path)} imports {names}"


def test_no_task_is_told_by_its_class() -> None:
    """What differs between pretraining and fine-tuning is a value of the plan, or a method of both."""
    asked = re.compile(
        r"isinstance\([^)]*\b(\w*RunConfig|PretrainConfig|FinetuneConfig|DataPlan|ExampleData|Causal|Pairs)\b"
    )
    assert not [relative(path) for path in MODULES if asked.search(path.read_text(encoding="utf-8"))]
    assert asked.search("if isinstance(plan.resolved, FinetuneRunConfig):")


def test_training_names_no_family() -> None:
    """What it must know of a model it asks of `config.architectures.Architecture`."""
    for path in sorted((PACKAGE / "training").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            said = {getattr(node, "value", None), getattr(node, "id", None), getattr(node, "attr", None)}
            names = {one for one in said if isinstance(one, str)} & {*ARCHITECTURES, "Decoder", "EncoderDecoder"}
            assert not names, f"{relative(path)}:{getattr(node, 'lineno', 0)} names {names}"


def test_every_family_has_its_entries() -> None:
    from zerokara.huggingface.families import FAMILIES
    from zerokara.model.builder import _FAMILIES
    from zerokara.samples.objective import OBJECTIVES

    assert get_args(Name) == tuple(ARCHITECTURES) and _FAMILIES.keys() == ARCHITECTURES.keys()
    assert FAMILIES.keys() == {name for name, each in ARCHITECTURES.items() if not each.no_class}
    assert {each.objective for each in ARCHITECTURES.values()} == OBJECTIVES.keys()
