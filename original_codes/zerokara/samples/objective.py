"""What the model reads and what it must predict: a table entry for each objective of training.

In: tokens of the corpus, of samples that have keys. Out: a `Batch` of arrays. Shapes: b samples, S positions that are
read, T that are predicted.

Where documents are isolated, each position has the number of its document in the sequence, its *segment*: how many
ends of documents (EOD) stand among the inputs up to it, itself included. An EOD that is read opens the next document,
as a ``<s>`` would. Example, inputs 7 8 EOD 5 6 EOD: segments 0 0 1 1 1 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.sample_lengths import SampleLengths
from zerokara.errors import UserError
from zerokara.samples import spans
from zerokara.tokenizer.encoder import Encoder

Ids = NDArray[np.int64]

_SENTINEL = re.compile(r"<extra_id_(\d+)>")


@dataclass(frozen=True)
class Batch:
    """One micro batch as the model takes it."""

    inputs: Ids
    """Ids that the model (its encoder, where it has one) reads, [b, S]."""
    labels: Ids
    """The id to predict at each position, [b, T]."""
    loss_mask: NDArray[np.float32]
    """1 where the prediction counts, 0 on padding, [b, T]."""
    segments: Ids | None = None
    """The document in the sequence, counted from 0, [b, S]; None where documents are not told apart."""
    written: Ids | None = None
    """Ids that a decoder beside an encoder reads, [b, T]: a start, and the labels but for the last."""

    def arguments(self) -> list[NDArray[np.int64] | NDArray[np.float32]]:
        """The arrays in the order in which the model takes them."""
        rest = (self.segments, self.written)
        return [self.inputs, self.labels, self.loss_mask, *(array for array in rest if array is not None)]


@dataclass(frozen=True)
class Prompt:
    """The beginning of a text that the model is to write."""

    read: list[int]
    """What an encoder reads; empty where there is none."""
    begun: list[int]
    """What the decoder reads at first."""


class Objective(Protocol):
    """An entry of the table, for one run."""

    @property
    def lengths(self) -> SampleLengths:
        """Of one sample."""
        ...

    @property
    def marks(self) -> list[int]:
        """Control ids that are predicted as well, beside the end of a text."""
        ...

    def __call__(self, tokens: Ids, keys: Ids, real: NDArray[np.bool_] | None = None) -> Batch:
        """Make the batch of `tokens` [b, taken + overlap], whose keys [b] no other sample of the run has.

        `real`, like `tokens`, is False on padding.
        """
        ...

    def target_counts(self, token_counts: Ids) -> NDArray[np.float64]:
        """How often each id is predicted, in proportion, where `token_counts` [ids] occur in the corpus.

        The entropy of it is the unigram-entropy baseline: the loss of a model that knows only how frequent each target
        of this objective is.
        """
        ...

    def prompt(self, encoder: Encoder, text: str, most_tokens: int) -> Prompt:
        """The ids of a prompt, with room for `most_tokens` behind them."""
        ...


@dataclass(frozen=True)
class Causal:
    """Predict each next token. Every token counts, the end of a document too, or a model would never learn to stop."""

    lengths: SampleLengths
    isolate_at: int | None = None
    """The EOD's id where documents are isolated."""

    @classmethod
    def from_config(cls, config: PretrainConfig, encoder: Encoder) -> Causal:
        """The entry of a run."""
        return cls(config.lengths, encoder.eos_id if config.intra_document_masking else None)

    @property
    def marks(self) -> list[int]:
        """None."""
        return []

    def __call__(self, tokens: Ids, keys: Ids, real: NDArray[np.bool_] | None = None) -> Batch:
        """Make the batch of `tokens` [b, S + 1]."""
        mask = np.ones(tokens[:, 1:].shape, np.float32) if real is None else real[:, 1:].astype(np.float32)
        inputs, labels = np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
        at = self.isolate_at
        segments = None if at is None else np.cumsum(inputs == at, axis=1, dtype=np.int64)
        return Batch(inputs, labels, mask, segments)

    def target_counts(self, token_counts: Ids) -> NDArray[np.float64]:
        """The corpus's own: each token is predicted once a pass."""
        return token_counts.astype(np.float64)

    def prompt(self, encoder: Encoder, text: str, most_tokens: int) -> Prompt:
        """The text's ids; one that would fill the model's reading length keeps its end."""
        return Prompt([], encoder.prompt_ids(text)[-max(1, self.lengths.input - most_tokens) :])


