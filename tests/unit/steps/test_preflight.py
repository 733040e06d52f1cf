"""No step begins whose output cannot be written or is somebody else's: in its dry run, at its start, with --redo."""

import errno
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from configs import typed
from programs import run_program

from zerokara.base import manifest
from zerokara.base.errors import Fault, UserError
from zerokara.config.convert_config import ConvertConfig
from zerokara.config.finetune_config import FinetuneConfig
from zerokara.config.model import ARCHITECTURES
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.examples.example_files import ExamplePaths
from zerokara.publishing import exported_folder
from zerokara.publishing.exported_folder import STEP
from zerokara.steps import preflight, tokenize, train_tokenizer
from zerokara.tokenizer import sampling
from zerokara.tokens import encode
from zerokara.tokens.indexed import TokenPaths

ROOT = Path(__file__).resolve().parents[3]


def contents(folder: Path) -> dict[str, bytes]:
    """Files by their name, and empty bytes for folders."""
    found = {path.relative_to(folder): path for path in folder.rglob("*")}
    return {str(name): path.read_bytes() if path.is_file() else b"" for name, path in found.items()}


def record(path: Path, step: str, *names: str, facts: Any = None) -> None:
    """Write the manifest of a step that has made these files beside it."""
    made = {"all": [path.parent / name for name in names]}
    manifest.write(path, manifest.StepSpec(step, {}), made, facts or {}, 1.0)


def test_torch_is_not_loaded_before_settings_and_outputs_are_checked(tiny_data: dict[str, str], tmp_path: Path) -> None:
    """In one process: each step refuses a wrong setting, steps 3 and 4 a place that they cannot write to or read."""
    (tmp_path / "file").touch()
    blocked = tmp_path / "file" / "out"
    steps = ("train_tokenizer", "tokenize", "count_tokens", "train", "convert_to_hf", "upload")
    refused = {name: [["--config", "/dev/null", *typed("no_such_key=1")]] for name in steps}
    refused["train"] += [["--config", tiny_data["config"], *typed(f"output_model_dir={blocked}")]]
    refused["convert_to_hf"] += [["--config", "/dev/null", *typed(f"input_model_dir={blocked}"), "--dry-run"]]
    program = (
        "import importlib, sys\n"
        f"for name, lines in {refused}.items():\n"
        "    main = importlib.import_module(f'zerokara.steps.{name}').main\n"
        "    assert [main(line) for line in lines] == [2] * len(lines), name\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), name\n"
    )
    said = run_program(program).stderr
    assert said.count("no_such_key = 1: ") == 6 and said.count(str(blocked)) >= 2


STEPS: dict[str, tuple[Any, Any]] = {
    "output_dir": (TokenizerConfig, preflight.of_tokenizer),
    "output_prefix": (PretrainConfig, preflight.of_tokens),
    "output_model_dir": (PretrainConfig, preflight.of_run),
    "output_tokenizer_and_model_dir": (ConvertConfig, preflight.of_export),
}
"""Configuration and outputs of each step, by the setting that names their place."""


def faults_at(key: str, place: object) -> list[Fault]:
    """The faults of a step whose outputs are at this place."""
    config_class, outputs_of = STEPS[key]
    config = config_class(**{key: str(place)})
    return list(preflight.faults(config, outputs_of(config)))


def test_each_file_that_a_step_leaves_is_asked_for(tmp_path: Path) -> None:
    paths = TokenPaths(str(tmp_path / "tokens"))
    for key, place, path in (
        ("output_dir", tmp_path, tmp_path / "report.html"),
        ("output_prefix", paths.output_prefix, Path(f"{paths.valid}.idx")),
        ("output_prefix", paths.output_prefix, paths.quarantine),
    ):
        assert faults_at(key, place) == []
        path.mkdir()
        assert [fault.key for fault in faults_at(key, place)] == [key], path
        path.rmdir()
    assert faults_at("output_prefix", tmp_path / ("n" * 215)), "its files' names are longer"


