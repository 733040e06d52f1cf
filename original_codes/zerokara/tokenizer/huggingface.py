"""A SentencePiece model → the files from which stock `AutoTokenizer` gives the same ids: no remote code, no conversion.

In: an encoder. Out: `tokenizer.json` (tokenizers 0.23's format, written by us field by field),
`tokenizer_config.json` (keys that transformers 4 and 5 read alike), and for llama.cpp, where it gives the same ids, the
SentencePiece model itself. Nothing is imported from the vendor here; `proof` loads the files with it and compares.

How each part of SentencePiece (0.2.3) is said in tokenizers' terms, and the traps:

- The line end and the user's symbols are *added tokens*, not special, not normalised. Text is cut at these before
  anything else, so every line is normalised and encoded by itself, which is how `Encoder` defines ids. With the
  dummy prefix, `Prepend` then puts one space before each line and none before an empty one, as the encoder does. (The
  known trap, words after "\\n" that gain or lose their "▁", comes from ids defined over whole documents.)
- No pre-tokeniser: SentencePiece segments a line as a whole, pieces may hold spaces in their middle.
- Control pieces, <unk> and byte pieces stand in the vocabulary by name. SentencePiece never matches those names in
  text. For Unigram they get a score that never wins (any other would make text that spells "<0x41>" a byte);
  for BPE no merge makes them.
- BPE merges pairs by the rank of the piece that they make. tokenizers ranks pairs: all pairs that make one piece follow
  each other, the shorter left part first, which in runs of one character takes the leftmost pair as SentencePiece does.
- Normalisation is the model's own compiled table, which SentencePiece reads by longest match, tokenizers by single
  characters (in a cluster with a combining mark it can even lose the mark). So the vendor's NFKC, and lower case for
  the rules that fold case, do nearly all of it first. Every single character comes out the same, and so does all
  ordinary text; heaps of combining marks may not, and then the proof says so. The default, `identity`, is exact.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from zerokara.durable import write_bytes, write_json
from zerokara.errors import Fault, UserError
from zerokara.tokenizer.encoder import SPACE_MARK, Encoder
from zerokara.tokenizer.model_file import Kind, ModelFile, Piece

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MODEL_FILE = "tokenizer.model"
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""The generic class, which transformers 4 knows by this name and transformers 5 takes for its `TokenizersBackend`: it
reads tokenizer.json as it is, where `LlamaTokenizer` and its like would build another one from the vocabulary."""
_UNKNOWN_PENALTY = 10.0
"""What SentencePiece and tokenizers both take off the lowest score for an unknown character (`kUnkPenalty`)."""
_SYMBOL_SCORE = -0.1
"""SentencePiece's score of a user-defined piece (`length * FLT_MIN - 0.1`, unigram_model.cc)."""
_FULLWIDTH_TILDE, _ASIDE = "\uff5e", "\U0010fffe"
"""The second is a code point that Unicode reserves for a program's own use and that is in no text."""


def write(encoder: Encoder, folder: Path, model_max_length: int, is_encoder_decoder: bool = False) -> list[Path]:
    """Write the tokenizer's files into `folder`; gives their paths.

    The encoder of an encoder-decoder reads </s> behind every text; the ids for a decoder are those of the text alone.

    Raises: UserError when the model is of a kind that cannot be written exactly.
    """
    model = ModelFile(encoder.model_bytes)
    _check(encoder, model)
    end = encoder.piece(encoder.eos_id) if is_encoder_decoder else None
    contents = (tokenizer_json(model, end), _tokenizer_config(encoder, model, model_max_length, is_encoder_decoder))
    paths = [folder / name for name in TOKENIZER_FILES]
    for path, content in zip(paths, contents, strict=True):
        write_json(path, content)
    if is_for_llama_cpp(model):
        paths.append(folder / MODEL_FILE)
        write_bytes(paths[-1], encoder.model_bytes)
    return paths


def is_for_llama_cpp(model: ModelFile) -> bool:
    """Whether llama.cpp gives the ids of this model, so that `MODEL_FILE`, from which it makes a GGUF, is exported.

    Its SentencePiece tokenizer merges pairs by the score of what they make, which is BPE; it does so whatever the
    model, normalises nothing, and puts a space before a text but not before its further lines. A unigram model would be
    cut otherwise than in training without a word (3.72 bits per byte where it has 1.89), so it gets no file: without
    one llama.cpp's converter ends with an error.
    """
    return model.is_bpe and model.byte_fallback and model.normalization == "identity" and not model.add_dummy_prefix


def _check(encoder: Encoder, model: ModelFile) -> None:
    rules = []
    if not (model.is_unigram or model.is_bpe):
        rules.append("is neither a unigram nor a BPE model")
    if model.remove_extra_whitespaces:
        rules.append("removes repeated spaces (remove_extra_whitespaces)")
    if model.whitespace_as_suffix:
        rules.append("puts spaces at the end of pieces (treat_whitespace_as_suffix)")
    symbols = [i for i, piece in enumerate(model.pieces) if piece.kind is Kind.USER_DEFINED and i != encoder.newline_id]
    if model.add_dummy_prefix and symbols:
        rules.append("has both a dummy prefix and user-defined symbols")
    if any(piece.kind is Kind.UNUSED for piece in model.pieces):
        rules.append("has pieces marked as unused")
    if rules:
        where = str(encoder.model_path)
        remedy = "train the tokenizer with step 1"
        reason = "which Hugging Face cannot do exactly"
        raise UserError([Fault(where, f"{rule}, {reason}", remedy=remedy) for rule in rules])


