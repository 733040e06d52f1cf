"""SentencePiece models that step 1 did not make: which can be trained with, and what is done about what they lack.

In: a model that SentencePiece has opened. Out: faults, words for the log, the model with T5's sentinels.

A text needs an end (`</s>`) and ids for its line ends: a piece, bytes (Llama 2: <0x0A>), or, where normalisation makes
a line end a space (T5), that. A missing `<pad>` is no fault (`Encoder.pad_id`).

Google's T5 models (spiece.model; `<pad>` 0, `</s>` 1, `<unk>` 2, no `<s>`) hold no sentinels: whoever opens one puts
100 behind its pieces, <extra_id_0> last (t5/seqio `SentencePieceVocabulary(extra_ids=100)`, transformers 5.23
`T5Tokenizer`). So do we; the file and its hash stay what they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerokara.errors import Fault

if TYPE_CHECKING:
    from zerokara.tokenizer.encoder import Encoder

NUM_T5_SENTINELS = 100
_REMEDY = "take a tokenizer that has it, or train one with step 1"


def faults(processor: Any, where: str) -> list[Fault]:
    """What keeps a model from being trained with."""
    found = []
    if processor.eos_id() < 0:
        found.append(Fault(where, "has no </s> piece (eos_id -1), which ends each document", remedy=_REMEDY))
    if processor.unk_id() in processor.EncodeAsIds("\n"):
        rule = (
            'makes each line end <unk>, so that lines cannot be learnt: it has no piece "\\n", no byte pieces '
            "(byte_fallback), and no normalisation that makes it a space (nmt_nfkc)"
        )
        found.append(Fault(where, rule, remedy="take a tokenizer that has one of these, or train one with step 1"))
    return found


def lacks_t5_sentinels(processor: Any) -> bool:
    """Whether it is laid out as Google's T5 models are, without a piece that is called a sentinel."""
    special = (processor.pad_id(), processor.eos_id(), processor.unk_id(), processor.bos_id())
    names = ("<extra_id_0>", "\u2581<extra_id_0>")
    return special == (0, 1, 2, -1) and all(processor.PieceToId(name) == processor.unk_id() for name in names)


def with_t5_sentinels(content: bytes) -> bytes:
    """The model with <extra_id_99> to <extra_id_0> behind its pieces, as control pieces."""
    from zerokara.tokenizer.model_file import Kind, ModelFile, Piece  # brings protobuf, which few need

    model = ModelFile(content)
    model.append([Piece(f"<extra_id_{number}>", 0.0, Kind.CONTROL) for number in reversed(range(NUM_T5_SENTINELS))])
    return model.to_bytes()


def notes(encoder: Encoder) -> list[str]:
    """What the user of a model that step 1 did not make should know about its ids; nothing for one of step 1."""
    if encoder.by_line:
        return []
    model = encoder.model
    prefix = ", with a space before it" if model.add_dummy_prefix else ""
    found = [f"not of step 1: the ids of a document are SentencePiece's for its whole text{prefix}"]
    line_end = [encoder.piece(i) for i in encoder.encode("a\na").tolist()]
    if "<0x0A>" in line_end:
        found.append("line ends are the byte piece <0x0A>")
    elif not any("\n" in piece for piece in line_end):
        found.append("line ends become spaces")
    if encoder.pad_id == encoder.unk_id:
        found.append("no <pad> piece: <unk> fills sequences up where a model needs it")
    lossy = [model.normalization] if model.charsmap else []
    lossy += ["repeated spaces are dropped"] if model.remove_extra_whitespaces else []
    if lossy:
        found.append(f"text is normalised ({', '.join(lossy)}), and not given back exactly")
    if not model.byte_fallback:
        found.append("characters without a piece become <unk>")
    if encoder.adds_sentinels:
        found.append(f"{NUM_T5_SENTINELS} sentinels stand behind its pieces, as T5's do, <extra_id_0> last")
    return found
