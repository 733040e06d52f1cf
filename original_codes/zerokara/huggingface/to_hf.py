"""Our weights → the model files of a Hugging Face folder: ``config.json``, ``generation_config.json`` and
``model.safetensors``, or shards ``model-*.safetensors`` and their index.

Tensors are converted and written one at a time, so that writing needs memory for one tensor only. The index is JSON
with ``metadata.total_size`` (bytes) and ``weight_map`` (tensor name → file).

transformers 5 renamed some keys of config.json and writes only the new names. An older client (transformers 4,
llama.cpp's converter, vLLM) that does not find its key takes its own default, often without a warning. So each such
value is written under both names (compared, value by value, with transformers 4.57.6 and llama.cpp, October 2026).
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any

import orjson
import torch
from huggingface_hub import constants, split_torch_state_dict_into_shards
from torch import Tensor

from zerokara.base.durable import write_json
from zerokara.base.progress import Progress
from zerokara.checkpoint.tensor_file import TensorWriter
from zerokara.huggingface import families, weight_rules
from zerokara.huggingface.weight_rules import Shapes
from zerokara.model.shapes import ModelShape

GENERATION_NAME = "generation_config.json"
OLDER_NAMES_OF_ALL = {"dtype": "torch_dtype"}
"""Without it transformers before 4.56, and programs that read the file themselves, load in fp32."""


def write_model(
    folder: Path,
    weights: Mapping[str, Tensor],
    shape: ModelShape,
    special: families.SpecialIds,
    dtype: str,
    max_shard_size: str,
    generation: Mapping[str, Any] | None = None,
) -> dict[str, list[Path]]:
    """Write weights and configurations into `folder`; return the files by kind (``weights``, ``config``).

    `generation` are the generation settings of the model that the training started from, whose ends stay ends.

    Raises:
        RunError: the weights do not fit the rules; lists every tensor at fault.
        OSError: the disk is full, or cannot be written; names the file.
    """
    from transformers import GenerationConfig

    config = families.hf_config(shape, special, dtype)
    rules = families.rules_for(shape)
    hf_shapes = weight_rules.check(rules, {name: tuple(tensor.shape) for name, tensor in weights.items()}, shape)
    tensors = weight_rules.to_hf(rules, weights, shape)
    files = write_weights(folder, tensors, hf_shapes, families.TORCH_DTYPES[dtype], max_shard_size)
    config.save_pretrained(folder)
    config_path = folder / "config.json"
    older_names = families.FAMILIES[shape.architecture].older_names
    write_json(config_path, with_older_names(orjson.loads(config_path.read_bytes()), older_names))
    carried = dict(generation or {})
    before = carried.get("eos_token_id", [])
    ends = [special.eos, *special.other_ends, *(before if isinstance(before, list) else [before])]
    own = GenerationConfig(
        bos_token_id=special.bos,
        eos_token_id=[*dict.fromkeys(ends)] if len({*ends}) > 1 else special.eos,
        pad_token_id=special.pad,
        decoder_start_token_id=getattr(config, "decoder_start_token_id", None),
    )
    write_json(folder / GENERATION_NAME, dict(sorted((carried | own.to_diff_dict()).items())))
    return {"weights": files, "config": [config_path, folder / GENERATION_NAME]}


def with_older_names(values: Mapping[str, Any], older_names: Mapping[str, str]) -> dict[str, Any]:
    """Content of config.json with each value under its older name as well, sorted by key.

    Raises:
        KeyError: there is no value to copy: transformers no longer writes the newer name.
    """
    copies = {
        older: reduce(lambda value, key: value[key], newer.split("."), values)
        for newer, older in (OLDER_NAMES_OF_ALL | dict(older_names)).items()
    }
    rotation = {key: value for key, value in values.get("rope_parameters", {}).items() if key != "rope_theta"}
    if rotation.get("rope_type", "default") != "default":
        copies["rope_scaling"] = rotation
    return dict(sorted({**values, **copies}.items()))


def write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], shapes: Shapes, dtype: torch.dtype, max_shard_size: str
) -> list[Path]:
    """Write all `tensors`, which `shapes` announces in their order, rounded to `dtype`, and return the files."""
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    plan = split_torch_state_dict_into_shards(empty, max_shard_size=max_shard_size)
    with ExitStack() as opened, Progress("writing weights", plan.metadata["total_size"], unit="B") as progress:
        writers: dict[str, TensorWriter] = {}  # all at a time: a tensor above the limit has a file of its own
        for file, names in plan.filename_to_tensors.items():
            writer = TensorWriter(folder / file, {name: shapes[name] for name in names}, dtype)
            writers[file] = opened.enter_context(writer)
        for name, tensor in tensors:
            writers[plan.tensor_to_filename[name]].write(name, tensor)
            progress.advance(empty[name].nbytes)
    files = [folder / file for file in writers]
    if plan.is_sharded:
        files.append(folder / constants.SAFETENSORS_INDEX_FILE)
        weight_map = dict(sorted(plan.tensor_to_filename.items()))
        write_json(files[-1], {"metadata": plan.metadata, "weight_map": weight_map})
    return files