def tokenizer_json(model: ModelFile, end: str | None = None) -> dict[str, Any]:
    """The content of tokenizer.json; `end` is the piece that is put behind every text."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(model),
        "normalizer": _normalizer(model),
        "pre_tokenizer": None,
        "post_processor": _template(model, end),
        "decoder": _decoder(model),
        "model": _unigram(model) if model.is_unigram else _bpe(model),
    }


def _template(model: ModelFile, end: str | None) -> dict[str, Any]:
    """What stands around a text. Without an end nothing does: the ids are those that training saw."""
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    behind = [] if end is None else [{"SpecialToken": {"id": end, "type_id": 0}}]
    named = {} if end is None else {end: {"id": end, "ids": [model.id_of["eos"]], "tokens": [end]}}
    return {
        "type": "TemplateProcessing",
        "single": [first, *behind],
        "pair": [first, *behind, second, *behind],
        "special_tokens": named,
    }


def _added_tokens(model: ModelFile) -> list[dict[str, Any]]:
    kinds = (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)

    def settings(piece: Piece) -> dict[str, Any]:
        # A gap in a text took the space before it along: "The <extra_id_0> barks." has none that stands alone.
        is_gap = piece.kind is Kind.CONTROL and piece.text.startswith("<extra_id_")
        return {"single_word": False, "lstrip": is_gap, "rstrip": False, "normalized": False}

    return [
        {"id": i, "content": piece.text, **settings(piece), "special": piece.kind is not Kind.USER_DEFINED}
        for i, piece in enumerate(model.pieces)
        if piece.kind in kinds
    ]


def _normalizer(model: ModelFile) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if model.charsmap:
        # The rules named nmt keep the full-width tilde, which NFKC would not: it steps aside meanwhile.
        tilde = [_replace(_FULLWIDTH_TILDE, _ASIDE)] if model.normalization.startswith("nmt") else []
        back = [_replace(_ASIDE, _FULLWIDTH_TILDE)] if tilde else []
        fold = [{"type": "Lowercase"}] if model.normalization.endswith("_cf") else []
        table = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(model.charsmap).decode("ascii")}
        steps += [*tilde, {"type": "NFKC"}, *fold, *back, table]
    if model.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE_MARK})
    steps.append(_replace(" ", SPACE_MARK))
    return {"type": "Sequence", "normalizers": steps}


def _replace(text: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


def _decoder(model: ModelFile) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        _replace(SPACE_MARK, " "),
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.add_dummy_prefix:
        # After Fuse there is one string; "^" is the start of every line in tokenizers' regular expressions (Oniguruma).
        steps.append({"type": "Replace", "pattern": {"Regex": "^ "}, "content": ""})
    return {"type": "Sequence", "decoders": steps}


def _unigram(model: ModelFile) -> dict[str, Any]:
    normal = [piece.score for piece in model.pieces if piece.kind is Kind.NORMAL]
    unknown = min(normal) - _UNKNOWN_PENALTY
    longest = max(len(piece.text) for piece in model.pieces)
    # Below the cost of the longest name spelt in single characters, all of which are pieces (training sees to it). It
    # also becomes the lowest score, from which tokenizers derives that of unknown characters; the number of those is
    # the same in every segmentation, so that changes none.
    never = float(int(unknown - _UNKNOWN_PENALTY) * (longest + 1))
    scores = {Kind.NORMAL: None, Kind.USER_DEFINED: _SYMBOL_SCORE}
    vocabulary = []
    for piece in model.pieces:
        score = scores.get(piece.kind, never)
        vocabulary.append([piece.text, piece.score if score is None else score])
    return {
        "type": "Unigram",
        "unk_id": model.id_of["unk"],
        "vocab": vocabulary,
        "byte_fallback": model.byte_fallback,
    }


def _bpe(model: ModelFile) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": model.pieces[model.id_of["unk"]].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": model.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.text: i for i, piece in enumerate(model.pieces)},
        "merges": _merges(model),
    }


def _merges(model: ModelFile) -> list[list[str]]:
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind is Kind.NORMAL}
    merges: list[list[str]] = []
    for text in sorted((text for text in scores if len(text) > 1), key=lambda text: -scores[text]):
        cuts = ((text[:i], text[i:]) for i in range(1, len(text)))
        merges.extend([left, right] for left, right in cuts if left in scores and right in scores)
    return merges


def _special_tokens(encoder: Encoder) -> dict[str, Any]:
    ids = {"bos": encoder.bos_id, "eos": encoder.eos_id, "unk": encoder.unk_id, "pad": encoder.pad_id}
    return {f"{name}_token": encoder.piece(i) for name, i in ids.items() if i >= 0}


def _tokenizer_config(
    encoder: Encoder, model: ModelFile, model_max_length: int, is_encoder_decoder: bool
) -> dict[str, Any]:
    named = {encoder.bos_id, encoder.eos_id, encoder.unk_id, encoder.pad_id}
    extra = [piece.text for i, piece in enumerate(model.pieces) if piece.kind is Kind.CONTROL and i not in named]
    return {
        "tokenizer_class": TOKENIZER_CLASS,
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": is_encoder_decoder,
        # A decoder goes on behind the last token of its prompt, so padding stands before it.
        "padding_side": "right" if is_encoder_decoder else "left",
        # Else transformers 4 returns token_type_ids too, which GPT-2 adds to its embeddings and Llama refuses.
        "model_input_names": ["input_ids", "attention_mask"],
        **_special_tokens(encoder),
        # llama.cpp would put a space before every text.
        **({"add_prefix_space": False} if is_for_llama_cpp(model) else {}),
        # The sentinels, by the name of transformers 4, which transformers 5 takes too. Of transformers 5's own name,
        # extra_special_tokens, transformers 4 takes no list.
        **({"additional_special_tokens": extra} if extra else {}),
    }
