"""Step 0: a table of model sizes for this corpus on this machine, and the size to take, before anything is spent.

In: the token files of step 2 and the hours (or the tokens) that there are. A minute of real steps measures the machine.
Out: tokens, steps, memory and hours of each size; with --fit also its expected bits per byte, from small models that
are trained on this corpus, and a plot. With `init_from` the sizes are that model's, and only written down.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

from zerokara.config.architectures import SIZES
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.writing import overrides, value_text, write_values
from zerokara.errors import Fault, RunError, UserError
from zerokara.forecast import fit
from zerokara.forecast.sizes import Budget, candidate, recommended, table
from zerokara.forecast.speed import LEFT_TO_RECIPE, Planner, size_settings
from zerokara.model.shapes import ModelShape
from zerokara.progress import count_text, log, seconds_text, summary
from zerokara.steps import command
from zerokara.tokenizer.hugging_face import open_encoder
from zerokara.tokens.indexed import IndexedTokens, open_splits

HELP = {
    "hours": "hours of training that there are",
    "tokens": "tokens to train on, whatever time that takes",
    "fit": "train small models for some minutes (10 if none are given), and predict the bits per byte of each size",
    "write": "write the recommended size, its tokens and the recipe, or the sizes of init_from's model, into the "
    "configuration file, keeping its comments",
}


def plan(config: PretrainConfig, options: command.Options) -> None:
    """Measure, print the table, and write the choice when asked."""
    if config.init_from:
        _take_over(config, options)
        return
    if options.hours is None and options.tokens is None:
        raise UserError(Fault("--hours", "must be given, or --tokens", remedy="e.g. --hours 8"))
    splits = open_splits(config.output_prefix)
    num_tokens = len(splits[0].tokens)
    vocab_size = open_encoder(config.input_tokenizer_file, config.end_of_document).vocab_size
    planner = Planner(options.config_path, tuple(options.overrides))
    log(f"plan: {num_tokens:,} training tokens in {config.output_prefix}")
    speed = planner.measure_speed()
    folder = Path(f"{config.output_prefix}_plan")
    runs = _small_runs(config, options, planner, vocab_size, splits, folder)
    law = fit.fit(runs) if runs else None
    limits = options.hours or math.inf, options.tokens or math.inf
    budget = Budget(*limits, num_tokens, config.max_epochs_per_source)
    candidates = []
    for name in SIZES:
        shape = ModelShape.from_config(planner.config(**size_settings(name)), vocab_size)
        candidates.append(candidate(name, shape, planner.memory(name), speed, budget, law))
    chosen = recommended(candidates)
    if chosen is None:
        raise RunError("no size fits into the memory of this machine")
    shown = {
        each: planner.num_steps(each.name, each.tokens) for each in candidates if each.is_sensible or each is chosen
    }
    log("\n".join(table(shown, chosen)))
    if others := [each.name for each in candidates if each not in shown]:
        log(f"  not shown, too large for this memory or for so few tokens: {', '.join(others)}")
    if lines := list(planner.memory_by_length(chosen.name)):
        log("\n".join([f"{chosen.name} with longer sequences, to which a run can grow:", *lines]))
    tokens, plot_path = int(chosen.tokens), folder / "plan.png"
    rows = [("take", f"model_size: {chosen.name}, train_tokens: {tokens:,} ({chosen.epochs:.2f} epochs)")]
    if law:
        fit.draw(plot_path, law, runs)
        rows += [("expect", f"{chosen.prediction} bits per byte of held-out text"), ("plot", str(plot_path))]
    else:
        offer = command.again([*options.argv, "--fit"], without=["--write"])
        offer = f"small models trained on this corpus for {command.FIT_MINUTES:g} minutes predict them: {offer}"
        least = fit.least_tokens(config.lengths.raw)
        if splits[1] is None or num_tokens < least:
            offer = f"to predict them takes {least:,} training tokens, and held-out documents"
        rows.append(("bits per byte", f"not known; {offer}"))
    values = {**LEFT_TO_RECIPE, **size_settings(chosen.name), "train_tokens": tokens}
    named = {"model_size", "train_tokens", *(key for key in values if getattr(config, key) != values[key])}
    if options.write:
        rows.append(("config", write_values(options.config_path, values, options.dry_run)))
        if not options.dry_run:
            named.clear()
    kept = [each for each in options.overrides if each.partition("=")[0].strip() not in values]
    advised = overrides({key: value for key, value in values.items() if key in named})
    options = replace(options, overrides=[*kept, *advised])
    summary("plan", rows, command.next_command("3_train_node1.sh", options, config))


def _take_over(config: PretrainConfig, options: command.Options) -> None:
    """Show the settings of the model that `init_from` names, and write them when asked."""
    from zerokara.huggingface import from_hf  # with it torch

    theirs = from_hf.settings_of(Path(config.init_from), config.fault)
    longest = theirs.pop("seq_len")
    values = {"model_size": "", **theirs, "seq_len": min(config.seq_len, longest)}
    rows = [(key, value_text(value)) for key, value in values.items() if getattr(config, key) != value]
    rows.append(("context", f"at most {longest:,} tokens; seq_len is what a run trains with"))
    following = command.next_command("2_tokenize.sh", options, config)
    if options.write:
        rows.append(("config", write_values(options.config_path, values, options.dry_run)))
    else:
        following = command.again([*options.argv, "--write"])
    summary(f"the model of {config.init_from}", rows, following)


def _small_runs(
    config: PretrainConfig,
    options: command.Options,
    planner: Planner,
    vocab_size: int,
    splits: tuple[IndexedTokens, IndexedTokens | None],
    folder: Path,
) -> list[fit.MeasuredRun]:
    """Train the small runs of --fit; returns those of earlier plans too, none where they are too few for a law."""
    small, (train, valid) = fit.SmallRuns(planner, folder), splits
    if options.fit is not None:
        if valid is None:
            rule = "needs held-out documents, and step 2 left none"
            raise UserError(Fault("--fit", rule, remedy="plan without it, or do step 2 with valid_fraction above 0"))
        shapes = [ModelShape.from_config(planner.config(**each), vocab_size) for each in fit.SHAPES]
        free = fit.slots(fit.NUM_RUNS, 0 if planner.device == "cpu" else planner.local_plan().num_processes)
        speed = small.measure_speed(free[0])
        wanted = len(valid.tokens) if config.eval_tokens == "all" else config.eval_tokens
        eval_tokens = min(wanted, len(valid.tokens), fit.MAX_EVAL_TOKENS)
        runs = fit.plan_runs(shapes, speed, options.fit, len(free), len(train.tokens), eval_tokens)
        if options.dry_run:
            for run in runs:
                size = f"{count_text(run.shape.num_parameters())} parameters on {count_text(run.tokens)} tokens"
                log(f"dry run: would train {size}, {seconds_text(run.seconds(speed))}")
            return []
        if options.redo:
            shutil.rmtree(small.folder, ignore_errors=True)
        small.train(runs, speed, free)
    results = small.results()
    return results if len(results) >= fit.NUM_RUNS else []


main = partial(command.run, "0_plan.py", plan, __doc__, **HELP)
