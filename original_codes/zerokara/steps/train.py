"""Step 3: train a model (`3_train_node1.sh`).

Called by a person, it checks everything, shows the plan, and starts itself again through the DeepSpeed launcher, once
for each process; called by the launcher, it trains. The same command goes on with a run that was cut short.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerokara import checkpoint, manifest
from zerokara.config import PretrainConfig
from zerokara.errors import RunError
from zerokara.progress import count_text, opening, seconds_text, summary
from zerokara.steps import command
from zerokara.training import launcher, preparation, run_folder
from zerokara.training.consumption import check_epochs, table_lines

DEFAULT_CONFIG = "config.yaml"
MODULE = "zerokara.steps.train"


def main(argv: Sequence[str]) -> int:
    """Entry point of the step."""
    if launcher.is_training_process():
        return command.run(_train, argv, PretrainConfig, DEFAULT_CONFIG, __doc__ or "")
    return command.run(
        lambda config, options: _launch(config, options, argv), argv, PretrainConfig, DEFAULT_CONFIG, __doc__ or ""
    )


def _launch(config: PretrainConfig, options: command.Options, argv: Sequence[str]) -> None:
    # The data is looked at before torch is: the number of processes matters only to how a batch is shared.
    first_look = preparation.prepare(config, 1 if config.num_processes == "auto" else config.num_processes)
    run_dir, record_path = first_look.run_dir, first_look.run_dir / "manifest.json"
    changes = run_folder.check_replaceable(first_look) if options.redo else run_folder.check(first_look)
    goes_on = not options.redo and _is_longer_than(first_look, record_path)
    if not options.redo and not goes_on and manifest.already_done(record_path, _work(first_look)):
        print(f"step 3 train: {run_dir} is complete already; --redo trains again")
        print(f"next: bash 4_convert_to_HF.sh{_next(options)}")
        return
    preparation.check_disk(first_look)
    check_epochs(config, first_look.consumption)
    plan = preparation.prepare(config, launcher.num_processes(config), launcher.precision(config))
    opening(f"step 3 train: {config.output_prefix}_text_document → {run_dir}")
    for name, value in preparation.plan_rows(plan):
        print(f"  {name:<12}  {value}")
    for line in table_lines(plan.consumption):
        print(f"  {line}")
    for change in changes:
        print(f"  changed since this run's last start: {change}")
    if options.dry_run:
        print("dry run: everything is in order; nothing was started")
        return
    if options.redo:
        run_folder.clear(run_dir)  # the last thing before the start: whatever is refused above has cost nothing
    run_folder.claim(plan)
    print(
        f"starting {plan.num_processes} process(es); loading torch, megatron-core and DeepSpeed takes seconds",
        flush=True,
    )
    arguments = [argument for argument in argv if argument != "--redo"]
    code = launcher.launch(MODULE, arguments, plan.num_processes)
    if code == launcher.INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise RunError(
            f"training ended with exit code {code}; the words above say why. Run the same command to go on from the "
            f"newest checkpoint in {run_dir}"
        )
    newest = checkpoint.newest_complete(run_dir)
    if newest is None or checkpoint.read_state(newest).step < plan.schedule.num_steps:
        return
    made = _finish(first_look, plan, newest, record_path)
    summary(f"trained {run_dir}", _rows(made, newest, run_dir), f"bash 4_convert_to_HF.sh{_next(options)}")


def _is_longer_than(plan: preparation.Preparation, record_path: Path) -> bool:
    """Whether a complete run lies here that is to be made longer: it goes on, like one that was cut short."""
    return record_path.exists() and plan.schedule.num_steps > manifest.read(record_path).facts["steps"]


def _next(options: command.Options) -> str:
    return options.for_next("config.yaml", "convert_config.yaml")


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
    outputs = {"metrics": plan.run_dir / "metrics.jsonl", "checkpoint": newest / "manifest.json"}
    return manifest.finish(record_path, _work(first_look), outputs, facts, state.seconds)


def _rows(made: manifest.Manifest, newest: Path, run_dir: Path) -> list[tuple[str, str]]:
    facts, seconds = made.facts, made.seconds
    rows = [
        ("trained", f"{count_text(facts['tokens'])} tokens, {facts['epochs']:.3f} epochs, {facts['steps']:,} steps"),
        ("time", f"{seconds_text(seconds)}, {count_text(facts['tokens'] / seconds)} tok/s in all"),
        ("loss", f"{facts['first_loss']:.3f} → {facts['loss']:.3f} nats a token"),
        (
            "unigram",
            f"{facts['unigram_entropy']:.3f} nats a token, the loss of knowing only how frequent each token is",
        ),
    ]
    if "valid_bits_per_byte" in facts:
        before, after = facts["first_valid_bits_per_byte"], facts["valid_bits_per_byte"]
        rows.append(("validation", f"{before:.3f} → {after:.3f} bits per byte"))
    return [*rows, ("checkpoint", str(newest)), ("curve", str(run_dir / "plots" / "loss.png"))]


def _work(plan: preparation.Preparation) -> manifest.Work:
    config = plan.config
    placed = {"output_model_dir", "input_jsonl", "input_tokenizer_file", "output_prefix", "deepspeed_template"}
    watching = {"num_workers", "log_interval", "tensorboard", "wandb", "wandb_project", "keep_last", "keep_every"}
    # What these come to stands in the run's identity.
    watching |= {"source_weights", "stages", "max_epochs_per_source", "isolate_documents"}
    settings = config.model_dump(mode="json", exclude=placed | watching)
    return manifest.Work(
        step="3_train",
        settings={**settings, **run_folder.identity_of(plan), "steps": plan.schedule.num_steps},
        inputs={"tokenizer": Path(config.input_tokenizer_file)},
    )


def _train(config: PretrainConfig, options: command.Options) -> None:
    from zerokara.training.session import Session

    plan = preparation.prepare(config, int(os.environ["WORLD_SIZE"]), launcher.precision(config))
    Session(plan).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
