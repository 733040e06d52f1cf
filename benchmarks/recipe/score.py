"""Bits per byte of held-out documents, the same for every system: nothing of this project's package is imported here.

    python -m benchmarks.recipe.score KIND MODEL HELDOUT.json --begin ID --context 256

KIND is hf (a folder for stock `AutoModelForCausalLM`), nanochat (a checkpoint folder of its) or litgpt (a folder with
lit_model.pth and model_config.yaml). HELDOUT has a document a line, `text` and its token `ids`.

    bits per byte = - sum of log2 p(id | what is before it) over the ids of all texts / UTF-8 bytes of all texts

The texts are the raw ones, whatever the tokenizer normalises. Each document stands alone, after the token that begins a
document in the system's training; neither that token nor an end of document is predicted. Every id is predicted once,
in fp32, from at most `context` tokens: a first window predicts the first `context` ids, and each further one moves on
by half a context and predicts what is new in it, so that an id has at least half a context before it, or the document's
beginning. What a further window starts with is read in two ways:

* ``stream``: the window is `context` consecutive ids of the document;
* ``begin``: the first of them is replaced by the begin token, as nanochat, which has it before every row, knows it.

Both numbers are printed; a table takes the lower one for each system, whose training had windows of the one or the
other kind. Output: a JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

Logits = Callable[[Tensor], Tensor]
"""int64[B, S] to [B, S, V]."""
BATCH = 16
"""Windows at once."""


class Window(NamedTuple):
    """S inputs, and which of the next ids are scored."""

    inputs: list[int]
    targets: list[int]
    """-1 where nothing is scored."""


def windows(ids: list[int], begin_id: int, context: int, restarts: bool) -> Iterator[Window]:
    """Cut a document as the head of this file says; `restarts` is the reading ``begin``.

    Example, ids 1 … 7, begin 0, a context of 4: inputs 0 1 2 3 predict 1 2 3 4; then 2 3 4 5 (or 0 3 4 5) predict 5 6,
    and 4 5 6 (or 0 5 6), which has only one new id, predicts 7.
    """
    text = [begin_id, *ids]
    stride = context // 2
    first_target = 1
    for start in range(0, max(len(text) - 1 - (context - stride), 1), stride):
        inputs = text[start : start + context]
        targets = text[start + 1 : start + context + 1]
        inputs = inputs[: len(targets)]
        known = first_target - (start + 1)
        if restarts:
            inputs = [begin_id, *inputs[1:]]
        fill = context - len(inputs)
        scored = [-1] * known + targets[known:]
        yield Window(inputs + [begin_id] * fill, scored + [-1] * fill)
        first_target = start + 1 + len(targets)


@torch.inference_mode()
def nats(logits: Logits, some: list[Window]) -> float:
    """Sum of the losses of the scored ids."""
    total = 0.0
    for at in range(0, len(some), BATCH):
        inputs, targets = (torch.tensor(part) for part in zip(*some[at : at + BATCH], strict=True))
        scores = logits(inputs).float().log_softmax(-1)
        chosen = scores.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        total -= float(chosen[targets >= 0].double().sum())
    return total


def of_hf(path: Path) -> Logits:
    """A stock class of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return lambda ids: model(input_ids=ids).logits


def of_nanochat(path: Path) -> Logits:
    """nanochat's own model, from its checkout."""
    from nanochat.checkpoint_manager import build_model, find_last_step

    model, _, _ = build_model(str(path), find_last_step(str(path)), torch.device("cpu"), "eval")
    return lambda ids: model(ids)


def of_litgpt(path: Path) -> Logits:
    """litgpt's own model."""
    from litgpt.config import Config
    from litgpt.model import GPT

    model = GPT(Config.from_file(path / "model_config.yaml")).eval()
    saved = torch.load(path / "lit_model.pth", mmap=True, weights_only=False)["model"]
    model.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in saved.items()})
    return lambda ids: model(ids)


KINDS: dict[str, Callable[[Path], Logits]] = {"hf": of_hf, "nanochat": of_nanochat, "litgpt": of_litgpt}


def score(logits: Logits, documents: list[dict[str, Any]], begin_id: int, context: int) -> dict[str, Any]:
    """Both readings, and what they are of."""
    num_bytes = sum(len(document["text"].encode()) for document in documents)
    found: dict[str, Any] = {"documents": len(documents), "bytes": num_bytes}
    found["ids"] = sum(len(document["ids"]) for document in documents)
    for name, restarts in (("stream", False), ("begin", True)):
        cut = [each for one in documents for each in windows(one["ids"], begin_id, context, restarts)]
        assert sum(target >= 0 for window in cut for target in window.targets) == found["ids"]
        found[name] = nats(logits, cut) / math.log(2) / num_bytes
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("model", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--begin", type=int, required=True, help="id before a document")
    parser.add_argument("--context", type=int, required=True)
    options = parser.parse_args()
    with open(options.heldout, encoding="utf-8") as file:
        documents = [json.loads(line) for line in file]
    print(json.dumps(score(KINDS[options.kind](options.model), documents, options.begin, options.context)))


if __name__ == "__main__":
    sys.exit(main())
