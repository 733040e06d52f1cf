"""The settings of `config.yaml` for step 3: run length and optimization, order of the data, machine, monitoring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zerokara.config.curriculum import OrderKind, Stage, Weights
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
    resolved,
    rule,
)
from zerokara.errors import Fault

LearningRateSchedule = Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"]
OptimizerName = Literal["adamw", "adafactor", "muon"]


class OptimizationSettings(Settings):
    """The training (steps 3 and 7)."""

    output_model_dir: Text = "models/embedded"
    """Run folder: checkpoints, metrics.jsonl, TensorBoard, plots."""
    train_tokens: PositiveWhole | Auto = "auto"
    """Tokens to train on; `auto` is `epochs` times the training tokens."""
    epochs: PositiveNumber = 1.0
    """Epochs (passes over the training data) if train_tokens is auto; ignored otherwise."""
    max_steps: PositiveWhole | Auto = "auto"
    """Upper limit on the optimizer steps: a longer run ends here, with its learning rate at min_lr; `auto` is no
    limit."""
    max_hours: PositiveNumber | Auto = "auto"
    """Upper limit on the hours of training, over all starts of the run; it then saves and stops, wherever its learning
    rate is. With a higher limit the same command resumes it."""
    max_hours_per_start: PositiveNumber | Auto = "auto"
    """Upper limit on the hours from one start of the command until it has saved and stopped, for machines with a time
    limit (Slurm's --time); the same command resumes the run."""
    global_batch_size: PositiveWhole | Auto = "auto"
    """Sequences in one optimizer step, over all processes. `auto` grows with the tokens of the run."""
    lr: PositiveNumber | Auto = "auto"
    """Peak learning rate. `auto` follows the model's size and the tokens of the run."""
    min_lr: NaturalNumber | Auto = "auto"
    """Learning rate at the last step; `auto` is 0."""
    lr_schedule: LearningRateSchedule | Auto = "auto"
    """How the learning rate decays from lr to min_lr after the warm-up: `cosine`, `linear`, `inverse_sqrt` (1/√step, as
    T5), `wsd` (warm-up, stable, decay: constant, then linear over the last decay_fraction); or `constant`, no decay.
    `auto` is `linear`."""
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] | Auto = "auto"
    """Fraction of the steps in which the learning rate rises linearly from 0 to lr (warm-up). `auto` is as many steps
    as the optimizer needs."""
    warmup_steps: NaturalWhole | Auto = "auto"
    """Warm-up as a number of steps; `auto` uses warmup_fraction."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Fraction of the steps, at the end, over which `wsd` decays from lr to min_lr."""
    optimizer: OptimizerName | Auto = "auto"
    """`adamw`; `adafactor` (as T5: hardly any optimizer memory, update size relative to the weights: try lr 0.01); or
    `muon` for the matrices of the layers with AdamW for the rest (one lr serves both). The latter two need zero_stage 0
    or 1. `auto` is `muon` for decoders without experts wherever it can run, and `adamw` otherwise."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW: decay rate of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW: decay rate of the second moment."""
    adam_epsilon: PositiveNumber = 1e-8
    """AdamW: epsilon of the denominator."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] | Auto = "auto"
    """Muon: momentum. `auto` is the lower, the higher lr is: 0.88 to 0.95."""
    weight_decay: NaturalNumber | Auto = "auto"
    """Weight decay, decoupled: multiplied by the learning rate (for adafactor by the relative one; T5 has 0). Not
    applied to norms and biases. `auto` follows lr and the length of the run."""
    relative_attention_lr_multiplier: PositiveNumber | Auto = "auto"
    """t5: learning rate of the relative position bias, as a multiple of lr. The bias starts near 0.01 and attends to
    neighbours only at values of several units, so it must learn faster. `auto` is 30, with adafactor 1 as in T5."""
    router_aux_loss_coef: NaturalNumber = 0.01
    """Experts: coefficient of the auxiliary load-balancing loss (Switch Transformer), computed per sequence, of packed
    examples without the padding."""
    router_z_loss_coef: NaturalNumber = 0.001
    """Experts: coefficient of the router z-loss, which keeps the router's logits small (ST-MoE)."""
    expert_capacity_factor: NaturalNumber = 0.0
    """Experts: capacity factor in training, the tokens of a sequence (in fine-tuning, of an example) that one expert
    accepts as a multiple of an even share, e.g. 1.25; tokens beyond it are dropped. 0 is no limit. Validation and the
    exported model have no limit."""
    gradient_clipping: NaturalNumber = 1.0
    """Maximum norm of the gradient; 0 for no clipping."""
    seed: NaturalWhole = 1234
    """Seed of the initial weights and of the order of the data."""

    @property
    def global_batch(self) -> int:
        """`global_batch_size`, after the plan of the run has resolved `auto`."""
        return resolved(self.global_batch_size)

    @property
    def peak_lr(self) -> float:
        """`lr`, after the plan of the run has resolved `auto`."""
        return resolved(self.lr)

    @property
    def last_lr(self) -> float:
        """`min_lr`, after the plan of the run has resolved `auto`."""
        return resolved(self.min_lr)

    @property
    def schedule_name(self) -> LearningRateSchedule:
        """`lr_schedule`, after the plan of the run has resolved `auto`."""
        return resolved(self.lr_schedule)

    @property
    def optimizer_name(self) -> OptimizerName:
        """`optimizer`, after the plan of the run has resolved `auto`."""
        return resolved(self.optimizer)

    @property
    def momentum(self) -> float:
        """`muon_momentum`, after the plan of the run has resolved `auto`."""
        return resolved(self.muon_momentum)

    @property
    def matrix_decay(self) -> float:
        """`weight_decay`, after the plan of the run has resolved `auto`."""
        return resolved(self.weight_decay)

    @property
    def bias_lr_multiplier(self) -> float:
        """`relative_attention_lr_multiplier` with `auto` resolved."""
        if self.relative_attention_lr_multiplier != "auto":
            return self.relative_attention_lr_multiplier
        return 1.0 if self.optimizer == "adafactor" else 30.0

    @rule("lr", "min_lr")
    def _min_lr_is_lower(self) -> Iterator[Fault]:
        if self.lr != "auto" and self.min_lr != "auto" and self.min_lr > self.lr:
            yield self.fault("min_lr", f"must be at most lr = {self.lr:g}", f"try {self.lr / 10:g}")

    @rule("lr_schedule", "warmup_fraction", "warmup_steps", "decay_fraction")
    def _warmup_and_decay_fit(self) -> Iterator[Fault]:
        if self.warmup_fraction == "auto":
            return
        room = round(1 - self.warmup_fraction, 9)
        if self.lr_schedule == "wsd" and self.warmup_steps == "auto" and self.decay_fraction > room:
            rule_text = f"must leave room for warmup_fraction = {self.warmup_fraction:g}: the two sum to at most 1"
            yield self.fault("decay_fraction", rule_text, f"try at most {room:g}")


