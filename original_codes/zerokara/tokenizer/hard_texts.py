"""Texts on which two implementations of one tokenizer are most likely to differ."""

from __future__ import annotations

from collections.abc import Iterator

from zerokara.tokenizer.encoder import Encoder
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
