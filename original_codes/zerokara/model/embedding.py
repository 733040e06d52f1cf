"""megatron-core's embedding (0.16.1) where the rows of the vocabulary are shared out among tensor-parallel ranks.

megatron-core assigns through masks, `output[mask] = 0`: on a GPU each of them asks the device where the mask is true.

Shape suffixes: B batch, S sequence, D hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import embedding

from zerokara.model import parallel
from zerokara.model.megatron_core import reduce_from_tensor_model_parallel_region


def without_waits(word_embeddings: Any) -> None:
    """Let a VocabParallelEmbedding compute the same without waiting for the device."""
    if parallel.tensor_size() == 1:
        return
    first, end = word_embeddings.vocab_start_index, word_embeddings.vocab_end_index

    def forward(ids_BS: Tensor) -> Tensor:
        is_others_BS = (ids_BS < first) | (ids_BS >= end)
        rows_BSD = embedding((ids_BS - first).masked_fill(is_others_BS, 0), word_embeddings.weight)
        own_BSD = rows_BSD.masked_fill(is_others_BS[..., None], 0)
        whole_BSD: Tensor = reduce_from_tensor_model_parallel_region(own_BSD, group=word_embeddings.tp_group)
        return whole_BSD

    word_embeddings.forward = forward
