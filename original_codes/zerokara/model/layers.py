"""megatron-core's linear layers, embedding and feed-forward network (0.16.1), and activation checkpointing of layers.

megatron-core's way through a linear layer is an autograd function for communication: torch.compile cannot see into it,
and in RowParallelLinear stops at a warning (tensor_parallel/layers.py:1243 passes no group). Where this process holds
the whole matrix, a layer is a plain product; with tensor parallelism it stays as it is, with the group named.

Activation checkpointing (recomputation): activations are recomputed in the backward pass rather than kept. ``full``
keeps the input of each layer and recomputes the whole layer; ``selective`` recomputes only its feed-forward half, with
the norm before it: about three fifths of what one of llama's layers keeps, for less than half of its arithmetic. The
same operations run on the same numbers, so gradients are equal to the last bit (tests/numerics/test_processes.py).

*How hidden states lie*: as [S, B, D] on a CPU, as megatron-core has them, and as [B, S, D] on a GPU, whose attention
kernels compute on [B, S, H, E]: in that order queries, keys, values, what is attended and the rows of the loss are
views of each other, also where documents lie one after another. megatron-core's layers ask for the order nowhere but in
the embedding and in the rotary positions. A CPU keeps its order: in another one the sums over tokens, and so the bits,
would differ.

Shape suffixes: S sequence, B batch, D hidden size, F feed-forward size of this process, R rows of its first matrix (2F
with a gate).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear
from torch.utils.checkpoint import checkpoint

from zerokara.model import float8, parallel, weight_gradients
from zerokara.model.megatron_core import (
    MLP,
    ColumnParallelLinear,
    MLPSubmodules,
    RowParallelLinear,
    TransformerConfig,
    TransformerLayer,
    WrappedTorchNorm,
    reduce_from_tensor_model_parallel_region,
)

Activation = Callable[[Tensor], Tensor]
Softmax = Sequence[Callable[..., Any]]


def is_batch_first(tensor: Tensor) -> bool:
    """True where hidden states lie as [B, S, D] on the device of a tensor."""
    return tensor.is_cuda


def sequence_first(hidden: Tensor) -> Tensor:
    """View hidden states as [S, B, ...], or a tensor of that order in the layout of hidden states: it is its own
    inverse."""
    return hidden.transpose(0, 1) if is_batch_first(hidden) else hidden


def plain_activate(inner: Tensor, bias_R: Tensor | None, activation: Activation, gated: bool) -> Tensor:
    """Add the bias, [..., R], and activate, [..., F]; with a gate, the first half, which multiplies the other."""
    if bias_R is not None:
        inner = inner + bias_R
    if not gated:
        return activation(inner)
    gate, up = inner.chunk(2, dim=-1)
    return activation(gate) * up


def activate_for_float8(inner: Tensor, bias_R: Tensor | None, activation: Activation, gated: bool) -> Tensor:
    """Compute what `plain_activate` does. Compiled, one kernel computes the gradient and finds its largest number."""
    if not gated:
        return plain_activate(inner, bias_R, activation, gated)
    both = (inner if bias_R is None else inner + bias_R).unflatten(-1, (2, -1))
    return activation(both.select(-2, 0)) * both.select(-2, 1)


@dataclass
class Kernels:
    """The functions of one model that may be compiled by themselves: plain, until `compilation`."""

    softmax: Softmax | None = None
    """`loss.SOFTMAX` compiled: one kernel or two instead of eight passes over the logits."""
    activate: Callable[..., Tensor] = plain_activate


class _PlainProduct:
    """Stands before a layer class of megatron-core: a plain product where this process holds the whole matrix."""

    weight: Tensor
    multiply: Callable[..., Tensor] = staticmethod(linear)
    gradient_sum: Tensor | None = None
    """What the gradients of the weight are added to, [N, K] in fp32; None: they are left to torch."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        self._alone = parallel.tensor_size() == 1

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, **rest: Any) -> Tensor:
        if self._alone and self.gradient_sum is not None and torch.is_grad_enabled():
            return weight_gradients.product(input, weight, bias, self.gradient_sum)
        if self._alone:
            return self.multiply(input, weight, bias)
        rest["tp_group"] = self.tp_group  # type: ignore[attr-defined]
        product: Tensor = super()._forward_impl(input=input, weight=weight, bias=bias, **rest)  # type: ignore[misc]
        return product


class ColumnLinear(_PlainProduct, ColumnParallelLinear):
    """Column-parallel: each of T ranks computes a T-th of the outputs."""


