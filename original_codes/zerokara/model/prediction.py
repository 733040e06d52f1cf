"""What every model does alike: its output projection, and from the last hidden states to logits.

Shape suffixes: B batch, S sequence, D hidden size, V rows of the (padded) vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import linear

from zerokara.model import parallel
from zerokara.model.experts import PADDING, AuxiliaryLoss
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

    def _output(self) -> tuple[Tensor, int, ProcessGroup | None]:
        """Return this process's rows of the output projection, the size of the vocabulary, and who shares it if any."""
        tied, group = self.shape.tie_word_embeddings, parallel.tensor_group() if parallel.tensor_size() > 1 else None
        weight_VD = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight_VD, self.shape.vocab_size, group

    def _logits(self, hidden_SBD: Tensor, at_B: Tensor | None) -> Tensor:
        """Return logits [B, S, V], with `at_B` those of one position of each row, [B, 1, V]."""
        if at_B is not None:
            hidden_SBD = hidden_SBD[at_B, torch.arange(len(at_B), device=at_B.device)].unsqueeze(0)
        tensor_group, (weight_VD, _, _) = parallel.tensor_group(), self._output()
        hidden_BSD = copy_to_tensor_model_parallel_region(hidden_SBD, group=tensor_group).transpose(0, 1)
        whole_BSV: Tensor = gather_from_tensor_model_parallel_region(linear(hidden_BSD, weight_VD), group=tensor_group)
        return whole_BSV
