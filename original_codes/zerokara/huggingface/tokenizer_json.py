"""A SentencePiece model → the files from which stock `AutoTokenizer` gives the same ids: no remote code, no conversion.

In: an encoder, and a chat template where there is one. Out: `tokenizer.json` (tokenizers 0.23's), the keys of
`tokenizer_config.json` that transformers 4 and 5 read alike, `chat_template.jinja`, and the SentencePiece model itself:
always as `sentencepiece.model`, from which step 7 trains on, and as `tokenizer.model` for llama.cpp, where that gives
the same ids. `tokenizer_proof` loads the files and compares.

How SentencePiece (0.2.3) maps to tokenizers (the traps stand beside the code):

- The line end and the user's symbols are *added tokens*: text is cut at these before anything else, so every line is
  normalised and encoded by itself, which is how `Encoder` defines ids. In models that step 1 did not make (`units`),
  "\\n" is not special, and the dummy prefix stands only at the start of a text.
- No pre-tokeniser: SentencePiece segments a line as a whole. (One exception: `_special_name_cuts`.)
- Control pieces, <unk> and byte pieces stand in the vocabulary by name, which never matches in a text.
- Normalisation is the model's own compiled table. SentencePiece reads it by longest match, tokenizers by single
  characters, so the vendor's NFKC does nearly all of it first. Every single character comes out the same, and so does
  composed text; marks in another order than Unicode's may not, and then the proof says so. `identity` is exact.
"""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from zerokara.base.durable import write_file
from zerokara.examples.facts import CHAT_TEMPLATE_NAME
from zerokara.tokenizer.compatibility import check_exportable
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import CARRIED, CONFIG_NAME, JSON_NAME, HuggingFaceEncoder
from zerokara.tokenizer.model_file import SPACE_MARK, ModelFile, PieceType

MODEL_FILE = "tokenizer.model"
SENTENCEPIECE_FILE = "sentencepiece.model"
"""The model for our own `Encoder`, under a name that no client looks for (transformers only for RemBERT)."""
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""The generic class, which transformers 4 knows by this name and transformers 5 takes for its `TokenizersBackend`: it
reads tokenizer.json as it is, where `LlamaTokenizer` and its like would build another one from the vocabulary."""
_INDENTED = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
_UNKNOWN_PENALTY = 10.0
"""Subtracted by SentencePiece and tokenizers from the lowest score for an unknown character (`kUnkPenalty`)."""
_SYMBOL_SCORE = -0.1
"""SentencePiece's score of a user-defined piece (`length * FLT_MIN - 0.1`, unigram_model.cc)."""
_FULLWIDTH_TILDE, _PLACEHOLDER = "\uff5e", "\U0010fffe"
"""The second is a code point that Unicode reserves for a program's own use: it is in no text."""


def write(
    encoder: Encoder,
    folder: Path,
    model_max_length: int,
    is_encoder_decoder: bool = False,
    chat_template: str | None = None,
) -> list[Path]:
    """Write the tokenizer's files into `folder` and return their paths.

    For an encoder-decoder, the encoder input ends with </s>; decoder ids are those of the text alone. The chat template
    stands in a file of its own, which transformers 4.57 and 5, TRL and llama.cpp read.

    The files of a Hugging Face tokenizer are written as they were, but for chat templates that another takes the place
    of, and what puts tokens behind a text that a decoder is to continue; one without `tokenizer_config.json` gets its
    own.

    Raises: UserError when the model is of a kind that cannot be written exactly.
    """
    config = _tokenizer_config(encoder, model_max_length, is_encoder_decoder)
    files = {CONFIG_NAME: orjson.dumps(config, option=_INDENTED)}
    if isinstance(encoder, HuggingFaceEncoder):
        files |= {name: content for name, content in encoder.folder_files.items() if name in CARRIED}
        if not is_encoder_decoder:
            files[JSON_NAME] = _without_end(files[JSON_NAME])
    else:
        check_exportable(encoder)
        end = encoder.pieces[encoder.eos_id] if is_encoder_decoder else None
        made = content(encoder.model, end, encoder.by_line)
        files[JSON_NAME] = orjson.dumps(made, option=_INDENTED)
        files[SENTENCEPIECE_FILE] = encoder.model_bytes
        if is_for_llama_cpp(encoder):
            files[MODEL_FILE] = encoder.model_bytes
    if chat_template is not None:
        files[CHAT_TEMPLATE_NAME] = chat_template.encode()
    if CHAT_TEMPLATE_NAME in files:  # transformers takes this one, and other clients an older one beside it
        files.pop("chat_template.json", None)
        config = orjson.loads(files[CONFIG_NAME])
        if config.pop("chat_template", None):
            files[CONFIG_NAME] = orjson.dumps(config, option=_INDENTED)
    for name, content_bytes in files.items():
        write_file(folder / name, content_bytes)
    return [folder / name for name in files]


