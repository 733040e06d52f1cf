"""A grouped matrix product in plain operations: what torch's kernel computes, in any format and on any device."""

import torch
from torch import Tensor


def plain_grouped_mm(mat_MK: Tensor, weights_XKN: Tensor, offs: Tensor) -> Tensor:
    """Rows up to offs[0] times the first matrix, those up to offs[1] times the second, and so on: [M, N]."""
    rows_M = torch.arange(mat_MK.size(0), device=mat_MK.device)
    group_M = torch.searchsorted(offs, rows_M, right=True)
    is_of_XM = group_M == torch.arange(weights_XKN.size(0), device=mat_MK.device)[:, None]
    return ((mat_MK @ weights_XKN) * is_of_XM[..., None]).sum(0)
