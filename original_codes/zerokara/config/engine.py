"""Schedule, optimizer, machine and monitoring of a training, which steps 3 and 7 share, and the rules between them."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zerokara.base.errors import Fault
from zerokara.config.settings import (
    Auto,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Prompts,
    Settings,
    Text,
    resolved,
)

LearningRateSchedule = Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"]
OptimizerName = Literal["adamw", "adafactor", "muon"]


class ScheduleSettings(Settings):
    """The run: its folder, length and learning rate (steps 3 and 7)."""

    output_model_dir: Text = "models/embedded"
    """Run folder: checkpoints, metrics.jsonl, TensorBoard, plots."""
    train_tokens: PositiveInt | Auto = "auto"
    """Tokens to train on; `auto` is `epochs` times the training tokens."""
    epochs: PositiveFloat | Auto = 1.0
    """Epochs (passes over the training data) if train_tokens is auto; ignored otherwise."""
    max_steps: PositiveInt | Auto = "auto"
    """Maximum number of optimizer steps. A run that would be longer ends at this step, with its learning rate at
    min_lr. `auto` is no limit."""
    max_hours: PositiveFloat | Auto = "auto"
    """Maximum hours of training, over all starts of the run. The run then saves and stops, whatever its learning rate
    is by then. The same command with a higher limit resumes it."""
    global_batch_size: PositiveInt | Auto = "auto"
    """Sequences in one optimizer step, over all processes. `auto` grows with the tokens of the run."""
    lr: PositiveFloat | Auto = "auto"
    """Peak learning rate. `auto` follows the model's size and the tokens of the run."""
    min_lr: NaturalFloat | Auto = "auto"
    """Learning rate at the last step; `auto` is 0."""
    lr_schedule: LearningRateSchedule | Auto = "auto"
    """Decay of the learning rate from lr to min_lr after the warm-up: `cosine`, `linear`, `inverse_sqrt` (1/√step, as
    T5), `wsd` (constant, then linear over the last decay_fraction); or `constant`, no decay. `auto` is `linear`."""
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] | Auto = "auto"
    """Warm-up: share of the steps over which the learning rate rises to lr. `auto` depends on the optimizer."""
    warmup_steps: NaturalInt | Auto = "auto"
    """Warm-up as a number of steps; `auto` uses warmup_fraction."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Fraction of the steps, at the end, over which `wsd` decays from lr to min_lr."""

    @property
    def global_batch(self) -> int:
        """`global_batch_size` of a planned run."""
        return resolved(self.global_batch_size)

    def rules(self) -> Iterator[Fault]:
        if self.lr != "auto" and self.min_lr != "auto" and self.min_lr > self.lr:
            yield self.fault("min_lr", f"must be at most lr = {self.lr:g}", f"try {self.lr / 10:g}", ["lr"])
        if self.lr_schedule == "wsd" and self.warmup_steps == "auto" and self.warmup_fraction != "auto":
            room = round(1 - self.warmup_fraction, 9)
            if self.decay_fraction > room:
                rule = f"must leave room for warmup_fraction = {self.warmup_fraction:g}: the two sum to at most 1"
                reads = ["warmup_fraction", "lr_schedule", "warmup_steps"]
                yield self.fault("decay_fraction", rule, f"try at most {room:g}", reads)


class OptimSettings(Settings):
    """The optimizer (steps 3 and 7)."""

    optimizer: OptimizerName | Auto = "auto"
    """`adamw`; `adafactor`, as T5 was trained (hardly any optimizer memory; its updates scale with the weights: try lr
    0.01); or `muon`, which updates the matrices of the layers, while AdamW updates the rest (one lr serves both).
    `adafactor` and `muon` need offload: none and tensor_parallel_size: 1. `auto` is `muon` for decoders without experts
    if it can run, otherwise `adamw`."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW: decay rate of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW: decay rate of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW: epsilon of the denominator."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] | Auto = "auto"
    """Muon: momentum. `auto` falls from 0.95 to 0.88 as lr rises."""
    weight_decay: NaturalFloat | Auto = "auto"
    """Decoupled weight decay: it is multiplied by the learning rate (for adafactor by its relative learning rate; T5
    has 0), and does not apply to norms and biases. `auto` follows lr and the length of the run."""
    relative_attention_lr_multiplier: PositiveFloat | Auto = "auto"
    """t5: learning rate of the relative position bias, as a multiple of lr. The bias starts near 0.01, and attention
    favours neighbours only once it reaches several units, so it must learn faster. `auto` is 30, with adafactor 1 as in
    T5."""
    router_aux_loss_coef: NaturalFloat = 0.01
    """Experts: coefficient of the auxiliary load-balancing loss (Switch Transformer), computed per sequence."""
    router_z_loss_coef: NaturalFloat = 0.001
    """Experts: coefficient of the router z-loss, which keeps the router's logits small (ST-MoE)."""
    expert_capacity_factor: NaturalFloat = 0.0
    """Experts: capacity factor in training. One expert accepts at most this multiple of an even share of the tokens of
    a sequence (in fine-tuning, of an example), e.g. 1.25; further tokens are dropped. 0 is no limit. Validation and the
    exported model have no limit."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout in training: share of the activations that are set to 0 after the embedding, attention and feed-forward
    layers. It is meant for text that is read many times, with a lower weight_decay."""
    gradient_clipping: NaturalFloat = 1.0
    """Maximum norm of the gradient; 0 for no clipping."""
    seed: NaturalInt = 1234
    """Seed of the initial weights and of the order of the data."""

    @property
    def optimizer_name(self) -> OptimizerName:
        """`optimizer` of a planned run."""
        return resolved(self.optimizer)


