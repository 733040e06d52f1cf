"""`config.yaml`: the data (step 2 and count), the model, and the training (step 3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerokara.config import curriculum
from zerokara.config.data_settings import DataSettings
from zerokara.config.model_settings import ModelSettings
from zerokara.config.settings import rule
from zerokara.config.training_settings import TrainingSettings
from zerokara.errors import Fault


class PretrainConfig(TrainingSettings, ModelSettings, DataSettings):
    """Data, model and training."""

    @rule("input_jsonl", "source_weights", "stages", "train_tokens")
    def _curriculum_holds_together(self) -> Iterator[Fault]:
        yield from curriculum.faults(self)

    def identity(self) -> dict[str, Any]:
        """The settings that fix the shape of the weights: a run cannot go on when one of them changes."""
        shape = {key: getattr(self, key) for key in ModelSettings.model_fields if key != "init_std"}
        return {**shape, "num_kv_heads": self.kv_heads, "ffn_hidden_size": self.ffn_size}
