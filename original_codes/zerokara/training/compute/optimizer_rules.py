"""The optimizers: which algorithm updates which parameter, its state, and what that costs (before torch is loaded).

``adamw`` is torch's, fused; ``adafactor``, as in the T5 papers, and ``muon`` are in `optimizers`. Muon updates
the matrices of the layers alone, AdamW all others. Adafactor and Muon need whole matrices, and so no offload and no
tensor parallelism; what ZeRO cuts, one process puts together again. In bf16 a parameter takes 18 bytes with AdamW
(weight 2, gradient 4, fp32 master weight 4, state 8), 10 with Adafactor.

The relative position bias learns `relative_attention_lr_multiplier` times as fast as the rest, without weight decay: a
weight of a matrix is some hundredths, a bias grows to several units.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from zerokara.config.engine import OptimSettings
from zerokara.config.settings import resolved
from zerokara.model.shapes import ModelShape, TensorShape, is_layer_matrix

Algorithm = Literal["adamw", "adafactor", "muon"]


def algorithm_of(optimizer: str, name: str, shape: TensorShape) -> Algorithm:
    if optimizer == "adafactor":
        return "adafactor"
    return "muon" if optimizer == "muon" and is_layer_matrix(name, shape) else "adamw"


def state_shapes(optimizer: str, name: str, shape: TensorShape) -> dict[str, TensorShape]:
    """Shapes of the optimizer state of the parameter `name`, each in fp32, by torch's and transformers' names."""
    algorithm = algorithm_of(optimizer, name, shape)
    if algorithm == "muon":
        return {"momentum_buffer": shape}
    if algorithm == "adafactor":
        if len(shape) < 2:
            return {"exp_avg_sq": shape}
        return {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": shape[:-2] + shape[-1:]}
    return {"exp_avg": shape, "exp_avg_sq": shape}


def checkpoint_shapes(optimizer: str, shape: ModelShape) -> dict[str, TensorShape]:
    """Shapes of the tensors of a checkpoint, in fp32: weights, and their optimizer state as ``<parameter>.<key>``."""
    shapes = dict(shape.parameter_shapes())
    for name, size in shape.parameter_shapes().items():
        shapes |= {f"{name}.{key}": of_key for key, of_key in state_shapes(optimizer, name, size).items()}
    return shapes


def checkpoint_bytes(optimizer: str, shape: ModelShape) -> int:
    return 4 * sum(map(math.prod, checkpoint_shapes(optimizer, shape).values()))


def owners_of(sizes: Mapping[str, int], holders: Mapping[str, Sequence[int]], num_ranks: int) -> dict[str, int]:
    """The rank that updates each tensor as a whole, one of those that hold numbers of it.

    First what one rank alone holds; then the largest first, to whichever of its holders has fewest numbers.
    """
    owners, loads = dict[str, int](), [0] * num_ranks
    for name in sorted(sizes, key=lambda name: (len(holders[name]) > 1, -sizes[name], name)):
        owners[name] = least = min(holders[name], key=loads.__getitem__)
        loads[least] += sizes[name]
    return owners


class ParameterGroup(NamedTuple):
    """Parameters with one algorithm, weight decay and learning rate."""

    algorithm: Algorithm
    weight_decay: float = 0.0
    lr_scale: float = 1.0
    """The group's learning rate over that of the schedule."""


def parameter_groups(config: OptimSettings, parameters: Mapping[str, TensorShape]) -> dict[ParameterGroup, list[str]]:
    """The non-empty groups, each with the names of its parameters; each parameter is in one. Only matrices decay, by
    `weight_decay` of the settings, which `planning.recipe` chooses for ``auto``."""
    bias_lr = config.relative_attention_lr_multiplier
    if bias_lr == "auto":
        bias_lr = 1.0 if config.optimizer == "adafactor" else 30.0
    found: dict[ParameterGroup, list[str]] = {}
    for name, shape in parameters.items():
        algorithm = algorithm_of(config.optimizer_name, name, shape)
        group = ParameterGroup(algorithm)
        if name.endswith("relative_attention_bias.weight"):
            group = ParameterGroup(algorithm, lr_scale=bias_lr)
        elif len(shape) > 1:
            group = ParameterGroup(algorithm, resolved(config.weight_decay))
        found.setdefault(group, []).append(name)
    return found
