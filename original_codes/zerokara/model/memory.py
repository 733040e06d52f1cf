"""What a training process needs of memory, by part, worked out before anything is loaded.

Two kinds of parts. *State* lies there all the time: weights, gradients, the optimizer's state, buffers. *Work* comes
and goes: activations, the loss, temporary copies. What one phase of a step leaves is used by the next, so the peak is
all state and the largest phase.

What the layers keep for the backward pass is counted in activations.py. What the updaters hold was read off from
whole_tensors.py and from DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py), and all of it
was calibrated against the measured peak of processes on a CPU (tests/numerics/test_memory.py).

Pure Python: nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from zerokara.model.activations import Stack, backward_work, norm_activations, stack_activations
from zerokara.model.shapes import ModelShape

FRAMEWORK_BYTES = {"cpu": 450_000_000, "cuda": 700_000_000}
"""A process that has loaded torch, megatron-core and DeepSpeed and holds no model (measured, resident); of a GPU the
context of CUDA and NCCL's buffers, which torch does not count (NVIDIA's own order of magnitude)."""
HOST_FRAMEWORK_BYTES = 2_500_000_000
"""Main memory of a process that trains on a GPU, its libraries loaded."""
CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""`loss.CHUNK_BYTES`, which needs torch; a test holds the two equal."""
_LIVE_PARAMETERS = 1_000_000_000
"""DeepSpeed's stage3_max_live_parameters (runtime/zero/config.py): weights that stage 3 keeps gathered."""
_ALLREDUCE_BUCKET = 500_000_000
"""Gradients that DeepSpeed's bf16 optimizer sums over the processes at a time (runtime/engine.py)."""
_WHOLE = ("position_embeddings", "relative_attention_bias", "mlp.router", "mlp.experts")
"""Parts of the names of matrices that every process of a tensor group holds whole."""
COPY_NAME = "the copy that is being saved"
GLOO_CHUNK_BYTES = 4 * 2**26
"""What `training.compute.whole_tensors` sums over the processes at a time, which gloo copies."""


@dataclass(frozen=True)
class Layout:
    """How a model is trained on a machine: all that its memory depends on."""

    shape: ModelShape
    micro_batch: int
    """Sequences that one process computes at a time."""
    precision: Literal["bf16", "fp32"]
    device: Literal["cpu", "cuda"]
    optimizer_bytes: int
    """All that the optimizer remembers of the whole model (`training.compute.optimizers.state_bytes`)."""
    zero_stage: int = 1
    whole_tensors: bool = False
    """Whether `training.compute.whole_tensors` updates the weights, and not DeepSpeed's ZeRO."""
    data_parallel_size: int = 1
    """Processes that share out the data, and by ZeRO the state."""
    tensor_parallel_size: int = 1
    offload: Literal["none", "optimizer", "all"] = "none"
    activation_checkpointing: Literal["off", "selective", "full"] = "off"
    intra_document_masking: bool = False
    bucket_elements: int = 50_000_000
    """DeepSpeed's reduce_bucket_size."""

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacks of layers, in the order in which they work."""
        first = Stack(
            shape=self.shape,
            micro_batch=self.micro_batch,
            seq_len=self.shape.seq_len,
            looked_at=0,
            width_bytes=self.width_bytes,
            device=self.device,
            tensor_parallel_size=self.tensor_parallel_size,
            intra_document_masking=self.intra_document_masking,
        )
        if not self.shape.traits.is_encoder_decoder:
            return (first,)
        return first, replace(first, seq_len=self.shape.target_len, looked_at=self.shape.seq_len)

    @property
    def width_bytes(self) -> int:
        """Bytes of a number in the computation."""
        return 2 if self.precision == "bf16" else 4


@dataclass(frozen=True)
class Part:
    """One reason for memory."""

    name: str
    num_bytes: int
    phase: Literal["state", "compute", "update"] = "state"
    """When: always; in the forward and backward pass; or while gradients are summed and weights updated."""
    on_host: bool = False
    """In main memory though the computation runs on a GPU."""


@dataclass(frozen=True)
class Estimate:
    """The memory of one process (the first one, which also saves), by part."""

    parts: tuple[Part, ...]
    device: Literal["cpu", "cuda"]

    @property
    def device_bytes(self) -> int:
        """Peak of the memory in which the computation runs: the GPU's, or main memory."""
        parts = [part for part in self.parts if not part.on_host]
        phases = [sum(p.num_bytes for p in parts if p.phase == phase) for phase in ("compute", "update")]
        return sum(part.num_bytes for part in parts if part.phase == "state") + max(phases)

    @property
    def host_bytes(self) -> int:
        """Main memory beside a GPU; 0 on a CPU, where all is `device_bytes`."""
        return sum(part.num_bytes for part in self.parts if part.on_host)

    def bytes_of(self, name: str) -> int:
        """What one part takes where the computation runs."""
        return sum(part.num_bytes for part in self.parts if part.name == name and not part.on_host)

    def without_saving(self) -> int:
        """`device_bytes` of a process that has not saved yet, or is not the first."""
        return self.device_bytes - self.bytes_of(COPY_NAME)


def estimate(layout: Layout) -> Estimate:
    """The memory of the first process of a run."""
    parts = [*_state(layout), *_compute(layout), *_saving(layout)]
    return Estimate(tuple(part for part in parts if part.num_bytes), layout.device)


def local_parameters(layout: Layout) -> int:
    """Numbers that one process of a tensor group holds, by `sharding`'s table, which needs torch (a test compares)."""
    total = 0
    for name, dimensions in layout.shape.parameter_shapes().items():
        count = 1
        for size in dimensions:
            count *= size
        whole = len(dimensions) == 1 and not ("linear_qkv" in name or "linear_fc1" in name)
        whole = whole or any(part in name for part in _WHOLE)
        total += count if whole else count // layout.tensor_parallel_size
    return total


