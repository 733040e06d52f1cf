"""Which rank owns which tensor, where ZeRO stage 1 shards by whole tensors (`replicated_updater`). Pure Python."""

from __future__ import annotations

from collections.abc import Mapping


def owners_of(sizes: Mapping[str, int], num_owners: int) -> dict[str, int]:
    """The owner (0 to `num_owners` - 1) of each tensor: the largest first, to whoever has least."""
    owners, loads = dict.fromkeys(sizes, 0), [0] * num_owners
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = least = loads.index(min(loads))
        loads[least] += sizes[name]
    return owners
