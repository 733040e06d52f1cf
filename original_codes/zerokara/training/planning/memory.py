"""Memory of a training process by arithmetic: state to the byte, two bounds of the activations, settings that fit.

*State* stays for the whole run. Its bytes were read off from compute/ and DeepSpeed 0.19.8
(runtime/zero/stage_1_and_2.py, stage3.py), whose own estimate knows Adam in mixed precision alone;
tests/numerics/test_memory.py compares them with the tensors of real runs. *Activations* depend on kernels and
compilation: `training.auto_settings` measures them in a trial, and chooses the micro batch. Before it, no run needs
less than `min_activation_bytes`, and hardly one more than `activation_margin` times that. Without torch.
"""

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from zerokara.base.errors import Fault
from zerokara.base.progress import bytes_text, plural
from zerokara.config.pretrain_config import RunConfig
from zerokara.model.shapes import ModelShape, is_layer_matrix, local_sizes, loss_bytes
from zerokara.training.compute import optimizer_rules
from zerokara.training.compute.engine_choice import hierarchy_of, uses_deepspeed

ACTIVATION_MARGIN = 4.5
"""Activations of eager layers over `min_activation_bytes`, counted on a CPU: 1.6 (gpt2) to 4.6 (qwen3 in bf16). Only
where the scores of long sequences are kept (in t5, and at 1M in bf16, from 1,024 tokens on) are they more."""
_GPU_MARGINS = {"compiled": 2.0, "eager": 2.2, "experts": 2.15, "encoder-decoder": 2.0, "recomputed": 2.1}
"""The same in bf16 on a GPU, where attention keeps no scores. As benchmarks/gpu/simulation simulates a step on an H100:
compiled dense decoders 1.76 to 1.81; eager layers 1.89 to 2.04, experts 1.97, encoder-decoders 1.72 to 1.85; computed
again 0.76 to 1.97. Not measured."""
_NOT_SIMULATED = 2.9
"""Compiled layers that are computed again; those of experts and encoder-decoders whose feed-forward half is; and OLMo 2
with tensor parallelism, where QK-norm keeps heads in fp32: 2.7 by arithmetic."""
SAFE_SHARE = 0.87
"""Share of the memory that a run may plan with: allocators leave holes, and batches differ."""
LIBRARY_BYTES = 300_000_000
"""Main memory of a process that has loaded torch, megatron-core and DeepSpeed and holds no model, without the files
that it shares with others. Measured."""
CUDA_CONTEXT_BYTES = 500_000_000
"""GPU memory of such a process, which torch does not count (NVIDIA's order of magnitude)."""
NCCL_BYTES = 2_100_000_000
"""Buffers of a process that communicates, which torch does not count either: of three groups (all processes, data,
tensor or DeepSpeed's own), each with 24 channels (with NVLink; without it fewer) of three connections, and for each the
buffers of three protocols, 9.6 MB (NCCL's src/include/device.h). Arithmetic, not measured."""
SAVE_COPY = "checkpoint being saved"
_OPTIMIZER_PARTS = ("gradients", "fp32 master weights", "optimizer state")
OFFLOADED = {"none": (), "optimizer": _OPTIMIZER_PARTS, "all": (*_OPTIMIZER_PARTS, "weights")}
"""Parts of the state in main memory beside a GPU, by `offload`; the copy always is."""


@dataclass(frozen=True)
class MemoryPool:
    """One kind of memory: the bytes available, and the bytes that a run needs."""

    name: Literal["memory", "GPU memory", "main memory"]
    available_bytes: int
    num_processes: int
    """Processes that share it."""
    parts: Mapping[str, int]
    """Bytes of the libraries and of each part of the state, of one process."""
    activation_bytes: int = 0
    """Lower bound of each process's activations."""
    activation_margin: float = ACTIVATION_MARGIN
    """Upper bound of the activations, as a multiple of the lower bound; hardly ever exceeded."""

    @property
    def least_bytes(self) -> int:
        """Bytes that all processes need at least."""
        return self.num_processes * (sum(self.parts.values()) + self.activation_bytes)

    @property
    def needed_bytes(self) -> int:
        """Upper bound of the bytes that all processes need; hardly ever exceeded."""
        return self.least_bytes + int(self.num_processes * (self.activation_margin - 1) * self.activation_bytes)

    @property
    def text(self) -> str:
        """Memory that is needed and that there is, for display."""
        processes = f" by {self.num_processes} processes" if self.num_processes > 1 else ""
        return f"about {bytes_text(self.needed_bytes)} needed{processes}, {bytes_text(self.available_bytes)} there"

    @property
    def parts_text(self) -> str:
        """Memory of a process by part, for display."""
        parts = Counter(self.parts) + Counter({"activations, at least": self.activation_bytes})
        return ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.most_common())