def _compute(layout: Layout) -> list[Part]:
    """The moment of the forward and backward pass that needs most."""
    wide, mode = layout.width_bytes, layout.activation_checkpointing
    vocabulary = layout.shape.padded_vocab_size // layout.tensor_parallel_size
    matrix = vocabulary * layout.shape.hidden_size
    moments, num_layers, kept = [], 0, 0
    # While the backward pass is in a stack, those before it wait with all that they keep.
    for stack in layout.stacks:
        num_layers += layout.shape.num_layers
        kept += stack_activations(stack, mode)
        activations = Part(f"activations of {num_layers} layers", kept, "compute")
        work = backward_work(stack, mode) + matrix * wide
        moments.append((activations, Part("one layer's backward pass", work, "compute")))
    last = layout.stacks[-1]
    chunk = min(CHUNK_BYTES[layout.device], 4 * last.tokens * vocabulary)
    # The gradient of the output matrix is summed in fp32, in bf16 rounded, and scaled; where it is the matrix of the
    # look-ups too, their gradient comes beside it, and the sum of both, when the layers are done.
    copies = 4 + (wide if wide == 2 else 0) + wide
    loss = 3 * last.hidden_bytes + norm_activations(last) + matrix * copies + chunk * (2 if wide == 2 else 1)
    moments.append((activations, Part("loss", loss, "compute")))
    return list(max(moments, key=lambda parts: sum(part.num_bytes for part in parts)))


def _state(layout: Layout) -> list[Part]:
    if layout.whole_tensors:
        return _of_whole_tensors(layout)
    return _of_deepspeed(layout)


def _of_whole_tensors(layout: Layout) -> list[Part]:
    count, wide = local_parameters(layout), layout.width_bytes
    owners = layout.data_parallel_size if layout.zero_stage else 1
    largest = layout.shape.padded_vocab_size // layout.tensor_parallel_size * layout.shape.hidden_size
    summed = min(GLOO_CHUNK_BYTES, 4 * count) if layout.data_parallel_size > 1 and layout.device == "cpu" else 0
    return [
        Part("weights", wide * count),
        Part("fp32 weights", 4 * count // owners if wide == 2 else 0),
        Part("gradients", 4 * count),
        Part("optimizer", layout.optimizer_bytes // layout.tensor_parallel_size // owners),
        Part("a gradient on its way", wide * max(largest, _largest_of_experts(layout)), "compute"),
        Part("sums over the processes", summed, "update"),
    ]


def _largest_of_experts(layout: Layout) -> int:
    """Numbers of the rising matrices of all experts of a layer, which are one tensor; 0 where there are no experts."""
    shape = layout.shape
    return shape.num_experts * shape.moe_ffn_hidden_size * shape.hidden_size * (2 if shape.traits.gated else 1)


def _of_deepspeed(layout: Layout) -> list[Part]:
    count, wide, readers = local_parameters(layout), layout.width_bytes, layout.data_parallel_size
    share = -(-count // readers)
    aside = layout.offload != "none" and layout.device == "cuda"
    optimizer = layout.optimizer_bytes // layout.tensor_parallel_size // readers
    weights = wide * (share if layout.zero_stage == 3 else count)
    return [
        Part("weights", weights, on_host=layout.offload == "all" and layout.device == "cuda"),
        Part("fp32 weights", 4 * share, on_host=aside),
        Part("optimizer", optimizer, on_host=aside),
        Part("a gradient on its way", wide * _largest_of_experts(layout), "compute"),
        *_GRADIENTS[layout.zero_stage](layout, count, share, aside),
    ]


def _gradients_1(layout: Layout, count: int, share: int, aside: bool) -> list[Part]:
    wide = layout.width_bytes
    if wide == 2 and layout.offload == "none":  # runtime/bf16_optimizer.py
        summed = min(_ALLREDUCE_BUCKET, count)
        copies = Part("sums over the processes", 4 * summed)
        return [Part("gradients", (2 + 4) * count), copies]
    bucket = wide * min(layout.bucket_elements, count)
    own = Part("own gradients", 4 * share, on_host=aside)
    copies = Part("sums over the processes", bucket, "update")
    return [Part("gradients", wide * count), own, copies]


def _gradients_2(layout: Layout, count: int, share: int, aside: bool) -> list[Part]:
    wide = layout.width_bytes
    bucket = wide * min(layout.bucket_elements, count)
    return [
        Part("own gradients", 4 * share, on_host=aside),
        Part("gradients", bucket),
        Part("sums over the processes", bucket),
    ]


def _gradients_3(layout: Layout, count: int, share: int, aside: bool) -> list[Part]:
    wide = layout.width_bytes
    bucket = wide * min(layout.bucket_elements, count)
    return [
        Part("own gradients", 4 * share, on_host=aside),
        Part("gradients", bucket),
        Part("gathered weights", wide * min(_LIVE_PARAMETERS, count)),
        Part("sums over the processes", bucket + wide * share),
    ]


_GRADIENTS = {1: _gradients_1, 2: _gradients_2, 3: _gradients_3}


def _saving(layout: Layout) -> list[Part]:
    whole = 4 * layout.shape.num_parameters() + layout.optimizer_bytes
    on_gpu = layout.device == "cuda"
    return [
        Part(COPY_NAME, whole, on_host=on_gpu),
        Part("framework", FRAMEWORK_BYTES[layout.device]),
        Part("framework", HOST_FRAMEWORK_BYTES if on_gpu else 0, on_host=True),
    ]
