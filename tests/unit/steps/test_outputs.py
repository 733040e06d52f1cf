"""Every step refuses an output that cannot be written, in its dry run and at its start, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from configs import config_of

from zerokara import manifest
from zerokara.config.convert_config import ConvertConfig
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.errors import UserError
from zerokara.huggingface.exported_folder import MANIFEST_NAME, STEP
from zerokara.steps import check_line, count_tokens, outputs, tokenize, train, train_tokenizer, upload
from zerokara.tokens.layout import TokenPaths

ROOT = Path(__file__).resolve().parents[3]
Main = Callable[[list[str]], int]


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A place below a file."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "out"


def settings(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("main", "key"),
    [
        (train_tokenizer.main, "output_dir"),
        (tokenize.main, "output_prefix"),
        (train.main, "output_model_dir"),
    ],
)
def test_a_place_below_a_file_is_refused(
    main: Main,
    key: str,
    dry: bool,
    tiny_data: dict[str, str],
    blocked: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    of_tokenizer = main is train_tokenizer.main
    given = ["--config", "/dev/null"] if of_tokenizer else ["--config", tiny_data["config"]]
    given += settings(*([f"input={tiny_data['input_jsonl']}"] if of_tokenizer else []), f"{key}={blocked}")
    before = left(blocked.parents[1])
    assert main([*given, *(["--dry-run"] if dry else [])]) == 2
    printed = capfd.readouterr()
    assert f"error: --set: {key} = {blocked}: " in printed.err and f"{blocked.parent} is a file" in printed.err
    assert not printed.out and left(blocked.parents[1]) == before


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("module", "key"), [("train", "output_model_dir"), ("convert_to_hf", "output_tokenizer_and_model_dir")]
)
def test_torch_is_not_loaded_before_it(
    module: str, key: str, dry: bool, tiny_data: dict[str, str], blocked: Path
) -> None:
    program = (
        f"import sys; from zerokara.steps import {module}; code = {module}.main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    file = tiny_data["config"] if module == "train" else "/dev/null"
    command = [sys.executable, "-c", program, "--config", file, *settings(f"{key}={blocked}")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "original_codes")}
    done = subprocess.run(
        [*command, *(["--dry-run"] if dry else [])], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert f"{key} = {blocked}: " in done.stderr


@pytest.mark.parametrize("dry", [True, False])
def test_the_record_of_an_upload(tmp_path: Path, dry: bool, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    work, files = manifest.StepSpec(STEP, {}), {"all": [tmp_path / "config.json"]}
    manifest.write(tmp_path / MANIFEST_NAME, work, files, {"proof": {"holds": True}}, 1.0)
    given = settings(f"output_tokenizer_and_model_dir={tmp_path}", "huggingface_name=ada/first")
    (tmp_path / outputs.UPLOAD_RECORD_NAME).mkdir()
    assert upload.main(["--config", "/dev/null", *given, *(["--dry-run"] if dry else [])]) == 2
    printed = capsys.readouterr().err
    assert f"output_tokenizer_and_model_dir = {tmp_path}: " in printed
    assert f"{outputs.UPLOAD_RECORD_NAME} is a folder" in printed


@pytest.mark.parametrize("dry", [True, False])
def test_the_configuration_that_a_count_is_written_into(
    tiny_data: dict[str, str], dry: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outputs, "reason_against_file", lambda _: "Read-only file system")
    options = ["--config", tiny_data["config"]]
    assert count_tokens.main(options) == 0, "without --write nothing is written"
    assert count_tokens.main([*options, "--write", *(["--dry-run"] if dry else [])]) == 2
    assert f"error: {tiny_data['config']}: train_tokens = " in capsys.readouterr().err


def test_each_file_that_a_step_leaves_is_asked_for(tmp_path: Path) -> None:
    tokenizer = TokenizerConfig(output_dir=str(tmp_path))
    training = config_of(output_prefix=tmp_path / "tokens")
    paths = TokenPaths(training.output_prefix)
    assert not [*outputs.of_tokenizer(tokenizer), *outputs.of_tokens(training)]
    for path in (tmp_path / "report.html", tmp_path / outputs.LOG_NAME, tmp_path / "manifest.json"):
        path.mkdir()
        assert [fault.key for fault in outputs.of_tokenizer(tokenizer)] == ["output_dir"], path
        path.rmdir()
    for path in (Path(f"{paths.train}.bin"), Path(f"{paths.valid}.idx"), paths.quarantine, paths.manifest):
        path.mkdir()
        assert [fault.key for fault in outputs.of_tokens(training)] == ["output_prefix"], path
        path.rmdir()
    paths.work_folder.touch()
    assert [fault.key for fault in outputs.of_tokens(training)] == ["output_prefix"]
    long = config_of(output_prefix=tmp_path / ("n" * 215))
    assert [fault.key for fault in outputs.of_tokens(long)] == ["output_prefix"], "its files' names are longer"


def test_an_export_takes_the_place_of_a_folder_but_of_no_file(tmp_path: Path) -> None:
    def printed(folder: Path) -> list[str | None]:
        return [fault.key for fault in outputs.of_export(ConvertConfig(output_tokenizer_and_model_dir=str(folder)))]

    (tmp_path / "file").touch()
    assert printed(tmp_path) == printed(tmp_path / "new" / "newer") == []
    assert printed(tmp_path / "file") == printed(tmp_path / "file" / "x") == ["output_tokenizer_and_model_dir"]
    assert printed(Path("/proc")) == ["output_tokenizer_and_model_dir"], "a mount point"


def test_work_that_is_done_needs_no_room(tmp_path: Path) -> None:
    faults = list(outputs.of_run(config_of(output_model_dir="/proc/run")))
    assert [fault.key for fault in faults] == ["output_model_dir"]
    record = tmp_path / "manifest.json"
    with pytest.raises(UserError):
        outputs.check_writable(faults, unless=record)
    record.touch()
    outputs.check_writable(faults, unless=record)


def test_a_line_is_told_all_of_them_at_once(tmp_path: Path) -> None:
    texts = {
        "sentence_piece_config": "output_dir: /proc/tokenizer\n",
        "config": "input_tokenizer_file: /proc/tokenizer/tokenizer.model\noutput_prefix: /proc/tokens\n"
        "output_model_dir: /proc/run\n",
        "convert_config": "input_model_dir: /proc/run\noutput_tokenizer_and_model_dir: /proc/hf\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        check_line.check_line([str(tmp_path / f"{name}.yaml") for name in texts])
    keys = ["output_dir", "output_prefix", "output_model_dir", "output_tokenizer_and_model_dir"]
    assert [fault.key for fault in caught.value.faults] == keys
