"""From the last hidden states to logits, or to the summed loss: the same for every model.

Shape suffixes: B batch, S sequence, D width, N = B·S tokens, V rows of the (padded) vocabulary.
"""

from __future__ import annotations

import zerokara.model.import_megatron  # noqa: F401  # before megatron-core

# isort: split
import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from torch import Tensor
from torch.nn.functional import linear

from zerokara.model import parallel
from zerokara.model.loss import summed_cross_entropy


def logits(hidden_SBD: Tensor, weight_VD: Tensor, at_B: Tensor | None = None) -> Tensor:
    """Logits [B, S, V]; with `at_B` those of that one position of each row, [B, 1, V]."""
    group = parallel.tensor_group()
    if at_B is not None:
        hidden_SBD = hidden_SBD[at_B, torch.arange(len(at_B), device=at_B.device)].unsqueeze(0)
    hidden_BSD = copy_to_tensor_model_parallel_region(hidden_SBD, group=group).transpose(0, 1)
    found: Tensor = gather_from_tensor_model_parallel_region(linear(hidden_BSD, weight_VD), group=group)
    return found


def summed_nats(
    hidden_SBD: Tensor, weight_VD: Tensor, labels_BS: Tensor, mask_BS: Tensor | None, vocab_size: int
) -> Tensor:
    """Nats summed over the labels with mask 1 (None: all), a scalar in fp32."""
    mask_BS = torch.ones_like(labels_BS, dtype=torch.float32) if mask_BS is None else mask_BS
    return summed_cross_entropy(
        hidden_SBD.transpose(0, 1).flatten(0, 1),
        weight_VD,
        labels_BS.flatten(),
        mask_BS.flatten(),
        vocab_size,
        parallel.tensor_group() if parallel.tensor_size() > 1 else None,
    )
