"""Every step refuses an output that cannot be written, in its dry run and at its start, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from configs import config_of, typed

from zerokara import manifest
from zerokara.config.architectures import ARCHITECTURES
from zerokara.config.convert_config import ConvertConfig
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.settings import Settings
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.errors import UserError
from zerokara.huggingface import exported_folder
from zerokara.huggingface.exported_folder import MANIFEST_NAME, STEP, UPLOAD_RECORD_NAME
from zerokara.steps import preflight, tokenize, train, train_tokenizer, upload
from zerokara.tokens.indexed import TokenPaths

ROOT = Path(__file__).resolve().parents[3]
Main = Callable[[list[str]], int]


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A place below a file."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "out"


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("main", "key"),
    [(train_tokenizer.main, "output_dir"), (tokenize.main, "output_prefix"), (train.main, "output_model_dir")],
)
def test_a_place_below_a_file_is_refused(
    main: Main, key: str, dry: bool, tiny_data: dict[str, str], blocked: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    of_tokenizer = main is train_tokenizer.main
    given = ["--config", "/dev/null"] if of_tokenizer else ["--config", tiny_data["config"]]
    given += typed(*([f"input={tiny_data['input_jsonl']}"] if of_tokenizer else []), f"{key}={blocked}")
    before = left(blocked.parents[1])
    assert main([*given, *(["--dry-run"] if dry else [])]) == 2
    printed = capfd.readouterr()
    assert f"error: --set: {key} = {blocked}: " in printed.err and f"{blocked.parent}: Not a directory" in printed.err
    assert not printed.out and left(blocked.parents[1]) == before


def test_torch_is_not_loaded_before_the_settings_and_the_outputs_are_checked(
    tiny_data: dict[str, str], blocked: Path
) -> None:
    """In one process: each step refuses a wrong setting, steps 3 and 4 a place that they cannot write to or read."""
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
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "original_codes")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no_such_key = 1: ") == 6 and done.stderr.count(str(blocked)) >= 2


@pytest.mark.parametrize("dry", [True, False])
def test_the_record_of_an_upload(tmp_path: Path, dry: bool, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    work, files = manifest.StepSpec(STEP, {}), {"all": [tmp_path / "config.json"]}
    manifest.write(tmp_path / MANIFEST_NAME, work, files, {"proof": {"holds": True}}, 1.0)
    given = typed(f"output_tokenizer_and_model_dir={tmp_path}", "huggingface_name=ada/first")
    (tmp_path / UPLOAD_RECORD_NAME).mkdir()
    assert upload.main(["--config", "/dev/null", *given, *(["--dry-run"] if dry else [])]) == 2
    assert f"{UPLOAD_RECORD_NAME} is a folder" in capsys.readouterr().err


def keys_of(*checks: tuple[Settings, preflight.Outputs]) -> list[str | None]:
    return [fault.key for config, outputs in checks for fault in preflight.faults(config, outputs)]


def test_each_file_that_a_step_leaves_is_asked_for(tmp_path: Path) -> None:
    tokenizer = TokenizerConfig(output_dir=str(tmp_path))
    training = config_of(output_prefix=tmp_path / "tokens")
    paths = TokenPaths(training.output_prefix)
    first, second = (tokenizer, preflight.of_tokenizer(tokenizer)), (training, preflight.of_tokens(training))
    assert keys_of(first, second) == []
    for path in (tmp_path / "report.html", tmp_path / preflight.LOG_NAME, tmp_path / "manifest.json"):
        path.mkdir()
        assert keys_of(first) == ["output_dir"], path
        path.rmdir()
    for path in (Path(f"{paths.train}.bin"), Path(f"{paths.valid}.idx"), paths.quarantine, paths.manifest):
        path.mkdir()
        assert keys_of(second) == ["output_prefix"], path
        path.rmdir()
    paths.work_folder.touch()
    assert keys_of(second) == ["output_prefix"]
    long = config_of(output_prefix=tmp_path / ("n" * 215))
    assert keys_of((long, preflight.of_tokens(long))) == ["output_prefix"], "its files' names are longer"


def test_an_export_takes_the_place_of_a_folder_but_of_no_file(tmp_path: Path) -> None:
    def printed(folder: Path) -> list[str | None]:
        config = ConvertConfig(output_tokenizer_and_model_dir=str(folder))
        return keys_of((config, preflight.of_export(config)))

    (tmp_path / "file").touch()
    assert printed(tmp_path) == printed(tmp_path / "new" / "newer") == []
    assert printed(tmp_path / "file") == printed(tmp_path / "file" / "x") == ["output_tokenizer_and_model_dir"]
    assert printed(Path("/proc")) == ["output_tokenizer_and_model_dir"], "a mount point"
    shape = SimpleNamespace(architecture="llama", traits=ARCHITECTURES["llama"])
    source: Any = SimpleNamespace(run_dir=tmp_path / "run", shape=shape)
    with pytest.raises(UserError, match="mount point"):
        exported_folder.check_place(ConvertConfig(output_tokenizer_and_model_dir="/proc"), source)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("new/newer/newest", ""),
        ("x" * 200, ""),
        ("file/below/it", os.strerror(errno.ENOTDIR)),
        ("folder", "folder is a folder"),
        ("link/below", "link is a broken link"),
        ("n" * 240, "240 bytes"),
        (f"new/{'語' * 80}", "240 bytes"),
        ("/proc/model", "/proc: "),
    ],
)
def test_what_is_in_the_way_is_named_and_nothing_is_left(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").write_text("text", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    before = left(tmp_path), tmp_path.stat().st_mtime_ns
    found = preflight._reason_against(tmp_path / name)
    assert reason in found and bool(found) == bool(reason)
    assert (left(tmp_path), tmp_path.stat().st_mtime_ns) == before


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


def test_a_missing_tokenizer_is_told_with_the_newest_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("lr: 1e-3\ninput_tokenizer_file: tokenizers/it/tokenizer.model\n", "utf-8")
    config = load(PretrainConfig, "config.yaml")

    def remedy(rule: str) -> str:
        (fault,) = preflight.tokenizer_file_faults(config)
        assert (fault.where, fault.key) == ("config.yaml:2", "input_tokenizer_file") and rule in fault.rule
        return fault.remedy

    assert "step 1" in remedy("no such")
    for age, name in enumerate(["newer", "older", "it"]):
        Path("tokenizers", name).mkdir(parents=True)
        model = Path("tokenizers", name, "tokenizer.model")
        model.write_bytes(b"" if name == "it" else b"a model")
        os.utime(model, (1e9 - age, 1e9 - age))
    assert "tokenizers/newer/tokenizer.model" in remedy("empty")
    model.write_bytes(b"a model")
    assert not list(preflight.tokenizer_file_faults(config))
