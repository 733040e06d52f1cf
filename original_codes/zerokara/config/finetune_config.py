"""`finetune_config.yaml`: the examples of a task, and the training on them (step 7)."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from zerokara.base.errors import Fault
from zerokara.config.data import SampleLengths, packed
from zerokara.config.engine import EngineSettings, LearningRateSchedule, OptimizerName
from zerokara.config.pretrain_config import RunConfig
from zerokara.config.settings import Auto, Fraction, NaturalFloat, PositiveFloat, PositiveInt, Settings, Text, Words

DataFormat = Literal["messages", "prompt_completion", "source_target", "text_label"]
Overlong = Literal["fail", "drop", "cut_prompt"]


class ExampleSettings(Settings):
    """The model to start from, and the examples (step 7)."""

    init_from: Text = "models/embedded_hf"
    """Hugging Face folder of the model to start from, such as step 4 writes. Its config.json gives the architecture and
    all sizes. Its weights must be *.safetensors, and its code is never run."""
    input_tokenizer_file: Text = "auto"
    """Tokenizer of the model that init_from names; `auto` is the {sentencepiece,tokenizer,spiece}.model in its folder,
    else its tokenizer.json."""
    end_of_document: Text = "auto"
    """Token that ends a document (tokenizer.json only); `auto` is the only eos_token that the folder names."""
    train_data: Words = ("data/finetune/train.jsonl",)
    """Training examples: files (.jsonl, or a table in .tsv or .txt, plain or compressed as .gz or .zst; or .parquet),
    globs, folders, or lists ("@files.txt"). The first line of a .tsv or .txt names its columns, separated by tabs."""
    valid_data: Words = ()
    """Validation examples, which choose the best checkpoint; if empty, valid_fraction of the training examples."""
    test_data: Words = ()
    """Test examples: read once, at the end, with the best checkpoint; they select nothing."""
    valid_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """Largest share of the training examples held out for validation where valid_data is empty, drawn by `seed`."""
    data_format: DataFormat | Auto = "auto"
    """Fields of an example: `messages` (a list of role and content), `prompt_completion`, `source_target`, or
    `text_label`; `auto` goes by the fields of the first line."""
    input_field: Text | Auto = "auto"
    """Field with the input text; `auto` is prompt, source or text, depending on data_format."""
    output_field: Text | Auto = "auto"
    """Field with the text that is learned; `auto` is completion, target or label, by data_format."""
    label_words: dict[str, str] = Field(default_factory=dict)
    """Text for every label, e.g. {0: negative, 1: positive}; if empty, the label itself is its text."""
    prompt_template: str = "auto"
    """Text around the input, with `{input}` as its placeholder, e.g. "Translate: {input}\\n"; `auto` is "{input}\\n"
    for a decoder (a line of its own), "{input}" for an encoder-decoder. Not for messages."""
    chat_template: Text = "auto"
    """messages: a Jinja file in which `{% generation %}` marks the text to learn. `auto` takes the folder's own
    template if it has such marks. Otherwise it makes one from the tokenizer's control tokens for turns (reserved_pieces
    of step 1, or those of ChatML or Llama 3), or a plain-text template if the tokenizer has none."""
    system_prompt: str = ""
    """messages: system message put before each conversation that has none; empty for none. The export names it."""
    overlong: Overlong = "fail"
    """What happens to examples longer than packed_length: `fail`, `drop`, or `cut_prompt`, which cuts off the beginning
    of the prompt (a decoder's conversation first loses its oldest turns, with the system message). An answer that is
    too long by itself is an error, unless this is `drop`. Test examples are treated alike."""
    packed_length: PositiveInt | Auto = "auto"
    """Tokens in a training sequence, which holds several examples, each with its own attention and positions; for t5
    the length of the encoder input. `auto` is the model's context length, at most 1,024."""
    max_bad_fraction: Fraction = 0.01
    """Largest tolerated share of bad lines; above it the step fails."""
    output_prefix: Text = "data/finetune/examples"
    """Path and beginning of the name of the token files: <output_prefix>_train.bin and .idx, and so on."""


class MetricSettings(Settings):
    """The task (step 7)."""

    metric: Literal["loss", "accuracy", "macro_f1", "exact_match", "word_accuracy", "chrf"] = "loss"
    """Metric that chooses the best checkpoint. Each validation computes it from answers that the model generates:
    `accuracy` and `macro_f1` (for labels), `exact_match`, `word_accuracy` (share of the target's words that are right),
    `chrf`. For `loss` no answers are generated."""
    eval_examples: PositiveInt | Literal["all"] = 500
    """Validation examples that the model answers at each validation; the test uses all that are kept."""
    max_new_tokens: PositiveInt | Auto = "auto"
    """Maximum number of tokens in a generated answer; `auto` is a quarter more than the longest training answer."""
    eval_batch_size: PositiveInt = 64
    """Examples that one process generates answers for at a time."""


class FinetuneConfig(EngineSettings, MetricSettings, ExampleSettings):
    """Examples, task and training; the model's own settings are those of `init_from`."""

    first: ClassVar[tuple[str, ...]] = (
        "init_from", "train_data", "valid_data", "test_data", "input_field", "output_field", "label_words", "metric",
        "output_prefix", "output_model_dir", "epochs", "lr",
    )  # fmt: skip
    # A field without a docstring here takes that of its component, without the sentence about `auto`.
    output_model_dir: Text = "models/finetuned"
    epochs: PositiveFloat | Auto = "auto"
    """Epochs (passes over the training examples) if train_tokens is auto; ignored otherwise. `auto` decreases as
    the number of examples grows."""
    global_batch_size: PositiveInt | Auto = "auto"
    """Sequences in one optimizer step, over all processes; each holds several examples (packed_length). `auto` grows
    with the number of examples."""
    lr: PositiveFloat | Auto = "auto"
    """Peak learning rate. `auto` depends on the number of examples, their learned tokens and the model's size."""
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    lr_schedule: LearningRateSchedule = "cosine"
    optimizer: OptimizerName = "adamw"
    weight_decay: NaturalFloat = 0.01
    eval_interval: PositiveInt = 50
    sample_prompts: Words = ()
    """Prompts that the model continues at each validation, written to samples.md in the run folder; [] for none. They
    are read as they stand here: put the prompt template, or the tokens of the turns, around them."""
    keep_best: bool = True
    """Also keep the checkpoint with the best metric; each validation that finds a better one saves it."""

    def rules(self) -> Iterator[Fault]:
        if self.prompt_template != "auto" and self.prompt_template.count("{input}") != 1:
            yield self.fault("prompt_template", "must hold {input} once, where the text goes", 'e.g. "{input}\\n"')
        if self.metric != "loss" and not self.valid_data and not self.valid_fraction:
            rule = "needs validation examples: valid_data, or a valid_fraction above 0"
            yield self.fault("metric", rule, "give one of them", ["valid_data", "valid_fraction"])
        if len({*map(str.strip, self.label_words.values())} - {""}) < len(self.label_words):
            yield self.fault("label_words", "must give each label a text of its own, which is not empty")


class FinetuneRunConfig(FinetuneConfig, RunConfig):
    """All settings of a fine-tuning run: `finetune_config.yaml`, and the model's from its folder."""

    packs_examples: ClassVar[bool] = True
    packed_target_length: PositiveInt = 1
    """t5: tokens in a packed decoder target, as the examples need them; for a decoder 1."""

    @property
    def generates_answers(self) -> bool:  # type: ignore[override]  # of each configuration
        return self.metric != "loss"

    @property
    def source_entries(self) -> tuple[str, ...]:
        return (", ".join(self.train_data),)  # one source

    @property
    def lengths(self) -> SampleLengths:
        assert self.packed_length != "auto", "packed_length: auto was not resolved"
        target = self.packed_target_length if self.traits.is_encoder_decoder else self.packed_length
        return packed(self.packed_length, target, self.traits.is_encoder_decoder)
