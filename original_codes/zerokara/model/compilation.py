"""torch.compile for each layer: the many small operations between its matrix products become a few.

One compiled layer serves all, for one shape: that of a micro batch. Everything else, validation for example, runs
eagerly and needs no compilation of its own. Layers are compiled at the start, in a warm-up of one micro batch, with a
log line before and after; the result is cached in a folder of the user's, where the next start finds it. Should it fail
(no compiler, an error of torch's), the layers run eagerly, and the log says so.

On a GPU the softmax of the loss is compiled as well: there it costs more than the matrix products around it.

ZeRO 3 gathers weights inside a layer, and tensor parallelism communicates there; no compiler sees through either. There
what lies between is compiled function by function (`start_functions`): the softmax of the loss, activations, and the
rotation of queries and keys by their positions. Norms are not among them: on a GPU torch has one kernel for each
(native_layer_norm, _fused_rms_norm).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerokara.model import feed_forward, loss, parallel
from zerokara.model.fusion import Fused
from zerokara.model.megatron_core import rope_utils
from zerokara.progress import seconds_text

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's variable for the folder of compiled code, by default in /tmp, which a reboot empties."""

plain_rotate = rope_utils._apply_rotary_pos_emb_bshd
"""megatron-core's rotation of queries or keys [S, B, N, E] by their angles [S, 1, 1, E]."""


def reason_against(mode: str, device_type: str, zero_stage: int) -> str | None:
    """Why ``compile: <mode>`` leaves the layers uncompiled, or None where it compiles them.

    `parallel.start` must have been called.
    """
    if mode == "off":
        return "compile: off"
    if mode == "auto" and device_type == "cpu":
        # Measured on two cores at 40M parameters: the layers gained 3 to 5 %, and half a minute was spent.
        return "on a CPU it gains less than it costs"
    if zero_stage == 3:
        return "ZeRO 3 gathers weights inside each layer, which torch.compile cannot trace"
    if parallel.tensor_size() > 1:
        return "tensor parallelism communicates inside each layer"
    return None


def compiles_functions(mode: str, device_type: str) -> bool:
    """Whether ``compile: <mode>`` compiles single functions where there is a `reason_against` whole layers."""
    return mode == "on" or (mode == "auto" and device_type == "cuda")


def start(
    model: Any,
    micro_batch_size: int,
    intra_document_masking: bool,
    log: Callable[[str], None],
    packs_examples: bool = False,
) -> bool:
    """Compile the layers of a `megatron.Model` on its device; False when it failed and they run eagerly.

    With `intra_document_masking` batches come with segments, and where a run `packs_examples`, with their number. No
    gradient and no weight is touched.
    """
    device = next(model.parameters()).device
    folder = _choose_cache_folder()
    layers = model.all_layers()
    eager = [layer.forward for layer in layers]
    for layer in layers:
        layer.forward = _CompiledForward(layer.forward)
    if device.type == "cuda":
        loss.fused_softmax = Fused(loss.softmax_times_mask)
    log(f"compiling the layers (torch.compile; cached in {folder} for the next start)")
    started = time.monotonic()
    try:
        _warm_up(model, model.blank_arguments(micro_batch_size, intra_document_masking, packs_examples, device))
    except Exception as error:  # whatever the compiler dislikes, training works without it
        for layer, forward in zip(layers, eager, strict=True):
            layer.forward = forward
        loss.fused_softmax = None
        log(f"not compiled, the layers run eagerly: {_first_line(error)}")
        return False
    _log_errors(fused_functions(), log)
    log(f"compiled in {seconds_text(time.monotonic() - started)}")
    return True


def start_functions(
    model: Any,
    micro_batch_size: int,
    intra_document_masking: bool,
    log: Callable[[str], None],
    packs_examples: bool = False,
) -> bool:
    """Compile the functions of a `megatron.Model`, whose layers stay eager; False when one of them failed.

    Every process must call it: one micro batch is computed, forward and without gradients, as in validation.
    """
    device = next(model.parameters()).device
    folder = _choose_cache_folder()
    fused = _fuse_functions()
    log(f"compiling the loss, activations and rotary positions (torch.compile; cached in {folder} for the next start)")
    started = time.monotonic()
    with torch.no_grad():
        model(*model.blank_arguments(micro_batch_size, intra_document_masking, packs_examples, device))
    for each in fused:
        each.stop_learning()
    _log_errors(fused, log)
    log(f"compiled in {seconds_text(time.monotonic() - started)}")
    return not any(each.error for each in fused)


def _fuse_functions() -> list[Fused]:
    """Put compiled functions in the place of those that are called by themselves."""
    loss.fused_softmax = Fused(loss.softmax_times_mask)
    loss.fused_parallel_softmax = loss.ParallelSoftmax(*(Fused(each) for each in loss.PARALLEL_SOFTMAX))
    feed_forward.fused_activate = Fused(feed_forward.plain_activate, num_differentiable=2)
    rope_utils._apply_rotary_pos_emb_bshd = Fused(plain_rotate, num_differentiable=1)
    return fused_functions()


def fused_functions() -> list[Fused]:
    """The functions that are compiled by themselves."""
    softmax = loss.fused_softmax, *(loss.fused_parallel_softmax or ())
    places = *softmax, feed_forward.fused_activate, rope_utils._apply_rotary_pos_emb_bshd
    return [each for each in places if isinstance(each, Fused)]


def _log_errors(fused: list[Fused], log: Callable[[str], None]) -> None:
    for each in fused:
        if each.error:
            log(f"not compiled, runs eagerly: {each.name}: {_first_line(each.error)}")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def run_eagerly() -> None:
    """Undo what was put in place of functions."""
    loss.fused_softmax = loss.fused_parallel_softmax = feed_forward.fused_activate = None
    rope_utils._apply_rotary_pos_emb_bshd = plain_rotate


class _CompiledForward:
    """A layer's `forward`: compiled in training at the first shape that it sees, eager otherwise."""

    def __init__(self, forward: Callable[..., Any]):
        self._eager = forward
        # The whole layer in one graph or not at all: a graph with breaks gains nothing.
        self._compiled = torch.compile(forward, fullgraph=True, dynamic=False)
        self._shape: torch.Size | None = None

    def __call__(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._eager(hidden_states, *arguments, **named)
        if self._shape is None:
            self._shape = hidden_states.shape
        if (mask := named.get("attention_mask")) is not None and mask.dim() == 1:
            # Offsets of documents, as many as there are: one code for any number of them.
            torch._dynamo.mark_dynamic(mask, 0)
        chosen = self._compiled if hidden_states.shape == self._shape else self._eager
        return chosen(hidden_states, *arguments, **named)


def _warm_up(model: Any, arguments: list[torch.Tensor]) -> None:
    """One micro batch forward and backward, its gradients computed but not accumulated: DeepSpeed does not notice."""
    nats = model(*arguments)
    torch.autograd.grad(nats, [parameter for parameter in model.parameters() if parameter.requires_grad])


def _choose_cache_folder() -> str:
    if CACHE_VARIABLE not in os.environ:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = Path(cache, "zerokara", "torch_compile")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:  # a read-only home: torch chooses
            return "a temporary folder"
        os.environ[CACHE_VARIABLE] = str(folder)
    return os.environ[CACHE_VARIABLE]
