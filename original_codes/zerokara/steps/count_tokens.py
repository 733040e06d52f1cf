"""Tokens and documents of the token files that step 2 wrote, and the length of the run in tokens, steps and epochs."""

from __future__ import annotations

from functools import partial

from zerokara import manifest
from zerokara.config.data import SampleLengths
from zerokara.config.optim import ScheduleSettings
from zerokara.config.pretrain_config import PretrainConfig, TrainingSettings
from zerokara.config.writing import write_values
from zerokara.errors import UserError
from zerokara.model.shapes import ModelShape
from zerokara.progress import bytes_text, log, summary
from zerokara.samples.data_plan import DataPlan
from zerokara.steps import command
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.count import SplitCount, count
from zerokara.tokens.layout import TokenPaths, bin_path
from zerokara.training.planning import consumption, recipe, run_folder
from zerokara.training.planning.schedule import Schedule

WRITE_HELP = "write the tokens of `epochs` epochs into the configuration file as train_tokens, keeping its comments"


def count_tokens(config: PretrainConfig, options: command.Options) -> None:
    """Print the table, and set `train_tokens` in the configuration file when asked."""
    counts, lengths, paths = count(config.output_prefix), config.lengths, TokenPaths(config.output_prefix)
    samples = lengths.samples_in(counts.train.tokens)
    if samples == 0:
        rule = f"is longer than the whole training text, which has {counts.train.tokens:,} tokens"
        raise UserError(config.fault("seq_len", rule, f"set it below {counts.train.tokens:,}, or use more text"))
    config = _with_recipe(config)
    if config.is_mixture:
        schedule, mixture = _mixture(config)
        train_tokens = schedule.num_tokens
    else:
        schedule, mixture = Schedule.from_config(config, lengths.raw, samples), []
        train_tokens = round(config.epochs * samples * lengths.raw)
    rows = [("train", _split_text(counts.train, lengths)), ("valid", _split_text(counts.valid, lengths))]
    rows += _source_rows(paths)
    rows.append(("train_tokens", _length_text(config, train_tokens, samples * lengths.raw)))
    rows.append(("run", _run_text(config, schedule)))
    if options.write:
        if not options.dry_run:
            write_values(options.config_path, {"train_tokens": train_tokens})
        action = "dry run: would write" if options.dry_run else "written:"
        rows.append(("config", f"{action} train_tokens: {train_tokens} into {options.config_path}"))
    following = command.next_command(command.TRAIN, options, config)
    summary(f"{bin_path(paths.train)}", rows, None if mixture else following)
    if mixture:
        log("\n".join(["", *mixture, f"next: {following}"]))


def _with_recipe(config: PretrainConfig) -> PretrainConfig:
    """The settings with those that the recipe has for this run."""
    if not recipe.is_needed(config):
        return config
    shape = ModelShape.from_config(config, Encoder(config.input_tokenizer_file).vocab_size)
    plan = DataPlan.from_config(config, config, config.lengths, config.seed)
    situation = consumption.situation_of(config, shape, plan)
    return recipe.resolve(config, situation, run_folder.kept_settings(config))[0]


def _mixture(config: PretrainConfig) -> tuple[Schedule, list[str]]:
    """The schedule of a run that mixes sources, and the table of what it takes of each."""
    plan = DataPlan.from_config(config, config, config.lengths, config.seed)
    schedule = consumption.schedule_of(config, plan)
    table = consumption.consumption(plan, schedule)
    consumption.check_epochs(config, table)
    return schedule, [*consumption.table_lines(table), *consumption.warnings(config, schedule, table)]


def _source_rows(paths: TokenPaths) -> list[tuple[str, str]]:
    """The training documents of each source, where there are several and step 2 has finished."""
    if not paths.manifest.exists():
        return []
    sources = manifest.read(paths.manifest).facts.get("sources", [])
    named = [(f"  {source['entry']}", source["train"]) for source in sources if sources[1:]]
    return [(name, f"{split['documents']:,} documents, {split['tokens']:,} training tokens") for name, split in named]


def _length_text(config: TrainingSettings, train_tokens: int, epoch_tokens: int) -> str:
    if config.train_tokens != "auto":
        return f"{config.train_tokens:,} tokens: {config.train_tokens / epoch_tokens:.3f} epochs of {epoch_tokens:,}"
    epochs = "as in the table below" if config.is_mixture else f"{config.epochs:g} epochs of {epoch_tokens:,}"
    return f"auto: {train_tokens:,} tokens, {epochs}"


def _run_text(config: ScheduleSettings, schedule: Schedule) -> str:
    limit = ", which max_steps sets" if schedule.num_steps == config.max_steps else ""
    return (
        f"{schedule.num_steps:,} steps{limit}, of {schedule.batch_tokens:,} tokens each: {schedule.num_tokens:,} "
        f"tokens, {schedule.epochs_at(schedule.num_steps):.3f} epochs"
    )


def _split_text(split: SplitCount | None, lengths: SampleLengths) -> str:
    if split is None:
        return "none (valid_fraction is 0)"
    return (
        f"{split.documents:,} documents, {split.tokens:,} tokens ({split.mean_tokens:.1f} per document with its end, "
        f"{bytes_text(split.bytes)}), {lengths.samples_in(split.tokens):,} sequences of {lengths.raw}"
    )


main = partial(command.run, command.COUNT_TOKENS, count_tokens, __doc__, write=WRITE_HELP)
"""Command line of the step; takes its arguments, gives the exit code."""
