"""What a plan says to its user, as rows of name and value: short on the screen, in full in plan.json."""

import shlex
from collections.abc import Iterator, Sequence

from zerokara.base import resources
from zerokara.base.durable import beside
from zerokara.base.progress import bytes_text, count_text, log, plural
from zerokara.config.settings import resolved
from zerokara.training.compute import engine_choice
from zerokara.training.planning import recipe
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.planning.schedule import stage_title, table_lines


def rows(plan: RunPlan, in_full: bool = False) -> Iterator[tuple[str, str]]:
    """Yield what the run will do and what it needs, by name, with notes on what may not be meant."""
    config, shape, course, lengths = plan.resolved, plan.shape, plan.schedule, plan.data.objective.lengths
    engine, *advice = engine_choice.plan_lines(config, plan.data_parallel_size, plan.template)
    yield "device", plan.devices.text(plan.processes_per_node)
    samples = f"sequences of {lengths.input} tokens"
    if lengths.num_noise_tokens:
        samples = f"samples of {lengths.raw} tokens with {lengths.num_spans} masked spans: encoder input "
        samples += f"{lengths.input} tokens, decoder target {lengths.target} tokens"
    yield "model", f"{config.architecture}, {shape.size_text}, {samples}"
    if config.teachers:
        size, slower = plan.memory.teachers, recipe.TEACHER_SHARE * plan.memory.teachers / shape.num_parameters()
        text = f"{plural(len(config.teachers), 'model')} of {count_text(size)} parameters together, weight"
        yield "teachers", f"{text} {config.teacher_weight:g}; a step takes about {1 + slower:.1f} times as long"
    training, train, valid = plan.data.training, len(plan.data.ids), plan.data.num_valid_tokens
    order = f"{len(training.stages)} stages" if training.stages[1:] else f"{training.kind} order"
    if len(training.stages) == 1:
        order = f"mixed: {stage_title(training, 0)}"
    order += ", intra-document masking" if config.intra_document_masking else ""
    yield "data", f"{count_text(train)} training tokens, {count_text(valid)} validation tokens, {order}"
    yield from plan.data.plan_rows
    yield "length", course.text
    tried = recipe.MAX_EPOCHS if config.packs_examples else recipe.TRIED_EPOCHS
    often = f"the recipe was tried with at most {tried:g} (docs/recipe.md), so watch the validation"
    for use in plan.consumption.sources:
        if round(use.epochs, 1) > tried:
            yield "", f"warning: {use.name} is read {use.epochs:.1f} times; {often}"
    end = "" if config.lr_schedule == "constant" else f" to {resolved(config.min_lr):g}"
    rate = f"learning rate {resolved(config.lr):g}{end}, {config.lr_schedule}"
    yield "learning", f"{config.optimizer}, {rate}; weight decay {resolved(config.weight_decay):g}"
    chosen = [f"{key} {getattr(config, key):g}" for key in recipe.OF_EXAMPLES if key in plan.reasons]
    if config.packs_examples and chosen:
        yield "", f"{', '.join(chosen)}: by the number and length of the answers, and the model's size (docs/recipe.md)"
    processes = f"{plan.num_processes}" + (f" on {plan.nodes} machines" if plan.nodes > 1 else "")
    micro_steps = config.global_batch // (config.micro_batch * plan.data_parallel_size)
    batch = f"micro batch {config.micro_batch}, {micro_steps} gradient accumulation step{'s' * (micro_steps > 1)}"
    has_zero = engine_choice.uses_deepspeed(config, plan.data_parallel_size)
    zero = f"ZeRO stage {config.stage}" if has_zero else "without ZeRO"
    compiled = ", compiled" if config.compile == "on" else ""
    yield "processes", f"{processes}, {zero}, {config.precision}{compiled}, {batch}"
    yield from plan.memory.rows()
    standing, each = plan.max_checkpoints, plan.checkpoint_bytes
    checkpoints = f"{bytes_text(each)}; {standing} at once at most, {bytes_text(standing * each)} in all"
    yield "checkpoint", f"{checkpoints}; {bytes_text(resources.free_bytes(plan.run_dir))} are free"
    if aside := beside(plan.run_dir.resolve()):
        remove = shlex.join(["rm", "-r", *map(str, aside)])
        yield "", f"{plural(len(aside), 'run')} that --redo set aside may go: {remove}"
    yield from (("note", note) for note in (*advice, *plan.devices.notes(config)))
    if in_full:
        yield from (("recipe", f"{key} {getattr(config, key)}: {reason}") for key, reason in plan.reasons.items())
        yield "engine", engine
        yield from ((pool.name, f"of each process: {pool.parts_text}") for pool in plan.memory.pools)
        head = plan.data.ids[:24].tolist()
        yield "data begins", f"{' '.join(map(str, head[:8]))} … = {plan.encoder.decode(head)!r}"


def show(plan: RunPlan, notes: Sequence[str], verbose: bool) -> None:
    """Print a plan, where `verbose` in full, and below it the notes on its start."""
    log(f"{plan.task.title}: {plan.data.training.prefix} → {plan.run_dir}")
    for name, value in rows(plan, verbose):
        print(f"  {name:<12}  {value}")
    is_mixed = plan.consumption.stages or plan.consumption.sources[1:]
    table = table_lines(plan.data.training, plan.schedule, plan.consumption) if is_mixed or verbose else ()
    for line in [*table, *notes]:
        print(f"  {line}")
