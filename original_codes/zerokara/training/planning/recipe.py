"""The recipe of a run: values for `auto` in the settings that a newcomer cannot know.

Each rule is a function of the model and of the data, never of the machine, so that any number of processes learns the
same. The user's own values stand, and later rules use them. A run keeps the values of its first start (`kept`): made
longer, or resumed by a later version, it continues with the same numbers. Without torch. docs/recipe.md#the-rules has
the table of the rules, the meaning of the letters, the source of each, and the runs behind them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from zerokara.base.errors import UserError
from zerokara.config.pretrain_config import TrainingSettings
from zerokara.config.settings import resolved
from zerokara.model.shapes import ModelShape

VERSION = 9
"""Raised when a rule changes, or its use in the small runs of `forecast`, so that results of both are kept apart."""
TRIED_EPOCHS = 16
"""Most epochs of one text in the runs behind the rules (docs/recipe.md)."""
REPEATED_SHARE, REPEATED_WEIGHTS, REPEATED_STEPS, MAX_REPEATED_DECAY = 12, 2.6, 60, 3.0
"""On repeated text a weight is averaged over the share REPEATED_SHARE / epochs² of the run. If the layers have more
than REPEATED_WEIGHTS weights for each token of the text, the share falls with the root of their number, but not below
REPEATED_STEPS steps. MAX_REPEATED_DECAY is the largest weight decay that was good in such a run: a short run, of few
steps an epoch, would forget within some steps."""
MIN_BATCH = 8
"""Sequences: smaller ones leave a processor idle."""
MAX_ADAMW_LR = 4e-3
"""StepLaw was fitted from 215M parameters on; below some 10M it asks for rates at which AdamW is no longer stable."""
MUON_LR, MUON_WIDTH, MUON_EXPONENT = 7.2e-3, 128, 0.75
MUON_STEPS, MAX_LR_FACTOR = 200, 1.8
"""The rate holds if a weight is averaged over at least `MUON_STEPS` steps. Below that it is multiplied by the square
root of MUON_STEPS / steps, at most by `MAX_LR_FACTOR`."""
TEACHER_SHARE = 0.4
"""Share of a step that a teacher of the same size takes, with its probabilities; 0.38 was measured of 1M on a CPU."""
LR_OVER_ONE_MINUS_MOMENTUM, MIN_MOMENTUM, MAX_MOMENTUM = 0.038, 0.88, 0.95
"""lr / (1 - momentum): how far a weight moves, in units of an update, while a gradient counts in Muon's momentum."""

_ORDER = (
    "optimizer", "lr_schedule", "min_lr", "global_batch_size", "epochs", "lr", "muon_momentum", "warmup_steps",
    "weight_decay",
)  # fmt: skip
"""Settings of the recipe, in the order in which they depend on each other."""
RULES = tuple(key for key in _ORDER if key != "epochs")
"""Those of a pretraining, whose epochs are a number."""
OF_EXAMPLES = ("global_batch_size", "epochs", "lr")
"""Those with rules of their own in a fine-tuning."""
MIN_STEPS, MAX_EPOCHS = 100, 40
SHORT_ANSWER = 8
"""Learned tokens of an example: a longer answer that is no label is a text, and few texts are soon known by heart."""
MIN_FINETUNE_LR = 1e-4
"""The lowest rate that was best in the runs with few texts."""
Examples = tuple[int, int, int, bool]
"""Training examples, their learned tokens, the sequences that hold them, and whether the answers are labels."""
_Config = TypeVar("_Config", bound=TrainingSettings)


