"""The pages of a model that is mapped from its files: after use they go back to the system.

A mapped file costs no memory of its own, but each page that was read counts as resident, and a model that was read
through looks as if it were in memory as a whole, and on a small machine pushes out what others need.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch

_RESIDENT_BYTES = 128 * 2**20
"""Weights that may be read before their pages are given back."""


class MappedPages:
    """Watches a model compute, and keeps few of the pages that its weights are mapped from resident."""

    def __init__(self, model: torch.nn.Module, folder: Path):
        """Begin; `folder` holds the files. Weights that are not mapped, or are on a GPU, stay as they are."""
        self._used = 0
        self._advise = getattr(ctypes.CDLL(None), "madvise", None)
        ranges = _mapped_ranges(folder.resolve())
        # Kept, so that the files stay mapped where they are and no address becomes that of something else.
        self._kept = [parameter.untyped_storage() for parameter in model.parameters() if parameter.device.type == "cpu"]
        starts = [storage.data_ptr() for storage in self._kept if storage.nbytes()]
        self._mapped = [(low, high) for low, high in ranges if any(low <= start < high for start in starts)]
        if self._advise is not None and self._mapped:
            for module in model.modules():
                size = sum(parameter.nbytes for parameter in module.parameters(recurse=False))
                if size:
                    module.register_forward_hook(lambda *_, size=size: self._has_used(size))

    @property
    def bytes(self) -> int:
        """How much is mapped from the model's files."""
        return sum(high - low for low, high in self._mapped)

    def _has_used(self, size: int) -> None:
        self._used += size
        if self._used <= _RESIDENT_BYTES:
            return
        self._used = 0
        assert self._advise is not None
        for low, high in self._mapped:
            # Nobody writes to them, so that nothing is lost: the next who reads a page has it from the file.
            self._advise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), ctypes.c_int(mmap.MADV_DONTNEED))


def _mapped_ranges(folder: Path) -> list[tuple[int, int]]:
    """Where files of `folder` are mapped in this process; empty where the system does not tell (only Linux does)."""
    table = Path("/proc/self/maps")
    if not table.exists():
        return []
    lines = [line.split(maxsplit=5) for line in table.read_text(encoding="utf-8", errors="replace").splitlines()]
    inside = [fields[0].split("-") for fields in lines if len(fields) == 6 and fields[5].startswith(f"{folder}/")]
    return [(int(low, 16), int(high, 16)) for low, high in inside]
