"""Conversations made to find differences: of one to six exchanges, some with a system turn, of hostile text.

In: the encoder, texts of the user's own. Out: conversations, endless, the same for the same seed. Their messages are
texts on which tokenizers differ, lines of the user's, and mixtures of these with what a template or a tokenizer might
take for its own: names of control pieces, whole and halved, line ends, words that begin turns, Jinja.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from zerokara.config.tokenizer_config import TURN_PIECES
from zerokara.tokenizer.compatibility import hard_texts
from zerokara.tokenizer.encoder import Encoder

MAX_EXCHANGES = 6
_MAX_TEXT_CHARACTERS = 400
_COMBINING = "\u0301"
_LETTERS = ("a", "the ", " word", "42", "日本", "へ", "ê", "👩‍👩‍👧", _COMBINING, "\ufeff", "▁")
_SPACES = (" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u3000", "\u2028", "\0")
_MARKUP = ("{{ eos_token }}", "{% generation %}", "{#", "user:\n", "assistant:\n", "<|im_end|>\n", "<", ">", "|", "\\n")


def made(encoder: Encoder, texts: Sequence[str], seed: int = 0) -> Iterator[list[dict[str, str]]]:
    """Yield conversations, each ending with an answer."""
    chance = random.Random(seed)
    names = [encoder.piece(i) for i in sorted({*encoder.control_ids, encoder.unk_id})]
    names = [*names[:20], *TURN_PIECES.values(), "<extra_id_0>"]
    halves = [half for name in names for half in (name[: len(name) // 2], name[len(name) // 2 :]) if half]
    whole = [text[:_MAX_TEXT_CHARACTERS] for text in (*hard_texts(encoder), *texts)]
    # A mark on a letter that it never stands on is the one thing that normalisation rules may read in two ways
    # (`tokenizer_json`).
    letters = [letter for letter in _LETTERS if not (encoder.model.charsmap and letter == _COMBINING)]
    kinds = (names, halves, letters, _SPACES, _MARKUP, whole)

    def text() -> str:
        if chance.random() < 0.3:
            return chance.choice(whole)
        return "".join(chance.choice(chance.choice(kinds)) for _ in range(chance.randint(1, 6)))

    def answer() -> str:
        return next(each for each in iter(text, None) if each.strip())

    while True:
        turns = [{"role": "system", "content": text()}] if chance.random() < 0.3 else []
        for _ in range(chance.randint(1, MAX_EXCHANGES)):
            turns += [{"role": "user", "content": text()}, {"role": "assistant", "content": answer()}]
        yield turns