class StartSettings(Settings):
    """The weights to start from (step 3)."""

    init_from: str = ""
    """Hugging Face folder with the weights to start from (continued pretraining); empty to initialize from the seed.
    Architecture, sizes and tokenizer must be those of that model (step 3 names each that differs), the weights must be
    *.safetensors; no code of the folder is run. A run that has started resumes from its own checkpoints."""
    resize_vocabulary: Literal["none", "mean"] = "none"
    """What to do if the tokenizer has more pieces than the one of init_from: `none` refuses it, `mean` starts each new
    embedding as the mean of the model's own."""


class DataOrderSettings(Settings):
    """The order of the data (step 3)."""

    order: OrderKind = "shuffle"
    """`shuffle` reads the sequences in a new random order each epoch, `sequential` in the order of the corpus."""
    source_weights: Weights = "proportional"
    """Mixture of the entries of input_jsonl (sources): `proportional` reads every token equally often; or a weight for
    each, e.g. [3, 1] reads three tokens of the first for every one of the second, whatever their sizes."""
    max_epochs_per_source: PositiveNumber = 16.0
    """Most epochs of any one source; a run that would need more is refused before it starts."""
    stages: Annotated[tuple[Stage, ...], BeforeValidator(as_tuple)] = ()
    """Curriculum: consecutive stages of the run, for two sources e.g. [{tokens: 8e9, source_weights: [3, 1]}, {tokens:
    rest, source_weights: [0, 1], order: sequential, name: finish}]. Each has `tokens` (a number, or `rest` for the
    last) and its own `source_weights` and `order` where they differ from those above; or, instead of tokens and
    weights, `source_tokens`: an exact number for each source. A stage with another order than the one before restarts
    the sources that it reads. With train_tokens auto the run is as long as its stages, and `rest` is `epochs` times the
    training tokens."""
    intra_document_masking: bool = False
    """Intra-document masking: attention stays within each document of a sequence, and positions restart. Somewhat
    slower; good for short documents."""

    @property
    def is_mixture(self) -> bool:
        """Whether each source is cut into samples by itself, and read by weight or in stages."""
        return bool(self.stages) or self.source_weights != "proportional"


