"""What every model does alike: from the last hidden states to logits, or to the loss, summed or of each token.

Shape suffixes: B batch, S sequence, D hidden size, N = B·S tokens, V rows of the (padded) vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from zerokara.model import parallel
from zerokara.model.experts import PADDING, AuxiliaryLoss
from zerokara.model.loss import summed_cross_entropy, token_cross_entropy
from zerokara.model.megatron_core import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from zerokara.model.shapes import ModelShape
from zerokara.model.sharding import Sharding


class LanguageModel:
    """The part that a decoder and an encoder-decoder have in common; stands before a model class of megatron-core."""

    output_layer: Any
    shared_embedding_or_output_weight: Any
    shape: ModelShape
    sharding: Sharding
    auxiliary: AuxiliaryLoss | None = None
    """The losses that layers add, in a model with experts."""

    def _examples_or_padding(self, segments_BS: Tensor | None, num_examples_B: Tensor | None) -> Tensor | None:
        """The packed example at each position, `PADDING` behind the examples, [B, S].

        Experts alone ask for it (`MixtureOfExperts.forward`): None in a model without, and where nothing is packed.
        """
        if num_examples_B is None or not self.shape.moe_layers:
            return None
        assert segments_BS is not None
        return segments_BS.where(segments_BS < num_examples_B[:, None], PADDING)

    def _predict(
        self,
        hidden_SBD: Tensor,
        labels_BS: Tensor | None,
        mask_BS: Tensor | None,
        at_B: Tensor | None,
        per_token: bool,
    ) -> Tensor:
        """Return logits [B, S, V] (with `at_B` those of one position of each row, [B, 1, V]), or with labels the nats
        summed over the tokens whose mask is 1 (None: all), a scalar in fp32; `per_token` those of each, [B, S]."""
        tied = self.shape.tie_word_embeddings
        weight_VD = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        if labels_BS is None:
            if at_B is not None:
                hidden_SBD = hidden_SBD[at_B, torch.arange(len(at_B), device=at_B.device)].unsqueeze(0)
            tensor_group = parallel.tensor_group()
            hidden_BSD = copy_to_tensor_model_parallel_region(hidden_SBD, group=tensor_group).transpose(0, 1)
            logits_BSV = linear(hidden_BSD, weight_VD)
            whole_BSV: Tensor = gather_from_tensor_model_parallel_region(logits_BSV, group=tensor_group)
            return whole_BSV
        hidden_ND, labels_N = hidden_SBD.transpose(0, 1).flatten(0, 1), labels_BS.flatten()
        vocab_size, group = self.shape.vocab_size, parallel.tensor_group() if parallel.tensor_size() > 1 else None
        if per_token:
            return token_cross_entropy(hidden_ND, weight_VD, labels_N, vocab_size, group).view_as(labels_BS)
        mask_N = (torch.ones_like(labels_BS, dtype=torch.float32) if mask_BS is None else mask_BS).flatten()
        return summed_cross_entropy(hidden_ND, weight_VD, labels_N, mask_N, vocab_size, group)
