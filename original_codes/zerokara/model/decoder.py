"""A decoder by itself: megatron-core's GPTModel (0.16.1), batch first, that hands out logits or a loss.

Shape suffixes: B batch, S sequence, D width, V rows of the (padded) vocabulary.
"""

from __future__ import annotations

import zerokara.model.import_megatron  # noqa: F401  # before megatron-core

# isort: split
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from zerokara.model.attention import isolation
from zerokara.model.auxiliary import Auxiliary
from zerokara.model.prediction import logits, summed_nats
from zerokara.model.shapes import ModelShape
from zerokara.model.sharding import Sharding


class Decoder(GPTModel):
    """A decoder-only model: ``decoder(tokens_BS)`` gives logits, with labels the summed cross-entropy."""

    shape: ModelShape
    sharding: Sharding
    auxiliary: Auxiliary | None = None
    """What layers add to the loss, where some do."""

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        mask_BS: Tensor | None = None,
        segments_BS: Tensor | None = None,
        at_B: Tensor | None = None,
    ) -> Tensor:
        """Give logits [B, S, padded V], or with labels the nats summed over tokens with mask 1, a scalar in fp32.

        Positions of different `segments_BS` (documents, in ascending order) know nothing of each other. With `at_B`
        the logits are those of that one position of each row, [B, 1, padded V].
        """
        if segments_BS is None:
            positions_BS = torch.arange(tokens_BS.size(1), device=tokens_BS.device).expand_as(tokens_BS)
            may_attend = None
        else:
            positions_BS, may_attend = isolation(segments_BS)
        hidden_SBD = super().forward(tokens_BS, positions_BS, may_attend)
        weight_VD = (
            self.shared_embedding_or_output_weight() if self.shape.tie_word_embeddings else self.output_layer.weight
        )
        if labels_BS is None:
            return logits(hidden_SBD, weight_VD, at_B)
        nats = summed_nats(hidden_SBD, weight_VD, labels_BS, mask_BS, self.shape.vocab_size)
        return nats if self.auxiliary is None else self.auxiliary.entered(nats, labels_BS.size(1))

    def all_layers(self) -> list[torch.nn.Module]:
        """The layers, in the order in which they work."""
        return list(self.decoder.layers)

    def blank_arguments(self, num_samples: int, isolated: bool, device: torch.device) -> list[Tensor]:
        """A micro batch of the shape that training gives `forward`, with nothing in it."""
        ids_BS = torch.zeros(num_samples, self.shape.seq_len, dtype=torch.int64, device=device)
        mask_BS = torch.ones(ids_BS.shape, device=device)
        return [ids_BS, ids_BS, mask_BS, *([torch.zeros_like(ids_BS)] if isolated else [])]

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Stop at the hidden states, [S, B, D]: projection and loss are ours."""
        return hidden_states
