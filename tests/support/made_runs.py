"""Run folders as step 3 leaves them, made without training: wide random weights, so that everything in them matters."""

import json
import shutil
from pathlib import Path
from typing import Any

import foreign_models
import torch
from corpus_files import write_texts
from wide_weights import spread_weights

from zerokara import checkpoint
from zerokara.base import manifest
from zerokara.checkpoint import store
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.writing import as_yaml
from zerokara.model.shapes import ModelShape
from zerokara.tokenizer.encoder import Encoder

WORDS = (
    "the", "model", "reads", "a", "corpus", "and", "writes", "text", "one", "token", "after", "another", "until", "the",
    "end", "of", "a", "document",
)  # fmt: skip


def corpus_lines(count: int) -> list[str]:
    """Lines of a few words each."""
    return [" ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 4 + i % 9)) for i in range(count)]


def make_tokenizer(folder: Path) -> Path:
    """A small BPE tokenizer of `corpus_lines`; gives its model file."""
    return foreign_models.train(folder / "tokenizer.model", foreign_models.STEP_1, corpus_lines(500), vocab_size=330)


def make_run(place: Path, tokenizer: Path, architecture: str, **settings: Any) -> Path:
    """A run folder in `place`, with its corpus beside it and one checkpoint of wide random weights."""
    texts = ("\n".join(corpus_lines(40)[i : i + 4]) for i in range(30))
    corpus = write_texts(place / "corpus.jsonl", texts)
    sizes = {"num_layers": 2, "hidden_size": 48, "num_attn_heads": 6, "seq_len": 64}
    config = PretrainConfig(
        input_jsonl=(corpus,), output_prefix=str(place / "tokens"), architecture=architecture, **(sizes | settings)
    )
    run_dir = place / "run"
    run_dir.mkdir()
    shutil.copyfile(tokenizer, run_dir / "tokenizer.model")
    (run_dir / "config_resolved.yaml").write_text(as_yaml(config), encoding="utf-8")
    shape = ModelShape.from_config(config, Encoder(tokenizer).vocab_size)
    lines = [
        {"step": 1, "loss": 6.0}, {"step": 5, "valid_loss": 5.5, "valid_bits_per_byte": 2.25},
        {"step": 10, "loss": 3.0, "bad_samples": [{"documents": [{"source": corpus, "first": 0, "last": 1}]}]},
        {"step": 20, "loss": 1.0},
    ]  # fmt: skip
    metrics = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 2'
    (run_dir / "metrics.jsonl").write_text(metrics, encoding="utf-8")
    state = checkpoint.TrainingState(
        step=10, samples=80, tokens=5120, seconds=12.0, shape=shape.as_json(),
        tokenizer_sha256=manifest.sha256_of(tokenizer), data_sha256="0" * 64, precision="fp32", facts={},
    )  # fmt: skip
    store.save(run_dir, state, spread_weights(shape, seed=5), {"x": torch.zeros(1)})
    return run_dir
