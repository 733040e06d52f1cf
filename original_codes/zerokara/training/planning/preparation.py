"""All that is known before training starts, worked out without torch: the data, the model's size, the schedule.

The same function serves the launching process, which shows the plan and finds every fault in under a second, and the
training processes, which follow it.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from zerokara import manifest
from zerokara.checkpoint import all_steps
from zerokara.config import PretrainConfig
from zerokara.errors import Fault, UserError
from zerokara.model.shapes import ModelShape
from zerokara.progress import bytes_text, count_text
from zerokara.samples.objective import Objective, objective
from zerokara.samples.reading_plan import ReadingPlan
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.count import check_belongs
from zerokara.tokens.entropy import entropy, token_counts
from zerokara.tokens.indexed import IndexedTokens
from zerokara.tokens.layout import TokenPaths
from zerokara.training.compute import optimizers
from zerokara.training.compute.deepspeed_settings import load_template
from zerokara.training.planning.consumption import Consumption, consumption, schedule_of, stage_title
from zerokara.training.planning.memory import TrainingLayout
from zerokara.training.planning.memory_forecast import MachineMemory, MemoryForecast
from zerokara.training.planning.schedule import Schedule


@dataclass(frozen=True)
class Preparation:
    """A run, ready to start."""

    config: PretrainConfig
    """The settings, every `auto` that depends on the machine replaced (micro_batch_size by `planning.micro_batch`)."""
    given: PretrainConfig
    """The settings as the user gave them."""
    shape: ModelShape
    schedule: Schedule
    num_processes: int
    template: dict[str, Any]
    """The user's DeepSpeed settings."""
    tokenizer_sha256: str
    data_sha256: str
    encoder: Encoder
    """The tokenizer."""
    objective: Objective
    """What the model reads and must predict."""
    reading: ReadingPlan
    """What is read, in which order."""
    num_train_tokens: int
    num_valid_tokens: int
    unigram_entropy: float
    """Nats a token of a model that knows only how often each token is predicted: the baseline of the training loss."""

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.config.output_model_dir)

    @property
    def token_paths(self) -> TokenPaths:
        """The token files."""
        return TokenPaths(self.config.output_prefix)

    @cached_property
    def consumption(self) -> Consumption:
        """What the run reads of each source."""
        return consumption(self.reading, self.schedule)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of one checkpoint on disk."""
        return optimizers.checkpoint_bytes(self.config.optimizer, self.shape)

    def memory_forecast(self, machine: MachineMemory) -> MemoryForecast:
        """The memory that this run needs, against the memory of a machine."""
        layout = TrainingLayout.from_config(self.config, self.shape, self.num_processes, machine.device, self.template)
        return MemoryForecast(layout, machine)


def prepare(given: PretrainConfig, num_processes: int, precision: Literal["bf16", "fp32"] | None = None) -> Preparation:
    """Look at the tokenizer, the token files and the run's size; `precision` replaces an `auto`, and `with_micro_batch`
    that of micro_batch_size, which needs to know the model's size.

    Raises:
        UserError: the token files are missing or were made with another tokenizer; the tokenizer lacks what is needed;
            the corpus is shorter than one sequence; the global batch cannot be shared among the processes; the
            DeepSpeed template is wrong; the weights or the stages do not fit the sources.
    """
    config = given.model_copy(update={"precision": precision}) if precision else given
    faults = list(config.batch_faults(num_processes))
    if faults:
        raise UserError(faults)
    template = load_template(template_path(config))
    encoder = Encoder(config.input_tokenizer_file)
    paths = TokenPaths(config.output_prefix)
    tokens = check_belongs(config.output_prefix, encoder.sha256)
    reading = ReadingPlan.from_config(config)
    samples = reading.tokens(where=config.place("seq_len"))
    made_objective = objective(config, encoder)
    shape = ModelShape.from_config(config, encoder.vocab_size)
    if shape.padded_vocab_size % config.tensor_parallel_size:
        rows = f"{shape.padded_vocab_size}, the {encoder.vocab_size} pieces of the tokenizer and their padding"
        raise UserError(config.fault("tensor_parallel_size", f"must divide {rows}", "try a power of two"))
    return Preparation(
        config=config,
        given=given,
        shape=shape,
        schedule=schedule_of(config, reading),
        num_processes=num_processes,
        template=template,
        tokenizer_sha256=encoder.sha256,
        data_sha256=_data_hash(tokens),
        encoder=encoder,
        objective=made_objective,
        reading=reading,
        num_train_tokens=samples.num_tokens,
        unigram_entropy=entropy(made_objective.target_counts(token_counts(IndexedTokens(paths.train)))),
        num_valid_tokens=len(IndexedTokens(paths.valid).tokens) if has_validation(paths) else 0,
    )


def with_micro_batch(preparation: Preparation, micro_batch: int) -> Preparation:
    """The same run with `micro_batch_size` resolved."""
    config = preparation.config.model_copy(update={"micro_batch_size": micro_batch})
    return replace(preparation, config=config)


def template_path(config: PretrainConfig) -> Path:
    """The DeepSpeed template, the project's own unless another is named."""
    if config.deepspeed_template != "auto":
        return Path(config.deepspeed_template)
    return Path(__file__).resolve().parents[3] / "ds_config_gpt_TEMPLATE.json"


