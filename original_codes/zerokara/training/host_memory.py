"""A reusable copy of the training state in main memory, in which each checkpoint replaces the one before."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_ARENA_BYTES = 64 * 2**20
_ALIGNMENT = 64


class HostCopy:
    """Fp32 tensors by name, in main memory.

    With a GPU the memory is pinned, so that copying runs at the speed of the bus. Pages are mapped and registered with
    CUDA here because torch rounds its own pinned memory up to powers of two: up to twice as much.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._arenas: list[mmap.mmap] = []
        self._shared: mmap.mmap  # the newest arena of small tensors, with `_free` bytes left
        self._free = 0
        self._tensors: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Tensor) -> Tensor:
        """Copy `tensor` over the earlier one with this name, and return the copy; it is valid after `finish`."""
        copy = self._tensors.get(name)
        if copy is None or copy.shape != tensor.shape:
            copy = self._tensors[name] = self._allocate(tensor.numel()).view(tensor.shape)
        # In stream order: the memory of `tensor` is not reused before it is read.
        copy.copy_(tensor, non_blocking=True)
        return copy

    def finish(self) -> None:
        """Wait until all copies are complete."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return sum(len(arena) for arena in self._arenas)

    def _allocate(self, count: int) -> Tensor:
        num_bytes = -(-count * 4 // _ALIGNMENT) * _ALIGNMENT
        if num_bytes >= _ARENA_BYTES // 8:  # large enough for pages of its own
            return torch.frombuffer(self._arena(num_bytes), dtype=torch.float32, count=count)
        if num_bytes > self._free:
            self._shared, self._free = self._arena(_ARENA_BYTES), _ARENA_BYTES
        begin = _ARENA_BYTES - self._free
        self._free -= num_bytes
        return torch.frombuffer(self._shared, dtype=torch.float32, count=count, offset=begin)

    def _arena(self, num_bytes: int) -> mmap.mmap:
        arena = mmap.mmap(-1, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        arena.madvise(mmap.MADV_HUGEPAGE)  # fewer and larger pages: the first copy takes less time
        if self._device.type == "cuda":
            address = torch.frombuffer(arena, dtype=torch.uint8).data_ptr()
            # If it cannot be pinned (a limit on locked memory), the copy is only slower.
            torch.cuda.cudart().cudaHostRegister(address, len(arena), 0)
        self._arenas.append(arena)
        return arena
