"""A Hugging Face folder as the model that a training starts from (`init_from`).

Its configuration must equal ours, setting by setting, and its tokenizer must map every id to the same piece as ours:
otherwise its weights mean nothing here. Only the context length of rotary positions may be another. Both are checked
before training starts; `settings_of` reads the settings from the folder, so that nobody has to copy them. The weights
are converted by the inverses of the rules that export them, so that a round trip loses no bit.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import safe_open
from torch import Tensor

from zerokara.base.errors import Fault, UserError, refuse
from zerokara.checkpoint.state import ComputedTensors
from zerokara.config.model import ModelSettings, RopeScaling
from zerokara.config.pretrain_config import NewEmbeddings
from zerokara.config.writing import value_text
from zerokara.huggingface import families, model_folder, tokenizer_proof, weight_rules
from zerokara.huggingface.model_folder import Stored
from zerokara.huggingface.new_vocabulary import NewVocabulary, new_vocabulary
from zerokara.huggingface.to_hf import GENERATION_NAME
from zerokara.huggingface.tokenizer_proof import RESIZE
from zerokara.huggingface.weight_rules import COPIED_VOCABULARY, VOCABULARY
from zerokara.model.shapes import ModelShape
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import CONFIG_NAME, FIRST_END, open_encoder, read_json, tokenizer_file

_OF_TRAINING = {
    "initializer_range", "initializer_factor", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate",
}  # fmt: skip
"""Values that change neither weights nor results of a model, only its training."""
_NOT_COMPUTED = {
    "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "rope_parameters.partial_rotary_factor": 1.0,
}  # fmt: skip
"""Keys that a model of any family may state, and nothing here computes → the value without effect."""
_FLOATS = "F32", "F16", "BF16", "F64"
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
    stored, hf_config = _opened(folder, fault)
    family = families.FAMILIES.get(shape.architecture)  # of t5_moe there is none
    if family is None or hf_config.model_type != family.model_type:
        rule = f"{folder} holds a model of type {hf_config.model_type}"
        name = _architecture(hf_config)
        raise UserError(fault("architecture", rule, f"set architecture: {name}" if name else _KNOWN))
    faults = _differences(folder, shape, hf_config, stored, fault)
    start = read_json(folder / model_folder.CONFIG).get("decoder_start_token_id")
    if shape.traits.is_encoder_decoder and new_embeddings == "none" and start not in (None, encoder.pad_id):
        rule = f"must be {encoder.pad_id}, the tokenizer's <pad>, with which every decoder begins here"
        faults.append(Fault(str(folder / model_folder.CONFIG), rule, "decoder_start_token_id", start))
    if new_embeddings == "none":
        faults += _differing_pieces(folder, hf_config.vocab_size, encoder, fault)
    refuse(faults)
    return vocabulary_of(folder, encoder, new_embeddings)


def vocabulary_of(folder: Path, encoder: Encoder, new_embeddings: NewEmbeddings) -> NewVocabulary | None:
    """Return what becomes of the embeddings of `folder` under our tokenizer; UserError if it has no tokenizer."""
    if new_embeddings == "none":
        return None
    return new_vocabulary(open_encoder(folder, FIRST_END), encoder)


def open_weights(
    folder: Path, shape: ModelShape, vocabulary: NewVocabulary | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Return the weights of `folder` by our parameter names, in the order of the rules, each read when its turn comes.

    `check_source` comes first. With a new `vocabulary` rows are made for it.
    """
    stored, _ = _opened(folder, lambda key, rule, remedy="": Fault(str(folder), rule, remedy=remedy))
    rules = families.rules_for(shape)
    of_vocabulary = {name for rule in rules if rule.transform in (VOCABULARY, COPIED_VOCABULARY) for name in rule.hf}

    def tensor(name: str) -> Tensor:
        rows = _read(stored[name])
        if name not in of_vocabulary:
            return rows
        # T5's are 32,128 for 32,100 ids; those beyond our last id are dropped.
        return vocabulary.rows(rows) if vocabulary else rows[: shape.vocab_size]

    return weight_rules.from_hf(rules, ComputedTensors(stored, tensor), shape)


def _read(stored: Stored) -> Tensor:
    with safe_open(stored.path, "pt") as file:
        return file.get_tensor(stored.name).float()


