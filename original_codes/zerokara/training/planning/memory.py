"""The memory of a training process by arithmetic: its state to the byte, its activations between two bounds.

*State* stays for the whole run: weights, gradients, fp32 master weights, optimizer state, and the host copy of a
checkpoint that is being saved. Its bytes follow from the settings, but for padding (read off from compute/ and from
DeepSpeed 0.19.8: runtime/bf16_optimizer.py, runtime/zero/stage_1_and_2.py and stage3.py); tests/numerics/test_memory.py
compares them with the tensors of real runs. *Activations* depend on kernels and compilation, and are measured, by the
trial of ``--dry-run``. Before it two bounds serve: no run needs less than `min_activation_bytes`, and hardly one more
than `ACTIVATION_MARGIN` times that.

Pure Python: nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.model import attention_blocks, parameters
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import optimizers, updater
from zerokara.training.compute.updater import HIERARCHY_KEY, overlaps

ACTIVATION_MARGIN = 3.5
"""Activations of eager layers over `min_activation_bytes`: 1.4 (gpt2) to 3.4 (qwen3 in bf16), counted on a CPU."""
SAVE_COPY = "checkpoint being saved"
_DEEPSPEED_DEFAULTS = {
    "contiguous_gradients": True,
    "reduce_bucket_size": 500_000_000,
    "stage3_param_persistence_threshold": 100_000,
}
"""Source: runtime/zero/config.py, 0.19.8."""

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class TrainingLayout:
    """How a model is trained on a machine: all that the memory of its processes depends on, as settings are named."""

    shape: ModelShape
    device: Device
    num_processes: int
    global_batch_size: int
    micro_batch_size: int
    precision: Literal["bf16", "fp32"]
    optimizer: Literal["adamw", "adafactor", "muon"] = "adamw"
    nodes: int = 1
    """Machines, with equally many of the processes."""
    zero_stage: int = 1
    tensor_parallel_size: int = 1
    offload: Literal["none", "optimizer", "all"] = "none"
    activation_checkpointing: Literal["off", "selective", "full"] = "off"
    intra_document_masking: bool = False
    reduce_bucket_size: int = 50_000_000
    """DeepSpeed's: numbers in the buffer through which gradients are reduced; 0 where it has none."""
    overlap_comm: bool = False
    """DeepSpeed's: gradients are reduced beside the backward pass; at stages 1 and 2 through two such buffers."""
    stage3_param_persistence_threshold: int = 100_000
    """DeepSpeed's: parameters of at most so many numbers stay gathered under ZeRO 3."""
    hierarchy: int = 1
    """DeepSpeed's: processes over which each machine keeps a step's weights once more under ZeRO 3; 1 for none."""

    @classmethod
    def from_config(
        cls,
        config: TrainingSettings,
        shape: ModelShape,
        num_processes: int,
        device: Device,
        template: Mapping[str, Any],
        nodes: int = 1,
    ) -> TrainingLayout:
        """The layout of a run whose `precision` is resolved; where `micro_batch_size` is `auto`, with 1."""
        assert config.precision != "auto"
        zero = {**_DEEPSPEED_DEFAULTS, **template.get("zero_optimization", {})}
        return cls(
            shape=shape,
            device=device,
            num_processes=num_processes,
            nodes=nodes,
            global_batch_size=config.global_batch,
            micro_batch_size=1 if config.micro_batch_size == "auto" else config.micro_batch_size,
            precision=config.precision,
            optimizer=config.optimizer_name,
            zero_stage=config.zero_stage,
            tensor_parallel_size=config.tensor_parallel_size,
            offload=config.offload,
            activation_checkpointing=config.activation_checkpointing,
            intra_document_masking=config.intra_document_masking,
            reduce_bucket_size=int(zero["reduce_bucket_size"]) if zero["contiguous_gradients"] else 0,
            overlap_comm=overlaps(config.zero_stage, device, template),
            stage3_param_persistence_threshold=int(zero["stage3_param_persistence_threshold"]),
            hierarchy=int(zero.get(HIERARCHY_KEY, 1)),
        )

    @property
    def data_parallel_size(self) -> int:
        """Processes that compute different sequences."""
        return self.num_processes // self.tensor_parallel_size

    @property
    def processes_per_node(self) -> int:
        """Processes that share the memory of one machine."""
        return self.num_processes // self.nodes

    @property
    def compute_bytes(self) -> int:
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
    def local_sizes(self) -> dict[str, int]:
        """Numbers of each parameter that one process of a tensor-parallel group holds."""
        return parameters.local_sizes(self.shape, self.tensor_parallel_size)


@dataclass(frozen=True)
class MemoryPart:
    """One reason for memory."""

    name: str
    num_bytes: int
    on_host: bool = False
    """In main memory though the computation runs on a GPU."""


