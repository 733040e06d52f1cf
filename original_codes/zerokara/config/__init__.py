"""The YAML files as frozen objects: strict loading, one error that lists every fault."""

from zerokara.config.convert_config import ConvertConfig
from zerokara.config.loading import load
from zerokara.config.pretrain_config import DataSettings, ModelSettings, PretrainConfig, TrainingSettings
from zerokara.config.rendering import as_yaml, help_text
from zerokara.config.settings import Settings
from zerokara.config.tokenizer_config import TokenizerConfig

__all__ = [
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
