"""Shapes of tiny models for tests."""

from typing import Any

from configs import config_of

from zerokara.model.shapes import ModelShape


def shape_of(vocab_size: int = 300, **overrides: Any) -> ModelShape:
    """Return the shape of the tiny model of `config_of`; its vocabulary has padding rows."""
    return ModelShape.from_config(config_of(**overrides), vocab_size)


def named(overrides: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in overrides.items()) or "default"
