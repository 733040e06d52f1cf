"""A table of model sizes for this corpus on this machine, and the size to choose, before a long run.

In: the token files of step 2 and the available hours (or tokens). A minute of real steps measures the machine. Out:
tokens, steps, memory and hours of each size; with --fit also its expected bits per byte, from small models that are
trained on this corpus, and a plot. With `init_from` it only writes down the sizes of that model.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

from zerokara.base.errors import Fault, RunError, UserError
from zerokara.base.progress import log, plural, seconds_text, summary
from zerokara.config.model import SIZES
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.writing import value_text, write_values
from zerokara.forecast import ensemble, fit, sizes
from zerokara.forecast.sizes import LEFT_TO_RECIPE, Candidate, Planner, Speed, size_settings
from zerokara.model.shapes import ModelShape
from zerokara.steps import command, train
from zerokara.tokenizer.hugging_face import encoder_of
from zerokara.tokens.indexed import open_splits
from zerokara.training.planning import run_plan

HELP = {
    "hours": "available hours of training",
    "tokens": "tokens to train on, whatever time that takes",
    "fit": "train small models for some minutes (10 if none are given), and predict the bits per byte of each size",
    "models": "plan K models that differ in their seed, and one that learns from all of them, in the hours together; "
    "--write writes a configuration for each beside the run folder, and a script that trains them",
    "write": "write the recommended size, its tokens and the recipe, or the sizes of init_from's model, into the "
    "configuration file, keeping its comments",
}


def plan(config: PretrainConfig, options: command.Options) -> None:
    """Measure, print the table, and write the choice when asked."""
    ensemble.check(options.models, config)
    if config.init_from:
        _take_over(config, options)
        return
    _check_length(config, options)
    trained_on, valid = open_splits(config.output_prefix)
    num_tokens = len(trained_on.tokens)
    vocab_size = encoder_of(config).vocab_size
    planner = Planner(options.config_path, tuple(options.overrides), options.models or 0)
    log(f"plan: {num_tokens:,} training tokens in {config.output_prefix}")
    for _, note in run_plan.length_notes(config.seq_len, trained_on):
        log(f"  note: {note}")
    small = fit.SmallRuns(planner, Path(f"{config.output_prefix}_plan"))
    training = planner.local_plan().data.training
    unique_tokens = training.tokens_of(1)
    free = fit.slots(fit.NUM_RUNS, 0 if planner.device == "cpu" else planner.local_plan().num_processes)
    num_valid = len(valid.tokens) if valid is not None else 0
    wanted = num_valid if config.eval_tokens == "all" else config.eval_tokens
    there = len(free), unique_tokens, min(wanted, num_valid, fit.MAX_EVAL_TOKENS)
    if options.fit is not None:  # what not even a machine without limits could do costs no minute here
        fit.plan_runs(small.shapes, Speed(0, 0), options.fit, *there)
    if options.dry_run:
        log(f"dry run: would measure a few steps of {' and '.join(sizes.MEASURED[planner.device])}, in about a minute")
        if options.fit is not None:
            log(f"dry run: would train {fit.NUM_RUNS} small models in {options.fit:g} minutes")
        if options.write:
            log(write_values(options.config_path, {**LEFT_TO_RECIPE, **size_settings("1M")}, is_dry_run=True))
        log("dry run: everything is in order; nothing was measured or written")
        return
    speed = planner.measure_speed()
    if options.fit is not None:
        if options.redo:
            shutil.rmtree(small.folder, ignore_errors=True)
        of_slot = small.measure_speed(free[0])
        planned = fit.plan_runs(small.shapes, of_slot, options.fit, *there)
        small.train(planned, of_slot, free)
    runs = small.results(there[-1])
    law = fit.fit(runs) if len(runs) >= fit.NUM_RUNS else None
    most_tokens = min(options.tokens or math.inf, training.tokens_of(config.max_epochs_per_source))
    limits = (options.hours or math.inf) / ensemble.relative_time(options.models or 0), most_tokens
    candidates = _candidates(planner, vocab_size, speed, law.predict if law else None, limits, unique_tokens)
    chosen = sizes.recommended(candidates)
    if chosen is None:
        raise RunError("no size fits into the memory of this machine")
    shown = [size for size in candidates if size.is_sensible or size is chosen]
    log("\n".join(sizes.table(shown, chosen)))
    if others := [size.name for size in candidates if size not in shown]:
        log(f"  not shown, too large for this memory or for so few tokens: {', '.join(others)}")
    tokens, plot_path = max(1, int(chosen.tokens)), small.plan_folder / "plan.png"
    read = f"{chosen.epochs:.2f} epochs{' of the source that is read most' if len(training.stages) == 1 else ''}"
    rows = [("take", f"model_size: {chosen.name}, train_tokens: {tokens:,} ({read})")]
    if law:
        fit.draw(plot_path, law, runs)
        rows += [("expect", f"{chosen.prediction} bits per byte of held-out text"), ("plot", str(plot_path))]
    else:
        offer = command.resume_command([*options.argv, "--fit"], without=["--write"])
        offer = f"small models trained on this corpus for {command.FIT_MINUTES:g} minutes predict them: {offer}"
        try:
            of_slot = Speed(*(len(free) * part for part in astuple(speed)))
            fit.plan_runs(small.shapes, of_slot, command.FIT_MINUTES, *there)
        except UserError as error:
            offer = str(error)
        rows.append(("bits per byte", f"not known; {offer}"))
    values = {**LEFT_TO_RECIPE, **size_settings(chosen.name), "train_tokens": tokens}
    stands = not options.models and all(getattr(config, key) == value for key, value in values.items())
    if options.write:
        rows.append(("config", write_values(options.config_path, values)))
    kept = list(options.overrides)
    if options.write:
        kept = [override for override in kept if override.partition("=")[0].strip() not in values]
    following = command.next_command("3_train_node1.sh", replace(options, overrides=kept), config)
    rows += [*_rows_of_several(options, config, chosen), *_warnings(config, chosen)]
    if options.models and options.write:
        following = f"bash {ensemble.write(options.config_path, kept, options.models, partial(_commands, options))}"
    # Numbers on a command line are soon forgotten, and the run would be another.
    summary("plan", rows, following if options.write or stands else command.resume_command([*options.argv, "--write"]))


def _candidates(planner: Planner, vocab_size: int, *given: Any) -> list[Candidate]:
    """Return the sizes that can have the settings of the configuration, with what `sizes.candidate` is `given`.

    Raises UserError if none can.
    """
    candidates, refused = list[Candidate](), list[UserError]()
    for name in SIZES:
        try:
            shape = ModelShape.from_config(planner.config(**size_settings(name)), vocab_size)
            candidates.append(sizes.candidate(name, shape, planner.outlook, *given))
        except UserError as error:
            refused.append(error)
    if not candidates:
        raise refused[0]
    return candidates


def _check_length(config: PretrainConfig, options: command.Options) -> None:
    """Raise UserError unless there is a limit for the plan, and the length of the run is left to it."""
    if options.hours is None and options.tokens is None:
        raise UserError(Fault("--hours", "must be given, or --tokens", remedy="e.g. --hours 8"))
    if options.hours and config.max_hours != "auto" and config.max_hours < options.hours:
        raise UserError(config.fault("max_hours", f"would stop a run of {options.hours:g} hours", "set it to auto"))
    if config.stages and config.stages[-1].num_tokens is not None:
        rule, remedy = "set the length of the run, which a plan chooses", "set `tokens: rest` in the last stage"
        raise UserError(config.fault("stages", rule, remedy))


def _rows_of_several(options: command.Options, config: PretrainConfig, chosen: Candidate) -> Iterator[tuple[str, str]]:
    """Yield what several models take together, where they are asked for, or one cannot use the hours."""
    number = options.models or ensemble.num_teachers_that_fit(options.hours or 0.0, chosen.hours)
    reads_little = chosen.epochs <= ensemble.MIN_EPOCHS
    if not options.models and (not number or reads_little or not ensemble.is_possible(config)):
        return
    seconds = seconds_text(3600 * chosen.hours * ensemble.relative_time(number))
    takes = f"{plural(number, 'model')} of other seeds and one that learns from them, about {seconds} together"
    if options.models:
        yield "models", takes
        if options.write:
            yield "files", f"{ensemble.folder_of(config, number)}: a configuration for each, and run.sh"
        if reads_little:
            yield "note", f"each reads the text {chosen.epochs:.2f} times: one that reads it more often learns more"
    else:
        offer = command.resume_command([*options.argv, "--models", str(number)])
        yield "or", f"{takes}: fewer bits per byte by a model of that size (docs/recipe.md#several-models): {offer}"


def _warnings(config: PretrainConfig, chosen: Candidate) -> Iterator[tuple[str, str]]:
    if config.nodes not in ("auto", 1):
        yield "warning", f"this is the time of one machine: the run is of {config.nodes}, and ends that much sooner"
    if config.max_hours != "auto" and chosen.hours > config.max_hours:
        yield "warning", f"max_hours = {config.max_hours:g} stops this run before its end: set it to auto"


def _commands(options: command.Options, path: Path, config: PretrainConfig) -> list[str]:
    """Return the commands that train a configuration in a file, and convert its model as the user's own says."""
    train_it = command.next_command("3_train_node1.sh", replace(options, config_path=path, overrides=()), config)
    return [train_it, train.next_command(config, options)]


def _take_over(config: PretrainConfig, options: command.Options) -> None:
    """Show the settings of the model that `init_from` names, and write them when asked."""
    from zerokara.huggingface import from_hf  # with it torch

    theirs = from_hf.settings_of(Path(config.init_from), config.fault)
    longest = theirs.pop("seq_len")
    values = {"model_size": "", **theirs, "seq_len": min(config.seq_len, longest)}
    rows = [(key, value_text(value)) for key, value in values.items() if getattr(config, key) != value]
    rows.append(("context", f"at most {longest:,} tokens, which an export keeps; seq_len is what a run trains with"))
    following = command.next_command("2_tokenize.sh", options, config)
    if options.write:
        rows.append(("config", write_values(options.config_path, values, options.dry_run)))
    else:
        following = command.resume_command([*options.argv, "--write"])
    summary(f"the model of {config.init_from}", rows, following)


main = partial(command.run, "plan.py", plan, __doc__, **HELP)
