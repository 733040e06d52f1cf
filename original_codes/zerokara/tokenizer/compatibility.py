"""Compatibility with other implementations of a tokenizer: texts for each proof, and models that none can export."""

from zerokara.base.errors import Fault, UserError
from zerokara.base.progress import first_of
from zerokara.tokenizer.encoder import NUM_T5_SENTINELS, Encoder
from zerokara.tokenizer.hugging_face import HuggingFaceEncoder
from zerokara.tokenizer.model_file import NEWLINE, PieceType

MAX_SYMBOLS = 50
"""User symbols that are tested one by one; all of them stand together in two more texts."""

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
    """Texts on which two implementations are likeliest to differ, for this tokenizer.

    Beside `HARD_TEXTS` these spell the control tokens and the user's symbols: alone, doubled, cut short, inside words.
    """
    names = [encoder.pieces[i] for i in sorted(encoder.special_ids)]
    texts = [*HARD_TEXTS, *names[:6], " ".join(names), "x".join(names) + "\n" + "".join(names) + "<EOD>"]
    symbols = [text for text in encoder.symbols if text != NEWLINE]
    for symbol in symbols[:MAX_SYMBOLS]:
        texts += [symbol, symbol + symbol, f"a{symbol}b", f"one {symbol} two  {symbol}", f"{symbol[:-1]} {symbol[1:]}"]
        texts.append(f"{symbol}\n{symbol} \n {symbol}日本{symbol}")
    return [*texts, "".join(symbols), " ".join(symbols)]


def check_exportable(encoder: Encoder) -> None:
    """Check that a Hugging Face tokenizer can give the same ids, so that a model trained with them can be exported.

    Raises:
        UserError: names every rule of the model that Hugging Face's tokenizers cannot follow.
    """
    if isinstance(encoder, HuggingFaceEncoder):  # its own files are exported, and proved on hard texts by step 2
        return
    model = encoder.model
    symbols = [repr(text) for text in encoder.symbols if text != NEWLINE or not encoder.by_line]
    unused = [repr(piece.text) for piece in model.pieces if piece.type is PieceType.UNUSED]
    and_symbols = f"has user-defined symbols ({first_of(symbols, 3)})"
    rules = {
        "is neither a unigram nor a BPE model": not (model.is_unigram or model.is_bpe),
        "puts spaces at the end of pieces (treat_whitespace_as_suffix)": model.whitespace_as_suffix,
        f"adds a dummy prefix and {and_symbols}": model.add_dummy_prefix and symbols,
        f"drops repeated spaces and {and_symbols}": model.remove_extra_whitespaces and symbols,
        f"has pieces marked as unused ({first_of(unused, 3)})": unused,
    }
    where, remedy = str(encoder.model_path), "use another tokenizer, or train one with step 1"
    reason = "which a Hugging Face tokenizer cannot do exactly, so that no export could be proved"
    if faults := [Fault(where, f"{rule}, {reason}", remedy=remedy) for rule, broken in rules.items() if broken]:
        raise UserError(faults)


def notes(encoder: Encoder) -> list[str]:
    """Notes for the user on the ids of a model that step 1 did not make; empty for one of step 1."""
    if encoder.by_line:
        return []
    if isinstance(encoder, HuggingFaceEncoder):
        start = f"{encoder.pieces[encoder.start_id]} begins it, " if encoder.start_id >= 0 else ""
        end = f"{start}{encoder.pieces[encoder.eos_id]} ends it"
        return [f"Hugging Face: the library tokenizers encodes each document as a whole; {end}"]
    prefix = ", with a space before it" if encoder.model.add_dummy_prefix else ""
    notes = [f"not made by step 1: the ids of a document are SentencePiece's for its whole text{prefix}"]
    if encoder.pad_id == encoder.unk_id:
        notes.append("no <pad> piece: <unk> serves as padding where a model needs it")
    if encoder.adds_sentinels:
        notes.append(f"{NUM_T5_SENTINELS} sentinel tokens follow its pieces, as T5's do, <extra_id_0> last")
    return notes
