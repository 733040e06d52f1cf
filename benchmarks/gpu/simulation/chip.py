"""How fast an H100 is assumed to be: the part of a simulation that only a GPU can confirm.

Sources: NVIDIA's datasheet, and a reading of one (product of 8192³ in bf16: 798 TFLOP/s; copy: 3.0 TB/s).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar


class Chip:
    """An H100 (SXM)."""

    memory_bytes = 85_017_493_504  # as torch tells it
    peak_flops, peak_bytes = 990e12, 3.35e12
    best_flops, best_bytes = 800e12, 2.8e12
    """Of large products, and of large copies."""
    fp8 = 1.75
    """Times as fast as bf16, measured by others in products of this size."""
    fp32 = 0.08
    """The same, without TF32."""
    kernel_seconds = 3e-6
    processors = 132
    attention: ClassVar[dict[int, tuple[float, float]]] = {64: (400e12, 300e12), 128: (550e12, 430e12)}
    """FlashAttention 2 by head size: forward and backward."""
    properties: ClassVar[dict[str, Any]] = {
        "name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "total_memory": memory_bytes,
        "multi_processor_count": processors, "warp_size": 32, "max_threads_per_multi_processor": 2048,
        "max_threads_per_block": 1024, "regs_per_multiprocessor": 65536, "shared_memory_per_block": 49152,
        "shared_memory_per_block_optin": 232448, "shared_memory_per_multiprocessor": 233472, "L2_cache_size": 52428800,
        "gcnArchName": "sm_90", "clock_rate": 1980000, "memory_clock_rate": 2619000, "memory_bus_width": 5120,
    }  # fmt: skip

    @classmethod
    def product_seconds(cls, rows: int, columns: int, inner: int, batch: int, rate: float) -> float:
        """A product of [rows, inner] and [inner, columns] in waves of tiles of 128 × 256; a short `inner` costs."""
        tiles = batch * -(-rows // 128) * -(-columns // 256)
        if tiles >= cls.processors:
            waves = tiles / cls.processors
            filled = waves / math.ceil(waves)
        else:  # cut along the inner length, so that all have work
            cuts = max(1, min(inner // 512, cls.processors // tiles or 1))
            filled = min(1.0, tiles * cuts / cls.processors) * (0.9 if cuts > 1 else 1.0)
        ragged = rows / (128 * -(-rows // 128))
        ragged *= columns / (256 * -(-columns // 256)) if columns >= 256 else columns / 256
        short = inner / (inner + 160)
        return 2 * batch * rows * columns * inner / (cls.best_flops * rate * filled * ragged * short)


@dataclass(frozen=True)
class Kernel:
    """An operator, or one kernel that Inductor makes of several."""

    part: str
    """``products``, ``attention`` or ``element-wise``."""
    name: str
    flops: float = 0.0
    bytes: float = 0.0
    """Read and written."""
    count: int = 1
    arithmetic_seconds: float = 0.0

    @property
    def roofline(self) -> float:
        """Seconds at the peak of arithmetic or of memory, whichever is longer."""
        return max(self.flops / Chip.peak_flops, self.bytes / Chip.peak_bytes)

    @property
    def seconds(self) -> float:
        """Seconds that are expected."""
        return max(self.arithmetic_seconds, self.bytes / Chip.best_bytes, self.count * Chip.kernel_seconds)


PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "dot", "mv", "add_product"}


def product(name: str, arguments: Any) -> tuple[float, float]:
    """Arithmetic of a matrix product, and the seconds that it takes."""
    left, right = arguments[1:3] if name in ("addmm", "baddbmm", "add_product") else arguments[:2]
    batch, (rows, inner) = (left.shape[0], left.shape[1:]) if left.dim() == 3 else (1, left.shape)
    columns, rate = right.shape[-1], Chip.fp8 if name == "_scaled_mm" else 1.0
    if left.element_size() == 4:
        rate = Chip.fp32
    flops = 2.0 * batch * rows * inner * columns
    return flops, Chip.product_seconds(int(rows), int(columns), int(inner), int(batch), rate)


def attention(name: str, heads: list[Any], document: int) -> tuple[float, float]:
    """Arithmetic of causal attention, and its seconds; of `heads`, its tensors, a backward pass has the gradient first.

    Of documents that lie one after another, [P, H, E], each has the length `document`.
    """
    is_backward = "backward" in name
    query, key = heads[1:3] if is_backward else heads[:2]
    size = int(query.shape[-1])
    if query.dim() == 4:
        pairs = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] / 2
    else:
        pairs = query.shape[0] * query.shape[1] * document / 2
    flops = float((10 if is_backward else 4) * pairs * size)
    return flops, flops / Chip.attention[128 if size >= 128 else 64][is_backward]
