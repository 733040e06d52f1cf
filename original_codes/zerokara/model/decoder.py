"""A decoder by itself: megatron-core's GPTModel (0.16.1), batch first, that returns logits or a loss.

Shape suffixes: B batch, S sequence, D hidden size, V rows of the (padded) vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerokara.model import variable_length
from zerokara.model.attention import intra_document_mask, positions_in_documents
from zerokara.model.loss import cross_entropy
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
        document_offsets_N1: Tensor | None = None,
        num_examples_B: Tensor | None = None,
        at_B: Tensor | None = None,
        per_token: bool = False,
    ) -> Tensor:
        """Return logits [B, S, V], or with labels the nats summed over tokens with mask 1, a scalar in fp32.

        `per_token` returns the nats of each token instead, [B, S], whatever its mask, without gradients.

        Attention stays within each of `segments_BS` (documents, in ascending order). Where a GPU has a kernel for it,
        it is given the `document_offsets_N1` of the same documents (`Batch.document_offsets`) in place of a mask. Where
        `num_examples_B` are packed (`Batch.num_examples`), experts count the segments behind them as padding. With
        `at_B` the logits are those of that one position of each row, [B, 1, V].
        """
        if segments_BS is None:
            positions_BS = torch.arange(tokens_BS.size(1), device=tokens_BS.device).expand_as(tokens_BS)
            attention_mask = None
        elif document_offsets_N1 is not None and variable_length.has_kernel(
            self.embedding.word_embeddings.weight, self.shape.head_dim
        ):
            positions_BS, attention_mask = positions_in_documents(segments_BS), document_offsets_N1
        else:
            positions_BS, attention_mask = intra_document_mask(segments_BS)
        examples_BS = self._examples_or_padding(segments_BS, num_examples_B)
        hidden_SBD = super().forward(tokens_BS, positions_BS, attention_mask, padding_mask=examples_BS)
        if labels_BS is None:
            return self._logits(hidden_SBD, at_B)
        return cross_entropy(hidden_SBD, labels_BS, mask_BS, per_token, *self._output())

    def all_layers(self) -> list[torch.nn.Module]:
        """The layers, in the order in which they are computed."""
        return list(self.decoder.layers)

    def blank_arguments(
        self, num_samples: int, intra_document_masking: bool, packs_examples: bool, device: torch.device
    ) -> list[Tensor]:
        """Arguments of `forward` for a micro batch of training, in shape and dtype: zeros, an example in each row."""
        ids_BS = torch.zeros(num_samples, self.shape.input_len, dtype=torch.int64, device=device)
        mask_BS = torch.ones(ids_BS.shape, device=device)
        if not intra_document_masking:
            return [ids_BS, ids_BS, mask_BS]
        offsets_N1 = torch.arange(num_samples + 1, dtype=torch.int32, device=device) * self.shape.input_len
        arguments = [ids_BS, ids_BS, mask_BS, torch.zeros_like(ids_BS), offsets_N1]
        return [*arguments, torch.ones_like(ids_BS[:, 0])] if packs_examples else arguments

    def _postprocess(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """Stop at the hidden states, [S, B, D]: projection and loss are ours."""
        return hidden_states
