"""Step 3: train a model (`3_train_node1.sh`).

Called by a person, it checks everything, shows the plan, and starts itself again through the DeepSpeed launcher, once
for each process; called by the launcher, it trains. The same command, without --redo, resumes a run that was
cut short.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zerokara import checkpoint, manifest
from zerokara.config import PretrainConfig
from zerokara.errors import RunError, Stopped
from zerokara.progress import count_text, opening, seconds_text, summary
from zerokara.steps import command, next_command, outputs
from zerokara.training import preflight, resume_proof
from zerokara.training.planning import (
    limits,
    memory_forecast,
    preparation,
    processors,
    run_folder,
    run_lock,
    setting_names,
)
from zerokara.training.planning.consumption import check_epochs, table_lines, warnings
from zerokara.training.planning.memory_forecast import MachineMemory
from zerokara.training.planning.micro_batch import MicroBatchChoice, first_choice
from zerokara.training.processes import launcher

DEFAULT_CONFIG = "config.yaml"
MODULE = "zerokara.steps.train"


_EVALUATE_HELP = "validate a checkpoint and stop: a folder, its name or step, best, or if none is given the newest"
_REDO_HELP = "begin again; a run that lies there is set aside under another name, which is said, and never deleted"


def main(argv: Sequence[str]) -> int:
    """Entry point of the step."""
    doc = __doc__ or ""
    if launcher.is_training_process():
        return command.run(_train, argv, PretrainConfig, DEFAULT_CONFIG, doc, evaluate=_EVALUATE_HELP, is_part=True)
    return command.run(
        lambda config, options: _launch(config, options, argv),
        argv,
        PretrainConfig,
        DEFAULT_CONFIG,
        doc,
        verify_resume="prove in 2·N steps (3 if N is not given) that this run would resume exactly, and stop",
        evaluate=_EVALUATE_HELP,
        redo=_REDO_HELP,
    )


def _launch(config: PretrainConfig, options: command.Options, argv: Sequence[str]) -> None:
    processors.check(config)
    # The data is looked at before torch is: the number of processes matters only to how a batch is shared.
    first_look = preparation.prepare(config, 1 if config.num_processes == "auto" else config.num_processes)
    record_path = first_look.run_dir / "manifest.json"
    outputs.check(outputs.of_run(config), unless=record_path)
    if options.verify_resume:
        if config.init_from:
            _check_start(first_look)
        plan, *_ = _on_this_machine(config, options)
        _check_memory(plan)
        resume_proof.prove(plan, options.verify_resume)
        return
    if options.evaluate is not None:
        _evaluate(first_look, options, argv)
        return
    run_lock.check_free(config)
    run_dir = first_look.run_dir
    changes = [] if options.redo else run_folder.check(first_look)
    goes_on = not options.redo and _is_longer_than(first_look, record_path)
    if not options.redo and not goes_on and manifest.already_done(record_path, _work(first_look)):
        print(f"step 3 train: {run_dir} is complete already; --redo sets it aside and trains again")
        print(f"next: {_next(config, options)}")
        return
    outputs.check(outputs.of_run(config))
    if not options.redo:
        limits.check(config, first_look.checkpoint_bytes, _trained_seconds(run_dir), _next(config, options))
    aside = run_folder.check_redo(first_look) if options.redo else []
    preparation.check_disk(first_look, anew=options.redo)
    check_epochs(config, first_look.consumption)
    with contextlib.nullcontext() if options.dry_run else run_lock.held(config):
        _start_run(first_look, options, argv, changes, aside)


def _start_run(
    first_look: preparation.Preparation,
    options: command.Options,
    argv: Sequence[str],
    changes: list[str],
    aside: list[str],
) -> None:
    """Show the plan and train, or with ``--dry-run`` try; here torch is loaded."""
    config, run_dir = first_look.given, first_look.run_dir
    if config.init_from and (options.redo or not checkpoint.all_steps(run_dir)):
        _check_start(first_look)
    plan, available, found = _on_this_machine(config, options)
    _check_memory(plan)
    opening(f"step 3 train: {config.output_prefix}_text_document → {run_dir}")
    for name, value in [
        *launcher.device_rows(plan.num_processes),
        *preparation.plan_rows(plan),
        *preflight.rows(plan, available),
    ]:
        print(f"  {name:<12}  {value}")
    for line in [*table_lines(plan.consumption), *warnings(config, plan.consumption), *aside]:
        print(f"  {line}")
    for change in [*changes, *found]:
        print(f"  changed since this run's last start: {change}")
    if options.dry_run:
        _try(plan, argv)
        print("dry run: everything is in order; nothing was written")
        return
    forecast = plan.memory_forecast(available)
    before = None if options.redo else MicroBatchChoice.read(run_dir)
    is_new_choice = config.micro_batch_size == "auto" and not (before and before.holds_for(forecast))
    if is_new_choice and available.device == "cuda":
        plan = _try(plan, argv)
    if options.redo:
        run_folder.set_aside(run_dir)  # the last thing before the start: whatever is refused above has cost nothing
    # From here on there is a new run: with --redo once more, it would be set aside itself.
    options = replace(options, again=next_command.again(argv, without=("--redo",)))
    run_folder.claim(plan)
    if is_new_choice:
        MicroBatchChoice.of(forecast, plan.config.micro_batch).write(run_dir)
    try:
        _train_to_the_end(first_look, plan, options, argv)
    except Stopped:
        raise
    except KeyboardInterrupt:
        raise Stopped(f"to resume: {options.again}") from None


def _train_to_the_end(
    first_look: preparation.Preparation, plan: preparation.Preparation, options: command.Options, argv: Sequence[str]
) -> None:
    config, run_dir = first_look.given, first_look.run_dir
    print(
        f"starting {plan.num_processes} process(es); loading torch, megatron-core and DeepSpeed takes seconds",
        flush=True,
    )
    if code := _start(plan, argv):
        from_where = f" from the newest checkpoint in {run_dir}" if checkpoint.all_steps(run_dir) else ""
        raise RunError(
            f"training ended with exit code {code}; the words above say why. To resume{from_where}: {options.again}"
        )
    newest = checkpoint.newest_complete(run_dir)
    if newest is None or checkpoint.read_state(newest).step < plan.schedule.num_steps:
        # A limit or the file STOP asked; whatever comes after this step must not go on.
        if limits.are_used_up(config, _trained_seconds(run_dir)):
            raise Stopped(f"max_hours is reached: {limits.remedy(_next(config, options))}")
        raise KeyboardInterrupt
    made = _finish(first_look, plan, newest, run_dir / "manifest.json")
    summary(f"trained {run_dir}", _rows(made, newest, run_dir), _next(config, options))


def _evaluate(first_look: preparation.Preparation, options: command.Options, argv: Sequence[str]) -> None:
    from zerokara.training import checkpoint_evaluation  # brings torch in

    run_folder.check(first_look)
    outputs.check(outputs.of_run(first_look.config))
    folder = checkpoint_evaluation.find(first_look, options.evaluate or "")
    plan = _on_this_machine(first_look.given, options)[0]
    tokens = count_text(plan.num_valid_tokens)
    opening(f"step 3 evaluate: {folder} on {tokens} tokens, {plan.num_processes} process(es)")
    for _, value in launcher.device_rows(plan.num_processes):
        print(f"  {value}")
    if code := _start(plan, argv, "--evaluate", str(folder)):
        raise RunError(f"the evaluation ended with exit code {code}; the words above say why")


def _check_start(first_look: preparation.Preparation) -> None:
    from zerokara.huggingface import from_hf  # brings torch in

    from_hf.check(first_look.config, first_look.shape, first_look.encoder)


def _on_this_machine(
    config: PretrainConfig, options: command.Options
) -> tuple[preparation.Preparation, MachineMemory, list[str]]:
    """The run with every `auto` resolved, the available memory, and a line for each choice that changed.

    From here on torch is loaded.
    """
    plan = preparation.prepare(config, launcher.num_processes(config), launcher.precision(config))
    available = MachineMemory.available(plan.num_processes, launcher.gpu_bytes())
    if config.micro_batch_size != "auto":
        return plan, available, []
    forecast = plan.memory_forecast(available)
    before = None if options.redo else MicroBatchChoice.read(plan.run_dir)
    if before and before.holds_for(forecast):
        return preparation.with_micro_batch(plan, before.micro_batch_size), available, []
    chosen = MicroBatchChoice.of(forecast, first_choice(forecast))
    changes = before.changes_to(chosen) if before else []
    return preparation.with_micro_batch(plan, chosen.micro_batch_size), available, changes


def _check_memory(plan: preparation.Preparation) -> None:
    installed = MachineMemory.installed(plan.num_processes, launcher.gpu_bytes())
    memory_forecast.check(plan.memory_forecast(installed), plan.given)


def _start(plan: preparation.Preparation, argv: Sequence[str], *further: str) -> int:
    """Run the training processes; gives their exit code, 0 or another."""
    arguments = [argument for argument in argv if argument not in ("--redo", "--dry-run")]
    arguments += ["--set", f"micro_batch_size={plan.config.micro_batch}", *further]
    code = launcher.launch(MODULE, arguments, plan.num_processes)
    if code == launcher.INTERRUPTED:
        raise KeyboardInterrupt
    return code


def _try(plan: preparation.Preparation, argv: Sequence[str]) -> preparation.Preparation:
    """Train a few steps that leave nothing behind; gives the run that passed, its micro batch halved where it was auto.

    Raises:
        RunError: they failed, or ran out of memory with a micro batch that the user chose or that is 1.
    """
    print(f"trying {preflight.TRIAL_STEPS} steps in {plan.num_processes} process(es)", flush=True)
    while code := _start(plan, argv, "--dry-run"):
        sizes = plan.memory_forecast(MachineMemory(None, 0)).layout.micro_batch_sizes
        smaller = [size for size in reversed(sizes) if size <= plan.config.micro_batch // 2]
        if code != launcher.OUT_OF_MEMORY or plan.given.micro_batch_size != "auto" or not smaller:
            raise RunError(f"the trial ended with exit code {code}; the words above say why. Nothing was written")
        print(f"micro_batch_size: auto: {plan.config.micro_batch} does not fit, trying {smaller[0]}", flush=True)
        plan = preparation.with_micro_batch(plan, smaller[0])
    return plan


def _is_longer_than(plan: preparation.Preparation, record_path: Path) -> bool:
    """Whether a complete run lies here that is to be made longer: it goes on, like one that was cut short."""
    return record_path.exists() and plan.schedule.num_steps > manifest.read(record_path).facts["steps"]


def _trained_seconds(run_dir: Path) -> float:
    """How long a run has been trained, as its newest checkpoint says."""
    steps = checkpoint.all_steps(run_dir)
    states = (checkpoint.folder_of(run_dir, step) / "state.json" for step in reversed(steps))
    newest = next((path.parent for path in states if path.exists()), None)
    return checkpoint.read_state(newest).seconds if newest else 0.0


def _next(config: PretrainConfig, options: command.Options) -> str:
    if config.traits.no_class:  # step 4 would refuse it
        return f"{options.again} --evaluate"
    run_dir = str(Path(config.output_model_dir))
    made = {"input_model_dir": run_dir, "output_tokenizer_and_model_dir": f"{run_dir}_hf"}
    return next_command.render(next_command.CONVERT, options, DEFAULT_CONFIG, config, made)


def _finish(
    first_look: preparation.Preparation, plan: preparation.Preparation, newest: Path, record_path: Path
) -> manifest.Manifest:
    state = checkpoint.read_state(newest)
    facts: dict[str, Any] = {
        **state.facts,
        "steps": state.step,
        "tokens": state.tokens,
        "epochs": state.samples / plan.schedule.samples_per_epoch,
        "parameters": plan.shape.num_parameters(padded=False),
        "checkpoint": newest.name,
        "num_processes": plan.num_processes,
        "precision": state.precision,
        "sources": [asdict(use) for use in plan.consumption.sources],
        "unigram_entropy": plan.unigram_entropy,
    }
    made = {"metrics": plan.run_dir / "metrics.jsonl", "checkpoint": newest / "manifest.json"}
    return manifest.finish(record_path, _work(first_look), made, facts, state.seconds)


def _rows(made: manifest.Manifest, newest: Path, run_dir: Path) -> list[tuple[str, str]]:
    facts, seconds = made.facts, made.seconds
    rows = [
        ("trained", f"{count_text(facts['tokens'])} tokens, {facts['epochs']:.3f} epochs, {facts['steps']:,} steps"),
        ("time", f"{seconds_text(seconds)}, {count_text(facts['tokens'] / seconds)} tok/s in all"),
        ("loss", f"{facts['first_loss']:.3f} → {facts['loss']:.3f} nats a token"),
        ("baseline", preparation.baseline_text(facts["unigram_entropy"])),
    ]
    if "valid_bits_per_byte" in facts:
        before, after = facts["first_valid_bits_per_byte"], facts["valid_bits_per_byte"]
        best, step = facts["best_valid_bits_per_byte"], facts["best_valid_step"]
        rows.append(("validation", f"{before:.3f} → {after:.3f} bits per byte, the best {best:.3f} at step {step:,}"))
    rows.append(("checkpoint", str(newest)))
    found = (("plots", run_dir / "plots" / "overview.png"), ("samples", run_dir / "samples.md"))
    return [*rows, *((name, str(path)) for name, path in found if path.exists())]


def _work(plan: preparation.Preparation) -> manifest.Work:
    config = plan.config
    placed = {"output_model_dir", "input_jsonl", "input_tokenizer_file", "output_prefix", "deepspeed_template"}
    watching = {"num_workers", "log_interval", "tensorboard", "wandb", "wandb_project", "keep_last", "keep_every"}
    # What these come to stands in the run's identity.
    watching |= {"plots", "sample_prompts", "sample_tokens", "max_hours", "max_hours_per_start"}
    watching |= {"source_weights", "stages", "max_epochs_per_source", "intra_document_masking"}
    settings = config.model_dump(mode="json", exclude=placed | watching)
    return manifest.Work(
        step="3_train",
        settings={**settings, **run_folder.identity_of(plan), "steps": plan.schedule.num_steps},
        inputs={"tokenizer": Path(config.input_tokenizer_file)},
        key_of=setting_names.key_of,
    )


def _train(config: PretrainConfig, options: command.Options) -> None:
    plan = preparation.prepare(config, int(os.environ["WORLD_SIZE"]), launcher.precision(config))
    if options.dry_run:
        preflight.trial(plan)
        return
    if options.evaluate is not None:
        from zerokara.training import checkpoint_evaluation

        checkpoint_evaluation.evaluate(plan, Path(options.evaluate))
        return
    from zerokara.training import out_of_memory
    from zerokara.training.compute import devices
    from zerokara.training.session import Session

    with out_of_memory.explained(plan, devices.local_device(int(os.environ["LOCAL_RANK"]))):
        Session(plan).run()


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    gc.freeze()  # or Python looks once more through all that torch's modules hold before it leaves: a second and a half
    sys.exit(exit_code)
