"""The copy of the training state in main memory that a checkpoint is written from, while training goes on."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Mapping

import torch
from torch import Tensor


class HostCopy:
    """Fp32 tensors by name, in main memory; each copy replaces the one before.

    With a GPU the memory is pinned, so that copying runs at the speed of the bus: in a thread (`reserve`), since that
    takes seconds, and ahead of the first save. Pages are mapped and registered with CUDA here because torch rounds its
    own pinned memory up to powers of two: up to twice as much.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._tensors: dict[str, Tensor] = {}
        self._reserving: threading.Thread | None = None

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """With a GPU, begin to pin memory for tensors of so many numbers by name."""
        if self._device.type == "cuda":
            self._reserving = threading.Thread(target=self._allocate_all, args=(sizes,), name="pin", daemon=True)
            self._reserving.start()

    def _allocate_all(self, sizes: Mapping[str, int]) -> None:
        for name, count in sizes.items():
            self._tensors[name] = self._allocate(count)

    def put(self, name: str, tensor: Tensor) -> Tensor:
        """Copy `tensor` over the earlier one with this name, and return the copy; it is valid after `finish`."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        copy = self._tensors.get(name)
        if copy is None or copy.numel() != tensor.numel():
            copy = self._tensors[name] = self._allocate(tensor.numel())
        copy = copy.view(tensor.shape)
        # In stream order: the memory of `tensor` is not reused before it is read.
        copy.copy_(tensor, non_blocking=True)
        return copy

    def finish(self) -> None:
        """Wait until all copies are complete."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _allocate(self, count: int) -> Tensor:
        # Private: of shared memory, Python's default, Linux makes no huge pages.
        pages = mmap.mmap(-1, 4 * count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)  # fewer and larger pages: the first copy takes less time
        tensor = torch.frombuffer(pages, dtype=torch.float32, count=count)
        if self._device.type == "cuda":
            _pin(tensor, self._device)
        return tensor


def _pin(tensor: Tensor, device: torch.device) -> None:
    """Pin a tensor's memory; where that is refused (a limit on locked memory), copying is only slower."""
    if int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) != 0:
        # CUDA keeps the error for whoever looks next, which is the check behind any kernel: let that be this one.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device).add_(1)
