"""A Hugging Face folder before anything in it is loaded: is it one whole model, and which tensors has it? No torch.

All steps that open a folder (0, 3, 7 and 8) refuse the same here. Nothing in it is run, and no pickle is opened.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from zerokara.base.errors import Fault, UserError, nearest
from zerokara.checkpoint import folders
from zerokara.tokenizer.hugging_face import read_json

CONFIG, _WEIGHTS, _INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
BUFFERS = re.compile(r"(rotary_emb\.inv_freq|\.att(n|ention)\.(masked_)?bias|(^|\.)position_ids)$")
"""Constants that earlier versions of transformers wrote beside the weights."""
_OTHER_FORMATS = r"\.(bin|pt|pth|ckpt|gguf|onnx|h5|msgpack)$"


class Stored(NamedTuple):
    path: Path
    name: str
    shape: list[int]
    dtype: str  # as safetensors names it: F32, BF16


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
        raise UserError(
            fault(f"holds weights that cannot be read: {', '.join(wrong[:3])}", remedy="download the folder again")
        )
    return found


def _refusal(folder: Path, files: list[str], config: dict[str, Any], parts: list[str]) -> tuple[str, str] | None:
    """Why a folder is refused by the names of its files and by its config.json, and the remedy."""
    run_dir = folder.parent if folder.name.startswith("global_step") else folder
    other = next((f", but {name}" for name in files if re.search(_OTHER_FORMATS, name)), "")
    # Mistral's own format of the same weights has the second name.
    used = re.compile("|".join([*map(re.escape, parts), r"consolidated.*\.safetensors", r".*(?<!\.safetensors)"]))
    if CONFIG not in files and ((run_dir / folders.IDENTITY_NAME).exists() or folders.all_steps(run_dir)):
        remedy = "export it with step 4 (bash 4_convert_to_HF.sh), and name the folder that it writes"
        return "is a run folder of step 3, not a Hugging Face model", remedy
    if any(name.startswith(("adapter_config.", "adapter_model.")) for name in files):
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path") or "a model"
        remedy = "merge the two (peft's merge_and_unload, then save_pretrained), or name a folder of the model alone"
        return f"holds an adapter (PEFT) of {base}{', beside a model' if CONFIG in files else ''}", remedy
    if {"modules.json", "config_sentence_transformers.json"} & {*files}:
        return "holds a model of sentence-transformers, which continues no text", "name the folder of a language model"
    if CONFIG not in files:
        download = ".venv/bin/hf download OWNER/NAME --local-dir FOLDER"
        remedy = f"name a folder with {CONFIG}, *.safetensors and a tokenizer; download one with: {download}"
        rule = f"holds no Hugging Face model: no {CONFIG}{other}" if folder.exists() else "there is no such folder"
        return rule, nearest(folder, remedy)
    if quantized := config.get("quantization_config") or config.get("compression_config"):
        return f"holds quantized weights (in {CONFIG}: {str(quantized)[:80]})", "name the model that they were made of"
    if named := config.get("transformers_weights"):
        return f"names another weights file in {CONFIG} ({named}); only {_WEIGHTS} is read", f"name it {_WEIGHTS}"
    if not parts:
        rule = f"holds no safetensors: neither {_WEIGHTS} nor an {_INDEX} with a weight_map{other}"
        remedy = "download its *.safetensors (most models have them); or, if you trust its author, load it with"
        return rule, f"{remedy} transformers and save_pretrained it: a pickle can run any program when it is loaded"
    if surplus := [name for name in files if not used.fullmatch(name)]:
        rule = f"holds weights that nothing reads: {', '.join(surplus[:3])}, beside {', '.join(parts[:3])}"
        return rule, "move those that do not belong to the model elsewhere"
    return None
