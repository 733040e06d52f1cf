"""The processes must hold the same weights, bit for bit: this is looked at after every step, a part at a time.

Compared are the weights that the processes compute with: of one data group all that is not partitioned, of one tensor
group what is replicated. Under ZeRO 3 that is what stays whole at rest, the small parameters (DeepSpeed's
`stage3_param_persistence_threshold`), norms and biases among them; of the others there is one copy, and nothing that it
could differ from.

At each step one stretch of every parameter is compared, another one at each, so that a parameter that has come apart is
found at once and a single number within `STEPS_TO_SEE_ALL` steps. The bits of these stretches, and their complement,
go into one collective that gives the largest of each: if b is the largest and ¬b the largest complement, all are b.
It costs one 4096th of the gradient's way between the processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from zerokara.errors import RunError
from zerokara.model import parallel
from zerokara.model.megatron import Model

STEPS_TO_SEE_ALL = 4096
"""Steps within which every number is compared. In the tests, one."""
_LEAST = 64
"""Numbers of each parameter that are compared at least: fewer would cost as much."""


class ProcessesDiverged(RunError):
    """Processes hold different weights. Raised in every process at the same step."""


class Agreement:
    """What the processes of a run compare after each step."""

    def __init__(self, model: Model, seed: int):
        """`model` is the one that the engine trains; `seed` fixes which stretch comes at which step."""
        self._parameters = dict(model.named_parameters())
        self._replicated = [name for name in self._parameters if model.sharding.is_replicated(name)]
        self._seed = seed

    def check(self, step: int) -> None:
        """Compare a part of the weights after `step`; every process must call it, and before anything is saved.

        Raises:
            ComeApart: processes differ; names the parameter, the step and the processes.
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
            f"step {step}: {finding}: they no longer train one model. Nothing of this "
            "step was saved; the next start resumes from the newest checkpoint. If it happens again, suspect the "
            "memory or the network of one of these devices"
        )

    def _is_anywhere(self, finding: str) -> bool:
        """Whether any process found something. Where one group holds all processes, each knows by itself."""
        if parallel.data_size() == 1 or parallel.tensor_size() == 1:
            return bool(finding)
        device = next(iter(self._parameters.values())).device
        found = torch.tensor(float(bool(finding)), device=device)
        torch.distributed.all_reduce(found, ReduceOp.MAX)
        return bool(found.item())

    def _finding(self, step: int, names: Sequence[str], group: ProcessGroup) -> str:
        """The first difference within `group`, in words; empty where there is none."""
        stretches = [(name, *self._stretch(self._parameters[name], step)) for name in names]
        stretches = [each for each in stretches if len(each[2])]
        if not stretches:
            return ""
        bits = _bits(torch.cat([values for _, _, values in stretches]))
        extremes = torch.stack([bits, ~bits])
        torch.distributed.all_reduce(extremes, ReduceOp.MAX, group)
        differs = extremes[0] != ~extremes[1]
        if not differs.any().item():
            return ""
        place = int(differs.nonzero()[0])
        all_bits = [torch.empty_like(bits) for _ in range(group.size())]
        torch.distributed.all_gather(all_bits, bits, group=group)
        values = [int(each[place]) for each in all_bits]
        for name, first, stretch in stretches:
            if place < len(stretch):
                return f"{_parties(values, group)} hold different weights, {name} from number {first + place} on"
            place -= len(stretch)
        raise AssertionError("the stretches are what was compared")

    def _stretch(self, parameter: Tensor, step: int) -> tuple[int, Tensor]:
        """Where the stretch of a parameter at `step` begins, and its numbers; none where it is partitioned (ZeRO 3)."""
        numbers = parameter.detach().flatten()
        length = max(_LEAST, -(-len(numbers) // STEPS_TO_SEE_ALL))
        first = (step + self._seed) % max(1, -(-len(numbers) // length)) * length
        return first, numbers[first : first + length]


def _first_of_all(text: str, device: torch.device) -> str:
    """The text of the first process that has one, for every process; some process must have one."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    source = torch.tensor([rank if text else size], device=device)
    torch.distributed.all_reduce(source, ReduceOp.MIN)
    first = int(source.item())
    # As UTF-8, with its length before it. torch's own collectives for objects send pickles, and reading one runs code.
    length = torch.tensor([len(text.encode())], device=device)
    torch.distributed.broadcast(length, src=first)
    letters = torch.zeros(int(length.item()), dtype=torch.uint8, device=device)
    if rank == first:
        letters.copy_(torch.tensor(list(text.encode()), dtype=torch.uint8))
    torch.distributed.broadcast(letters, src=first)
    return bytes(letters.tolist()).decode()


def _bits(numbers: Tensor) -> Tensor:
    """The bits of fp32 or bf16 numbers as int32, which every backend can compare."""
    return numbers.view(torch.int32) if numbers.dtype == torch.float32 else numbers.view(torch.int16).int()


def _parties(values: Sequence[int], group: ProcessGroup) -> str:
    """Who differs from whom: ``processes 0, 2 and process 1``, each party of one mind."""
    ranks = torch.distributed.get_process_group_ranks(group)
    parties = [[rank for rank, own in zip(ranks, values, strict=True) if own == value] for value in set(values)]
    parties.sort()
    return " and ".join(f"process{'es' if party[1:] else ''} {', '.join(map(str, party))}" for party in parties)
