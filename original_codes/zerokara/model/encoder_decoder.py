"""An encoder-decoder: megatron-core's T5Model (0.16.1) as T5 version 1.1 (Raffel et al., 2020).

megatron-core builds the layers and the relative position biases; the way through them is ours. Encoder and decoder have
one table each for all their layers: a bias for each bucket of distances and each head, added to the scores, which are
not divided by the root of the head dimension. Training samples have equal lengths and no padding; shorter inputs (a
prompt) come with an attention mask.

Shape suffixes: B batch, S encoder length, T decoder length, H heads of this process, D hidden size, V rows of the
(padded) vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerokara.model import parallel
from zerokara.model.megatron_core import T5Model, scatter_to_tensor_model_parallel_region
from zerokara.model.prediction import LanguageModel


class EncoderDecoder(LanguageModel, T5Model):
    """``model(encoder_input_ids_BS, decoder_input_ids_BT=…)`` returns logits, with labels the summed cross-entropy."""

    def drop_unused_heads(self) -> None:
        """Delete the output layers that are not used; megatron-core's tied one would have a bias of its own."""
        del self.lm_head
        if self.share_embeddings_and_output_weights:
            del self.output_layer

    def forward(
        self,
        encoder_input_ids_BS: Tensor,
        labels_BT: Tensor | None = None,
        mask_BT: Tensor | None = None,
        decoder_input_ids_BT: Tensor | None = None,
        at_B: Tensor | None = None,
        encoder_attention_mask_BS: Tensor | None = None,
        per_token: bool = False,
    ) -> Tensor:
        """Return logits [B, T, V], or with labels the nats summed over tokens with mask 1, a scalar in fp32.

        `per_token` returns the nats of each token instead, [B, T], whatever its mask, without gradients.

        `decoder_input_ids_BT` is required: a start token, and the target shifted right by one.
        `encoder_attention_mask_BS` is 0 at padding. With `at_B` the logits are those of that one position of each row,
        [B, 1, V].
        """
        assert decoder_input_ids_BT is not None, "a decoder needs an input"
        mask = None if encoder_attention_mask_BS is None else encoder_attention_mask_BS[:, None, None, :].bool()
        bias = _relative_position_bias(self.encoder_relative_pos_emb, encoder_input_ids_BS.size(1))
        if mask is not None:
            bias = bias.masked_fill(~mask, float("-inf"))
        encoded_SBD = self.encoder(self._embed(encoder_input_ids_BS), attention_mask=None, attention_bias=bias)
        length = decoder_input_ids_BT.size(1)
        bias_1HTT = _relative_position_bias(self.decoder_relative_pos_emb, length)
        future_TT = torch.ones(length, length, dtype=torch.bool, device=decoder_input_ids_BT.device).triu(1)
        hidden_TBD = self.decoder(
            self._embed(decoder_input_ids_BT),
            attention_mask=None,
            attention_bias=bias_1HTT.masked_fill(future_TT, float("-inf")),
            context=encoded_SBD,
            context_mask=mask,
        )
        if self.shape.tie_word_embeddings:  # Mesh TensorFlow's T5: a shared matrix has the scale of an embedding
            hidden_TBD = hidden_TBD * self.shape.hidden_size**-0.5
        return self._predict(hidden_TBD, labels_BT, mask_BT, at_B, per_token)

    def all_layers(self) -> list[torch.nn.Module]:
        """The layers, in the order in which they are computed."""
        return [*self.encoder.layers, *self.decoder.layers]

    def blank_arguments(self, num_samples: int, intra_document_masking: bool, device: torch.device) -> list[Tensor]:
        """Arguments of `forward` for a micro batch of training, in shape and dtype, all zeros."""
        assert not intra_document_masking, "an encoder has no intra-document masking"
        encoder_ids_BS, decoder_ids_BT = (
            torch.zeros(num_samples, length, dtype=torch.int64, device=device)
            for length in (self.shape.seq_len, self.shape.target_len)
        )
        return [encoder_ids_BS, decoder_ids_BT, torch.ones(decoder_ids_BT.shape, device=device), decoder_ids_BT]

    def _embed(self, ids_BS: Tensor) -> Tensor:
        embedded_SBD: Tensor = self.embedding(input_ids=ids_BS, position_ids=None)
        return embedded_SBD


def _relative_position_bias(table: torch.nn.Module, length: int) -> Tensor:
    """The bias of this process's heads among `length` positions, [1, H, length, length].

    Contiguous: of a view of [length, length, H], as the table gives it, each layer would make a copy on a GPU.
    """
    bias_1HSS: Tensor = table(length, length)
    if parallel.tensor_size() == 1:
        return bias_1HSS.contiguous()
    heads_last = scatter_to_tensor_model_parallel_region(bias_1HSS.permute(0, 2, 3, 1), parallel.tensor_group())
    return heads_last.permute(0, 3, 1, 2).contiguous()