_MIN_ZERO_STAGE = {"none": 0, "optimizer": 1, "all": 3}
"""The lowest ZeRO stage at which `offload` can work."""


class MachineSettings(Settings):
    """The machine (steps 3 and 7): none of this changes what is learned."""

    num_processes: PositiveInt | Auto = "auto"
    """Training processes on each machine; `auto` is one per GPU (CUDA_VISIBLE_DEVICES applies), fewer if they do not
    divide an automatic batch; or on a CPU one per core if the batch can be divided among them and the memory suffices,
    otherwise fewer. The maximum is the number of GPUs, or of cores."""
    nodes: PositiveInt | Auto = "auto"
    """Machines (nodes) that train together, each with num_processes. The command on the first machine prints the
    command for the others. `auto` is 1, or in a Slurm step the number of its nodes."""
    min_nodes: PositiveInt | Auto = "auto"
    """Minimum number of machines. Once this many have arrived, the run waits 30 seconds for the others and starts; it
    continues as long as this many are left. `auto` is all of them."""
    max_restarts: NaturalInt = 3
    """Several machines: how many times the run restarts automatically after a killed process or a lost machine."""
    tensor_parallel_size: PositiveInt = 1
    """Tensor parallelism: processes of one node over which each layer is split, for models too large for one GPU."""
    micro_batch_size: PositiveInt | Auto = "auto"
    """Sequences that one process computes at a time; gradients are accumulated up to global_batch_size. `auto` is the
    largest that fits into the GPU's memory and divides the batch, or the fastest on a CPU; a run keeps it as long as it
    resumes with the same settings."""
    precision: Literal["auto", "bf16", "fp32", "fp8"] = "auto"
    """Number format of the computation: `bf16`, `fp32` or `fp8`. `auto` is bf16 if the hardware supports it, otherwise
    fp32. `fp8` is bf16 with float8 matrix products in attention and dense layers; it is faster from about 1B parameters
    on, on a GPU of Ada, Hopper or later. The optimizer always keeps fp32 master weights."""
    zero_stage: Annotated[NaturalInt, Field(le=3)] | Auto = "auto"
    """DeepSpeed's ZeRO stage. It shards over the processes: 1 the optimizer state, 2 also the gradients, 3 also the
    weights; 0 is taken as 1, which sends less. `auto` is 1, or 2 if a step has one micro batch; a higher stage if that
    does not fit."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Offload from the GPU to main memory: the `optimizer` state (zero_stage 1 to 3), or `all`, the weights too
    (zero_stage 3). Slower, for models that do not fit otherwise."""
    activation_checkpointing: Literal["off", "selective", "full"] = "off"
    """Activations that are recomputed in the backward pass to save memory: none (`off`), those of the feed-forward half
    of each layer (`selective`: keeps less than half), or all (`full`: keeps only each layer's input, a third more
    compute)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile each layer with torch.compile, which takes half a minute at the first start; with tensor_parallel_size
    above 1, it compiles only single functions. `auto` is on for a GPU, and for a long run in bf16 on a CPU with AMX."""
    cudnn_attention: bool = False
    """On a GPU from Hopper on, let cuDNN compute the attention of decoders in training: it can be faster, but some of
    its versions compute wrong gradients. Each start compares its gradients with those of plain operations, and refuses
    to train if they are wrong."""
    deepspeed_template: Text = "auto"
    """JSON file with further DeepSpeed settings; `auto` is original_codes/ds_config_gpt_TEMPLATE.json."""

    @property
    def micro_batch(self) -> int:
        """`micro_batch_size` of a planned run."""
        return resolved(self.micro_batch_size)

    @property
    def number_format(self) -> Literal["bf16", "fp32"]:
        """Number format of the weights and of the activations between matrix products, in a planned run."""
        return "fp32" if self.precision == "fp32" else "bf16"

    @property
    def stage(self) -> int:
        """The ZeRO stage; until `auto` is resolved, the lowest one that can work."""
        return max(1, _MIN_ZERO_STAGE[self.offload] if self.zero_stage == "auto" else self.zero_stage)

    def rules(self) -> Iterator[Fault]:
        if self.precision == "fp8" and self.tensor_parallel_size > 1:
            rule = "needs tensor_parallel_size 1: a process multiplies whole matrices in float8"
            yield self.fault("precision", rule, "set one of the two", ["tensor_parallel_size"])
        least = _MIN_ZERO_STAGE[self.offload]
        if self.zero_stage != "auto" and self.zero_stage < least:
            rule = f"needs zero_stage {least} or more; it is {self.zero_stage}"
            yield self.fault("offload", rule, f"set zero_stage: {least}, or offload: none", ["zero_stage"])


