"""What a training process reads of its configuration: the model and the training, whatever the data are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from zerokara.config.model_settings import ModelSettings
from zerokara.config.settings import rule
from zerokara.config.training_settings import TrainingSettings
from zerokara.errors import Fault


class RunConfig(TrainingSettings, ModelSettings):
    """Model and training of a run; `PretrainConfig` and `FinetuneRunConfig` add their data to it."""

    packs_examples: ClassVar[bool] = False
    """Whether a sample holds whole examples, and padding behind them."""

    @property
    def source_entries(self) -> tuple[str, ...]:
        """The entries of the configuration that name the training data, one for each source."""
        raise NotImplementedError

    if TYPE_CHECKING:  # fields of the classes that add the data, where they stand among their like
        input_tokenizer_file: str
        """The tokenizer: a SentencePiece model."""
        output_prefix: str
        """Path and beginning of the name of the token files."""

    @property
    def initial_std(self) -> float:
        """`init_std` with `auto` resolved; 0 stands for T5's own rule, which goes with Adafactor."""
        t5_rule = self.init_std == "auto" and self.traits.is_encoder_decoder and self.optimizer == "adafactor"
        return 0.0 if t5_rule else super().initial_std

    @rule("tensor_parallel_size", "architecture", "hidden_size", "num_attn_heads", "num_kv_heads", "ffn_hidden_size")
    def _tensor_parallel_divides_the_layers(self) -> Iterator[Fault]:
        size = self.tensor_parallel_size
        heads = {"num_attn_heads": self.heads, "num_kv_heads": self.kv_heads}
        shared = {**heads, "ffn_hidden_size": self.ffn_size}
        wrong = [f"{key} = {number}" for key, number in shared.items() if number % size]
        if wrong:
            most = math.gcd(*shared.values())
            possible = [number for number in range(1, most + 1) if most % number == 0]
            rule_text = f"must divide {', '.join(shared)}: {' and '.join(wrong)} cannot be split over {size} processes"
            yield self.fault("tensor_parallel_size", rule_text, f"one of {possible}")

    @rule("architecture", "tensor_parallel_size")
    def _experts_are_not_split(self) -> Iterator[Fault]:
        if self.tensor_parallel_size > 1 and self.traits.moe_every:
            rule_text = f"must be 1 for architecture {self.architecture}: its experts are not split"
            yield self.fault("tensor_parallel_size", rule_text, "shard their state with zero_stage 1, 2 or 3 instead")
