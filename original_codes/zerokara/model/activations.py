"""What a stack of layers keeps for the backward pass, in bytes, and what its backward pass needs beside it.

A decoder is one stack; where an encoder reads, the encoder is the first and the decoder, which looks at it, the second,
each with its own number of tokens. What the layers keep was read off with `torch.autograd.graph.saved_tensors_hooks`
from those of model/megatron.py on a CPU (tests/unit/model/test_memory.py does it again). What a GPU keeps of attention
with a learned bias is known from torch's sources (about 2.13) and was not measured, nor what it keeps of experts; that
compiled layers keep the same is assumed.

Letters: D width, H heads, K kv heads, E head width, F feed-forward (of one expert, in a sparse layer), S tokens of a
sequence, N tokens of a micro batch, T processes that share a layer's matrices, X experts, k of them for a token,
M = N·k. Pure Python: nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from zerokara.model.shapes import ModelShape

_BIAS_ALIGNMENT = 8
"""Numbers to whose multiple torch pads a row of a bias for its memory-efficient kernel, when it pads
(aten/src/ATen/native/transformers/attention.cpp, `preprocess_mask`)."""


@dataclass(frozen=True)
class Stack:
    """Layers that work one after another on the same tokens, in one process."""

    shape: ModelShape
    micro_batch: int
    """Sequences at a time."""
    seq_len: int
    """Tokens of a sequence in this stack, S."""
    looked_at: int
    """Tokens of an encoder's output that each layer looks at; 0 where it looks at none."""
    width_bytes: int
    """Bytes of a number in the computation."""
    device: Literal["cpu", "cuda"]
    tensor_parallel_size: int = 1
    intra_document_masking: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch, N."""
        return self.micro_batch * self.seq_len

    @property
    def hidden_bytes(self) -> int:
        """Of the hidden states, [N, D]."""
        return self.tokens * self.shape.hidden_size * self.width_bytes

    @property
    def encoded_bytes(self) -> int:
        """Of the encoder's output."""
        return self.micro_batch * self.looked_at * self.shape.hidden_size * self.width_bytes

    @property
    def inner_bytes(self) -> int:
        """Of this process's part of the hidden states inside a feed-forward layer, [N, F/T]."""
        return self.tokens * self.shape.ffn_hidden_size * self.width_bytes // self.tensor_parallel_size

    @property
    def choices(self) -> int:
        """Of experts by all tokens of a micro batch, M."""
        return self.tokens * self.shape.experts_per_token

    @property
    def chosen_bytes(self) -> int:
        """Of the hidden states of all choices, [M, D]."""
        return self.choices * self.shape.hidden_size * self.width_bytes

    @property
    def expert_bytes(self) -> int:
        """Of the hidden states of all choices inside the experts, [M, F]."""
        return self.choices * self.shape.moe_ffn_hidden_size * self.width_bytes

    @property
    def are_sparse(self) -> list[bool]:
        """Of each layer, whether it holds experts."""
        return [layer in self.shape.moe_layers for layer in range(self.shape.num_layers)]

    @property
    def bias_bytes(self) -> int:
        """Of the biases of all distances, [1, H/T, S, S]; 0 where positions are told otherwise."""
        if self.shape.traits.positions != "relative":
            return 0
        return self.shape.num_attn_heads // self.tensor_parallel_size * self.seq_len**2 * self.width_bytes


def stack_activations(stack: Stack, checkpointing: str) -> int:
    """Bytes that all layers keep, and that is kept once for all of them."""
    return sum(layer_activations(stack, checkpointing, sparse) for sparse in stack.are_sparse) + _shared(stack)


def layer_activations(stack: Stack, checkpointing: str, sparse: bool = False) -> int:
    """Bytes that one layer keeps under ``activation_checkpointing: <checkpointing>``; `sparse`: it holds experts."""
    if checkpointing == "full":
        return stack.hidden_bytes
    if checkpointing == "selective":
        return _attention_half(stack) + stack.hidden_bytes
    return _attention_half(stack) + _feed_forward_half(stack, sparse)


def backward_work(stack: Stack, checkpointing: str) -> int:
    """Bytes that the backward pass of a layer needs, at most, beside what all layers keep.

    That of the last layer, while all the others wait; or that of one before, sparse where the last is dense or dense
    where it is sparse, when what those behind it kept has gone.
    """
    most, gone = [], 0
    for sparse in reversed(stack.are_sparse):
        most.append(_layer_work(stack, checkpointing, sparse) - gone)
        gone += layer_activations(stack, checkpointing, sparse)
    # Every layer adds to the gradients of the bias and of what it looks at: here is the sum so far.
    return max(most) + stack.bias_bytes + stack.encoded_bytes


