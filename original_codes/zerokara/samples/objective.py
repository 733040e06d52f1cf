"""Training objectives: tokens of samples → a `Batch` of inputs and labels.

Shapes: b samples, n raw tokens each, S input positions (of the encoder, where there is one), T predicted positions.

With intra-document masking each position has a *segment*, the number of its document in the sequence. As an input, an
end-of-document token (EOD) opens the next document, as a ``<s>`` would. Example, inputs 7 8 EOD 5 6 EOD: segments
0 0 1 1 1 2.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import regex
from numpy.typing import NDArray

from zerokara.base.errors import Fault, UserError
from zerokara.config.data import SampleLengths
from zerokara.config.model import ModelSettings
from zerokara.samples.order import GOLDEN, mix
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.held_out import splitmix64

Ids = NDArray[np.int64]

_GRAPHEME = regex.compile(r"\X")  # a character with its marks
_SENTINEL = re.compile(r"<extra_id_(\d+)>")


@dataclass(frozen=True)
class Batch:
    """One micro batch, as the model takes it."""

    inputs: Ids
    """Input ids of the model, or of its encoder where it has one, [b, S]."""
    labels: Ids
    """The id to predict at each position, [b, T]."""
    loss_mask: NDArray[np.float32]
    """1 where the prediction counts, 0 on padding, [b, T]."""
    segments: Ids | None = None
    """Segments of the inputs for intra-document masking, ascending from 0, [b, S]; None without it."""
    document_offsets: NDArray[np.int32] | None = None
    """With `segments`: beginnings of the documents in the flattened batch, and at the end its size b · S,
    [documents + 1]; known here, without asking a device how many there are."""
    decoder_inputs: Ids | None = None
    """Input ids of the decoder of an encoder-decoder model, [b, T]: a start token, and the labels but for the last."""
    decoder_segments: Ids | None = None
    """With `segments` of an encoder-decoder: segments of the decoder's positions, [b, T]."""
    num_examples: Ids | None = None
    """With `segments` of packed examples: their number in a row, [b]; a segment of this number or above is padding."""
    sequence_numbers: Ids | None = None
    """Number of each sequence in the run, [b], from which the masks of dropout follow; None outside of training."""

    @property
    def num_pairs(self) -> float:
        """Twice the pairs of positions between which causal attention is computed; with offsets, within documents."""
        if self.document_offsets is None:
            return float(self.labels.size * self.labels.shape[1])
        return float(np.square(np.diff(self.document_offsets).astype(np.float64)).sum())

    def arguments(self) -> list[NDArray[np.int64] | NDArray[np.float32] | NDArray[np.int32]]:
        """Return the arrays in the order of the model's arguments."""
        segments = (self.segments, self.document_offsets, self.decoder_segments, self.num_examples)
        optional = (array for array in (self.decoder_inputs, *segments) if array is not None)
        numbers = np.zeros(len(self.inputs), np.int64) if self.sequence_numbers is None else self.sequence_numbers
        return [self.inputs, self.labels, self.loss_mask, numbers, *optional]


def first_in_segment(segments: Ids) -> NDArray[np.bool_]:
    """True where a position is the first of its segment in its row, [b, length]."""
    return np.diff(segments, axis=1, prepend=-1) != 0


def document_offsets(segments: Ids) -> NDArray[np.int32]:
    """`Batch.document_offsets` of these segments, [b, S]."""
    return np.append(np.flatnonzero(first_in_segment(segments)), segments.size).astype(np.int32)


@dataclass(frozen=True)
class Prompt:
    """The ids from which a model generates; `encoder_ids` are empty where it has no encoder."""

    encoder_ids: list[int]
    decoder_ids: list[int]


