"""An encoder that reads and a decoder that writes: megatron-core's T5Model (0.16.1) as T5 version 1.1.

megatron-core builds the layers and the tables of relative positions; the way through them is ours. Each of the two
stacks has one table for all its layers: a bias for each kind of distance and each head, added to the scores, which are
not divided by the root of the head's width. Nothing is computed for padding in training, where every sample is as long
as the other; shorter texts (a prompt) come with a mask.

Shape suffixes: B batch, S what the encoder reads, T what the decoder reads, H heads, D width.
"""

from __future__ import annotations

import zerokara.model.import_megatron  # noqa: F401  # before megatron-core

# isort: split
import torch
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region
from torch import Tensor

from zerokara.model import parallel
from zerokara.model.auxiliary import Auxiliary
from zerokara.model.prediction import logits, summed_nats
from zerokara.model.shapes import ModelShape
from zerokara.model.sharding import Sharding


class EncoderDecoder(T5Model):
    """``model(encoder_input_ids_BS, decoder_input_ids_BT=…)`` gives logits, with labels the summed cross-entropy."""

    shape: ModelShape
    sharding: Sharding
    auxiliary: Auxiliary | None = None
    """What layers add to the loss, where some do."""

    def drop_unused_heads(self) -> None:
        """Let go of the output layers that are not used; megatron-core's tied one would have a bias of its own."""
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
    ) -> Tensor:
        """Give logits [B, T, padded V], or with labels the nats summed over tokens with mask 1, a scalar in fp32.

        `decoder_input_ids_BT` is the decoder's input: a start token, and the target shifted right by one.
        `encoder_attention_mask_BS` is False at padding. With `at_B` the logits are
        those of that one position of each row, [B, 1, padded V].
        """
        assert decoder_input_ids_BT is not None, "a decoder reads what was written so far"
        may_read = None if encoder_attention_mask_BS is None else encoder_attention_mask_BS[:, None, None, :].bool()
        bias = _bias(self.encoder_relative_pos_emb, encoder_input_ids_BS.size(1))
        if may_read is not None:
            bias = bias.masked_fill(~may_read, float("-inf"))
        encoded_SBD = self.encoder(self._embedded(encoder_input_ids_BS), attention_mask=None, attention_bias=bias)
        length = decoder_input_ids_BT.size(1)
        later_TT = torch.ones(length, length, dtype=torch.bool, device=decoder_input_ids_BT.device).triu(1)
        hidden_TBD = self.decoder(
            self._embedded(decoder_input_ids_BT),
            attention_mask=None,
            attention_bias=_bias(self.decoder_relative_pos_emb, length).masked_fill(later_TT, float("-inf")),
            context=encoded_SBD,
            context_mask=may_read,
        )
        weight_VD = self.output_layer.weight if not self.shape.tie_word_embeddings else self._shared_weight()
        if self.shape.tie_word_embeddings:  # Mesh TensorFlow's T5: a shared matrix is made for reading
            hidden_TBD = hidden_TBD * self.shape.hidden_size**-0.5
        if labels_BT is None:
            return logits(hidden_TBD, weight_VD, at_B)
        nats = summed_nats(hidden_TBD, weight_VD, labels_BT, mask_BT, self.shape.vocab_size)
        return nats if self.auxiliary is None else self.auxiliary.entered(nats, labels_BT.size(1))

    def all_layers(self) -> list[torch.nn.Module]:
        """The layers, in the order in which they work."""
        return [*self.encoder.layers, *self.decoder.layers]

    def blank_arguments(self, num_samples: int, isolated: bool, device: torch.device) -> list[Tensor]:
        """A micro batch of the shape that training gives `forward`, with nothing in it."""
        assert not isolated, "what an encoder reads is not isolated"
        encoder_input_ids_BS = torch.zeros(num_samples, self.shape.seq_len, dtype=torch.int64, device=device)
        decoder_input_ids_BT = torch.zeros(num_samples, self.shape.target_len, dtype=torch.int64, device=device)
        return [
            encoder_input_ids_BS,
            decoder_input_ids_BT,
            torch.ones(decoder_input_ids_BT.shape, device=device),
            decoder_input_ids_BT,
        ]

    def _embedded(self, tokens_BS: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(input_ids=tokens_BS, position_ids=None)
        return embedded

    def _shared_weight(self) -> Tensor:
        weight: Tensor = self.shared_embedding_or_output_weight()
        return weight


def _bias(table: torch.nn.Module, length: int) -> Tensor:
    """The biases of this process's heads among `length` positions, [1, H, length, length].

    In one piece: of a view of [length, length, H], as the table gives it, each layer would make a copy on a GPU.
    """
    bias_1HSS: Tensor = table(length, length)
    if parallel.tensor_size() == 1:
        return bias_1HSS.contiguous()
    last = scatter_to_tensor_model_parallel_region(bias_1HSS.permute(0, 2, 3, 1), parallel.tensor_group())
    return last.permute(0, 3, 1, 2).contiguous()
