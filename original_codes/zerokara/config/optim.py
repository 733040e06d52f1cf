"""Length and learning rate of a run, and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from zerokara.config.settings import (
    Auto,
    NaturalFloat,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    Text,
    resolved,
)
from zerokara.errors import Fault

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
    """Upper limit on the optimizer steps: a longer run ends here, at min_lr; `auto` is no limit."""
    max_hours: PositiveFloat | Auto = "auto"
    """Upper limit on the hours of training, over all starts of the run; it then saves and stops, wherever its learning
    rate is. With a higher limit the same command resumes it."""
    max_hours_per_start: PositiveFloat | Auto = "auto"
    """Upper limit on the hours from one start of the command until it has saved and stopped, for machines with a time
    limit (Slurm's --time); the same command resumes the run."""
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
    """Warm-up: share of the steps, in which the learning rate rises to lr. `auto` is what the optimizer needs."""
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
                yield self.fault(
                    "decay_fraction", rule, f"try at most {room:g}", ["warmup_fraction", "lr_schedule", "warmup_steps"]
                )


class OptimSettings(Settings):
    """The optimizer (steps 3 and 7)."""

    optimizer: OptimizerName | Auto = "auto"
    """`adamw`; `adafactor` (as T5: hardly any optimizer memory, update size relative to the weights: try lr 0.01); or
    `muon` for the matrices of the layers with AdamW for the rest (one lr serves both). The latter two need offload none
    and tensor_parallel_size 1. `auto` is `muon` for decoders without experts wherever it can run, and `adamw`
    otherwise."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW: decay rate of the first moment."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """AdamW: decay rate of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW: epsilon of the denominator."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] | Auto = "auto"
    """Muon: momentum. `auto` is the lower, the higher lr is: 0.88 to 0.95."""
    weight_decay: NaturalFloat | Auto = "auto"
    """Weight decay, decoupled: multiplied by the learning rate (for adafactor by the relative one; T5 has 0). Not
    applied to norms and biases. `auto` follows lr and the length of the run."""
    relative_attention_lr_multiplier: PositiveFloat | Auto = "auto"
    """t5: learning rate of the relative position bias, as a multiple of lr. The bias starts near 0.01 and attends to
    neighbours only at values of several units, so it must learn faster. `auto` is 30, with adafactor 1 as in T5."""
    router_aux_loss_coef: NaturalFloat = 0.01
    """Experts: coefficient of the auxiliary load-balancing loss (Switch Transformer), computed per sequence."""
    router_z_loss_coef: NaturalFloat = 0.001
    """Experts: coefficient of the router z-loss, which keeps the router's logits small (ST-MoE)."""
    expert_capacity_factor: NaturalFloat = 0.0
    """Experts: capacity factor in training, the tokens of a sequence (in fine-tuning, of an example) that one expert
    accepts as a multiple of an even share, e.g. 1.25; tokens beyond it are dropped. 0 is no limit. Validation and the
    exported model have no limit."""
    gradient_clipping: NaturalFloat = 1.0
    """Maximum norm of the gradient; 0 for no clipping."""
    seed: NaturalInt = 1234
    """Seed of the initial weights and of the order of the data."""

    @property
    def optimizer_name(self) -> OptimizerName:
        """`optimizer` of a planned run."""
        return resolved(self.optimizer)
