"""SentencePiece models that step 1 did not make: which of them training can use, and what it adds to some.

In: a model that SentencePiece has opened. Out: faults, or the model with T5's sentinel tokens.

Training needs an end-of-document piece (`</s>`) and ids for line ends: a piece, bytes (Llama 2: <0x0A>), or, where
normalisation makes a line end a space (T5), that. A missing `<pad>` is no fault (`Encoder.pad_id`).

Google's T5 models (spiece.model; `<pad>` 0, `</s>` 1, `<unk>` 2, no `<s>`) hold no sentinels: whoever opens one appends
100 to its pieces, <extra_id_0> last (t5/seqio `SentencePieceVocabulary(extra_ids=100)`, transformers 5.23
`T5Tokenizer`). So do we; the file and its hash stay what they are.
"""

from __future__ import annotations

from typing import Any

from zerokara.errors import Fault
from zerokara.tokenizer.model_file import ModelFile

NUM_T5_SENTINELS = 100


def faults(processor: Any, where: str) -> list[Fault]:
    """What makes a model unusable for training."""
    found = []
    if processor.eos_id() < 0:
        remedy = "use a tokenizer that has one, or train one with step 1"
        found.append(Fault(where, "has no </s> piece (eos_id -1), which ends each document", remedy=remedy))
    if processor.unk_id() in processor.EncodeAsIds("\n"):
        rule = (
            'encodes each line end as <unk>, so that lines cannot be learnt: it has no piece "\\n", no byte pieces '
            "(byte_fallback), and no normalisation that makes it a space (nmt_nfkc)"
        )
        found.append(Fault(where, rule, remedy="use a tokenizer that has one of these, or train one with step 1"))
    return found


def lacks_t5_sentinels(processor: Any) -> bool:
    """Whether it is laid out as Google's T5 models are, and has no sentinel pieces."""
    special = (processor.pad_id(), processor.eos_id(), processor.unk_id(), processor.bos_id())
    names = ("<extra_id_0>", "\u2581<extra_id_0>")
    return special == (0, 1, 2, -1) and all(processor.PieceToId(name) == processor.unk_id() for name in names)


def with_t5_sentinels(content: bytes) -> bytes:
    """The model with <extra_id_99> to <extra_id_0> appended, as control pieces."""
    model = ModelFile(content)
    model.append_sentinels(NUM_T5_SENTINELS)
    return model.to_bytes()
