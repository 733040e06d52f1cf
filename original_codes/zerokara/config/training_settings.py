"""What step 3 reads of `config.yaml`: how long, how fast, in which order, on what machine, and what is watched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from zerokara.config.curriculum import Order, Stage, Weights
from zerokara.config.settings import (
    Auto,
    NaturalNumber,
    NaturalWhole,
    PositiveNumber,
    PositiveWhole,
    Settings,
    Text,
    Words,
    as_tuple,
    rule,
)
from zerokara.errors import Fault


class LearningSettings(Settings):
    """How long the run is and how the weights learn."""

    title: ClassVar[str] = "The training (step 3)"

    output_model_dir: Text = "models/embedded"
    """Run folder: checkpoints, metrics.jsonl, TensorBoard, plots."""
    train_tokens: PositiveWhole | Auto = "auto"
    """Tokens to train on; `auto` is `epochs` times the tokens there are."""
    epochs: PositiveNumber = 1.0
    """Passes over the data when train_tokens is auto; a number there says it instead."""
    max_steps: PositiveWhole | Auto = "auto"
    """Most updates of the weights: a run that train_tokens or epochs would make longer ends here, its learning rate
    at min_lr; `auto` is no such limit."""
    max_hours: PositiveNumber | Auto = "auto"
    """Most hours of training over all starts of the run; then it is saved and left, wherever its learning rate stands.
    With a higher number the same command goes on."""
    max_hours_per_start: PositiveNumber | Auto = "auto"
    """Most hours from one start of the command until it has saved and left, for machines that are lent by the hour
    (Slurm's --time); the same command goes on."""
    global_batch_size: PositiveWhole = 32
    """Sequences in one update of the weights, over all processes."""
    lr: PositiveNumber = 1e-3
    """Highest learning rate."""
    min_lr: NaturalNumber = 1e-4
    """Learning rate at the last step."""
    lr_schedule: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"] = "cosine"
    """How the learning rate goes from lr to min_lr after the warm-up: `cosine`, `linear`, `inverse_sqrt` (with the root
    of the step, as T5), `wsd` (stays at lr, then falls in a line over the last decay_fraction); or `constant`, which
    stays at lr."""
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.02
    """Share of the steps in which the learning rate rises from 0 to lr."""
    warmup_steps: NaturalWhole | Auto = "auto"
    """Steps in which it rises, instead of a share; `auto` is warmup_fraction."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of the steps, at the end, in which `wsd` falls from lr to min_lr."""
    optimizer: Literal["adamw", "adafactor", "muon"] = "adamw"
    """`adamw`; `adafactor` (as T5: hardly any memory, steps scaled with the weights: try lr 0.01); or `muon` for the
    matrices of the layers, AdamW for the rest (the same lr serves both). The latter two at zero_stage 0 or 1."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW: decay of the gradient's running mean."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW: decay of the squared gradient's running mean."""
    adam_epsilon: PositiveNumber = 1e-8
    """AdamW: added to the denominator."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Muon: decay of the gradient's running sum."""
    weight_decay: NaturalNumber = 0.1
    """Decay of the weights in each step, as a share of the learning rate (Adafactor: of the scaled one; T5 has 0); not
    on norms and biases."""
    relative_attention_lr_multiplier: PositiveNumber | Auto = "auto"
    """t5: how many times as fast as the rest the biases of distances learn: they start at hundredths, and a token knows
    its neighbours when they are several whole ones. `auto` is 30, with adafactor 1, as T5."""
    router_aux_loss_coef: NaturalNumber = 0.01
    """Experts: weight of the loss that keeps them equally busy (Switch Transformer), sequence by sequence."""
    router_z_loss_coef: NaturalNumber = 0.001
    """Experts: weight of the loss that keeps the router's logits small (ST-MoE)."""
    expert_capacity_factor: NaturalNumber = 0.0
    """Experts: most tokens of a sequence that one takes in training, in even shares, e.g. 1.25; what is beyond is left
    out. 0 is no limit. Validation and the exported model have none."""
    gradient_clipping: NaturalNumber = 1.0
    """Largest norm of the gradient; 0 for no clipping."""
    seed: NaturalWhole = 1234
    """Seed of the initial weights and of the order of the data."""
    init_from: str = ""
    """A Hugging Face folder whose weights the run starts from; empty for weights drawn from the seed. Architecture,
    sizes and tokenizer must be those of that model (step 3 names each that is not), its weights *.safetensors: nothing
    in it is run. A run that has begun goes on from its own checkpoints."""
    resize_vocabulary: Literal["none", "mean"] = "none"
    """What to do where the tokenizer has further pieces behind those of init_from's: refuse, or start each of them as
    the `mean` of the model's own."""

    @property
    def distances_lr_factor(self) -> float:
        """`relative_attention_lr_multiplier` with `auto` resolved."""
        if self.relative_attention_lr_multiplier != "auto":
            return self.relative_attention_lr_multiplier
        return 1.0 if self.optimizer == "adafactor" else 30.0

    @rule("lr", "min_lr")
    def _min_lr_is_lower(self) -> Iterator[Fault]:
        if self.min_lr > self.lr:
            yield self.fault("min_lr", f"must be at most lr = {self.lr:g}", f"try {self.lr / 10:g}")

    @rule("lr_schedule", "warmup_fraction", "warmup_steps", "decay_fraction")
    def _warmup_and_decay_fit(self) -> Iterator[Fault]:
        room = round(1 - self.warmup_fraction, 9)
        if self.lr_schedule == "wsd" and self.warmup_steps == "auto" and self.decay_fraction > room:
            rule_text = f"must leave room for warmup_fraction = {self.warmup_fraction:g}: together they are at most 1"
            yield self.fault("decay_fraction", rule_text, f"try at most {room:g}")


class ReadingSettings(Settings):
    """In which order the data is read."""

    title: ClassVar[str] = "The order of the data (step 3)"

    order: Order = "shuffle"
    """`shuffle` reads the sequences in another order each epoch, `sequential` as they stand in the corpus."""
    source_weights: Weights = "proportional"
    """How much of the training comes from each entry of input_jsonl: `proportional` reads every token equally often; or
    a number for each, e.g. [3, 1] reads three tokens of the first for one of the second, however long they are."""
    max_epochs_per_source: PositiveNumber = 16.0
    """Most passes over any one source; a run that would need more is refused before it starts."""
    stages: Annotated[tuple[Stage, ...], BeforeValidator(as_tuple)] = ()
    """A curriculum: parts of the run in turn, for two sources as [{tokens: 8e9, source_weights: [3, 1]}, {tokens: rest,
    source_weights: [0, 1], order: sequential, name: finish}]. Each has `tokens` (a number, or `rest` for the last) and
    its own `source_weights` and `order` where they differ from those above; or instead of tokens and weights
    `source_tokens`, exactly so many of each source. A stage of another order than the one before restarts each source
    that it reads. With train_tokens auto the run is as long as the stages, and `rest` is `epochs` times the tokens
    there are."""
    intra_document_masking: bool = False
    """Whether each document in a sequence is read as if it stood alone: attention stays within it, positions restart.
    Somewhat slower; good for short documents."""


class MachineSettings(Settings):
    """How the work is laid out on the machine; none of it changes what is learned."""

    title: ClassVar[str] = "The machine (step 3): none of this changes what is learned"

    num_processes: PositiveWhole | Auto = "auto"
    """Training processes; `auto` is one a GPU (CUDA_VISIBLE_DEVICES is honoured), or one on a CPU. At most as many as
    there are GPUs, or cores."""
    tensor_parallel_size: PositiveWhole = 1
    """Processes that share the matrices of each layer, for models that are too large for one GPU; on one node."""
    micro_batch_size: PositiveWhole | Auto = 8
    """Sequences that one process computes at a time. `auto` is the most that fits into a GPU's memory and divides the
    batch, or on a CPU as many as make it fastest; a run keeps it as long as it goes on with the same settings."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of the computation: `bf16`, `fp32`, or `auto`, which is bf16 where the hardware computes in it. The
    optimizer keeps its weights in fp32 either way."""
    zero_stage: Annotated[NaturalWhole, Field(le=3)] = 1
    """DeepSpeed ZeRO: what is spread over the processes. 0 nothing, 1 optimizer, 2 and gradients, 3 and weights."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """What rests in main memory rather than on the GPU: the `optimizer` (zero_stage 1 to 3), or `all`, the weights too
    (zero_stage 3). Slower, for models that do not fit otherwise."""
    activation_checkpointing: Literal["off", "selective", "full"] = "off"
    """What is computed again in the backward pass rather than kept: nothing, the feed-forward half of each layer
    (`selective`: keeps less than half), or all of it (`full`: keeps its input alone, and computes a third more)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether torch.compile fuses the work of each layer: half a minute at the first start. `auto` is where it pays: on
    a GPU, unless zero_stage is 3 or tensor_parallel_size more than 1, which it cannot serve."""
    deepspeed_template: Text = "auto"
    """JSON file with further DeepSpeed settings; `auto` is original_codes/ds_config_gpt_TEMPLATE.json."""

    @property
    def micro_batch(self) -> int:
        """Sequences that one process computes at a time, once `auto` was resolved."""
        assert self.micro_batch_size != "auto", "micro_batch_size: auto was not resolved"
        return self.micro_batch_size


class WatchingSettings(Settings):
    """What is logged, evaluated, and saved, and when a run stops itself."""

    title: ClassVar[str] = "Watching and saving (step 3)"

    log_interval: PositiveWhole = 10
    """Steps between two lines in the log and in metrics.jsonl."""
    eval_interval: PositiveWhole = 100
    """Steps between two validations; the last step is always validated."""
    eval_tokens: PositiveWhole | Literal["all"] = "all"
    """Validation tokens that are read each time."""
    sample_prompts: Words = ()
    """Beginnings of texts that the model continues at each validation, into samples.md of the run folder."""
    sample_tokens: PositiveWhole = 64
    """Most tokens of each such continuation; every one costs a forward pass over all of them."""
    save_interval: PositiveWhole = 100
    """Steps between two checkpoints; the last step is always saved."""
    keep_last: PositiveWhole = 2
    """Newest checkpoints that are kept."""
    keep_every: NaturalWhole = 0
    """Keep every checkpoint whose step is a multiple of this as well; 0 for none."""
    keep_best: bool = True
    """Keep the checkpoint with the lowest validation loss as well."""
    max_skipped_steps: NaturalWhole = 3
    """Steps in a row that may be skipped because a loss or gradient is not finite or leaps; one more stops the run."""
    spike_sigmas: NaturalNumber = 0.0
    """Skip a step whose loss lies so many standard deviations above those of the last steps; 0 for never."""
    plots: bool = True
    """Draw the curves as pictures, plots/*.png in the run folder, at validations and at the end."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: `off`, `offline` (files only), or `online` (needs WANDB_API_KEY in the environment)."""
    wandb_project: Text = "zerokara"
    """Name of the Weights & Biases project."""

    @rule("keep_every", "save_interval")
    def _kept_steps_are_saved(self) -> Iterator[Fault]:
        if self.keep_every % self.save_interval:
            nearest = max(1, round(self.keep_every / self.save_interval)) * self.save_interval
            rule_text = f"must be a multiple of save_interval = {self.save_interval}"
            yield self.fault("keep_every", rule_text, f"try {nearest}")


class TrainingSettings(WatchingSettings, MachineSettings, ReadingSettings, LearningSettings):
    """All that step 3 adds to the data and the model."""

    @rule("global_batch_size", "micro_batch_size", "num_processes", "tensor_parallel_size")
    def _micro_divides_global(self) -> Iterator[Fault]:
        processes = self.tensor_parallel_size if self.num_processes == "auto" else self.num_processes
        yield from self.batch_faults(processes)

    @rule("compile", "zero_stage", "tensor_parallel_size")
    def _compiled_layers_are_whole(self) -> Iterator[Fault]:
        if self.compile == "on" and (self.zero_stage == 3 or self.tensor_parallel_size > 1):
            rule_text = "cannot serve zero_stage 3 or tensor_parallel_size above 1, which work within the layers"
            yield self.fault("compile", rule_text, "set compile: auto")

    @rule("offload", "zero_stage")
    def _offload_needs_zero(self) -> Iterator[Fault]:
        least = {"none": 0, "optimizer": 1, "all": 3}[self.offload]
        if self.zero_stage < least:
            rule_text = f"needs zero_stage {least} or more; it is {self.zero_stage}"
            yield self.fault("offload", rule_text, f"set zero_stage: {least}, or offload: none")

    @rule("optimizer", "zero_stage", "tensor_parallel_size", "offload")
    def _whole_matrices_where_they_are_needed(self) -> Iterator[Fault]:
        if self.optimizer == "adamw":
            return
        needs = f"with optimizer: {self.optimizer}, which needs whole matrices"
        if self.zero_stage > 1:
            rule_text = f"must be 0 or 1 {needs}: at 2 and 3 DeepSpeed cuts them anywhere"
            yield self.fault("zero_stage", rule_text, "set zero_stage: 1, or optimizer: adamw")
        if self.tensor_parallel_size > 1:
            rule_text = f"must be 1 {needs}: tensor parallelism cuts them"
            yield self.fault("tensor_parallel_size", rule_text, "set tensor_parallel_size: 1, or optimizer: adamw")
        if self.offload != "none":
            rule_text = f"must be none {needs}: DeepSpeed's offload moves pieces of them"
            yield self.fault("offload", rule_text, "set offload: none and zero_stage: 1, or optimizer: adamw")

    def batch_faults(self, num_processes: int) -> Iterator[Fault]:
        """The fault, if any, of sharing a global batch among `num_processes` in whole micro batches."""
        if num_processes % self.tensor_parallel_size:
            rule_text = f"must divide the number of processes, {num_processes}"
            yield self.fault("tensor_parallel_size", rule_text, "lower it, or change num_processes")
            return
        ranks = num_processes // self.tensor_parallel_size
        micro = 1 if self.micro_batch_size == "auto" else self.micro_batch_size
        step = micro * ranks
        if self.global_batch_size % step == 0:
            return
        what = "processes" if self.tensor_parallel_size == 1 else "(processes ÷ tensor_parallel_size)"
        if step > self.global_batch_size and self.global_batch_size % ranks == 0:
            fitting = max(n for n in range(1, micro) if self.global_batch_size % (n * ranks) == 0)
            rule_text = f"times {what} = {ranks} must divide global_batch_size = {self.global_batch_size}"
            yield self.fault("micro_batch_size", rule_text, f"try {fitting}, or auto")
            return
        lower = self.global_batch_size // step * step
        tries = " or ".join(str(size) for size in (lower, lower + step) if size)
        rule_text = f"must be a multiple of micro_batch_size × {what} = {micro} × {ranks} = {step}"
        yield self.fault("global_batch_size", rule_text, f"try {tries}")
