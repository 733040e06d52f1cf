"""The check that ranks hold the same weights, bit for bit: a slice of every parameter after every step.

Compared are the weights that the processes compute with: in a data-parallel group all that is not partitioned, in a
tensor-parallel group what is replicated. Under ZeRO 3 that is what stays unpartitioned at rest, the small parameters
(DeepSpeed's `stage3_param_persistence_threshold`), norms and biases among them; the others exist once, and have nothing
to differ from.

Each step compares another slice of every parameter, so that a parameter that has diverged is found at once and a single
element within `STEPS_TO_COMPARE_ALL` steps. The bits of these slices, and their complement, go through one all-reduce
with MAX: if b is the maximum and ¬b the maximum of the complements, all are b. It costs one 4096th of the gradient's
communication. Nobody waits for the answer: it is looked at after the next step, or before a save.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from zerokara.errors import RunError
from zerokara.model import parallel
from zerokara.model.builder import Model
from zerokara.training.compute.devices import Arriving

STEPS_TO_COMPARE_ALL = 4096
"""Steps within which every element is compared. In the tests, one."""
_MIN_ELEMENTS = 64
"""Elements of each parameter that are compared at least: fewer would cost as much."""
_TEXT_BYTES = 2048
"""Longest text about a difference."""


class ProcessesDiverged(RunError):
    """Processes hold different weights. Raised in every process at the same step."""


class DivergenceCheck:
    """Compares the weights of a run's processes after each step."""

    def __init__(self, model: Model, seed: int):
        """`model` is the one that the engine trains; `seed` fixes which slice comes at which step."""
        self._parameters = dict(model.named_parameters())
        self._replicated = [name for name in self._parameters if model.sharding.is_replicated(name)]
        self._seed = seed
        self._begun: tuple[int, list[_Comparison], Arriving] | None = None

    def check(self, step: int) -> None:
        """Begin to compare a part of the weights after `step`, and `confirm` the comparison before this one.

        So no step waits for its own comparison. Every process must call it.
        """
        self.confirm()
        groups = []
        if parallel.data_size() > 1:
            groups.append((list(self._parameters), parallel.data_group()))
        if parallel.tensor_size() > 1:
            groups.append((self._replicated, parallel.tensor_group()))
        compared = [_Comparison(self._slices(names, step), group) for names, group in groups]
        compared = [each for each in compared if each.slices]
        if not compared:
            return
        differs = torch.stack([each.differs.any() for each in compared]).double()
        if len(groups) > 1:  # a process is in one group of each kind; with one kind the group is all processes
            torch.distributed.all_reduce(differs, ReduceOp.MAX)
        self._begun = (step, compared, Arriving(differs))

    def confirm(self) -> None:
        """Require that the newest comparison found no difference; every process must call it before a save.

        Raises:
            ProcessesDiverged: processes differ; names the parameter, the step and the processes.
        """
        if self._begun is None:
            return
        (step, compared, differs), self._begun = self._begun, None
        if not any(differs.read()):
            return
        finding = next(filter(None, (each.finding() for each in compared)), "")
        finding = _first_of_all(finding, next(iter(self._parameters.values())).device)
        raise ProcessesDiverged(
            f"step {step}: {finding}: they no longer train the same model. Nothing was saved since; the next start "
            "resumes from the newest checkpoint. If it happens again, suspect the memory or the network of one of "
            "these devices"
        )

    def _slices(self, names: Sequence[str], step: int) -> list[_Slice]:
        slices = [_Slice(name, *self._slice(self._parameters[name], step)) for name in names]
        return [each for each in slices if len(each.elements)]

    def _slice(self, parameter: Tensor, step: int) -> tuple[int, Tensor]:
        """Start and elements of a parameter's slice at `step`; no elements where it is partitioned (ZeRO 3)."""
        elements = parameter.detach().flatten()
        length = max(_MIN_ELEMENTS, -(-len(elements) // STEPS_TO_COMPARE_ALL))
        first = (step + self._seed) % max(1, -(-len(elements) // length)) * length
        return first, elements[first : first + length]


class _Slice(NamedTuple):
    """Consecutive elements of one parameter."""

    name: str
    first: int
    elements: Tensor


class _Comparison:
    """The bits of some slices in this process, and where those of the others in `group` differ."""

    def __init__(self, slices: list[_Slice], group: ProcessGroup):
        """Compare; every process of the group must call it, with slices of the same parameters."""
        self.slices, self._group = slices, group
        if slices:
            self._bits = _bits(torch.cat([each.elements for each in slices]))
            extremes = torch.stack([self._bits, ~self._bits])
            torch.distributed.all_reduce(extremes, ReduceOp.MAX, group)
            self.differs = extremes[0] != ~extremes[1]

    def finding(self) -> str:
        """The first difference, as text; empty if there is none."""
        if not self.differs.any():
            return ""
        index = int(self.differs.nonzero()[0])
        all_bits = [torch.empty_like(self._bits) for _ in range(self._group.size())]
        torch.distributed.all_gather(all_bits, self._bits, group=self._group)
        values = [int(each[index]) for each in all_bits]
        for each in self.slices:
            if index < len(each.elements):
                place = f"{each.name} from element {each.first + index} on"
                return f"{_parties(values, self._group)} hold different weights, {place}"
            index -= len(each.elements)
        raise AssertionError("the slices are what was compared")


def _first_of_all(text: str, device: torch.device) -> str:
    """The text of the first process that has one; some process must have one."""
    # As bytes: torch's own collectives for objects send pickles, and reading one runs code.
    mine = torch.tensor(list(text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8, device=device)
    texts = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(texts, mine)
    first = next(each for each in texts if each.any())
    return bytes(first.tolist()).rstrip(b"\0").decode(errors="replace")


def _bits(elements: Tensor) -> Tensor:
    """The bits of fp32 or bf16 elements as int32, which every backend can compare."""
    return elements.view(torch.int32) if elements.dtype == torch.float32 else elements.view(torch.int16).int()


def _parties(values: Sequence[int], group: ProcessGroup) -> str:
    """Groups of processes with equal values: ``processes 0, 2 and process 1``."""
    ranks = torch.distributed.get_process_group_ranks(group)
    parties = [[rank for rank, own in zip(ranks, values, strict=True) if own == value] for value in set(values)]
    parties.sort()
    return " and ".join(f"process{'es' if party[1:] else ''} {', '.join(map(str, party))}" for party in parties)
