"""The weight rules: one table in each `Family`, from which both directions and the check of completeness derive. The
tables are in `weight_names`.

A rule names one of our tensors (megatron-core's parameter names, as checkpoints hold them), the Hugging Face tensors
made of it, and the inverse pair of transforms between them. ``{i}`` stands for each layer, ``{e}`` for each expert.
Nothing is converted before `check`, or `offenders` for a folder of others, has found that every source tensor is used
once, and every shape as expected.

Transforms only move, drop or pad rows, so that a tensor comes back bit by bit (rows that pad the vocabulary come back
as zeros), and shapes can be checked on tensors without content (device ``meta``).

Shape suffixes: D hidden size, H heads, K kv heads, G = H/K query heads that share a kv head, E head_dim,
F feed-forward size, V real vocabulary, P padded vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from zerokara.base.errors import RunError
from zerokara.model.shapes import ModelShape

Parts = tuple[Tensor, ...]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Transform:
    """An inverse pair: one tensor of ours ↔ the Hugging Face tensors made of it, in the order of the rule's names."""

    to_hf: Callable[[Tensor, ModelShape], Parts]
    from_hf: Callable[[Parts, ModelShape], Tensor]


def _real_rows(ours_PD: Tensor, shape: ModelShape) -> Parts:
    return (ours_PD[: shape.vocab_size],)


def _padded_rows(parts: Parts, shape: ModelShape) -> Tensor:
    # Zeros, as in a new model: a zero row adds nothing to any gradient, and its logit is masked.
    rows_VD, *_ = parts
    padding = rows_VD.new_zeros((shape.padded_vocab_size - shape.vocab_size, *rows_VD.shape[1:]))
    return torch.cat((rows_VD, padding))


def _by_kind(ours: Tensor, shape: ModelShape, sizes: tuple[int, ...]) -> Parts:
    """megatron-core orders rows by kv head: its query heads, if there are any, then its key, then its value."""
    rest = ours.shape[1:]
    grouped = ours.reshape(shape.num_kv_heads, sum(sizes), shape.head_dim, *rest)
    return tuple(part.reshape(-1, *rest) for part in grouped.split(sizes, dim=1))