def state_parts(layout: TrainingLayout) -> list[MemoryPart]:
    """The state of one process (the one with most), by part."""
    serving = updater.choose(layout.zero_stage, layout.optimizer, layout.offload, layout.data_parallel_size)
    parts = _replicated_parts(layout) if serving == "replicated" else _zero_parts(layout)
    copy = -(-optimizers.checkpoint_bytes(layout.optimizer, layout.shape) // layout.num_processes)
    parts.append(MemoryPart(SAVE_COPY, copy, on_host=layout.device == "cuda"))
    return [part for part in parts if part.num_bytes]


def _replicated_parts(layout: TrainingLayout) -> list[MemoryPart]:
    """Of `compute.replicated`: at stage 1 each tensor has one owner, with its master weights and its state."""
    sizes, count = layout.local_sizes, sum(layout.local_sizes.values())
    shapes = layout.shape.parameter_shapes()
    owners = optimizers.owners_of(sizes, layout.data_parallel_size if layout.zero_stage else 1)
    masters, state = [0] * layout.data_parallel_size, [0] * layout.data_parallel_size
    for name, owner in owners.items():
        masters[owner] += 4 * sizes[name]
        # What tensor parallelism cuts is only ever AdamW's, whose state has the size of the parameter.
        whole = math.prod(shapes[name])
        kept = optimizers.state_shapes(layout.optimizer, name, shapes[name]).values()
        state[owner] += 4 * sum(math.prod(one) for one in kept) * sizes[name] // whole
    return [
        MemoryPart("weights", layout.compute_bytes * count),
        MemoryPart("gradients", 4 * count),
        MemoryPart("fp32 master weights", max(masters) if layout.precision == "bf16" else 0),
        MemoryPart("optimizer state", max(state)),
    ]


def _zero_parts(layout: TrainingLayout) -> list[MemoryPart]:
    """Of DeepSpeed's ZeRO, whose only optimizer is AdamW."""
    width, stage, processes = layout.compute_bytes, layout.zero_stage, layout.data_parallel_size
    sizes = layout.local_sizes.values()
    count = sum(sizes)
    share = -(-count // processes)
    offloads = layout.offload != "none" and layout.device == "cuda"
    weights = width * count
    if stage == 3:
        gathered = sum(size for size in sizes if size <= layout.stage3_param_persistence_threshold)
        weights = width * (sum(-(-size // processes) for size in sizes) + gathered)
    # Allocated whole; on a CPU only what is written to becomes memory. Stage 2 sums each part in fp32 outside of it.
    bucket = layout.reduce_bucket_size if layout.device == "cuda" else min(layout.reduce_bucket_size, count)
    bucket *= width if stage == 2 else 4
    bucket *= 2 if layout.overlap_comm and stage < 3 else 1
    own, whole = 4 * share, 0
    if stage == 1 and layout.precision == "bf16" and not offloads:  # runtime/bf16_optimizer.py, which has no bucket
        own, whole, bucket = 0, (width + 4) * count, 0
    elif stage == 1 and (layout.precision == "bf16" or layout.accumulates):
        # All gradients, until the last micro batch reduces them to those of the process's own parameters.
        whole = 4 * count
        own = own if offloads else 0
    return [
        MemoryPart("weights", weights, on_host=layout.offload == "all" and layout.device == "cuda"),
        MemoryPart("weights of the machine", width * -(-count // layout.hierarchy) if layout.hierarchy > 1 else 0),
        MemoryPart("gradients", own, on_host=offloads),
        MemoryPart("gradients", whole),
        MemoryPart("reduce bucket", bucket),
        MemoryPart("fp32 master weights", 4 * share, on_host=offloads),
        MemoryPart("optimizer state", 8 * share, on_host=offloads),
    ]


def min_activation_bytes(layout: TrainingLayout) -> int:
    """The least that the layers of one process keep of a micro batch for its backward pass.

    Each matrix product needs its input again, or what that is cheaply computed from: of a layer its input, queries,
    keys and values, the output of attention, the hidden states between its halves, and those of the feed-forward
    network. (Korthikanti et al., 2022, section 4.1, count these and all between them.) On a CPU in bf16 attention keeps
    probabilities as well, where they are few.
    """
    shape, shared, mode = layout.shape, layout.tensor_parallel_size, layout.activation_checkpointing
    number = layout.micro_batch_size * layout.compute_bytes
    hidden, heads = number * shape.hidden_size, number * shape.query_projection_size // shared
    stacks = [(shape.input_len, 0)]
    if shape.traits.is_encoder_decoder:
        stacks.append((shape.target_len, shape.input_len))
    total = 0
    for tokens, encoder_tokens in stacks:
        attention = tokens * (hidden + 2 * heads + 2 * number * shape.kv_projection_size // shared)
        attention += layout.compute_bytes * _kept_probabilities(layout, tokens, encoder_tokens)
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


def _kept_probabilities(layout: TrainingLayout, tokens: int, encoder_tokens: int) -> int:
    """Attention probabilities that a layer keeps: none where attention has a bias, in T5 all but cross-attention."""
    if layout.device != "cpu" or layout.precision != "bf16":
        return 0
    heads = layout.micro_batch_size * layout.shape.num_attn_heads // layout.tensor_parallel_size
    if not layout.shape.traits.is_encoder_decoder:
        return attention_blocks.kept_probabilities(heads, tokens, tokens, is_causal=True)
    return attention_blocks.kept_probabilities(heads, tokens, encoder_tokens, is_causal=False)
