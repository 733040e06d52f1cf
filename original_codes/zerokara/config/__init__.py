"""The YAML files as frozen objects: strict loading, one error that lists every fault.

The classes are imported when they are asked for: a step needs one of the three files, and building a class takes time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerokara.config.convert_config import ConvertConfig
    from zerokara.config.data_settings import DataSettings
    from zerokara.config.loading import load
    from zerokara.config.model_settings import ModelSettings
    from zerokara.config.pretrain_config import PretrainConfig
    from zerokara.config.rendering import as_yaml, help_text
    from zerokara.config.settings import Settings
    from zerokara.config.tokenizer_config import TokenizerConfig
    from zerokara.config.training_settings import TrainingSettings

RESOLVED_NAME = "config_resolved.yaml"
"""In a run folder: all settings of its newest start."""

__all__ = [
    "RESOLVED_NAME",
    "ConvertConfig",
    "DataSettings",
    "ModelSettings",
    "PretrainConfig",
    "Settings",
    "TokenizerConfig",
    "TrainingSettings",
    "as_yaml",
    "help_text",
    "load",
]

_MODULES = {
    "ConvertConfig": "convert_config",
    "DataSettings": "data_settings",
    "ModelSettings": "model_settings",
    "PretrainConfig": "pretrain_config",
    "Settings": "settings",
    "TokenizerConfig": "tokenizer_config",
    "TrainingSettings": "training_settings",
    "as_yaml": "rendering",
    "help_text": "rendering",
    "load": "loading",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
