"""`config.yaml`: the data (step 2 and count), the model, and the training (step 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from zerokara.config.curriculum import declared_tokens
from zerokara.config.data_settings import DataSettings
from zerokara.config.run_config import RunConfig
from zerokara.config.settings import rule
from zerokara.errors import Fault


class PretrainConfig(RunConfig, DataSettings):
    """Data, model and training, each in a class of its own: code that needs only one of them takes that one."""

    @property
    def source_entries(self) -> tuple[str, ...]:
        """`input_jsonl`."""
        return self.input_jsonl

    @rule("input_jsonl", "source_weights", "stages", "train_tokens")
    def _curriculum_holds_together(self) -> Iterator[Fault]:
        """Nothing here looks at the data: `samples` sees how many sequences a source holds."""
        yield from self._weight_faults("source_weights", self.source_weights)
        for index, stage in enumerate(self.stages):
            place = f"stages[{index}]"
            yield from self._weight_faults(f"{place}.source_weights", stage.source_weights)
            yield from self._weight_faults(f"{place}.source_tokens", stage.source_tokens)
            if stage.source_tokens is not None:
                for key in ("tokens", "source_weights"):
                    if getattr(stage, key) is not None:
                        yield self.fault(f"{place}.{key}", "cannot be given together with source_tokens", "keep one")
            elif stage.tokens is None:
                yield self.fault(place, "does not say how long it is", "give it tokens, or source_tokens")
            elif stage.tokens == "rest" and index != len(self.stages) - 1:
                yield self.fault(f"{place}.tokens", "must be a number in every stage but the last")
        known = declared_tokens(self.stages)
        if known is not None and self.train_tokens != "auto" and self.train_tokens > known:
            rule_text = f"is more than the {known:,} tokens of all stages together"
            yield self.fault("train_tokens", rule_text, "set it to auto, or let a last stage have `tokens: rest`")

    def _weight_faults(self, key: str, weights: Sequence[float] | str | None) -> Iterator[Fault]:
        if weights is None or isinstance(weights, str):
            return
        entries = self.input_jsonl
        if len(weights) != len(entries):
            rule_text = f"must have one number for each of the {len(entries)} entries of input_jsonl: "
            yield self.fault(key, rule_text + ", ".join(entries))
        elif math.fsum(weights) <= 0:
            yield self.fault(key, "must have a number above 0")

    @rule("architecture", "intra_document_masking")
    def _only_decoders_mask_documents(self) -> Iterator[Fault]:
        if self.intra_document_masking and self.traits.is_encoder_decoder:
            rule_text = f"must be false for architecture {self.architecture}, whose masked spans may cross documents"
            yield self.fault("intra_document_masking", rule_text)