class MachineSettings(Settings):
    """The machine (steps 3 and 7): none of this changes what is learned."""

    num_processes: PositiveWhole | Auto = "auto"
    """Training processes on each machine; `auto` is one per GPU (CUDA_VISIBLE_DEVICES applies), or on a CPU one per
    core, as far as the batch and the memory go round. At most as many as there are GPUs, or cores."""
    nodes: PositiveWhole | Auto = "auto"
    """Machines (nodes) that train together, each with num_processes. The command on the first one prints the line for
    the others. `auto` is 1, or in a Slurm step the number of its nodes."""
    min_nodes: PositiveWhole | Auto = "auto"
    """Machines that are enough to start, and to go on with when others are lost; `auto` is all of them."""
    max_restarts: NaturalWhole = 3
    """Several machines: how often the run starts again from its newest checkpoint, without anybody's help, after a
    process was killed or a machine was lost."""
    tensor_parallel_size: PositiveWhole = 1
    """Tensor parallelism: processes over which the matrices of each layer are split, for models too large for one GPU;
    within one node."""
    micro_batch_size: PositiveWhole | Auto = 8
    """Sequences that one process computes at a time; gradients are accumulated up to global_batch_size. `auto` is the
    largest that fits into the GPU's memory and divides the batch, or the fastest on a CPU; a run keeps it as long as it
    resumes with the same settings."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of the computation: `bf16`, `fp32`, or `auto`: bf16 if the hardware supports it. The optimizer has
    fp32 master weights in any case."""
    zero_stage: Annotated[NaturalWhole, Field(le=3)] = 1
    """ZeRO stage (DeepSpeed): what is sharded over the processes. 0 nothing, 1 the optimizer state, 2 also the
    gradients, 3 also the weights."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Offload from the GPU to main memory: the `optimizer` state (zero_stage 1 to 3), or `all`, the weights too
    (zero_stage 3). Slower, for models that do not fit otherwise."""
    activation_checkpointing: Literal["off", "selective", "full"] = "off"
    """Activations that are recomputed in the backward pass to save memory: none, those of the feed-forward half of each
    layer (`selective`: keeps less than half), or all (`full`: keeps only each layer's input, a third more compute)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether torch.compile compiles each layer, which takes half a minute at the first start; with zero_stage 3 or
    tensor_parallel_size above 1, only single functions between the layers' communication. `auto` is on for a GPU."""
    deepspeed_template: Text = "auto"
    """JSON file with further DeepSpeed settings; `auto` is original_codes/ds_config_gpt_TEMPLATE.json."""

    @rule("nodes", "min_nodes")
    def _fewer_nodes_are_fewer(self) -> Iterator[Fault]:
        if self.nodes != "auto" and self.min_nodes != "auto" and self.min_nodes > self.nodes:
            yield self.fault("min_nodes", f"must be at most nodes = {self.nodes}", f"try {self.nodes}, or auto")

    @property
    def micro_batch(self) -> int:
        """`micro_batch_size`, after `auto` has been resolved by the plan of the run."""
        assert self.micro_batch_size != "auto", "micro_batch_size: auto was not resolved"
        return self.micro_batch_size


