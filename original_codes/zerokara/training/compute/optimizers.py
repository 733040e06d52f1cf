"""The torch optimizer of a model's parameters: AdamW, Muon and Adafactor, as `optimizer_rules` assigns them.

AdamW is torch's, fused. It updates each number by itself, and so any partition of a parameter. Muon and Adafactor need
unpartitioned parameters: one rank, the owner of a parameter, gathers its gradient from the others, computes the update,
and sends each rank its partition of the update. Master weights and momentum stay partitioned.

Muon: momentum orthogonalized by Newton-Schulz (Jordan et al., 2024, kellerjordan.github.io/posts/muon), with the update
scaled as in "Muon is Scalable for LLM Training" (Liu et al., 2025, arXiv 2502.16982, section 2.2), to the root mean
square of one of AdamW's, so that AdamW's learning rate and weight decay serve both:

    M ← μ·M + G          O = orthogonal(G + μ·M)          W ← W − lr·(0.176·√max(R, C)·O + weight_decay·W)

Adafactor without a first moment (Shazeer and Stern, 2018, algorithm 6), with a learning rate from outside. For a
gradient G of weights W, with β = 1 − t^−0.8 at update t:

    V ← β·V + (1 − β)·(G² + ε1), of a matrix only the means of its rows and of its columns
    U = G / √V        U ← U / max(1, RMS(U) / d)        W ← W − α·U − α·weight_decay·W, α = lr · max(ε2, RMS(W))

Why no library's: docs/decisions.md. Shape suffixes: R rows, C columns.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed
from torch import Tensor

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.config.settings import resolved
from zerokara.model import parallel
from zerokara.model.shapes import ModelShape, parts_of
from zerokara.training.compute import optimizer_rules

COEFFICIENTS = (
    (8.2193, -23.3375, 16.6266), (3.9641, -2.8377, 0.5158), (3.4369, -2.4752, 0.4761), (2.4901, -1.8343, 0.4368),
)  # fmt: skip
"""Coefficients of σ, σ³ and σ⁵ in each round of Newton-Schulz. Each brings singular values that began between 0.003 and
1 as near to 1 as it can (Amsel et al., 2025, arXiv 2505.16932, algorithm 1); at the end they are between 0.76 and 1.2.
Jordan et al. take five equal rounds, to between 0.7 and 1.2, and lift smaller ones somewhat more. The first three
rounds take σ/1.02: above 1 they rise steeply, and bf16 may round up."""
SCALE = 0.176
"""Of an update, times √max(R, C): 0.2 (Liu et al.) times 0.88. The root mean square of singular values is about 0.88
after Jordan's rounds, with which the recipe's learning rates were found, and about 1 after ours."""
STACK = 2**24
"""Numbers of equal matrices that Muon multiplies in one product, unless one has more."""
DECAY, CLIPPING, EPSILONS = -0.8, 1.0, (1e-30, 1e-3)
"""Adafactor's exponent of t, d, and (ε1, ε2): the paper's."""
CHUNK = 2**25
"""Numbers of the tensors that Adafactor updates together, roughly: as many are held once more meanwhile."""


class Place(NamedTuple):
    """The numbers of a parameter, flattened, that a process holds."""

    tensor: Tensor
    """One that the optimizer updates; its numbers from `start` on are the parameter's."""
    start: int
    ranges: Sequence[range]
    """Which numbers each data-parallel rank holds, in ascending order; the rank's own are those in `tensor`."""


