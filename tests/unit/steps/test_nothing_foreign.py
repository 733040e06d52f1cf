"""No step writes over what it did not make: without --redo and with it, in its dry run and at its start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
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

Main = Callable[[list[str]], int]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def of_step_1(tiny_data: dict[str, str], output_dir: Path, *more: str, entry: object = None) -> list[str]:
    entry = entry or tiny_data["input_jsonl"]
    return ["--config", "/dev/null", *typed(f"input={entry}", f"output_dir={output_dir}", "vocab_size=300"), *more]


def of_step_2(tiny_data: dict[str, str], prefix: Path, *more: str) -> list[str]:
    return ["--config", tiny_data["config"], *typed(f"output_prefix={prefix}"), *more]


@pytest.mark.parametrize("options", [[], ["--redo"], ["--dry-run"]])
@pytest.mark.parametrize("name", ["tokenizer.model", "report.html", "training.log"])
def test_step_1_leaves_others_files_alone(
    tiny_data: dict[str, str], tmp_path: Path, name: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(b"mine")
    assert train_tokenizer.main(of_step_1(tiny_data, tmp_path, *options)) == 2
    printed = capsys.readouterr().err
    assert f"output_dir = {tmp_path}" in printed and f" {name}, " in printed
    assert contents(tmp_path) == {name: b"mine"}


@pytest.mark.parametrize("options", [[], ["--redo"], ["--dry-run"]])
@pytest.mark.parametrize("ending", ["_text_document.bin", "_valid_text_document.idx", "_quarantine.jsonl"])
def test_step_2_leaves_others_files_alone(
    tiny_data: dict[str, str], tmp_path: Path, ending: str, options: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"tokens{ending}").write_bytes(b"mine")
    assert tokenize.main(of_step_2(tiny_data, tmp_path / "tokens", *options)) == 2
    printed = capfd.readouterr().err
    assert f"output_prefix = {tmp_path / 'tokens'}: " in printed and f" tokens{ending}, " in printed
    assert contents(tmp_path) == {f"tokens{ending}": b"mine"}


@pytest.mark.parametrize("options", [[], ["--redo"]])
@pytest.mark.parametrize("kind", ["export", "run", "begun run", "in a run", "another program"])
def test_another_steps_folder_is_none_of_step_1(
    tiny_data: dict[str, str], tmp_path: Path, kind: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"its tokenizer")
    if kind in ("export", "run"):
        work = manifest.StepSpec("convert" if kind == "export" else "3_train", {})
        manifest.write(tmp_path / "manifest.json", work, {"all": [tmp_path / "tokenizer.model"]}, {}, 1.0)
    elif kind == "another program":
        (tmp_path / "manifest.json").write_text('{"name": "a web page"}', encoding="utf-8")
    else:
        (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    before = contents(tmp_path)
    folder = tmp_path / "tokenizer" if kind == "in a run" else tmp_path
    assert train_tokenizer.main(of_step_1(tiny_data, folder, *options)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and "Traceback" not in printed and "--redo" not in printed.partition(";")[2]
    assert contents(tmp_path) == before


def faults_of(config_class: type[TokenizerConfig] | type[PretrainConfig], **values: str) -> list[Fault]:
    made = config_class(**values)  # type: ignore[arg-type]
    of = preflight.of_tokenizer(made) if isinstance(made, TokenizerConfig) else preflight.of_tokens(made)
    return list(preflight.faults(made, of))


def test_a_step_that_was_killed_knows_its_own_files(tmp_path: Path) -> None:
    """Between the first name that a file took and the manifest."""
    (tmp_path / "tokenizer.model").touch()
    assert faults_of(TokenizerConfig, output_dir=str(tmp_path))
    (tmp_path / preflight.WORK_NAME).mkdir()
    assert not faults_of(TokenizerConfig, output_dir=str(tmp_path))
    paths = TokenPaths(str(tmp_path / "tokens"))
    Path(f"{paths.train}.bin").touch()
    assert faults_of(PretrainConfig, output_prefix=paths.output_prefix)
    paths.work_folder.mkdir()
    assert faults_of(PretrainConfig, output_prefix=paths.output_prefix)
    (paths.work_folder / "plan.json").touch()
    assert not faults_of(PretrainConfig, output_prefix=paths.output_prefix)


def test_a_corpus_that_was_refused_and_mended_is_tokenised(
    tiny_data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The refused run has left its quarantine file, which the manifest of the run before does not name."""
    corpus, prefix = tmp_path / "corpus.jsonl", tmp_path / "out" / "tokens"
    good = Path(tiny_data["input_jsonl"]).read_bytes()
    given = of_step_2(tiny_data, prefix, *typed(f"input_jsonl={corpus}"), "--redo")
    for content, code in ((good, 0), (good + b"{broken\n" * 60, 2)):
        corpus.write_bytes(content)
        assert tokenize.main(given) == code, capfd.readouterr().err
    assert TokenPaths(str(prefix)).quarantine.exists()
    corpus.write_bytes(good)
    with monkeypatch.context() as stopped:  # before anything is finished: the work folder goes
        stopped.setattr(encode, "encode", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert tokenize.main(given) == 130
    assert not TokenPaths(str(prefix)).work_folder.exists()
    assert tokenize.main(given) == 0, capfd.readouterr().err
    assert not TokenPaths(str(prefix)).quarantine.exists()


def test_a_run_after_a_killed_one_that_is_stopped_disowns_nothing(
    tiny_data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the first name and the manifest; the next start stopped before it has finished anything."""

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    first, second = tmp_path / "tokenizer", tmp_path / "tokens"
    (first / preflight.WORK_NAME).mkdir(parents=True)
    (first / "tokenizer.model").touch()
    paths = TokenPaths(str(second))
    Path(f"{paths.train}.bin").touch()
    paths.work_folder.mkdir()
    (paths.work_folder / "plan.json").touch()
    with monkeypatch.context() as stopped:
        stopped.setattr(sampling, "draw", stop)
        stopped.setattr(encode, "encode", stop)
        assert train_tokenizer.main(of_step_1(tiny_data, first)) == 130
        assert tokenize.main(of_step_2(tiny_data, second)) == 130
    assert not faults_of(TokenizerConfig, output_dir=str(first))
    assert not faults_of(PretrainConfig, output_prefix=str(second))


def test_a_file_beside_what_a_manifest_names_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").touch()
    made = {"tokenizer": [tmp_path / "tokenizer.model"]}
    manifest.write(tmp_path / "manifest.json", manifest.StepSpec("train_tokenizer", {}), made, {}, 1.0)
    assert not faults_of(TokenizerConfig, output_dir=str(tmp_path))
    (tmp_path / "report.html").touch()
    (tmp_path / preflight.LOG_NAME).write_text(preflight.LOG_HEADER + "of a training that failed\n", encoding="utf-8")
    assert [fault.rule for fault in faults_of(TokenizerConfig, output_dir=str(tmp_path))] == [
        f"cannot be written: {tmp_path} holds report.html, which no run of this step wrote"
    ]


@pytest.mark.parametrize("link", ["itself", "symbolic link", "hard link"])
def test_what_a_step_writes_is_not_its_input(
    tiny_data: dict[str, str], tmp_path: Path, link: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The quarantine file of an earlier run of step 2, mended and given again; under whatever name."""
    prefix = tmp_path / "tokens"
    given = tmp_path / "tokens_quarantine.jsonl"
    given.write_bytes(b"".join(json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(200)))
    manifest.write(
        TokenPaths(str(prefix)).manifest, manifest.StepSpec("tokenize", {}), {"tokens": [given]}, {"skipped": {}}, 1.0
    )
    if link != "itself":
        given = tmp_path / "input.jsonl"
        (os.link if link == "hard link" else os.symlink)(tmp_path / "tokens_quarantine.jsonl", given)
    before = contents(tmp_path)
    assert tokenize.main(of_step_2(tiny_data, prefix, *typed(f"input_jsonl={given}"), "--redo")) == 2
    assert f" {given}, " in capfd.readouterr().err
    assert contents(tmp_path) == before
    report = tmp_path / "report.txt"
    report.write_text("text\n" * 100, encoding="utf-8")
    assert train_tokenizer.main(of_step_1(tiny_data, tmp_path, "--redo", entry=report)) == 2
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
    made = {"all": [tmp_path / "README.md", tmp_path / "model.safetensors"]}
    manifest.write(tmp_path / "manifest.json", manifest.StepSpec(STEP, {}), made, {}, 1.0)
    (tmp_path / "upload.manifest.json").touch()
    (tmp_path / "model.safetensors").touch()  # copied: another time of change, the same content
    assert exported_folder.to_keep(tmp_path) == exported_folder.to_keep(tmp_path / "new") == []
    (tmp_path / "README.md").write_text("mine", encoding="utf-8")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    assert exported_folder.to_keep(tmp_path) == ["README.md", "notes/a.txt"]
