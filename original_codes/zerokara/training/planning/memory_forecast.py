"""The memory that a run needs against the memory of the machine: what the plan shows, what is refused, what would fit.

A run is refused where it certainly cannot run: state, and the least that activations take, exceed all that the machine
has (or a container or a limit grants), whatever happens to be free: other programs end, memory chips do not grow. What
may fit or not is noted, and left to the user. Advice never changes what is learned: how many sequences are computed at
a time, what is computed again, and what is spread over the processes or put aside are all that is ever advised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from zerokara import resources
from zerokara.config.pretrain_config import TrainingSettings
from zerokara.errors import UserError
from zerokara.progress import bytes_text
from zerokara.training.planning.memory import (
    ACTIVATION_MARGIN,
    Device,
    MemoryPart,
    TrainingLayout,
    min_activation_bytes,
    state_parts,
)

SAFE_SHARE = 0.87
"""Of the memory there is, what a run may plan with: allocators leave holes, and batches differ."""
KEPT_SHARE = 2
"""On a CPU, what a process holds that keeps the memory it frees, over what it uses: 1.04 to 1.8, measured without
activation checkpointing. With it 2 to 3, so there freed memory always goes back."""
LIBRARY_BYTES = 300_000_000
"""Main memory of a process that has loaded torch, megatron-core and DeepSpeed and holds no model; what it shares with
other processes (files) is left out. Measured."""
CUDA_CONTEXT_BYTES = 500_000_000
"""GPU memory of such a process, which torch does not count (NVIDIA's order of magnitude)."""


@dataclass(frozen=True)
class MachineMemory:
    """What the processes of a run may use."""

    gpu_bytes: int | None
    """Of each GPU; None on a CPU."""
    main_bytes: int
    """Of main memory, all processes together."""

    @classmethod
    def available(cls, num_processes: int, gpu_bytes: int | None) -> MachineMemory:
        """What is free now."""
        return cls(gpu_bytes, resources.available_memory(num_processes))

    @classmethod
    def installed(cls, num_processes: int, gpu_bytes: int | None) -> MachineMemory:
        """What would be free if nothing else ran."""
        return cls(gpu_bytes, resources.total_memory(num_processes))

    @property
    def device(self) -> Device:
        """Where the run computes."""
        return "cpu" if self.gpu_bytes is None else "cuda"


@dataclass(frozen=True)
class MemoryPool:
    """One kind of memory: what there is of it, and what a run needs of it."""

    name: Literal["memory", "GPU memory", "main memory"]
    available_bytes: int
    num_processes: int
    """Those that share it."""
    parts: tuple[MemoryPart, ...]
    """Libraries and state of each process."""
    activation_bytes: int = 0
    """Of each process, at least."""

    @property
    def fixed_bytes(self) -> int:
        """Libraries and state of all processes that share the pool."""
        return sum(part.num_bytes * self.num_processes for part in self.parts)

    @property
    def min_bytes(self) -> int:
        """Less is certainly not enough."""
        return self.fixed_bytes + self.num_processes * self.activation_bytes

    @property
    def ample_bytes(self) -> float:
        """So much is almost certainly enough."""
        return self.fixed_bytes + ACTIVATION_MARGIN * self.num_processes * self.activation_bytes

    @property
    def room_bytes(self) -> int:
        """What is left to each process for activations and temporary copies; negative where the state does not fit."""
        return (self.available_bytes - self.fixed_bytes) // self.num_processes

    @property
    def text(self) -> str:
        """What a process holds, by part, and what that leaves, for people."""
        parts = sorted(self.parts, key=lambda part: -part.num_bytes)
        named = ", ".join(f"{part.name} {bytes_text(part.num_bytes)}" for part in parts)
        each, among = (" each", f" for {self.num_processes} processes") if self.num_processes > 1 else ("", "")
        left = f"{bytes_text(self.room_bytes)}{each} left" if self.room_bytes >= 0 else "not enough"
        left += " for activations" if self.activation_bytes and self.room_bytes >= 0 else ""
        return f"{bytes_text(self.available_bytes)}{among}: {named}; {left}"


@dataclass(frozen=True)
class MemoryForecast:
    """A layout on a machine."""

    layout: TrainingLayout
    machine: MachineMemory

    @cached_property
    def pools(self) -> list[MemoryPool]:
        """The memory in which the run computes, and beside a GPU main memory."""
        parts, processes, gpu_bytes = state_parts(self.layout), self.layout.processes_per_node, self.machine.gpu_bytes
        activations = min_activation_bytes(self.layout)
        libraries = MemoryPart("libraries", LIBRARY_BYTES)
        main = (libraries, *(part for part in parts if part.on_host or gpu_bytes is None))
        if gpu_bytes is None:
            return [MemoryPool("memory", self.machine.main_bytes, processes, main, activations)]
        on_gpu = (MemoryPart("CUDA context", CUDA_CONTEXT_BYTES), *(part for part in parts if not part.on_host))
        return [
            MemoryPool("GPU memory", gpu_bytes, 1, on_gpu, activations),
            MemoryPool("main memory", self.machine.main_bytes, processes, main),
        ]

    @property
    def fits(self) -> bool:
        """Whether the run almost certainly fits, by the upper bound of its activations."""
        return all(pool.ample_bytes <= SAFE_SHARE * pool.available_bytes for pool in self.pools)

    @property
    def shortage(self) -> MemoryPool | None:
        """The pool that certainly is too small, the one that is exceeded most; None where the run may fit."""
        worst = max(self.pools, key=lambda pool: pool.min_bytes / max(1, pool.available_bytes))
        return worst if worst.min_bytes > worst.available_bytes else None

    @property
    def peak_limit_bytes(self) -> float:
        """The measured peak of a process (`joining.peak_memory`) up to which a trial has passed."""
        pool = self.pools[0]
        uncounted = CUDA_CONTEXT_BYTES if self.machine.device == "cuda" else 0
        return SAFE_SHARE * pool.available_bytes / pool.num_processes - uncounted

    @property
    def can_keep_freed_memory(self) -> bool:
        """Whether processes on a CPU may keep the memory they free, for speed (`joining.keep_freed_memory`)."""
        pool, checkpointing = self.pools[0], self.layout.activation_checkpointing
        return checkpointing == "off" and KEPT_SHARE * pool.ample_bytes <= SAFE_SHARE * pool.available_bytes

    def rows(self) -> list[tuple[str, str]]:
        """Lines of the plan: each pool, and a note where the run may not fit."""
        rows: list[tuple[str, str]] = [(pool.name, pool.text) for pool in self.pools]
        return rows if self.fits else [*rows, ("note", f"this may not fit; {self.advice()}")]

    def changed(self, **settings: Any) -> MemoryForecast:
        """The same with other settings."""
        return replace(self, layout=replace(self.layout, **settings))

    def remedies(self) -> list[tuple[dict[str, Any], MemoryForecast]]:
        """Settings that fit, each the least change of its kind; all of them together where none is enough alone."""
        kinds = list(_remedy_kinds(self.layout))
        found = []
        for changes in kinds:
            fitting = ((change, self.changed(**change)) for change in changes)
            found += [next(((change, made) for change, made in fitting if made.fits), None)]
        if single := [one for one in found if one]:
            return single
        together: dict[str, Any] = {}
        for changes in kinds:
            together |= changes[-1]
            if (made := self.changed(**together)).fits:
                return [(together, made)]
        return []

    def advice(self) -> str:
        """The settings that would fit, in numbers, for people."""
        found = self.remedies()
        if not found:
            least = self.changed(micro_batch_size=1, activation_checkpointing="full").pools[0]
            needed = f"{bytes_text(least.min_bytes)} or more of {least.name}"
            return (
                f"no setting makes it fit here: micro_batch_size 1 with activation_checkpointing full needs {needed}; "
                "use a machine with more memory, or more GPUs with zero_stage 3"
            )
        options = [f"{_text_of(change)} ({made.needs})" for change, made in found]
        return "what would fit, and changes nothing that is learned: " + "; or ".join(options)

    def measured_text(self, peak_bytes: int) -> str:
        """The measured peak of the fullest process against what there is for it, for people."""
        pool, layout = self.pools[0], self.layout
        for_each = pool.available_bytes // pool.num_processes
        return (
            f"the fullest process held {bytes_text(peak_bytes)} at most, {peak_bytes / for_each:.0%} of the "
            f"{bytes_text(for_each)} available to it, with micro_batch_size {layout.micro_batch_size}"
        )

    @property
    def needs(self) -> str:
        """What is ample, for people."""
        return ", ".join(f"at most {bytes_text(pool.ample_bytes)} of {pool.name}" for pool in self.pools)


def _text_of(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in settings.items())


def _remedy_kinds(layout: TrainingLayout) -> Iterator[list[dict[str, Any]]]:
    """Kinds of changes, the cheapest first, each from the least to the most."""
    modes = ["off", "selective", "full"]
    smaller = [size for size in reversed(layout.micro_batch_sizes) if size < layout.micro_batch_size]
    # ZeRO spreads the state over the processes that compute different sequences; only AdamW's beyond stage 1.
    last_stage = 0 if layout.data_parallel_size == 1 else 3 if layout.optimizer == "adamw" else 1
    kinds: list[list[dict[str, Any]]] = [
        [{"micro_batch_size": size} for size in smaller],
        [{"activation_checkpointing": mode} for mode in modes[modes.index(layout.activation_checkpointing) + 1 :]],
        [{"zero_stage": stage} for stage in range(layout.zero_stage + 1, last_stage + 1)],
    ]
    if layout.optimizer == "adamw":
        kinds.append([{"tensor_parallel_size": size} for size in _tensor_parallel_sizes(layout)])
        if layout.device == "cuda" and layout.offload == "none":
            first = {"offload": "optimizer", "zero_stage": max(1, layout.zero_stage)}
            kinds.append([first, {"offload": "all", "zero_stage": 3}])
    yield from filter(None, kinds)


def _tensor_parallel_sizes(layout: TrainingLayout) -> list[int]:
    shape, processes = layout.shape, layout.num_processes
    shared = (shape.num_kv_heads, shape.num_attn_heads, shape.ffn_hidden_size, shape.padded_vocab_size)
    return [
        size
        for size in range(layout.tensor_parallel_size + 1, processes + 1)
        if processes % size == 0
        and all(count % size == 0 for count in shared)
        and layout.global_batch_size % (layout.micro_batch_size * (processes // size)) == 0
    ]


def check_fits(forecast: MemoryForecast, given: TrainingSettings) -> None:
    """Check that a run may fit at all, of `MachineMemory.installed`; `given` are the settings as the user gave them.

    Raises:
        UserError: it cannot; names the key that makes it fit, in numbers, or the model's size where none does.
    """
    pool = forecast.shortage
    if pool is None:
        return
    key, remedy = _way_out(forecast, given)
    needing = f"{pool.num_processes} training processes need" if pool.num_processes > 1 else "a training process needs"
    rule = (
        f"{needing} at least {bytes_text(pool.min_bytes)} of {pool.name}, "
        f"and this machine has {bytes_text(pool.available_bytes)}"
    )
    raise UserError(given.fault(key, rule, remedy))


def _way_out(forecast: MemoryForecast, given: TrainingSettings) -> tuple[str, str]:
    """The key to change, and to what."""
    if remedies := forecast.remedies():
        return next(iter(remedies[0][0])), forecast.advice()
    if forecast.machine.gpu_bytes is None:
        for fewer in range(forecast.layout.num_processes - 1, 0, -1):
            if not list(given.batch_faults(fewer)) and (made := forecast.changed(num_processes=fewer)).fits:
                return "num_processes", f"{fewer} would fit ({made.needs}), and changes nothing that is learned"
    shape = forecast.layout.shape
    for layers in range(shape.num_layers - 1, 0, -1):
        sparse = tuple(layer for layer in shape.moe_layers if layer < layers)
        made = forecast.changed(shape=replace(shape, num_layers=layers, moe_layers=sparse), micro_batch_size=1)
        if made.fits:
            return "num_layers", f"{forecast.advice()}; or a model with num_layers: {layers} ({made.needs})"
    return "hidden_size", f"{forecast.advice()}; or a smaller model"
