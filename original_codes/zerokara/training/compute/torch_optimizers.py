"""Torch optimizers for a model's parameters, as `optimizers` assigns them, with Muon and Adafactor written here.

Muon: momentum orthogonalized by Newton-Schulz (Jordan et al., 2024, kellerjordan.github.io/posts/muon), with the update
scaled as in "Muon is Scalable for LLM Training" (Liu et al., 2025, arXiv 2502.16982, section 2.2), to the root mean
square of one of AdamW's, so that AdamW's learning rate and weight decay serve both:

    M ← μ·M + G          O = orthogonal(G + μ·M)          W ← W − lr·(0.2·√max(R, C)·O + weight_decay·W)

Adafactor without a first moment (Shazeer and Stern, 2018, algorithm 6), with a learning rate from outside. For a
gradient G of weights W, with β = 1 − t^−0.8 at update t:

    V ← β·V + (1 − β)·(G² + ε1), of a matrix only the means of its rows and of its columns
    U = G / √V        U ← U / max(1, RMS(U) / d)        W ← W − α·U − α·weight_decay·W, α = lr · max(ε2, RMS(W))

Why no library's: docs/decisions.md. Shape suffixes: R rows, C columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zerokara.config.pretrain_config import TrainingSettings
from zerokara.config.settings import resolved
from zerokara.model.shapes import ModelShape, row_blocks
from zerokara.training.compute import optimizers
from zerokara.training.compute.optimizers import Algorithm

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration (Jordan et al.): steepest at 0, so that five rounds bring every
singular value to between 0.7 and 1.2."""
ROUNDS = 5
STACK = 2**24
"""Numbers of equal matrices that Muon multiplies in one product, unless one has more."""
RMS_OF_ADAMW = 0.2
"""The usual root mean square of AdamW's updates (Liu et al., 2025)."""
DECAY, CLIPPING, EPSILONS = -0.8, 1.0, (1e-30, 1e-3)
"""Adafactor's exponent of t, d, and (ε1, ε2): the paper's."""
CHUNK = 2**25
"""Numbers of the tensors that Adafactor updates together, roughly: as many are held once more meanwhile."""


def build(
    config: TrainingSettings, tensors: Mapping[str, Tensor], shape: ModelShape
) -> dict[Algorithm, torch.optim.Optimizer]:
    """Torch optimizers for fp32 `tensors` (some or all parameters, by name), one for each algorithm in use.

    Whoever steps them sets ``lr`` of their groups, each times its ``lr_scale``, and makes their state (`make_state`).
    """
    groups: dict[Algorithm, list[dict[str, Any]]] = {}
    shapes = {name: tuple(each.shape) for name, each in tensors.items()}
    for group, names in optimizers.parameter_groups(config, shapes).items():
        parameters = [tensors[name] for name in names]
        entry = {"params": parameters, "weight_decay": group.weight_decay, "lr_scale": group.lr_scale}
        groups.setdefault(group.algorithm, []).append(entry)
    made: dict[Algorithm, torch.optim.Optimizer] = {}
    if "adamw" in groups:
        betas = config.adam_beta1, config.adam_beta2
        made["adamw"] = torch.optim.AdamW(groups["adamw"], betas=betas, eps=config.adam_epsilon, fused=True)
    if "adafactor" in groups:
        made["adafactor"] = Adafactor(groups["adafactor"], {"lr": 0.0, "num_updates": 0})
    if "muon" in groups:
        blocks = {
            tensor: [torch.from_numpy(rows).to(tensor.device) for rows in row_blocks(name, shape)]
            for name, tensor in tensors.items()
        }
        dtype = torch.bfloat16 if config.number_format == "bf16" else torch.float32
        defaults = {"lr": 0.0, "momentum": resolved(config.muon_momentum), "blocks": blocks, "dtype": dtype}
        made["muon"] = Muon(groups["muon"], defaults)
    return made


def make_state(optimizer: str, made: Mapping[Algorithm, torch.optim.Optimizer], tensors: Mapping[str, Tensor]) -> None:
    """Make the state of `tensors`, all zeros. Optimizers do it in their first update: too late to load a checkpoint."""
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        algorithm = optimizers.algorithm_of(optimizer, name, shape)
        # Fused AdamW reads its count on the device; Adafactor counts in its groups, and waits for nothing.
        state = {} if algorithm == "adafactor" else {"step": torch.zeros((), device=tensor.device)}
        for key, of_key in optimizers.state_shapes(optimizer, name, shape).items():
            state[key] = torch.zeros(of_key, dtype=torch.float32, device=tensor.device)
        made[algorithm].state[tensor] = state


Place = tuple[Tensor, int, Tensor | None]
"""A parameter, the number of its matrix, and the matrix's rows (all with None)."""


