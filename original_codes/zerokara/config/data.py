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
"""Share of replayed text in the mixture `replay`. It preserved the old language when a model moved from English to
German (Ibrahim et al., 2024, arXiv 2403.08763); for a new corpus in the same language 0.05 was enough."""
MIN_CONTEXT = 0.5
"""Bits per byte: minimum share of the context that precedes each token of a document longer than the context, after the
first window."""


class DataSettings(Settings):
    """Text to tokens (step 2)."""

    input_jsonl: Names = ("data/embedded/corpus.jsonl",)
    """Raw text; each entry is one source: a file (.jsonl or .txt, plain or compressed as .gz or .zst; or .parquet), a
    glob, a folder, a file that lists such entries ("@files.txt"), or a dataset on the Hub
    (hf://datasets/owner/name[@revision][/path])."""
    text_field: Text = "text"
    """Field of a JSON line, or column of a .parquet, that holds the text."""
    txt_document: Literal["file", "line"] = "file"
    """Document of a .txt file: the whole `file`, or each `line`."""
    input_tokenizer_file: Text = "tokenizers/embedded/tokenizer.model"
    """Tokenizer: the tokenizer.model of step 1, another SentencePiece model, a tokenizer.json, or a Hugging Face
    folder, such as that of init_from."""
    end_of_document: Text = "auto"
    """Token that ends each document, if input_tokenizer_file is a tokenizer.json. `auto` takes the only eos_token that
    the files beside it name. If they name several, give the one that ended documents in the model's pretraining."""
    output_prefix: Text = "data/embedded/tokens"
    """Path prefix of the token files: <output_prefix>_text_document.bin and .idx."""
    num_workers: PositiveInt | Auto = "auto"
    """Worker processes (per machine, if step 2 runs in parts on several); `auto` is one per core."""
    max_bad_fraction: Fraction = 0.01
    """Largest tolerated share of bad documents, and of bad bytes on disk. A line is bad if it holds no document or is
    longer than 64 MiB. Data that a damaged file lost or cannot verify is bad, too (all of a truncated .gz or .zst)."""
    valid_jsonl: Words = ()
    """Held-out text of your own, with entries as in input_jsonl; it is then all of the validation data."""
    valid_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.01
    """Share of each source's documents drawn at random for validation; 0 for none. Used only without valid_jsonl."""
    valid_min_documents: NaturalInt = 10
    """Minimum number of validation documents drawn from each source, unless valid_fraction is 0."""
    split_seed: NaturalInt = 1234
    """Seed of the draw of validation documents."""

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
    """`shuffle` cuts the text at different places in each epoch and reads it in a new random order; `sequential` reads
    it in the order of the corpus."""
    source_weights: Weights = "proportional"
    """Mixture of the sources (the entries of input_jsonl): `proportional` reads every token equally often. A list gives
    a weight to each source: [3, 1] reads three tokens of the first for each token of the second, whatever their sizes.
    `replay` is for init_from: the first source is the new text, and a quarter of the tokens come from the others, which
    hold text like that of the model's pretraining, so that it forgets less."""
    max_epochs_per_source: PositiveFloat = 16.0
    """Maximum number of epochs of any source; a run that would need more is refused before it starts."""
    stages: Annotated[tuple[Stage, ...], BeforeValidator(as_tuple)] = ()
    """Curriculum: consecutive stages of the run. An example for two sources: [{tokens: 8e9, source_weights: [3, 1]},
    {tokens: rest, source_weights: [0, 1], order: sequential, name: finish}]. Each stage has `tokens` (a number; `rest`
    only in the last stage), and may have its own `source_weights` and `order`. In place of `tokens` and
    `source_weights`, `source_tokens` gives an exact number for each source. If the order changes between two stages,
    the second one restarts its sources. With train_tokens: auto the run is as long as its stages, and `rest` stands for
    `epochs` times the training tokens."""
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