def norm_activations(stack: Stack) -> int:
    """What a norm and the matrix behind it keep: what went in, in between, and out."""
    shape, tokens = stack.shape, stack.tokens
    out = stack.hidden_bytes
    if shape.traits.has_biases:
        return 2 * out + 2 * tokens * stack.width_bytes
    if stack.device == "cuda":  # one kernel, which keeps its input
        return 2 * out + 4 * tokens
    return 2 * 4 * tokens * shape.hidden_size + 4 * tokens + out  # on a CPU several operations in fp32


def _shared(stack: Stack) -> int:
    kept = 0
    if stack.intra_document_masking:
        kept += stack.tokens * stack.seq_len  # one mask, by bytes
    if stack.shape.traits.positions == "relative":
        # The kind of each distance as an integer of 8 bytes; the bias, which at least the forward pass holds; and
        # where a later token may not be seen, a mask by bytes.
        kept += (9 if stack.looked_at else 8) * stack.seq_len**2 + stack.bias_bytes
    if stack.looked_at:  # the encoder's last norm, whose output all layers look at
        kept += norm_activations(replace(stack, seq_len=stack.looked_at))
    return kept


def _attention_half(stack: Stack) -> int:
    own = _biased_attention(stack) if stack.shape.traits.positions == "relative" else _attention(stack)
    return norm_activations(stack) + own + (_cross_attention(stack) if stack.looked_at else 0)


def _attention(stack: Stack) -> int:
    shape, tokens, wide = stack.shape, stack.tokens, stack.width_bytes
    heads, share = shape.query_projection_size, stack.tensor_parallel_size
    grouped = shape.kv_projection_size
    fused_qkv = heads + 2 * grouped
    if shape.traits.positions == "learned":
        kept = fused_qkv + heads
    elif stack.intra_document_masking and grouped != heads:  # keys and values are repeated for each query
        kept = 4 * heads
    else:  # rotated queries and keys, and the values, which lie in the matrix of all three
        kept = heads + grouped + fused_qkv + heads
    rotations = 0 if shape.traits.positions == "learned" else 4 * stack.seq_len * shape.head_dim * wide
    # Each layer's kernel makes numbers of the mask that says where attention may go.
    mask = tokens * stack.seq_len * wide if stack.intra_document_masking else 0
    normed = _head_norms(stack) if shape.traits.qk_norm else 0
    return (tokens * kept * wide + normed) // share + _largest_logits(stack) + rotations + mask


def _largest_logits(stack: Stack) -> int:
    """What a fused kernel keeps of the scores: for each query one number in fp32, log Σ exp."""
    return 4 * stack.tokens * stack.shape.num_attn_heads // stack.tensor_parallel_size


def _head_norms(stack: Stack) -> int:
    """What the norms of all heads' queries and keys keep beside what attention keeps anyway."""
    shape, wide = stack.shape, stack.width_bytes
    heads, grouped = shape.query_projection_size, shape.kv_projection_size
    inverse_roots = 4 * (shape.num_attn_heads + shape.num_kv_heads)
    if stack.device == "cpu" and wide == 2:  # what went in, and what came out before the weight, both in fp32
        return stack.tokens * (2 * 4 * (heads + grouped) + inverse_roots)
    # What went in: the matrix of queries, keys and values, where nobody else keeps it; and queries that no longer lie
    # in it, as several of several groups do not.
    went_in = heads + 2 * grouped if stack.intra_document_masking and grouped != heads else 0
    went_in += heads if 1 < shape.num_kv_heads < shape.num_attn_heads else 0
    came_out = 4 * (heads + grouped) if stack.device == "cpu" else 0
    return stack.tokens * (went_in * wide + came_out + inverse_roots)


def _biased_attention(stack: Stack) -> int:
    """Of self-attention with a bias that is learned, for which flash kernels have no gradient."""
    wide, heads = stack.width_bytes, stack.shape.query_projection_size
    if stack.device == "cpu":
        # torch's plain operations, in fp32: scaled queries and keys, the values (which in fp32 lie in the matrix of
        # all three), the weights of all pairs; and the sum, as wide as the computation.
        values = 3 * heads if wide == 4 else heads
        each = 4 * (2 * heads + values) + wide * heads
        return stack.tokens * each // stack.tensor_parallel_size + _scores(stack, 4)
    # The memory-efficient kernel (cuDNN's refuses a bias that needs a gradient: sdp_utils_cpp.h, check_attn_mask_shape)
    # keeps the matrix of all three, the sum, log Σ exp and the bias as it was given
    # (ScaledDotProductEfficientAttentionBackward0).
    kept = stack.tokens * 4 * heads * wide // stack.tensor_parallel_size
    return kept + _largest_logits(stack) + _copied_bias(stack)


