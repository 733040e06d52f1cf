"""All settings of a fine-tuning run; by itself, since only a training needs it and large classes take time to make."""

from __future__ import annotations

from typing import ClassVar

from zerokara.config import sample_lengths
from zerokara.config.finetune_config import FinetuneConfig
from zerokara.config.run_config import RunConfig
from zerokara.config.sample_lengths import SampleLengths
from zerokara.config.settings import PositiveWhole


class FinetuneRunConfig(FinetuneConfig, RunConfig):
    """All settings of a fine-tuning run: `finetune_config.yaml`, and the model's from its folder."""

    packs_examples: ClassVar[bool] = True
    packed_target_length: PositiveWhole = 1
    """t5: tokens in a packed decoder target, as the examples need them; for a decoder 1."""

    @property
    def source_entries(self) -> tuple[str, ...]:
        """`train_data`, which is one source."""
        return (", ".join(self.train_data),)

    @property
    def lengths(self) -> SampleLengths:
        """Lengths of a packed training sequence."""
        assert self.packed_length != "auto", "packed_length: auto was not resolved"
        target = self.packed_target_length if self.traits.is_encoder_decoder else self.packed_length
        return sample_lengths.packed(self.packed_length, target, self.traits.is_encoder_decoder)
