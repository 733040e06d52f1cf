"""The way back: a Hugging Face folder as the beginning of a training (`init_from`).

What the folder holds must be what the configuration says, setting by setting, and its tokenizer must give every id to
the same piece as ours: only then do its weights mean anything here. Both are looked at before training starts. The
weights come by the inverses of the rules that export them, so that a model goes there and back without losing a bit.

A folder may come from anyone, and nothing in it is run: no code that its files name (``auto_map``), and no pickle, the
loading of which is the running of a program. Weights are read from safetensors alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import Fault, RunError, UserError
from zerokara.huggingface import families, rules
from zerokara.huggingface.transforms import COPIED_VOCABULARY, VOCABULARY
from zerokara.model.shapes import ModelShape
from zerokara.tokenizer.encoder import Encoder

_OF_TRAINING = {
    "initializer_range", "initializer_factor", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate",
}  # fmt: skip
"""Values that change no weight and no result of a model: those of whoever trained it."""
_MOST_SAID = 300
"""Characters of what transformers has to say; of some files it quotes a great deal."""
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def check(config: PretrainConfig, shape: ModelShape, encoder: Encoder) -> None:
    """See that `init_from` holds a model of this shape, which reads the pieces of this tokenizer.

    Raises:
        UserError: there is no such folder, or it holds another model; names everything that differs.
    """
    if reason := shape.traits.no_class:
        raise UserError(config.fault("init_from", f"has no class for architecture {shape.architecture}: {reason}"))
    folder = Path(config.init_from)
    if not (folder / "config.json").is_file():
        remedy = "name a folder with config.json, *.safetensors and a tokenizer; download one with: hf download NAME"
        raise UserError(config.fault("init_from", "holds no Hugging Face model", remedy))
    found = _config(folder)
    family = families.FAMILIES[shape.architecture]
    if found.model_type != family.model_type:
        known = [name for name, each in families.FAMILIES.items() if each.model_type == found.model_type]
        remedy = f"set architecture: {known[0]}" if known else f"there are {', '.join(families.FAMILIES)}"
        rule = f"{folder} holds a model of type {found.model_type}"
        raise UserError(config.fault("architecture", rule, remedy))
    if unsafe := _unsafe_weights(folder, found):
        raise UserError(config.fault("init_from", unsafe, _to_safetensors(folder, family.auto_class)))
    if broken := [f"{path.name} ({reason})" for path in _weight_files(folder) if (reason := _unreadable(path))]:
        rule = f"holds weights that cannot be read: {', '.join(broken[:3])}"
        raise UserError(config.fault("init_from", rule, "download the folder again"))
    faults = [*_differing(config, shape, found), *_strange_pieces(config, shape, found, encoder)]
    if faults:
        raise UserError(faults)


def weights(config: PretrainConfig, shape: ModelShape) -> dict[str, Tensor]:
    """The weights of `init_from` by our parameter names, whole, in fp32; `check` has seen the folder.

    Raises:
        RunError: a tensor is missing, left over, or of another shape, or two stand for one of ours and differ.
    """
    import transformers
    from transformers.utils import logging

    folder = Path(config.init_from)
    logging.disable_progress_bar()
    auto_class = getattr(transformers, families.FAMILIES[shape.architecture].auto_class)
    model, report = auto_class.from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    complaints = [f"{name}: {sorted(map(str, found))}" for name, found in report.items() if found]
    if complaints:
        raise RunError(f"{folder}: the weights are not those of config.json: {'; '.join(complaints)}")
    table, theirs = families.rules_for(shape), families.stored(model)
    for rule in table:
        if rule.transform is COPIED_VOCABULARY and any(not theirs[name].equal(theirs[rule.hf[0]]) for name in rule.hf):
            raise RunError(f"{folder}: encoder and decoder read with embeddings of their own; ours have one for both")
        if rule.transform in (VOCABULARY, COPIED_VOCABULARY):
            name, *_ = rule.hf
            theirs[name] = _fitted(theirs[name], shape.vocab_size)
    return dict(rules.from_hf(table, theirs, shape))


def num_surplus_rows(config: PretrainConfig, shape: ModelShape) -> int:
    """Rows of the folder's embedding behind our last id: no token has them (`check`), and `weights` leaves them out.

    T5's has 32,128 for 32,100 ids, so that the number can be cut among processes.
    """
    return max(0, int(_config(Path(config.init_from)).vocab_size) - shape.vocab_size)


def _fitted(rows_VD: Tensor, vocab_size: int) -> Tensor:
    """A row for each id: without the surplus ones, or with further ones, each the mean of those there are."""
    missing = vocab_size - len(rows_VD)
    if missing <= 0:
        return rows_VD[:vocab_size]
    return torch.cat((rows_VD, rows_VD.mean(dim=0, keepdim=True).expand(missing, -1)))


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the vendor raises nothing narrower on what is not as it should be
        rule = f"transformers cannot read it: {_one_line(error)}"
        raise UserError(Fault(where=str(folder / "config.json"), rule=rule)) from error


def _one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return words if len(words) <= _MOST_SAID else f"{words[:_MOST_SAID]}…"


def _unsafe_weights(folder: Path, found: Any) -> str:
    """What keeps the weights from being read as safetensors, or an empty text."""
    if named := getattr(found, "transformers_weights", None):
        return f"names a file of weights of its own in config.json ({named}); model.safetensors is what is read"
    if (folder / _WHOLE).is_file():
        return ""
    if (folder / _INDEX).is_file():
        try:
            parts = [str(path.relative_to(folder)) for path in _weight_files(folder)]
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return f"holds a {_INDEX} that is none: it has no weight_map with the file of each tensor"
        other = [part for part in parts if not re.fullmatch(r"[\w.-]+\.safetensors", part)]
        return f"lists files in {_INDEX} that are no safetensors beside it: {', '.join(other[:3])}" if other else ""
    pickles = sorted(path.name for ending in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{ending}"))
    if pickles:
        return f"holds its weights in a pickle ({pickles[0]}), which may run any program as it is loaded"
    return f"holds no weights: neither {_WHOLE} nor {_INDEX}"


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    parts = orjson.loads((folder / _INDEX).read_bytes())["weight_map"].values()
    return sorted({folder / str(part) for part in parts})


def _unreadable(path: Path) -> str:
    """What is wrong with a file by its head, which tells its size; or an empty text."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt"):
            return ""
    except (OSError, SafetensorError) as error:
        return _one_line(error)


