"""Memory-mapped weights whose pages go back to the system after use.

A mapped file needs no memory of its own, but every page that was read counts as resident: after one forward pass the
whole model would. Half of it may stay: mapping all of it again for each generated token would take seconds.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch

RESIDENT_BYTES = 64 * 2**20
"""Bytes of weights that may be read before pages are released."""
KEPT_SHARE = 0.5
"""Of each file, from its start, that is never released."""


class PageRelease:
    """Forward hooks that keep few pages of a model's mapped weights resident."""

    def __init__(self, model: torch.nn.Module, folder: Path):
        """Hook into `model`, loaded from `folder`. Weights that are not mapped, or are on a GPU, stay as they are."""
        self._used = 0
        self._advise = getattr(ctypes.CDLL(None), "madvise", None)
        ranges = _mapped_ranges(folder.resolve())
        # Kept, so that the files stay mapped and no address is reused for something else.
        self._kept = [parameter.untyped_storage() for parameter in model.parameters() if parameter.device.type == "cpu"]
        starts = [storage.data_ptr() for storage in self._kept if storage.nbytes()]
        mapped = [(low, high) for low, high in ranges if any(low <= start < high for start in starts)]
        self._released = [(_page(low + int(KEPT_SHARE * (high - low))), high) for low, high in mapped]
        if self._advise is not None and self._released:
            for module in model.modules():
                size = sum(parameter.nbytes for parameter in module.parameters(recurse=False))
                if size:
                    module.register_forward_hook(lambda *_, size=size: self._has_used(size))

    def _has_used(self, size: int) -> None:
        self._used += size
        if self._used <= RESIDENT_BYTES:
            return
        self._used = 0
        assert self._advise is not None
        for low, high in self._released:
            # Nothing writes to these pages, so nothing is lost: the next read maps them from the file again.
            self._advise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), ctypes.c_int(mmap.MADV_DONTNEED))


def _page(address: int) -> int:
    """The start of the page of `address`."""
    return address - address % mmap.PAGESIZE


def _mapped_ranges(folder: Path) -> list[tuple[int, int]]:
    """Address ranges of mapped files of `folder`; empty where there is no /proc (other systems than Linux)."""
    table = Path("/proc/self/maps")
    if not table.exists():
        return []
    lines = [line.split(maxsplit=5) for line in table.read_text(encoding="utf-8", errors="replace").splitlines()]
    inside = [fields[0].split("-") for fields in lines if len(fields) == 6 and fields[5].startswith(f"{folder}/")]
    return [(int(low, 16), int(high, 16)) for low, high in inside]