def _without_end(content: bytes) -> bytes:
    """Return a tokenizer.json, or one that differs from it in that it puts no tokens behind a text."""
    vendor = Tokenizer.from_str(content.decode())
    made = vendor.encode("a")
    if not made.special_tokens_mask[-1]:
        return content
    before = made.tokens[: made.special_tokens_mask.index(0)]
    named = [(token, vendor.token_to_id(token)) for token in before]
    form: dict[str, Any] = {"single": [*before, "$A"], "pair": [*before, "$A", "$B"], "special_tokens": named}
    vendor.post_processor = processors.TemplateProcessing(**form)
    return vendor.to_str().encode()


def is_for_llama_cpp(encoder: Encoder) -> bool:
    """True if llama.cpp gives this model's ids, so that `MODEL_FILE`, from which it makes a GGUF, is exported.

    Its SentencePiece tokenizer merges pairs by the score of the result, which is BPE; it does so whatever the model,
    normalises nothing, and puts a space before a text but not before its further lines. A unigram model would silently
    be segmented differently than in training (3.72 bits per byte instead of 1.89), so it gets no file: without one
    llama.cpp's converter ends with an error.
    """
    if isinstance(encoder, HuggingFaceEncoder):
        return False  # it needs no such file
    model = encoder.model
    keeps_text = model.normalization == "identity" and not model.remove_extra_whitespaces
    prefixes_lines = model.add_dummy_prefix and encoder.by_line
    return model.is_bpe and model.byte_fallback and keeps_text and not prefixes_lines


def content(model: ModelFile, end: str | None = None, by_line: bool = True) -> dict[str, Any]:
    """Return the content of tokenizer.json; `end` is the piece appended to every text."""
    vendor = Tokenizer(_unigram(model) if model.is_unigram else _bpe(model))
    vendor.normalizer = _normalizer(model)
    if model.is_unigram and (cuts := _special_name_cuts(model)):
        vendor.pre_tokenizer = pre_tokenizers.Split(Regex(cuts), "merged_with_previous")
    # Empty without an end, so that the ids are those of training.
    behind, named = ([], []) if end is None else ([end], [(end, model.id_of["eos"])])
    form: dict[str, Any] = {"single": ["$A", *behind], "pair": ["$A", *behind, "$B", *behind], "special_tokens": named}
    vendor.post_processor = processors.TemplateProcessing(**form)
    vendor.decoder = _decoder(model, by_line)
    kinds = (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.USER_DEFINED)
    vendor.add_tokens(
        [
            AddedToken(
                piece.text,
                # A masked span includes the space before it: "The <extra_id_0> barks." has no token for it.
                lstrip=piece.type is PieceType.CONTROL and piece.text.startswith("<extra_id_"),
                # A symbol of spaces (Gemma's) is found among the marks that stand for them, which normalisation makes.
                normalized=SPACE_MARK in piece.text,
                special=piece.type is not PieceType.USER_DEFINED,
            )
            for piece in model.pieces
            if piece.type in kinds
        ]
    )
    return dict(orjson.loads(vendor.to_str()))


def _normalizer(model: ModelFile) -> normalizers.Normalizer:
    """SentencePiece's steps; repeated spaces are dropped before the prefix is put, the space marks at the end after."""
    replace, steps = normalizers.Replace, list[normalizers.Normalizer]()
    if model.charsmap:
        # The rules named nmt keep the full-width tilde, which NFKC would not: it is replaced meanwhile.
        keeps_tilde = model.normalization.startswith("nmt")
        steps += [replace(_FULLWIDTH_TILDE, _PLACEHOLDER)] if keeps_tilde else []
        steps += [normalizers.NFKC()]
        steps += [normalizers.Lowercase()] if model.normalization.endswith("_cf") else []
        steps += [replace(_PLACEHOLDER, _FULLWIDTH_TILDE)] if keeps_tilde else []
        steps += [normalizers.Precompiled(model.charsmap)]
    if model.remove_extra_whitespaces:
        steps += [replace(Regex(" {2,}"), " "), replace(Regex(r"\A "), "")]
    if model.add_dummy_prefix:
        steps += [normalizers.Prepend(SPACE_MARK)]
    steps += [replace(" ", SPACE_MARK)]
    if model.remove_extra_whitespaces:
        steps += [replace(Regex(rf"(?<!{SPACE_MARK}){SPACE_MARK}+\z"), "")]
    return normalizers.Sequence(steps)


