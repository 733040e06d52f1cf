"""Proof that the exported tokenizer gives the ids of training: on the user's text, on hard strings, and in chats.

In: the encoder that training used, the tokenizer of an exported folder (`load`), texts, and conversations of the
training data with their ids, as step 7 left them in the run folder. Out: a `Proof`, without which the export fails.
The tokenizer, a stock `AutoTokenizer`, is called with `split_special_tokens=True`, so that text is text; transformers
5.23 hands that to tokenizers' `encode_special_tokens`. By default it reads "</s>" in a text as the control token, as
its users expect; T5's sentinel tokens are compared that way, and conversations, by `apply_chat_template`.

Equal means the same ids. For unigram models a line may be a *tie*: the same text in other pieces with the same total
score (in float64, within 1e-6 relative), which two correct implementations may break differently. Models of step 1
have scores that sum without rounding, so that both break ties alike; other models do not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import fsum, isclose
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zerokara.base.progress import Progress
from zerokara.huggingface import tokenizer_json
from zerokara.tokenizer.compatibility import hard_texts
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import JSON_NAME, HuggingFaceEncoder, check_dropout
from zerokara.tokenizer.model_file import NEWLINE, PieceType

TIE_TOLERANCE = 1e-6
MAX_TIE_SHARE = 0.001
"""Ties tolerated, as a share of the lines compared."""
MAX_SHOWN = 10
"""Failures and ties kept as examples."""
MAX_TEXT_CHARACTERS = 100_000
"""A longer text is compared line by line only: as a whole it would take the vendor too long."""
RESIZE = "resize the model (model.resize_token_embeddings, save_pretrained), or take them out of the tokenizer"
"""Remedy for pieces without a row."""
_BATCH = 256
_ANY_LENGTH = 1 << 30  # a tokenizer that is not a model's yet; a longer text would only be warned of


@dataclass(frozen=True)
class Proof:
    """Result of comparing an exported folder with the training; it holds if there are no faults."""

    facts: dict[str, Any]
    """Counts and measures, for manifest, card and summary."""
    faults: list[str]
    examples: list[str] = field(default_factory=list)
    """The first texts that differ; they are the user's, and not for everyone."""


def prove(encoder: Encoder, theirs: Any, texts: Iterable[str], max_lines: int = 10_000) -> Proof:
    """Compare with `theirs` on the hard texts, and on the given texts until `max_lines` lines are done.

    A text of several lines is compared line by line and as a whole; ties are counted among the lines alone.
    """
    hard = hard_texts(encoder)
    failures, _ = _differences(encoder, theirs, hard)
    is_carried = isinstance(encoder, HuggingFaceEncoder)  # how its users spell sentinels is not ours to change
    # As users spell one: its one id, without a space before it.
    for sentinel in () if is_carried else encoder.sentinel_ids:
        text = f"a {encoder.pieces[sentinel]} b"
        ours = [*encoder.encode("a").tolist(), sentinel, *encoder.encode(" b").tolist()]
        found = list(theirs(text, add_special_tokens=False)["input_ids"])
        if found != ours:
            failures.append(_difference("ids", text, ours, found))
    ties: list[str] = []
    lines = equal = whole_texts = 0
    remaining = iter(texts)
    with Progress("comparing token ids", total=max_lines, unit="line") as progress:
        while lines < max_lines and (batch := list(islice(remaining, _BATCH))):
            wholes = [text for text in batch if NEWLINE in text and len(text) <= MAX_TEXT_CHARACTERS]
            failures += _differences(encoder, theirs, wholes)[0]
            single = [line for text in batch for line in text.split(NEWLINE)][: max_lines - lines]
            differing, tied = _differences(encoder, theirs, single)
            failures, ties = failures + differing, ties + tied
            whole_texts += len(wholes)
            lines += len(single)
            equal += len(single) - len(differing) - len(tied)
            progress.advance(len(single))
    found_in = f"{lines:,} lines, {whole_texts:,} whole texts and {len(hard)} hard texts"
    faults = []
    if failures:
        faults.append(f"token ids: {len(failures):,} differences in {found_in}; the first: {failures[0]}")
    if len(ties) > max(1, MAX_TIE_SHARE * lines):
        faults.append(f"token ids: {len(ties):,} ties in {found_in}, more than {MAX_TIE_SHARE:.1%}: {ties[0]}")
    facts = {"lines": lines, "whole_texts": whole_texts, "hard_texts": len(hard), "equal": equal, "ties": len(ties)}
    return Proof(facts | {"failures": len(failures)}, faults, [*failures[:MAX_SHOWN], *ties[:MAX_SHOWN]])


