"""A step that is refused leaves nothing on the disk that was not there before, however far it had come."""

import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from configs import typed
from foreign_models import LLAMA_3, QWEN_3, byte_level
from tokenizers import Tokenizer

from zerokara.base import manifest
from zerokara.steps import tokenize, train_tokenizer
from zerokara.tokenizer import sampling

NAMES = "clean_corpus train_tokenizer tokenize train convert_to_hf generate upload finetune evaluate".split()  # noqa: SIM905
STEPS = {number: importlib.import_module(f"zerokara.steps.{name}") for number, name in enumerate(NAMES)}
RAW, SPELT = os.fsdecode(b"d\xe9\x1b[31m"), r"d\xe9\u001b[31m"
"""A name that is no UTF-8 and would steer a terminal, and how it is printed."""
GOOD = '{"text": "%d some words of a text"}\n'
REFUSED: list[tuple[int, str, str]] = [
    (1, "input=nowhere.jsonl", "nowhere.jsonl: "),
    (1, "text_field=body", "'body'"),
    (1, "vocab_size=300 byte_fallback=true user_defined_symbols=[<1>,<2>] extra_ids=100", "vocab_size = 300: "),
    (1, "input=bad.jsonl", "(50 %)"),
    (1, "input=bad.jsonl max_bad_fraction=0.4 output_dir=there", "(50 %)"),
    (1, "vocab_size=300 byte_fallback=false character_coverage=1.0 input=many.txt", "4134"),
    (1, "vocab_size=200000", "310"),
    (1, "byte_fallback=false reserved_pieces=[] input=few.txt", "the largest that works is … ; raise sample_bytes\n"),
    (1, "input=empty.txt", "0 bytes"),
    (1, "input=spaces.txt max_bad_fraction=1", "no document"),
    (2, "input_tokenizer_file=corpus.jsonl", "corpus.jsonl"),
    (2, "input_tokenizer_file=gone.model input_jsonl=nowhere.jsonl", "nowhere.jsonl: "),
    (2, "text_field=body", "'body'"),
    (2, "input_jsonl=[]", "input_jsonl = []: must be a list of at least one entry"),
    (1, "sample_bytes=1", "sample_bytes = 1: is less than any passage of the text"),
    (1, "vocab_size=2000 sample_bytes=10000", "or raise sample_bytes"),
    (2, "input_tokenizer_file=chat", "end_of_document = auto: … <|im_end|> (tokenizer_config.json), <|endoftext|>"),
    (2, "input_tokenizer_file=chat/tokenizer.json end_of_document=</s>", "end_of_document = </s>: "),
    (2, "input_tokenizer_file=there", "input_tokenizer_file = there: "),
    (2, "input_tokenizer_file=other_class", "input_tokenizer_file = other_class: gives other ids in transformers"),
    (2, "end_of_document=<|im_end|>", "end_of_document = <|im_end|>: must be auto"),
    (3, "output_prefix=nowhere/tokens", "nowhere/tokens"),
    (3, "num_processes=3", "4 × 3 = 12"),
    (3, "init_from=nowhere", "init_from = nowhere: "),
    (3, "teachers=[nowhere]", "teachers = ['nowhere']: nowhere: there is no such folder"),
    (3, "teachers=[there]", "teachers = ['there']: there: holds no Hugging Face model"),
    (3, "teachers=[chat,./chat]", "teachers = ['chat', './chat']: must be folders, each named once"),
    (3, "teachers=", "teachers = ['']: must be folders, each named once"),
    (3, "teachers=[chat] tensor_parallel_size=2", "teachers = ['chat']: need tensor_parallel_size 1"),
    (3, "teachers=[chat] architecture=t5", "teachers = ['chat']: must be empty for architecture t5"),
    (3, "cudnn_attention=true architecture=t5", "cudnn_attention = True: must be false for architecture t5"),
    (3, "output_model_dir=2024", "output_model_dir = 2024: must be text (a number or a date in quotes)"),
    (3, "dropout=1", "dropout = 1: must be less than 1"),
    (3, "dropout=-0.1", "dropout = -0.1: must be "),
    (3, "teacher_weight=0", "teacher_weight = 0: must be "),
    (4, "input_model_dir=nowhere", "input_model_dir = nowhere: "),
    (6, "output_tokenizer_and_model_dir=there huggingface_name=a/b", "there"),
    (8, "models=nowhere texts=[]", "nowhere: … texts = []"),
    (8, "models=[]", "models = []: "),
    (8, "models=there add_to_card=here", "add_to_card = ['here']: "),
    (2, f"output_prefix={RAW}", rf"output_prefix = {SPELT}: "),
    (2, 'output_prefix="a\\e[31m"', r"output_prefix = a\u001b[31m: "),
    (2, f"input_jsonl={RAW}/a.jsonl", rf"input_jsonl = {SPELT}/a.jsonl: "),
    (1, "output_dir=corpus.jsonl/out", "output_dir = corpus.jsonl/out: … corpus.jsonl: Not a directory"),
    (3, "output_model_dir=corpus.jsonl/out --dry-run", "output_model_dir = corpus.jsonl/out: … Not a directory"),
]
OUTPUTS = {
    1: "input=corpus.jsonl output_dir=new/deep/tokenizer vocab_size=400 num_threads=1 sample_bytes=100000",
    2: "output_prefix=new/deep/tokens num_workers=1",
    3: "output_model_dir=new/deep/run",
    4: "output_tokenizer_and_model_dir=new/deep/hf",
    6: "output_tokenizer_and_model_dir=new/deep/hf",
    8: "output_dir=new/deep/evaluation",
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders: with two ends, and with a class of transformers that cuts digits otherwise than tokenizer.json."""
    folder, end = tmp_path_factory.mktemp("tokenizers"), {"eos_token": "<|im_end|>"}
    ids = {"eos_token_id": Tokenizer.from_file(str(byte_level(folder / "chat", QWEN_3))).token_to_id("<|endoftext|>")}
    byte_level(folder / "chat", QWEN_3, tokenizer_config=end, config=ids)
    named = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end_of_text|>"}
    byte_level(folder / "other_class", LLAMA_3, ["2024 12345"] * 99, tokenizer_config=named)
    return folder


@pytest.fixture
def place(tmp_path: Path, tokenizers: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    good = [GOOD % number for number in range(200)]
    (tmp_path / "corpus.jsonl").write_text("".join(good), encoding="utf-8")
    (tmp_path / "bad.jsonl").write_text("".join([*good, *["{broken\n"] * 200]), encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "many.txt").write_text("".join(map(chr, range(0x4E00, 0x5E00))), encoding="utf-8")
    (tmp_path / "few.txt").write_text("ab ba aab\n" * 30, encoding="utf-8")
    (tmp_path / "spaces.txt").write_text("  \n\n", encoding="utf-8")
    (tmp_path / "there").mkdir()
    shutil.copytree(tokenizers, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize(("step", "settings", "named"), REFUSED)
def test_a_refused_step_leaves_nothing(
    step: int, settings: str, named: str, place: Path, tiny_data: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    config = tiny_data["config"] if step in (2, 3) else "/dev/null"
    settings, dry_run, _ = settings.partition(" --dry-run")
    given = [*typed(*OUTPUTS[step].split(), *settings.split()), *dry_run.split()]
    before = tree(place)
    assert STEPS[step].main(["--config", config, *given]) == 2
    printed = capfd.readouterr().err
    assert all(word in printed for word in named.split(" … ")) and "\x1b" not in printed
    assert tree(place) == before


MISSING = [
    (0, "input=corpus.jsonl evaluation_data=bat.jsonl", "bad.jsonl"),
    (1, 'input="@lists.txt"', "list.txt"),
    (1, "input=ther/texts/*.jsonl", "there"),
    (1, "base_tokenizer=chats", "chat"),
    (1, "compare_with=chat/tokeniser.json", "chat/tokenizer.json"),
    (2, "input_jsonl=Ther/deep/corpus.jsonl", "there"),
    (2, "input_tokenizer_file=chats/tokenizer.json", "chat/tokenizer.json"),
    (3, "output_prefix=token", "tokens_text_document.manifest.json"),
    (3, "deepspeed_template=corpus.json", "corpus.jsonl"),
    (3, "input_tokenizer_file=chatt", "chat"),
    (4, "input_model_dir=theer", "there"),
    (5, "output_tokenizer_and_model_dir=theer", "there"),
    (7, "init_from=chaty", "chat"),
    (8, "models=chat texts=corpus.json", "corpus.jsonl"),
]


@pytest.mark.parametrize(("step", "settings", "nearest"), MISSING)
def test_what_is_missing_is_said_to_be_with_the_nearest_name(
    step: int, settings: str, nearest: str, place: Path, tiny_data: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    Path("tokens_text_document.manifest.json").touch()
    Path("list.txt").write_text("corpus.jsonl", encoding="utf-8")
    Path("evaluate_config.yaml").touch()
    config = tiny_data["config"] if step in (2, 3) else "/dev/null"
    given = typed(*OUTPUTS.get(step, "").split(), *settings.split())
    assert STEPS[step].main(["--config", config, *given]) == 2
    printed = capfd.readouterr().err.lower()
    assert "no such" in printed or "there is no manifest" in printed
    assert f"the nearest name is {nearest}" in printed
    assert "--set: " in printed or "manifest" in printed or settings.split()[-1].partition("=")[0] in printed
    assert STEPS[step].main(["--config", "ther/evaluate_config.yaml"]) == 2
    assert "ther/evaluate_config.yaml: there is no such file; the nearest name is there; " in capfd.readouterr().err


def test_steps_1_and_2_take_any_name(
    tiny_data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a working folder of such a name, with a corpus in such a folder and file: good documents and a bad one."""
    corpus, file_name = tmp_path / RAW / "corpus" / RAW / f"{RAW}.jsonl", f"corpus/{SPELT}/{SPELT}.jsonl"
    corpus.parent.mkdir(parents=True)
    corpus.write_text("{broken\n" + Path(tiny_data["input_jsonl"]).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path / RAW)
    first = ["--config", "/dev/null", *typed("input=corpus", "output_dir=made", "vocab_size=450")]
    second = ["--config", tiny_data["config"], *typed("input_jsonl=corpus", "output_prefix=made/tokens")]
    for step, given, key in ((train_tokenizer, first, "input"), (tokenize, second, "input_jsonl")):
        assert step.main(given) == 0, capfd.readouterr().err
        record = Path("made", {"input": "manifest.json"}.get(key, "tokens_text_document.manifest.json"))
        (named,) = manifest.read(record).inputs[key]
        assert named.path == f"{tmp_path}/{SPELT}/{file_name}"
        assert step.main(given) == 0 and "already" in capfd.readouterr().out
    (bad,) = Path("made/tokens_quarantine.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(bad)["file"] == file_name
    assert tokenize.main([*second, "--redo", "--set", "text_field=body"]) == 2
    printed = capfd.readouterr().err
    assert f"{file_name}:2: has no field 'body'" in printed and "\x1b" not in printed


def test_a_file_that_grows(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    draw = sampling.draw

    def growing(*arguments: Any) -> Any:
        drawn = draw(*arguments)
        with open("corpus.jsonl", "a", encoding="utf-8") as file:
            file.write(GOOD)
        return drawn

    monkeypatch.setattr(sampling, "draw", growing)
    assert train_tokenizer.main(["--config", "/dev/null", *typed(*OUTPUTS[1].split())]) == 1
    assert "corpus.jsonl" in capfd.readouterr().err
    assert not (place / "new").exists()


@pytest.mark.parametrize("number", [1, 2])
def test_a_file_that_grows_as_it_is_recorded(
    number: int,
    place: Path,
    tiny_data: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its manifest would name a text that the result is not made from, and the next start would call it done."""
    hash_files = manifest.hash_files

    def growing(files: Iterable[Path]) -> dict[manifest.FileKey, str]:
        hashes = hash_files(files)
        with open("corpus.jsonl", "a", encoding="utf-8") as file:
            file.write(GOOD % 1)
        return hashes

    given = f"{OUTPUTS[number]} {['vocab_size=310', 'input_jsonl=corpus.jsonl'][number - 1]}"
    command = ["--config", "/dev/null" if number == 1 else tiny_data["config"], *typed(*given.split())]
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "hash_files", growing)
        assert STEPS[number].main(command) == 1
    assert "corpus.jsonl changed while it was read" in capfd.readouterr().err
    assert not [*Path("new").rglob("*manifest.json")]
    assert STEPS[number].main(command) == 0, "with all of it"
