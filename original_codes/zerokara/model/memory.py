"""What a training process needs of memory, by part, worked out before anything is loaded.

Two kinds of parts. *State* lies there all the time: weights, gradients, the optimizer's state, buffers. *Work* comes
and goes: activations, the loss, temporary copies. What one phase of a step leaves is used by the next, so the peak is
all state and the largest phase.

What each layer keeps for the backward pass was read off with `torch.autograd.graph.saved_tensors_hooks` from the layers
of model/megatron.py (tests/unit/model/test_memory.py does it again), what the updaters hold from whole_tensors.py and
from DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py), and all of it was calibrated
against the measured peak of processes on a CPU (tests/numerics/test_memory.py).

Letters: L layers, D width, H heads, K kv heads, E head width, F feed-forward, V rows of the vocabulary, S sequence,
N tokens of a micro batch, T processes that share a layer's matrices. Pure Python: nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from zerokara.model.parameters import parameter_shapes
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
    num_readers: int = 1
    """Processes that share out the data, and by ZeRO the state."""
    tensor_parallel_size: int = 1
    offload: Literal["none", "optimizer", "all"] = "none"
    activation_checkpointing: Literal["off", "selective", "full"] = "off"
    isolate_documents: bool = False
    bucket_elements: int = 50_000_000
    """DeepSpeed's reduce_bucket_size."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch, N."""
        return self.micro_batch * self.shape.seq_len

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
    """Numbers that one process of a tensor group holds; norms and the biases of rows are not shared out."""
    total = 0
    for name, dimensions in parameter_shapes(layout.shape).items():
        count = 1
        for size in dimensions:
            count *= size
        whole = len(dimensions) == 1 and not ("linear_qkv" in name or "linear_fc1" in name)
        whole = whole or "position_embeddings" in name
        total += count if whole else count // layout.tensor_parallel_size
    return total


def layer_activations(layout: Layout, checkpointing: str | None = None) -> int:
    """Bytes that one layer keeps for the backward pass; `checkpointing` stands in for the layout's own."""
    mode = layout.activation_checkpointing if checkpointing is None else checkpointing
    input_bytes = layout.tokens * layout.shape.hidden_size * layout.width_bytes
    if mode == "full":
        return input_bytes
    if mode == "selective":
        return _attention_half(layout) + input_bytes
    return _attention_half(layout) + _feed_forward_half(layout)


def _norm(layout: Layout) -> int:
    """What a norm and the matrix behind it keep: what went in, in between, and out."""
    shape, tokens = layout.shape, layout.tokens
    out = tokens * shape.hidden_size * layout.width_bytes
    if shape.traits.has_biases:
        return 2 * out + 2 * tokens * layout.width_bytes
    if layout.device == "cuda":  # one kernel, which keeps its input
        return 2 * out + 4 * tokens
    return 2 * 4 * tokens * shape.hidden_size + 4 * tokens + out  # on a CPU several operations in fp32


def _attention_half(layout: Layout) -> int:
    shape, tokens, wide = layout.shape, layout.tokens, layout.width_bytes
    heads, share = shape.heads_width, layout.tensor_parallel_size
    grouped = shape.kv_width
    fused_qkv = heads + 2 * grouped
    if shape.traits.positions == "learned":
        kept = fused_qkv + heads
    elif layout.isolate_documents and grouped != heads:  # keys and values are repeated for each query
        kept = 4 * heads
    else:  # rotated queries and keys, and the values, which lie in the matrix of all three
        kept = heads + grouped + fused_qkv + heads
    rotations = 0 if shape.traits.positions == "learned" else 4 * shape.seq_len * shape.head_size * wide
    # Each layer's kernel makes numbers of the mask that says where attention may go.
    mask = tokens * shape.seq_len * wide if layout.isolate_documents else 0
    largest_logits = 4 * tokens * shape.num_attn_heads // share
    normed = _head_norms(layout) if shape.traits.norms_heads else 0
    return _norm(layout) + (tokens * kept * wide + normed) // share + largest_logits + rotations + mask


