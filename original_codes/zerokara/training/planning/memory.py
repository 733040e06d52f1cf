"""Memory of a training process by arithmetic: its state to the byte, its activations between two bounds, what fits.

*State* stays for the whole run: weights, gradients, fp32 master weights, optimizer state, the host copy of a checkpoint
that is being saved. Its bytes were read off from compute/ and DeepSpeed 0.19.8 (runtime/bf16_optimizer.py,
runtime/zero/stage_1_and_2.py, stage3.py), whose own estimate knows Adam in mixed precision alone and takes seconds to
import; tests/numerics/test_memory.py compares them with the tensors of real runs. *Activations* depend on kernels and
compilation: a trial measures them. Before it, no run needs less than `min_activation_bytes`, and hardly one more than
`ACTIVATION_MARGIN` times that. Without torch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.model import attention_blocks, parameters
from zerokara.model.shapes import ModelShape
from zerokara.progress import bytes_text
from zerokara.training.compute import optimizers, updater
from zerokara.training.compute.updater import HIERARCHY_KEY, overlaps

ACTIVATION_MARGIN = 3.5
"""Activations of eager layers over `min_activation_bytes`: 1.4 (gpt2) to 3.4 (qwen3 in bf16), counted on a CPU."""
SAFE_SHARE = 0.87
"""Share of the memory that a run may plan with: allocators leave holes, and batches differ."""
KEPT_SHARE = 2
"""On a CPU, what a process holds that keeps the memory it frees, over what it uses: 1.04 to 1.8, measured without
activation checkpointing. With it 2 to 3, so there freed memory always goes back."""
LIBRARY_BYTES = 300_000_000
"""Main memory of a process that has loaded torch, megatron-core and DeepSpeed and holds no model, without the files
that it shares with others. Measured."""
CUDA_CONTEXT_BYTES = 500_000_000
"""GPU memory of such a process, which torch does not count (NVIDIA's order of magnitude)."""
SAVE_COPY = "checkpoint being saved"


@dataclass(frozen=True)
class MemoryPart:
    """One reason for memory."""

    name: str
    num_bytes: int
    on_host: bool = False
    """In main memory though the computation runs on a GPU."""


@dataclass(frozen=True)
class MemoryPool:
    """One kind of memory: what there is of it, and what a run needs of it."""

    name: Literal["memory", "GPU memory", "main memory"]
    available_bytes: int
    num_processes: int
    """Processes that share it."""
    parts: list[MemoryPart]
    """Libraries and state of each process."""
    activation_bytes: int = 0
    """Lower bound of each process's activations."""

    def needed_bytes(self, margin: float) -> float:
        """Return what all processes need with `margin` times the lower bound of activations."""
        return self.num_processes * (sum(part.num_bytes for part in self.parts) + margin * self.activation_bytes)

    @property
    def text(self) -> str:
        """Memory of a process by part, and what that leaves, for display."""
        parts = sorted(self.parts, key=lambda part: -part.num_bytes)
        named = ", ".join(f"{part.name} {bytes_text(part.num_bytes)}" for part in parts)
        each, among = (" each", f" for {self.num_processes} processes") if self.num_processes > 1 else ("", "")
        room = (self.available_bytes - self.needed_bytes(0)) / self.num_processes
        purpose = " for activations" if self.activation_bytes else ""
        left = f"{bytes_text(room)}{each} left{purpose}" if room >= 0 else "not enough"
        return f"{bytes_text(self.available_bytes)}{among}: {named}; {left}"


@dataclass(frozen=True)
class MemoryForecast:
    """A run on a machine: all that the memory of its processes depends on, named as the settings are, and what fits."""

    shape: ModelShape
    num_processes: int
    global_batch_size: int
    micro_batch_size: int
    precision: Literal["bf16", "fp32"]
    main_bytes: int
    """Main memory for the processes of a machine together."""
    gpu_bytes: int | None = None
    """Memory of each GPU; None on a CPU."""
    optimizer: Literal["adamw", "adafactor", "muon"] = "adamw"
    nodes: int = 1
    zero_stage: int = 1
    tensor_parallel_size: int = 1
    offload: Literal["none", "optimizer", "all"] = "none"
    activation_checkpointing: Literal["off", "selective", "full"] = "off"
    template: Mapping[str, Any] = field(default_factory=dict)
    """DeepSpeed's further settings."""

    @classmethod
    def of_run(cls, config: TrainingSettings, shape: ModelShape, **others: Any) -> MemoryForecast:
        """The forecast of a run whose `precision` is resolved; where `micro_batch_size` is `auto`, with 1.

        `others` are the fields that are no settings: processes, nodes, bytes and the template.
        """
        settings = {key: getattr(config, key) for key in type(config).model_fields if key in cls.__dataclass_fields__}
        if config.micro_batch_size == "auto":
            settings["micro_batch_size"] = 1
        return cls(shape, **{**settings, "nodes": 1, **others})

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Where the run computes."""
        return "cpu" if self.gpu_bytes is None else "cuda"

    @property
    def data_parallel_size(self) -> int:
        """Processes that compute different sequences."""
        return self.num_processes // self.tensor_parallel_size

    @property
    def number_bytes(self) -> int:
        """Bytes of a number in the computation."""
        return 2 if self.precision == "bf16" else 4

    @property
    def accumulates(self) -> bool:
        """Whether a step has more than one micro batch (gradient accumulation)."""
        return self.micro_batch_size * self.data_parallel_size < self.global_batch_size

    @property
    def micro_batch_sizes(self) -> list[int]:
        """Micro batch sizes that divide a process's share of the global batch, the smallest first."""
        share = self.global_batch_size // self.data_parallel_size
        return [size for size in range(1, share + 1) if share % size == 0]

    @cached_property
    def pools(self) -> list[MemoryPool]:
        """The memory in which the run computes, and beside a GPU main memory."""
        parts, activations, processes = state_parts(self), min_activation_bytes(self), self.num_processes // self.nodes
        libraries = MemoryPart("libraries", LIBRARY_BYTES)
        if self.gpu_bytes is None:
            return [MemoryPool("memory", self.main_bytes, processes, [libraries, *parts], activations)]
        on_gpu = [MemoryPart("CUDA context", CUDA_CONTEXT_BYTES), *(part for part in parts if not part.on_host)]
        on_host = [libraries, *(part for part in parts if part.on_host)]
        return [
            MemoryPool("GPU memory", self.gpu_bytes, 1, on_gpu, activations),
            MemoryPool("main memory", self.main_bytes, processes, on_host),
        ]

    @property
    def ample_bytes(self) -> float:
        """Upper bound, almost certainly, of the need in the memory in which the run computes."""
        return self.pools[0].needed_bytes(ACTIVATION_MARGIN)

    @property
    def fits(self) -> bool:
        """Whether the run almost certainly fits, by the upper bound of its activations."""
        return all(pool.needed_bytes(ACTIVATION_MARGIN) <= SAFE_SHARE * pool.available_bytes for pool in self.pools)

    @property
    def peak_limit_bytes(self) -> float:
        """The measured peak of a process (`joining.peak_memory`) up to which a trial has passed."""
        pool = self.pools[0]
        uncounted = CUDA_CONTEXT_BYTES if self.device == "cuda" else 0
        return SAFE_SHARE * pool.available_bytes / pool.num_processes - uncounted

    @property
    def can_keep_freed_memory(self) -> bool:
        """Whether processes on a CPU may keep the memory they free, for speed (`joining.keep_freed_memory`)."""
        has_room = KEPT_SHARE * self.ample_bytes <= SAFE_SHARE * self.pools[0].available_bytes
        return self.activation_checkpointing == "off" and has_room

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the plan: each pool, and a note where the run may not fit."""
        rows: list[tuple[str, str]] = [(pool.name, pool.text) for pool in self.pools]
        return rows if self.fits else [*rows, ("note", f"this may not fit; {self.remedy()[1]}")]

    def remedy(self) -> tuple[str, str]:
        """Return the key of the first setting that makes the run fit, the cheapest first, and what to set, in words."""
        changes = list(self._changes())
        # Each by itself, then each with all before it.
        for change in [*changes, *accumulate(changes, operator.or_)]:
            if (made := replace(self, **change)).fits:
                settings = ", ".join(f"{key}: {value}" for key, value in change.items())
                needed = (f"{bytes_text(pool.needed_bytes(ACTIVATION_MARGIN))} of {pool.name}" for pool in made.pools)
                words = f"{settings} (at most {', '.join(needed)}) would fit, and changes nothing that is learned"
                return next(iter(change)), words
        fewer = "fewer num_processes, " if self.num_processes > self.nodes and self.gpu_bytes is None else ""
        return "hidden_size", f"no setting makes it fit here: use {fewer}a smaller model or a machine with more memory"

    def _changes(self) -> Iterator[dict[str, Any]]:
        """Settings that save memory and change nothing that is learned, the cheapest first."""
        sizes, modes = reversed(self.micro_batch_sizes), ["off", "selective", "full"]
        yield from ({"micro_batch_size": size} for size in sizes if size < self.micro_batch_size)
        stronger = modes[modes.index(self.activation_checkpointing) + 1 :]
        yield from ({"activation_checkpointing": mode} for mode in stronger)
        # ZeRO spreads the state over the processes that compute different sequences; only AdamW's beyond stage 1.
        last_stage = 0 if self.data_parallel_size == 1 else 3 if self.optimizer == "adamw" else 1
        yield from ({"zero_stage": stage} for stage in range(self.zero_stage + 1, last_stage + 1))
        if self.device == "cuda" and self.offload == "none" and self.optimizer == "adamw":
            yield {"offload": "optimizer", "zero_stage": max(1, self.zero_stage)}
            yield {"offload": "all", "zero_stage": 3}

    def measured_text(self, peak_bytes: int) -> str:
        """Return the measured peak of the fullest process against what there is for it, for display."""
        for_each = self.pools[0].available_bytes // self.pools[0].num_processes
        return (
            f"the fullest process held {bytes_text(peak_bytes)} at most, {peak_bytes / for_each:.0%} of the "
            f"{bytes_text(for_each)} available to it, with micro_batch_size {self.micro_batch_size}"
        )


def state_parts(run: MemoryForecast) -> list[MemoryPart]:
    """Return the state of one process (the one with most), by part."""
    serving = updater.choose(run.zero_stage, run.optimizer, run.offload, run.data_parallel_size)
    parts = _replicated_parts(run) if serving == "replicated" else _zero_parts(run)
    copy = -(-optimizers.checkpoint_bytes(run.optimizer, run.shape) // run.num_processes)
    parts.append(MemoryPart(SAVE_COPY, copy, on_host=run.device == "cuda"))
    return [part for part in parts if part.num_bytes]


def _replicated_parts(run: MemoryForecast) -> list[MemoryPart]:
    """Of `compute.replicated`: at stage 1 each tensor has one owner, with its master weights and its state."""
    sizes, shapes = parameters.local_sizes(run.shape, run.tensor_parallel_size), run.shape.parameter_shapes()
    count = sum(sizes.values())
    owners = optimizers.owners_of(sizes, run.data_parallel_size if run.zero_stage else 1)
    masters, state = [0] * run.data_parallel_size, [0] * run.data_parallel_size
    for name, owner in owners.items():
        masters[owner] += 4 * sizes[name]
        # What tensor parallelism cuts is only ever AdamW's, whose state has the size of the parameter.
        whole = math.prod(shapes[name])
        kept = optimizers.state_shapes(run.optimizer, name, shapes[name]).values()
        state[owner] += 4 * sum(math.prod(one) for one in kept) * sizes[name] // whole
    return [
        MemoryPart("weights", run.number_bytes * count),
        MemoryPart("gradients", 4 * count),
        MemoryPart("fp32 master weights", max(masters) if run.precision == "bf16" else 0),
        MemoryPart("optimizer state", max(state)),
    ]


def _zero_parts(run: MemoryForecast) -> list[MemoryPart]:
    """Of DeepSpeed's ZeRO, whose only optimizer is AdamW."""
    width, stage, processes = run.number_bytes, run.zero_stage, run.data_parallel_size
    sizes = parameters.local_sizes(run.shape, run.tensor_parallel_size).values()
    count = sum(sizes)
    share = -(-count // processes)
    offloads = run.offload != "none" and run.device == "cuda"
    zero = run.template.get("zero_optimization", {})  # the defaults are those of runtime/zero/config.py, 0.19.8
    weights, hierarchy = width * count, int(zero.get(HIERARCHY_KEY, 1))
    if stage == 3:
        threshold = int(zero.get("stage3_param_persistence_threshold", 100_000))
        gathered = sum(size for size in sizes if size <= threshold)  # such parameters are not partitioned
        weights = width * (sum(-(-size // processes) for size in sizes) + gathered)
    # Allocated whole; on a CPU only what is written to becomes memory. Stage 2 sums each part in fp32 outside of it.
    bucket = int(zero.get("reduce_bucket_size", 500_000_000)) if zero.get("contiguous_gradients", True) else 0
    bucket = (bucket if run.device == "cuda" else min(bucket, count)) * (width if stage == 2 else 4)
    bucket *= 2 if overlaps(stage, run.device, run.template) and stage < 3 else 1
    own, whole = 4 * share, 0
    if stage == 1 and run.precision == "bf16" and not offloads:  # runtime/bf16_optimizer.py, which has no bucket
        own, whole, bucket = 0, (width + 4) * count, 0
    elif stage == 1 and (run.precision == "bf16" or run.accumulates):
        # All gradients, until the last micro batch reduces them to those of the process's own parameters.
        whole = 4 * count
        own = own if offloads else 0
    return [
        MemoryPart("weights", weights, on_host=run.offload == "all" and run.device == "cuda"),
        MemoryPart("weights of the machine", width * -(-count // hierarchy) if hierarchy > 1 else 0),
        MemoryPart("gradients", own, on_host=offloads),
        MemoryPart("gradients", whole),
        MemoryPart("reduce bucket", bucket),
        MemoryPart("fp32 master weights", 4 * share, on_host=offloads),
        MemoryPart("optimizer state", 8 * share, on_host=offloads),
    ]


def min_activation_bytes(run: MemoryForecast) -> int:
    """The least that the layers of one process keep of a micro batch for its backward pass.

    Each matrix product needs its input again, or what that is cheaply computed from: of a layer its input, queries,
    keys and values, the output of attention, the hidden states between its halves, and those of the feed-forward
    network. (Korthikanti et al., 2022, section 4.1, count these and all between them.) On a CPU in bf16 attention keeps
    probabilities as well, where they are few.
    """
    shape, shared, mode = run.shape, run.tensor_parallel_size, run.activation_checkpointing
    number = run.micro_batch_size * run.number_bytes
    hidden, heads = number * shape.hidden_size, number * shape.query_projection_size // shared
    stacks = [(shape.input_len, 0)]
    if shape.traits.is_encoder_decoder:
        stacks.append((shape.target_len, shape.input_len))
    total = 0
    for tokens, encoder_tokens in stacks:
        attention = tokens * (hidden + 2 * heads + 2 * number * shape.kv_projection_size // shared)
        if run.device == "cpu" and run.precision == "bf16":
            # Only attention without a bias keeps any: in T5 cross-attention.
            rows, is_t5 = run.micro_batch_size * shape.num_attn_heads // shared, shape.traits.is_encoder_decoder
            keys = encoder_tokens if is_t5 else tokens
            attention += 2 * attention_blocks.kept_probabilities(rows, tokens, keys, is_causal=not is_t5)
        if encoder_tokens:
            attention += tokens * (hidden + 2 * heads) + encoder_tokens * 2 * heads
        whole = []
        for layer in range(shape.num_layers):
            inside = shape.ffn_hidden_size // shared
            if layer in shape.moe_layers:
                inside = shape.experts_per_token * shape.moe_ffn_hidden_size
            whole.append(attention + tokens * (hidden + number * inside * (2 if shape.traits.gated else 1)))
        kept = {"selective": attention + tokens * hidden, "full": tokens * hidden}
        # What is not kept is computed again for one layer at a time.
        total += sum(whole) if mode == "off" else (shape.num_layers - 1) * kept[mode] + max(whole)
    return total
