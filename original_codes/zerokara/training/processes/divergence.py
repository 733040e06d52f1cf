"""The check that ranks hold the same weights, bit for bit: a slice of every parameter after every step.

Compared are the weights that the processes compute with: in a data-parallel group all that is not partitioned, in a
tensor-parallel group what is replicated. Under ZeRO 3 that is what stays unpartitioned at rest, the small parameters
(DeepSpeed's `stage3_param_persistence_threshold`), norms and biases among them; the others exist once, and have nothing
to differ from.

Each step compares another slice of every parameter, so that a parameter that has diverged is found at once and a single
element within `STEPS_TO_COMPARE_ALL` steps. The bits of these slices, and their complement, go through one all-reduce
with MAX: if b is the maximum and ¬b the maximum of the complements, all are b. It costs one 4096th of the gradient's
communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from zerokara.errors import RunError
from zerokara.model import parallel
from zerokara.model.builder import Model

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

    def check(self, step: int) -> None:
        """Compare a part of the weights after `step`; every process must call it, before anything is saved.

        Raises:
            ProcessesDiverged: processes differ; names the parameter, the step and the processes.
        """
        finding = ""
        if parallel.data_size() > 1:
            finding = self._finding(step, list(self._parameters), parallel.data_group())
        if parallel.tensor_size() > 1 and not finding:
            finding = self._finding(step, self._replicated, parallel.tensor_group())
        if not self._is_anywhere(finding):
            return
        finding = _first_of_all(finding, next(iter(self._parameters.values())).device)
        raise ProcessesDiverged(
            f"step {step}: {finding}: they no longer train the same model. This step was not saved; the next start "
            "resumes from the newest checkpoint. If it happens again, suspect the memory or the network of one of "
            "these devices"
        )

    def _is_anywhere(self, finding: str) -> bool:
        """Whether any process found a difference; where one group holds all processes, each knows by itself."""
        if parallel.data_size() == 1 or parallel.tensor_size() == 1:
            return bool(finding)
        device = next(iter(self._parameters.values())).device
        found = torch.tensor(float(bool(finding)), device=device)
        torch.distributed.all_reduce(found, ReduceOp.MAX)
        return bool(found.item())

    def _finding(self, step: int, names: Sequence[str], group: ProcessGroup) -> str:
        """The first difference within `group`, as text; empty if there is none."""
        slices = [(name, *self._slice(self._parameters[name], step)) for name in names]
        slices = [each for each in slices if len(each[2])]
        if not slices:
            return ""
        bits = _bits(torch.cat([values for _, _, values in slices]))
        extremes = torch.stack([bits, ~bits])
        torch.distributed.all_reduce(extremes, ReduceOp.MAX, group)
        differs = extremes[0] != ~extremes[1]
        if not differs.any().item():
            return ""
        index = int(differs.nonzero()[0])
        all_bits = [torch.empty_like(bits) for _ in range(group.size())]
        torch.distributed.all_gather(all_bits, bits, group=group)
        values = [int(each[index]) for each in all_bits]
        for name, first, elements in slices:
            if index < len(elements):
                return f"{_parties(values, group)} hold different weights, {name} from element {first + index} on"
            index -= len(elements)
        raise AssertionError("the slices are what was compared")

    def _slice(self, parameter: Tensor, step: int) -> tuple[int, Tensor]:
        """Start and elements of a parameter's slice at `step`; no elements where it is partitioned (ZeRO 3)."""
        elements = parameter.detach().flatten()
        length = max(_MIN_ELEMENTS, -(-len(elements) // STEPS_TO_COMPARE_ALL))
        first = (step + self._seed) % max(1, -(-len(elements) // length)) * length
        return first, elements[first : first + length]


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