def _special_name_cuts(model: ModelFile) -> str:
    """Where to split the names of control and byte pieces, as a regular expression; empty if nowhere.

    A text that spells such a name would otherwise be that piece.

    tokenizers' Unigram takes a name for its piece where the alternative has an unknown character, however low the score
    of the piece is (that of unknown characters is lower). The models of step 1 have every character of a name as a
    piece. Where another model lacks one ("<" in T5's), no piece spans it and the next character, so that the text
    can be split there and nothing else changes.
    """
    learnt = [piece.text for piece in model.pieces if piece.type in (PieceType.NORMAL, PieceType.USER_DEFINED)]
    alone, known = {text for text in learnt if len(text) == 1}, set("".join(learnt))
    names = [
        piece.text for piece in model.pieces if piece.type in (PieceType.UNKNOWN, PieceType.CONTROL, PieceType.BYTE)
    ]
    cuts = set()
    for name in names:
        if not alone.issuperset(name):
            # Between a known and an unknown character only: unknown ones that follow each other are one <unk>.
            cuts.update([pair for pair in pairwise(name) if (pair[0] in known) != (pair[1] in known)][:1])
    return "|".join(f"{re.escape(left)}(?={re.escape(right)})" for left, right in sorted(cuts))


def _decoder(model: ModelFile, by_line: bool) -> decoders.Decoder:
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    # After Fuse there is one string.
    if not by_line and (model.add_dummy_prefix or model.remove_extra_whitespaces):
        steps.append(decoders.Strip(" ", 1, 0))
    elif model.add_dummy_prefix:
        # "^" is the start of every line in tokenizers' regular expressions (Oniguruma).
        steps.append(decoders.Replace(Regex("^ "), ""))
    return decoders.Sequence(steps)


def _unigram(model: ModelFile) -> models.Unigram:
    """Pieces that are no text get a score that never wins: any other would make text that spells "<0x41>" a byte."""
    normal = [piece.score for piece in model.pieces if piece.type is PieceType.NORMAL]
    unknown = min(normal) - _UNKNOWN_PENALTY
    longest = max(len(piece.text) for piece in model.pieces)
    # Below the cost of the longest name spelt in single characters, all of which are pieces (training sees to it). It
    # also becomes the lowest score, from which tokenizers derives that of unknown characters; the number of those is
    # the same in every segmentation, so that changes none.
    never = float(int(unknown - _UNKNOWN_PENALTY) * (longest + 1))
    fixed = {PieceType.USER_DEFINED: _SYMBOL_SCORE}
    vocabulary = [
        (piece.text, piece.score if piece.type is PieceType.NORMAL else fixed.get(piece.type, never))
        for piece in model.pieces
    ]
    return models.Unigram(vocabulary, model.id_of["unk"], model.byte_fallback)


def _bpe(model: ModelFile) -> models.BPE:
    """SentencePiece merges pairs by the rank of the piece that they make, tokenizers by the rank of the pair.

    All pairs that make one piece follow each other, the shorter left part first, which in runs of one character takes
    the leftmost pair as SentencePiece does. No pair makes the name of a control or byte piece.
    """
    scores = {piece.text: piece.score for piece in model.pieces if piece.type is PieceType.NORMAL}
    merges = list[tuple[str, str]]()
    for text in sorted((text for text in scores if len(text) > 1), key=lambda text: -scores[text]):
        cuts = ((text[:i], text[i:]) for i in range(1, len(text)))
        merges.extend((left, right) for left, right in cuts if left in scores and right in scores)
    vocabulary = {piece.text: i for i, piece in enumerate(model.pieces)}
    unknown = model.pieces[model.id_of["unk"]].text
    return models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)


def _tokenizer_config(encoder: Encoder, model_max_length: int, is_encoder_decoder: bool) -> dict[str, Any]:
    named = {"bos": encoder.bos_id, "eos": encoder.eos_id, "unk": encoder.unk_id, "pad": encoder.pad_id}
    extra = [encoder.pieces[i] for i in sorted(encoder.control_ids - {*named.values()})]
    return {
        "tokenizer_class": TOKENIZER_CLASS,
        "model_max_length": model_max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": is_encoder_decoder,
        # A decoder continues after the last token of its prompt, so padding comes first.
        "padding_side": "right" if is_encoder_decoder else "left",
        # Otherwise transformers 4 returns token_type_ids too, which GPT-2 adds to its embeddings and Llama refuses.
        "model_input_names": ["input_ids", "attention_mask"],
        **{f"{name}_token": encoder.pieces[i] for name, i in named.items() if i >= 0},
        # llama.cpp would put a space before every text.
        **({"add_prefix_space": False} if is_for_llama_cpp(encoder) and not encoder.model.add_dummy_prefix else {}),
        # The sentinels, by the name of transformers 4, which transformers 5 takes too. Of transformers 5's own name,
        # extra_special_tokens, transformers 4 takes no list.
        **({"additional_special_tokens": extra} if extra else {}),
    }
