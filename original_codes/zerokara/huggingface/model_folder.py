"""A Hugging Face folder before anything in it is loaded: is it one whole model, and which tensors has it? No torch.

All steps that open a folder (0, 3, 7 and 8) refuse the same here. Nothing in it is run, and no pickle is opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from safetensors import SafetensorError, safe_open

from zerokara.checkpoint import folders
from zerokara.errors import Fault, UserError, nearest

CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
BUFFERS = re.compile(r"(rotary_emb\.inv_freq|\.att(n|ention)\.(masked_)?bias|(^|\.)position_ids)$")
"""Constants that earlier versions of transformers wrote beside the weights."""
_AGAIN = "download the folder again"


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    name: str
    shape: list[int]
    dtype: str
    """As safetensors names it: F32, BF16."""


def tensors(folder: Path, fault: Callable[..., Fault]) -> dict[str, Stored]:
    """Return the tensors of a folder by name, from the headers of its files; `fault` takes a rule and its `remedy`.

    Raises:
        UserError: the folder is no model, not the whole of one or more than one, or its weights cannot be read.
    """
    files = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    config, named = read_json(folder / CONFIG), read_json(folder / _INDEX).get("weight_map")
    parts = sorted({*map(str, named.values())}) if isinstance(named, dict) else []
    parts = [_WEIGHTS] if _WEIGHTS in files else parts
    if refusal := _refusal(folder, files, config, parts):
        raise UserError(fault(refusal[0], remedy=refusal[1]))
    found, wrong = dict[str, Stored](), list[str]()
    for part in parts:
        try:
            if not re.fullmatch(r"[\w.-]+\.safetensors", part):
                raise OSError(f"named by {_INDEX}, and no safetensors file next to it")
            with safe_open(folder / part, "np") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                    place = opened.get_slice(name)
                    wrong += [f"{part} ({name} is in {found[name].path.name}, too)"] if name in found else []
                    found[name] = Stored(folder / part, name, place.get_shape(), place.get_dtype())
        except (OSError, SafetensorError) as error:
            wrong.append(f"{part} ({' '.join(str(error).split())})")
    if wrong:
        raise UserError(fault(f"holds weights that cannot be read: {', '.join(wrong[:3])}", remedy=_AGAIN))
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, empty where there is no such file; another content is a UserError."""
    try:
        return dict(orjson.loads(path.read_bytes())) if path.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(Fault(str(path), f"cannot be read as a JSON object: {error}", remedy=_AGAIN)) from error


def _refusal(folder: Path, files: list[str], config: dict[str, Any], parts: list[str]) -> tuple[str, str] | None:
    """Why a folder is refused by the names of its files and by its config.json, and the remedy."""
    run_dir = folder.parent if folder.name.startswith("global_step") else folder
    quantized = config.get("quantization_config") or config.get("compression_config")
    other = next((name for name in files if re.search(r"\.(bin|pt|pth|ckpt|gguf|onnx|h5|msgpack)$", name)), "")
    beside = f", but {other}" if other else ""
    # Mistral's own format of the same weights has the second name.
    used = re.compile("|".join([*map(re.escape, parts), r"consolidated.*\.safetensors", r".*(?<!\.safetensors)"]))
    if CONFIG not in files and ((run_dir / folders.IDENTITY_NAME).exists() or folders.all_steps(run_dir)):
        remedy = "export it with step 4 (bash 4_convert_to_HF.sh), and name the folder that it writes"
        return "is a run folder of step 3, not a Hugging Face model", remedy
    if any(name.startswith(("adapter_config.", "adapter_model.")) for name in files):
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path") or "a model"
        where = "beside a model" if CONFIG in files else "and no whole model"
        remedy = "merge it with its model (peft's merge_and_unload, then save_pretrained), and name the folder of both"
        remedy += "; or move the adapter elsewhere, for the model without it" if CONFIG in files else ""
        return f"holds an adapter (PEFT) of {base} {where}", remedy
    if {"modules.json", "config_sentence_transformers.json"} & {*files}:
        rule = "holds a model of sentence-transformers, which makes vectors of texts and does not continue them"
        return rule, "name the folder of a language model"
    if CONFIG not in files:
        remedy = f"name a folder with {CONFIG}, *.safetensors and a tokenizer; download one with: hf download NAME"
        rule = f"holds no Hugging Face model: no {CONFIG}{beside}" if folder.exists() else "there is no such folder"
        return rule, nearest(folder, remedy)
    if quantized:
        return f"holds quantized weights (in {CONFIG}: {str(quantized)[:80]})", "name the model that they were made of"
    if named := config.get("transformers_weights"):
        return f"names another weights file in {CONFIG} ({named}); only {_WEIGHTS} is read", f"name it {_WEIGHTS}"
    if not parts and other.endswith(("bin", "pt", "pth", "ckpt")):
        remedy = "download the model's *.safetensors (most models on the Hub have them), or, if you trust its author, "
        remedy += "convert it once, with from_pretrained and save_pretrained of its class in transformers"
        return f"holds its weights in a pickle ({other}), which can run any program when it is loaded", remedy
    if not parts:
        rule = f"holds no weights that are read here: neither {_WEIGHTS} nor an {_INDEX} with a weight_map{beside}"
        return rule, "download the model's *.safetensors"
    if surplus := [name for name in files if not used.fullmatch(name)]:
        rule = f"holds weights that nothing reads: {', '.join(surplus[:3])}, beside {', '.join(parts[:3])}"
        return rule, "move those that do not belong to the model elsewhere"
    return None
