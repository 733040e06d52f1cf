"""A new vocabulary for an old model (`new_embeddings: mean_of_pieces`): what each row of its embeddings begins as.

A piece that the old vocabulary holds too, by its text or as the same control piece, keeps its row. Any other begins as
the mean of the rows of the pieces into which the old tokenizer splits its text (fast vocabulary transfer: Gee et al.,
2022, EMNLP industry track); or where there are none as the mean of all rows: its logit is then the mean of the old
ones, so that it takes little probability from them (Hewitt, 2021, nlp.stanford.edu/~johnhew/vocab-expansion.html).
Input and output embedding are treated alike.

Shape suffixes: V new rows, O old rows, D hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from zerokara.tokenizer.encoder import Encoder

_LINE_END = "\n"
_CONTROLS = "pad_id", "unk_id", "bos_id", "eos_id"


class NewVocabulary(NamedTuple):
    """The way from an old tokenizer's rows to a new one's."""

    sources: list[list[int]]
    """Per new id: the old id of the same piece, or the ids that the old tokenizer makes of its text, or none."""
    kept: list[bool]
    """True of each new id whose piece the old vocabulary holds too."""
    num_old: int

    @property
    def row(self) -> str:
        kept, missing = sum(self.kept), sum(not ids for ids in self.sources)
        counts = f"{kept:,} were in the old vocabulary, {len(self.sources) - missing - kept:,} are split by it"
        return f"of {len(self.sources):,} pieces {counts}, {missing:,} have no source"

    def rows(self, old_OD: Tensor) -> Tensor:
        """Return the new rows [V, D] of one matrix; rows of `old_OD` that no id has are not used."""
        old_OD = old_OD[: self.num_old]
        lengths = torch.tensor([len(ids) for ids in self.sources])
        flat = torch.tensor([each for ids in self.sources for each in ids], dtype=torch.int64)
        means_VD = embedding_bag(flat, old_OD, lengths.cumsum(0) - lengths, mode="mean")
        return torch.where(lengths[:, None] > 0, means_VD, old_OD.mean(dim=0))


def new_vocabulary(old: Encoder, new: Encoder) -> NewVocabulary:
    """Compare two tokenizers, piece by piece."""
    by_name = {old.pieces[i]: i for i in range(old.vocab_size)}
    by_text = {text: i for i, text in enumerate(old.token_texts) if text}
    control = {getattr(new, name): getattr(old, name) for name in _CONTROLS if getattr(old, name) >= 0}
    before = old.encode(_LINE_END).tolist()  # so that no dummy prefix is put before the text
    sources, kept = [], []
    for i, text in enumerate(new.token_texts):
        same = by_name.get(new.pieces[i], -1)
        if same < 0 or old.token_texts[same] != text:  # "é" names a character here, a byte there
            same = by_text.get(text, control.get(i, -1) if not text else -1)
        kept.append(same >= 0)
        if same >= 0:
            sources.append([same])
            continue
        try:
            ids = old.encode(_LINE_END + text.decode()).tolist()
            ids = ids[len(before) :] if ids[: len(before)] == before else ids
        except UnicodeDecodeError:  # a part of a character
            ids = [by_text[bytes([byte])] for byte in text if bytes([byte]) in by_text]
        sources.append([each for each in ids if each != old.unk_id] if text else [])
    return NewVocabulary(sources, kept, old.vocab_size)
