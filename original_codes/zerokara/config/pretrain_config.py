"""`config.yaml` as a whole (`PretrainConfig`), and the settings of any run (`RunConfig`)."""

import math
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from zerokara.base.errors import Fault
from zerokara.config.data import DataOrderSettings, DataSettings
from zerokara.config.engine import EngineSettings
from zerokara.config.model import ModelSettings
from zerokara.config.settings import PositiveFloat, Settings, Words

NewEmbeddings = Literal["none", "mean_of_pieces"]


class StartSettings(Settings):
    """The weights to start from (step 3)."""

    init_from: str = ""
    """Hugging Face folder with the weights to start from (continued pretraining); empty to initialize from the seed.
    Architecture, sizes and tokenizer must match that model (step 3 names each difference). Its weights must be
    *.safetensors, and its code is never run. A run that has started resumes from its own checkpoints."""
    new_embeddings: NewEmbeddings = "none"
    """How the embeddings start if the tokenizer differs from that of init_from: `none` refuses such a tokenizer. With
    `mean_of_pieces` a piece that both tokenizers have keeps its embedding; any other starts as the mean embedding of
    the pieces into which the old tokenizer splits its text."""


class TeacherSettings(Settings):
    """Distillation: models to learn from, beside the text (step 3)."""

    teachers: Words = ()
    """Hugging Face folders of decoders of any size, with the same tokenizer and a context length of at least seq_len:
    exports of step 4, or any model that init_from accepts. Every teacher computes every batch, and none is trained."""
    teacher_weight: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Weight w in the loss (1 - w)·cross-entropy + w·(KL divergence from the mean of the teachers' probabilities)."""


class TrainingSettings(EngineSettings, DataOrderSettings, StartSettings, TeacherSettings):
    """All settings of step 3 but those of the data and the model."""


class RunConfig(TrainingSettings, ModelSettings):
    """Model and training of a run; `PretrainConfig` and `FinetuneRunConfig` add their data to it."""

    packs_examples: ClassVar[bool] = False
    """True if a sample holds whole examples, followed by padding."""
    generates_answers: ClassVar[bool] = False
    """True if validations generate answers, for which they hold a copy of the whole model."""

    @property
    def source_entries(self) -> tuple[str, ...]:
        """The entries of the configuration that name the training data, one for each source."""
        raise NotImplementedError

    if TYPE_CHECKING:  # fields of the classes that add the data, where they stand among their like
        input_tokenizer_file: str
        end_of_document: str
        output_prefix: str

    def resolved_sizes(self) -> dict[str, Any]:
        """Return the sizes as `ModelSettings` does; an `init_std` of 0 is T5's own rule, which goes with Adafactor."""
        t5_rule = self.init_std == "auto" and self.traits.is_encoder_decoder and self.optimizer == "adafactor"
        return {**super().resolved_sizes(), **({"init_std": 0.0} if t5_rule else {})}

    def rules(self) -> Iterator[Fault]:
        size = self.tensor_parallel_size
        shared = {key: self.resolved_sizes()[key] for key in ("num_attn_heads", "num_kv_heads", "ffn_hidden_size")}
        if wrong := [f"{key} = {number}" for key, number in shared.items() if number % size]:
            most = math.gcd(*shared.values())
            possible = [number for number in range(1, most + 1) if most % number == 0]
            rule = f"must divide {', '.join(shared)}: {' and '.join(wrong)} cannot be split over {size} processes"
            reads = ["architecture", *shared, "hidden_size", "model_size"]
            yield self.fault("tensor_parallel_size", rule, f"one of {possible}", reads)
        if size > 1 and self.traits.moe_every:
            rule = f"must be 1 for architecture {self.architecture}: its experts are not split"
            yield self.fault("tensor_parallel_size", rule, "set 1, and shard with a zero_stage", ["architecture"])
        if self.cudnn_attention and self.traits.is_encoder_decoder:
            rule = f"must be false for architecture {self.architecture}: with its masks cuDNN has given NaN"
            yield self.fault("cudnn_attention", rule, reads=["architecture"])
        if self.teachers and self.traits.is_encoder_decoder:
            rule = f"must be empty for architecture {self.architecture}: teachers and the models that they teach are "
            yield self.fault("teachers", rule + "decoders", reads=["architecture"])
        if "" in self.teachers or len({*map(os.path.realpath, self.teachers)}) < len(self.teachers):
            yield self.fault("teachers", "must be folders, each named once", "set [] for none")
        if self.teachers and size > 1:
            rule = "need tensor_parallel_size 1: each process compares whole rows of the vocabulary"
            yield self.fault("teachers", rule, "set tensor_parallel_size: 1", ["tensor_parallel_size"])


class PretrainConfig(RunConfig, DataSettings):
    """Data, model and training, each in a class of its own: code that needs only one of them takes that one."""

    epochs: PositiveFloat = 1.0
    first: ClassVar[tuple[str, ...]] = (
        "input_jsonl", "input_tokenizer_file", "output_prefix", "output_model_dir", "architecture", "model_size",
        "seq_len", "train_tokens", "epochs", "sample_prompts", "eval_interval", "save_interval",
    )  # fmt: skip

    @property
    def source_entries(self) -> tuple[str, ...]:
        return *self.input_jsonl, *self.valid_jsonl

    def rules(self) -> Iterator[Fault]:
        # Nothing here looks at the data: `samples` sees how many sequences a source holds.
        weights: dict[str, Sequence[float] | str | None] = {"source_weights": self.source_weights}
        for index, stage in enumerate(self.stages):
            place = f"stages[{index}]"
            weights |= {f"{place}.{key}": getattr(stage, key) for key in ("source_weights", "source_tokens")}
            if stage.source_tokens is not None:
                for key in ("tokens", "source_weights"):
                    if getattr(stage, key) is not None:
                        yield self.fault(f"{place}.{key}", "cannot be given together with source_tokens", "keep one")
            elif stage.tokens is None:
                yield self.fault(place, "does not say how long it is", "give it tokens, or source_tokens")
            elif stage.tokens == "rest" and index != len(self.stages) - 1:
                yield self.fault(f"{place}.tokens", "must be a number in every stage but the last")
        for key, numbers in weights.items():
            if isinstance(numbers, tuple) and len(numbers) != len(self.input_jsonl):
                rule = f"must have one number for each of the {len(self.input_jsonl)} entries of input_jsonl: "
                yield self.fault(key, rule + ", ".join(self.input_jsonl), reads=["input_jsonl"])
            elif numbers == "replay" and len(self.input_jsonl) < 2:
                yield self.fault(key, "needs a second entry of input_jsonl, to be replayed", reads=["input_jsonl"])
            elif isinstance(numbers, tuple) and math.fsum(numbers) <= 0:
                yield self.fault(key, "must have a number above 0")
        if self.valid_jsonl and self.valid_fraction not in (0, DataSettings().valid_fraction):
            rule = "has no effect with valid_jsonl, which is all of the held-out text"
            yield self.fault("valid_fraction", rule, "set it to 0, or leave valid_jsonl empty", ["valid_jsonl"])
        counts = [stage.num_tokens for stage in self.stages]
        most = math.inf if None in counts or not counts else sum(filter(None, counts))
        if self.train_tokens != "auto" and self.train_tokens > most:
            rule = f"is more than the {most:,} tokens of all stages together"
            yield self.fault("train_tokens", rule, "set auto, or `tokens: rest` in the last stage", ["stages"])
        if self.intra_document_masking and self.traits.is_encoder_decoder:
            rule = f"must be false for architecture {self.architecture}, whose masked spans may cross documents"
            yield self.fault("intra_document_masking", rule, reads=["architecture"])