def _head_norms(layout: Layout) -> int:
    """What the norms of all heads' queries and keys keep beside what attention keeps anyway."""
    shape, wide = layout.shape, layout.width_bytes
    heads, grouped = shape.heads_width, shape.kv_width
    inverse_roots = 4 * (shape.num_attn_heads + shape.num_kv_heads)
    if layout.device == "cpu" and wide == 2:  # what went in, and what came out before the weight, both in fp32
        return layout.tokens * (2 * 4 * (heads + grouped) + inverse_roots)
    # What went in: the matrix of queries, keys and values, where nobody else keeps it; and queries that no longer lie
    # in it, as several of several groups do not.
    went_in = heads + 2 * grouped if layout.isolate_documents and grouped != heads else 0
    went_in += heads if 1 < shape.num_kv_heads < shape.num_attn_heads else 0
    came_out = 4 * (heads + grouped) if layout.device == "cpu" else 0
    return layout.tokens * (went_in * wide + came_out + inverse_roots)


def _feed_forward_half(layout: Layout) -> int:
    inner = layout.tokens * layout.shape.ffn_hidden_size * layout.width_bytes // layout.tensor_parallel_size
    # gated: [gate; up], silu(gate), up once more, and their product; else: before and after gelu
    return _norm(layout) + inner * (5 if layout.shape.traits.gated else 2)


def _compute(layout: Layout) -> list[Part]:
    shape, tokens, wide = layout.shape, layout.tokens, layout.width_bytes
    hidden = tokens * shape.hidden_size * wide
    kept = shape.num_layers * layer_activations(layout)
    if layout.isolate_documents:
        kept += tokens * shape.seq_len  # one mask, by bytes, for all layers
    inner = tokens * shape.ffn_hidden_size * wide // layout.tensor_parallel_size
    # What a layer kept goes as its gradients come: no more than these are there beside it.
    backward = (2 if shape.traits.gated else 1) * inner + 2 * hidden
    backward += layer_activations(layout, "off") - layer_activations(layout)
    vocabulary = shape.padded_vocab_size // layout.tensor_parallel_size
    matrix = vocabulary * shape.hidden_size
    chunk = min(CHUNK_BYTES[layout.device], 4 * tokens * vocabulary)
    # The gradient of the output matrix is summed in fp32, in bf16 rounded, and scaled; where it is the matrix of the
    # look-ups too, their gradient comes beside it, and the sum of both, when the layers are done.
    copies = 4 + (wide if wide == 2 else 0) + wide
    loss = 3 * hidden + _norm(layout) + matrix * copies + chunk * (2 if wide == 2 else 1)
    largest = max((loss, "loss"), (backward + matrix * wide, "one layer's backward pass"))
    return [Part(f"activations of {shape.num_layers} layers", kept, "compute"), Part(largest[1], largest[0], "compute")]


def _state(layout: Layout) -> list[Part]:
    if layout.whole_tensors:
        return _of_whole_tensors(layout)
    return _of_deepspeed(layout)


def _of_whole_tensors(layout: Layout) -> list[Part]:
    count, wide = local_parameters(layout), layout.width_bytes
    owners = layout.num_readers if layout.zero_stage else 1
    largest = layout.shape.padded_vocab_size // layout.tensor_parallel_size * layout.shape.hidden_size
    summed = min(GLOO_CHUNK_BYTES, 4 * count) if layout.num_readers > 1 and layout.device == "cpu" else 0
    return [
        Part("weights", wide * count),
        Part("fp32 weights", 4 * count // owners if wide == 2 else 0),
        Part("gradients", 4 * count),
        Part("optimizer", layout.optimizer_bytes // layout.tensor_parallel_size // owners),
        Part("a gradient on its way", wide * largest, "compute"),
        Part("sums over the processes", summed, "update"),
    ]


def _of_deepspeed(layout: Layout) -> list[Part]:
    count, wide, readers = local_parameters(layout), layout.width_bytes, layout.num_readers
    share = -(-count // readers)
    aside = layout.offload != "none" and layout.device == "cuda"
    optimizer = layout.optimizer_bytes // layout.tensor_parallel_size // readers
    weights = wide * (share if layout.zero_stage == 3 else count)
    return [
        Part("weights", weights, on_host=layout.offload == "all" and layout.device == "cuda"),
        Part("fp32 weights", 4 * share, on_host=aside),
        Part("optimizer", optimizer, on_host=aside),
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
