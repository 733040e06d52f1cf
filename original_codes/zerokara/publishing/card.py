"""The model card (README.md) of an export, and its facts, which are part of the export's manifest.

In: the chain of manifests and the run folder; nothing else is claimed, and a missing fact gives no line. Out: Markdown
with YAML front matter (https://huggingface.co/docs/hub/model-cards), by huggingface_hub from `model_card.md.jinja`.
Names and texts of others are escaped, never markup: a corpus file may be named ``x](javascript:…)<script>.jsonl``.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from zerokara.base import progress
from zerokara.config.model import ARCHITECTURES
from zerokara.corpus.find import dataset_of, public_name
from zerokara.examples import facts as finetuning_facts
from zerokara.publishing import exported_folder

if TYPE_CHECKING:  # all that the card's text needs is imported without them
    from zerokara.publishing.checkpoint_source import CheckpointSource
    from zerokara.tokenizer.encoder import Encoder

_JOINERS = "\u200c\u200d\u200e\u200f"
"""Parts of words and emoji that do not print."""
_MARKUP = re.compile(r"[\\`*_{}\[\]()<>#!|~&$:@^]|(?<=www)\.|^[-+=]|(?<=\d)\.(?=\s|$)", re.IGNORECASE)
"""Starts of emphasis, links (bare addresses too), HTML, entities, formulas, cells, headings or lists. Source:
CommonMark 0.31 (any ASCII punctuation may follow a backslash); GitHub's tables, whose cells end at a ``|``."""
_TRAINING_SETTINGS = (
    "seq_len", "global_batch_size", "optimizer", "muon_momentum", "lr", "min_lr", "lr_schedule", "warmup_fraction",
    "warmup_steps", "adam_beta1", "adam_beta2", "weight_decay", "dropout", "gradient_clipping", "order", "seed",
    "zero_stage", "init_std", "eval_tokens",
)  # fmt: skip
_SPAN_CORRUPTION_SETTINGS = ("noise_density", "mean_span_length", "relative_attention_lr_multiplier")


def gather(source: "CheckpointSource", encoder: "Encoder", dtype: str, *, converses: bool) -> dict[str, Any]:
    """Model, training, fine-tuning, data and tokenizer in numbers, as JSON."""
    from zerokara.huggingface.families import FAMILIES

    shape, state, curve = source.shape, source.state, source.metrics()
    logged = next((line["epoch"] for line in reversed(curve) if "epoch" in line), None)
    family, tuned = FAMILIES[shape.architecture], finetuning_facts.read(source.run_dir)
    if tuned and tuned.test and (source.averaged or tuned.test.checkpoint != source.folder.name):
        tuned = replace(tuned, test=None, baselines={})  # the test is one of other weights
    settings = (*_TRAINING_SETTINGS, *(_SPAN_CORRUPTION_SETTINGS if shape.traits.is_encoder_decoder else ()))
    return {
        "model": {
            **shape.as_json(),
            "class": family.class_name,
            "auto_class": family.auto_class,
            "task": family.task,
            "parameters": shape.num_parameters(padded=False),
            "active_parameters": shape.num_active_parameters(),
            "dtype": dtype,
            "converses": converses,
            "system_prompt": tuned.system_prompt if tuned else "",
        },
        "training": {
            "step": state.step,
            "averaged": source.averaged,
            "init_from": Path(state.facts["init_from"]).name if "init_from" in state.facts else None,
            "teachers": [Path(each).name for each in source.config.teachers],
            "sequences": state.samples,
            "tokens": state.tokens,
            "epochs": state.facts.get("epochs", logged),  # runs of an earlier version have logged lines alone
            "skipped_steps": state.skipped_steps,
            "seconds": round(state.seconds, 1),
            "precision": state.precision,
            # A setting that is still `auto` tells a reader nothing.
            "settings": {name: value for name in settings if (value := getattr(source.config, name)) != "auto"},
            "curve": {name: _first_and_last(curve, name) for name in ("loss", "valid_loss", "valid_bits_per_byte")},
        },
        "finetuning": asdict(tuned) if tuned else None,
        "data": _data(source),
        "tokenizer": {"vocab_size": encoder.vocab_size, "sha256": encoder.sha256, "start_id": encoder.start_id},
    }