@dataclass(frozen=True)
class Causal:
    """Next-token prediction. Every token counts, the EOD too, or a model would never learn to stop."""

    lengths: SampleLengths
    masking_eod_id: int | None = None
    """Id of the EOD with intra-document masking, None without it."""
    sentinel_ids: ClassVar[list[int]] = []

    def __call__(self, tokens: Ids, keys: Ids) -> Batch:
        """Make the batch of `tokens` [b, S + 1], whatever the keys."""
        mask = np.ones(tokens[:, 1:].shape, np.float32)
        inputs, labels = np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
        eod_id = self.masking_eod_id
        if eod_id is None:
            return Batch(inputs, labels, mask)
        segments = np.cumsum(inputs == eod_id, axis=1, dtype=np.int64)
        return Batch(inputs, labels, mask, segments, document_offsets(segments))

    def prompt(self, encoder: Encoder, text: str, max_new_tokens: int) -> Prompt:
        """Encode the text, with room for `max_new_tokens`: the beginning of a long one is cut off."""
        return Prompt([], encoder.prompt_ids(text)[-max(1, self.lengths.input - max_new_tokens) :])


@dataclass(frozen=True)
class SpanCorruption:
    """Predict masked spans from the text around them (Raffel et al., 2020).

    Of a sample's n tokens N are noise, in M masked spans; both follow from the length (`config.data`), so that all
    samples have the same lengths. The encoder input is the text with a sentinel token in place of each masked span, and
    an end token; the decoder target is each sentinel followed by the tokens of its span, and an end token.
    """

    lengths: SampleLengths
    seed: int
    sentinel_ids: Ids
    """Control tokens that are predicted all the same: <extra_id_0>, <extra_id_1>, …"""
    end_id: int
    """End token of the encoder input and the decoder target."""
    start_id: int
    """First input of the decoder."""

    def __call__(self, tokens: Ids, keys: Ids) -> Batch:
        """Make the batch of `tokens` [b, raw], with the samples' keys [b], unique in the run, which place the spans."""
        noise = noise_mask(self.lengths, self.seed, keys)
        inputs, labels = (with_sentinels(tokens, part, self.sentinel_ids, self.end_id) for part in (noise, ~noise))
        decoder_inputs = np.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=self.start_id)
        return Batch(inputs, labels, np.ones(labels.shape, np.float32), decoder_inputs=decoder_inputs)

    def prompt(self, encoder: Encoder, text: str, max_new_tokens: int) -> Prompt:
        """Encode a text whose sentinels the decoder is to fill in; a text without any gets one at its end."""
        parts = re.split(r"(<extra_id_\d+>)", text)
        if len(parts) == 1:
            parts.append("<extra_id_0>")
        ids: list[int] = []
        for part, following in pairwise([*parts, ""]):
            # In training the space before a masked span belongs to the span.
            part = part.rstrip() if _SENTINEL.fullmatch(following) else part
            sentinel = _SENTINEL.fullmatch(part)
            number = int(sentinel.group(1)) if sentinel else len(self.sentinel_ids)
            ids += self.sentinel_ids[number : number + 1].tolist() or encoder.encode(part).tolist()
        return Prompt([*ids[-(self.lengths.input - 1) :], self.end_id], [self.start_id])


def noise_mask(lengths: SampleLengths, seed: int, keys: Ids) -> NDArray[np.bool_]:
    """True where a token is noise, [b, n], for samples of these keys.

    A text begins with a span that is kept, then a masked one, and so on in turn; every way to cut the noise tokens into
    spans, and the others, is equally likely. SplitMix64 (`order.mix`) draws a number for each position at which a span
    could end, from the seed and the key, and the spans end at the smallest.
    """
    kept = _span_lengths(lengths.raw - lengths.num_noise_tokens, lengths.num_spans, seed, keys, stream=0)
    noise = _span_lengths(lengths.num_noise_tokens, lengths.num_spans, seed, keys, stream=1)
    in_turn = np.stack([kept, noise], axis=2).reshape(len(keys), 2 * lengths.num_spans)
    changes = np.zeros((len(keys), lengths.raw), dtype=np.int64)
    begins = np.cumsum(in_turn, axis=1)[:, :-1]
    np.put_along_axis(changes, begins, 1, axis=1)
    return np.cumsum(changes, axis=1) % 2 == 1


