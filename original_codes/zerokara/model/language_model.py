"""The two models: a decoder by itself, and an encoder-decoder; batch first, they return logits or a loss.

`Decoder` is megatron-core's GPTModel (0.16.1), `EncoderDecoder` its T5Model as T5 version 1.1 (Raffel et al., 2020).
megatron-core builds the layers and the relative position biases; the way through them, projection and loss are ours.

T5's encoder and decoder have one table each for all their layers: a bias for each bucket of distances and each head,
added to the scores, which are not divided by the root of the head dimension. Training samples have equal lengths and no
padding; shorter inputs (a prompt) come with an attention mask. Packed examples come with segments: attention stays
within an example in the encoder, in the decoder, and from the decoder to the encoder. A relative position bias depends
on the distance of two positions alone, and so is that of the example by itself.

Shape suffixes: B batch, S sequence (the encoder's), T decoder length, N documents, H heads of this process, D hidden
size, V rows of the (padded) vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from zerokara.model import attention, cpu_attention, layers, parallel
from zerokara.model.attention import intra_document_mask, positions_in_documents, rotation_tables, same_segment
from zerokara.model.dropout import Dropout
from zerokara.model.experts import PADDING, AuxiliaryLoss
from zerokara.model.layers import Kernels, Layer, sequence_first
from zerokara.model.loss import Projection, Teachers, cross_entropy
from zerokara.model.megatron_core import (
    GPTModel,
    T5Model,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from zerokara.model.shapes import ModelShape


class LanguageModel:
    """The part that a decoder and an encoder-decoder have in common; stands before a model class of megatron-core.

    The tensors of a batch are arguments by themselves, in the order of `Batch.arguments`: the hooks of torch's modules,
    and so of DeepSpeed's, see no others.
    """

    embedding: Any
    output_layer: Any
    shared_embedding_or_output_weight: Any
    shape: ModelShape
    kernels: Kernels
    dropout: Dropout
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

    def _embedded(self, ids_BS: Tensor, positions_BS: Tensor | None = None, place: int = 0) -> Tensor:
        """Return the embeddings as hidden states lie (`layers`), with dropout at `place`, each stack its own."""
        # megatron-core leaves what it will scatter as it is; without sequence parallelism it scatters nothing.
        self.embedding.reduce_scatter_embeddings = layers.is_batch_first(ids_BS)
        return self.dropout(self.embedding(ids_BS, position_ids=positions_BS), place)

    def projection(self) -> Projection:
        tied, group = self.shape.tie_word_embeddings, parallel.tensor_group() if parallel.tensor_size() > 1 else None
        weight_VD = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return Projection(weight_VD, self.shape.vocab_size, group)

    def _logits(self, hidden_SBD: Tensor, at_B: Tensor | None) -> Tensor:
        """Return logits [B, S, V], with `at_B` those of one position of each row, [B, 1, V]."""
        if at_B is not None:
            hidden_SBD = hidden_SBD[at_B, torch.arange(len(at_B), device=at_B.device)].unsqueeze(0)
        tensor_group, weight_VD = parallel.tensor_group(), self.projection().weight_VD
        hidden_BSD = copy_to_tensor_model_parallel_region(hidden_SBD, group=tensor_group).transpose(0, 1)
        whole_BSV: Tensor = gather_from_tensor_model_parallel_region(linear(hidden_BSD, weight_VD), group=tensor_group)
        return whole_BSV


class Decoder(LanguageModel, GPTModel):
    """A decoder-only model: ``decoder(tokens_BS)`` returns logits, with labels the summed cross-entropy."""

    teachers: Teachers | None = None
    rotation_factor = 1.0  # of rotated queries and keys, by YaRN

    def forward(
        self,
        tokens_BS: Tensor,
        labels_BS: Tensor | None = None,
        mask_BS: Tensor | None = None,
        sequence_numbers_B: Tensor | None = None,
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
        `at_B` the logits are those of that one position of each row, [B, 1, V]. The masks of dropout follow from
        `sequence_numbers_B`. In training `teachers` add to the loss.
        """
        self.dropout.begin(sequence_numbers_B)
        read = tokens_BS, segments_BS, document_offsets_N1, num_examples_B
        hidden_SBD = self.hidden_states(*read)
        if labels_BS is None:
            return self._logits(hidden_SBD, at_B)
        lesson = self.teachers.lesson(*read) if self.teachers and torch.is_grad_enabled() else None
        return cross_entropy(hidden_SBD, labels_BS, mask_BS, per_token, self.projection(), self.kernels, lesson)

    def hidden_states(
        self,
        tokens_BS: Tensor,
        segments_BS: Tensor | None = None,
        document_offsets_N1: Tensor | None = None,
        num_examples_B: Tensor | None = None,
    ) -> Tensor:
        """Return what the output projection takes, [S, B, D]; the arguments are those of `forward`."""
        positions_BS = torch.arange(tokens_BS.size(1), device=tokens_BS.device).expand_as(tokens_BS)
        attention_mask = None
        if segments_BS is not None:
            positions_BS, attention_mask = positions_in_documents(segments_BS), document_offsets_N1
            weight, head_dim = self.embedding.word_embeddings.weight, self.shape.head_dim
            if attention_mask is None or not attention.has_variable_length_kernel(weight, head_dim):
                attention_mask = intra_document_mask(segments_BS)
        tables = None
        if self.position_embedding_type == "rope":
            angles = sequence_first(self.rotary_pos_emb(tokens_BS.size(1)))
            tables = rotation_tables(angles, self.embedding.word_embeddings.weight.dtype, self.rotation_factor)
        hidden_SBD = self.decoder(
            self._embedded(tokens_BS, positions_BS),
            attention_mask,
            rotary_pos_emb=tables,
            padding_mask=self._examples_or_padding(segments_BS, num_examples_B),
        )
        return sequence_first(hidden_SBD)

    def all_layers(self) -> list[Layer]:
        """The layers, in the order in which they are computed."""
        return list(self.decoder.layers)


