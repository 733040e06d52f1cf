"""How much memory does the loss take, and how long, beside a cross-entropy over all logits?

    python -m benchmarks.training.loss_memory [--vocab-size 65536] [--tokens 4096] [--hidden-size 512] \\
        [--precision fp32|bf16]

Forward and backward of the output projection and the loss alone, each method in a process of its own: ``chunked``
(ours, a few rows of logits at a time) and ``all logits`` (torch's `cross_entropy` on fp32 logits, as most trainers do).
Memory is the peak above what the process held with hidden states, weight and labels made; seconds are the best of
three. Prints both losses, too: they are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from zerokara.base.progress import bytes_text
from zerokara.huggingface.families import TORCH_DTYPES
from zerokara.model.layers import Kernels
from zerokara.model.loss import Projection
from zerokara.model.loss import cross_entropy as chunked_cross_entropy
from zerokara.training.processes import joining

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def chunked(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    """Our loss, a few rows of logits at a time."""
    projection = Projection(weight_VD, weight_VD.size(0))
    return chunked_cross_entropy(hidden_ND[:, None], labels_N[None], None, False, projection, Kernels())


def all_logits(hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor) -> Tensor:
    """The logits of all tokens at once, in fp32."""
    return cross_entropy((hidden_ND @ weight_VD.t()).float(), labels_N, reduction="sum")


METHODS: dict[str, Loss] = {"chunked": chunked, "all logits": all_logits}


def measure(method: str, given: argparse.Namespace) -> None:
    """Measure one method in this process."""
    device, dtype = joining.local_device(), TORCH_DTYPES[given.precision]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    hidden = torch.randn(given.tokens, given.hidden_size).to(device, dtype).requires_grad_()
    weight = (torch.randn(given.vocab_size, given.hidden_size) * 0.02).to(device, dtype).requires_grad_()
    labels = torch.randint(0, given.vocab_size, (given.tokens,)).to(device)
    held, seconds, loss = joining.peak_memory(device), [], hidden.new_zeros(())
    for _ in range(3):
        hidden.grad = weight.grad = None
        started = time.perf_counter()
        loss = METHODS[method](hidden, weight, labels)
        loss.backward()
        value = loss.item()
        seconds.append(time.perf_counter() - started)
    print(json.dumps({"memory": joining.peak_memory(device) - held, "seconds": min(seconds), "loss": value}))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=65536)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--precision", choices=list(TORCH_DTYPES), default="fp32")
    parser.add_argument("--method", choices=list(METHODS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.method:
        measure(given.method, given)
        return
    size = f"{given.tokens:,} tokens × {given.vocab_size:,}, hidden size {given.hidden_size}, {given.precision}"
    gradients = (given.tokens + given.vocab_size) * given.hidden_size * TORCH_DTYPES[given.precision].itemsize
    logits = given.tokens * given.vocab_size * 4
    print(f"{size}: all logits in fp32 are {bytes_text(logits)}; the gradients alone {bytes_text(gradients)}")
    for method in METHODS:
        command = [sys.executable, "-m", "benchmarks.training.loss_memory", *sys.argv[1:], "--method", method]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        nats = f"{found['loss'] / given.tokens:.5f} nats per token"
        print(f"{method:>12}: {bytes_text(found['memory'])} above inputs, {found['seconds']:.2f} s, {nats}")


if __name__ == "__main__":
    main()
