"""The optimizers: which rule updates which parameter, what it remembers, what that costs, and where it can run.

=========  =======================  ===============================  ===========================  ===================
optimizer  parameters               rule                             state, fp32, of R × C        stages, TP, offload
=========  =======================  ===============================  ===========================  ===================
adamw      all                      torch.optim.AdamW, fused         exp_avg, exp_avg_sq: R × C   0 to 3, any, any
adafactor  all                      transformers' Adafactor          exp_avg_sq_row: R,           0 and 1, 1, none
                                                                     exp_avg_sq_col: C;
                                                                     of a vector exp_avg_sq: R
muon       matrices of the layers   `compute.muon.Muon`              momentum_buffer: R × C       0 and 1, 1, none
           all others               torch.optim.AdamW, fused         exp_avg, exp_avg_sq: R × C
=========  =======================  ===============================  ===========================  ===================

Beside the state stand, in bytes a parameter, the weights of the computation (2 in bf16, 4 in fp32), the gradient in
fp32 (4) and in bf16 the fp32 weights (4). Adafactor's state is next to nothing: 10 bytes in bf16 where AdamW has 18. At
stage 1, N processes hold 1/N of the state and of bf16's fp32 weights each (Adafactor: 6 + 4/N), all of the rest.

Why not everywhere: from stage 1 on DeepSpeed (0.19.8) lays the parameters of a group end to end and cuts that into
equal pieces, at any place, so that no matrix keeps its rows and columns; Adafactor and Muon need them. They run under
`whole_tensors`, where at stage 1 every tensor belongs, whole, to one process. What tensor parallelism cuts is no whole
matrix either. DeepSpeed's offload moves its pieces.

The relative position bias learns `relative_attention_lr_multiplier` times as fast as the rest, and has no weight
decay: a weight of a matrix is some hundredths, a bias grows to several units.

Adafactor is as the T5 papers have it (Shazeer and Stern, 2018; Raffel et al., 2020): second moments by rows and columns
whose decay is 1 − step^−0.8, an update of at most root mean square 1, scaled with that of the weights, no first moment,
and the learning rate of our schedule. torch.optim.Adafactor (2.13) is another one: it takes no learning rate above
1/√step, and puts epsilon elsewhere.

No torch on import: what an optimizer costs is told before anything heavy is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from zerokara.config import PretrainConfig
from zerokara.model.parameters import Shape, is_distance_bias, is_layer_matrix, parameter_shapes, row_blocks
from zerokara.model.shapes import ModelShape
from zerokara.progress import count_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

WITHOUT_DEEPSPEED = (
    "zero_stage 0, adafactor and muon do not use DeepSpeed's ZeRO, nor does zero_stage 1 where one process reads all"
)

Rule = Literal["adamw", "adafactor", "muon"]
TITLES: dict[Rule, str] = {"adamw": "AdamW", "adafactor": "Adafactor", "muon": "Muon"}

ADAFACTOR_DECAY, ADAFACTOR_CLIPPING, ADAFACTOR_EPSILONS = -0.8, 1.0, (1e-30, 1e-3)
"""Shazeer and Stern, 2018, algorithm 6; the epsilons are added to squared gradients, and the least scale of weights."""


def by_whole_tensors(config: PretrainConfig, data_parallel_size: int) -> bool:
    """Whether `whole_tensors` updates the weights, and not DeepSpeed's ZeRO; `num_readers` processes share the data.

    Where one process reads all, stage 1 has nothing to share out, and DeepSpeed's copies of the gradients and of their
    squares in fp64 took a tenth of a step of 40M parameters on two cores.
    """
    nothing_to_share = config.zero_stage == 1 and data_parallel_size == 1 and config.offload == "none"
    return config.zero_stage == 0 or config.optimizer != "adamw" or nothing_to_share


def algorithm_of(optimizer: str, name: str, shape: Shape) -> Rule:
    """The rule by which an optimizer updates the parameter `name`."""
    if optimizer == "adafactor":
        return "adafactor"
    return "muon" if optimizer == "muon" and is_layer_matrix(name, shape) else "adamw"


def state_shapes(optimizer: str, name: str, shape: Shape) -> dict[str, Shape]:
    """What the optimizer remembers of the parameter `name`, each in fp32, by torch's and transformers' names."""
    rule = algorithm_of(optimizer, name, shape)
    if rule == "muon":
        return {"momentum_buffer": shape}
    if rule == "adafactor":
        if len(shape) < 2:
            return {"exp_avg_sq": shape}
        return {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": shape[:-2] + shape[-1:]}
    return {"exp_avg": shape, "exp_avg_sq": shape}


def state_bytes(optimizer: str, shape: ModelShape) -> int:
    """Size of all that the optimizer remembers of a model, as in a checkpoint."""
    return 4 * sum(
        math.prod(state)
        for name, of_parameter in parameter_shapes(shape).items()
        for state in state_shapes(optimizer, name, of_parameter).values()
    )


def checkpoint_bytes(optimizer: str, shape: ModelShape) -> int:
    """Size of a checkpoint: the fp32 weights and what the optimizer remembers."""
    return 4 * shape.num_parameters() + state_bytes(optimizer, shape)


Kind = Literal["matrix", "vector", "distances"]
_TITLES_OF_KINDS: dict[Kind, tuple[str, str]] = {
    "matrix": ("matrix", "matrices"),
    "vector": ("norms and biases", "norms and biases"),
    "distances": ("table of distances", "tables of distances"),
}


def kind_of(name: str, shape: Shape) -> Kind:
    """What decides about a parameter's decay and learning rate: matrices alone decay."""
    if is_distance_bias(name):
        return "distances"
    return "matrix" if len(shape) > 1 else "vector"