def resolve(
    requested: _Config,
    shape: ModelShape,
    num_samples: Callable[[_Config], float],
    kept: Mapping[str, Any] | None = None,
    examples: Examples | None = None,
    samples_per_epoch: float = math.inf,
) -> tuple[_Config, dict[str, str]]:
    """Replace each `auto` of the recipe in a run, of a fine-tuning by its `examples`; return the reasons, too.

    `num_samples` counts the sequences of a run with these settings, `samples_per_epoch` are those of its text;
    `kept` are those of this run's first start.

    Raises:
        UserError: a value that the user wrote does not go with one of the rules.
    """
    config, reasons = requested, dict[str, str]()
    for key in left_to_rules(requested):
        if key == "muon_momentum" and config.optimizer != "muon":
            continue  # a rule chose another optimizer, which does not read it
        if examples and key in OF_EXAMPLES:
            value, reason = _rule_for_examples(key, config, shape, examples)
        else:
            value, reason = _rule(key, config, shape, num_samples, samples_per_epoch)
        # Another optimizer has rates of its own.
        if kept and kept[key] != "auto" and config.optimizer in ("auto", kept["optimizer"]):
            now = "" if kept[key] == value else f"; the rule would now give {value}"
            value, reason = kept[key], f"as the run began{now}"
        config = config.model_copy(update={key: value})
        reasons[key] = reason
    if resolved(config.min_lr) > resolved(config.lr):
        rule = f"must be at most lr, for which auto is {resolved(config.lr):g}"
        raise UserError(requested.fault("min_lr", rule, "set it to auto", ["lr"]))
    return config, reasons


def _rule_for_examples(key: str, config: TrainingSettings, shape: ModelShape, examples: Examples) -> tuple[Any, str]:
    """Return the value of a setting, and the reason; those before it are resolved."""
    count, learned, rows, are_labels = examples
    if key == "global_batch_size":
        wanted = 12 * (count / 200) ** 0.3
        size = min(rows, max(1, 2 ** round(math.log2(wanted * rows / count))))
        return size, f"about {wanted:.0f} of {count:,} examples a step"
    is_short = are_labels or learned <= SHORT_ANSWER * count
    if key == "epochs":
        most, until = (5, 2_000) if is_short else (10, 20_000)
        epochs = min(most, max(2, most * (until / count) ** 0.4))
        epochs = min(MAX_EPOCHS, max(epochs, MIN_STEPS * config.global_batch / rows))
        return float(f"{epochs:.2g}"), f"2 to {most}, fewer for more examples, in at least {MIN_STEPS} steps"
    if config.optimizer == "adafactor":
        return 1e-3, "relative to the weights, as T5"
    of_texts = min(4e-3, max(MIN_FINETUNE_LR, 6e-4 * (learned / 6e4) ** 0.9))
    value = min(1e-3, 5e-4 * (count / 200) ** 0.15) if is_short else of_texts
    value *= min(1.0, 1e6 / shape.num_parameters()) ** 0.5
    answers = "labels or short answers" if is_short else f"{learned:,} learned tokens"
    return _rounded(value), f"for {answers}, and the model's size"


def left_to_rules(requested: TrainingSettings) -> list[str]:
    """Return the settings that are `auto`, but for those that nothing reads: the warm-up of a run that has it as a
    fraction, the epochs of one that has its tokens, the momentum of Muon where another optimizer is requested."""
    unread = {"warmup_steps"} if requested.warmup_fraction != "auto" else set()
    if requested.optimizer not in ("auto", "muon"):
        unread.add("muon_momentum")
    if requested.train_tokens != "auto":
        unread.add("epochs")
    return [key for key in _ORDER if getattr(requested, key) == "auto" and key not in unread]


def batch_tokens(num_tokens: float) -> float:
    """Return B of a run of D tokens, before it is rounded to sequences."""
    return 0.58 * num_tokens**0.571


