"""A Hugging Face folder as the model that a training starts from (`init_from`).

Its configuration must equal ours, setting by setting, and its tokenizer must map every id to the same piece as ours:
otherwise its weights mean nothing here. Both are checked before training starts; `settings_of` reads the settings from
the folder, so that nobody has to copy them. The weights are converted by the inverses of the rules that export them, so
that a round trip loses no bit.

A folder may come from anyone, and nothing in it is run: no code that its files name (``auto_map``), and no pickle.
Weights are read from safetensors alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import torch
from pydantic import ValidationError
from torch import Tensor

from zerokara.checkpoint import folders
from zerokara.config.model import ModelSettings, RopeScaling
from zerokara.config.pretrain_config import NewEmbeddings
from zerokara.config.writing import value_text
from zerokara.errors import Fault, RunError, UserError, nearest
from zerokara.huggingface import families, tokenizer_proof, weight_rules
from zerokara.huggingface.new_vocabulary import NewVocabulary, new_vocabulary
from zerokara.huggingface.weight_rules import COPIED_VOCABULARY, VOCABULARY
from zerokara.model.shapes import ModelShape
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import FIRST_END, open_encoder, tokenizer_file

_OF_TRAINING = {
    "initializer_range", "initializer_factor", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate",
}  # fmt: skip
"""Values that change neither weights nor results of a model, only its training."""
_NOT_COMPUTED = {
    "quantization_config": None, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "rope_parameters.partial_rotary_factor": 1.0,
}  # fmt: skip
"""What some model of any family may state, and none computes here → the value without effect."""
_T5_CONTEXT = 512
"""Context length of the T5 models, whose configuration has none: relative positions know no limit."""
_MAX_CONTEXT = 10**6
"""A greater `model_max_length` is a tokenizer's way of saying that it has none."""

_KNOWN = f"known architectures: {', '.join(families.FAMILIES)}"

SettingFault = Callable[..., Fault]
"""`Settings.fault`: key, rule, remedy → the fault of a setting, with its place and value."""


def check_source(
    folder: Path, shape: ModelShape, encoder: Encoder, new_embeddings: NewEmbeddings, fault: SettingFault
) -> NewVocabulary | None:
    """Check that `folder` holds a model of this shape, with the ids of this tokenizer; `fault` is of our settings.

    With `new_embeddings` another tokenizer may take the place of the folder's; returned is what that does.

    Raises:
        UserError: there is no such folder, or it holds another model; lists everything that differs.
    """
    if reason := shape.traits.no_class:
        raise UserError(fault("init_from", f"has no class for architecture {shape.architecture}: {reason}"))
    hf_config = _config_of(folder, fault)
    family = families.FAMILIES[shape.architecture]
    if hf_config.model_type != family.model_type:
        rule = f"{folder} holds a model of type {hf_config.model_type}"
        name = _architecture(hf_config)
        raise UserError(fault("architecture", rule, f"set architecture: {name}" if name else _KNOWN))
    _check_weights(folder, hf_config, family.auto_class, fault)
    faults = [*_differing_settings(folder, shape, hf_config, fault)]
    if new_embeddings == "none":
        faults += _differing_pieces(folder, hf_config.vocab_size, encoder, shape.vocab_size, fault)
    if faults:
        raise UserError(faults)
    return vocabulary_of(folder, encoder, new_embeddings)


def vocabulary_of(folder: Path, encoder: Encoder, new_embeddings: NewEmbeddings) -> NewVocabulary | None:
    """Return what becomes of the embeddings of `folder` under our tokenizer; None without `new_embeddings`.

    Raises:
        UserError: the folder has no tokenizer.
    """
    if new_embeddings == "none":
        return None
    return new_vocabulary(new_embeddings, open_encoder(folder, FIRST_END), encoder)


