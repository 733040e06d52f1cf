"""torch.compile for each layer: the many small operations between its matrix products become a few.

One compiled layer serves all of its kind, for one shape: that of a micro batch; everything else, validation for
example, runs eagerly. Layers are compiled at the start, in a warm-up of one micro batch, which computes each layer by
itself; the result is cached in a folder of the user's. Should it fail (no compiler, an error of torch's), the layers
run eagerly, and the log says so; but a lack of memory ends the process, for eager layers need more. On a GPU the
softmax of the loss is compiled as well: there it costs more than the matrix products around it.

ZeRO 3 gathers weights around a layer. Tensor parallelism communicates inside it, and no compiler sees through
that. There what lies between is compiled function by function: the softmax of the loss, activations, and the rotation
of queries and keys by their positions. Norms are not among them: on a GPU torch has one kernel for each
(native_layer_norm, _fused_rms_norm).
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokara.base.progress import seconds_text
from zerokara.model import loss, parallel
from zerokara.model.attention import rotate
from zerokara.model.experts import experts_of
from zerokara.model.megatron_core import rope_utils

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's variable for the folder of compiled code, by default in /tmp, which a reboot empties."""

_NO_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
    "Triton Error [CUDA]: out of memory",
)
"""Sources, torch 2.13: c10/core/impl/alloc_cpu.cpp, c10/cuda/CUDAException.cpp, ATen/cuda/Exceptions.h; NCCL, Triton.
Where it is not the caching allocator that lacks memory, torch tells it by the text of a RuntimeError alone."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if an error tells of a lack of memory, or was raised from one that does, as a compiler's are."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(mark in str(error) for mark in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def reason_against(mode: str, device_type: str) -> str | None:
    """Reason why ``compile: <mode>`` leaves the layers uncompiled, or None; after `parallel.start`."""
    if mode == "off":
        return "compile: off"
    if mode == "auto" and device_type == "cpu":
        # Without AMX 0 to 8 %, and half a minute is spent; where it pays, `training.auto_settings` has made it ``on``.
        return "on a CPU it gains less than it costs"
    if parallel.tensor_size() > 1:
        return "tensor parallelism communicates inside each layer"
    return None


def compiles_functions(mode: str, device_type: str) -> bool:
    """True if ``compile: <mode>`` compiles single functions where there is a `reason_against` whole layers."""
    return mode == "on" or (mode == "auto" and device_type == "cuda")


def start(model: Any, arguments: list[Tensor], log: Callable[[str], None], whole_layers: bool = True) -> bool:
    """Compile a model's layers, or functions alone, for micro batches like this one; False if something runs eagerly.

    `arguments` are those of any micro batch of the run, on the model's device. Every process must call it: the micro
    batch is computed. No weight changes; zeros are added to gradients that products add up (`weight_gradients`).

    Raises:
        RuntimeError: of any class, for a lack of memory.
    """
    device = arguments[0].device
    # The kernel of attention is in the code, and in no key of torch's cache.
    torch.compiler.config.cache_key_tag = f"cuDNN's attention: {torch.backends.cuda.cudnn_sdp_enabled()}"
    layers = model.all_layers() if whole_layers else []
    kernels, functions = model.kernels, list[CompiledFunction]()
    for layer in layers:
        layer.compiled = CompiledLayer(layer)
    if not whole_layers or device.type == "cuda":
        kernels.softmax = [CompiledFunction(each) for each in loss.SOFTMAX]
        functions += kernels.softmax
    if not whole_layers:
        kernels.activate = CompiledFunction(kernels.activate, in_training=True)
        rope_utils._apply_rotary_pos_emb_bshd = CompiledFunction(rotate, in_training=True)
        functions += kernels.activate, rope_utils._apply_rotary_pos_emb_bshd
    what = "the layers" if whole_layers else "the loss, activations and rotary positions"
    log(f"compiling {what} (torch.compile; cached in {_choose_cache_folder()} for the next start)")
    started = time.monotonic()
    try:
        for experts in experts_of(layers):
            experts.counts.reset(device)  # the compiler looks at where they are
        model(*arguments)
        if kernels.softmax:
            with torch.no_grad():  # that of validation
                model(*arguments)
    except Exception as error:  # whatever else the compiler dislikes, training works without it
        if not whole_layers or is_out_of_memory(error):
            raise
        for layer in layers:
            layer.compiled = None
        kernels.softmax = None
        log(f"not compiled, the layers run eagerly: {_first_line(error)}")
        return False
    for layer in layers:
        layer.compiled.is_warming_up = False
    for experts in experts_of(layers):
        experts.counts.reset(device)
    failed = [each for each in functions if each.error]
    for each in failed:
        log(f"not compiled, runs eagerly: {each.function.__name__.strip('_')}: {_first_line(each.error)}")
    log(f"compiled in {seconds_text(time.monotonic() - started)}")
    return not failed


def _first_line(error: Exception | None) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


class CompiledLayer:
    """Forward pass of a layer: compiled in training at the shape of the warm-up, eager otherwise."""

    def __init__(self, layer: Any):
        self._eager = layer.compute
        # A forward pass that is recomputed counts the choices of experts (`RouterCounts`) once, here.
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        # The whole layer in one graph or not at all: a graph with breaks gains nothing.
        self._compiled = torch.compile(layer.compute, fullgraph=True, dynamic=False)
        self._shape: torch.Size | None = None
        self.is_warming_up = True

    def __call__(self, hidden_states: Tensor, mask: Any, context: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._eager(hidden_states, mask, context, **named)
        if mask is not None and mask.dim() == 1:
            # Offsets of documents, as many as there are: one code for any number of them.
            torch._dynamo.mark_dynamic(mask, 0)
        if not self.is_warming_up:
            chosen = self._compiled if hidden_states.shape == self._shape else self._eager
            return chosen(hidden_states, mask, context, **named)
        self._shape = hidden_states.shape
        out, _ = self._compiled(hidden_states, mask, context, **named)
        # All gradients of the layer, freed at once: training, which adds them up as they come, holds no more. They are
        # not accumulated: DeepSpeed does not notice.
        torch.autograd.grad(out, hidden_states, torch.zeros_like(out))
        return hidden_states, context  # of equal shape, for the next layer and the loss


class CompiledFunction:
    """A function compiled for the sizes of tensors that it meets.

    Should the compiler fail, it runs as written from then on, and `error` says why: no process leaves a forward pass in
    which others communicate.
    """

    def __init__(self, function: Callable[..., Any], in_training: bool = False):
        """`in_training` compiles it where gradients are computed alone, for each size; else the second size that it
        meets is compiled for all further ones."""
        self.function, self._in_training = function, in_training
        self._compiled = torch.compile(function, fullgraph=True, dynamic=False if in_training else None)
        self.error: Exception | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self.error is None and (torch.is_grad_enabled() or not self._in_training):
            try:
                return self._compiled(*arguments, **named)
            except Exception as error:  # whatever else the compiler dislikes, training works without it
                if is_out_of_memory(error):
                    raise
                self.error = error
        return self.function(*arguments, **named)


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