def has_validation(paths: TokenPaths) -> bool:
    """Whether step 2 kept documents for validation."""
    return paths.valid.with_name(paths.valid.name + ".idx").exists()


def num_standing(preparation: Preparation, save_interval: int) -> int:
    """Checkpoints that lie on the disk at once, at most, where one is saved every `save_interval` steps."""
    config, num_steps = preparation.config, preparation.schedule.num_steps
    # One more than is kept: an old one is deleted only when the new one is whole.
    standing = config.keep_last + 1 + (1 if config.keep_best and preparation.num_valid_tokens else 0)
    if config.keep_every:
        standing += num_steps // math.lcm(config.keep_every, save_interval)
    return min(-(-num_steps // save_interval), standing)


def disk_text(preparation: Preparation) -> str:
    """How much room the checkpoints take and how much there is, for people."""
    standing = num_standing(preparation, preparation.config.save_interval)
    free = bytes_text(_free_bytes(preparation.run_dir))
    each, needed = preparation.checkpoint_bytes, standing * preparation.checkpoint_bytes
    return f"{bytes_text(each)}; {standing} at once at most, {bytes_text(needed)} in all; {free} are free"


def check_disk(preparation: Preparation, anew: bool = False) -> None:
    """See that the checkpoints that will stand at once fit on the disk, `anew` beside those that stand already.

    Raises:
        UserError: they do not; with the numbers and the settings that would.
    """
    config, run_dir, each = preparation.config, preparation.run_dir, preparation.checkpoint_bytes
    standing = num_standing(preparation, config.save_interval)
    existing = len(all_steps(run_dir)) if run_dir.exists() and not anew else 0
    needed = max(0, standing - existing) * each
    free = _free_bytes(run_dir)
    if needed > free:
        rule = (
            f"leaves no room for its checkpoints: {standing} of {bytes_text(each)} will stand "
            f"at once and need {bytes_text(needed)} more, {bytes_text(free)} are free"
        )
        remedy = f"make room, or choose another disk{_what_fits_on_disk(preparation, existing + free // each)}"
        raise UserError(config.fault("output_model_dir", rule, remedy))


def _what_fits_on_disk(preparation: Preparation, room: int) -> str:
    """The settings with which at most `room` checkpoints stand at once."""
    config, num_steps = preparation.config, preparation.schedule.num_steps
    found = []
    if room >= 1:
        # So few saves that all of them may stay; or, where every so many are kept, few enough of these.
        unit = config.keep_every or 1
        times = -(-num_steps // (unit * room))
        besides = config.keep_last + 1 + (1 if config.keep_best and preparation.num_valid_tokens else 0)
        if config.keep_every and room >= besides:
            times = min(times, num_steps // (unit * (room - besides + 1)) + 1)
        keeping = f" with keep_every: {unit * times}" if config.keep_every else ""
        found.append(f"save_interval: {unit * times} is the smallest that fits{keeping}")
    fixed = num_standing(preparation, config.save_interval) - config.keep_last
    if config.keep_last > 1 and room - fixed >= 1:
        found.append(f"keep_last: {room - fixed} fits")
    if config.keep_every:
        found.append("keep_every: 0 keeps the fewest")
    return "".join(f"; {words}" for words in found) or "; not even one checkpoint fits"


def _free_bytes(run_dir: Path) -> int:
    place = next(parent for parent in [run_dir.absolute(), *run_dir.absolute().parents] if parent.exists())
    return shutil.disk_usage(place).free


def plan_rows(preparation: Preparation) -> list[tuple[str, str]]:
    """What will be done, for people."""
    config, shape, schedule = preparation.config, preparation.shape, preparation.schedule
    rows = [
        (
            "model",
            f"{config.architecture}, {shape.size_text}, {_length_text(preparation)}",
        ),
        (
            "data",
            f"{count_text(preparation.num_train_tokens)} tokens to train on, "
            f"{count_text(preparation.num_valid_tokens)} to validate, {_order_text(preparation)}",
        ),
        (
            "length",
            f"{schedule.num_steps:,} steps × {config.global_batch_size} sequences = {count_text(schedule.num_tokens)} "
            f"tokens = {schedule.epochs_at(schedule.num_steps):.3f} epochs, {schedule.warmup_steps} steps of warm-up",
        ),
        (
            "processes",
            f"{preparation.num_processes}, ZeRO stage {config.zero_stage}, {config.precision}, micro batch "
            f"{config.micro_batch_size}",
        ),
        ("baseline", baseline_text(preparation.unigram_entropy)),
        ("a checkpoint", disk_text(preparation)),
    ]
    data_parallel_size = preparation.num_processes // config.tensor_parallel_size
    rows[4:4] = [("optimizer", line) for line in optimizers.plan_lines(config, shape)]
    if optimizers.by_whole_tensors(config, data_parallel_size) and config.deepspeed_template != "auto":
        rows.append(("note", f"deepspeed_template has no effect: {optimizers.WITHOUT_DEEPSPEED}"))
    return rows


def baseline_text(unigram_entropy: float) -> str:
    """The loss that a model must fall below to have learned anything of the text, for people."""
    return f"{unigram_entropy:.3f} nats a token, the unigram entropy: the loss of knowing only how frequent each is"


def _length_text(preparation: Preparation) -> str:
    lengths = preparation.objective.lengths
    if not lengths.num_noise_tokens:
        return f"{lengths.input} tokens long"
    gaps = f"{lengths.input} to read, with {lengths.num_spans} gaps, {lengths.target} to write"
    return f"samples of {lengths.raw} tokens: {gaps}"


def _order_text(preparation: Preparation) -> str:
    reading, isolated = preparation.reading, ", documents isolated" if preparation.config.intra_document_masking else ""
    if len(reading.stages) > 1:
        return f"{len(reading.stages)} stages{isolated}"
    return (f"mixed: {stage_title(reading, 0)}" if reading.stages else f"{reading.kind} order") + isolated


def _data_hash(tokens: manifest.Manifest) -> str:
    """One hash for the training documents, from the manifest of step 2 and so without reading gigabytes."""
    for records in tokens.outputs.values():
        for record in records:
            if record.path.endswith("_text_document.bin") and not record.path.endswith("_valid_text_document.bin"):
                return record.sha256
    raise UserError(
        Fault(where="the manifest of step 2", rule="names no training documents", remedy="run step 2 again with --redo")
    )