def open_weights(
    folder: Path, shape: ModelShape, vocabulary: NewVocabulary | None = None, seed: int = 0
) -> Iterator[tuple[str, Tensor]]:
    """Load the weights of `folder`, and return them by our parameter names, in fp32; `check_source` comes first.

    With a new `vocabulary` rows are made for it; `seed` is that of random ones.

    Each is let go when it was returned: beside what is left of them, one tensor is held.

    Raises:
        RunError: a tensor is missing, left over, or of another shape, or two that are one of ours differ.
    """
    model, loading_faults = families.load_model(folder, torch.float32, families.FAMILIES[shape.architecture].auto_class)
    if loading_faults:
        raise RunError(f"{folder}: the weights do not belong to config.json: {'; '.join(loading_faults)}")
    table, theirs = families.rules_for(shape), families.state_by_file_names(model)
    for rule in table:
        name, *_ = rule.hf
        if rule.transform is COPIED_VOCABULARY and any(not theirs[copy].equal(theirs[name]) for copy in rule.hf):
            raise RunError(f"{folder}: encoder and decoder have different embeddings; ours share one")
        if rule.transform in (VOCABULARY, COPIED_VOCABULARY):
            rows = theirs[name]
            theirs[name] = vocabulary.rows(rows, seed) if vocabulary else rows[: shape.vocab_size]
    del model
    return weight_rules.from_hf(table, theirs, shape)


def names(shape: ModelShape) -> list[str]:
    """Our parameter names in the order of `open_weights`."""
    return [rule.ours for rule in families.rules_for(shape)]


def num_surplus_rows(folder: Path, shape: ModelShape) -> int:
    """Rows of the folder's embedding after our last id, which no token uses (`check_source`) and `weights` drops.

    T5's has 32,128 rows for 32,100 ids, so that it can be split among processes.
    """
    return max(0, int(_read_config(folder).vocab_size) - shape.vocab_size)


def settings_of(folder: Path, fault: SettingFault) -> dict[str, Any]:
    """Return the settings of `ModelSettings` that make the model of a folder; `fault` is of the setting `init_from`.

    What a family fixes (an activation, a scale) is not read here: `check_source` compares the whole configuration.

    Raises:
        UserError: the folder holds no model, or one of an unknown family.
    """
    config = _config_of(folder, fault)
    name = _architecture(config)
    if name is None:
        raise UserError(fault("init_from", f"holds a model of type {config.model_type}", _KNOWN))
    family = families.FAMILIES[name]
    found = {
        ours: _value_of(config, key) for key, ours in family.settings.items() if ours in ModelSettings.model_fields
    }
    if (head_dim := getattr(config, "head_dim", None)) is not None:
        found["head_dim"] = head_dim
    values = {ours: value for ours, value in found.items() if value is not None}
    if "ffn_hidden_size" not in values and "moe_ffn_hidden_size" in values:  # every layer has experts
        values["ffn_hidden_size"] = values["moe_ffn_hidden_size"]
    if layers := family.moe_layers(config):
        values["moe_layers"] = layers
    if scaling := _rope_scaling(folder, config):
        values["rope_scaling"] = scaling
    if "seq_len" not in values:  # the tokenizer may say it
        path = folder / "tokenizer_config.json"
        try:
            longest = orjson.loads(path.read_bytes()).get("model_max_length")
        except (OSError, orjson.JSONDecodeError, AttributeError) as error:
            raise UserError(Fault(str(path), f"cannot be read: {error}", remedy="download the folder again")) from error
        has_limit = isinstance(longest, int | float) and 0 < longest <= _MAX_CONTEXT
        values["seq_len"] = int(longest) if has_limit else _T5_CONTEXT
    return {**values, "architecture": name, "tie_word_embeddings": family.config_is_tied(config)}


def tokenizer_of(folder: Path, fault: SettingFault) -> str:
    """Return the path of a folder's tokenizer: its SentencePiece model, else tokenizer.json; none is a UserError."""
    try:
        return str(tokenizer_file(folder))
    except UserError as error:
        rule = f"is auto, and in {folder} {error.faults[0].rule}"
        raise UserError(fault("input_tokenizer_file", rule, error.faults[0].remedy)) from error


