"""A decoder by itself: megatron-core's GPTModel (0.16.1), batch first, that returns logits or a loss.

Shape suffixes: B batch, S sequence, D hidden size, V rows of the (padded) vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerokara.model.attention import intra_document_mask
from zerokara.model.megatron_core import GPTModel
from zerokara.model.prediction import LanguageModel


class Decoder(LanguageModel, GPTModel):
    """A decoder-only model: ``decoder(tokens_BS)`` returns logits, with labels the summed cross-entropy."""

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        mask_BS: Tensor | None = None,
        segments_BS: Tensor | None = None,
        at_B: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, S, V], or with labels the nats summed over tokens with mask 1, a scalar in fp32.

        Attention stays within each of `segments_BS` (documents, in ascending order). With `at_B` the logits are those
        of that one position of each row, [B, 1, V].
        """
        if segments_BS is None:
            positions_BS = torch.arange(tokens_BS.size(1), device=tokens_BS.device).expand_as(tokens_BS)
            attention_mask = None
        else:
            positions_BS, attention_mask = intra_document_mask(segments_BS)
        hidden_SBD = super().forward(tokens_BS, positions_BS, attention_mask)
        return self._predict(hidden_SBD, labels_BS, mask_BS, at_B)

    def all_layers(self) -> list[torch.nn.Module]:
        """The layers, in the order in which they are computed."""
        return list(self.decoder.layers)

    def blank_arguments(self, num_samples: int, intra_document_masking: bool, device: torch.device) -> list[Tensor]:
        """Arguments of `forward` for a micro batch of training, in shape and dtype, all zeros."""
        ids_BS = torch.zeros(num_samples, self.shape.seq_len, dtype=torch.int64, device=device)
        mask_BS = torch.ones(ids_BS.shape, device=device)
        return [ids_BS, ids_BS, mask_BS, *([torch.zeros_like(ids_BS)] if intra_document_masking else [])]

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Stop at the hidden states, [S, B, D]: projection and loss are ours."""
        return hidden_states