def _rule(
    key: str,
    config: _Config,
    shape: ModelShape,
    num_samples: Callable[[_Config], float],
    samples_per_epoch: float,
) -> tuple[Any, str]:
    """Return the value of a setting, and the reason; those before it in `_ORDER` are resolved."""
    if key == "optimizer":
        if shape.traits.is_encoder_decoder or shape.moe_layers:
            return "adamw", f"Muon is not known to help architecture {shape.architecture}"
        refused = {fault.key for fault in config.model_copy(update={"optimizer": "muon"}).rule_faults()}
        for layout in ("tensor_parallel_size", "offload"):
            if layout in refused:
                return "adamw", f"Muon needs whole matrices, and {layout} is {getattr(config, layout)}"
        return "muon", "learns more from a token than AdamW"
    if key == "lr_schedule":
        return "linear", "falls linearly over the whole run"
    if key == "min_lr":
        return 0.0, "the last steps average over the noise of the others"
    samples = num_samples(config)
    if key == "global_batch_size":
        tokens = batch_tokens(samples * shape.raw_len)
        size = max(MIN_BATCH, 2 ** round(math.log2(tokens / shape.raw_len)))
        reason = f"{size * shape.raw_len:,} tokens a step: a power of two sequences, at least {MIN_BATCH}, for the "
        return size, f"{reason}{tokens:,.0f} tokens by the rule, which grow with the run"

    optimizer, batch = config.optimizer, config.global_batch
    max_steps = math.inf if config.max_steps == "auto" else config.max_steps
    num_steps = int(min(max_steps, max(1, round(samples / batch))))  # T, as `schedule` counts
    tokens = min(samples, max_steps * batch) * shape.raw_len  # D
    in_layers = sum(math.prod(size) for name, size in shape.parameter_shapes().items() if ".layers." in name)  # N
    fresh = min(1.0, 1.084 * (tokens / in_layers) ** -0.527)
    # Text that is read again and again is learned by heart, unless weights forget: within an epoch at 12 epochs.
    epochs = max(1.0, num_steps * batch / samples_per_epoch)
    repeated = REPEATED_SHARE / epochs**2
    if key == "lr":
        value, reason = 0.01, "relative to the weights, as T5"  # adafactor
        if optimizer == "muon":
            steps = min(fresh, repeated) * num_steps
            faster = 1.0 if config.init_from else min(MAX_LR_FACTOR, max(1.0, math.sqrt(MUON_STEPS / steps)))
            value = MUON_LR * (MUON_WIDTH / shape.hidden_size) ** MUON_EXPONENT * faster
            reason = "falls with the hidden size for Muon"
            reason += f"; {faster:.1f} times that, as a weight is averaged over {steps:.0f} steps" if faster > 1 else ""
        elif optimizer == "adamw":
            value = min(MAX_ADAMW_LR, 1.79 * in_layers**-0.713 * tokens**0.307)
            reason = f"by parameters and tokens for AdamW, at most {MAX_ADAMW_LR:g}"
        return _rounded(value), reason
    if key == "muon_momentum":
        value = min(MAX_MOMENTUM, max(MIN_MOMENTUM, round(1 - resolved(config.lr) / LR_OVER_ONE_MINUS_MOMENTUM, 2)))
        return value, "lower for larger steps, so that a gradient counts for fewer of them"
    if key == "warmup_steps":
        least, why = (10, "Muon") if optimizer == "muon" else (100, "AdamW's second moments")
        steps = min(max(least, round(0.02 * num_steps)), num_steps // 5)
        return steps, f"2 % of the steps, at least {least} for {why}, at most a fifth"
    assert key == "weight_decay", key
    if optimizer == "adafactor":
        return 0.0, "as T5"
    larger = max(REPEATED_STEPS / num_steps, repeated * math.sqrt(REPEATED_WEIGHTS * tokens / epochs / in_layers))
    repeated = min(repeated, larger)
    most, share = (MAX_REPEATED_DECAY, repeated) if repeated < fresh else (1.0, fresh)
    value = 1 / (resolved(config.lr) * num_steps * share)
    bound = f"at most {most:g}, for " if value > most else ""
    return _rounded(min(most, value)), f"{bound}a weight is averaged over {share:.0%} of the run"


def _rounded(value: float) -> float:
    """Round to two digits: the third means nothing."""
    return float(f"{value:.2g}")
