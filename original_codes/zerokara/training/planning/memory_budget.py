"""The memory that is there, against the memory that a run is estimated to need; and which settings would fit.

Nothing here changes what is learned: how many sequences are computed at a time, what is computed again, and what is
spread over the processes or put aside are all that is ever advised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from zerokara import resources
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model.memory import Estimate, Layout, estimate
from zerokara.model.shapes import ModelShape
from zerokara.progress import bytes_text
from zerokara.training.compute import optimizers

SAFE_SHARE = 0.87
"""Of what is there, the share that an estimate may take: it may be 15 % too low (tests/numerics/test_memory.py)."""
CPU_MICRO_BATCH_TOKENS = 2048
"""On a CPU `micro_batch_size: auto` goes no further: a larger matrix product is no faster. Measured: see `widest`."""
KEPT_SHARE = 2
"""On a CPU, what a process holds that keeps what it frees, in estimates: measured 1.04 to 1.8 without activation
checkpointing. With it 2 to 3, so there the freed memory always goes back."""
_DEFAULT_BUCKET = 500_000_000
"""DeepSpeed's own reduce_bucket_size (runtime/zero/config.py, 0.19.8), where the template names none."""

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Budget:
    """What there is for one process."""

    device: Device
    device_bytes: int
    """Of the memory in which it computes."""
    host_bytes: int
    """Of main memory; on a CPU the same."""

    def holds(self, needed: Estimate) -> bool:
        """Whether an estimate surely fits."""
        in_main_memory = needed.host_bytes if self.device == "cuda" else 0
        return needed.device_bytes <= SAFE_SHARE * self.device_bytes and in_main_memory <= SAFE_SHARE * self.host_bytes


def budget(num_processes: int, gpu_bytes: int | None) -> Budget:
    """For each of `num_processes` on this machine; `gpu_bytes` is the memory of one GPU, None without."""
    each = resources.available_memory() // num_processes
    return Budget("cpu", each, each) if gpu_bytes is None else Budget("cuda", gpu_bytes, each)


def whole_machine(num_processes: int, gpu_bytes: int | None) -> Budget:
    """As `budget`, of all the memory that the machine has, whatever else runs on it at the moment."""
    each = resources.total_memory() // num_processes
    return Budget("cpu", each, each) if gpu_bytes is None else Budget("cuda", gpu_bytes, each)


def layout_of(
    config: PretrainConfig, shape: ModelShape, num_processes: int, device: Device, template: dict[str, Any]
) -> Layout:
    """What the memory of a run depends on; `micro_batch_size` and `precision` must be resolved."""
    assert config.precision != "auto"
    data_parallel_size = num_processes // config.tensor_parallel_size
    return Layout(
        shape=shape,
        micro_batch=config.micro_batch,
        precision=config.precision,
        device=device,
        optimizer_bytes=optimizers.state_bytes(config.optimizer, shape),
        zero_stage=config.zero_stage,
        whole_tensors=optimizers.by_whole_tensors(config, data_parallel_size),
        data_parallel_size=data_parallel_size,
        tensor_parallel_size=config.tensor_parallel_size,
        offload=config.offload,
        activation_checkpointing=config.activation_checkpointing,
        intra_document_masking=config.intra_document_masking,
        bucket_elements=int(template.get("zero_optimization", {}).get("reduce_bucket_size", _DEFAULT_BUCKET)),
    )


