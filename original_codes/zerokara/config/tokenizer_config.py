"""`sentence_piece_config.yaml`: step 1, training the tokenizer."""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zerokara.base.errors import Fault
from zerokara.config.settings import Auto, Fraction, Names, NaturalInt, PositiveInt, Settings, Text, Words

NUM_BYTE_PIECES = 256
NUM_CONTROL_PIECES = 4
FEWEST_PIECES = 300
TURN_PIECES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
"""The reserved piece that begins the turn of each role in a conversation."""
_RESERVED_PIECES = (*TURN_PIECES.values(), "<|end|>", *(f"<|reserved_{i}|>" for i in range(4)))
_FIXED = ("reserved_pieces", "byte_fallback", "user_defined_symbols", "extra_ids", "base_tokenizer")
_RESERVED_NAME = re.compile(r"<\|[A-Za-z0-9_]+\|>")
"""No two such names overlap, none is a byte piece or a sentinel token, and no ordinary text spells one."""


class TokenizerConfig(Settings):
    """Training the tokenizer (step 1)."""

    input: Names = ("data/embedded/corpus.jsonl",)
    """Raw text, one entry or several: a file (.jsonl or .txt, plain or compressed as .gz or .zst; or .parquet), a glob,
    a folder, a file that lists such entries ("@files.txt"), or a dataset on the Hub
    (hf://datasets/owner/name[@revision][/path])."""
    text_field: Text = "text"
    """Field of a JSON line, or column of a .parquet, that holds the text."""
    txt_document: Literal["file", "line"] = "file"
    """Document of a .txt file: the whole `file`, or each `line`."""
    max_bad_fraction: Fraction = 0.01
    """Largest tolerated share of unreadable documents, and of bytes that damaged files lost; above it the step
    fails."""
    output_dir: Text = "tokenizers/embedded"
    """Folder for tokenizer.model, tokenizer.vocab and the report."""
    vocab_size: Annotated[PositiveInt, Field(ge=FEWEST_PIECES, le=1_000_000)] = 8000
    """Vocabulary size, special pieces included. 16,000 to 32,000 suit a small model; for less than 1 MB of text use 500
    to 1,000, if that is enough for its characters. A token takes 2 bytes on disk below 65,500, otherwise 4."""
    base_tokenizer: str = ""
    """tokenizer.json, or a folder with one, of the model from which step 3 will start (init_from). The new tokenizer is
    then a byte-level BPE with the same normaliser, pre-tokenizer, special tokens and chat template; its vocabulary is
    learnt from the text. The settings below, from `model_type` to `reserved_pieces`, then have no effect. Empty for a
    SentencePiece tokenizer."""
    extend: NaturalInt = 0
    """Keep the vocabulary of base_tokenizer, and add this many pieces; 0 learns all of vocab_size anew."""
    model_type: Literal["unigram", "bpe"] = "unigram"
    """`unigram` (the best choice for most languages), or `bpe` for models that must also run in llama.cpp (GGUF) or
    transformers.js: these two do not compute the ids of a unigram model. transformers, CTranslate2, TRL and PEFT read
    both."""
    character_coverage: Annotated[float, Field(ge=0.98, le=1)] = 0.9995
    """Share of the characters in the text that get a piece of their own, at least 0.98 (SentencePiece's minimum):
    0.9995 for Japanese, Korean and Chinese, else 1.0."""
    byte_fallback: bool = True
    """Encode characters without a piece as UTF-8 bytes, so that nothing is ever unknown (takes 256 pieces)."""
    split_digits: bool = True
    """Make every decimal digit of any script a token of its own, which helps arithmetic."""
    normalization_rule_name: Literal["identity", "nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf"] = "identity"
    """Unicode normalisation. Only with `identity` and byte_fallback does a text decode to itself; even then U+2581,
    SentencePiece's mark for a space, becomes a space."""
    add_dummy_prefix: bool = False
    """Put a space before every line, so that a word has the same pieces at the start of a line as inside it."""
    user_defined_symbols: Words = ()
    """Texts that are always a single piece."""
    extra_ids: Annotated[NaturalInt, Field(le=1000)] = 0
    """Number of sentinel tokens <extra_id_N> at the end of the vocabulary, <extra_id_0> last; 100 for T5, else 0."""
    reserved_pieces: Words = _RESERVED_PIECES
    """Control pieces that no text produces, reserved for fine-tuning (step 7). The first three begin the turns of a
    chat; the others are spare, for chat templates of your own. A name has letters, digits or _ between <| and |>; []
    for none."""
    pre_segment: Literal["none", "mecab", "sudachi", "kiwi", "mecab_ko"] = "none"
    """Pre-segmentation: learn only pieces that lie within one morpheme, as an analyser finds it in the training text:
    `mecab` or `sudachi` for Japanese, `kiwi` or `mecab_ko` for Korean. A text then has more tokens, but meaningful
    ones; the trained tokenizer needs no analyser. To install all analysers: .venv/bin/pip install -r
    requirements/analysers.lock"""
    sample_bytes: PositiveInt | Auto = "auto"
    """Bytes of text to train on, sampled at random from all files; `auto` takes what the free memory allows, 10 to 200
    MB (50 MB with base_tokenizer)."""
    seed: NaturalInt = 1234
    """Random seed of the sampling."""
    num_threads: PositiveInt | Auto = "auto"
    """Training threads; the same seed and number of threads give the same file, byte for byte."""
    compare_with: Words = ()
    """Other tokenizers to compare with in the report: SentencePiece .model files, Hugging Face tokenizer.json files,
    or folders that hold one. To get one from the Hub:
    .venv/bin/hf download OWNER/NAME tokenizer.json --local-dir FOLDER."""

    @property
    def num_fixed_pieces(self) -> int:
        """Number of pieces that are not learnt: control, line end, user symbols, bytes, reserved, sentinel tokens."""
        fixed = NUM_CONTROL_PIECES + 1 + len(self.user_defined_symbols) + self.num_appended_pieces
        return fixed + (NUM_BYTE_PIECES if self.byte_fallback else 0)

    @property
    def num_appended_pieces(self) -> int:
        """Number of pieces after those of SentencePiece's trainer: reserved pieces and sentinel tokens."""
        return len(self.reserved_pieces) + self.extra_ids

    def rules(self) -> Iterator[Fault]:
        if self.extend and not self.base_tokenizer:
            rule, remedy = "has no effect without base_tokenizer", "name the tokenizer to extend, or set 0"
            yield self.fault("extend", rule, remedy, ["base_tokenizer"])
        for key in ("user_defined_symbols", "extra_ids", "pre_segment") if self.base_tokenizer else ():
            if (default := type(self).model_fields[key].default) != getattr(self, key):
                off = "[]" if default == () else default
                yield self.fault(key, "has no effect with base_tokenizer", f"set it to {off}", ["base_tokenizer"])
        if self.vocab_size <= self.num_fixed_pieces and not self.base_tokenizer:
            pieces = "control, byte and reserved pieces, user_defined_symbols, extra_ids"
            rule = f"must be greater than the {self.num_fixed_pieces} pieces that are not learnt ({pieces})"
            yield self.fault("vocab_size", rule, f"try {max(1000, 4 * self.num_fixed_pieces)}", _FIXED)
        for symbol in self.user_defined_symbols:
            is_named = re.fullmatch(r"|<unk>|</?s>|<pad>|<extra_id_.*|<0x[0-9A-Fa-f]{2}>", symbol)
            if is_named or re.search(r"[\s\u2581\u2585\0\ud800-\udfff]", symbol):
                rule = f"must not contain {symbol!r}: a symbol is not empty, is no other piece's name, and has no "
                yield self.fault("user_defined_symbols", f"{rule}white space, NUL, U+2581, U+2585 or half surrogate")
        for piece in self.reserved_pieces:
            if not _RESERVED_NAME.fullmatch(piece):
                rule = f"must not contain {piece!r}: a name is <|letters, digits or _|>, which no ordinary text spells"
                yield self.fault("reserved_pieces", rule, "e.g. <|user|>")
            elif piece in self.user_defined_symbols:
                rule = f"must not contain {piece!r}, which is one of reserved_pieces"
                yield self.fault("user_defined_symbols", rule, "leave it in one of the two", ["reserved_pieces"])
        for key in ("user_defined_symbols", "reserved_pieces"):
            if len(set(getattr(self, key))) < len(getattr(self, key)):
                yield self.fault(key, "must not contain a piece twice")
        if self.add_dummy_prefix and (self.user_defined_symbols or self.extra_ids):
            key = "user_defined_symbols" if self.user_defined_symbols else "extra_ids"
            rule = f"cannot be combined with {key}: the Hugging Face tokenizer could not be exact"
            yield self.fault("add_dummy_prefix", rule, "leave it false", [key])
