"""`config.yaml`: the data (step 2 and count), the model, and the training (step 3)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from zerokara.config import curriculum
from zerokara.config.curriculum import Order, Stage, Weights, as_tuple
from zerokara.config.settings import (
    Auto,
    Fraction,
    NaturalNumber,
    NaturalWhole,
    PositiveNumber,
    PositiveWhole,
    Settings,
    Text,
    Words,
    rule,
)
from zerokara.errors import Fault


class DataSettings(Settings):
    """Text to tokens (step 2)."""

    title: ClassVar[str] = "Text to tokens (step 2)"

    input_jsonl: Words = ("data/embedded/corpus.jsonl",)
    """Raw text, each entry one source: a file (.jsonl or .txt, each plain, .gz or .zst; .parquet), a glob, a folder, a
    file that lists such entries ("@files.txt"), or a dataset on the Hub (hf://datasets/owner/name[@revision][/path])."""
    text_field: Text = "text"
    """Field of a JSON line, or column of a .parquet, that holds the text."""
    txt_document: Literal["file", "line"] = "file"
    """Whether a document of a .txt file is the whole `file` or each `line`."""
    input_tokenizer_file: Text = "tokenizers/embedded/tokenizer.model"
    """The tokenizer.model of step 1."""
    output_prefix: Text = "data/embedded/tokens"
    """Path and beginning of the name of the token files: <output_prefix>_text_document.bin and .idx."""
    num_workers: PositiveWhole | Auto = "auto"
    """Processes that tokenise; `auto` is one a core."""
    max_bad_fraction: Fraction = 0.01
    """Largest share of unreadable documents that is put up with; above it the step fails."""
    valid_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.01
    """Share of each source's documents kept for validation, drawn at random, never trained on; 0 for none."""
    valid_min_documents: NaturalWhole = 10
    """At least so many validation documents from each source (unless valid_fraction is 0)."""
    split_seed: NaturalWhole = 1234
    """Seed of that drawing."""


class ModelSettings(Settings):
    """The model."""

    title: ClassVar[str] = "The model"

    architecture: Literal["llama", "gpt2"] = "llama"
    """`llama` (RMSNorm, SwiGLU, rotary positions, grouped queries) or `gpt2` (LayerNorm, GELU, learned positions)."""
    num_layers: PositiveWhole = 6
    """Transformer layers."""
    hidden_size: PositiveWhole = 256
    """Width of the model; a multiple of num_attn_heads."""
    num_attn_heads: PositiveWhole = 4
    """Attention heads."""
    num_kv_heads: PositiveWhole | Auto = "auto"
    """Key and value heads shared among the attention heads (llama); `auto` is one for each."""
    ffn_hidden_size: PositiveWhole | Auto = "auto"
    """Inner width of the feed-forward layers; `auto` is 8/3 of hidden_size rounded up to 64 (llama), 4 times (gpt2)."""
    seq_len: PositiveWhole = 256
    """Tokens in a training sequence, and the longest text the model can read."""
    tie_word_embeddings: bool = True
    """Use one matrix for reading and for predicting tokens: fewer parameters, good for small models."""
    rope_theta: PositiveNumber = 10000.0
    """Base of the rotary positions (llama); larger for long sequences."""
    norm_epsilon: PositiveNumber = 1e-5
    """Added to the variance in normalisations."""
    init_std: PositiveNumber = 0.02
    """Standard deviation of the initial weights."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads with `auto` resolved."""
        return self.num_attn_heads if self.num_kv_heads == "auto" else self.num_kv_heads

    @property
    def ffn_size(self) -> int:
        """Inner feed-forward width with `auto` resolved."""
        if self.ffn_hidden_size != "auto":
            return self.ffn_hidden_size
        if self.architecture == "gpt2":
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // (3 * 64)) * 64

    @rule("hidden_size", "num_attn_heads")
    def _heads_divide_width(self) -> Iterator[Fault]:
        if self.hidden_size % self.num_attn_heads:
            lower = self.hidden_size // self.num_attn_heads * self.num_attn_heads
            remedy = f"try {lower or self.num_attn_heads} or {lower + self.num_attn_heads}"
            yield self.fault("hidden_size", f"must be a multiple of num_attn_heads = {self.num_attn_heads}", remedy)

    @rule("architecture", "hidden_size", "num_attn_heads")
    def _rotary_needs_even_heads(self) -> Iterator[Fault]:
        if self.architecture == "llama" and self.hidden_size % (2 * self.num_attn_heads) == self.num_attn_heads:
            width = self.hidden_size // self.num_attn_heads
            yield self.fault("hidden_size", f"must give heads of even width for rotary positions; they have {width}")

    @rule("num_attn_heads", "num_kv_heads", "architecture")
    def _kv_heads_divide_heads(self) -> Iterator[Fault]:
        if self.num_attn_heads % self.kv_heads:
            divisors = [n for n in range(1, self.num_attn_heads + 1) if self.num_attn_heads % n == 0]
            rule_text = f"must divide num_attn_heads = {self.num_attn_heads}"
            yield self.fault("num_kv_heads", rule_text, f"one of {divisors}")
        elif self.architecture == "gpt2" and self.kv_heads != self.num_attn_heads:
            yield self.fault("num_kv_heads", "must be auto for architecture gpt2, which does not share heads")


class TrainingSettings(Settings):
    """The training (step 3)."""

    title: ClassVar[str] = "The training (step 3)"

    output_model_dir: Text = "models/embedded"
    """Run folder: checkpoints, metrics.jsonl, TensorBoard, plots."""
    train_tokens: PositiveWhole | Auto = "auto"
    """Tokens to train on; `auto` is `epochs` times the tokens there are."""
    epochs: PositiveNumber = 1.0
    """Passes over the data when train_tokens is auto."""
    global_batch_size: PositiveWhole = 32
    """Sequences in one update of the weights, over all processes."""
    micro_batch_size: PositiveWhole = 8
    """Sequences that one process computes at a time: lower it when memory runs out; the result stays the same."""
    lr: PositiveNumber = 1e-3
    """Highest learning rate."""
    min_lr: NaturalNumber = 1e-4
    """Learning rate at the last step."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls from lr to min_lr after the warm-up; `constant` stays at lr."""
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of the steps in which the learning rate rises from 0 to lr."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW: decay of the gradient's running mean."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW: decay of the squared gradient's running mean."""
    adam_epsilon: PositiveNumber = 1e-8
    """AdamW: added to the denominator."""
    weight_decay: NaturalNumber = 0.1
    """AdamW: decay of the weights in each step, as a share of the learning rate; not on norms and biases."""
    gradient_clipping: NaturalNumber = 1.0
    """Largest norm of the gradient; 0 for no clipping."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of the computation: `bf16`, `fp32`, or `auto`, which is bf16 where the hardware computes in it. The
    optimizer keeps its weights in fp32 either way."""
    zero_stage: Annotated[NaturalWhole, Field(le=3)] = 1
    """DeepSpeed ZeRO: what is spread over the processes. 0 nothing, 1 optimizer, 2 and gradients, 3 and weights."""
    num_processes: PositiveWhole | Auto = "auto"
    """Training processes; `auto` is one a GPU (CUDA_VISIBLE_DEVICES is honoured), or one on a CPU."""
    seed: NaturalWhole = 1234
    """Seed of the initial weights and of the order of the data."""
    order: Order = "shuffle"
    """`shuffle` reads the sequences in another order each epoch, `sequential` as they stand in the corpus."""
    source_weights: Weights = "proportional"
    """How much of the training comes from each entry of input_jsonl: `proportional` reads every token equally often; or
    a number for each, e.g. [3, 1] reads three tokens of the first for one of the second, however long they are."""
    max_epochs_per_source: PositiveNumber = 16.0
    """Most passes over any one source; a run that would need more is refused before it starts."""
    stages: Annotated[tuple[Stage, ...], BeforeValidator(as_tuple)] = ()
    """A curriculum: parts of the run, one after another, as [{tokens: 8e9, source_weights: [3, 1]}, {tokens: rest,
    source_weights: [0, 1], order: sequential, name: finish}]. Each has `tokens` (a number, or `rest` for the last) and
    its own `source_weights` and `order` where they differ from those above; or instead of tokens and weights
    `source_tokens`, exactly so many of each source. With train_tokens auto the run is as long as the stages, and `rest`
    is `epochs` times the tokens there are."""
    isolate_documents: bool = False
    """Whether each document in a sequence is read as if it stood alone: attention stays within it, positions restart.
    Somewhat slower; good for short documents."""
    log_interval: PositiveWhole = 10
    """Steps between two lines in the log and in metrics.jsonl."""
    eval_interval: PositiveWhole = 100
    """Steps between two validations; the last step is always validated."""
    eval_tokens: PositiveWhole | Literal["all"] = "all"
    """Validation tokens that are read each time."""
    save_interval: PositiveWhole = 100
    """Steps between two checkpoints; the last step is always saved."""
    keep_last: PositiveWhole = 2
    """Newest checkpoints that are kept."""
    keep_every: NaturalWhole = 0
    """Keep every checkpoint whose step is a multiple of this as well; 0 for none."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: `off`, `offline` (files only), or `online` (needs WANDB_API_KEY in the environment)."""
    wandb_project: Text = "zerokara"
    """Name of the Weights & Biases project."""
    deepspeed_template: Text = "auto"
    """JSON file with further DeepSpeed settings; `auto` is original_codes/ds_config_gpt_TEMPLATE.json."""

    @rule("lr", "min_lr")
    def _min_lr_is_lower(self) -> Iterator[Fault]:
        if self.min_lr > self.lr:
            yield self.fault("min_lr", f"must be at most lr = {self.lr:g}", f"try {self.lr / 10:g}")

    @rule("global_batch_size", "micro_batch_size", "num_processes")
    def _micro_divides_global(self) -> Iterator[Fault]:
        processes = 1 if self.num_processes == "auto" else self.num_processes
        yield from self.batch_faults(processes)

    @rule("keep_every", "save_interval")
    def _kept_steps_are_saved(self) -> Iterator[Fault]:
        if self.keep_every % self.save_interval:
            nearest = max(1, round(self.keep_every / self.save_interval)) * self.save_interval
            rule_text = f"must be a multiple of save_interval = {self.save_interval}"
            yield self.fault("keep_every", rule_text, f"try {nearest}")

    def batch_faults(self, num_processes: int) -> Iterator[Fault]:
        """The fault, if any, of sharing a global batch among `num_processes` in whole micro batches."""
        share = self.micro_batch_size * num_processes
        if self.global_batch_size % share:
            lower = self.global_batch_size // share * share
            tries = " or ".join(str(size) for size in (lower, lower + share) if size)
            rule_text = (
                f"must be a multiple of micro_batch_size × processes = "
                f"{self.micro_batch_size} × {num_processes} = {share}"
            )
            yield self.fault("global_batch_size", rule_text, f"try {tries}")


class PretrainConfig(TrainingSettings, ModelSettings, DataSettings):
    """Data, model and training."""

    @rule("input_jsonl", "source_weights", "stages", "train_tokens")
    def _curriculum_holds_together(self) -> Iterator[Fault]:
        yield from curriculum.faults(self)

    def identity(self) -> dict[str, Any]:
        """The settings that fix the shape of the weights: a run cannot go on when one of them changes."""
        shape = {key: getattr(self, key) for key in ModelSettings.model_fields if key != "init_std"}
        return {**shape, "num_kv_heads": self.kv_heads, "ffn_hidden_size": self.ffn_size}