def _queries_keys_values(ours: Tensor, shape: ModelShape) -> Parts:
    return _by_kind(ours, shape, (shape.num_attn_heads // shape.num_kv_heads, 1, 1))


def _grouped(parts: Parts, shape: ModelShape) -> Tensor:
    rest = parts[0].shape[1:]
    by_group = [part.reshape(shape.num_kv_heads, -1, shape.head_dim, *rest) for part in parts]
    return torch.cat(by_group, dim=1).reshape(-1, *rest)


def _one_qkv(ours: Tensor, shape: ModelShape) -> Parts:
    """All queries, then all keys, then all values, in one tensor (GPT-2's ``c_attn``), transposed."""
    return (torch.cat(_queries_keys_values(ours, shape)).t(),)


def _one_qkv_back(parts: Parts, shape: ModelShape) -> Tensor:
    query_rows, key_rows = shape.query_projection_size, shape.kv_projection_size
    return _grouped(parts[0].t().split((query_rows, key_rows, key_rows)), shape)


def _halves_of_each_expert(ours: Tensor, shape: ModelShape) -> Parts:
    """The gate projections of all experts, then their up projections."""
    gates, ups = ours.chunk(2, dim=1)
    return (*gates.unbind(), *ups.unbind())


def _halves_of_each_expert_back(parts: Parts, shape: ModelShape) -> Tensor:
    half = len(parts) // 2
    return torch.cat((torch.stack(parts[:half]), torch.stack(parts[half:])), dim=1)


SAME = Transform(lambda ours, shape: (ours,), lambda parts, shape: parts[0])
TRANSPOSED = Transform(lambda ours, shape: (ours.t(),), lambda parts, shape: parts[0].t())
"""GPT-2's ``Conv1D`` keeps [in, out] where a linear layer keeps [out, in]; `t` leaves a bias as it is."""
VOCABULARY = Transform(_real_rows, _padded_rows)
"""[P, D] ↔ [V, D]."""
COPIED_VOCABULARY = Transform(lambda ours, shape: _real_rows(ours, shape) * 3, _padded_rows)
"""[P, D] ↔ three copies of [V, D], of which the first is read back."""
QUERY_KEY_VALUE = Transform(_queries_keys_values, _grouped)
"""[K·(G+2)·E, D] ↔ [H·E, D], [K·E, D], [K·E, D]; biases alike."""
KEY_VALUE = Transform(lambda ours, shape: _by_kind(ours, shape, (1, 1)), _grouped)
"""[K·2·E, D] ↔ [K·E, D], [K·E, D]: of cross-attention."""
JOINED_QUERY_KEY_VALUE = Transform(_one_qkv, _one_qkv_back)
"""[K·(G+2)·E, D] ↔ [D, (H+2K)·E]; a bias stays one-dimensional."""
EXPERTS = Transform(lambda ours, shape: ours.unbind(), lambda parts, shape: torch.stack(parts))
"""[X, R, C] ↔ X times [R, C]."""
EXPERTS_GATE_AND_UP = Transform(_halves_of_each_expert, _halves_of_each_expert_back)
"""[X, 2F, D] ↔ X times [F, D], the gates, then X times [F, D], the up projections."""
GATE_AND_UP = Transform(lambda ours, shape: ours.chunk(2), lambda parts, shape: torch.cat(parts))
"""[2F, D] ↔ [F, D], [F, D]: megatron-core applies the activation to the first half."""


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
    rules: tuple[WeightRule, ...]
    settings: Mapping[str, str]
    """Keys of the configuration, dotted where nested ↔ keys of config.yaml."""
    fixed_values: Callable[[ModelShape], dict[str, Any]]
    """Values of the configuration that the family fixes, or computes from several settings."""
    is_encoder_decoder: bool = False
    older_names: Mapping[str, str] = field(default_factory=dict)
    """Keys of config.json, dotted where nested → the top-level names under which older clients look for the values."""
    copies: tuple[str, ...] = ()
    """Names under which the class has its embedding again; in no file, unless `stores_copies`."""
    stores_copies: bool = False
    """True if the file of an untied model must hold them: transformers would initialise them at random."""
    config_is_tied: Callable[[Any], bool] = lambda config: bool(config.tie_word_embeddings)
    """True if a loaded configuration ties embedding and output matrix."""
    moe_layers: Callable[[Any], tuple[int, ...]] = lambda _: ()
    """MoE layers of a loaded configuration, where they are a setting of ours (`moe_layers`)."""

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


def expand(table: Sequence[WeightRule], shape: ModelShape) -> list[WeightRule]:
    """Rules of a table, with layer templates expanded layer by layer in place of the first template."""
    templates = [rule for rule in table if "{i}" in rule.ours]
    expanded: list[WeightRule] = []
    for rule in table:
        if rule not in templates:
            expanded.append(rule)
        elif rule is templates[0]:
            for layer in range(shape.num_layers):
                kinds = ("all", "sparse" if layer in shape.moe_layers else "dense")
                expanded.extend(_at_layer(rule, layer, shape.num_experts) for rule in templates if rule.layers in kinds)
    return expanded


def _at_layer(rule: WeightRule, layer: int, num_experts: int) -> WeightRule:
    """Rule for one layer, with names that hold ``{e}`` repeated for each expert."""
    names = [
        name.replace("{i}", str(layer)).replace("{e}", str(expert))
        for name in rule.hf
        for expert in range(num_experts if "{e}" in name else 1)
    ]
    return replace(rule, ours=rule.ours.replace("{i}", str(layer)), hf=tuple(names))


def to_hf(
    rules: Iterable[WeightRule], weights: Mapping[str, Tensor], shape: ModelShape
) -> Iterator[tuple[str, Tensor]]:
    """Convert tensor by tensor, in the order of the rules, holding one of our tensors at a time."""
    for rule in rules:
        yield from zip(rule.hf, rule.transform.to_hf(weights[rule.ours], shape), strict=True)


def from_hf(
    rules: Iterable[WeightRule], weights: Mapping[str, Tensor], shape: ModelShape
) -> Iterator[tuple[str, Tensor]]:
    """Convert back, tensor by tensor; rows that pad the vocabulary are zero."""
    for rule in rules:
        yield rule.ours, rule.transform.from_hf(tuple(weights[name] for name in rule.hf), shape)


def check(rules: Sequence[WeightRule], ours: Shapes, shape: ModelShape) -> Shapes:
    """Check that `ours` are the tensors of a model of this shape, and that the rules use each of them once.

    Return name → shape of the Hugging Face tensors that the rules make, in their order. Whether these are all that the
    class has, its loading reports.

    Raises:
        RunError: lists every tensor that is left over, missing, named twice, or of a wrong shape.
    """
    found = list(_coverage("checkpoint", [rule.ours for rule in rules], ours))
    found += _other_shapes(ours, shape.parameter_shapes())
    if found:
        lines = "\n".join(f"  {offender}" for offender in found)
        raise RunError(
            f"the weights do not fit the {shape.architecture} rules, {len(found)} faults:\n{lines}\n"
            "Either the checkpoint and config_resolved.yaml do not belong together, or a weight rule in "
            "original_codes/zerokara/huggingface is wrong."
        )
    empty = {name: torch.empty(size, device="meta") for name, size in ours.items()}
    return {name: tuple(tensor.shape) for name, tensor in to_hf(rules, empty, shape)}


def offenders(rules: Sequence[WeightRule], hf: Shapes, shape: ModelShape) -> list[str]:
    """Return where the tensors `hf` are not those that the rules make of a model of this shape."""
    if shape.num_attn_heads % shape.num_kv_heads:
        return [f"{shape.num_attn_heads} heads cannot share {shape.num_kv_heads} key and value heads"]
    expected = check(rules, shape.parameter_shapes(), shape)
    found = list(_coverage("Hugging Face model", [name for rule in rules for name in rule.hf], hf))
    return found + _other_shapes(hf, expected)


def _other_shapes(found: Shapes, expected: Shapes) -> list[str]:
    return [
        f"{name}: has shape {list(size)}, must have {list(expected[name])}"
        for name, size in found.items()
        if name in expected and tuple(size) != expected[name]
    ]


def _coverage(side: str, named: list[str], present: Shapes) -> Iterator[str]:
    times = Counter(named)
    for name in sorted(present.keys() - times.keys()):
        yield f"{name}: in the {side}, but no rule uses it"
    for name in sorted(times.keys() - present.keys()):
        yield f"{name}: a rule names it, but it is missing in the {side}"
    for name, count in sorted(times.items()):
        if count > 1:
            yield f"{name}: named by {count} rules in the {side}"
