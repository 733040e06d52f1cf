"""Where two implementations of one tokenizer must agree: models that no export can reproduce, and hard texts.

Step 2 checks a model before any work; hard texts are part of each proof that two implementations give the same ids.
"""

from __future__ import annotations

from collections.abc import Iterator

from zerokara.errors import Fault, UserError
from zerokara.tokenizer.encoder import NUM_T5_SENTINELS, Encoder
from zerokara.tokenizer.model_file import PieceType
from zerokara.tokenizer.units import NEWLINE

MAX_SYMBOLS = 50
"""User symbols that get hard texts of their own; all of them stand together in two more."""

HARD_TEXTS = (
    "",
    " ",
    "   leading",
    "trailing   ",
    "in  the   middle    and  so on",
    "\t",
    "a\tb\t\tc",
    "\n",
    "\n\n\nline\n\nline\n",
    "first line\n  second line\n\tthird line",
    "carriage\r\nreturn\r\n",
    "\r",
    "null\0byte",
    "full width：ＡＢＣ　１２３～！",
    "half width: ｶﾞｷﾞﾊﾟ",
    "combining: e\u0301 か\u3099 n\u0303 \u1112\u1161\u11ab",
    "emoji: 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇯🇵",
    "rare kanji: 𠮷野家 𩸽 㐂 髙﨑 龘",
    "한국어 문장입니다. 띄어쓰기가 있어요.",
    "日本語の文です。「引用」もあります。",
    "Ação, țară, naïve, Größe",
    "مرحبا بالعالم हिन्दी ไทย",
    "0123456789 3.14159 1,000,000 ２０２４年",
    "def f(x):\n    return {'a': [x**2, -1]}  # comment\n",
    "a" * 1000,
    "へ" * 333,
    " " * 257,
    "=-" * 200,
    "aaab" * 100,
    "\u2028line\u2029paragraph\u0085next\x0bvertical\x0cform",
    "\ufeffbyte order mark \u200b zero width",
    "private \ue000 last \U0010ffff unknown \u0378",
    "<0x41><0x0A><0x00>",
    "block \u2585 space mark \u2581 end",
)
"""Texts on which tokenizers have been seen to differ."""


def hard_texts(encoder: Encoder) -> list[str]:
    """Texts on which two implementations are likeliest to differ, for this tokenizer."""
    return [*HARD_TEXTS, *_spelling_specials(encoder), *_holding_symbols(encoder)]


def _holding_symbols(encoder: Encoder) -> Iterator[str]:
    """Texts that hold the user's symbols: alone, doubled, cut short, inside words and lines."""
    symbols = [
        piece.text for piece in encoder.model.pieces if piece.type is PieceType.USER_DEFINED and piece.text != NEWLINE
    ]
    for symbol in symbols[:MAX_SYMBOLS]:
        yield from (symbol, symbol + symbol, f"a{symbol}b", f"one {symbol} two  {symbol}")
        yield f"{symbol[:-1]} {symbol[1:]}"
        yield f"{symbol}\n{symbol} \n {symbol}日本{symbol}"
    yield "".join(symbols)
    yield " ".join(symbols)


def _spelling_specials(encoder: Encoder) -> Iterator[str]:
    """Texts that spell the control tokens, alone and inside words."""
    names = [encoder.piece(i) for i in sorted({*encoder.control_ids, encoder.unk_id})]
    yield from names[:6]
    yield " ".join(names)
    yield "x".join(names) + "\n" + "".join(names) + "<EOD>"


def check_exportable(encoder: Encoder) -> None:
    """Check that a Hugging Face tokenizer can give the same ids, so that a model trained with them can be exported.

    Raises:
        UserError: it cannot; names every rule of the model that Hugging Face's tokenizers cannot follow.
    """
    model = encoder.model
    line_end = {NEWLINE} if encoder.by_line else set()
    user_defined = [piece.text for piece in model.pieces if piece.type is PieceType.USER_DEFINED]
    symbols = [text for text in user_defined if text not in line_end]
    unused = [piece.text for piece in model.pieces if piece.type is PieceType.UNUSED]
    rules = []
    if not (model.is_unigram or model.is_bpe):
        rules.append("is neither a unigram nor a BPE model")
    if model.whitespace_as_suffix:
        rules.append("puts spaces at the end of pieces (treat_whitespace_as_suffix)")
    if model.add_dummy_prefix and symbols:
        rules.append(f"has both a dummy prefix and user-defined symbols ({_first_of(symbols)})")
    if model.remove_extra_whitespaces and symbols:
        rules.append(f"drops repeated spaces and has user-defined symbols ({_first_of(symbols)})")
    if unused:
        rules.append(f"has pieces marked as unused ({_first_of(unused)})")
    if rules:
        remedy = "use another tokenizer, or train one with step 1"
        reason = "which a Hugging Face tokenizer cannot do exactly, so that no export could be proved"
        raise UserError([Fault(str(encoder.model_path), f"{rule}, {reason}", remedy=remedy) for rule in rules])


def _first_of(texts: list[str]) -> str:
    """The first three, as Python writes them."""
    return ", ".join(map(repr, texts[:3])) + (f", … {len(texts):,} in all" if texts[3:] else "")


def notes(encoder: Encoder) -> list[str]:
    """What the user of a model that step 1 did not make should know about its ids; empty for one of step 1."""
    if encoder.by_line:
        return []
    model = encoder.model
    prefix = ", with a space before it" if model.add_dummy_prefix else ""
    found = [f"not made by step 1: the ids of a document are SentencePiece's for its whole text{prefix}"]
    line_end = [encoder.piece(i) for i in encoder.encode("a\na").tolist()]
    if "<0x0A>" in line_end:
        found.append("line ends are the byte piece <0x0A>")
    elif not any("\n" in piece for piece in line_end):
        found.append("line ends become spaces")
    if encoder.pad_id == encoder.unk_id:
        found.append("no <pad> piece: <unk> serves as padding where a model needs it")
    lossy = [model.normalization] if model.charsmap else []
    lossy += ["repeated spaces are dropped"] if model.remove_extra_whitespaces else []
    if lossy:
        found.append(f"text is normalised ({', '.join(lossy)}), and does not decode to exactly what it was")
    if not model.byte_fallback:
        found.append("characters without a piece become <unk>")
    if encoder.adds_sentinels:
        found.append(f"{NUM_T5_SENTINELS} sentinel tokens follow its pieces, as T5's do, <extra_id_0> last")
    return found
