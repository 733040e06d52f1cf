"""The models of stock transformers: configuration, tensor names, loading, conversion.

Weights come from safetensors on this machine only, or from memory; no code of a folder is run.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokara.base.errors import RunError
from zerokara.huggingface import weight_rules
from zerokara.huggingface.model_folder import BUFFERS, CONFIG
from zerokara.huggingface.weight_names import FAMILIES
from zerokara.huggingface.weight_rules import COPIED_VOCABULARY, VOCABULARY, WeightRule
from zerokara.model.shapes import ModelShape
from zerokara.tokenizer import CONFIG_NAME
from zerokara.tokenizer.hugging_face import read_json

UNTIED_OUTPUT = WeightRule("output_layer.weight", ("lm_head.weight",), VOCABULARY)
"""The output matrix; a tied model has none, on either side."""
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MAX_REASON = 300
"""Characters of a message of transformers, which may quote a whole file."""


@dataclass(frozen=True)
class SpecialIds:
    """Ids of the control tokens; the same in tokenizer, trainer, and generation."""

    bos: int | None
    """None for a tokenizer without a start token, such as T5's."""
    eos: int
    pad: int
    other_ends: tuple[int, ...] = ()
    """Further ids at which generation stops: the ends of a chat template's answers."""


def rules_for(shape: ModelShape) -> list[WeightRule]:
    """Every weight rule of a model, layer by layer."""
    family = FAMILIES[shape.architecture]
    table = family.rules if shape.tie_word_embeddings else (*family.rules, UNTIED_OUTPUT)
    if family.stores_copies and not shape.tie_word_embeddings:
        first, *others = table
        table = (replace(first, hf=(*first.hf, *family.copies), transform=COPIED_VOCABULARY), *others)
    return weight_rules.expand(table, shape)


def hf_config(shape: ModelShape, special: SpecialIds, dtype: str) -> Any:
    """The transformers configuration of a model; `dtype` is that of the saved weights, ``fp32`` or ``bf16``."""
    from transformers import AutoConfig

    family = FAMILIES[shape.architecture]
    values: dict[str, Any] = {}
    for dotted, value in family.config_values(shape).items():  # as dictionaries within each other
        *outer, key = dotted.split(".")
        reduce(lambda inner, name: inner.setdefault(name, {}), outer, values)[key] = value
    config = AutoConfig.for_model(
        family.model_type,
        architectures=[family.class_name],
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tie_word_embeddings,
        bos_token_id=special.bos,
        eos_token_id=special.eos,
        pad_token_id=special.pad,
        dtype=str(TORCH_DTYPES[dtype]).removeprefix("torch."),
        # The decoder starts with padding, as T5's does.
        **({"decoder_start_token_id": special.pad} if family.is_encoder_decoder else {}),
        **values,
    )
    config.tie_word_embeddings = shape.tie_word_embeddings  # T5Config sets it to true, whatever is passed
    return config


def load_model(folder: Path | None, dtype: torch.dtype, class_name: str, **more: Any) -> tuple[Any, list[str]]:
    """Return the model, on the CPU, and the faults of the loading report: missing, unexpected, other shapes."""
    import transformers  # half a second to import, and each training process imports this module

    silence(progress_bar=folder is not None and sys.stderr.isatty())
    torch.backends.cuda.enable_cudnn_sdp(False)  # with masks it computes wrong numbers (`model.attention_check`)
    model, report = getattr(transformers, class_name).from_pretrained(
        folder,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
        **more,
    )
    found = ((name, sorted(key for key in map(str, keys) if not BUFFERS.search(key))) for name, keys in report.items())
    return model, [f"{name}: {keys}" for name, keys in found if keys]


def stock_model_of(
    shape: ModelShape,
    weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    special: SpecialIds,
    dtype: str = "fp32",
    device: torch.device | str = "cpu",
) -> Any:
    """Return the transformers model of `weights` (our parameter names → unpartitioned tensors), for inference.

    For other weights, make another: that takes 20 to 60 ms and no second copy of the weights. Tensors that are in
    `dtype` (``fp32`` or ``bf16``) on `device` already are shared where the rules only name or cut them, so the model is
    to be used, and let go, before training changes them.

    Raises:
        RunError: the weights do not fit the rules; lists every tensor at fault.
    """
    # Detached: a parameter of the module that is trained must not become one of this model.
    ours = {name: tensor.detach() for name, tensor in dict(weights).items()}
    config, rules = hf_config(shape, special, dtype), rules_for(shape)
    weight_rules.check(rules, {name: tuple(tensor.shape) for name, tensor in ours.items()}, shape)
    torch_dtype = TORCH_DTYPES[dtype]
    model, faults = load_model(
        None,
        torch_dtype,
        FAMILIES[shape.architecture].class_name,
        config=type(config).from_dict(config.to_dict()),  # as from config.json: T5 ties by what it finds there
        state_dict={name: tensor.to(device, torch_dtype) for name, tensor in weight_rules.to_hf(rules, ours, shape)},
    )
    if faults:
        raise RunError(f"stock transformers do not take the weights: {'; '.join(faults)}")
    return model.to(device).eval().requires_grad_(False)


def silence(progress_bar: bool = False) -> None:
    """Silence transformers' hints, as that T5's separate output matrix is not tied, and its progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    (logging.enable_progress_bar if progress_bar else logging.disable_progress_bar)()


def reason_against(folder: Path, error: Exception) -> str:
    """Say why transformers did not open a folder: it needs code, which is not run, or what the error says."""
    for name in (CONFIG, CONFIG_NAME):
        if read_json(folder / name).get("auto_map"):
            return f"needs Python code of the folder (auto_map in {name}), which is not run"
    return f"transformers cannot read it: {one_line(error)}"


def one_line(message: object) -> str:
    """The text of an error or other message of transformers in one line, its beginning where it is long."""
    text = " ".join(str(message).split())
    return text if len(text) <= _MAX_REASON else f"{text[:_MAX_REASON]}…"
