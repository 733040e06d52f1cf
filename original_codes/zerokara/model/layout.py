"""The order in which hidden states lie: [S, B, D] on a CPU, as megatron-core has it, and [B, S, D] on a GPU.

A GPU's attention kernels compute on [B, S, H, E], and give their results so: in that order queries, keys, values, what
is attended and the rows of the loss are views of each other, also where documents lie one after another (P = B·S).
megatron-core's layers (0.16.1) ask for the order nowhere but in the embedding and in the rotary positions. A CPU keeps
its order: in another one the sums over tokens, and so the bits, would differ.
"""

from __future__ import annotations

from torch import Tensor


def is_batch_first(tensor: Tensor) -> bool:
    """True where hidden states lie as [B, S, D] on the device of a tensor."""
    return tensor.is_cuda


def sequence_first(hidden: Tensor) -> Tensor:
    """View hidden states as [S, B, ...]; and what has that order as hidden states lie: it is its own inverse."""
    return hidden.transpose(0, 1) if is_batch_first(hidden) else hidden