class MonitoringSettings(Settings):
    """Monitoring and checkpoints (steps 3 and 7)."""

    log_interval: PositiveInt = 10
    """Steps between lines in the log and in metrics.jsonl."""
    eval_interval: PositiveInt = 100
    """Steps between validations; there is always one at the last step."""
    eval_tokens: PositiveInt | Literal["all"] = 1_000_000
    """Tokens used in each validation, or `all`: the first documents of each source, in proportion to its size."""
    sample_prompts: Prompts = ()
    """Prompts that the model continues at each validation, written to samples.md in the run folder; [] for none. `auto`
    takes the beginnings of three held-out documents, for t5 with a masked span."""
    sample_tokens: PositiveInt = 64
    """Maximum number of tokens to generate per prompt; each takes a forward pass over all prompts."""
    save_interval: PositiveInt = 100
    """Steps between checkpoints; there is always one at the last step."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_every: NaturalInt = 0
    """Also keep checkpoints whose step is a multiple of this, which is a multiple of save_interval; 0 for none."""
    keep_best: bool = True
    """Also keep the checkpoint with the lowest validation loss."""
    max_skipped_steps: NaturalInt = 3
    """Consecutive steps that may be skipped (non-finite loss or gradient, loss spike); one more stops the run."""
    spike_sigmas: NaturalFloat = 0.0
    """Skip a step with a loss spike: a loss this many standard deviations above that of recent steps; 0 for never."""
    plots: bool = True
    """Plot the curves into plots/*.png in the run folder, at each validation and at the end."""
    tensorboard: bool = True
    """Write TensorBoard files into the run folder (view them with: tensorboard --logdir <output_model_dir>)."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: `off`, `offline` (files only), or `online` (needs WANDB_API_KEY in the environment)."""
    wandb_project: Text = "zerokara"
    """Name of the Weights & Biases project."""

    def rules(self) -> Iterator[Fault]:
        if self.keep_every % self.save_interval:
            nearest = max(1, round(self.keep_every / self.save_interval)) * self.save_interval
            rule = f"must be a multiple of save_interval = {self.save_interval}"
            yield self.fault("keep_every", rule, f"try {nearest}", ["save_interval"])


class EngineSettings(MonitoringSettings, MachineSettings, OptimSettings, ScheduleSettings):
    """Schedule, optimizer, machine and monitoring: what pretraining and fine-tuning share."""

    def rules(self) -> Iterator[Fault]:
        processes = self.tensor_parallel_size if self.num_processes == "auto" else self.num_processes
        yield from self.batch_faults(processes * (1 if self.nodes == "auto" else self.nodes))
        if self.optimizer not in ("adamw", "auto"):
            for key, allowed, otherwise in (
                ("tensor_parallel_size", 1, "tensor parallelism splits them"),
                ("offload", "none", "main memory would hold partitions of them"),
            ):
                if getattr(self, key) != allowed:
                    needs = f"with optimizer: {self.optimizer}, which needs whole matrices: {otherwise}"
                    remedy = f"set {key}: {allowed}, or optimizer: adamw"
                    yield self.fault(key, f"must be {allowed} {needs}", remedy, ["optimizer"])

    def batch_faults(self, num_processes: int) -> Iterator[Fault]:
        """Check that the global batch splits over `num_processes` in whole micro batches."""
        reads = ["global_batch_size", "micro_batch_size", "num_processes", "tensor_parallel_size", "nodes"]
        ranks, rest = divmod(num_processes, self.tensor_parallel_size)
        if rest:
            rule = f"must divide the number of processes, {num_processes}"
            yield self.fault("tensor_parallel_size", rule, "lower it, or num_processes", ["num_processes", "nodes"])
            return
        micro = 1 if self.micro_batch_size == "auto" else self.micro_batch_size
        # A batch of `auto` is known once the tokens are counted.
        step = micro * ranks
        if self.global_batch_size == "auto" or self.global_batch_size % step == 0:
            return
        what = "processes" if self.tensor_parallel_size == 1 else "(processes ÷ tensor_parallel_size)"
        lower = self.global_batch_size // step * step
        tries = " or ".join(str(size) for size in (lower, lower + step) if size)
        rule = f"must be a multiple of micro_batch_size × {what} = {micro} × {ranks} = {step}"
        remedy = f"try {tries}" + (", or a smaller micro_batch_size" if micro > 1 else "")
        yield self.fault("global_batch_size", rule, remedy, reads)
