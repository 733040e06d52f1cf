"""`sentence_piece_config.yaml`: step 1, training the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from zerokara.config.settings import Auto, Fraction, NaturalWhole, PositiveWhole, Settings, Text, Words, rule
from zerokara.errors import Fault

NUM_BYTE_PIECES = 256
NUM_CONTROL_PIECES = 4


class TokenizerConfig(Settings):
    """Training the tokenizer (step 1)."""

    title: ClassVar[str] = "Training the tokenizer (step 1)"

    input: Words = ("data/embedded/corpus.jsonl",)
    """Raw text, one entry or several: a file (.jsonl or .txt, each plain, .gz or .zst; .parquet), a glob, a folder, a
    file that lists such entries ("@files.txt"), or a dataset on the Hub (hf://datasets/owner/name[@revision][/path])."""
    text_field: Text = "text"
    """Field of a JSON line, or column of a .parquet, that holds the text."""
    txt_document: Literal["file", "line"] = "file"
    """Whether a document of a .txt file is the whole `file` or each `line`."""
    max_bad_fraction: Fraction = 0.01
    """Largest share of unreadable documents that is put up with; above it the step fails."""
    output_dir: Text = "tokenizers/embedded"
    """Folder for tokenizer.model, tokenizer.vocab and the report."""
    vocab_size: Annotated[PositiveWhole, Field(ge=300, le=1_000_000)] = 8000
    """Number of pieces, all included. Below 65,500 the tokenised data takes 2 bytes a token, else 4."""
    model_type: Literal["unigram", "bpe"] = "unigram"
    """`unigram` (the best choice for most languages) or `bpe`, for models that shall also run in llama.cpp (GGUF) or
    transformers.js: neither computes unigram's ids. transformers, CTranslate2, TRL and PEFT read both."""
    character_coverage: Annotated[float, Field(ge=0.98, le=1)] = 0.9995
    """Share of the characters that get a piece of their own, 0.98 or more (SentencePiece takes no less): 0.9995 for
    Japanese, Korean, Chinese, else 1.0."""
    byte_fallback: bool = True
    """Spell characters without a piece in bytes, so that nothing is ever unknown (costs 256 pieces)."""
    split_digits: bool = True
    """Make every digit a token of its own, which helps arithmetic."""
    normalization_rule_name: Literal["identity", "nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf"] = "identity"
    """Unicode normalisation; only `identity` gives back every text as it was."""
    add_dummy_prefix: bool = False
    """Put a space before every line, so that a word at its start is as one inside it."""
    user_defined_symbols: Words = ()
    """Texts that are always one piece of their own."""
    extra_ids: Annotated[NaturalWhole, Field(le=1000)] = 0
    """Number of T5 sentinels <extra_id_N> at the end of the vocabulary, <extra_id_0> last; 100 for T5, 0 else."""
    pre_segment: Literal["none", "mecab", "sudachi", "kiwi", "mecab_ko"] = "none"
    """Learn only pieces that lie within one morpheme, as an analyser finds them in the training text: `mecab` or
    `sudachi` for Japanese, `kiwi` or `mecab_ko` for Korean. More tokens, that hold together better; the finished
    tokenizer needs no analyser. To install them all: .venv/bin/pip install -r requirements-analysers.lock"""
    sample_bytes: PositiveWhole | Auto = "auto"
    """Bytes of text to train on, drawn at random over all files; `auto` takes what the machine's memory allows."""
    seed: NaturalWhole = 1234
    """Seed of the sampling."""
    num_threads: PositiveWhole | Auto = "auto"
    """Threads for the training; the same seed and number of threads give the same file, byte for byte."""
    compare_with: Words = ()
    """Other tokenizers to stand beside ours in the report: SentencePiece .model files, Hugging Face tokenizer.json
    files, or folders that hold one."""

    @rule("input")
    def _has_input(self) -> Iterator[Fault]:
        if not self.input:
            yield self.fault("input", "must name at least one file", "e.g. data/corpus.jsonl")

    @rule("vocab_size", "byte_fallback", "extra_ids", "user_defined_symbols")
    def _vocabulary_holds_fixed_pieces(self) -> Iterator[Fault]:
        fixed = NUM_CONTROL_PIECES + 1 + len(self.user_defined_symbols) + self.extra_ids
        fixed += NUM_BYTE_PIECES if self.byte_fallback else 0
        if self.vocab_size <= fixed:
            yield self.fault(
                "vocab_size",
                f"must be greater than the {fixed} pieces that are fixed (control, bytes, user symbols, sentinels)",
                f"try {max(1000, 4 * fixed)}",
            )

    @rule("user_defined_symbols")
    def _symbols_are_new(self) -> Iterator[Fault]:
        for symbol in self.user_defined_symbols:
            if symbol in ("<unk>", "<s>", "</s>", "<pad>", "\n", "") or symbol.startswith("<extra_id_"):
                yield self.fault("user_defined_symbols", f"must not hold {symbol!r}, which is a piece already")
        if len(set(self.user_defined_symbols)) < len(self.user_defined_symbols):
            yield self.fault("user_defined_symbols", "must not hold a symbol twice")
