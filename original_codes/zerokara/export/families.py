"""The table of families: which rules, and which Hugging Face class and configuration, an architecture has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerokara.export import gpt2, llama, qwen3, rules
from zerokara.export.rules import Rule
from zerokara.export.transforms import VOCABULARY
from zerokara.model.shapes import ModelShape

UNTIED_OUTPUT = Rule("output_layer.weight", ("lm_head.weight",), VOCABULARY)
"""The output matrix; a tied model has none of its own, on either side."""
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Family:
    """One architecture as Hugging Face knows it."""

    model_type: str
    """transformers' name of the configuration."""
    class_name: str
    rules: tuple[Rule, ...]
    config_values: Callable[[ModelShape], dict[str, Any]]
    settings: dict[str, str]
    """Keys of these values ↔ keys of config.yaml; what is in neither place is fixed for the family."""


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the control pieces; the same in tokenizer, trainer, and generation."""

    bos: int
    eos: int
    pad: int


FAMILIES = {
    "llama": Family("llama", llama.CLASS_NAME, llama.RULES, llama.config_values, llama.SETTINGS),
    "qwen3": Family("qwen3", qwen3.CLASS_NAME, qwen3.RULES, qwen3.config_values, llama.SETTINGS),
    "gpt2": Family("gpt2", gpt2.CLASS_NAME, gpt2.RULES, gpt2.config_values, gpt2.SETTINGS),
}


def rules_for(shape: ModelShape) -> list[Rule]:
    """Every rule of a model, layers written out."""
    table = FAMILIES[shape.architecture].rules
    return rules.expand(table if shape.tie_word_embeddings else (*table, UNTIED_OUTPUT), shape.num_layers)


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
        **family.config_values(shape),
    )
    config.architectures = [family.class_name]
    return config


def hf_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that Hugging Face's own class keeps, asked of a model without content."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    tied = set(UNTIED_OUTPUT.hf) if config.tie_word_embeddings else set()
    return {name: tuple(tensor.shape) for name, tensor in state.items() if name not in tied}


def checked_rules(
    weights: Mapping[str, Tensor], shape: ModelShape, config: Any
) -> tuple[list[Rule], dict[str, tuple[int, ...]]]:
    """The rules of a model, once they are known to turn exactly `weights` into exactly what `config` asks for.

    Also gives name and shape of each Hugging Face tensor.

    Raises:
        RunError: lists every tensor that is left over, missing, or of a wrong shape.
    """
    found = rules_for(shape)
    ours = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    expected = hf_shapes(config)
    rules.check(found, ours, expected, shape)
    return found, expected