def settings_of(folder: Path, fault: SettingFault) -> dict[str, Any]:
    """Return the settings of `ModelSettings` that make the model of a folder; `fault` is of the setting `init_from`.

    Raises:
        UserError: the folder holds no model, or one that is not computed here.
    """
    stored, config = _opened(folder, fault)
    name = _architecture(config)
    if name is None:
        raise UserError(fault("init_from", f"holds a model of type {config.model_type}", _KNOWN))
    family = families.FAMILIES[name]
    found = {
        ours: _value_of(config, key) for key, ours in family.settings.items() if ours in ModelSettings.model_fields
    } | {
        "head_dim": getattr(config, "head_dim", None),
        "moe_layers": family.moe_layers(config) or None,
        "rope_scaling": _rope_scaling(folder, config),
    }
    values = {ours: value for ours, value in found.items() if value is not None}
    if "ffn_hidden_size" not in values and "moe_ffn_hidden_size" in values:  # every layer has experts
        values["ffn_hidden_size"] = values["moe_ffn_hidden_size"]
    values.setdefault("seq_len", _t5_context(folder))
    values |= {"architecture": name, "tie_word_embeddings": config.tie_word_embeddings}
    try:
        shape = ModelShape.from_config(ModelSettings(**values), config.vocab_size)
    except ValidationError as error:
        theirs = {ours: key for key, ours in family.settings.items()}
        wrong = "; ".join(f"{theirs.get(str(each['loc'][0]), '')}: {each['msg']}" for each in error.errors())
        raise UserError(Fault(str(folder / "config.json"), f"is of no model: {wrong}")) from error
    if faults := _differences(folder, shape, config, stored, fault):
        raise UserError(faults)
    return values


def teacher_of(folder: Path, encoder: Encoder, seq_len: int, fault: SettingFault) -> ModelShape:
    """Return the shape of the decoder in a folder that shall teach a model with this tokenizer; `fault` is of settings.

    Raises:
        UserError: the folder holds no model, one that is not computed here, no decoder, a shorter context or other ids.
    """
    shape = ModelShape.from_config(ModelSettings(**settings_of(folder, fault)), encoder.vocab_size)
    if shape.traits.is_encoder_decoder:
        raise UserError(fault("init_from", "holds an encoder-decoder", "a teacher is a decoder"))
    if shape.seq_len < seq_len:
        raise UserError(fault("init_from", f"has a context of {shape.seq_len} tokens; seq_len is {seq_len}", ""))
    refuse(_differing_pieces(folder, _read_config(folder).vocab_size, encoder, fault))
    return shape


def carried(folder: Path, new_embeddings: NewEmbeddings) -> dict[str, Any]:
    """Return what an export takes over of the model that its run started from: context length, generation settings.

    Of these, with a new vocabulary, only those that neither name tokens nor count them.
    """
    ends = {"eos_token_id": read_json(folder / model_folder.CONFIG).get("eos_token_id")}
    generation = ends | read_json(folder / GENERATION_NAME)
    left_out = r"_.*|transformers_version" + ("" if new_embeddings == "none" else "|.*(token|_ids|length|bias).*")
    kept = {key: value for key, value in generation.items() if value is not None and not re.fullmatch(left_out, key)}
    context = _value_of(_read_config(folder), "max_position_embeddings") or _t5_context(folder)
    return {"context_length": context, "generation": kept}


def _t5_context(folder: Path) -> int:
    """Context length of a model whose configuration states none: that of its tokenizer, which may have no limit."""
    longest = read_json(folder / CONFIG_NAME).get("model_max_length")
    has_limit = isinstance(longest, int | float) and 0 < longest <= _MAX_CONTEXT
    return int(longest or 0) if has_limit else _T5_CONTEXT


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


def _opened(folder: Path, fault: SettingFault) -> tuple[dict[str, Stored], Any]:
    """The tensors of a folder by their full names, without copies of the embedding, and its configuration.

    An output matrix of its own makes the configuration of a decoder untied, as it makes the model of transformers.
    """
    stored, config = model_folder.tensors(folder, partial(fault, "init_from")), _read_config(folder)
    if (architecture := _architecture(config)) is None:
        return stored, config
    family, (output,) = families.FAMILIES[architecture], families.UNTIED_OUTPUT.hf
    embedding = family.rules[0].hf[0]
    prefix = "" if family.is_encoder_decoder else f"{embedding.partition('.')[0]}."
    for name in [each for each in stored if not each.startswith((prefix, output))]:
        if f"{prefix}{name}" not in stored:  # of a model that was saved without its output
            stored[f"{prefix}{name}"] = stored.pop(name)
    is_tied = config.tie_word_embeddings = family.config_is_tied(config)
    for name in [each for each in (*family.copies, *([output] if is_tied else [])) if each in stored]:
        pair = [stored[each] for each in (name, embedding) if each in stored]
        if len(pair) < 2 or not torch.equal(*map(_read, pair)):
            if name == output and not family.is_encoder_decoder:
                config.tie_word_embeddings = False
            else:
                stored[f"{name}, which is not {embedding},"] = stored.pop(name)
        elif is_tied or not family.stores_copies:
            del stored[name]
    return stored, config


