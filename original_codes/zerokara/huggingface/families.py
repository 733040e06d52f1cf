"""The table of families: the weight rules and the Hugging Face class and configuration of each architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zerokara.config.architectures import ARCHITECTURES
from zerokara.huggingface import gpt2, llama, mixtral, qwen3, qwen3_moe, switch, t5, weight_rules
from zerokara.huggingface.transforms import COPIED_VOCABULARY, VOCABULARY
from zerokara.huggingface.weight_rules import WeightRule
from zerokara.model.shapes import ModelShape

UNTIED_OUTPUT = WeightRule("output_layer.weight", ("lm_head.weight",), VOCABULARY)
"""The output matrix; a tied model has none, on either side."""
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Family:
    """One architecture as Hugging Face knows it."""

    model_type: str
    """transformers' name of the configuration class."""
    class_name: str
    rules: tuple[WeightRule, ...]
    config_values: Callable[[ModelShape], dict[str, Any]]
    settings: dict[str, str]
    """Keys of these values ↔ keys of config.yaml; values without an entry are fixed for the family."""
    description: str
    """For the model card."""
    is_encoder_decoder: bool
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


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the control tokens; the same in tokenizer, trainer, and generation."""

    bos: int | None
    """None if the tokenizer has none, as T5's."""
    eos: int
    pad: int
    other_ends: tuple[int, ...] = ()
    """Ids besides eos at which generation stops: the ends of a chat template's answers."""


def _family(architecture: str, module: ModuleType, description: str, model_type: str = "", **more: Any) -> Family:
    """The entry of the family that `module` of this room defines; transformers may call it otherwise."""
    return Family(
        model_type or architecture,
        module.CLASS_NAME,
        module.RULES,
        module.config_values,
        module.SETTINGS,
        description,
        ARCHITECTURES[architecture].is_encoder_decoder,
        getattr(module, "OLDER_NAMES", {}),
        **({"moe_layers": module.moe_layers} if hasattr(module, "moe_layers") else {}),
        **more,
    )


FAMILIES = {
    "llama": _family("llama", llama, "Llama-like: RMSNorm, SwiGLU, rotary positions, grouped-query attention"),
    "qwen3": _family("qwen3", qwen3, "Qwen3-like: RMSNorm, QK-norm, SwiGLU, rotary positions, grouped-query attention"),
    "gpt2": _family("gpt2", gpt2, "GPT-2-like: LayerNorm, GELU, learned positions"),
    "mixtral": _family(
        "mixtral", mixtral, "Mixtral-like: Llama with a mixture of experts in each layer, top-k routing"
    ),
    "qwen3_moe": _family(
        "qwen3_moe", qwen3_moe, "Qwen3-MoE-like: Qwen3 with a mixture of experts in its MoE layers, top-k routing"
    ),
    "switch": _family(
        "switch",
        switch,
        "Switch Transformer: T5 with a mixture of experts in its MoE layers, top-1 routing",
        "switch_transformers",
        copies=t5.COPIES,
        stores_copies=True,
    ),
    "t5": _family(
        "t5",
        t5,
        "T5 version 1.1: encoder-decoder, RMSNorm, gated GELU, relative position bias",
        copies=t5.COPIES,
        config_is_tied=t5.config_is_tied,
    ),
}


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
        **family.config_values(shape),
    )
    config.architectures = [family.class_name]
    config.tie_word_embeddings = shape.tie_word_embeddings  # T5Config sets it to true, whatever is passed
    return config


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
