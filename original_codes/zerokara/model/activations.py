"""What a stack of layers keeps for the backward pass, in bytes, and what its backward pass needs beside it.

A decoder is one stack; where an encoder reads, the encoder is the first and the decoder, which looks at it, the second,
each with its own number of tokens. What the layers keep was read off with `torch.autograd.graph.saved_tensors_hooks`
from those of model/megatron.py on a CPU (tests/unit/model/test_memory.py does it again). What a GPU keeps of attention
with a learned bias is known from torch's sources (about 2.13) and was not measured; that compiled layers keep the same
is assumed.

Letters: D width, H heads, K kv heads, E head width, F feed-forward, S tokens of a sequence, N tokens of a micro batch,
T processes that share a layer's matrices. Pure Python: nothing here imports torch.
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
    isolate_documents: bool = False

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
    def bias_bytes(self) -> int:
        """Of the biases of all distances, [1, H/T, S, S]; 0 where positions are told otherwise."""
        if self.shape.traits.positions != "relative":
            return 0
        return self.shape.num_attn_heads // self.tensor_parallel_size * self.seq_len**2 * self.width_bytes


def stack_activations(stack: Stack, checkpointing: str) -> int:
    """Bytes that all layers keep, and that is kept once for all of them."""
    return stack.shape.num_layers * layer_activations(stack, checkpointing) + _shared(stack)


def layer_activations(stack: Stack, checkpointing: str) -> int:
    """Bytes that one layer keeps under ``activation_checkpointing: <checkpointing>``."""
    if checkpointing == "full":
        return stack.hidden_bytes
    if checkpointing == "selective":
        return _attention_half(stack) + stack.hidden_bytes
    return _attention_half(stack) + _feed_forward_half(stack)


def backward_work(stack: Stack, checkpointing: str) -> int:
    """Bytes that the backward pass of the last layer needs while all the others wait.

    What a layer kept goes as its gradients come: the attention's come when the feed-forward half has gone.
    """
    feed_forward = (2 if stack.shape.traits.gated else 1) * stack.inner_bytes + 2 * stack.hidden_bytes
    attention = _attention_work(stack) - _feed_forward_half(stack)
    # Every layer adds to the gradients of the bias and of what it looks at: here is the sum so far.
    summed = stack.bias_bytes + stack.encoded_bytes
    computed_again = layer_activations(stack, "off") - layer_activations(stack, checkpointing)
    return max(feed_forward, attention) + summed + computed_again


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
    if stack.isolate_documents:
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
    heads, share = shape.heads_width, stack.tensor_parallel_size
    grouped = shape.kv_width
    fused_qkv = heads + 2 * grouped
    if shape.traits.positions == "learned":
        kept = fused_qkv + heads
    elif stack.isolate_documents and grouped != heads:  # keys and values are repeated for each query
        kept = 4 * heads
    else:  # rotated queries and keys, and the values, which lie in the matrix of all three
        kept = heads + grouped + fused_qkv + heads
    rotations = 0 if shape.traits.positions == "learned" else 4 * stack.seq_len * shape.head_size * wide
    # Each layer's kernel makes numbers of the mask that says where attention may go.
    mask = tokens * stack.seq_len * wide if stack.isolate_documents else 0
    normed = _head_norms(stack) if shape.traits.norms_heads else 0
    return (tokens * kept * wide + normed) // share + _largest_logits(stack) + rotations + mask


def _largest_logits(stack: Stack) -> int:
    """What a fused kernel keeps of the scores: for each query one number in fp32, log Σ exp."""
    return 4 * stack.tokens * stack.shape.num_attn_heads // stack.tensor_parallel_size


def _head_norms(stack: Stack) -> int:
    """What the norms of all heads' queries and keys keep beside what attention keeps anyway."""
    shape, wide = stack.shape, stack.width_bytes
    heads, grouped = shape.heads_width, shape.kv_width
    inverse_roots = 4 * (shape.num_attn_heads + shape.num_kv_heads)
    if stack.device == "cpu" and wide == 2:  # what went in, and what came out before the weight, both in fp32
        return stack.tokens * (2 * 4 * (heads + grouped) + inverse_roots)
    # What went in: the matrix of queries, keys and values, where nobody else keeps it; and queries that no longer lie
    # in it, as several of several groups do not.
    went_in = heads + 2 * grouped if stack.isolate_documents and grouped != heads else 0
    went_in += heads if 1 < shape.num_kv_heads < shape.num_attn_heads else 0
    came_out = 4 * (heads + grouped) if stack.device == "cpu" else 0
    return stack.tokens * (went_in * wide + came_out + inverse_roots)


def _biased_attention(stack: Stack) -> int:
    """Of self-attention with a bias that is learned, for which flash kernels have no gradient."""
    wide, heads = stack.width_bytes, stack.shape.heads_width
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
    """A GPU's kernel wants rows of a bias in one piece that begin at multiples of 8; else each layer makes its copy.

    The decoder's bias is in one piece, since its mask was filled in; the encoder's is a view of [S, S, H].
    """
    if stack.looked_at and stack.seq_len % _BIAS_ALIGNMENT == 0:
        return 0
    padded = (stack.seq_len // _BIAS_ALIGNMENT + 1) * _BIAS_ALIGNMENT
    return stack.bias_bytes // stack.seq_len * padded


def _cross_attention(stack: Stack) -> int:
    """Of attention to an encoder, by a flash kernel: queries, keys and values, the sum; and the norm before."""
    queried = stack.micro_batch * stack.shape.heads_width * stack.width_bytes
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
    looking = 4 * stack.micro_batch * stack.looked_at * stack.shape.heads_width * stack.width_bytes
    return max(pairs, looking // stack.tensor_parallel_size)


def _scores(stack: Stack, num_bytes: int) -> int:
    """Of so many bytes for each pair of tokens and each head, [B, H/T, S, S]."""
    return stack.tokens * stack.seq_len * stack.shape.num_attn_heads * num_bytes // stack.tensor_parallel_size


def _feed_forward_half(stack: Stack) -> int:
    # gated: [gate; up], the activated gate, up once more, and their product; else: before and after gelu
    return norm_activations(stack) + stack.inner_bytes * (5 if stack.shape.traits.gated else 2)
