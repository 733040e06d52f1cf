"""Text to tokens (step 2), the order and the stages in which the tokens are read, and the lengths of samples."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zerokara.config.settings import (
    Auto,
    Entry,
    Fraction,
    Names,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    Text,
    Words,
    as_tuple,
)

Weights = Annotated[Literal["proportional", "replay"] | tuple[NaturalFloat, ...], BeforeValidator(as_tuple)]
OrderKind = Literal["shuffle", "sequential"]
REPLAY_SHARE = 0.25
"""Replayed text in the mixture `replay`: what kept the old language when a model went from English to German (Ibrahim
et al., 2024, arXiv 2403.08763); for a new corpus of the same language 0.05 did."""
MIN_CONTEXT = 0.5
"""Share of the context that, in bits per byte, stands before each token of a document that is longer than it."""


class DataSettings(Settings):
    """Text to tokens (step 2)."""

    input_jsonl: Names = ("data/embedded/corpus.jsonl",)
    """Raw text, each entry one source: a file (.jsonl or .txt, each plain, .gz or .zst; .parquet), a glob, a folder, a
    file that lists such entries ("@files.txt"), or a dataset on the Hub (hf://datasets/owner/name[@revision][/path])."""
    text_field: Text = "text"
    """Field of a JSON line, or column of a .parquet, that holds the text."""
    txt_document: Literal["file", "line"] = "file"
    """Document of a .txt file: the whole `file`, or each `line`."""
    input_tokenizer_file: Text = "tokenizers/embedded/tokenizer.model"
    """The tokenizer.model of step 1, or another: a SentencePiece model, a tokenizer.json, or a Hugging Face folder,
    such as that of the model that init_from names."""
    end_of_document: Text = "auto"
    """Token that ends each document, where input_tokenizer_file is a tokenizer.json; `auto` is the only one that the
    files beside it name as eos_token. Where they name several: the one that did so in the model's pretraining."""
    output_prefix: Text = "data/embedded/tokens"
    """Path and beginning of the name of the token files: <output_prefix>_text_document.bin and .idx."""
    num_workers: PositiveInt | Auto = "auto"
    """Worker processes, in parts on several machines those of each; `auto` is one per core."""
    max_bad_fraction: Fraction = 0.01
    """Largest tolerated share of bad documents, and of bad bytes of the files on disk. Bad are lines that are no
    documents or longer than 64 MiB, and what damaged files lost or cannot verify (all of a truncated packed file)."""
    valid_jsonl: Words = ()
    """Held-out text of your own, entries as those of input_jsonl: the validation data, in place of a drawn share."""
    valid_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.01
    """Share of each source's documents held out for validation, at random; 0 for none. For use without valid_jsonl."""
    valid_min_documents: NaturalInt = 10
    """Least number of validation documents from each source (unless none are drawn)."""
    split_seed: NaturalInt = 1234
    """Seed of that draw."""

    @property
    def entries(self) -> list[tuple[str, str]]:
        """The sources, each with the setting that names it: those to train on, then the held-out text."""
        return [(key, entry) for key in ("input_jsonl", "valid_jsonl") for entry in getattr(self, key)]


class Stage(Entry):
    """One stage of a curriculum. A setting not given is None; `order` and `source_weights` are then the run's."""

    tokens: PositiveInt | Literal["rest"] | None = None
    source_weights: Weights | None = None
    source_tokens: Annotated[tuple[NaturalInt, ...], BeforeValidator(as_tuple)] | None = None
    order: OrderKind | None = None
    name: Text | None = None

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the stage; None for `rest`."""
        if self.source_tokens is not None:
            return sum(self.source_tokens)
        return self.tokens if isinstance(self.tokens, int) else None


class DataOrderSettings(Settings):
    """The order of the data (step 3)."""

    order: OrderKind = "shuffle"
    """`shuffle` cuts the text at other places and reads it in a new random order each epoch, `sequential` reads it in
    the order of the corpus."""
    source_weights: Weights = "proportional"
    """Mixture of the entries of input_jsonl (sources): `proportional` reads every token equally often; or a weight for
    each, e.g. [3, 1] reads three tokens of the first for every one of the second, whatever their sizes. `replay` is for
    init_from: the first entry is the new text, and a quarter of the tokens are of the others, text like the model's own
    that keeps it from forgetting."""
    max_epochs_per_source: PositiveFloat = 16.0
    """Most epochs of any one source; a run that would need more is refused before it starts."""
    stages: Annotated[tuple[Stage, ...], BeforeValidator(as_tuple)] = ()
    """Curriculum: consecutive stages of the run, for two sources e.g. [{tokens: 8e9, source_weights: [3, 1]}, {tokens:
    rest, source_weights: [0, 1], order: sequential, name: finish}]. Each has `tokens` (a number, or `rest` for the
    last) and its own `source_weights` and `order` where they differ from those above; or instead of tokens and weights
    `source_tokens`, an exact number for each source. A stage with another order than the one before restarts its
    sources. With train_tokens auto the run is as long as its stages; `rest` is `epochs` times the training tokens."""
    intra_document_masking: bool = False
    """Attention stays within each document of a sequence, and positions restart. Slower; good for short documents."""

    @property
    def is_mixture(self) -> bool:
        """True if each source is cut into samples by itself, and read by weight or in stages."""
        return bool(self.stages) or self.source_weights != "proportional"


@dataclass(frozen=True)
class SampleLengths:
    """The lengths of a training sample, in tokens."""

    raw: int  # taken from the corpus
    input: int  # of the model, or of its encoder where it has one
    target: int  # predicted
    overlap: int = 0  # beyond `raw`, shared with the next sample
    num_noise_tokens: int = 0  # hidden from the encoder
    num_spans: int = 0  # masked spans that hold the noise tokens

    def samples_in(self, num_tokens: int) -> int:
        """Number of samples in `num_tokens` tokens."""
        return max(0, (num_tokens - self.overlap) // self.raw)

    @property
    def requirement(self) -> str:
        """Minimum number of tokens for one sample, for display."""
        if self.num_noise_tokens:
            return f"{self.raw:,} (an encoder input of {self.input:,} after span corruption)"
        return f"seq_len + {self.overlap} = {self.raw + self.overlap:,}"


def causal(seq_len: int) -> SampleLengths:
    """Return lengths for next-token prediction: a sample's last label is the next one's first token."""
    return SampleLengths(raw=seq_len, input=seq_len, target=seq_len, overlap=1)


def packed(input_length: int, target_length: int, is_encoder_decoder: bool) -> SampleLengths:
    """Return lengths for rows of packed examples; both inputs of an encoder-decoder count as tokens of the corpus."""
    raw = input_length + target_length if is_encoder_decoder else input_length
    return SampleLengths(raw=raw, input=input_length, target=target_length)


def with_spans(seq_len: int, noise_density: float, mean_span_length: float) -> SampleLengths:
    """Return lengths for span corruption (Raffel et al., 2020) with an encoder input of `seq_len` tokens, 3 or more.

    The raw length n is the longest whose encoder input still fits. N = round(n · density) of its tokens are noise, in
    M = round(N / mean length) masked spans. The encoder input is the other n − N tokens, a sentinel for each span and
    an end token; the decoder target is the noise tokens, a sentinel for each span and an end token. The input length is
    met exactly, except where half of the tokens or more are noise in spans of one token: there it may be one shorter.
    Source of the form and of the roundings: T5's preprocessors (`random_spans_helper`).

    Example: density 0.15, mean length 3, encoder input 512. Then n = 568, N = 85, M = 28, the target has 114 tokens.
    """
    lengths = _of_raw(2, noise_density, mean_span_length)
    while (longer := _of_raw(lengths.raw + 1, noise_density, mean_span_length)).input <= seq_len:
        lengths = longer
    return lengths


def _of_raw(raw: int, noise_density: float, mean_span_length: float) -> SampleLengths:
    noise = min(max(round(raw * noise_density), 1), raw - 1)
    spans = min(max(round(noise / mean_span_length), 1), raw - noise)
    return SampleLengths(raw, raw - noise + spans + 1, noise + spans + 1, num_noise_tokens=noise, num_spans=spans)