class Muon(torch.optim.Optimizer):
    """Updates matrices, each whole; a parameter of three dimensions is one matrix for each expert.

    ``blocks`` are the rows of each matrix in parameters that hold several; ``dtype`` is that of the products.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients, which it overwrites: nobody asks for them afterwards."""
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            if not parameters:
                continue
            directions = [each.grad for each in parameters]
            momenta = [self.state[each]["momentum_buffer"] for each in parameters]
            direction_of = dict(zip(parameters, directions, strict=True))
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, directions)
            torch._foreach_add_(directions, momenta, alpha=group["momentum"])
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            for stack in self._stacks(parameters, group["blocks"]):
                directions_NRC = torch.stack([_matrix(direction_of[each], place, rows) for each, place, rows in stack])
                updates_NRC = _scaled(directions_NRC, group["dtype"])
                for (parameter, place, rows), update_RC in zip(stack, updates_NRC, strict=True):
                    if rows is None:
                        _matrix(parameter, place).add_(update_RC, alpha=-group["lr"])
                    else:
                        _matrix(parameter, place).index_add_(0, rows, update_RC, alpha=-group["lr"])

    def _stacks(self, parameters: list[Tensor], blocks: Mapping[Tensor, list[Tensor]]) -> Iterator[list[Place]]:
        """The matrices of equal size, as many at a time as `STACK` holds."""
        by_size: dict[tuple[int, int], list[Place]] = {}
        for parameter in parameters:
            for place in range(math.prod(parameter.shape[:-2])):
                for rows in blocks.get(parameter) or (None,):
                    size = parameter.size(-2) if rows is None else len(rows), parameter.size(-1)
                    by_size.setdefault(size, []).append((parameter, place, rows))
        for size, places in by_size.items():
            count = max(1, STACK // math.prod(size))
            yield from (places[start : start + count] for start in range(0, len(places), count))


def _matrix(parameter: Tensor, place: int, rows: Tensor | None = None) -> Tensor:
    matrix_RC = parameter.view(-1, *parameter.shape[-2:])[place]
    return matrix_RC if rows is None else matrix_RC[rows]


def _scaled(matrices_NRC: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest matrices with orthogonal rows or columns, roughly (in `dtype`), with the size of an update."""
    a, b, c = COEFFICIENTS
    is_wide = matrices_NRC.size(1) <= matrices_NRC.size(2)
    wide = matrices_NRC if is_wide else matrices_NRC.mT
    # Divided by its Frobenius norm, its largest singular value is at most 1, where the iteration converges.
    wide = (wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
    for _ in range(ROUNDS):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    scale = RMS_OF_ADAMW * math.sqrt(max(matrices_NRC.shape[1:]))
    return (wide if is_wide else wide.mT).to(matrices_NRC.dtype).mul_(scale)


class Adafactor(torch.optim.Optimizer):
    """Updates fp32 tensors in place. Its state is `exp_avg_sq_row` and `exp_avg_sq_col`, of a vector `exp_avg_sq`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters from their gradients."""
        for group in self.param_groups:
            group["num_updates"] += 1
            weight = math.pow(group["num_updates"], DECAY)  # 1 − β
            trained = [each for each in group["params"] if each.grad is not None]
            ends = zip(trained, itertools.accumulate(each.numel() for each in trained), strict=True)
            for _, chunk in itertools.groupby(ends, key=lambda tensor_and_end: tensor_and_end[1] // CHUNK):
                parameters = [parameter for parameter, _ in chunk]
                directions = [self._direction(each, weight) for each in parameters]
                clips = (_root_mean_squares(directions) / CLIPPING).clamp(min=1.0)
                rates = group["lr"] * _root_mean_squares(parameters).clamp(min=EPSILONS[1])
                torch._foreach_mul_(directions, list((rates / clips).unbind()))
                if group["weight_decay"]:
                    torch._foreach_mul_(parameters, list((1 - group["weight_decay"] * rates).unbind()))
                torch._foreach_sub_(parameters, directions)

    def _direction(self, parameter: Tensor, weight: float) -> Tensor:
        """The gradient over the root of the second moment, which is updated."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        squares = gradient.square().add_(EPSILONS[0])
        if parameter.dim() < 2:
            return state["exp_avg_sq"].lerp_(squares, weight).rsqrt().mul_(gradient)
        rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
        rows.lerp_(squares.mean(dim=-1), weight)
        columns.lerp_(squares.mean(dim=-2), weight)
        by_row = (rows / rows.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        return torch.mul(by_row, columns.unsqueeze(-2).rsqrt(), out=squares).mul_(gradient)


def _root_mean_squares(tensors: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm(tensors)
    return torch.stack(torch._foreach_div(norms, [math.sqrt(each.numel()) for each in tensors]))
