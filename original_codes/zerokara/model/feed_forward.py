"""The feed-forward network of a dense layer: megatron-core's MLP (0.16.1) with the activation as one function.

Shape suffixes: S sequence, B batch, D hidden size, F feed-forward size of this process, R rows of its first matrix (2F
with a gate).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from zerokara.model import parallel
from zerokara.model.megatron_core import MLP, MLPSubmodules, TransformerConfig
from zerokara.model.parallel_layers import ColumnLinear, RowLinear

Activation = Callable[[Tensor], Tensor]


class FeedForward(MLP):
    """The `mlp` of a dense layer."""

    def __init__(self, config: TransformerConfig):
        """As megatron-core builds it."""
        submodules = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size, tp_group=parallel.tensor_group())

    def forward(self, hidden_SBD: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return [S, B, D], and the bias that is still to be added to it, or None; padding is computed as the rest."""
        inner_SBR, bias_R = self.linear_fc1(hidden_SBD)
        inner_SBF = activate(inner_SBR, bias_R, self.config.activation_func, self.config.gated_linear_unit)
        out_SBD, bias_D = self.linear_fc2(inner_SBF)
        return out_SBD, bias_D


def plain_activate(inner: Tensor, bias_R: Tensor | None, activation: Activation, gated: bool) -> Tensor:
    """Add the bias, [..., R], and activate, [..., F]; with a gate, the first half, which multiplies the other."""
    if bias_R is not None:
        inner = inner + bias_R
    if not gated:
        return activation(inner)
    gate, up = inner.chunk(2, dim=-1)
    return activation(gate) * up


fused_activate: Callable[..., Tensor] | None = None
"""`plain_activate` compiled, set by `compilation` where layers are not."""


def activate(inner: Tensor, bias_R: Tensor | None, activation: Activation, gated: bool) -> Tensor:
    """`plain_activate`, or what was compiled of it."""
    return (fused_activate or plain_activate)(inner, bias_R, activation, gated)
