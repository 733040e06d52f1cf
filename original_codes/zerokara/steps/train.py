"""Step 3: train a model with DeepSpeed and megatron-core, resuming from the newest checkpoint.

In: the .bin/.idx files of step 2 and a configuration. Out: a run folder with checkpoints, metrics and plots.
It checks everything, plans the run once, and starts the training processes, which get the plan as a file.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from zerokara.config.pretrain_config import RunConfig
from zerokara.errors import UserError
from zerokara.progress import summary
from zerokara.steps import command, preflight
from zerokara.training import launching, resume_proof
from zerokara.training.nodes.machines import HOST, JOIN, Machines, without_values
from zerokara.training.planning import recipe, run_folder, run_lock, run_plan
from zerokara.training.planning.run_plan import PRETRAINING, RunPlan, Task
from zerokara.training.spawning import Commands

HELP = {
    "redo": "start over; a run that lies there is set aside under another name, which is printed, and never deleted",
    "verify_resume": "prove in 2·N steps (3 if N is not given) that this run would resume exactly, and stop",
    "join": "train with the machine that waits there: the line that it has printed",
    "host": "this machine's address for the others, where `nodes` is above 1; by default that of its default route",
    "evaluate": "validate a checkpoint and stop: a folder, its name or step, best, or if none is given the newest",
}


def train(config: RunConfig, options: command.Options, task: Task = PRETRAINING) -> None:
    """Plan the run, once, and launch it."""
    trains = not options.verify_resume and options.evaluate is None
    here = without_values(options.argv, (JOIN, HOST))
    machines = Machines.of(config, options.join, options.host, command.again(here)) if trains else Machines.lone()
    # A second --redo would set the new run aside itself.
    options = replace(options, again=command.again(options.argv, without=("--redo",)))
    try:
        preflight.check(config, preflight.of_run(config))
        num_processes = 1 if config.num_processes == "auto" else config.num_processes
        kept = None if options.redo or not recipe.left_to_rules(config) else run_folder.kept_settings(config)
        plan = run_plan.make_plan(config, num_processes * machines.number, kept=kept, nodes=machines.number, task=task)
        launch(plan, Commands(task.title, options.again, _next(config, options)), options, machines)
    except UserError as error:
        if not options.dry_run:
            machines.report_faults(error.faults)
        raise


def launch(plan: RunPlan, commands: Commands, options: command.Options, machines: Machines) -> None:
    """Do with a plan what the options ask for: train, in processes that get it as a file, and record the run."""
    if options.verify_resume:
        launching.check_init_from(plan)
        local = launching.on_this_machine(plan)
        launching.check_memory(local)
        resume_proof.prove(local.plan, options.verify_resume)
        return
    if options.evaluate is not None:
        launching.evaluate(plan, commands, options.evaluate)
        return
    if machines.is_first:  # where another machine shares the first one's folder, that command is at work there
        run_lock.check_free(plan.requested)
    changes = [] if options.redo else run_folder.check_same_run(plan)
    if not options.redo and run_folder.is_complete(plan):
        print(f"{commands.title}: {plan.run_dir} is complete already; --redo sets it aside and trains again")
        print(f"next: {commands.convert}")
        return
    trained = launching.train(plan, commands, machines, options.redo, options.dry_run, changes)
    if trained is None:
        print("dry run: everything is in order; nothing was written in the run folder")
    elif not machines.is_first:
        print(f"trained; the first machine, {machines.endpoint}, writes the record of the run")
    else:
        plan, newest = trained
        of_task = plan.task.finish(plan, commands, newest)
        rows = run_folder.summary_rows(run_folder.record(plan, newest), newest, plan.run_dir, of_task)
        summary(f"trained {plan.run_dir}", rows, commands.convert)


def _next(config: RunConfig, options: command.Options) -> str:
    """The command that comes after this step."""
    if config.traits.no_class:  # step 4 would refuse it
        return f"{options.again} --evaluate"
    run_dir = str(Path(config.output_model_dir))
    made = {"input_model_dir": run_dir, "output_tokenizer_and_model_dir": f"{run_dir}_hf"}
    return command.next_command("4_convert_to_HF.sh", options, config, made)


main = partial(command.run, "3_train_node1.sh", train, __doc__, **HELP)
