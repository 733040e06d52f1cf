"""Gradients summed in fp32 in one buffer, and over the ranks in parts, while the backward pass computes the others.

The buffer has buckets in the order in which a backward pass is done with parameters: from the last to the first. In a
bucket lies together what one rank owns: only there the sum over the ranks is needed, which takes half the traffic of a
sum for all. As soon as the last micro batch has added to all of a bucket its sums are on their way; every rank sends
the buckets in the same order, whatever its own is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup

BUCKET = 2**24
"""Numbers in a bucket, roughly: 64 MB, enough for a network's full speed."""
CHUNK = 2**26
"""Numbers in one collective at most: gloo needs as much memory again."""
ALIGNED = 64
"""Tensors in a common buffer begin at multiples of so many numbers, where kernels can read them in the widest steps."""


def views(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Return zeros for tensors of these sizes, one after another, and the part of each in its shape."""
    lengths = [-(-tensor.numel() // ALIGNED) * ALIGNED for tensor in tensors]
    flat = torch.zeros(sum(lengths), dtype=dtype, device=tensors[0].device)
    parts = zip(flat.split(lengths), tensors, strict=True)
    return flat, [part[: tensor.numel()].view_as(tensor) for part, tensor in parts]


class GradientBuckets:
    """The sums of all gradients of a model; `owners` says which rank needs that of a parameter, None that all do."""

    def __init__(self, weights: Mapping[str, Tensor], owners: Mapping[str, int | None], group: ProcessGroup):
        """A group of one rank sends nothing."""
        self._group, self._sends = group, group.size() > 1
        self.parts: dict[str, Tensor] = {}
        """Of each parameter, in its shape."""
        self._buckets: list[list[tuple[int | None, Tensor]]] = []
        """Of each bucket the pieces to sum, and their owners."""
        self._missing: list[set[str]] = []
        """Of each bucket the parameters whose gradient of this micro batch has not come."""
        self._bucket_of: dict[str, int] = {}
        self._next = 0
        self._work: list[Any] = []
        self._is_first = self._is_last = False
        names, filled, places = list(weights)[::-1], 0, dict[str, int]()
        for name in names:
            places[name] = filled // BUCKET
            filled += weights[name].numel()
        for _, together in groupby(names, places.__getitem__):
            in_bucket, bucket = sorted(together, key=lambda name: owners[name] or 0), list[tuple[int | None, Tensor]]()
            for owner, owned in groupby(in_bucket, owners.__getitem__):
                of_owner = list(owned)
                flat, parts = views([weights[name] for name in of_owner], torch.float32)
                self.parts |= zip(of_owner, parts, strict=True)
                bucket += [(owner, piece) for piece in flat.split(CHUNK)]
            self._bucket_of |= dict.fromkeys(in_bucket, len(self._buckets))
            self._buckets.append(bucket)
        for name, weight in weights.items():
            weight.register_post_accumulate_grad_hook(partial(self._add, name))

    def begin(self, is_first: bool, is_last: bool) -> None:
        """Begin the backward pass of a micro batch, of which the first replaces what was there."""
        assert not self._work, "what is being summed must not change"
        self._is_first, self._is_last = is_first, is_last
        self._missing = [set[str]() for _ in self._buckets]
        for name, bucket in self._bucket_of.items():
            self._missing[bucket].add(name)
        self._next = 0

    def end(self) -> None:
        """End the backward pass. What had no part in it has no gradient; the last one's sums are all begun."""
        for name in set[str]().union(*self._missing) if self._is_first else ():
            self.parts[name].zero_()
        for bucket in self._buckets[self._next :] if self._sends and self._is_last else ():
            self._sum(bucket)

    def wait(self) -> None:
        """Wait for the sums (on a GPU: let what comes next wait for them)."""
        for work in self._work:
            work.wait()
        self._work.clear()

    def _add(self, name: str, weight: Tensor) -> None:
        assert weight.grad is not None
        add = self.parts[name].copy_ if self._is_first else self.parts[name].add_
        add(weight.grad)
        weight.grad = None
        self._missing[self._bucket_of[name]].discard(name)
        while self._sends and self._is_last and self._next < len(self._buckets) and not self._missing[self._next]:
            self._sum(self._buckets[self._next])
            self._next += 1

    def _sum(self, bucket: list[tuple[int | None, Tensor]]) -> None:
        for owner, piece in bucket:
            if owner is None:
                work = torch.distributed.all_reduce(piece, group=self._group, async_op=True)
            else:
                work = torch.distributed.reduce(piece, group=self._group, group_dst=owner, async_op=True)
            self._work.append(work)