def _differences(encoder: Encoder, theirs: Any, texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Messages of texts that give other ids, or decode otherwise: failures, and ties."""
    failures, ties = list[str](), list[str]()
    # Not verbose: a text longer than the context length is no fault here.
    asked = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    whole = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    found = theirs(list(texts), **asked, return_attention_mask=False)["input_ids"] if texts else []
    for text, our_array, their_ids in zip(texts, encoder.encode_many(texts), found, strict=True):
        ours = our_array.tolist()
        if ours != their_ids and _is_tie(encoder, ours, their_ids):
            ties.append(_difference("tie", text, ours, their_ids))
        elif ours != their_ids:
            failures.append(_difference("ids", text, ours, their_ids))
        # Each decodes <unk> differently, and it is no text of the user anyway.
        elif encoder.unk_id not in ours and theirs.decode(ours, **whole) != encoder.decode(ours):
            failures.append(_difference("decoded text", text, ours, their_ids))
    return failures, ties


def _is_tie(encoder: Encoder, ours: list[int], theirs: list[int]) -> bool:
    """True if these different ids are the same text in other pieces of the same total score."""
    if isinstance(encoder, HuggingFaceEncoder) or not encoder.model.is_unigram:
        return False
    pieces = encoder.model.pieces
    if encoder.decode(ours) != encoder.decode(theirs):
        return False
    # Bytes, symbols and line ends have no score; they must be the same.
    fixed = [[i for i in ids if pieces[i].type is not PieceType.NORMAL] for ids in (ours, theirs)]
    scores = [fsum(pieces[i].score for i in ids if pieces[i].type is PieceType.NORMAL) for ids in (ours, theirs)]
    return fixed[0] == fixed[1] and isclose(*scores, rel_tol=TIE_TOLERANCE)


def _difference(what: str, text: str, ours: list[int], theirs: list[int]) -> str:
    """Message that `what` of a text differs, with the ids around the first that does."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
    window = slice(max(0, place - 3), place + 5)
    shown = text if len(text) <= 80 else text[:77] + "..."
    return f"{what} of {shown!r} at token {place}: ours {ours[window]}, theirs {theirs[window]}"


def prove_chat(tokenizer: Any, conversations: Sequence[dict[str, Any]]) -> Proof:
    """Compare conversations, each with its ``messages``, ``prompt_ids`` and ``answer_ids``.

    Of each, two must be equal: the ids up to the end of the last answer, and the ids after which that answer is
    generated (``add_generation_prompt``).
    """
    failures = list[str]()
    # Not verbose: a conversation longer than the context is no fault here.
    options: dict[str, Any] = {"return_dict": False, "tokenizer_kwargs": {"verbose": False}}
    for each in conversations:
        messages, trained = each["messages"], each["prompt_ids"] + each["answer_ids"]
        whole = tokenizer.apply_chat_template(messages, **options)[: len(trained)]
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
        for ours, theirs in ((trained, whole), (each["prompt_ids"], prompt)):
            if ours != theirs:
                failures.append(_difference("ids", str(messages), ours, theirs))
                break
    facts = {"compared": len(conversations), "failures": len(failures)}
    differing = f"chat template: {len(failures):,} of {len(conversations):,} conversations differ; the first: "
    return Proof(facts, [differing + failures[0]] if failures else [], failures[:MAX_SHOWN])


def load(hf_folder: Path) -> Any:
    """Load the tokenizer as any user of the folder does, without the truncation and padding of its tokenizer.json.

    transformers leaves these out of all that it encodes itself. Raises a `UserError` for a tokenizer with dropout.
    """
    from transformers import AutoTokenizer  # seconds to import

    tokenizer = AutoTokenizer.from_pretrained(str(hf_folder), local_files_only=True, trust_remote_code=False)
    if fast := getattr(tokenizer, "backend_tokenizer", None):
        check_dropout(hf_folder / JSON_NAME, getattr(fast.model, "dropout", None))
        fast.no_truncation()
        fast.no_padding()
    return tokenizer


def without_rows(pieces: Sequence[str | None], rows: int) -> str:
    """Name the pieces whose ids are beyond the rows of an embedding; empty if there are none."""
    beyond = [f"{piece} (id {number})" for number, piece in enumerate(pieces) if number >= rows and piece]
    more = f" and {len(beyond) - 3:,} more" if beyond[3:] else ""
    return f"its embedding has no row for {', '.join(beyond[:3])}{more}" if beyond else ""


def tokenizer_of_exports(encoder: Encoder, is_encoder_decoder: bool) -> Any:
    """Tokenizer of every export with this encoder, as `AutoTokenizer` loads it; raises as `tokenizer_json.write`."""
    with TemporaryDirectory() as folder:
        tokenizer_json.write(encoder, Path(folder), _ANY_LENGTH, is_encoder_decoder)
        return load(Path(folder))
