"""The contract between the training step and what updates the weights, and which of its two implementations serves.

=====================  ==========================================================  ===================================
updater                serves                                                      sharded over data-parallel ranks
=====================  ==========================================================  ===================================
`ReplicatedUpdater`    ZeRO stage 0; stage 1 of a lone data-parallel rank;         nothing; at stage 1 the fp32 master
(ours)                 Adafactor and Muon at stages 0 and 1                        weights and the optimizer state, by
                                                                                   whole tensors
`ZeroUpdater`          AdamW at ZeRO stages 1 to 3, with or without offload        stage 1: master weights and state;
(DeepSpeed's)                                                                      2: gradients too; 3: weights too
=====================  ==========================================================  ===================================

Why two: DeepSpeed's stage 0 accumulates bf16 gradients in bf16, and its stages 1 to 3 cut a flat buffer of parameters
anywhere, so that no matrix keeps the rows and columns that Adafactor and Muon need. A lone rank at stage 1 has nothing
to shard, and DeepSpeed's copies of the gradients took a tenth of a step of 40M parameters on two cores.

Without torch on import: the plan names the updater before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

UpdaterName = Literal["replicated", "zero"]


def choose(zero_stage: int, optimizer: str, offload: str, data_parallel_size: int) -> UpdaterName:
    """Which updater serves a run; `data_parallel_size` ranks share the global batch."""
    nothing_to_shard = zero_stage == 1 and data_parallel_size == 1 and offload == "none"
    return "replicated" if zero_stage == 0 or optimizer != "adamw" or nothing_to_shard else "zero"


def plan_lines(
    name: UpdaterName, zero_stage: int, data_parallel_size: int, template_name: str, template: dict[str, Any]
) -> Iterator[str]:
    """Which updater updates the weights, and which settings of DeepSpeed's template therefore have no effect."""
    if name == "zero":
        yield f"DeepSpeed's ZeRO, stage {zero_stage}"
        return
    if zero_stage and data_parallel_size > 1:
        sharding = f"optimizer state sharded by tensor over {data_parallel_size} ranks"
    else:
        sharding = "nothing sharded" if data_parallel_size > 1 else "one data-parallel rank has nothing to shard"
    yield f"zerokara's own, not DeepSpeed's ZeRO: {sharding}"
    if template:
        yield f"so {template_name} has no effect on this run ({', '.join(template)})"


def owners_of(sizes: Mapping[str, int], num_owners: int) -> dict[str, int]:
    """Where stage 1 shards by whole tensors: the owner (0 to `num_owners` - 1) of each tensor.

    The largest first, to whoever has least.
    """
    owners, loads = dict.fromkeys(sizes, 0), [0] * num_owners
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = least = loads.index(min(loads))
        loads[least] += sizes[name]
    return owners


class Updater(Protocol):
    """Holds the weights of this process (its shard, where tensor parallelism cuts them) and updates them.

    One step is: `backward` for each micro batch, `finish_micro_batch` between two of them, then `update` or `discard`.
    Gradients are accumulated in fp32 and summed over the data-parallel ranks; they are never averaged.
    The state goes in and out unsharded, in fp32, by parameter name.
    """

    @property
    def module(self) -> torch.nn.Module:
        """The model, to be called; under ZeRO 3 every process must take part."""

    @property
    def num_updates(self) -> int:
        """Updates made, those of earlier starts included; skipped steps do not count."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss`."""

    def finish_micro_batch(self) -> None:
        """End a micro batch that is not the last of its step."""

    def update(self, learning_rate: float) -> float:
        """Sum over ranks, clip, update, clear; return the norm before clipping. If it is not finite nothing changes."""

    def discard(self) -> None:
        """Drop the gradients of this step; weights, moments and counts stay as they are."""

    def read(self, name: str, key: str | None) -> Tensor:
        """Return the optimizer state `key` of a parameter, or with None its fp32 master weights.

        Every process must ask, and every process gets it. It may be the training's own tensor: copy it to keep it.
        """

    def write(self, name: str, key: str | None, value: Tensor) -> None:
        """Set what `read` returns, from a value that every process has; call `written` at the end."""

    def written(self, num_updates: int) -> None:
        """Take up what was written, as the state after `num_updates` updates."""
