"""Distillation: models whose probabilities are targets of another (Hinton et al., 2015, arXiv 1503.02531).

The loss of a student is (1 - w)·cross-entropy + w·KL(p‖q): p is the mean of the teachers' probabilities, q its own, w
`teacher_weight`. Teachers are decoders of any size with the same vocabulary. They compute their hidden states one after
another; their probabilities are made chunk by chunk in the loss, as the student's are.

Shape suffixes: B batch, S sequence, N tokens, C tokens of a chunk, D hidden size, V ids of the vocabulary.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear


class Lesson(NamedTuple):
    """What teachers say about the tokens of a micro batch."""

    weight: float
    outputs: list[tuple[Tensor, Tensor]]
    """Of each teacher the last hidden states, [N, D], and the output matrix, [V, D]."""

    def probabilities(self, chunk: slice) -> Tensor:
        """Return the mean of the teachers' probabilities, [C, V] in fp32."""
        logits = (linear(hidden_ND[chunk], weight_VD).float() for hidden_ND, weight_VD in self.outputs)
        return reduce(Tensor.add_, (each_CV.softmax(dim=1) for each_CV in logits)).div_(len(self.outputs))


class Teachers:
    """The teachers of one model: no part of it, so that no engine trains, shards or saves them."""

    def __init__(self, models: Sequence[Any], weight: float):
        """`models` are `Decoder`s, whose module knows this one."""
        self._models, self._weight = models, weight

    @torch.no_grad()
    def lesson(self, *batch: Any) -> Lesson:
        """Let them read a batch, the arguments of `Decoder.hidden_states`."""
        outputs = []
        for model in self._models:
            projection = model.projection()
            hidden_ND = model.hidden_states(*batch).transpose(0, 1).flatten(0, 1)
            outputs.append((hidden_ND, projection.weight_VD[: projection.vocab_size]))
        return Lesson(self._weight, outputs)