class EncoderDecoder(LanguageModel, T5Model):
    """``model(encoder_input_ids_BS, decoder_input_ids_BT=…)`` returns logits, with labels the summed cross-entropy."""

    def forward(
        self,
        encoder_input_ids_BS: Tensor,
        labels_BT: Tensor | None = None,
        mask_BT: Tensor | None = None,
        sequence_numbers_B: Tensor | None = None,
        decoder_input_ids_BT: Tensor | None = None,
        segments_BS: Tensor | None = None,
        decoder_segments_BT: Tensor | None = None,
        num_examples_B: Tensor | None = None,
        at_B: Tensor | None = None,
        encoder_attention_mask_BS: Tensor | None = None,
        per_token: bool = False,
    ) -> Tensor:
        """Return logits [B, T, V], or with labels nats, as `Decoder.forward` does.

        `decoder_input_ids_BT` is required: a start token, and the target shifted right by one. Attention stays within
        the examples of `segments_BS` and `decoder_segments_BT` (`Batch.segments`); both or none are given.
        `encoder_attention_mask_BS` is 0 at padding.
        """
        assert decoder_input_ids_BT is not None, "a decoder needs an input"
        self.dropout.begin(sequence_numbers_B)
        bias_1HSS = _relative_position_bias(self.encoder_relative_pos_emb, encoder_input_ids_BS.size(1))
        bias_1HTT = _relative_position_bias(self.decoder_relative_pos_emb, decoder_input_ids_BT.size(1))
        context_mask = None if encoder_attention_mask_BS is None else encoder_attention_mask_BS[:, None, None].bool()
        encoder_mask = context_mask
        if segments_BS is None:
            decoder_mask = torch.ones_like(bias_1HTT[:, :1], dtype=torch.bool).tril()
        else:
            assert decoder_segments_BT is not None
            encoder_mask = same_segment(segments_BS, segments_BS)
            # Padding of a decoder target may have none in the encoder input to attend to, and then attends to the last
            # example: with nothing at all the softmax would be 0 / 0.
            context_mask = same_segment(decoder_segments_BT.minimum(segments_BS[:, -1:]), segments_BS)
            decoder_mask = intra_document_mask(decoder_segments_BT)
        encoded_SBD = self.encoder(
            self._embedded(encoder_input_ids_BS),
            **_biased(bias_1HSS, encoder_mask),
            padding_mask=self._examples_or_padding(segments_BS, num_examples_B),
        )
        hidden_TBD = self.decoder(
            self._embedded(decoder_input_ids_BT, place=-1),
            **_biased(bias_1HTT, decoder_mask),
            context=encoded_SBD,
            context_mask=context_mask,
            padding_mask=self._examples_or_padding(decoder_segments_BT, num_examples_B),
        )
        hidden_TBD = sequence_first(hidden_TBD)
        if self.shape.tie_word_embeddings:  # Mesh TensorFlow's T5: a shared matrix has the scale of an embedding
            hidden_TBD = hidden_TBD * self.shape.hidden_size**-0.5
        if labels_BT is None:
            return self._logits(hidden_TBD, at_B)
        return cross_entropy(hidden_TBD, labels_BT, mask_BT, per_token, self.projection(), self.kernels)

    def all_layers(self) -> list[Layer]:
        """The layers, in the order in which they are computed."""
        return [*self.encoder.layers, *self.decoder.layers]


def _biased(bias_1HSS: Tensor, mask: Tensor | None) -> dict[str, Tensor | None]:
    """The bias and the mask of a stack, as its layers take them.

    A mask for each sample stays apart where attention can take both: together they are [B, H, S, S].
    """
    if mask is None:
        return {"attention_mask": None, "attention_bias": bias_1HSS}
    if mask.size(0) > 1 and mask.size(2) > 1 and cpu_attention.serves_bias(bias_1HSS):
        return {"attention_mask": mask, "attention_bias": bias_1HSS}
    return {"attention_mask": None, "attention_bias": bias_1HSS.masked_fill(~mask, float("-inf"))}


def _relative_position_bias(table: torch.nn.Module, length: int) -> Tensor:
    """The bias of this process's heads among `length` positions, [1, H, length, length].

    Contiguous: of a view of [length, length, H], as the table gives it, each layer would make a copy on a GPU.
    """
    bias_1HSS: Tensor = table(length, length)
    if parallel.tensor_size() == 1:
        return bias_1HSS.contiguous()
    heads_last = scatter_to_tensor_model_parallel_region(bias_1HSS.permute(0, 2, 3, 1), parallel.tensor_group())
    return heads_last.permute(0, 3, 1, 2).contiguous()
