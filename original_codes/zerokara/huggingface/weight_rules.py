"""The weight rules: one table in each `Family`, from which both directions and the check of completeness derive.

A rule names one of our tensors (megatron-core's parameter names, as checkpoints hold them), the Hugging Face tensors
made of it, and the inverse pair of transforms between them. ``{i}`` stands for each layer, ``{e}`` for each expert.
Nothing is converted before `check` has found that every source tensor is used once, every target tensor filled once,
and every shape as expected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from zerokara.errors import RunError
from zerokara.huggingface.transforms import SAME, Transform
from zerokara.model.shapes import ModelShape

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class WeightRule:
    """One tensor of ours and the Hugging Face tensors made of it."""

    ours: str
    hf: tuple[str, ...]
    transform: Transform = SAME
    layers: Literal["all", "dense", "sparse"] = "all"
    """The layers that a template applies to: MoE layers (``sparse``), ``dense`` ones, or all."""


@dataclass(frozen=True)
class Family:
    """One architecture as Hugging Face knows it."""

    model_type: str
    """transformers' name of the configuration class."""
    class_name: str
    description: str
    """For the model card."""
    rules: tuple[WeightRule, ...]
    settings: Mapping[str, str]
    """Keys of the configuration, dotted where nested ↔ keys of config.yaml."""
    fixed_values: Callable[[ModelShape], dict[str, Any]]
    """The other values of the configuration: what the family fixes, or computes from several settings."""
    is_encoder_decoder: bool = False
    older_names: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json, dotted where nested → the top-level names under which older clients look for the values."""
    copies: tuple[str, ...] = ()
    """Names under which the class has its embedding again; in no file, unless `stores_copies`."""
    stores_copies: bool = False
    """Whether the file of an untied model must hold them: transformers would initialise them at random."""
    config_is_tied: Callable[[Any], bool] = lambda config: bool(config.tie_word_embeddings)
    """Whether a loaded configuration says that embedding and output matrix are tied."""
    moe_layers: Callable[[Any], tuple[int, ...]] = lambda _: ()
    """The layers with experts that a loaded configuration says, where a setting of ours says it (`moe_layers`)."""

    @property
    def auto_class(self) -> str:
        """transformers' name of the auto class that loads it."""
        return "AutoModelForSeq2SeqLM" if self.is_encoder_decoder else "AutoModelForCausalLM"

    @property
    def task(self) -> str:
        """The Hub's name of the task."""
        return "text2text-generation" if self.is_encoder_decoder else "text-generation"

    def config_values(self, shape: ModelShape) -> dict[str, Any]:
        """The arguments of the configuration class, by dotted keys where nested."""
        return {key: getattr(shape, setting) for key, setting in self.settings.items()} | self.fixed_values(shape)


def expand(
    table: Iterable[WeightRule], num_layers: int, moe_layers: Collection[int] = (), num_experts: int = 0
) -> list[WeightRule]:
    """Every rule of a table, with layer templates expanded layer by layer in place of the first template."""
    table = list(table)
    templates = [rule for rule in table if "{i}" in rule.ours]
    expanded: list[WeightRule] = []
    for rule in table:
        if rule not in templates:
            expanded.append(rule)
        elif rule is templates[0]:
            for layer in range(num_layers):
                kinds = ("all", "sparse" if layer in moe_layers else "dense")
                expanded.extend(_at_layer(rule, layer, num_experts) for rule in templates if rule.layers in kinds)
    return expanded


def _at_layer(rule: WeightRule, layer: int, num_experts: int) -> WeightRule:
    """The rule for one layer, with names that hold ``{e}`` repeated for each expert."""
    names = [
        name.replace("{i}", str(layer)).replace("{e}", str(expert))
        for name in rule.hf
        for expert in range(num_experts if "{e}" in name else 1)
    ]
    return replace(rule, ours=rule.ours.replace("{i}", str(layer)), hf=tuple(names))


def to_hf(
    rules: Iterable[WeightRule], weights: Mapping[str, Tensor], shape: ModelShape
) -> Iterator[tuple[str, Tensor]]:
    """Convert tensor by tensor, in the order of the rules; holds one of our tensors at a time."""
    for rule in rules:
        yield from zip(rule.hf, rule.transform.to_hf(weights[rule.ours], shape), strict=True)


def from_hf(rules: Iterable[WeightRule], weights: dict[str, Tensor], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Convert back, tensor by tensor, each taken out of `weights`; rows that pad the vocabulary are zero."""
    for rule in rules:
        yield rule.ours, rule.transform.from_hf(tuple(weights.pop(name) for name in rule.hf), shape)


def check(rules: Iterable[WeightRule], ours: Shapes, hf: Shapes, shape: ModelShape) -> None:
    """Check that the rules turn exactly the tensors `ours` into exactly the tensors `hf`, in shape as well.

    Raises:
        RunError: lists every tensor that is left over, missing, named twice, or of a wrong shape.
    """
    rules = list(rules)
    offenders = [
        *_coverage("checkpoint", [rule.ours for rule in rules], ours),
        *_coverage("Hugging Face model", [name for rule in rules for name in rule.hf], hf),
    ]
    for rule in rules:
        if rule.ours not in ours or any(name not in hf for name in rule.hf):
            continue
        parts = tuple(torch.empty(hf[name], device="meta") for name in rule.hf)
        try:
            expected = tuple(rule.transform.from_hf(parts, shape).shape)
        except (RuntimeError, IndexError, ValueError) as error:
            offenders.append(
                f"{', '.join(rule.hf)}: shapes {[hf[name] for name in rule.hf]} do not fit together ({error})"
            )
            continue
        if tuple(ours[rule.ours]) != expected:
            offenders.append(f"{rule.ours}: has shape {list(ours[rule.ours])}, must have {list(expected)}")
    if offenders:
        lines = "\n".join(f"  {offender}" for offender in offenders)
        raise RunError(
            f"the weights do not fit the {shape.architecture} rules, {len(offenders)} faults:\n{lines}\n"
            "Either the checkpoint and config_resolved.yaml do not belong together, or a weight rule in "
            "original_codes/zerokara/huggingface is wrong."
        )


def _coverage(side: str, named: list[str], present: Shapes) -> Iterator[str]:
    times = Counter(named)
    for name in sorted(present.keys() - times.keys()):
        yield f"{name}: in the {side}, but no rule uses it"
    for name in sorted(times.keys() - present.keys()):
        yield f"{name}: a rule names it, but it is missing in the {side}"
    for name, count in sorted(times.items()):
        if count > 1:
            yield f"{name}: named by {count} rules in the {side}"
