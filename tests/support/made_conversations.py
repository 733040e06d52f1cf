"""Conversations made to find differences: of one to six exchanges, some with a system turn, of hostile text.

Their messages are texts on which tokenizers differ, lines of the caller's, and mixtures of these with what a template
or a tokenizer might take for its own: names of control pieces, whole and halved, line ends, words that begin turns,
Jinja.
"""

import random
from collections.abc import Iterator, Sequence

from zerokara.tokenizer.compatibility import hard_texts
from zerokara.tokenizer.encoder import Encoder

LETTERS = ("a", "the ", " word", "42", "日本", "へ", "ê", "👩‍👩‍👧", "\ufeff", "▁")
SPACES = (" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u3000", "\u2028", "\0")
MARKUP = ("{{ eos_token }}", "{% generation %}", "{#", "user:\n", "assistant:\n", "<|im_end|>\n", "<", ">", "|", "\\n")


def made_conversations(encoder: Encoder, texts: Sequence[str], seed: int = 0) -> Iterator[list[dict[str, str]]]:
    """Yield conversations, each ending with an answer, the same for the same seed."""
    chance = random.Random(seed)
    names = ["<|user|>", "<|assistant|>", *(encoder.pieces[i] for i in sorted({*encoder.control_ids, encoder.unk_id}))]
    halves = [half for name in names for half in (name[: len(name) // 2], name[len(name) // 2 :])]
    whole = [text[:400] for text in (*hard_texts(encoder), *texts)]
    kinds = (names, halves, LETTERS, SPACES, MARKUP, whole)

    def text() -> str:
        if chance.random() < 0.3:
            return chance.choice(whole)
        return "".join(chance.choice(chance.choice(kinds)) for _ in range(chance.randint(1, 6)))

    while True:
        turns = [{"role": "system", "content": text()}] if chance.random() < 0.3 else []
        for _ in range(chance.randint(1, 6)):
            answer = next(each for each in iter(text, None) if each.strip())
            turns += [{"role": "user", "content": text()}, {"role": "assistant", "content": answer}]
        yield turns