def _to_safetensors(folder: Path, auto_class: str) -> str:
    to = f"{folder}-safetensors"
    code = f"from transformers import {auto_class} as M; M.from_pretrained({str(folder)!r}).save_pretrained({to!r})"
    return (
        "take the model's *.safetensors (most on the Hub have them), or where you trust who made it convert it once: "
        f"{shlex.join(['.venv/bin/python', '-c', code])}, copy its tokenizer there too, and set init_from: {to}"
    )


def _differing(config: PretrainConfig, shape: ModelShape, found: Any) -> Iterator[Fault]:
    """A fault for each value in which the folder's configuration is not the one that a model of `shape` would have."""
    family = families.FAMILIES[shape.architecture]
    where = str(Path(config.init_from) / "config.json")
    ours = {**family.config_values(shape), "tie_word_embeddings": shape.tie_word_embeddings}
    found.tie_word_embeddings = family.says_tied(found)
    settings = {**family.settings, "tie_word_embeddings": "tie_word_embeddings"}
    for key, must in _flat(ours):
        if key in _OF_TRAINING:
            continue
        value: Any = found
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if key == "n_inner" and value is None:
            value = 4 * found.n_embd  # as GPT2Config documents
        may_be_longer = key == "max_position_embeddings" and value >= must
        if value == must or may_be_longer:
            continue
        if key in settings:
            yield config.fault(settings[key], f"the model of init_from has {value}", f"set {settings[key]}: {value}")
        else:
            rule = f"must be {must}; models of architecture {shape.architecture} have no other"
            yield Fault(where=where, key=key, value=value, rule=rule)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _strange_pieces(config: PretrainConfig, shape: ModelShape, found: Any, encoder: Encoder) -> Iterator[Fault]:
    """Faults where an id of the folder's model stands for another piece than in our tokenizer, or for none of ours."""
    theirs, ours = found.vocab_size, shape.vocab_size
    same = "take the tokenizer of that model (and run step 2 again)"
    if theirs < ours and config.resize_vocabulary == "none":
        remedy = f"{same}, or where ours only has further pieces, set resize_vocabulary: mean"
        yield config.fault("input_tokenizer_file", f"has {ours:,} pieces, the model of init_from {theirs:,}", remedy)
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.init_from, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as above
        rule = f"holds no tokenizer that transformers can read: {_one_line(error)}"
        yield config.fault("init_from", rule, "without it nobody knows what its ids stand for")
        return
    named = tokenizer.convert_ids_to_tokens(list(range(theirs)))
    pieces = [piece.text for piece in encoder.model.pieces[:theirs]]
    if further := [place for place in range(ours, theirs) if named[place] is not None]:
        first = further[0]
        rule = f"has {ours:,} pieces, the model of init_from {theirs:,}; its id {first} is {named[first]!r}"
        yield config.fault("input_tokenizer_file", rule, same)
    wrong = [place for place, (name, piece) in enumerate(zip(named, pieces, strict=False)) if name != piece]
    if wrong:
        first = wrong[0]
        rule = (
            f"is another tokenizer than that of init_from: {len(wrong):,} of {theirs:,} ids stand for other pieces, "
            f"the first is {first}, here {pieces[first]!r} and there {named[first]!r}"
        )
        yield config.fault("input_tokenizer_file", rule, same)