def _read_config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises nothing narrower for malformed files
        raise UserError(Fault(str(folder / model_folder.CONFIG), families.reason_against(folder, error))) from error


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


def _differences(
    folder: Path, shape: ModelShape, hf_config: Any, stored: Mapping[str, Stored], fault: SettingFault
) -> list[Fault]:
    """Faults where the folder's configuration is not that of a model of `shape`, or else where its tensors are not."""
    if faults := [*_differing_settings(folder, shape, hf_config, fault)]:
        return faults
    shape = replace(shape, vocab_size=hf_config.vocab_size)
    held = {name: each for name, each in stored.items() if not model_folder.BUFFERS.search(name)}
    wrong = [f"{name}: has numbers of type {each.dtype}" for name, each in held.items() if each.dtype not in _FLOATS]
    shapes = {name: tuple(each.shape) for name, each in held.items()}
    wrong += weight_rules.offenders(families.rules_for(shape), shapes, shape)
    rule = f"holds other weights than those of its config.json ({len(wrong)} faults): {'; '.join(wrong[:3])}"
    remedy = "download the folder again, or save it with save_pretrained of the model that computes all of them"
    return [fault("init_from", rule, remedy)] if wrong else []


def _differing_settings(folder: Path, shape: ModelShape, hf_config: Any, fault: SettingFault) -> Iterator[Fault]:
    """Faults, one for each value in which the folder's configuration differs from that of a model of `shape`."""
    family = families.FAMILIES[shape.architecture]
    ours = {**family.config_values(shape), "tie_word_embeddings": shape.tie_word_embeddings}
    settings = {**family.settings, "tie_word_embeddings": "tie_word_embeddings"}
    # Shorter sequences leave the context of rotary positions as it is; longer ones extend it, and may rotate otherwise.
    left_out = _OF_TRAINING | {"max_position_embeddings"}
    scaling, context = _rope_scaling(folder, hf_config), _value_of(hf_config, "max_position_embeddings")
    if context and shape.seq_len > context:
        left_out.add("rope_parameters.rope_theta")
    elif scaling != shape.rope_scaling:
        text = value_text(scaling)
        yield fault("rope_scaling", f"the model of init_from has {text}", f"set rope_scaling: {text}")
    for key, expected in ours.items():
        is_left_out = key in left_out or (key.startswith("rope_parameters.") and key not in settings)
        if is_left_out or (value := _value_of(hf_config, key)) == expected:
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


def _differing_pieces(folder: Path, theirs: int, encoder: Encoder, fault: SettingFault) -> Iterator[Fault]:
    """Faults where an id of the folder's model, which has `theirs`, is another piece than in our tokenizer, or none."""
    same = "name the tokenizer of that model; step 3 takes another with new_embeddings: mean_of_pieces, after step 2"
    if without := tokenizer_proof.without_rows(encoder.pieces, theirs):
        rule = f"has {encoder.vocab_size:,} pieces, the model in {folder} {theirs:,}: {without}"
        yield fault("input_tokenizer_file", rule, RESIZE)
        return
    try:
        tokenizer = tokenizer_proof.load(folder)
    except Exception as error:  # as above
        rule = f"holds no tokenizer that can be opened: {families.reason_against(folder, error)}"
        yield fault("init_from", rule, "its tokenizer is needed to compare the ids")
        return
    named = [name or "" for name in tokenizer.convert_ids_to_tokens(list(range(theirs)))]
    pieces = [*encoder.pieces, *[""] * (theirs - encoder.vocab_size)]
    if differing := [token for token, name in enumerate(named) if name != pieces[token]]:
        first = differing[0]
        rule = (
            f"is another tokenizer than that of {folder}: {len(differing):,} of {theirs:,} ids are other pieces, "
            f"first id {first}: here {pieces[first]!r}, there {named[first]!r}"
        )
        yield fault("input_tokenizer_file", rule, same)