def _architecture(config: Any) -> str | None:
    """Our name of a loaded configuration's family."""
    return next((name for name, each in families.FAMILIES.items() if each.model_type == config.model_type), None)


def _config_of(folder: Path, fault: SettingFault) -> Any:
    """Configuration of a folder; it is a UserError if there is none, or transformers cannot read it."""
    if (folder / "config.json").is_file():
        return _read_config(folder)
    run_dir = folder.parent if folder.name.startswith("global_step") else folder
    if (run_dir / folders.IDENTITY_NAME).exists() or folders.all_steps(run_dir):
        remedy = "export it with step 4 (bash 4_convert_to_HF.sh), and name the folder that it writes"
        raise UserError(fault("init_from", "is a run folder of step 3, not a Hugging Face model", remedy))
    remedy = "name a folder with config.json, *.safetensors and a tokenizer; download one with: hf download NAME"
    rule = "holds no Hugging Face model" if folder.exists() else "there is no such folder"
    raise UserError(fault("init_from", rule, nearest(folder, remedy)))


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises nothing narrower for malformed files
        raise UserError(
            Fault(str(folder / "config.json"), f"transformers cannot read it: {families.one_line(error)}")
        ) from error


def _rope_scaling(folder: Path, hf_config: Any) -> RopeScaling | None:
    """Scaling of a loaded configuration's rotary frequencies; one that ours does not compute is a UserError."""
    given = getattr(hf_config, "rope_parameters", None) or {}
    unread = "rope_theta", "type", "partial_rotary_factor"  # the last: `_NOT_COMPUTED`
    values = {key: value for key, value in given.items() if key not in unread and value is not None}
    if values.get("rope_type", "default") == "default":
        return None
    try:
        return RopeScaling(**values)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        rule = f"is no scaling that can be trained here: {faults}"
        raise UserError(Fault(str(folder / "config.json"), rule, "rope_parameters", values)) from error


def _value_of(hf_config: Any, key: str) -> Any:
    """Value at a key, dotted where nested, of a loaded configuration; None if it has none."""
    value: Any = hf_config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    if key == "n_inner" and value is None:
        return 4 * hf_config.n_embd  # as GPT2Config documents
    if key == "head_dim" and value is None:
        return hf_config.hidden_size // hf_config.num_attention_heads  # as classes without the key compute it
    return value


