"""Configurations for tests: small, valid, made from the class, so that a test names only the settings it is about."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerokara.base.errors import Fault, UserError
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig

RECIPE: dict[str, Any] = {
    "lr": 0.001,
    "min_lr": 0.0001,
    "lr_schedule": "cosine",
    "warmup_fraction": 0.02,
    "optimizer": "adamw",
    "muon_momentum": 0.95,
    "weight_decay": 0.1,
}
"""Numbers for what the rules of the recipe would choose, for tests of what comes after them."""
TINY: dict[str, Any] = RECIPE | {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attn_heads": 4,
    "seq_len": 32,
    "global_batch_size": 8,
    "micro_batch_size": 4,
    "precision": "fp32",
    "lr": 0.01,
    "min_lr": 0.001,
    "log_interval": 1,
    "eval_interval": 1000,
    "save_interval": 1000,
    "tensorboard": False,
    "plots": False,
}
"""A model and a run that a CPU computes in an instant; any architecture can be set on top."""


def config_of(**overrides: Any) -> PretrainConfig:
    """Return a tiny configuration with `overrides` (settings by name; a path may be a `Path`, a list a list).

    Raises:
        UserError: the settings break a rule, as for `loading.load`.
        pydantic.ValidationError: a setting is unknown, or its value has the wrong type.
    """
    given = {key: str(value) if isinstance(value, Path) else value for key, value in overrides.items()}
    config = PretrainConfig(**(TINY | given))
    if faults := list(config.rule_faults(set())):
        raise UserError(faults)
    return config


def typed(*pairs: str, **settings: object) -> list[str]:
    """Return ``key=value`` texts, and settings by name, as options of the command line."""
    named = (f"{key}={value}" for key, value in settings.items())
    return [word for pair in (*pairs, *named) for word in ("--set", pair)]


def loaded(folder: Path, text: str, *overrides: str, of: type = PretrainConfig) -> Any:
    """Return the configuration of this text, which becomes the file `config.yaml` of the folder."""
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load(of, path, overrides)


def faults_of(folder: Path, text: str, *overrides: str, of: type = PretrainConfig) -> list[Fault]:
    """Return the faults of a configuration that is refused; their places are relative (``:14``)."""
    found = refused(loaded, folder, text, *overrides, of=of)
    return [replace(each, where=each.where.replace(f"{folder}/config.yaml", "")) for each in found]


def refused(call: Callable[..., object], *arguments: object, **named: object) -> list[Fault]:
    with pytest.raises(UserError) as caught:
        call(*arguments, **named)
    return caught.value.faults


def fault_of(call: Callable[..., object], *arguments: object, **named: object) -> Fault:
    (fault,) = refused(call, *arguments, **named)
    return fault
