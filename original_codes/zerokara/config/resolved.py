"""The settings of a run as its folder holds them: of a pretraining, or of a fine-tuning."""

from __future__ import annotations

from pathlib import Path

from zerokara.config import plain_yaml
from zerokara.config.finetune_config import ExampleSettings
from zerokara.config.finetune_run_config import FinetuneRunConfig
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.run_config import RunConfig

RESOLVED_NAME = "config_resolved.yaml"
"""In a run folder: all settings of its newest start."""


def load_run(path: Path) -> RunConfig:
    """Load the settings of a run, as `rendering.as_yaml` wrote them.

    Raises:
        UserError: there is no such file, or it is none of ours.
    """
    return load(FinetuneRunConfig if _is_of_finetuning(path) else PretrainConfig, path)


def _is_of_finetuning(path: Path) -> bool:
    if not path.is_file():
        return False
    own = ExampleSettings.model_fields.keys() - PretrainConfig.model_fields.keys()
    return any(line.partition(":")[0] in own for line in plain_yaml.text_of(path).splitlines())
