"""What torch's operations take: the bytes that are alive at a time, and each tensor that they make."""

from typing import Any

from torch import Size, Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Dispatched(TorchDispatchMode):
    """Records tensors with memory of their own; what was there before does not count."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0
        self.made: list[tuple[str, Size]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        found = func(*args, **(kwargs or {}))
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and (storage := one.untyped_storage())._cdata not in given:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.made.append((func.name(), one.shape))
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))
        return found