class RowLinear(_PlainProduct, RowParallelLinear):
    """Row-parallel: each of T ranks multiplies a T-th of the inputs; the products are summed."""


class NormedRowLinear(RowLinear):
    """The last matrix of an attention or feed-forward layer whose output is normalized, not its input (OLMo 2)."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **named: Any):
        super().__init__(input_size, output_size, config=config, **named)
        self.output_layernorm = WrappedTorchNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Normalize the sum over the ranks: they hold the same weight, and get the same gradient."""
        product, bias = super().forward(input_)
        return self.output_layernorm(product), bias


class Layer(TransformerLayer):
    """A layer: around it DeepSpeed's ZeRO 3 gathers weights."""

    recomputes: str = "off"
    """``activation_checkpointing``."""
    compiled: Callable[..., Any] | None = None
    """`compute` compiled (`compilation`)."""

    def __call__(self, hidden_states: Tensor, attention_mask: Any = None, context: Any = None, **named: Any) -> Any:
        """Pass by position what may need gradients: the hooks of torch's modules do not see keywords."""
        return super().__call__(hidden_states, attention_mask, context, **named)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return (self.compiled or self.compute)(*arguments, **named)

    def compute(self, *arguments: Any, **named: Any) -> Any:
        """Compute the layer by its written code, with ``full`` again in the backward pass."""
        return self._run(super().forward, self.recomputes == "full", *arguments, **named)

    def _forward_mlp(self, *arguments: Any, **named: Any) -> Any:
        return self._run(super()._forward_mlp, self.recomputes == "selective", *arguments, **named)

    def _run(self, forward: Callable[..., Any], again: bool, *arguments: Any, **named: Any) -> Any:
        if not again or not torch.is_grad_enabled():  # validation has no backward pass
            return forward(*arguments, **named)
        # The masks of `dropout` are no random numbers with a state to preserve.
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False, **named)


class FeedForward(MLP):
    """The `mlp` of a dense layer, with the activation as one function."""

    last_linear = RowLinear

    def __init__(self, config: TransformerConfig):
        submodules = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=self.last_linear)
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size, tp_group=parallel.tensor_group())
        self.kernels = Kernels()

    def forward(self, hidden_SBD: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return [S, B, D], and the bias that is still to be added to it, or None; padding is computed as the rest."""
        inner_SBR, bias_R = self.linear_fc1(hidden_SBD)
        inner_SBF = self.kernels.activate(inner_SBR, bias_R, self.config.activation_func, self.config.gated_linear_unit)
        out_SBD, bias_D = self.linear_fc2(inner_SBF)
        return out_SBD, bias_D


class NormedFeedForward(FeedForward):
    """With its output normalized."""

    last_linear = NormedRowLinear


def multiply_in_float8(model: Any) -> None:
    """Compute the products of attention's and dense feed-forward layers' matrices in float8, where whole."""
    for module in model.modules():
        if isinstance(module, _PlainProduct):
            module.multiply = float8.product
    model.kernels.activate = activate_for_float8


def sum_gradients_in_products(model: torch.nn.Module) -> dict[Tensor, Tensor]:
    """Let products of attention's and dense feed-forward layers add the gradients of their weights to sums.

    Return these, in fp32, by weight. They are zeros.
    """
    found: dict[Tensor, Tensor] = {}
    for module in model.modules():
        if isinstance(module, _PlainProduct):
            found[module.weight] = torch.zeros_like(module.weight, dtype=torch.float32)
            module.gradient_sum = found[module.weight]
    return found


def embed_without_waits(word_embeddings: Any) -> None:
    """Let a VocabParallelEmbedding compute the same without waiting for the device.

    megatron-core assigns through masks, `output[mask] = 0`: on a GPU each of them asks where the mask is true.
    """
    if parallel.tensor_size() == 1:
        return
    first, end = word_embeddings.vocab_start_index, word_embeddings.vocab_end_index

    def forward(ids_BS: Tensor) -> Tensor:
        is_others_BS = (ids_BS < first) | (ids_BS >= end)
        rows_BSD = embedding((ids_BS - first).masked_fill(is_others_BS, 0), word_embeddings.weight)
        own_BSD = rows_BSD.masked_fill(is_others_BS[..., None], 0)
        whole_BSD: Tensor = reduce_from_tensor_model_parallel_region(own_BSD, group=word_embeddings.tp_group)
        return whole_BSD

    word_embeddings.forward = forward