@dataclass(frozen=True)
class Question:
    """A run whose memory is asked about."""

    config: PretrainConfig
    shape: ModelShape
    num_processes: int
    template: dict[str, Any]
    there: Budget

    @property
    def layout(self) -> Layout:
        """How the run is laid out."""
        return layout_of(self.config, self.shape, self.num_processes, self.there.device, self.template)

    def needed(self, **changes: Any) -> Estimate:
        """The estimate, with some settings changed."""
        return estimate(replace(self, config=self.config.model_copy(update=changes)).layout)

    @property
    def is_roomy(self) -> bool:
        """Whether a process on a CPU may keep the memory that it frees, for speed (`devices.keep_freed_memory`)."""
        return KEPT_SHARE * self.needed().device_bytes <= SAFE_SHARE * self.there.device_bytes

    @property
    def micro_batches(self) -> list[int]:
        """As `Preparation.micro_batches`."""
        readers = self.num_processes // self.config.tensor_parallel_size
        share = self.config.global_batch_size // readers
        return [size for size in range(share, 0, -1) if share % size == 0]

    def widest(self) -> int:
        """What `micro_batch_size: auto` means: on a GPU the largest that fits; on a CPU the largest that fits and is
        still faster than a smaller one, which is the first with `CPU_MICRO_BATCH_TOKENS` tokens or more.

        Where none fits it is 1, and the plan says so.
        """
        sizes = self.micro_batches
        if self.there.device == "cpu":
            enough = [size for size in sizes if size * self.shape.seq_len >= CPU_MICRO_BATCH_TOKENS]
            sizes = [size for size in sizes if not enough or size <= min(enough)]
        fitting = (size for size in sizes if self.there.holds(self.needed(micro_batch_size=size)))
        return next(fitting, 1)

    def remedies(self) -> list[tuple[dict[str, Any], Estimate]]:
        """Settings that fit, each the least change of its kind; all of them together where none is enough alone."""
        found = []
        for changes in self._steps():
            for change in changes:
                needed = self.needed(**change)
                if self.there.holds(needed):
                    found.append((change, needed))
                    break
        if found:
            return found
        together: dict[str, Any] = {}
        for changes in self._steps():
            together |= changes[-1] if changes else {}
            needed = self.needed(**together)
            if together and self.there.holds(needed):
                return [(together, needed)]
        return []

    def _steps(self) -> list[list[dict[str, Any]]]:
        """Kinds of changes, the cheapest first, each from the least to the most."""
        config = self.config
        modes = ["off", "selective", "full"]
        stages, adamw = range(config.zero_stage + 1, 4), config.optimizer == "adamw"
        last_stage = 3 if adamw else 1
        # ZeRO spreads the state over the processes that read different sequences: with one there is nothing to spread.
        spread = self.num_processes > config.tensor_parallel_size
        steps: list[list[dict[str, Any]]] = [
            [{"micro_batch_size": size} for size in self.micro_batches if size < config.micro_batch],
            [{"activation_checkpointing": mode} for mode in modes[modes.index(config.activation_checkpointing) + 1 :]],
            [{"zero_stage": stage} for stage in stages if spread and stage <= last_stage],
        ]
        if adamw:
            steps.append([{"tensor_parallel_size": size} for size in self._tensor_groups()])
        if adamw and self.there.device == "cuda":
            offloads: list[dict[str, Any]] = [{"offload": "optimizer", "zero_stage": max(1, config.zero_stage)}]
            steps.append([*offloads, {"offload": "all", "zero_stage": 3}] if config.offload == "none" else [])
        return steps

    def _tensor_groups(self) -> list[int]:
        shape, processes = self.shape, self.num_processes
        shared = (shape.num_kv_heads, shape.num_attn_heads, shape.ffn_hidden_size, shape.padded_vocab_size)
        return [
            size
            for size in range(self.config.tensor_parallel_size + 1, processes + 1)
            if processes % size == 0
            and all(count % size == 0 for count in shared)
            and self.config.global_batch_size % (self.config.micro_batch * (processes // size)) == 0
        ]


def table(needed: Estimate, there: Budget) -> list[tuple[str, str]]:
    """The estimate by part, for people: one row for the memory that is computed in, one for main memory beside it."""
    place = "memory" if there.device == "cpu" else "GPU memory"
    rows = [(place, _sum_text(needed, False, needed.device_bytes, there.device_bytes))]
    if there.device == "cuda":
        rows.append(("main memory", _sum_text(needed, True, needed.host_bytes, there.host_bytes)))
    return rows


def _sum_text(needed: Estimate, on_host: bool, total: int, there: int) -> str:
    parts = sorted((part for part in needed.parts if part.on_host == on_host), key=lambda part: -part.num_bytes)
    told = [f"{part.name} {bytes_text(part.num_bytes)}" for part in parts if part.num_bytes >= 0.005 * total]
    return f"about {bytes_text(total)} a process of {bytes_text(there)}: {', '.join(told)}"


def advice(question: Question) -> str:
    """The settings that would fit, in numbers; none of them changes what is learned."""
    found = question.remedies()
    if not found:
        least = question.needed(micro_batch_size=1, activation_checkpointing="full")
        return (
            f"no setting makes it fit here: micro_batch_size 1 with activation_checkpointing full needs about "
            f"{bytes_text(least.device_bytes)} a process; use a machine with more memory, or more processes with "
            "zero_stage 3"
        )
    told = []
    for changes, needed in found:
        words = ", ".join(f"{key}: {value}" for key, value in changes.items())
        host = f" and {bytes_text(needed.host_bytes)} of main memory" if question.there.device == "cuda" else ""
        told.append(f"{words} (about {bytes_text(needed.device_bytes)}{host})")
    return "what would fit, and changes nothing that is learned: " + "; or ".join(told)