@dataclass(frozen=True)
class SpanCorruption:
    """Read a text with gaps, write what stands in them (`spans`)."""

    lengths: SampleLengths
    seed: int
    sentinels: Ids
    """Ids of <extra_id_0>, <extra_id_1>, …"""
    end_id: int
    """What ends both sides."""
    start_id: int
    """What the decoder reads at first."""

    @classmethod
    def from_config(cls, config: PretrainConfig, encoder: Encoder) -> SpanCorruption:
        """The entry of a run.

        Raises:
            UserError: a sample has more gaps than the tokenizer has sentinels.
        """
        lengths, there = config.lengths, encoder.sentinel_ids
        if lengths.num_spans > len(there):
            rule = (
                f"has {len(there)} sentinels <extra_id_N>; {lengths.raw} tokens have {lengths.num_spans} masked spans, "
                "each with one of its own"
            )
            remedy = f"train a tokenizer with extra_ids: {max(100, lengths.num_spans)} (step 1), or lower seq_len"
            raise UserError(config.fault("input_tokenizer_file", rule, remedy))
        return cls(lengths, config.seed, np.array(there, dtype=np.int64), encoder.eos_id, encoder.pad_id)

    @property
    def marks(self) -> list[int]:
        """The sentinels."""
        return [int(sentinel) for sentinel in self.sentinels]

    def __call__(self, tokens: Ids, keys: Ids, real: NDArray[np.bool_] | None = None) -> Batch:
        """Make the batch of `tokens` [b, taken]; a sample counts as a whole, if its first token is real."""
        noise = spans.noise_mask(self.lengths, self.seed, keys)
        read, labels = spans.corrupt(tokens, noise, self.sentinels, self.end_id)
        counts = np.ones(len(tokens), np.bool_) if real is None else real[:, 0]
        mask = np.repeat(counts[:, None].astype(np.float32), labels.shape[1], axis=1)
        return Batch(read, labels, mask, written=_shifted(labels, self.start_id))

    def target_counts(self, token_counts: Ids) -> NDArray[np.float64]:
        """Of one sample, expected: its share of masked tokens, as frequent as in the corpus, each sentinel and the end.

        Where in a sample a token stands says nothing about which it is, so that each is masked equally often.
        """
        sentinels = self.sentinels[: self.lengths.num_spans]
        expected = np.zeros(max(len(token_counts), int(sentinels.max()) + 1, self.end_id + 1))
        expected[: len(token_counts)] = token_counts * (self.lengths.num_noise_tokens / token_counts.sum())
        expected[sentinels] += 1
        expected[self.end_id] += 1
        return expected

    def prompt(self, encoder: Encoder, text: str, most_tokens: int) -> Prompt:
        """Of a text with sentinels, which the decoder is to fill; one without gets one at its end."""
        parts = re.split(r"(<extra_id_\d+>)", text)
        if len(parts) == 1:
            parts.append("<extra_id_0>")
        ids: list[int] = []
        for part, behind in pairwise([*parts, ""]):
            # A gap took the space before it along.
            part = part.rstrip() if _SENTINEL.fullmatch(behind) else part
            sentinel = _SENTINEL.fullmatch(part)
            number = int(sentinel.group(1)) if sentinel else len(self.sentinels)
            ids += encoder.encode(part).tolist() if number >= len(self.sentinels) else [int(self.sentinels[number])]
        return Prompt([*ids[-(self.lengths.input - 1) :], self.end_id], [self.start_id])


def _shifted(labels: Ids, start_id: int) -> Ids:
    """What the decoder reads while it predicts `labels`: a start, and each label behind its prediction."""
    return np.concatenate([np.full((len(labels), 1), start_id, dtype=np.int64), labels[:, :-1]], axis=1)


OBJECTIVES: dict[str, Callable[[PretrainConfig, Encoder], Objective]] = {
    "causal": Causal.from_config,
    "span_corruption": SpanCorruption.from_config,
}


def objective(config: PretrainConfig, encoder: Encoder) -> Objective:
    """The objective of a run: the table's entry for its architecture.

    Raises:
        UserError: the tokenizer lacks what the objective needs.
    """
    return OBJECTIVES[config.traits.objective](config, encoder)


def side_by_side(
    prompts: Sequence[Prompt], written: Sequence[list[int]], fill_id: int
) -> tuple[Ids, dict[str, NDArray[np.int64]]]:
    """The model's first and its named arguments for its logits at the end of each text: `begun` and what is `written`.

    What fills a row up is read by nothing that counts: a decoder is causal, an encoder has a mask.
    """
    texts = [prompt.begun + tokens for prompt, tokens in zip(prompts, written, strict=True)]
    rows, named = _filled(texts, fill_id), {"at_B": np.array([len(text) - 1 for text in texts], dtype=np.int64)}
    if not prompts[0].read:
        return rows, named
    read = [prompt.read for prompt in prompts]
    named |= {"decoder_input_ids_BT": rows, "encoder_attention_mask_BS": _filled([[1] * len(each) for each in read], 0)}
    return _filled(read, fill_id), named


def _filled(rows: Sequence[Sequence[int]], fill_id: int) -> Ids:
    longest = max(map(len, rows))
    return np.array([[*row, *[fill_id] * (longest - len(row))] for row in rows], dtype=np.int64)
