"""Our weights → the model files of a Hugging Face folder: ``model*.safetensors`` (and index), ``config.json``,
``generation_config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import orjson
from torch import Tensor

from zerokara.durable import write_json
from zerokara.huggingface import config_names, families, shards, weight_rules
from zerokara.model.shapes import ModelShape


def write_model(
    folder: Path,
    weights: Mapping[str, Tensor],
    shape: ModelShape,
    special: families.SpecialIds,
    dtype: str,
    max_shard_size: str,
) -> dict[str, list[Path]]:
    """Write weights and configurations into `folder`; returns the files by kind (``weights``, ``config``).

    The weights are converted and written one tensor at a time.

    Raises:
        RunError: the weights do not fit the rules; lists every tensor at fault.
    """
    from transformers import GenerationConfig

    config = families.hf_config(shape, special, dtype)
    rules, hf_shapes = families.rules_for(shape), families.hf_shapes(shape, config)
    weight_rules.check(rules, {name: tuple(tensor.shape) for name, tensor in weights.items()}, hf_shapes, shape)
    in_order = {name: hf_shapes[name] for rule in rules for name in rule.hf}
    tensors = weight_rules.to_hf(rules, weights, shape)
    files = shards.write(folder, tensors, in_order, families.TORCH_DTYPES[dtype], max_shard_size)
    config.save_pretrained(folder)
    config_path = folder / "config.json"
    older_names = families.FAMILIES[shape.architecture].older_names
    write_json(config_path, config_names.with_older_names(orjson.loads(config_path.read_bytes()), older_names))
    GenerationConfig(
        bos_token_id=special.bos,
        eos_token_id=[special.eos, *special.other_ends] if special.other_ends else special.eos,
        pad_token_id=special.pad,
        decoder_start_token_id=getattr(config, "decoder_start_token_id", None),
    ).save_pretrained(folder)
    return {"weights": files, "config": [config_path, folder / "generation_config.json"]}
