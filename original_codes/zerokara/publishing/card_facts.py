"""Facts about an exported model, as JSON: the basis of the model card, and part of the export's manifest.

Everything here is read from the chain of manifests and from the run folder; nothing else is claimed.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zerokara import manifest
from zerokara.errors import UserError
from zerokara.examples import facts
from zerokara.huggingface.checkpoint_source import CheckpointSource
from zerokara.huggingface.families import FAMILIES
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.layout import TokenPaths

_TRAINING_SETTINGS = (
    "seq_len", "global_batch_size", "optimizer", "lr", "min_lr", "lr_schedule", "warmup_fraction", "adam_beta1",
    "adam_beta2", "weight_decay", "gradient_clipping", "order", "seed", "zero_stage", "init_std",
)  # fmt: skip
_SPAN_CORRUPTION_SETTINGS = ("noise_density", "mean_span_length", "relative_attention_lr_multiplier")


def gather(source: CheckpointSource, encoder: Encoder, dtype: str) -> dict[str, Any]:
    """Model, training, fine-tuning, data and tokenizer in numbers."""
    shape, state = source.shape, source.state
    family = FAMILIES[shape.architecture]
    curve = source.metrics()
    return {
        "model": {
            **shape.as_json(),
            "class": family.class_name,
            "auto_class": family.auto_class,
            "task": family.task,
            "description": family.description,
            "parameters": shape.num_parameters(padded=False),
            "active_parameters": shape.num_active_parameters(),
            "dtype": dtype,
            "converses": (source.run_dir / facts.CHAT_TEMPLATE_NAME).is_file(),
        },
        "training": {
            "step": state.step,
            "init_from": Path(state.facts["init_from"]).name if "init_from" in state.facts else None,
            "sequences": state.samples,
            "tokens": state.tokens,
            "epochs": next((line["epoch"] for line in reversed(curve) if "epoch" in line), None),
            "seconds": round(state.seconds, 1),
            "precision": state.precision,
            "settings": {
                name: getattr(source.config, name)
                for name in (
                    *_TRAINING_SETTINGS,
                    *(_SPAN_CORRUPTION_SETTINGS if shape.traits.is_encoder_decoder else ()),
                )
            },
            "curve": {
                "loss": _first_and_last(curve, "loss"),
                "valid_loss": _first_and_last(curve, "valid_loss"),
                "valid_bits_per_byte": _first_and_last(curve, "valid_bits_per_byte"),
            },
        },
        "finetuning": _finetuning(source),
        "data": _data(source),
        "tokenizer": {"vocab_size": encoder.vocab_size, "sha256": encoder.sha256},
    }


def _finetuning(source: CheckpointSource) -> dict[str, Any] | None:
    """The facts of a fine-tuning; without its test, if that was one of another checkpoint."""
    found = facts.read(source.run_dir)
    if found is None:
        return None
    if found.test is not None and found.test.checkpoint != source.folder.name:
        found = replace(found, test=None, baselines={})
    return asdict(found)


def _first_and_last(curve: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The first and the last line that has a value, as ``{"step", "value"}``."""
    points = [{"step": line["step"], "value": line[name]} for line in curve if line.get(name) is not None]
    return [points[0], points[-1]] if points else []


def _data(source: CheckpointSource) -> dict[str, Any]:
    """The facts of step 2's manifest, if it belongs to the data that the model was trained on."""
    path = TokenPaths(source.config.output_prefix).manifest
    try:
        tokens = manifest.read(path)
    except UserError:
        return {}
    hashes = {record.sha256 for records in tokens.outputs.values() for record in records}
    if source.state.data_sha256 not in hashes:
        return {}
    sources = [
        {"name": Path(each["entry"]).name, "train": each["train"], "valid": each["valid"]}
        for each in tokens.facts.get("sources", [])
    ]
    return {
        "sha256": source.state.data_sha256,
        "train": tokens.facts.get("train"),
        "valid": tokens.facts.get("valid"),
        "sources": sources,
    }
