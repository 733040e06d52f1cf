"""QK-norm: RMSNorm of each head's queries and keys before the rotary embedding (Qwen3; Dehghani et al., 2023).

Attention scores are then bounded by the weight, and no longer grow until the softmax saturates. One weight of size E
serves all heads of a layer.

Shape suffixes: S sequence, B batch, N heads of this process, E head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from zerokara.model import parallel
from zerokara.model.megatron_core import TransformerConfig, copy_to_tensor_model_parallel_region


class HeadNorm(torch.nn.RMSNorm):
    """A megatron-core `q_layernorm` or `k_layernorm` (0.16.1): [S, B, N, E] in and out."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float):
        """`hidden_size` is what megatron-core calls the head dim here."""
        super().__init__(hidden_size, eps=eps)
        self._alone = parallel.tensor_size() == 1

    def forward(self, heads_SBNE: Tensor) -> Tensor:
        """Normalize each head by itself."""
        weight_E = self.weight
        if not self._alone:
            # Each process has some of the heads: the gradient of the weight is the sum over the processes.
            weight_E = copy_to_tensor_model_parallel_region(weight_E, group=parallel.tensor_group())
        return rms_norm(heads_SBNE, self.normalized_shape, weight_E, self.eps)