def with_sentinels(tokens: Ids, masked: NDArray[np.bool_], sentinels: Ids, end_id: int) -> Ids:
    """Return `tokens` [b, n] with the next of the sentinels in place of each masked span, and the end token.

    Example, with X Y and end E: a b c d e f with c d and f masked gives a b X e Y E, the encoder input of the noise;
    with the others masked, X c d Y f E, its decoder target.
    """
    first = masked.copy()
    first[:, 1:] &= ~masked[:, :-1]
    number = np.cumsum(first, axis=1) - 1
    replaced = np.where(first, sentinels[np.maximum(number, 0)], tokens)
    rest = replaced[~masked | first].reshape(len(tokens), -1)  # as many in each sample
    return np.concatenate([rest, np.full((len(tokens), 1), end_id, dtype=np.int64)], axis=1)


def _span_lengths(num_tokens: int, num_spans: int, seed: int, keys: Ids, stream: int) -> Ids:
    """Draw lengths, at least 1 each, of `num_spans` spans of `num_tokens` together, [b, M]; any split is as likely."""
    if num_spans == 1:
        return np.full((len(keys), 1), num_tokens, dtype=np.int64)
    of_key = splitmix64(keys.astype(np.uint64) ^ np.uint64(mix(mix(seed + GOLDEN) + stream)))
    drawn = splitmix64(of_key[:, None] + np.arange(1, num_tokens, dtype=np.uint64) * np.uint64(GOLDEN))
    cuts = np.sort(np.argpartition(drawn, num_spans - 2, axis=1)[:, : num_spans - 1], axis=1) + 1
    edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, num_tokens)))
    return np.diff(edges, axis=1).astype(np.int64)


Objective = Causal | SpanCorruption


def objective(model: ModelSettings, encoder: Encoder, seed: int, intra_document_masking: bool) -> Objective:
    """Return the objective of running text for the architecture; masked spans cross documents.

    Raises UserError if a sample has more masked spans than the tokenizer has sentinels.
    """
    lengths, sentinels = model.text_lengths, encoder.sentinel_ids
    if not model.traits.is_encoder_decoder:
        return Causal(lengths, encoder.eos_id if intra_document_masking else None)
    if lengths.num_spans > len(sentinels):
        needed = f"a sample of {lengths.raw} tokens needs one for each of its {lengths.num_spans} masked spans"
        rule = f"has {len(sentinels)} sentinel tokens <extra_id_N>; {needed}"
        other = "lower seq_len" if sentinels else "choose a decoder (architecture)"
        remedy = f"train a tokenizer with extra_ids: {max(100, lengths.num_spans)} (step 1), or {other}"
        raise UserError(Fault(str(encoder.model_path), rule, "input_tokenizer_file", remedy=remedy))
    return SpanCorruption(lengths, seed, np.array(sentinels, dtype=np.int64), encoder.eos_id, encoder.pad_id)


def beginnings(texts: Iterable[str], has_span: bool) -> tuple[str, ...]:
    """Return prompts: the first words of each text that is not blank, with `has_span` a masked span behind them.

    Example: "Nel mezzo del cammin di nostra vita mi ritrovai" gives "Nel mezzo del cammin", with a span "Nel mezzo del
    cammin <extra_id_0> vita mi ritrovai".
    """
    prompts = []
    for line in filter(None, (text.strip().partition("\n")[0] for text in texts)):
        words, number, space = line.split(), 4, " "
        if len(line) > 15 * len(words):  # a script without spaces
            words, number, space = _GRAPHEME.findall(line), 10, ""
        following = ["<extra_id_0>", *words[number + 2 : 2 * number + 2]] if has_span else []
        prompts.append(space.join([*words[:number], *following]))
    return tuple(dict.fromkeys(prompts))
