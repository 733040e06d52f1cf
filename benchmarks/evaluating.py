"""Bits per byte by step 8 beside a plain loop of transformers: the same windows of the same documents, in turn.

``python -m benchmarks.evaluating TOKENIZER TEXTS [--size 40M] [--documents 15] [--rounds 5] [--precision fp32]`` makes
a Llama of random weights for the tokenizer of a Hugging Face folder. The loop is that of transformers' page on
perplexity: one window at a time, without the loss of tokens that another window scores. Both run in this process, in
turn. It prints as JSON the median time of each, the median of their ratio, and the largest difference of a document.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

SIZES = {
    # layers, width, heads, feed-forward, context length
    "1M": (4, 128, 4, 384, 256),
    "10M": (6, 320, 5, 896, 512),
    "40M": (12, 512, 8, 1408, 1024),
    "125M": (12, 768, 12, 2048, 1024),
}
IGNORED = -100


def main() -> int:
    """Make, measure, print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("texts", type=Path, help="a .jsonl or .jsonl.gz with the field `text`")
    parser.add_argument("--size", choices=SIZES, default="40M")
    parser.add_argument("--documents", type=int, default=15)
    parser.add_argument("--bytes", type=int, default=20_000, help="of each document at most")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="of step 8; the loop has fp32")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(compare(given, Path(folder))))
    return 0


def compare(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure in turn; each begins with the model loaded and warm."""
    import torch

    from zerokara.base.progress import Progress
    from zerokara.config.evaluate_config import EvaluateConfig
    from zerokara.evaluation import bits_per_byte as ours
    from zerokara.evaluation.models import open_models

    make(given, folder)
    (model,) = open_models([folder], "cpu", given.precision)
    (plain,) = open_models([folder], "cpu")
    opened = gzip.open if given.texts.suffix == ".gz" else open
    with opened(given.texts, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, given.documents)]
    texts = [text.encode()[: given.bytes].decode(errors="ignore") for text in texts]
    windowing = ours.windowing_of(model, EvaluateConfig())
    assert not isinstance(windowing, str), windowing
    batch = ours.batch_tokens_of(model, windowing)
    seconds: dict[str, list[float]] = {"ours": [], "loop": []}
    found: dict[str, list[float]] = {}
    ways = {
        "ours": lambda: [
            each.text_nats + each.end_nats
            for each in ours.losses_of(model, texts, windowing, batch, Progress("", 1, "B"), 1)
        ],
        "loop": lambda: loop(plain, texts, windowing),
    }
    with torch.inference_mode():
        for each in (model, plain):
            each.model(input_ids=torch.zeros(1, 8, dtype=torch.int64))
    for _ in range(given.rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            found[name] = way()
            seconds[name].append(time.perf_counter() - started)
    ratios = [other / own for own, other in zip(*seconds.values(), strict=True)]
    return {
        "size": given.size, "precision": given.precision, "threads": torch.get_num_threads(),
        "documents": len(texts), "bytes": sum(len(text.encode()) for text in texts),
        "context": windowing.context_length,
        "seconds": {name: round(statistics.median(each), 2) for name, each in seconds.items()},
        "times the loop": round(statistics.median(ratios), 2),
        "largest relative difference": max(
            abs(own - other) / other for own, other in zip(*found.values(), strict=True)
        ),
    }  # fmt: skip


def make(given: argparse.Namespace, folder: Path) -> None:
    """A folder with a Llama of random weights, as bf16 has them, so that both compute the same model; the tokenizer."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(given.tokenizer)
    layers, width, heads, feed_forward, context = SIZES[given.size]
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=feed_forward, max_position_embeddings=context, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.bos_token_id, initializer_range=0.05,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def loop(model: Any, texts: list[str], windowing: Any) -> list[float]:
    """Nats of each document and its end."""
    import torch

    from zerokara.samples.batches import windows

    found = []
    for text in texts:
        ids = [windowing.start_id, *model.tokenizer(text, add_special_tokens=False)["input_ids"], windowing.end_id]
        nats = 0.0
        for window in windows(len(ids), windowing.context_length, windowing.stride, 0):
            inputs, labels = (torch.tensor([ids[window.begin + i : window.end - 1 + i]]) for i in (0, 1))
            labels[:, : window.first_target - window.begin - 1] = IGNORED
            with torch.inference_mode():
                logits = model.model(input_ids=inputs).logits.float().flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(
                    logits, labels.flatten(), ignore_index=IGNORED, reduction="sum"
                )
            nats += loss.item()
        found.append(nats)
    return found


if __name__ == "__main__":
    sys.exit(main())