def _copied_bias(stack: Stack) -> int:
    """A GPU's kernel wants rows of a bias that begin at multiples of 8; else each layer makes its copy."""
    if stack.seq_len % _BIAS_ALIGNMENT == 0:
        return 0
    padded = (stack.seq_len // _BIAS_ALIGNMENT + 1) * _BIAS_ALIGNMENT
    return stack.bias_bytes // stack.seq_len * padded


def _cross_attention(stack: Stack) -> int:
    """Of attention to an encoder, by a flash kernel: queries, keys and values, the sum; and the norm before."""
    queried = stack.micro_batch * stack.shape.query_projection_size * stack.width_bytes
    kept = queried * 2 * (stack.seq_len + stack.looked_at) // stack.tensor_parallel_size
    return norm_activations(stack) + kept + _largest_logits(stack)


def _attention_work(stack: Stack) -> int:
    """What the gradients of attention take that are as large as all its pairs, or as what it looks at."""
    if stack.shape.traits.positions != "relative":
        return 0  # flash kernels make no pairs
    # On a CPU the gradients of the weights and of the scores, in fp32. A GPU's kernel writes the gradient of the bias
    # for each sequence (torch/_meta_registrations.py), and then they are summed.
    on_cpu = stack.device == "cpu"
    pairs = _scores(stack, 2 * 4) if on_cpu else _scores(stack, stack.width_bytes) + stack.bias_bytes
    # Keys and values apart, and in the matrix of both.
    looking = 4 * stack.micro_batch * stack.looked_at * stack.shape.query_projection_size * stack.width_bytes
    return max(pairs, looking // stack.tensor_parallel_size)


def _scores(stack: Stack, num_bytes: int) -> int:
    """Of so many bytes for each pair of tokens and each head, [B, H/T, S, S]."""
    return stack.tokens * stack.seq_len * stack.shape.num_attn_heads * num_bytes // stack.tensor_parallel_size


def _layer_work(stack: Stack, checkpointing: str, sparse: bool) -> int:
    """What a layer kept goes as its gradients come: the attention's come when the feed-forward half has gone."""
    dense = (2 if stack.shape.traits.gated else 1) * stack.inner_bytes + 2 * stack.hidden_bytes
    feed_forward = _experts_work(stack) if sparse else dense
    attention = _attention_work(stack) - _feed_forward_half(stack, sparse)
    computed_again = layer_activations(stack, "off", sparse) - layer_activations(stack, checkpointing, sparse)
    return max(feed_forward, attention) + computed_again


def _feed_forward_half(stack: Stack, sparse: bool) -> int:
    if sparse:
        return norm_activations(stack) + _router(stack) + _experts(stack)
    # gated: [gate; up], the activated gate, up once more, and their product; else: before and after gelu
    return norm_activations(stack) + stack.inner_bytes * (5 if stack.shape.traits.gated else 2)


def _router(stack: Stack) -> int:
    """What a router keeps (`experts.Experts.forward`), however much its losses weigh, beside what the norm keeps."""
    shape, tokens, choices = stack.shape, stack.tokens, stack.choices
    # It computes in fp32. In bf16 it keeps copies of its input and of its matrix; the norm's output itself, which
    # `norm_activations` counts, is kept by nobody.
    in_fp32 = 4 * (tokens + shape.num_experts) * shape.hidden_size
    copies = in_fp32 - stack.hidden_bytes if stack.width_bytes == 2 else 0
    scores = 4 * tokens * (2 * shape.num_experts + 1)  # logits, probabilities, log Σ exp
    # Which experts, which tokens in their order, the way back, and where there was room, as integers of 8 bytes.
    indices = 4 * 8 * choices
    weights = choices * stack.width_bytes
    if shape.experts_per_token > 1:  # the probabilities and their sum, in fp32
        weights += 4 * (choices + tokens)
    return copies + scores + indices + weights


def _experts(stack: Stack) -> int:
    """What experts keep, however the choices fall: what comes in, in between (gated: [gate; up], the activated gate and
    the product; else before and after gelu), and what comes out, to be weighted.

    On a GPU in bf16 one kernel computes all experts (`experts.Experts._grouped`). It is assumed to keep the same, and
    to need no room of its own that counts.
    """
    return 2 * stack.chosen_bytes + (4 if stack.shape.traits.gated else 2) * stack.expert_bytes


def _experts_work(stack: Stack) -> int:
    """What the gradients of a sparse layer's feed-forward half take (measured with torch's profiler on a CPU)."""
    shape = stack.shape
    first = 2 * stack.chosen_bytes  # of what came out, weighted, and by experts
    if stack.device == "cuda" and stack.width_bytes == 2:
        # Inside, when what came out has gone. It is assumed that the kernel makes the gradient of all experts' matrices
        # in one piece, which is on its way then.
        later = (2 if shape.traits.gated else 1) * stack.expert_bytes - stack.chosen_bytes
    else:
        # Expert by expert: the gradients of their matrices wait for each other, to be put together then. Beside the one
        # that is on its way those are at most two of [X, F, D]: both of fc1 where it has a gate, else one of each. By
        # then all that the experts kept has gone, and the gradient of what came in is there.
        waiting = 2 * shape.num_experts * shape.moe_ffn_hidden_size * shape.hidden_size * stack.width_bytes
        later = waiting + stack.chosen_bytes - _experts(stack)
    return stack.hidden_bytes + max(first, later)