class Optimizer(torch.optim.AdamW):
    """Updates the fp32 master weights of a process, all of them or those that ZeRO gives it.

    Whoever steps it sets the rate (`set_learning_rate`), and counts the updates.
    """

    def __init__(
        self, config: TrainingSettings, tensors: Mapping[str, Tensor], shape: ModelShape, device: torch.device
    ):
        """`tensors` are all parameters by name, in this process's shapes; `hold` must follow.

        `device` is that of the computation; under offload the master weights are elsewhere.
        """
        self.name: str = config.optimizer_name
        self.num_updates = 0
        """Updates so far, those of earlier starts included; skipped steps do not count."""
        self._shapes = {name: tuple(each.shape) for name, each in tensors.items()}
        self._shape, self._momentum, self._device = shape, config.muon_momentum, device
        self._dtype = torch.bfloat16 if config.number_format == "bf16" else torch.float32
        groups = [
            {**group._asdict(), "names": names, "params": [tensors[name] for name in names]}
            for group, names in optimizer_rules.parameter_groups(config, self._shapes).items()
        ]
        super().__init__(groups, 0.0, (config.adam_beta1, config.adam_beta2), config.adam_epsilon, fused=True)

    def hold(self, places: Mapping[str, Place]) -> None:
        """Set where each parameter is, and create the state as zeros: a checkpoint may be saved before the first
        update."""
        self._places, self._rank, self._ranks = places, parallel.data_rank(), range(parallel.data_size())
        holders = {name: [rank for rank, held in enumerate(each.ranges) if held] for name, each in places.items()}
        self._cut = {name for name, ranks in holders.items() if len(ranks) > 1}
        sizes = {name: math.prod(each) for name, each in self._shapes.items() if self._algorithm(name) != "adamw"}
        self._owners = optimizer_rules.owners_of(sizes, holders, len(self._ranks))
        self._factors: dict[str, dict[str, Tensor]] = {}
        """Of Adafactor's tensors whose owner this process is."""
        for name, place in places.items():
            shapes = optimizer_rules.state_shapes(self.name, name, self._shapes[name])
            state = self.state[place.tensor]
            if self._algorithm(name) == "adafactor":
                if self._owners[name] == self._rank:
                    self._factors[name] = {key: torch.zeros(of, device=self._device) for key, of in shapes.items()}
            elif not state:  # fused AdamW reads its count on the device
                state["step"] = torch.zeros((), device=place.tensor.device)
                state.update({key: torch.zeros_like(place.tensor) for key in shapes})

    def set_learning_rate(self, learning_rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = learning_rate * group["lr_scale"]

    def set_updates(self, num_updates: int) -> None:
        """Set the number of updates so far, on which the next ones depend."""
        self.num_updates = num_updates
        for state in self.state.values():
            if "step" in state:
                state["step"].fill_(num_updates)

    def read(self, name: str, key: str | None) -> Tensor:
        """Return the optimizer state `key` of a parameter, or with None its fp32 master weights.

        Every data-parallel rank must ask, and every one gets it. It may be the training's own: copy it to keep it.
        """
        place, shape, group = self._places[name], self._shapes[name], parallel.data_group()
        if key and self._algorithm(name) == "adafactor":
            shape = optimizer_rules.state_shapes(self.name, name, shape)[key]
            owner = self._owners[name]
            whole = self._factors[name][key] if owner == self._rank else torch.empty(shape, device=self._device)
            torch.distributed.broadcast(whole, group=group, group_src=owner)
            return whole
        held = self._part(name, self.state[place.tensor][key] if key else place.tensor.detach())
        if len(self._ranks) == 1:
            return held.view(shape).to(self._device)  # off the CPU, where it is offloaded: NCCL gathers it
        whole = torch.zeros(math.prod(shape), device=self._device)
        mine = place.ranges[self._rank]
        whole[mine.start : mine.stop] = held
        torch.distributed.all_reduce(whole, group=group)
        return whole.view(shape)

    def write(self, name: str, key: str | None, value: Tensor) -> None:
        """Set what `read` returns, from a value that every process has."""
        place = self._places[name]
        if key and self._algorithm(name) == "adafactor":
            if name in self._factors:
                self._factors[name][key].copy_(value)
        else:
            mine = place.ranges[self._rank]
            held = self._part(name, self.state[place.tensor][key] if key else place.tensor.detach())
            held.copy_(value.reshape(-1)[mine.start : mine.stop])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the groups from their gradients, which it overwrites: nobody asks for them afterwards.

        DeepSpeed calls it with one group at a time, or with the tensors of one alone; every rank in the same order.
        """
        groups = self.param_groups
        for group in groups:
            held = {id(tensor) for tensor in group["params"]}
            names = [name for name in group["names"] if id(self._places[name].tensor) in held]
            if group["algorithm"] == "adamw":
                self.param_groups = [group]
                super().step()
                self.param_groups = groups
            elif group["algorithm"] == "muon" and names:
                self._step_muon(group, names)
            elif names:
                self._step_adafactor(group, names)

    def _algorithm(self, name: str) -> optimizer_rules.Algorithm:
        return optimizer_rules.algorithm_of(self.name, name, self._shapes[name])

    def _part(self, name: str, tensor: Tensor | None) -> Tensor:
        """What this process holds of a parameter in `tensor`, which lies as the one that is updated."""
        assert tensor is not None, f"no gradient of {name}"
        place = self._places[name]
        return tensor.view(-1)[place.start : place.start + len(place.ranges[self._rank])]

    def _step_muon(self, group: Mapping[str, Any], names: Sequence[str]) -> None:
        tensors, rate, momentum = group["params"], group["lr"], resolved(self._momentum)
        for each in tensors:
            old = self.state[each]["momentum_buffer"]
            torch.add(each.grad, old, alpha=momentum, out=old)  # one pass, where a list of all would take two
        torch._foreach_mul_(tensors, 1 - rate * group["weight_decay"])
        held = {name: self._places[name].tensor for name in names}
        momenta = {name: self._part(name, self.state[each]["momentum_buffer"]) for name, each in held.items()}
        for name in self._cut.intersection(names):
            self._part(name, held[name].grad).add_(momenta.pop(name), alpha=momentum)
        whole, updated = self._gathered(names)
        for matrices in self._stacks(whole, {**updated, **momenta}, updated):  # zeros: a cut gradient has its momentum
            first, *_ = matrices[0]
            num_rows, num_columns = first.shape[:2].numel(), first.size(2)
            stack_NRC = first.new_empty(len(matrices), num_rows, num_columns, dtype=self._dtype)
            for matrix_RC, (gradient, old, _) in zip(stack_NRC, matrices, strict=True):
                torch.add(gradient, old, alpha=momentum, out=matrix_RC.view_as(gradient))
            scale = SCALE * math.sqrt(max(num_rows, num_columns))
            for update_RC, (*_, weights) in zip(_orthogonalized(stack_NRC), matrices, strict=True):
                weights.add_(update_RC.view_as(weights), alpha=-rate * scale)
        self._return(names, updated)

    def _stacks(self, *tensors: Mapping[str, Tensor]) -> Iterator[list[tuple[Tensor, ...]]]:
        """The matrices of equal size, as many at a time as `STACK` holds; each as its parts of all `tensors`."""
        by_size: dict[tuple[int, int], list[tuple[Tensor, ...]]] = {}
        for name in tensors[0]:
            parameters = [each[name].view(-1, *self._shapes[name][-2:]) for each in tensors]
            for matrices in zip(*parameters, strict=True):
                for parts in zip(*(parts_of(each, name, self._shape) for each in matrices), strict=True):
                    by_size.setdefault((parts[0].shape[:2].numel(), parts[0].size(2)), []).append(parts)
        for size, found in by_size.items():
            count = max(1, STACK // math.prod(size))
            yield from (found[start : start + count] for start in range(0, len(found), count))

    def _step_adafactor(self, group: Mapping[str, Any], names: Sequence[str]) -> None:
        weight = math.pow(self.num_updates + 1, DECAY)  # 1 − β
        ends = zip(names, itertools.accumulate(math.prod(self._shapes[name]) for name in names), strict=True)
        for _, chunk in itertools.groupby(ends, key=lambda name_and_end: name_and_end[1] // CHUNK):
            together = [name for name, _ in chunk]
            parts = [self._part(name, self._places[name].tensor) for name in together]
            gradients, updated = self._gathered(together)
            directions = [self._direction(name, gradient, weight) for name, gradient in gradients.items()]
            norms = torch.stack(torch._foreach_norm(parts))
            if len(self._ranks) > 1:
                squares = norms.square()
                torch.distributed.all_reduce(squares, group=parallel.data_group())
                norms = squares.sqrt()
            rates = group["lr"] * self._root_mean_squares(norms, together).clamp(min=EPSILONS[1])
            if group["weight_decay"]:
                torch._foreach_mul_(parts, list((1 - group["weight_decay"] * rates).unbind()))
            if directions:
                means = self._root_mean_squares(torch.stack(torch._foreach_norm(directions)), list(gradients))
                # An index by a list would copy it to the device, and wait.
                own = torch.stack([rates[together.index(name)] for name in gradients])
                torch._foreach_mul_(directions, list((own / (means / CLIPPING).clamp(min=1.0)).unbind()))
                torch._foreach_sub_(list(updated.values()), directions)
            self._return(together, updated)

    def _root_mean_squares(self, norms: Tensor, names: Sequence[str]) -> Tensor:
        roots = [math.sqrt(math.prod(self._shapes[name])) for name in names]
        return torch.stack(torch._foreach_div(list(norms.unbind()), roots))

    def _direction(self, name: str, gradient: Tensor, weight: float) -> Tensor:
        """The gradient over the root of the second moment, which is updated."""
        state, squares = self._factors[name], gradient.square().add_(EPSILONS[0])
        if gradient.dim() < 2:
            return state["exp_avg_sq"].lerp_(squares, weight).rsqrt().mul_(gradient)
        rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
        rows.lerp_(squares.mean(dim=-1), weight)
        columns.lerp_(squares.mean(dim=-2), weight)
        by_row = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        return torch.mul(by_row, columns.unsqueeze(-2).rsqrt(), out=squares).mul_(gradient)

    def _gathered(self, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The gradients that this process owns, whole, and what their updates are added to.

        These are the weights themselves, or for a partitioned tensor zeros, which `_return` distributes.
        """
        by_owner = self._cut_by_owner(names)
        gradients = {name: self._part(name, self._places[name].tensor.grad) for name in names}
        counts = [[len(self._places[name].ranges[rank]) for name in by_owner[self._rank]] for rank in self._ranks]
        received = self._exchanged([[gradients[name] for name in each] for each in by_owner], counts)
        parts = zip(by_owner[self._rank], *received, strict=True)
        whole = {name: torch.cat(of_ranks).view(self._shapes[name]) for name, *of_ranks in parts}
        updated = {name: torch.zeros_like(each) for name, each in whole.items()}
        for name in names:
            if name not in self._cut and self._owners[name] == self._rank:
                whole[name] = gradients[name].view(self._shapes[name])
                updated[name] = self._part(name, self._places[name].tensor).view(self._shapes[name])
        return whole, updated

    def _return(self, names: Sequence[str], updates: Mapping[str, Tensor]) -> None:
        """Hand out the updates of tensors that are cut, and add what this process gets to its weights."""
        by_owner, sent = self._cut_by_owner(names), []
        for rank in self._ranks:
            held = ((name, self._places[name].ranges[rank]) for name in by_owner[self._rank])
            sent.append([updates[name].view(-1)[each.start : each.stop] for name, each in held])
        counts = [[len(self._places[name].ranges[self._rank]) for name in each] for each in by_owner]
        for each, parts in zip(by_owner, self._exchanged(sent, counts), strict=True):
            for name, part in zip(each, parts, strict=True):
                self._part(name, self._places[name].tensor).add_(part)

    def _cut_by_owner(self, names: Sequence[str]) -> list[list[str]]:
        return [[name for name in names if name in self._cut and self._owners[name] == rank] for rank in self._ranks]

    def _exchanged(self, sent: list[list[Tensor]], counts: list[list[int]]) -> list[tuple[Tensor, ...]]:
        """Send tensors to each rank, and return those that each has sent, of `counts` numbers."""
        if not self._cut:
            return [() for _ in self._ranks]
        lengths, sizes = [sum(each) for each in counts], [sum(map(len, each)) for each in sent]
        received = torch.empty(sum(lengths), device=self._device)
        together = torch.cat([received[:0], *itertools.chain(*sent)])
        torch.distributed.all_to_all_single(received, together, lengths, sizes, group=parallel.data_group())
        return [part.split(each) for part, each in zip(received.split(lengths), counts, strict=True)]


def _orthogonalized(matrices_NRC: Tensor) -> Tensor:
    """The nearest matrices with orthogonal rows or columns, roughly, in the dtype of these, which are overwritten."""
    is_wide = matrices_NRC.size(1) <= matrices_NRC.size(2)
    wide = matrices_NRC if is_wide else matrices_NRC.mT
    # Divided by its Frobenius norm, its largest singular value is at most 1, where the iteration converges.
    wide = wide.div_(wide.norm(dim=(1, 2), keepdim=True, dtype=torch.float32).clamp(min=1e-7))
    for a, b, c in COEFFICIENTS:
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if is_wide else wide.mT