@dataclass(frozen=True)
class Group:
    """Parameters that are updated alike."""

    rule: Rule
    kind: Kind
    weight_decay: float
    lr_scale: float
    """The group's learning rate over that of the schedule."""
    names: tuple[str, ...]


def parameter_groups(config: PretrainConfig, parameters: Mapping[str, Shape]) -> list[Group]:
    """The groups that are not empty; each parameter is in one."""
    found: dict[tuple[Rule, Kind], list[str]] = {}
    for name, shape in parameters.items():
        found.setdefault((algorithm_of(config.optimizer, name, shape), kind_of(name, shape)), []).append(name)
    return [
        Group(
            rule,
            kind,
            weight_decay=config.weight_decay if kind == "matrix" else 0.0,
            lr_scale=config.distances_lr_factor if kind == "distances" else 1.0,
            names=tuple(names),
        )
        for (rule, kind), names in found.items()
    ]


def plan_lines(config: PretrainConfig, shape: ModelShape) -> list[str]:
    """What is updated by which rule, and what decays, a line for each rule."""
    parameters = parameter_shapes(shape)
    told: dict[Rule, list[str]] = {}
    for group in parameter_groups(config, parameters):
        numbers = count_text(sum(math.prod(parameters[name]) for name in group.names))
        kind = _TITLES_OF_KINDS[group.kind][len(group.names) != 1]
        decay = f"weight decay {group.weight_decay:g}" if group.kind == "matrix" else "no decay"
        faster = f", {group.lr_scale:g} times the learning rate" if group.lr_scale != 1 else ""
        told.setdefault(group.rule, []).append(f"{len(group.names)} {kind} ({numbers}) {decay}{faster}")
    return [f"{TITLES[rule]}: {', '.join(parts)}" for rule, parts in told.items()]


def build(
    config: PretrainConfig, tensors: Mapping[str, Tensor], shape: ModelShape
) -> dict[Rule, torch.optim.Optimizer]:
    """The torch optimizers that update fp32 `tensors` (some or all parameters, by name), one for each rule at work."""
    parameters = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    groups: dict[Rule, list[dict[str, Any]]] = {}
    for group in parameter_groups(config, parameters):
        entry = {"params": [tensors[name] for name in group.names], "weight_decay": group.weight_decay}
        groups.setdefault(group.rule, []).append({**entry, "lr_scale": group.lr_scale})
    return {rule: _BUILDERS[rule](config, entries, tensors, shape) for rule, entries in groups.items()}


def make_state(optimizer: str, made: Mapping[Rule, torch.optim.Optimizer], tensors: Mapping[str, Tensor]) -> None:
    """Make the state of `tensors`, zero, as the optimizers would in their first update: too late to load one."""
    import torch

    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        rule = algorithm_of(optimizer, name, shape)
        state: dict[str, Any] = {
            key: torch.zeros(of_key, dtype=torch.float32, device=tensor.device)
            for key, of_key in state_shapes(optimizer, name, shape).items()
        }
        if rule == "adamw":
            state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
        elif rule == "adafactor":
            state |= {"step": 0, "RMS": 0}
        made[rule].state[tensor] = state


def set_learning_rate(groups: Iterable[dict[str, Any]], learning_rate: float) -> None:
    """Give each of torch's groups its learning rate, where the schedule stands at `learning_rate`."""
    for group in groups:
        group["lr"] = learning_rate * group["lr_scale"]


def set_count(made: Mapping[Rule, torch.optim.Optimizer], num_updates: int) -> None:
    """Tell the optimizers how many updates they have made."""
    for one in made.values():
        for state in one.state.values():
            if isinstance(state.get("step"), int):
                state["step"] = num_updates
            elif "step" in state:
                state["step"].fill_(num_updates)


def _adamw(
    config: PretrainConfig, groups: list[dict[str, Any]], tensors: Mapping[str, Tensor], shape: ModelShape
) -> torch.optim.Optimizer:
    import torch

    betas = config.adam_beta1, config.adam_beta2
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_epsilon, fused=True)


def _adafactor(
    config: PretrainConfig, groups: list[dict[str, Any]], tensors: Mapping[str, Tensor], shape: ModelShape
) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(
        groups,
        lr=config.lr,
        eps=ADAFACTOR_EPSILONS,
        clip_threshold=ADAFACTOR_CLIPPING,
        decay_rate=ADAFACTOR_DECAY,
        beta1=None,
        scale_parameter=True,
        relative_step=False,
    )


def _muon(
    config: PretrainConfig, groups: list[dict[str, Any]], tensors: Mapping[str, Tensor], shape: ModelShape
) -> torch.optim.Optimizer:
    import torch

    from zerokara.training.compute.muon import Muon

    blocks = {
        tensor: [torch.from_numpy(rows).to(tensor.device) for rows in row_blocks(name, shape)]
        for name, tensor in tensors.items()
    }
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    return Muon(groups, config.lr, config.muon_momentum, config.weight_decay, blocks, dtype)


_BUILDERS: dict[Rule, Callable[..., torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
    "muon": _muon,
}
