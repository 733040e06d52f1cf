"""`./run_all.sh`: the whole pipeline as a user runs it, through the real scripts, and how it ends when a step fails."""

import os
import random
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import warm
from corpus_files import write_texts

ROOT = Path(__file__).resolve().parents[2]

CONFIGS = {
    "sentence_piece_config.yaml": """\
input: [{folder}/corpus.jsonl]
output_dir: {folder}/tokenizer
vocab_size: 400
character_coverage: 1.0
num_threads: 1
""",
    "config.yaml": """\
input_jsonl: [{folder}/corpus.jsonl]
input_tokenizer_file: {folder}/tokenizer/tokenizer.model
output_prefix: {folder}/tokens
num_workers: 1
num_layers: 2
hidden_size: 32
num_attn_heads: 2
seq_len: 32
output_model_dir: {folder}/run
train_tokens: 10240
global_batch_size: 16
micro_batch_size: 8
lr: 0.01
eval_interval: 10
save_interval: 10
log_interval: 2
num_processes: 1
""",
    "convert_config.yaml": """\
input_model_dir: {folder}/run
output_tokenizer_and_model_dir: {folder}/hf
test_prompt_text: ["the"]
huggingface_name: somebody/tiny
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three YAML files for a tiny line, and its corpus."""
    chance = random.Random(3)
    words = ["the", *("".join(chance.choices("aeioumnrst", k=chance.randint(2, 6))) for _ in range(200))]
    texts = [" ".join(chance.choices(words, k=chance.randint(30, 90))) for _ in range(200)]
    write_texts(tmp_path / "corpus.jsonl", texts)
    for name, text in CONFIGS.items():
        (tmp_path / name).write_text(text.format(folder=tmp_path), encoding="utf-8")
    return tmp_path


def run_all(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = [str(ROOT / "run_all.sh"), *map(str, arguments)], os.environ | variables
    return subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=300)


@pytest.mark.slow
def test_the_whole_pipeline_and_again(folder: Path, warm_server: Path | None) -> None:
    done = run_all(folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    made = ["tokenizer/tokenizer.model", "tokens_text_document.bin", "run/metrics.jsonl", "run/plots/loss.png"]
    for name in [*made, "hf/config.json", "hf/tokenizer.json", "hf/manifest.json"]:
        assert (folder / name).is_file(), name
    assert "\n  the⟪" in done.stdout
    assert "dry run: nothing was sent" in done.stdout
    times = done.stdout.split("━━━ time")[1].splitlines()
    steps = ["setup", "1 train", "2 tok", "count", "3 train", "4 convert", "6 upload", "all"]
    assert all(any(line.strip().startswith(step) for line in times) for step in steps)

    trained = (folder / "run" / "manifest.json").read_bytes()
    again = run_all(folder, **warm.environment(warm_server))
    assert again.returncode == 0, again.stderr[-3000:]
    assert (folder / "run" / "manifest.json").read_bytes() == trained, "a step that is done was done again"


@pytest.mark.slow
def test_a_step_that_fails_stops_the_pipeline_with_its_exit_code(folder: Path) -> None:
    settings = (folder / "config.yaml").read_text(encoding="utf-8")
    (folder / "config.yaml").write_text(settings.replace("seq_len: 32", "seq_len: 1000000"), encoding="utf-8")
    done = run_all("--redo", folder)
    assert done.returncode == 2
    assert f"{folder}/config.yaml:8: seq_len = 1000000" in done.stderr
    assert "“count tokens”" in done.stderr
    # What is done is not done again, and what comes after it is.
    assert shlex.split(done.stderr.rpartition(": ")[2]) == [str(ROOT / "run_all.sh"), "--redo=3", str(folder)]
    assert (folder / "tokens_text_document.bin").exists() and "━━━ 3 train" not in done.stdout


def test_files_may_be_named_by_what_they_begin_with_and_a_missing_corpus_stops_the_first_step(folder: Path) -> None:
    for name in CONFIGS:
        shutil.move(folder / name, folder / f"tiny_{name}")
    (folder / "corpus.jsonl").unlink()
    done = run_all(folder / "tiny")
    assert done.returncode == 2 and "“1 train the tokenizer”" in done.stderr


SETS = sorted(
    str(path).removesuffix("_convert_config.yaml") for path in ROOT.glob("model_configs/*_convert_config.yaml")
)


@pytest.mark.parametrize("name", ["model_configs/ro_t5", "model_configs/ro_t5_", "model_configs/ko_moe_dense"])
def test_a_ready_set_is_found_by_its_name(name: str) -> None:
    """All sets are looked into by tests/unit/config/test_ready_sets.py; a shell completes their names up to a `_`."""
    done = run_all("--dry-run", name)
    assert done.returncode == 0, done.stderr
    for kind in ("sentence_piece_config", "config", "convert_config"):
        assert f"\n{name.rstrip('_')}_{kind}.yaml: in order" in done.stdout
    assert "━━━ 1 train" not in done.stdout


@pytest.mark.parametrize("name", ["model_configs/ro_t5_mini", "nowhere", "docs"])
def test_a_wrong_name_lists_the_sets_that_are_there(name: str) -> None:
    done = run_all(name)
    beginning = f"{name}/" if (ROOT / name).is_dir() else f"{name}_"
    missing = [f"{beginning}{kind}.yaml" for kind in ("sentence_piece_config", "config", "convert_config")]
    assert done.returncode == 2 and all(f"run_all: {path}: " in done.stderr for path in missing)
    listed = [line.strip() for line in done.stderr.splitlines() if line.startswith("  ")]
    assert listed == [str(Path(each).relative_to(ROOT)) for each in SETS] and len(listed) >= 9


def test_a_set_that_lacks_a_file_or_whose_steps_do_not_fit_together_is_refused(folder: Path) -> None:
    (folder / "convert_config.yaml").write_text("input_model_dir: models/another\n", encoding="utf-8")
    done = run_all(folder)
    assert done.returncode == 2 and "“settings”" in done.stderr and "━━━ 1 train" not in done.stdout
    assert f"{folder}/convert_config.yaml:1: input_model_dir = models/another" in done.stderr
    (folder / "convert_config.yaml").unlink()
    done = run_all(folder)
    assert done.returncode == 2 and f"run_all: {folder}/convert_config.yaml: " in done.stderr
    assert f"{folder}/config.yaml: " not in done.stderr


def test_help_names_every_option_and_another_is_refused() -> None:
    done = run_all("--fast")
    assert done.returncode == 2 and "--fast" in done.stderr and "./run_all.sh --help" in done.stderr
    done = run_all("--help")
    assert done.returncode == 0 and "set -" not in done.stdout
    assert all(f"./run_all.sh {usage}" in done.stdout for usage in ("FOLDER", "--redo", "--dry-run", "--help"))
