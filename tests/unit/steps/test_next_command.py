"""The commands that a step prints, as a person uses them: pasted, they load the configuration that is meant."""

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from zerokara.config.loading import FILES, load
from zerokara.config.settings import Settings
from zerokara.config.writing import value_text
from zerokara.steps import command, train, train_tokenizer
from zerokara.steps.command import SCRIPTS

TRAIN_TOKENIZER, TOKENIZE, COUNT_TOKENS = "1_train_sentencepiece_tokenizer.py", "2_tokenize.sh", "count_tokens.py"
TRAIN, CONVERT, UPLOAD = "3_train_node1.sh", "4_convert_to_HF.sh", "6_upload.py"
NASTY = ['it\'s a "run" $HOME', "yes", "a: b #c", "1e3", "[x]", "モデル/é", "-dash", "tab\there", "back\\slash"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with no configuration in it yet."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def called(step: str, *argv: str) -> tuple[Any, command.Options]:
    """What a step has loaded that was called with `argv`."""
    options = command.parse(step, "", argv)
    return load(FILES[SCRIPTS[step]], options.config_path, options.overrides), options


def pasted(step: str, text: str) -> tuple[Any, command.Options]:
    """What the step loads when its printed command is typed."""
    runner, script, *argv = shlex.split(text)
    assert (runner, script) == ("bash" if step.endswith(".sh") else "python", step)
    assert "--redo" not in argv
    return called(step, *argv)


def write(name: str, **settings: object) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text("".join(f"{key}: {value}\n" for key, value in settings.items()), encoding="utf-8")


def after(step: str, following: str, *argv: str) -> tuple[str, Any, command.Options]:
    """The command that `step`, called with `argv`, prints for `following`, and what that loads."""
    config, options = called(step, *argv)
    next_of = {TRAIN_TOKENIZER: train_tokenizer._next, TRAIN: train.next_command}.get(step)
    text = next_of(config, options) if next_of else command.next_command(following, options, config)
    return text, *pasted(following, text)


def test_a_model_that_no_class_holds_is_not_sent_to_the_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(command.COMMAND_NAME, "bash 3_train_node1.sh")
    write("config.yaml", architecture="t5_moe")
    config, options = called(TRAIN, "--set", "lr=0.01")
    words = shlex.split(train.next_command(config, options))
    assert words == ["bash", "3_train_node1.sh", "--set", "lr=0.01", "--evaluate"]


@pytest.mark.parametrize("name", NASTY)
def test_names_with_spaces_quotes_and_yaml_in_them(name: str) -> None:
    folder = f"con fig/{name}"
    first, second = f"{folder}/it_sentence_piece_config.yaml", f"{folder}/it_config.yaml"
    for path in (first, second, "config.yaml", "convert_config.yaml"):
        write(path)
    quoted = value_text(name)
    assert after(COUNT_TOKENS, TRAIN)[0] == "bash 3_train_node1.sh", "with the files as shipped nothing is added"
    _, tokenized, options = after(TRAIN_TOKENIZER, TOKENIZE, "--config", first, "--set", f"output_dir={quoted}")
    assert options.config_path == Path(second)
    assert Path(tokenized.input_tokenizer_file) == Path(name) / "tokenizer.model"

    given = ("--config", second, "--set", f"output_model_dir={quoted}", "--set", "lr=0.5")
    _, trained, _ = after(TOKENIZE, TRAIN, *given, "--set", f"text_field={quoted}")
    assert (trained.output_model_dir, trained.lr, trained.text_field) == (name, 0.5, name)
    text, converted, _ = after(TRAIN, CONVERT, *given)
    assert Path(converted.input_model_dir) == Path(name)
    assert Path(converted.output_tokenizer_and_model_dir) == Path(f"{name}_hf")
    assert "lr=" not in text and "--config" not in text
    _, uploaded, _ = after(CONVERT, UPLOAD, "--set", f"output_tokenizer_and_model_dir={quoted}", "--set", "dtype=fp32")
    assert uploaded.output_tokenizer_and_model_dir == name


def test_step_2_cuts_the_text_of_step_1() -> None:
    write("sentence_piece_config.yaml", input="[it.jsonl, 'più testi/*.txt']", text_field="testo")
    write("config.yaml")
    text, tokenized, _ = after(TRAIN_TOKENIZER, TOKENIZE, "--set", "txt_document=line")
    assert (tokenized.input_jsonl, tokenized.text_field) == (("it.jsonl", "più testi/*.txt"), "testo")
    assert tokenized.txt_document == "line" and text.count("txt_document") == 1
    write("config.yaml", input_jsonl="[it.jsonl, 'più testi/*.txt']")
    assert "input_jsonl" not in after(TRAIN_TOKENIZER, TOKENIZE, "--set", "seed=5")[0]


def test_a_file_that_names_this_run_is_taken_as_it_is_and_another_runs_is_not() -> None:
    write("config.yaml", output_model_dir="models/it")
    write("convert_config.yaml", input_model_dir="models/it/global_step500", huggingface_name="a/b")
    assert after(TRAIN, CONVERT)[0] == "bash 4_convert_to_HF.sh"
    text, converted, _ = after(TRAIN, CONVERT, "--set", "output_model_dir=models/ro")
    assert text.count("--set") == 2
    assert converted.input_model_dir == "models/ro" and converted.output_tokenizer_and_model_dir == "models/ro_hf"
    write("convert_config.yaml", dtype="fp64")  # it cannot be loaded, so nothing that it says is relied upon
    config, options = called(TRAIN)
    made = {"input_model_dir": "models/it"}
    assert "input_model_dir=models/it" in command.next_command(CONVERT, options, config, made)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("m/ja_config.yaml", ["m/ja_convert_config.yaml"], "m/ja_convert_config.yaml"),
        ("m/ko_config.yaml", ["m/ja_convert_config.yaml", "convert_config.yaml"], "convert_config.yaml"),
        ("mine.yaml", ["zero kara/convert_config.yaml"], "zero kara/convert_config.yaml"),
    ],
)
def test_the_file_that_belongs(own: str, files: list[str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(command.COMMAND_NAME, "bash zero kara/3_train_node1.sh")
    for name in (own, *files):
        write(name)
    config, options = called(TRAIN, "--config", own)
    words = shlex.split(command.next_command(CONVERT, options, config))
    named = words[words.index("--config") + 1] if "--config" in words else "convert_config.yaml"
    assert words[:2] == ["bash", "zero kara/4_convert_to_HF.sh"] and named == expected


@pytest.mark.parametrize("path", ["4_convert_to_HF.sh", "/opt/zero kara/4_convert_to_HF.sh"])
def test_the_scripts_are_named_as_the_user_called_this_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(command.COMMAND_NAME, f"bash {path}")
    write("convert_config.yaml")
    config, options = called(CONVERT, "--set", "dtype=fp32")
    text = command.next_command(UPLOAD, options, config, flags=["--dry-run"])
    assert command.parse(UPLOAD, "", shlex.split(text)[2:]).dry_run
    words = shlex.split(command.next_command(UPLOAD, options, config))
    assert words == ["python", str(Path(path).parent / "6_upload.py"), "--set", "dtype=fp32"]
    assert shlex.split(options.resume_command) == ["bash", path, "--set", "dtype=fp32"]
    monkeypatch.delenv(command.COMMAND_NAME)
    monkeypatch.setattr(sys, "argv", ["6_upload.py"])
    assert command.resume_command(["--config", "a b.yaml"]) == "python 6_upload.py --config 'a b.yaml'"
    monkeypatch.setattr(sys, "argv", ["-m"])
    assert command.resume_command([]) == "the same command"


def test_a_stop_tells_the_command_typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(config: Settings, options: command.Options) -> None:
        raise KeyboardInterrupt

    write("my config.yaml")
    monkeypatch.setenv(command.COMMAND_NAME, "bash 3_train_node1.sh")
    argv = ["--config", "my config.yaml", "--set", "output_model_dir=it's"]
    assert command.run(TRAIN, stop, "", argv) == 130
    config, _ = pasted(TRAIN, capsys.readouterr().err.partition("to resume: ")[2])
    assert config.output_model_dir == "it's"
    assert shlex.split(command.resume_command(["--redo", *argv], without=("--redo",)))[2:] == argv
