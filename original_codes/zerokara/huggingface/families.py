"""The table of families, and what follows from it for a model: its rules, and its configuration and tensors there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from zerokara.huggingface import weight_rules
from zerokara.huggingface.gpt2 import GPT2
from zerokara.huggingface.llama import LLAMA, MIXTRAL, QWEN3, QWEN3_MOE
from zerokara.huggingface.t5 import SWITCH, T5
from zerokara.huggingface.weight_rules import COPIED_VOCABULARY, VOCABULARY, WeightRule
from zerokara.model.shapes import ModelShape

UNTIED_OUTPUT = WeightRule("output_layer.weight", ("lm_head.weight",), VOCABULARY)
"""The output matrix; a tied model has none, on either side."""
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

FAMILIES = {family.model_type: family for family in (LLAMA, QWEN3, GPT2, MIXTRAL, QWEN3_MOE, T5)} | {"switch": SWITCH}
"""By our names of the architectures, which are transformers' but for one."""


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the control tokens; the same in tokenizer, trainer, and generation."""

    bos: int | None
    """None if the tokenizer has none, as T5's."""
    eos: int
    pad: int
    other_ends: tuple[int, ...] = ()
    """Ids besides eos at which generation stops: the ends of a chat template's answers."""


def rules_for(shape: ModelShape) -> list[WeightRule]:
    """Every weight rule of a model, layer by layer."""
    family = FAMILIES[shape.architecture]
    table = family.rules
    if family.stores_copies and not shape.tie_word_embeddings:
        first, *others = table
        table = (replace(first, hf=(*first.hf, *family.copies), transform=COPIED_VOCABULARY), *others)
    table = table if shape.tie_word_embeddings else (*table, UNTIED_OUTPUT)
    return weight_rules.expand(table, shape.num_layers, shape.moe_layers, shape.num_experts)


def hf_config(shape: ModelShape, special: SpecialIds, dtype: str) -> Any:
    """The transformers configuration of a model; `dtype` is that of the saved weights, ``fp32`` or ``bf16``."""
    from transformers import AutoConfig

    family = FAMILIES[shape.architecture]
    config = AutoConfig.for_model(
        family.model_type,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tie_word_embeddings,
        bos_token_id=special.bos,
        eos_token_id=special.eos,
        pad_token_id=special.pad,
        dtype=str(TORCH_DTYPES[dtype]).removeprefix("torch."),
        # The decoder starts with padding, as T5's does.
        **({"decoder_start_token_id": special.pad} if family.is_encoder_decoder else {}),
        **nested(family.config_values(shape)),
    )
    config.architectures = [family.class_name]
    config.tie_word_embeddings = shape.tie_word_embeddings  # T5Config sets it to true, whatever is passed
    return config


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted keys as dictionaries within each other."""
    found: dict[str, Any] = {}
    for dotted, value in values.items():
        *outer, key = dotted.split(".")
        reduce(lambda inner, name: inner.setdefault(name, {}), outer, found)[key] = value
    return found


def hf_shapes(shape: ModelShape, config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the file of a model with this configuration, from a model without content."""
    import transformers

    family = FAMILIES[shape.architecture]
    with torch.device("meta"):
        model = getattr(transformers, family.auto_class).from_config(config)
        state = state_by_file_names(model)
    is_tied = shape.tie_word_embeddings
    tied = {*(() if family.stores_copies and not is_tied else family.copies), *(UNTIED_OUTPUT.hf if is_tied else ())}
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name not in tied}


def state_by_file_names(model: Any) -> dict[str, Tensor]:
    """The tensors of a transformers model by their names in files.

    transformers keeps the matrices of all experts in one tensor, files hold one each (core_model_loading.py).
    """
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, model.state_dict()))
