"""No step writes over what it did not make: without --redo and with it, in its dry run and at its start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from configs import config_of, typed

from zerokara import manifest
from zerokara.config.convert_config import ConvertConfig
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.errors import Fault
from zerokara.huggingface import exported_folder
from zerokara.huggingface.exported_folder import STEP
from zerokara.steps import preflight, tokenize, train_tokenizer
from zerokara.tokenizer import sampling
from zerokara.tokens import encode
from zerokara.tokens.indexed import TokenPaths

RUNS = [train_tokenizer.main, tokenize.main]
KEYS = ["output_dir", "output_prefix"]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_step(step: int, tiny_data: dict[str, str], place: Path, *more: str, corpus: object = None) -> int:
    """The exit code of step 1 or 2 whose outputs are at this place."""
    config = {1: "/dev/null", 2: tiny_data["config"]}[step]
    of_input = {1: "input", 2: "input_jsonl"}[step]
    settings = [f"{of_input}={corpus or tiny_data['input_jsonl']}", f"{KEYS[step - 1]}={place}"]
    settings += ["vocab_size=300"] if step == 1 else []
    return RUNS[step - 1](["--config", config, *typed(*settings), *more])


def record(path: Path, step: str, *names: str) -> None:
    """Write the manifest of a step that has made these files beside it."""
    made = {"all": [path.parent / name for name in names]}
    manifest.write(path, manifest.StepSpec(step, {}), made, {}, 1.0)


@pytest.mark.parametrize("options", [[], ["--redo"], ["--dry-run"]])
@pytest.mark.parametrize(
    ("step", "name"),
    [
        (1, "tokenizer.model"),
        (1, "report.html"),
        (1, "training.log"),
        (2, "tokens_text_document.bin"),
        (2, "tokens_valid_text_document.idx"),
        (2, "tokens_quarantine.jsonl"),
    ],
)
def test_a_step_leaves_others_files_alone(
    tiny_data: dict[str, str],
    tmp_path: Path,
    step: int,
    name: str,
    options: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(b"mine")
    place = {1: tmp_path, 2: tmp_path / "tokens"}[step]
    assert run_step(step, tiny_data, place, *options) == 2
    printed = capfd.readouterr().err
    assert f"{KEYS[step - 1]} = {place}: " in printed and f" {name}, " in printed
    assert contents(tmp_path) == {name: b"mine"}


@pytest.mark.parametrize("options", [[], ["--redo"]])
@pytest.mark.parametrize("kind", ["export", "run", "begun run", "in a run", "another program"])
def test_another_steps_folder_is_none_of_step_1(
    tiny_data: dict[str, str], tmp_path: Path, kind: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"its tokenizer")
    if kind in ("export", "run"):
        record(tmp_path / "manifest.json", {"export": "convert", "run": "3_train"}[kind], "tokenizer.model")
    else:
        name = "manifest.json" if kind == "another program" else "run.json"
        (tmp_path / name).write_text('{"name": "a web page"}', encoding="utf-8")
    before = contents(tmp_path)
    folder = tmp_path / "tokenizer" if kind == "in a run" else tmp_path
    assert run_step(1, tiny_data, folder, *options) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and "Traceback" not in printed and "--redo" not in printed.partition(";")[2]
    assert contents(tmp_path) == before


def faults_of(config_class: type[TokenizerConfig] | type[PretrainConfig], **values: str) -> list[Fault]:
    made = config_class(**values)  # type: ignore[arg-type]
    of = preflight.of_tokenizer(made) if isinstance(made, TokenizerConfig) else preflight.of_tokens(made)
    return list(preflight.faults(made, of))


def stop(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_step_that_was_killed_knows_its_own_files(
    tiny_data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the first name and the manifest; the next start stopped before it has finished anything."""
    folder, paths = tmp_path / "tokenizer", TokenPaths(str(tmp_path / "tokens"))
    folder.mkdir()
    (folder / "tokenizer.model").touch()
    assert faults_of(TokenizerConfig, output_dir=str(folder))
    (folder / preflight.WORK_NAME).mkdir()
    Path(f"{paths.train}.bin").touch()
    assert faults_of(PretrainConfig, output_prefix=paths.output_prefix)
    paths.work_folder.mkdir()
    assert faults_of(PretrainConfig, output_prefix=paths.output_prefix)
    (paths.work_folder / "plan.json").touch()
    for module, function in ((sampling, "draw"), (encode, "encode")):
        monkeypatch.setattr(module, function, stop)
    for _ in range(2):
        assert not faults_of(TokenizerConfig, output_dir=str(folder))
        assert not faults_of(PretrainConfig, output_prefix=paths.output_prefix)
        assert run_step(1, tiny_data, folder) == run_step(2, tiny_data, Path(paths.output_prefix)) == 130


