"""torch.compile around each layer: the many small operations between its matrix products become a few.

One layer is compiled and serves all, for one shape: that of a micro batch. Everything else, a validation say, runs as
it is written, and needs no compiling of its own. The work is done at the start, on a rehearsal of one micro batch, with
a word before and after; what it makes is kept in a folder of the user's, so that the next start finds it. Should it
fail (no compiler, an error of torch's), the layers run as they are written, with a word.

On a GPU the softmax of the loss is compiled as well: there it costs more than the matrix products around it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerokara.model import loss, parallel
from zerokara.progress import seconds_text

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch keeps what it has compiled; by default in /tmp, which a restart empties. Set, it is the user's choice."""


def reason_against(mode: str, device_type: str, zero_stage: int) -> str | None:
    """Why ``compile: <mode>`` leaves the layers as they are written, or None where it compiles them.

    `parallel.start` must have been called.
    """
    if mode == "on":
        return None
    if mode == "off":
        return "compile: off"
    if device_type == "cpu":
        # Measured on two cores at 40M parameters: the layers gained 3 to 5 %, and half a minute was spent.
        return "on a CPU it gains less than it costs"
    if zero_stage == 3:
        return "ZeRO 3 gathers the weights of each part of a layer, which torch.compile cannot see into"
    if parallel.tensor_size() > 1:
        return "with tensor parallelism the processes talk within each layer"
    return None


def start(model: Any, micro_batch_size: int, isolated: bool, log: Callable[[str], None]) -> bool:
    """Compile the layers of a `megatron.Model` on its device; False when it failed and they run as written.

    `isolated` tells whether batches come with segments. No gradient and no weight is touched.
    """
    device = next(model.parameters()).device
    folder = _choose_cache_folder()
    layers = model.all_layers()
    written = [layer.forward for layer in layers]
    for layer in layers:
        layer.forward = _CompiledForward(layer.forward)
    if device.type == "cuda":
        loss.fused_softmax = torch.compile(loss.softmax_times_mask)
    log(f"compiling the layers (torch.compile; kept in {folder}, the next start is quicker)")
    started = time.monotonic()
    try:
        _rehearse(model, micro_batch_size, isolated, device)
    except Exception as error:  # whatever the compiler dislikes, the training goes on without it
        for layer, forward in zip(layers, written, strict=True):
            layer.forward = forward
        loss.fused_softmax = None
        first_line = next(iter(str(error).strip().splitlines()), "")
        log(f"not compiled, the layers run as written: {type(error).__name__}: {first_line}")
        return False
    log(f"compiled in {seconds_text(time.monotonic() - started)}")
    return True


class _CompiledForward:
    """A layer's `forward`: compiled in training and for the first shape that it sees, as written otherwise."""

    def __init__(self, forward: Callable[..., Any]):
        self._written = forward
        # With the whole layer in one graph or not at all: a graph in pieces gains nothing.
        self._compiled = torch.compile(forward, fullgraph=True, dynamic=False)
        self._shape: torch.Size | None = None

    def __call__(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._written(hidden_states, *arguments, **named)
        if self._shape is None:
            self._shape = hidden_states.shape
        chosen = self._compiled if hidden_states.shape == self._shape else self._written
        return chosen(hidden_states, *arguments, **named)


def _rehearse(model: Any, micro_batch_size: int, isolated: bool, device: torch.device) -> None:
    """One micro batch forward and backward. Its gradients are asked for, not accumulated: DeepSpeed does not notice."""
    nats = model(*model.blank_arguments(micro_batch_size, isolated, device))
    torch.autograd.grad(nats, [parameter for parameter in model.parameters() if parameter.requires_grad])


def _choose_cache_folder() -> str:
    if CACHE_VARIABLE not in os.environ:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = Path(cache, "zerokara", "torch_compile")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:  # a home that cannot be written to: torch's own choice then
            return "a temporary folder"
        os.environ[CACHE_VARIABLE] = str(folder)
    return os.environ[CACHE_VARIABLE]
