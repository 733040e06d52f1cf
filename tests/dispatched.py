"""What the operations of torch take: the bytes that are alive at a time, and each tensor that is made or copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPIES = {"aten.clone.default", "aten._to_copy.default", "aten.copy_.default"}


class Dispatched(TorchDispatchMode):
    """Records the tensors that operations make; what was there before does not count."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0
        self.made: list[tuple[str, torch.Size, torch.dtype]] = []
        """Operation, size and dtype of each tensor with memory of its own."""
        self.copied: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record."""
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        found = func(*args, **(kwargs or {}))
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and (storage := one.untyped_storage())._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.made.append((str(func), one.shape, one.dtype))
        if str(func) in COPIES:
            self.copied.append(found.shape)
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return found


def dispatched(function: Callable[[], object]) -> Dispatched:
    """Call a function and return what its operations made."""
    with Dispatched() as seen:
        function()
    return seen