def _check_weights(folder: Path, hf_config: Any, auto_class: str, fault: SettingFault) -> None:
    """Check that the weights are in safetensors files, and that these can be read, by their headers, which have sizes.

    Raises:
        UserError: they are not; says how to convert them.
    """
    from safetensors import SafetensorError, safe_open

    unsafe, parts, index = "", ["model.safetensors"], folder / "model.safetensors.index.json"
    pickles = sorted(path.name for ending in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{ending}"))
    if named := getattr(hf_config, "transformers_weights", None):
        unsafe = f"names another weights file in config.json ({named}); only model.safetensors is read"
    elif index.is_file() and not (folder / parts[0]).is_file():
        try:
            parts = sorted({str(part) for part in orjson.loads(index.read_bytes())["weight_map"].values()})
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            unsafe = f"holds a malformed {index.name}, without a weight_map that names the file of each tensor"
        if other := [part for part in parts if not re.fullmatch(r"[\w.-]+\.safetensors", part)]:
            listed = ", ".join(other[:3])
            unsafe = f"lists files in {index.name} that are not safetensors files next to it: {listed}"
    elif not (folder / parts[0]).is_file() and pickles:
        unsafe = f"holds its weights in a pickle ({pickles[0]}), which can run any program when it is loaded"
    elif not (folder / parts[0]).is_file():
        unsafe = f"holds no weights: neither {parts[0]} nor {index.name}"
    if unsafe:
        to = f"{folder}-safetensors"
        code = f"from transformers import {auto_class} as M; M.from_pretrained({str(folder)!r}).save_pretrained({to!r})"
        remedy = (
            "download the model's *.safetensors (most models on the Hub have them), or, if you trust its author, "
            f"convert it once: {shlex.join(['.venv/bin/python', '-c', code])}, copy its tokenizer there too, and set "
            f"init_from: {to}"
        )
        raise UserError(fault("init_from", unsafe, remedy))
    broken = []
    for part in parts:
        try:
            with safe_open(folder / part, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            broken.append(f"{part} ({families.one_line(error)})")
    if broken:
        rule = f"holds weights that cannot be read: {', '.join(broken[:3])}"
        raise UserError(fault("init_from", rule, "download the folder again"))


def _differing_settings(folder: Path, shape: ModelShape, hf_config: Any, fault: SettingFault) -> Iterator[Fault]:
    """Faults, one for each value in which the folder's configuration differs from that of a model of `shape`."""
    family = families.FAMILIES[shape.architecture]
    ours = {**family.config_values(shape), "tie_word_embeddings": shape.tie_word_embeddings}
    hf_config.tie_word_embeddings = family.config_is_tied(hf_config)
    settings = {**family.settings, "tie_word_embeddings": "tie_word_embeddings"}
    if (scaling := _rope_scaling(folder, hf_config)) != shape.rope_scaling:
        text = value_text(scaling)
        yield fault("rope_scaling", f"the model of init_from has {text}", f"set rope_scaling: {text}")
    for key, expected in ours.items():
        if key in _OF_TRAINING or (key.startswith("rope_parameters.") and key not in settings):
            continue
        value = _value_of(hf_config, key)
        may_be_longer = key == "max_position_embeddings" and value >= expected
        if value == expected or may_be_longer:
            continue
        if key in settings:
            yield fault(settings[key], f"the model of init_from has {value}", f"set {settings[key]}: {value}")
        else:
            rule = f"must be {expected}, as in every model of architecture {shape.architecture}"
            yield Fault(where=str(folder / "config.json"), key=key, value=value, rule=rule)
    for key, neutral in _NOT_COMPUTED.items():
        if (value := _value_of(hf_config, key)) not in (None, neutral):
            key = key.removeprefix("rope_parameters.")
            yield Fault(str(folder / "config.json"), f"must be {neutral}: nothing else is computed here", key, value)
    others = {*(getattr(hf_config, "layer_types", None) or ())} - {"full_attention"}
    # Of use_sliding_window, which is a fault by itself, transformers makes layer_types.
    if others and not getattr(hf_config, "use_sliding_window", False):
        rule = "must be full_attention in all layers: nothing else is computed here"
        yield Fault(str(folder / "config.json"), rule, "layer_types", min(others))


def _differing_pieces(folder: Path, theirs: int, encoder: Encoder, ours: int, fault: SettingFault) -> Iterator[Fault]:
    """Faults where an id of the folder's model, which has `theirs`, is another piece than in our tokenizer, or none."""
    same = "use the tokenizer of that model (and run step 2 again), or set new_embeddings: mean_of_pieces"
    if theirs < ours:
        yield fault("input_tokenizer_file", f"has {ours:,} pieces, the model of init_from {theirs:,}", same)
        return
    try:
        tokenizer = tokenizer_proof.load(folder)
    except Exception as error:  # as above
        rule = f"holds no tokenizer that transformers can read: {families.one_line(error)}"
        yield fault("init_from", rule, "its tokenizer is needed to compare the ids")
        return
    named = tokenizer.convert_ids_to_tokens(list(range(theirs)))
    pieces = encoder.pieces[:theirs]
    if surplus := [token for token in range(ours, theirs) if named[token] is not None]:
        rule = f"has {ours:,} pieces, the model of init_from {theirs:,}; its id {surplus[0]} is {named[surplus[0]]!r}"
        yield fault("input_tokenizer_file", rule, same)
    differing = [token for token, (name, piece) in enumerate(zip(named, pieces, strict=False)) if (name or "") != piece]
    if differing:
        first = differing[0]
        rule = (
            f"is another tokenizer than that of init_from: {len(differing):,} of {theirs:,} ids are other pieces, "
            f"first id {first}: here {pieces[first]!r}, there {named[first]!r}"
        )
        yield fault("input_tokenizer_file", rule, same)
