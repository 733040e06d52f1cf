"""The check that processes hold the same weights, bit for bit, before each validation and each save.

Compared are the weights that the processes compute with, by one checksum per parameter: in a data-parallel group all
that is not partitioned, in a tensor-parallel group what is replicated. Under ZeRO 3 that is what stays unpartitioned at
rest, the small parameters (DeepSpeed's `stage3_param_persistence_threshold`), norms and biases among them.
"""

from __future__ import annotations

import torch
import torch.distributed
from torch import Tensor

from zerokara.errors import RunError
from zerokara.model import parallel
from zerokara.model.builder import Model


class ProcessesDiverged(RunError):
    """Processes hold different weights. Raised in every process at the same step."""


class DivergenceCheck:
    """Compares the weights of a run's processes."""

    def __init__(self, model: Model, step: int):
        """`model` is the one that the engine trains; `step` is that of the weights it begins with."""
        self._parameters, self._is_replicated = dict(model.named_parameters()), model.sharding.is_replicated
        self._equal_at = step

    def check(self, step: int) -> None:
        """Compare the weights after `step`, unless that is done; every process must call it.

        Raises:
            ProcessesDiverged: processes differ; names them, the first parameter, and the steps in which it happened.
        """
        world = torch.distributed.get_world_size()
        if world == 1 or step == self._equal_at:
            return
        own = torch.stack([checksum(parameter.detach()) for parameter in self._parameters.values()])
        gathered = [torch.empty_like(own) for _ in range(world)]
        torch.distributed.all_gather(gathered, own)
        sums = torch.stack(gathered).tolist()  # [processes, parameters]
        for index, name in enumerate(self._parameters):
            shards = 1 if self._is_replicated(name) else parallel.tensor_size()
            for shard in range(shards):
                parties: dict[int, list[str]] = {}
                for rank in range(shard, world, shards):
                    parties.setdefault(sums[rank][index], []).append(str(rank))
                if len(parties) > 1:
                    who = " and ".join(
                        f"process{'es' if each[1:] else ''} {', '.join(each)}" for each in parties.values()
                    )
                    raise ProcessesDiverged(
                        f"steps {self._equal_at + 1} to {step}: {who} hold different weights, first in {name}: they no "
                        "longer train the same model. Nothing was saved since; the next start resumes from the newest "
                        "checkpoint. If it happens again, suspect the memory or the network of one of these devices"
                    )
        self._equal_at = step


def checksum(elements: Tensor) -> Tensor:
    """The bits of fp32 or bf16 elements as one int64: a sum modulo 2^64 of the rows' sums, each times an odd number.

    So any change of a single element changes it.
    """
    bits = elements.view(torch.int32 if elements.dtype == torch.float32 else torch.int16)
    row_sums = bits.flatten(1).sum(dim=1, dtype=torch.int64) if bits.dim() > 1 else bits.long()
    return (row_sums * (2 * torch.arange(len(row_sums), device=bits.device) + 1)).sum()
