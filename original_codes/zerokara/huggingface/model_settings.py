"""A Hugging Face folder's config.json → our settings of the model, so that nobody has to copy them.

The inverse of the families' `config_values`. What a family fixes (an activation, a scale) is not read here: `from_hf`
compares the whole configuration, and refuses a folder that differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from zerokara.config.model import ModelSettings
from zerokara.errors import Fault, UserError
from zerokara.huggingface import families, from_hf
from zerokara.huggingface.families import Family
from zerokara.huggingface.tokenizer_json import MODEL_FILE, SENTENCEPIECE_FILE

TOKENIZER_NAMES = (SENTENCEPIECE_FILE, MODEL_FILE, "spiece.model")
"""Under which a folder may hold its SentencePiece model: ours, Llama's, T5's."""
_T5_CONTEXT = 512
"""Of the T5 models, whose configuration has no context length: relative positions know none."""
_MOST_CONTEXT = 10**6
"""A greater `model_max_length` is a tokenizer's way of saying that it has none."""


def read(folder: Path, fault: from_hf.SettingFault) -> dict[str, Any]:
    """Return the settings of `ModelSettings` that make the model of a folder; `fault` is of the setting `init_from`.

    Raises:
        UserError: the folder holds no model, or one of an unknown family.
    """
    if not (folder / "config.json").is_file():
        raise UserError(fault("init_from", *from_hf.no_model(folder)))
    config = from_hf.read_config(folder)
    found = [(name, family) for name, family in families.FAMILIES.items() if family.model_type == config.model_type]
    if not found:
        rule = f"holds a model of type {config.model_type}"
        raise UserError(fault("init_from", rule, f"known architectures: {', '.join(families.FAMILIES)}"))
    name, family = found[0]
    values: dict[str, Any] = {"architecture": name, "seq_len": _context_length(folder, family, config)}
    for key, ours in family.settings.items():
        value = from_hf.value_of(config, key)
        if value is not None and ours in ModelSettings.model_fields:
            values[ours] = value
    values["tie_word_embeddings"] = family.config_is_tied(config)
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        values["head_dim"] = head_dim
    if "ffn_hidden_size" not in values and "moe_ffn_hidden_size" in values:  # every layer has experts
        values["ffn_hidden_size"] = values["moe_ffn_hidden_size"]
    if layers := family.moe_layers(config):
        values["moe_layers"] = layers
    return values


def tokenizer_of(folder: Path, fault: from_hf.SettingFault) -> str:
    """Return the path of a folder's SentencePiece model.

    Raises:
        UserError: it holds none.
    """
    for name in TOKENIZER_NAMES:
        if (folder / name).is_file():
            return str(folder / name)
    rule = f"is auto, and {folder} holds none of {', '.join(TOKENIZER_NAMES)}"
    remedy = "export the model again (step 4), or name the tokenizer.model with which it was trained"
    raise UserError(fault("input_tokenizer_file", rule, remedy))


def _context_length(folder: Path, family: Family, config: Any) -> int:
    for key, ours in family.settings.items():
        if ours == "seq_len":
            return int(from_hf.value_of(config, key))
    try:
        longest = orjson.loads((folder / "tokenizer_config.json").read_bytes()).get("model_max_length")
    except (OSError, orjson.JSONDecodeError, AttributeError) as error:
        where = str(folder / "tokenizer_config.json")
        raise UserError(Fault(where, f"cannot be read: {error}", remedy="download the folder again")) from error
    return int(longest) if isinstance(longest, int | float) and 0 < longest <= _MOST_CONTEXT else _T5_CONTEXT