def _first_and_last(curve: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    points = [{"step": line["step"], "value": line[name]} for line in curve if line.get(name) is not None]
    return [points[0], points[-1]] if points else []


def _data(source: "CheckpointSource") -> dict[str, Any]:
    """Facts of step 2's manifest, if it belongs to the data that the model was trained on."""
    sha256 = source.state.data_sha256
    if (tokens := exported_folder.tokens_of(source.config.output_prefix, sha256)) is None:
        return {}
    # Of a mixture, how many tokens the run has read of each source that has any to train on.
    lines = (line["source_tokens"] for line in reversed(source.metrics()) if "source_tokens" in line)
    read: Iterator[int] = iter(next(lines, ()))
    found = tokens.facts.get("sources", [])
    sources = [
        {"name": public_name(each["entry"]), "train": each["train"], "valid": each["valid"]}
        | {"read": next(read, None) if each["train"]["tokens"] else None}
        for each in found
    ]
    on_hub = dict.fromkeys(filter(None, (dataset_of(each["entry"]) for each in found)))
    splits = {split: tokens.facts.get(split) for split in ("train", "valid")}
    return {"sha256": sha256, **splits, "sources": sources, "datasets": [*on_hub]}


def render(facts: dict[str, Any], *, name: str, language: Sequence[str], license: str) -> str:
    """Write the card; `name` is the repository (``user/name``) or the folder to load the model from."""
    facts = {"data": None, "finetuning": None, "samples": [], **facts}
    model, finetuning, samples, title = facts["model"], facts["finetuning"], facts["samples"], name.rpartition("/")[2]
    is_causal = model["task"] == "text-generation"  # text2text-generation has no pipeline since transformers 5
    pretrained = "continued-pretraining" if facts["training"]["init_from"] else "pretrained-from-scratch"
    tags = ["zerokara", "fine-tuned" if finetuning else pretrained]
    tags += ["conversational"] if model.get("converses") else []
    tags += [] if is_causal else [model["task"]]
    data = ModelCardData(license=license or None, library_name="transformers", tags=tags)
    data.language = list(language) or None
    data.datasets = (facts["data"] or {}).get("datasets") or None
    data.pipeline_tag = model["task"] if is_causal else None
    if finetuning and (test := finetuning["test"]):
        metric = finetuning["metric"]
        unit, factor = ("in nats per token, ", 1) if metric == "loss" else ("", 100)  # in per cent, as step 8's
        low, high = (each and factor * each for each in (test["low"], test["high"]))
        interval = "" if low is None else f"95 % interval {low:.4g} to {high:.4g}, "
        result = EvalResult(
            task_type=model["task"],
            dataset_type="held-out",
            dataset_name=finetuning.get("name") or finetuning["task"],
            dataset_split="test",
            metric_type=metric,
            metric_name=f"{metric.replace('_', ' ')} ({unit}{interval}n = {test['num_examples']:,})",
            metric_value=factor * test["value"],
        )
        data.model_name, data.eval_results = title, [result]
    card = ModelCard.from_template(
        data,
        str(Path(__file__).with_name("model_card.md.jinja")),
        **facts,
        title=title,
        usage=usage(model, name, samples[0]["prompt"] if samples else "…", bool(finetuning)),
        is_rotary=ARCHITECTURES[model["architecture"]].positions == "rotary",
        number="{:,}".format,
        inline=inline,
        progress=progress,
    )
    return f"{card}\n"


def renewed(text: str, name: str, language: Sequence[str], license: str) -> str:
    """Return a card with the name, language and license of the settings; an empty setting changes nothing."""
    loaded = re.search(r'^name = "([^"\\\n]*)"$', text, re.MULTILINE)  # in the code that loads the model
    if name and loaded:
        old, new = (f"# {inline(each.rpartition('/')[2])}\n" for each in (loaded[1], name))
        line = f"name = {json.dumps(name, ensure_ascii=False)}"
        text = f"{text[: loaded.start()]}{line}{text[loaded.end() :]}".replace(old, new, 1)
    card, words = ModelCard(text), {"language": [*language], "license": license}
    changed = {key: word for key, word in words.items() if word and word != card.data.get(key)}
    for key, word in changed.items():
        card.data[key] = word
    return str(card) if changed else text  # whose YAML keeps its comments


def inline(text: str) -> str:
    """`text` as Markdown within a line or the cell of a table; what does not print is spelt out, but for joiners."""
    line = " ".join(text.split())
    hidden = {each for each in line if not (each.isprintable() or each in _JOINERS)}
    shown = (each.encode("unicode_escape").decode("ascii") if each in hidden else each for each in line)
    return _MARKUP.sub(r"\\\g<0>", "".join(shown))


def usage(model: dict[str, Any], name: str, prompt: str, is_tuned: bool = False) -> list[str]:
    """Statements, one a line, that load `name` and print what it generates; `model` are the facts of that name.

    A model that `is_tuned` to a task answers as step 7 has scored it, with the most likely tokens.

    No pipeline: transformers 5 has none for encoder-decoders. They run under transformers 4 and 5 alike.
    """
    auto_class, asked = model["auto_class"], json.dumps(prompt, ensure_ascii=False)
    inputs, how = f'tokenizer({asked}, return_tensors="pt")', "do_sample=True, top_p=0.95"
    if is_tuned and not model.get("converses"):
        how = "do_sample=False"
    if model.get("converses"):
        options = 'add_generation_prompt=True, return_tensors="pt", return_dict=True'
        said = {"system": model.get("system_prompt"), "user": prompt}
        turns = [{"role": role, "content": text} for role, text in said.items() if text]
        inputs = f"tokenizer.apply_chat_template({json.dumps(turns, ensure_ascii=False)}, {options})"
    return [
        f"from transformers import {auto_class}, AutoTokenizer",
        f"name = {json.dumps(name, ensure_ascii=False)}",
        "tokenizer = AutoTokenizer.from_pretrained(name)",
        f"model = {auto_class}.from_pretrained(name)",
        f"inputs = {inputs}",
        f"output = model.generate(**inputs, max_new_tokens=50, {how})",
        # Sentinel tokens are special tokens, and tell which masked span the text after them fills.
        f"print(tokenizer.decode(output[0], skip_special_tokens={is_tuned or model['task'] == 'text-generation'}))",
    ]
