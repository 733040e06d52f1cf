"""Hugging Face folders → models to measure, each loaded once, at most one in memory at a time.

In: folders of any origin. Out: `LoadedModel`, with the tokenizer at once and the weights when they are first asked for;
asking another model for its weights frees those before. They are loaded by `families.load_model`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from zerokara.base import manifest
from zerokara.base.errors import Fault, UserError, refuse
from zerokara.base.progress import bytes_text, log
from zerokara.evaluation.inputs import model_files, short_names
from zerokara.huggingface import families, tokenizer_proof
from zerokara.huggingface.model_folder import CONFIG
from zerokara.model.cpu_attention import blocked_attention, serves
from zerokara.tokenizer.hugging_face import ANOTHER_MODEL, of_another_model, read_json

SEES_LATER_TOKENS = "not measured: the model sees later tokens, so it does not predict them"
BLOCKS = "zerokara_blocks"
_ROOM, _OTHER_BYTES = 2, 2 * 2**30
"""GPU memory that a model needs: `_ROOM` times the size of its files, since bf16 files may be loaded as fp32, and
`_OTHER_BYTES` for its activations and its cache."""
NO_LIMIT_CONTEXT = 2048
"""Context length of a model that has no limit of its own (relative positions, recurrence)."""


@dataclass(eq=False)
class LoadedModel:
    """A model to measure; `model` is the transformers model with its weights, in evaluation mode, on `device`."""

    name: str
    """Name in all tables: that of the folder, with as much of its path as distinguishes it from the others."""
    folder: Path
    tokenizer: Any
    """A transformers tokenizer."""
    config: Any
    device: torch.device
    dtype: torch.dtype
    _opened: list["LoadedModel"] = field(default_factory=list, repr=False)
    """All models that were opened together, one of which holds its weights in memory."""
    _model: Any = None
    hashes: dict[manifest.FileKey, str] = field(default_factory=dict)
    """SHA-256 of the files that `content` has read."""

    @property
    def is_encoder_decoder(self) -> bool:
        return bool(self.config.is_encoder_decoder)

    @property
    def context_length(self) -> int:
        """Maximum tokens of a sequence; `NO_LIMIT_CONTEXT` if nothing limits it."""
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return int(longest or NO_LIMIT_CONTEXT)

    @property
    def vocab_size(self) -> int:
        """Size of the logits."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def end_id(self) -> int | None:
        """The token that ends documents: config.json's, as an export names that of its training; or the tokenizer's."""
        named = read_json(self.folder / CONFIG).get("eos_token_id")
        first = next(iter(named), None) if isinstance(named, list) else named
        return self.tokenizer.eos_token_id if first is None else int(first)

    @cached_property
    def is_causal(self) -> bool:
        """True if no logits change with a token that comes after; loads the weights.

        transformers opens a BERT as a causal model, too, which then sees what it is to predict.
        """
        ids_S = torch.arange(1, 1 + min(8, self.context_length), device=self.device) * self.vocab_size // 10
        other_S = ids_S.clone()
        other_S[-1] += 1
        with torch.inference_mode():
            one, other = (self.model(input_ids=ids[None]).logits[:, :-1].float() for ids in (ids_S, other_S))
        # A mixture of experts may round otherwise; a token that is seen moves far more.
        tolerance = torch.finfo(self.dtype).eps ** 0.5 * float(one.abs().max())
        return bool(((one - other).abs() <= tolerance).all() | one.isnan().any())

    @cached_property
    def content(self) -> str:
        """SHA-256 over the files of the folder that make the model what it is."""
        files = model_files(self.folder)
        self.hashes = manifest.hash_files(files)
        names = [(file.name, self.hashes[manifest.file_key(file)]) for file in files]
        return sha256(json.dumps(names).encode()).hexdigest()

    @property
    def model(self) -> Any:
        """The weights; loaded at the first use, and again after another model was used.

        Raises:
            UserError: they cannot be loaded, or do not fill the model.
        """
        if self._model is None:
            for other in self._opened:
                other._model = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._model = _load(self.folder, self.config, self.dtype).to(self.device).eval()
        return self._model


def open_models(folders: Sequence[Path], device: str = "auto", precision: str = "fp32") -> list[LoadedModel]:
    """Open the folders in order; `device` and `precision` as in `config.evaluate_config`, or precision ``auto``.

    With device ``auto`` they compute on the CPU if the GPU lacks room, and a message says so.

    Raises:
        UserError: a folder is not one of Hugging Face, or holds no safetensors; a fault for each.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(Fault("device", "there is no GPU that torch can use", value=device, remedy="set device: auto"))
    place = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
    if place.type == "cuda" and device == "auto":
        largest = max(sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in folders)
        needed, (free, _) = _ROOM * largest + _OTHER_BYTES, torch.cuda.mem_get_info()
        if free < needed:
            log(f"computed on the CPU: the GPU has {bytes_text(free)} free, {bytes_text(needed)} may be needed")
            place = torch.device("cpu")
    dtype = families.TORCH_DTYPES[{"cuda": "bf16", "cpu": "fp32"}[place.type] if precision == "auto" else precision]
    faults: list[Fault] = []
    opened: list[LoadedModel] = []
    for folder, name in zip(folders, short_names(folders), strict=True):
        try:
            families.silence()
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            tokenizer = tokenizer_proof.load(folder)
            if not tokenizer("hello", add_special_tokens=False)["input_ids"]:
                raise ValueError("its tokenizer makes no token of 'hello': files are missing")
        except (OSError, ValueError, ImportError) as error:
            remedy = "save it again with model.save_pretrained(folder) and tokenizer.save_pretrained(folder)"
            faults.append(Fault(str(folder), families.reason_against(folder, error), remedy=remedy))
            continue
        pieces = tokenizer.convert_ids_to_tokens(range(1 + max(tokenizer.get_vocab().values())))
        if rule := tokenizer_proof.without_rows(pieces, config.get_text_config().vocab_size):
            faults.append(Fault(str(folder), f"does not fit its tokenizer: {rule}", remedy=tokenizer_proof.RESIZE))
        if rule := of_another_model(len(pieces), config.get_text_config().vocab_size):
            faults.append(Fault(str(folder), f"its tokenizer {rule}", remedy=ANOTHER_MODEL))
        opened.append(LoadedModel(name, folder, tokenizer, config, place, dtype, opened))
    refuse(faults)
    return opened


def _load(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    auto_class = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    try:
        model, faults = families.load_model(folder, dtype, auto_class)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        rule = f"cannot be loaded by transformers: {families.one_line(error)}"
        raise UserError(Fault(str(folder), rule)) from error
    if faults:  # part of the model would be random, or part of the weights without use
        rule = f"holds weights that are not those of its config.json ({families.one_line('; '.join(faults))})"
        raise UserError(Fault(str(folder), rule))
    if model.config.get_text_config()._attn_implementation == "sdpa":
        model.set_attn_implementation(BLOCKS)
    return model


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
) -> tuple[Tensor, None]:
    """transformers' attention, by the blocks of training where a CPU reads a window whole, which are faster in bf16."""
    is_whole = attention_mask is None and query.size(2) == key.size(2) > 1 and key.shape == value.shape
    is_causal = others.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_plain = all(others.get(name) is None for name in ("position_bias", "softcap", "s_aux", "cache"))
    if is_whole and is_causal and is_plain and serves(query):
        return blocked_attention(query, key, value, True, others.get("scaling")).transpose(1, 2), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **others)


transformers.AttentionInterface.register(BLOCKS, _attention)
transformers.AttentionMaskInterface.register(BLOCKS, sdpa_mask)