class MonitoringSettings(Settings):
    """Monitoring and checkpoints (steps 3 and 7)."""

    log_interval: PositiveWhole = 10
    """Steps between lines in the log and in metrics.jsonl."""
    eval_interval: PositiveWhole = 100
    """Steps between validations; there is always one at the last step."""
    eval_tokens: PositiveWhole | Literal["all"] = "all"
    """Validation tokens used each time: the first documents of each source, in proportion."""
    sample_prompts: Words = ()
    """Prompts that the model continues at each validation, into samples.md in the run folder."""
    sample_tokens: PositiveWhole = 64
    """Most tokens to generate per prompt; each takes a forward pass over all prompts."""
    save_interval: PositiveWhole = 100
    """Steps between checkpoints; there is always one at the last step."""
    keep_last: PositiveWhole = 2
    """Newest checkpoints to keep."""
    keep_every: NaturalWhole = 0
    """Also keep every checkpoint whose step is a multiple of this; 0 for none."""
    keep_best: bool = True
    """Also keep the checkpoint with the lowest validation loss."""
    max_skipped_steps: NaturalWhole = 3
    """Consecutive steps that may be skipped because of a non-finite loss or gradient, or a loss spike; one more stops
    the run."""
    spike_sigmas: NaturalNumber = 0.0
    """Skip a step with a loss spike: a loss this many standard deviations above that of recent steps; 0 for never."""
    plots: bool = True
    """Plot the curves into plots/*.png in the run folder, at each validation and at the end."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder (view them with: tensorboard --logdir <output_model_dir>)."""
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


class EngineSettings(MonitoringSettings, MachineSettings, OptimizationSettings):
    """Optimization, machine and monitoring: what pretraining and fine-tuning share."""

    @rule("global_batch_size", "micro_batch_size", "num_processes", "nodes", "tensor_parallel_size")
    def _micro_divides_global(self) -> Iterator[Fault]:
        processes = self.tensor_parallel_size if self.num_processes == "auto" else self.num_processes
        yield from self.batch_faults(processes * (1 if self.nodes == "auto" else self.nodes))

    @rule("offload", "zero_stage")
    def _offload_needs_zero(self) -> Iterator[Fault]:
        least = {"none": 0, "optimizer": 1, "all": 3}[self.offload]
        if self.zero_stage < least:
            rule_text = f"needs zero_stage {least} or more; it is {self.zero_stage}"
            yield self.fault("offload", rule_text, f"set zero_stage: {least}, or offload: none")

    @rule("optimizer", "zero_stage", "tensor_parallel_size", "offload")
    def _some_optimizers_need_whole_matrices(self) -> Iterator[Fault]:
        if self.optimizer in ("adamw", "auto"):
            return
        needs = f"with optimizer: {self.optimizer}, which needs whole matrices"
        if self.zero_stage > 1:
            rule_text = f"must be 0 or 1 {needs}: at 2 and 3 DeepSpeed partitions them anywhere"
            yield self.fault("zero_stage", rule_text, "set zero_stage: 1, or optimizer: adamw")
        if self.tensor_parallel_size > 1:
            rule_text = f"must be 1 {needs}: tensor parallelism splits them"
            yield self.fault("tensor_parallel_size", rule_text, "set tensor_parallel_size: 1, or optimizer: adamw")
        if self.offload != "none":
            rule_text = f"must be none {needs}: DeepSpeed's offload moves partitions of them"
            yield self.fault("offload", rule_text, "set offload: none and zero_stage: 1, or optimizer: adamw")

    def batch_faults(self, num_processes: int) -> Iterator[Fault]:
        """The fault, if any, of splitting a global batch over `num_processes` in whole micro batches."""
        if num_processes % self.tensor_parallel_size:
            rule_text = f"must divide the number of processes, {num_processes}"
            yield self.fault("tensor_parallel_size", rule_text, "lower it, or change num_processes")
            return
        ranks = num_processes // self.tensor_parallel_size
        if self.global_batch_size == "auto":
            return  # it is known once the tokens are counted
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


class TrainingSettings(EngineSettings, DataOrderSettings, StartSettings):
    """All settings of step 3 but those of the data and the model."""
