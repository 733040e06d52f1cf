"""What a step does on the device: each operator with its arithmetic and bytes, and the memory of every storage."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.simulation.chip import PRODUCTS, Kernel, attention, product

VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "split",
    "split_with_sizes", "detach", "alias", "as_strided", "unbind", "narrow", "diagonal", "lift_fresh", "chunk",
    "_reshape_alias", "set_", "resize_", "is_same_size", "record_stream",
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
}  # fmt: skip
FILLS = {
    "zero", "fill", "zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "new_zeros", "arange",
    "scalar_tensor", "new_full", "new_ones",
}  # fmt: skip
IN_PLACE = {"add", "mul", "sub", "div", "clamp", "mm", "addmm", "masked_fill"}
READS_DEVICE = {"_local_scalar_dense", "item", "nonzero", "_unique2", "masked_select"}
MANY = 40
"""Tensors that one kernel of a ``_foreach`` operator serves; or `CHUNKS` pieces of 65,536 numbers."""
CHUNKS = 320


def size_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of tensors."""
    return sum(each.numel() * each.element_size() for each in tensors)


class Recorder(TorchDispatchMode):
    """Sees every operator while it is on; `section` says of which part of the step."""

    def __init__(self, document: int) -> None:
        super().__init__()
        self.kernels: list[tuple[str, Kernel]] = []
        """With their sections."""
        self.section, self.inside, self.is_on, self.document = "", 0, True, document
        self.now = self.peak = 0
        """Bytes of all storages on the device."""
        self.host_waits = Counter[str]()
        self._storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, _, name = func._schema.name.partition("::")
        if name in READS_DEVICE:
            self.host_waits[f"{self.section}: {name}"] += 1
        out = func(*args, **kwargs)
        outs = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
        for each in outs:
            self._see(each)
        if self.is_on and not self.inside and space in ("aten", "torch_attn", "zerokara"):
            read = {key: value for key, value in kwargs.items() if key != "out"}
            ins = [each for each in tree_leaves((args, read)) if isinstance(each, Tensor)]
            if any(each.device.type == "cuda" for each in (*ins, *outs)):
                self._count(func, name, args, ins, outs)
        return out

    @contextmanager
    def compiled(self, kernels: Sequence[Kernel], extra: int) -> Iterator[None]:
        """A compiled region: these kernels, and so many bytes at its fullest on top of what is there."""
        self.kernels += [(self.section, each) for each in kernels]
        if not self.inside:
            self.peak = max(self.peak, self.now + extra)
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            self.peak = max(self.peak, 0 if self.inside else self.now)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is traced here is no part of the step, nor are the storages that a tracer keeps."""
        was_on, self.is_on, known = self.is_on, False, set(self._storages)
        self.inside += 1
        yield
        self.inside -= 1
        self.is_on = was_on
        for key in [key for key in self._storages if key not in known]:
            gone, number = self._storages[key]
            self.now -= number
            self._storages[key] = (gone, 0)

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type != "cuda" or key in self._storages:
            return
        number = -(-storage.nbytes() // 512) * 512  # as torch's allocator rounds
        self._storages[key] = (weakref.ref(storage, lambda _, key=key: self._forget(key)), number)
        self.now += number
        self.peak = max(self.peak, 0 if self.inside else self.now)

    def _forget(self, key: int) -> None:
        self.now -= self._storages.pop(key)[1]

    def _count(self, func: Any, name: str, args: Any, ins: list[Tensor], outs: list[Tensor]) -> None:
        base = name if name.startswith("_foreach") else name.rstrip("_")
        storages = {each.untyped_storage()._cdata for each in ins}
        is_view = outs and all(each.untyped_storage()._cdata in storages for each in outs)
        if base in VIEWS or name in VIEWS or (is_view and not func._schema.is_mutable):
            return
        count, moved = 1, size_of(ins) + size_of(outs)
        if name.startswith("_foreach") or name == "_fused_adamw_":
            lists = [each for each in args if isinstance(each, list | tuple) and each and isinstance(each[0], Tensor)]
            count = max(1, len(lists[0]) // MANY, sum(each.numel() for each in lists[0]) // (CHUNKS * 65536))
            moved = self._moved_by_lists(name, [size_of(each) for each in lists], size_of(outs))
        elif base in FILLS:
            moved = size_of(outs or ins[:1])
        elif name == "copy_":
            moved = size_of([args[1], args[0]])
        elif name in ("embedding", "index", "gather", "index_select"):
            moved = 2 * size_of(outs)
        elif name in ("scatter_", "scatter", "scatter_add_", "index_put_"):
            moved = args[2].numel() * (16 + args[0].element_size())
        elif name == "index_add_":
            moved = 3 * size_of([args[3]])
        elif func._schema.is_mutable and base in IN_PLACE:
            moved = size_of(ins) + size_of([args[0]])
        elif base == "embedding_dense_backward":
            count = 6
        part, flops, seconds = "element-wise", 0.0, 0.0
        if base in PRODUCTS:
            part, (flops, seconds) = "products", product(base, args)
        elif "attention" in name or "_varlen_attn" in name:
            heads = [each for each in args if isinstance(each, Tensor) and each.dim() >= 3]
            part, (flops, seconds) = "attention", attention(name, heads, self.document)
        self.kernels.append((self.section, Kernel(part, name, flops, moved, count, seconds)))

    @staticmethod
    def _moved_by_lists(name: str, lists: list[int], out: int) -> int:
        if name == "_fused_adamw_":  # reads weights, gradients and both moments; writes all but the gradients
            return 2 * sum(lists[:4]) - lists[1]
        if name == "_foreach_copy_":
            return sum(lists)
        if name in ("_foreach_norm", "_foreach_zero_"):
            return lists[0]
        return sum(lists) + (lists[0] if name.endswith("_") else out)


def on_device(size: Any, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor on the device, without numbers."""
    return torch.empty(size, dtype=dtype, device=torch.device("cuda", 0))
