"""Step 3: train a model with DeepSpeed and megatron-core, resuming from the newest checkpoint.

In: the .bin/.idx files of step 2 and a configuration. Out: a run folder with checkpoints, metrics and plots.
It checks everything, plans the run once, and starts the training processes, which get the plan as a file.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from zerokara.base.errors import UserError
from zerokara.config.pretrain_config import RunConfig
from zerokara.steps import command, preflight
from zerokara.training import launching, resume_proof
from zerokara.training.nodes.machines import Machines
from zerokara.training.planning import plan_table, run_folder, run_plan

HELP = {
    "redo": "start over; an existing run is never deleted, but renamed, and its new name is printed",
    "verbose": "show the whole plan: why each `auto` is what it is, the memory by part, the data; plan.json has it too",
    "verify_resume": "prove in 2·N steps (3 if N is not given) that this run resumes as if never stopped, and end",
    "join": "join the run of the machine that waits at this address; that machine printed the whole command",
    "host": "this machine's address for the others, where `nodes` is above 1; by default that of its default route",
    "evaluate": "validate a checkpoint and stop: a folder, its name or step, best, or if none is given the newest",
}


def step(config: RunConfig, options: command.Options, task: run_plan.RunTask = run_plan.PRETRAINING) -> None:
    """Look at the run folder, plan, check, show the plan, and train; a dry run tries a few steps.

    With other options: evaluate a checkpoint, or prove that the run would resume.
    """
    # A second --redo would set the new run aside itself.
    options = replace(options, resume_command=command.resume_command(options.argv, without=("--redo",)))
    trains = not options.verify_resume and options.evaluate is None
    machines = Machines()
    if trains:
        machines = Machines.of(config, options.join, options.host, command.resume_command(options.argv))
    with contextlib.ExitStack() as stack:
        if not (options.dry_run or machines.is_first):
            stack.enter_context(_reported_to_first(machines))
        preflight.check(config, preflight.of_run(config))
        if trains and machines.is_first:  # another machine may share the first one's folder, which is locked there
            stack.enter_context(run_folder.command_lock(config))
        earlier = run_folder.read_earlier(config)
        initial = earlier.initial_settings if earlier and not options.redo else None
        plan = run_plan.make_plan(config, initial_settings=initial, nodes=machines.number, task=task)
        if options.evaluate is not None:
            launching.evaluate(plan, earlier, options.evaluate)
            return
        commands = launching.Commands(options.resume_command, next_command(config, options))
        start = launching.check_start(plan, earlier if trains else None, options.redo, commands)
        if options.verify_resume:
            resume_proof.prove(start.plan, options.verify_resume)
            return
        if start.is_finished:
            print(f"{task.title}: {plan.run_dir} is complete already; --redo sets it aside and trains again")
            print(f"next: {commands.convert}")
            return
        plan_table.show(start.plan, start.notes, options.verbose)
        if options.dry_run:
            launching.try_run(start.plan, machines)
        else:
            launching.train(start, machines, commands, sets_aside=options.redo and earlier is not None)


@contextlib.contextmanager
def _reported_to_first(machines: Machines) -> Iterator[None]:
    """Tell the first machine, too, why this one does not start."""
    try:
        yield
    except UserError as error:
        from zerokara.training.nodes import rendezvous  # it imports torch

        rendezvous.report_faults(machines, error.faults)
        raise


def next_command(config: RunConfig, options: command.Options) -> str:
    """The command that comes after this step."""
    if config.traits.no_class:  # step 4 would refuse it
        return f"{options.resume_command} --evaluate"
    run_dir = str(Path(config.output_model_dir))
    made = {"input_model_dir": run_dir, "output_tokenizer_and_model_dir": f"{run_dir}_hf"}
    return command.next_command("4_convert_to_HF.sh", options, config, made)


main = partial(command.run, "3_train_node1.sh", step, __doc__, **HELP)