def test_a_corpus_that_was_refused_and_mended_is_tokenised(
    tiny_data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refused run has left its quarantine file, which the manifest of the run before does not name."""
    corpus, prefix = tmp_path / "corpus.jsonl", tmp_path / "out" / "tokens"
    paths, good = TokenPaths(str(prefix)), Path(tiny_data["input_jsonl"]).read_bytes()

    def code_of(content: bytes) -> int:
        corpus.write_bytes(content)
        return run_step(2, tiny_data, prefix, "--redo", corpus=corpus)

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
    assert not faults_of(TokenizerConfig, output_dir=str(tmp_path))
    (tmp_path / "report.html").touch()
    (tmp_path / preflight.LOG_NAME).write_text(preflight.LOG_HEADER + "of a training that failed\n", encoding="utf-8")
    (fault,) = faults_of(TokenizerConfig, output_dir=str(tmp_path))
    assert " report.html, " in fault.rule and preflight.LOG_NAME not in fault.rule


@pytest.mark.parametrize("link", ["itself", "symbolic link", "hard link"])
def test_what_a_step_writes_is_not_its_input(
    tiny_data: dict[str, str], tmp_path: Path, link: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The quarantine file of an earlier run of step 2, mended and given again; under whatever name."""
    prefix = tmp_path / "tokens"
    given = tmp_path / "tokens_quarantine.jsonl"
    given.write_bytes(b"".join(json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(200)))
    record(TokenPaths(str(prefix)).manifest, "tokenize", given.name)
    if link != "itself":
        given = tmp_path / "input.jsonl"
        (os.link if link == "hard link" else os.symlink)(tmp_path / "tokens_quarantine.jsonl", given)
    before = contents(tmp_path)
    assert run_step(2, tiny_data, prefix, "--redo", corpus=given) == 2
    assert f" {given}, " in capfd.readouterr().err
    assert contents(tmp_path) == before
    report = tmp_path / "report.txt"
    report.write_text("text\n" * 100, encoding="utf-8")
    assert run_step(1, tiny_data, tmp_path, "--redo", corpus=report) == 2
    assert f" {report}, " in capfd.readouterr().err


def test_no_step_writes_into_a_run(tmp_path: Path) -> None:
    (tmp_path / "run.json").touch()
    inside = str(tmp_path / "deep" / "er")
    run, export = config_of(output_model_dir=inside), ConvertConfig(output_tokenizer_and_model_dir=inside)
    for faults in (
        faults_of(TokenizerConfig, output_dir=inside),
        faults_of(PretrainConfig, output_prefix=inside),
        list(preflight.faults(run, preflight.of_run(run))),
        list(preflight.faults(export, preflight.of_export(export))),
    ):
        assert len(faults) == 1 and f"run folder {tmp_path}" in faults[0].rule
    run = config_of(output_model_dir=tmp_path)
    assert not list(preflight.faults(run, preflight.of_run(run))), "the run itself resumes"


def test_what_somebody_wrote_into_an_export_is_found(tmp_path: Path) -> None:
    for name in ("README.md", "model.safetensors"):
        (tmp_path / name).write_text("ours", encoding="utf-8")
    record(tmp_path / "manifest.json", STEP, "README.md", "model.safetensors")
    (tmp_path / "upload.manifest.json").touch()
    (tmp_path / "model.safetensors").touch()  # copied: another time of change, the same content
    assert exported_folder.to_keep(tmp_path) == exported_folder.to_keep(tmp_path / "new") == []
    (tmp_path / "README.md").write_text("mine", encoding="utf-8")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    assert exported_folder.to_keep(tmp_path) == ["README.md", "notes/a.txt"]