@dataclass(frozen=True)
class MemoryForecast:
    """A run on a machine: the memory that its processes need, and whether it fits."""

    config: RunConfig
    """Settings with `precision` and `micro_batch_size` resolved."""
    shape: ModelShape
    num_processes: int
    nodes: int
    template: Mapping[str, Any]
    """DeepSpeed's further settings."""
    main_bytes: int  # for the processes of a machine together
    gpu_bytes: int | None = None  # of each GPU; None on a CPU
    teachers: int = 0  # their parameters together

    def with_settings(self, **changes: Any) -> "MemoryForecast":
        return replace(self, config=self.config.model_copy(update=changes))

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.gpu_bytes is None else "cuda"

    @property
    def data_parallel_size(self) -> int:
        """Processes that compute different sequences."""
        return self.num_processes // self.config.tensor_parallel_size

    @property
    def number_bytes(self) -> int:
        """Bytes of a number in the computation."""
        return 2 if self.config.number_format == "bf16" else 4

    @property
    def micro_batch_sizes(self) -> list[int]:
        """Micro batch sizes that divide a process's share of the global batch, the smallest first."""
        share = self.config.global_batch // self.data_parallel_size
        return [size for size in range(1, share + 1) if share % size == 0]

    @cached_property
    def pools(self) -> list[MemoryPool]:
        """Memory in which the run computes, and beside a GPU main memory."""
        state, activations, processes = state_bytes(self), min_activation_bytes(self), self.num_processes // self.nodes
        state |= {"loss": _loss_bytes(self), "teachers": self.number_bytes * self.teachers}
        margin = ACTIVATION_MARGIN if self.gpu_bytes is None else self._gpu_margin
        if self.config.generates_answers:  # a validation holds a whole copy of the model instead
            activations = max(activations, int(self.number_bytes * self.shape.num_parameters() / margin))
        main = {"libraries": LIBRARY_BYTES}
        if self.gpu_bytes is None:
            return [MemoryPool("memory", self.main_bytes, processes, main | state, activations, margin)]
        main |= {name: state.pop(name) for name in (SAVE_COPY, *OFFLOADED[self.config.offload]) if name in state}
        on_gpu = {**self.uncounted, **state}
        return [
            MemoryPool("GPU memory", self.gpu_bytes, 1, on_gpu, activations, margin),
            MemoryPool("main memory", self.main_bytes, processes, main),
        ]

    @property
    def _gpu_margin(self) -> float:
        config, traits, kept = self.config, self.shape.traits, self.config.activation_checkpointing
        if config.number_format == "fp32":
            return ACTIVATION_MARGIN
        is_dense_decoder = not self.shape.moe_layers and not traits.is_encoder_decoder
        is_simulated = kept == "off" or (config.compile == "off" and (kept == "full" or is_dense_decoder))
        if not is_simulated or (traits.qk_norm == "projection" and config.tensor_parallel_size > 1):
            return _NOT_SIMULATED
        kind = "experts" if self.shape.moe_layers else "eager"
        if kept == "full":
            kind = "recomputed"
        elif traits.is_encoder_decoder:
            kind = "encoder-decoder"
        elif (kind, kept) == ("eager", "off") and config.compile != "off" and config.tensor_parallel_size == 1:
            kind = "compiled"  # `model.compilation`
        return _GPU_MARGINS[kind]

    @property
    def uncounted(self) -> dict[str, int]:
        """GPU memory of a process that torch's own count leaves out, by part."""
        return {"CUDA context": CUDA_CONTEXT_BYTES} | ({"NCCL": NCCL_BYTES} if self.num_processes > 1 else {})

    @property
    def fits(self) -> bool:
        """True if the run almost certainly fits, by the upper bound of its activations."""
        return all(pool.needed_bytes <= SAFE_SHARE * pool.available_bytes for pool in self.pools)

    @property
    def can_keep_freed_memory(self) -> bool:
        """True if processes on a CPU may keep the memory they free, for speed (`joining.keep_freed_memory`).

        They then hold 1.04 to 1.8 times what they use; with activation checkpointing 2 to 3 times. Measured.
        """
        pool, recomputes = self.pools[0], self.config.activation_checkpointing != "off"
        return not recomputes and 2 * pool.needed_bytes <= SAFE_SHARE * pool.available_bytes

    def faults(self, requested: RunConfig) -> Iterator[Fault]:
        """Check that each pool has room for the state and for the lower bound of the activations."""
        for pool in self.pools:
            if pool.least_bytes > pool.available_bytes:
                needed, there = bytes_text(pool.least_bytes), bytes_text(pool.available_bytes)
                processes, (key, remedy) = plural(pool.num_processes, "process", "processes"), self.remedy()
                rule = f"needs at least {needed} of {pool.name} for {processes}; there is {there}"
                yield requested.fault(key, rule, remedy)

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of the plan: each pool, and a note where the run may not fit."""
        rows: list[tuple[str, str]] = [(pool.name, pool.text) for pool in self.pools]
        return rows if self.fits else [*rows, ("note", f"this may not fit; {self.remedy()[1]}")]

    def remedy(self) -> tuple[str, str]:
        """Return the key of the setting that makes the run fit, and the change as text.

        None of the settings changes what is learned. The cheapest come first: each by itself, then all up to it.
        """
        config, modes = self.config, ["off", "selective", "full"]
        stages = range(config.stage + 1, 4) if self.data_parallel_size > 1 else []
        changes: list[dict[str, Any]] = [
            *({"micro_batch_size": size} for size in reversed(self.micro_batch_sizes) if size < config.micro_batch),
            *({"activation_checkpointing": mode} for mode in modes[modes.index(config.activation_checkpointing) + 1 :]),
            *({"zero_stage": stage} for stage in stages),
        ]
        if self.device == "cuda" and config.offload == "none":
            changes += [{"offload": "optimizer"}, {"offload": "all", "zero_stage": 3}]
        for change in [*changes, *accumulate(changes, operator.or_)]:
            if "offload" in change and max(config.stage, change.get("zero_stage", 0)) < 2:
                change = {**change, "zero_stage": 2}  # below it the GPU still has all gradients
            changed = self.with_settings(**change)
            if changed.fits and change.keys().isdisjoint(fault.key for fault in changed.config.rule_faults()):
                settings = ", ".join(f"{key}: {value}" for key, value in change.items())
                most = " and ".join(f"{bytes_text(pool.needed_bytes)} of {pool.name}" for pool in changed.pools)
                words = f"{settings} (at most {most}) would fit, and changes nothing that is learned"
                return next(iter(change)), words
        fewer = "fewer num_processes, " if self.num_processes > self.nodes and self.gpu_bytes is None else ""
        key = "init_from" if config.packs_examples else "hidden_size"
        return key, f"no setting makes it fit here: use {fewer}a smaller model or a machine with more memory"


@dataclass(frozen=True)
class TrialResult:
    """Measurements of a trial."""

    peak_bytes: int  # of the process that took most
    seconds_per_step: float


def state_bytes(run: MemoryForecast) -> dict[str, int]:
    """Return the bytes of the state of one process (the largest), by part."""
    optimizer, sizes, moments = run.config.optimizer_name, local_sizes(run.shape, run.config.tensor_parallel_size), 0
    for name, shape in run.shape.parameter_shapes().items():
        kept = sum(map(math.prod, optimizer_rules.state_shapes(optimizer, name, shape).values()))
        # What tensor parallelism cuts is only ever AdamW's, whose state has the size of the parameter.
        moments += kept * sizes[name] // math.prod(shape)
    count = sum(sizes.values())
    parts = {
        "weights": run.number_bytes * count,
        "gradients": 4 * count,
        "fp32 master weights": 4 * count if run.config.number_format == "bf16" else 0,
        "optimizer state": 4 * moments,
    }
    if uses_deepspeed(run.config, run.data_parallel_size):
        parts |= _zero_parts(run, list(sizes.values()), moments)
    parts[SAVE_COPY] = -(-optimizer_rules.checkpoint_bytes(optimizer, run.shape) // run.num_processes)
    return {name: size for name, size in parts.items() if size}


def _zero_parts(run: MemoryForecast, sizes: Sequence[int], moments: int) -> dict[str, int]:
    """State of DeepSpeed's ZeRO, of parameters of these sizes with so many numbers of optimizer state."""
    width, stage, processes, count = run.number_bytes, run.config.stage, run.data_parallel_size, sum(sizes)
    share = -(-count // processes)
    zero = run.template.get("zero_optimization", {})  # the defaults are those of runtime/zero/config.py, 0.19.8
    weights, hierarchy = width * count, hierarchy_of(run.template)
    if stage == 3:
        threshold = int(zero.get("stage3_param_persistence_threshold", 100_000))
        gathered = sum(size for size in sizes if size <= threshold)  # such parameters are not partitioned
        weights = width * (sum(-(-size // processes) for size in sizes) + gathered)
    # Allocated whole; on a CPU only what is written to becomes memory. Stage 2 sums each part in fp32 outside of it.
    bucket = int(zero.get("reduce_bucket_size", 500_000_000))
    bucket = (bucket if run.device == "cuda" else min(bucket, count)) * (width if stage == 2 else 4)
    bucket *= 2 if zero.get("overlap_comm") and stage < 3 else 1
    if run.config.offload != "none":
        # At stages 1 and 2 DeepSpeed sums the gradients on the GPU, in bf16 those of its own part once more in fp32. It
        # copies them through a buffer of the largest. Main memory has the updated weights once more, in the format of
        # the computation; at stage 3 and in fp32 it has the gradients twice.
        is_3, on_gpu = stage == 3, (count if stage == 1 else 0) + (share if width == 2 else 0)
        copied = 0 if is_3 else width * max(sizes)
        return {
            "weights": weights,
            "sums of gradients": 0 if is_3 else 4 * on_gpu + copied,
            "reduce bucket": bucket,
            "gradients": 4 * share * (2 if is_3 or width == 4 else 1) + copied,
            "fp32 master weights": (4 if is_3 else 4 + width) * share,
            "optimizer state": 4 * -(-moments // processes),
        }
    return {
        "weights": weights,
        "weights of the machine": width * -(-count // hierarchy) if hierarchy > 1 else 0,
        # At stage 1 all of them, until the last micro batch reduces them to those of the process's own parameters.
        "gradients": 4 * (count if stage == 1 else share),
        "reduce bucket": bucket,
        "fp32 master weights": 4 * share,
        "optimizer state": 4 * -(-moments // processes),
    }


def min_activation_bytes(run: MemoryForecast) -> int:
    """Return the fewest bytes of a micro batch that the layers of one process keep for the backward pass: the output of
    each matrix product, or a tensor as wide computed from it. (Korthikanti et al., 2022, section 4.1, count all.) What
    activation checkpointing computes again is there for one layer at a time.
    """
    config, shape, kept, recomputed = run.config, run.shape, 0, Counter[tuple[str, ...]]()
    modes = {"off": (), "selective": ("_fc1", "router"), "full": ("_fc1", "router", "attention")}
    for name, sizes in shape.parameter_shapes().items():
        if not is_layer_matrix(name, sizes):
            continue
        width = sizes[-2]
        if "experts_fc1" in name:  # what its experts read is gathered for each of them
            width = shape.experts_per_token * (width + shape.hidden_size)
        elif "experts_fc2" in name:
            width *= shape.experts_per_token
        if (partition := shape.partition(name)) and partition.dim == 0:
            width //= config.tensor_parallel_size
        of_encoder = name.startswith("encoder.") or "cross_attention.linear_kv" in name
        numbers = width * (shape.input_len if of_encoder else shape.target_len)
        if any(part in name for part in modes[config.activation_checkpointing]):
            recomputed[tuple(name.split(".")[:3])] += numbers
        else:
            kept += numbers
    return run.number_bytes * config.micro_batch * (kept + max(recomputed.values(), default=0))


def _loss_bytes(run: MemoryForecast) -> int:
    """Return what the loss takes, on top of all that the layers keep."""
    config, shape, shares = run.config, run.shape, run.config.tensor_parallel_size
    on_gpu = run.device == "cuda"
    is_fused = config.compile != "off" if on_gpu else config.compile == "on" and shares > 1  # `model.compilation`
    sizes = config.micro_batch * shape.target_len, shape.padded_vocab_size // shares, shape.hidden_size
    return loss_bytes(run.device, *sizes, run.number_bytes, is_fused)