def test_an_export_takes_the_place_of_a_folder_but_of_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = "output_tokenizer_and_model_dir"
    (tmp_path / "file").touch()
    assert faults_at(key, tmp_path) == faults_at(key, tmp_path / "new" / "newer") == []
    assert faults_at(key, tmp_path / "file") and faults_at(key, tmp_path / "file" / "x")
    assert faults_at(key, "/proc"), "a mount point"
    shape = SimpleNamespace(architecture="llama", traits=ARCHITECTURES["llama"])
    source: Any = SimpleNamespace(run_dir=tmp_path / "run", shape=shape)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert faults_at(key, ".") == []
    for place, reason in (("/proc", "a mount point"), (".", "the current folder"), ("../here", "the current folder")):
        with pytest.raises(UserError, match=f"is {reason}, which cannot be replaced"):
            exported_folder.check_place(ConvertConfig(output_tokenizer_and_model_dir=str(place)), source)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("new/newer/newest", ""),
        ("file/below/it", os.strerror(errno.ENOTDIR)),
        ("folder", "folder is a folder"),
        ("link/below", "link is a broken link"),
        ("n" * 240, "240 bytes"),
        ("/proc/model", "/proc: "),
    ],
)
def test_what_is_in_the_way_is_named_and_nothing_is_left(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").write_text("text", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = contents(tmp_path), tmp_path.stat().st_mtime_ns
    found = preflight._reason_against(tmp_path / name)
    assert reason in found and bool(found) == bool(reason)
    assert (contents(tmp_path), tmp_path.stat().st_mtime_ns) == before


def test_a_folder_in_which_the_user_may_not_write_is_told() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder, user = Path(name), os.geteuid()
        folder.chmod(0o555)
        if user == 0:  # may write anywhere
            os.seteuid(65534)
        try:
            for path in (folder / "file", folder / "new" / "newer"):
                assert preflight._reason_against(path) == f"{folder}: {os.strerror(errno.EACCES)}"
        finally:
            os.seteuid(user)
            folder.chmod(0o755)


@pytest.fixture
def run_step(tiny_data: dict[str, str], capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs step 1 or 2 with its outputs at a place: its exit code and its errors."""

    def run(step: int, place: Path, *more: str, corpus: object = tiny_data["input_jsonl"]) -> tuple[int, str]:
        if step == 1:
            given = ["--config", "/dev/null", *typed(f"input={corpus}", f"output_dir={place}", "vocab_size=300")]
        else:
            given = ["--config", tiny_data["config"], *typed(f"input_jsonl={corpus}", f"output_prefix={place}")]
        code = [train_tokenizer, tokenize][step - 1].main([*given, *more])
        return code, capfd.readouterr().err

    return run


@pytest.mark.parametrize("options", [[], ["--redo"], ["--dry-run"]])
@pytest.mark.parametrize("name", ["tokenizer.model", "training.log", "_text_document.bin", "_quarantine.jsonl"])
def test_a_step_leaves_others_files_alone(run_step: Any, tmp_path: Path, name: str, options: Any) -> None:
    step, key, place = 1, "output_dir", tmp_path
    if name.startswith("_"):
        step, key, place, name = 2, "output_prefix", tmp_path / "tokens", f"tokens{name}"
    (tmp_path / name).write_bytes(b"mine")
    code, printed = run_step(step, place, *options)
    assert code == 2 and f"{key} = {place}: " in printed and f" {name}, " in printed
    assert contents(tmp_path) == {name: b"mine"}


@pytest.mark.parametrize("kind", ["export", "begun run", "another program"])
def test_another_steps_folder_is_none_of_step_1(run_step: Any, tmp_path: Path, kind: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"its tokenizer")
    if kind == "export":
        record(tmp_path / "manifest.json", "convert", "tokenizer.model")
    else:
        name = "manifest.json" if kind == "another program" else "run.json"
        (tmp_path / name).write_text('{"name": "a web page"}', encoding="utf-8")
    before = contents(tmp_path)
    code, printed = run_step(1, tmp_path, "--redo")
    assert code == 2 and printed.startswith("error: ") and "Traceback" not in printed
    assert "--redo" not in printed.partition(";")[2]
    assert contents(tmp_path) == before


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_killed_step_knows_its_own_files(run_step: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the first name and the manifest; the next start stopped before it has finished anything."""
    folder, paths = tmp_path / "tokenizer", TokenPaths(str(tmp_path / "tokens"))
    folder.mkdir()
    (folder / "tokenizer.model").touch()
    assert faults_at("output_dir", folder)
    (folder / preflight.WORK_NAME).mkdir()
    Path(f"{paths.train}.bin").touch()
    assert faults_at("output_prefix", paths.output_prefix)
    paths.work_folder.mkdir()
    assert faults_at("output_prefix", paths.output_prefix)
    (paths.work_folder / "plan.json").touch()
    for module, function in ((sampling, "draw"), (encode, "encode")):
        monkeypatch.setattr(module, function, stop)
    for _ in range(2):
        assert not faults_at("output_dir", folder)
        assert not faults_at("output_prefix", paths.output_prefix)
        assert [run_step(1, folder)[0], run_step(2, paths.output_prefix)[0]] == [130, 130]


def test_a_killed_preparation_knows_its_own_examples(tmp_path: Path) -> None:
    paths = ExamplePaths(str(tmp_path / "x"))
    config = FinetuneConfig(output_prefix=paths.output_prefix)
    paths.texts("test").touch()
    (fault,) = preflight.faults(config, preflight.of_examples(config))
    assert fault.key == "output_prefix" and " x_test_examples.jsonl, " in fault.rule
    paths.lock.touch()
    assert not preflight.faults(config, preflight.of_examples(config))


def test_a_corpus_that_was_refused_and_mended_is_tokenised(
    run_step: Any, tiny_data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refused run has left its quarantine file, which the manifest of the run before does not name."""
    corpus, prefix = tmp_path / "corpus.jsonl", tmp_path / "out" / "tokens"
    paths, good = TokenPaths(str(prefix)), Path(tiny_data["input_jsonl"]).read_bytes()

    def code_of(content: bytes) -> int:
        corpus.write_bytes(content)
        return int(run_step(2, prefix, "--redo", corpus=corpus)[0])

    assert (code_of(good), code_of(good + b"{broken\n" * 60)) == (0, 2)
    assert paths.quarantine.exists()
    with monkeypatch.context() as stopped:  # before anything is finished: the work folder goes
        stopped.setattr(encode, "encode", stop)
        assert code_of(good) == 130
    assert not paths.work_folder.exists()
    assert code_of(good) == 0
    assert not paths.quarantine.exists()


def test_a_file_beside_what_a_manifest_names_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").touch()
    record(tmp_path / "manifest.json", "train_tokenizer", "tokenizer.model")
    assert not faults_at("output_dir", tmp_path)
    (tmp_path / "report.html").touch()
    (tmp_path / preflight.LOG_NAME).write_text(preflight.LOG_HEADER + "of a training that failed\n", encoding="utf-8")
    (fault,) = faults_at("output_dir", tmp_path)
    assert " report.html, " in fault.rule and preflight.LOG_NAME not in fault.rule


@pytest.mark.parametrize("link", ["itself", "hard link"])
def test_what_a_step_writes_is_not_its_input(run_step: Any, tmp_path: Path, link: str) -> None:
    """The quarantine file of an earlier run of step 2, mended and given again; under whatever name."""
    prefix = tmp_path / "tokens"
    given = tmp_path / "tokens_quarantine.jsonl"
    given.write_bytes(b"".join(json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(200)))
    record(TokenPaths(str(prefix)).manifest, "tokenize", given.name)
    if link != "itself":
        given = tmp_path / "input.jsonl"
        os.link(tmp_path / "tokens_quarantine.jsonl", given)
    before = contents(tmp_path)
    code, printed = run_step(2, prefix, "--redo", corpus=given)
    assert code == 2 and f" {given}, " in printed
    assert contents(tmp_path) == before


def test_what_somebody_wrote_into_an_export_is_found(tmp_path: Path) -> None:
    for name in ("README.md", "model.safetensors"):
        (tmp_path / name).write_text("ours", encoding="utf-8")
    record(tmp_path / "manifest.json", STEP, "README.md", "model.safetensors")
    (tmp_path / "model.safetensors").touch()  # copied: another time of change, the same content
    assert exported_folder.to_keep(tmp_path) == exported_folder.to_keep(tmp_path / "new") == []
    (tmp_path / "README.md").write_text("mine", encoding="utf-8")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    assert exported_folder.to_keep(tmp_path) == ["README.md", "notes/a.txt"]
