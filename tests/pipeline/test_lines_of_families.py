"""The whole line, steps 1 to 6, for an encoder with a decoder and for experts, from the files in model_configs/."""

import json
import random
import subprocess
from pathlib import Path

import pytest
import torch
import warm
from configs import typed
from corpus_files import write_texts
from pipeline import notebooks

from zerokara.training.monitoring import step_metrics

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("warm_python")
SMALL = (
    "num_layers=2", "hidden_size=32", "num_attn_heads=2", "seq_len=48", "ffn_hidden_size=64", "num_workers=1",
    "global_batch_size=16", "micro_batch_size=8", "log_interval=5", "eval_interval=40", "save_interval=40",
    "max_steps=40", "epochs=16", "valid_min_documents=4", "warmup_fraction=0.1", "eval_tokens=2000", "sample_tokens=8",
)  # fmt: skip


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Sentences of a language of some sixty words, in which one says which follows."""
    chance = random.Random(3)
    words = ["".join(chance.choices("aeioumnrst", k=chance.randint(2, 6))) for _ in range(60)]
    texts = []
    for _ in range(300):
        start = chance.randrange(60)
        texts.append(" ".join(words[(start + 7 * number) % 60] for number in range(chance.randint(30, 60))) + ".")
    return Path(write_texts(tmp_path / "corpus.jsonl", texts))


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def through_all_steps(place: Path, corpus: Path, name: str, *small: str) -> str:
    """Steps 1 to 4 and 6 from a set of model_configs/, made small; gives their output."""
    kinds = "sentence_piece_config", "config", "convert_config"
    tokenizer, training, converting = (f"model_configs/{name}_{kind}.yaml" for kind in kinds)
    train = typed(
        f"input_jsonl=[{corpus}]", f"input_tokenizer_file={place}/tokenizer/tokenizer.model",
        f"output_prefix={place}/tokens", f"output_model_dir={place}/run", *SMALL, *small,
    )  # fmt: skip
    first = typed(
        f"input=[{corpus}]", f"output_dir={place}/tokenizer", "vocab_size=400", "reserved_pieces=[]", "num_threads=1"
    )
    convert = typed(f"input_model_dir={place}/run", f"output_tokenizer_and_model_dir={place}/hf", "check_lines=50")
    upload = typed("huggingface_name=somebody/tiny")
    said = run(warm.python(), "1_train_sentencepiece_tokenizer.py", "--config", tokenizer, *first)
    said += run("bash", "2_tokenize.sh", "--config", training, *train)
    said += run(warm.python(), "count_tokens.py", "--config", training, *train)
    said += run("bash", "3_train_node1.sh", "--config", training, *train)
    said += run("bash", "4_convert_to_HF.sh", "--config", converting, *convert)
    return said + run(warm.python(), "6_upload.py", "--dry-run", "--config", converting, *convert, *upload)


@pytest.mark.slow
def test_t5_reads_masked_spans_and_fills_them(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    steps = ("max_steps=120", "eval_interval=120", "save_interval=120")
    said = through_all_steps(tmp_path, corpus, "ro_t5", "head_dim=16", "lr=0.01", *steps)
    lines = [line for line in step_metrics.read(tmp_path / "run") if "valid_bits_per_byte" in line]
    assert lines[-1]["valid_bits_per_byte"] < lines[0]["valid_bits_per_byte"] - 1
    assert "52 tokens with 3 masked spans" in said and "5_fill_masked_spans_with_model.ipynb" in said
    assert "T5ForConditionalGeneration" in said

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    words = json.loads(corpus.read_text(encoding="utf-8").splitlines()[0])["text"].split()
    read = " ".join([*words[:9], "<extra_id_0>", *words[10:14], "<extra_id_1>", *words[16:20]])
    ids = tokenizer(read)["input_ids"]
    ours = [tokenizer.convert_tokens_to_ids(f"<extra_id_{number}>") for number in range(100)]
    assert ours == list(range(399, 299, -1)), "the first sentinel is the last piece"
    assert ids[-1] == tokenizer.eos_token_id and ids.count(ours[0]) == ids.count(ours[1]) == 1
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "hf")
    with torch.inference_mode():
        written = model.generate(torch.tensor([ids]), max_new_tokens=20)[0].tolist()
    assert written[:2] == [tokenizer.pad_token_id, ours[0]] and ours[1] in written, tokenizer.decode(written)

    notebook = "5_fill_masked_spans_with_model.ipynb"
    done = notebooks.execute(notebook, tmp_path / "hf", [read, words[0]], monkeypatch)
    shown = notebooks.printed(done)
    assert "T5ForConditionalGeneration" in shown and "100 of them sentinel tokens" in shown
    assert "top-1 accuracy" in shown
    assert f"▶ {read}\n  {' '.join(words[:9])}⟪" in shown and f"▶ {words[0]} <extra_id_0>" in shown
    assert len(notebooks.outputs(done, "image/png")) == 1


@pytest.mark.slow
def test_experts_are_trained_and_exported(corpus: Path, tmp_path: Path) -> None:
    small = ("num_kv_heads=1", "num_experts=4", "moe_ffn_hidden_size=32", "moe_layers=[1]")
    said = through_all_steps(tmp_path, corpus, "ko_moe", *small)
    lines = [line for line in step_metrics.read(tmp_path / "run") if "valid_bits_per_byte" in line]
    assert lines[-1]["valid_bits_per_byte"] < lines[0]["valid_bits_per_byte"] - 0.4
    total = 400 * 32 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 64 + 32) + 32 + 3 * 32 * 64 + 4 * 32 + 4 * 3 * 32 * 32
    active = total - 2 * 3 * 32 * 32
    assert f"{total / 1000:.1f}k parameters, {active / 1000:.1f}k active" in said
    assert "expert_load" in said and "Qwen3MoeForCausalLM" in said and "5_play_with_model.ipynb" in said


def test_what_no_class_holds_is_refused_plainly(tmp_path: Path, span_data: dict[str, str]) -> None:
    settings = ["architecture=t5_moe", "num_kv_heads=auto", "moe_layers=[1]", f"output_model_dir={tmp_path}/run"]
    run("bash", "3_train_node1.sh", "--config", span_data["config"], *typed(*settings, "max_steps=2"))
    made = (f"input_model_dir={tmp_path}/run", f"output_tokenizer_and_model_dir={tmp_path}/hf")
    command = ["bash", "4_convert_to_HF.sh", *typed(*made)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 2 and not (tmp_path / "hf").exists()
    assert "t5_moe" in done.stderr and "SwitchTransformersFor" in done.stderr, "the class that comes nearest"
    assert "architecture: switch or t5" in done.stderr
