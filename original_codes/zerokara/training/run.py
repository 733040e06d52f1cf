"""A plan, opened: the checkpoint to resume from → model → engine → state → compiled code → batches.

Training opens all of it, the trial of a dry run all but the checkpoint, the evaluation of a checkpoint only the model.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from zerokara import checkpoint
from zerokara.base.errors import RunError
from zerokara.base.progress import count_text
from zerokara.checkpoint import TrainingState
from zerokara.checkpoint.state import ComputedTensors
from zerokara.huggingface import families, from_hf
from zerokara.model import builder, compilation, initial_weights, layers, parallel
from zerokara.model.attention_check import check_attention
from zerokara.model.builder import Model
from zerokara.model.loss import Teachers
from zerokara.samples.batches import Batches, BatchLayout
from zerokara.samples.objective import Batch
from zerokara.training.compute import engine_choice, optimizer_rules
from zerokara.training.compute.engine import Engine, load_state
from zerokara.training.planning.earlier_run import INIT_FACT, TEACHERS_FACT, weights_id
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes import joining
from zerokara.training.processes.joining import Processes


@dataclass(frozen=True)
class StepBatches:
    """Batches of one process for one step."""

    micro_batches: list[list[Tensor]]
    """For each micro batch the model's arguments, with labels; in main memory, pinned where the device is a GPU."""
    num_tokens: float
    """Predicted tokens in them."""
    num_pairs: float
    """`Batch.num_pairs` of them."""


def load_batches(
    batches: Batches, consumed_before: Callable[[int], int], steps: Iterable[int], device: torch.device
) -> Generator[StepBatches]:
    """Yield the batches of each of `steps`, and prepare those of the step after it in a thread meanwhile.

    `consumed_before` gives the samples that the run has consumed before a step.
    """

    def prepare(step: int) -> StepBatches:
        micro_batches = list(batches.at(consumed_before(step)))
        num_tokens = sum(float(batch.loss_mask.sum()) for batch in micro_batches)
        pins = device.type == "cuda"
        num_pairs = sum(batch.num_pairs for batch in micro_batches)
        return StepBatches([as_tensors(batch, pins_memory=pins) for batch in micro_batches], num_tokens, num_pairs)

    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
    futures = (thread.submit(prepare, step) for step in steps)
    try:
        prepared = next(futures, None)
        while prepared is not None:
            following = next(futures, None)
            yield prepared.result()
            prepared = following
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def as_tensors(batch: Batch, pins_memory: bool = False) -> list[Tensor]:
    """Return the model's arguments of a batch, with labels.

    From memory that is not pinned a copy would wait until the GPU has done all that it was given before.
    """
    tensors = [torch.from_numpy(array) for array in batch.arguments()]
    return [tensor.pin_memory() for tensor in tensors] if pins_memory else tensors


def to_device(batch: Batch, device: torch.device) -> list[Tensor]:
    """Return the model's arguments of a batch, on the device."""
    return [tensor.to(device, non_blocking=True) for tensor in as_tensors(batch, pins_memory=device.type == "cuda")]


@dataclass(frozen=True)
class Run:
    """A run at work in this process."""

    plan: RunPlan
    processes: Processes
    model: Model
    """This process's part of the model, as built; `engine.module` is what computes."""
    engine: Engine
    state: TrainingState
    """State at which this start begins."""
    batches: Batches
    """The micro batches of this process."""

    def samples(self, step: int) -> int:
        """Sequences read after `step` steps; an earlier start may have had another global batch."""
        return self.state.samples + (step - self.state.step) * self.plan.resolved.global_batch

    def loader(self, last_step: int) -> Generator[StepBatches]:
        """Open the batches of each step of this start up to `last_step`; the caller closes it."""
        steps = range(self.state.step + 1, last_step + 1)
        return load_batches(self.batches, lambda step: self.samples(step - 1), steps, self.processes.device)


_NONE, _UNREADABLE = -1, -2
"""In place of the step of a machine's newest checkpoint: it has none; it has some, and none can be resumed from."""
Checkpoint = tuple[Path, TrainingState, Mapping[str, Tensor], Mapping[str, Tensor]]
"""A checkpoint's folder, state, weights and optimizer state."""


def sent_tensors(
    read: Callable[[str], Tensor], source: int, shapes: Mapping[str, tuple[int, ...]], processes: Processes
) -> ComputedTensors:
    """Tensors that the process `source` reads by name and broadcasts, each when it is indexed: by all in one order."""

    def receive(name: str) -> Tensor:
        whole = read(name) if processes.rank == source else torch.empty(shapes[name])
        whole = whole.to(processes.device).contiguous()
        torch.distributed.broadcast(whole, src=source)
        return whole

    return ComputedTensors(shapes, receive)


def newest_checkpoint(plan: RunPlan, processes: Processes) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None; every process must call it.

    Where machines have folders of their own, the first that has the newest sends it to all: the same step in two
    folders may be of two runs.
    """
    is_shared = processes.sum([processes.leads]) == [1]

    def newest_step() -> str:
        try:
            newest = checkpoint.newest_to_resume(plan.run_dir, processes.log)
        except RunError as error:
            if is_shared:
                raise
            processes.log_from_folder(str(error))  # another machine may have one
            return str(_UNREADABLE)
        return str(checkpoint.step_of(newest) if newest else _NONE)

    # For all that share a folder: it reads and hashes a whole checkpoint.
    step = int(processes.from_one(newest_step))
    if processes.leads:
        with contextlib.suppress(OSError):  # the two names are for display; the next save sets them right
            checkpoint.write_markers(plan.run_dir)
        if not processes.is_first:
            step = int(newest_step())
    steps = processes.numbers_of_all(step if processes.leads else _NONE)
    if (newest := max(steps)) < 0:
        if _UNREADABLE in steps:
            raise RunError("no machine has a checkpoint that can be resumed from; the messages above say why")
        return None
    folder, source = checkpoint.folder_of(plan.run_dir, int(newest)), steps.index(newest)
    if is_shared:
        return folder, checkpoint.read_state(folder), checkpoint.read_weights(folder), checkpoint.read_moments(folder)
    processes.log(f"process {source} sends the checkpoint to those that do not see it")
    path, reads = folder / checkpoint.STATE_NAME, processes.rank == source
    text = processes.from_one(lambda: path.read_text(encoding="utf-8"), source)
    stored = optimizer_rules.checkpoint_shapes(plan.resolved.optimizer_name, plan.shape)
    shapes = {name: stored.pop(name) for name in plan.shape.parameter_shapes()}
    weights, moments = (read(folder) if reads else {} for read in (checkpoint.read_weights, checkpoint.read_moments))
    sent_weights = sent_tensors(weights.__getitem__, source, shapes, processes)
    sent_moments = sent_tensors(moments.__getitem__, source, stored, processes)
    return folder, checkpoint.parse_state(text, path), sent_weights, sent_moments


def build_model(plan: RunPlan) -> Model:
    """Build this process's part of the model, on the CPU and in fp32, with undefined weights; after `join`."""
    recomputes = plan.resolved.activation_checkpointing
    return builder.build(plan.shape, activation_checkpointing=recomputes, settings=plan.resolved)


def open_run(plan: RunPlan, processes: Processes, newest: Checkpoint | None = None) -> Run:
    """Open a plan: at the checkpoint `newest`, or else at its first step."""
    config, device, log = plan.resolved, processes.device, processes.log
    model = build_model(plan)
    engine = engine_choice.open_engine(model, config, plan.template, device)
    joining.set_timeouts()  # of those that DeepSpeed has made, too
    state = state_of(plan, 0, step=0, seconds=0.0, facts={"init_from": config.init_from} if config.init_from else {})
    if newest is not None:
        folder, state, weights, moments = newest
        if state.optimizer == config.optimizer_name:
            load_state(engine, weights.items(), moments, state.updates)
        else:
            load_state(engine, weights.items())
            change = f"optimizer was {state.optimizer}, is {config.optimizer_name}"
            log(f"{change}: the optimizer state restarts from zero")
        log(f"resuming from {folder}: step {state.step}, {count_text(state.tokens)} tokens done")
    elif config.init_from:
        load_state(engine, _weights_of(plan, processes).items())
        carried = from_hf.carried(Path(config.init_from), config.new_embeddings)
        state = replace(state, facts=state.facts | carried | {INIT_FACT: weights_id(config.init_from)})
        beside = "" if config.new_embeddings == "none" else f", its embeddings by {config.new_embeddings}"
        log(f"starting from the weights of {config.init_from}{beside}")
        if (context := carried["context_length"] or config.seq_len) < config.seq_len:
            log(f"the context length grows from {context} to {config.seq_len}")
    else:
        load_state(engine, initial_weights.drawn_by_all(plan.shape, config.seed, device))
    state = _comparable(plan, state, log)
    if config.precision == "fp8":
        layers.multiply_in_float8(model)
    if config.teachers:
        model.teachers = _teachers_of(plan, device)
    share = BatchLayout(config.global_batch, config.micro_batch, parallel.data_size())
    training = plan.data.training
    batches = Batches(training.tokens(), training.order(), share, plan.data.objective, parallel.data_rank())
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(config.cudnn_attention)
        weight = torch.empty((), dtype=families.TORCH_DTYPES[config.number_format], device=device)
        check_attention(plan.shape, weight, with_documents=next(batches.at(0)).segments is not None)
        torch.cuda.empty_cache()  # the peak is that of training
        torch.cuda.reset_peak_memory_stats(device)
    whole_layers = compilation.reason_against(config.compile, device.type) is None
    if whole_layers or compilation.compiles_functions(config.compile, device.type):
        first = next(batches.at(0))  # any would do; where a run resumes there may be none
        compilation.start(model, to_device(first, device), log, whole_layers)
        if config.precision == "fp8" and model.all_layers()[0].compiled is None:
            raise RunError(
                "precision: fp8 needs compiled layers, which failed (the line above says why): eager ones take longer "
                "than in bf16. Mend that, or set precision: bf16"
            )
    return Run(plan, processes, model, engine, state, batches)


def _comparable(plan: RunPlan, state: TrainingState, log: Callable[[str], None]) -> TrainingState:
    """Return a state without the numbers that this start must not compare its own with: losses with other teachers,
    and validations of another text, or by another metric."""
    config, facts = plan.resolved, state.facts
    metric, *answers = (getattr(config, key, "loss") for key in ("metric", "eval_examples", "max_new_tokens"))
    reads_all = config.eval_tokens == "all" or config.eval_tokens >= plan.data.num_valid_tokens
    text = f"{'all' if reads_all else config.eval_tokens} tokens of {plan.data.valid_sha256}"
    measure = metric if metric == "loss" else f"{metric} of {answers[0]} answers of {answers[1]} tokens"
    if facts.get(checkpoint.VALID_FACT) == f"{metric}, {text}":  # of an earlier version, without the answers
        measure = metric
    now = {
        "teachers": [*config.teachers, config.teacher_weight] if config.teachers else [],
        TEACHERS_FACT: [*map(weights_id, config.teachers)],
        "start_id": plan.encoder.start_id,
        checkpoint.VALID_FACT: f"{measure}, {text}",
    }
    if any(facts.get(name, now[name]) != now[name] for name in ("teachers", TEACHERS_FACT)):
        state = replace(state, recent_losses=())
    if facts.get(checkpoint.VALID_FACT, now[checkpoint.VALID_FACT]) != now[checkpoint.VALID_FACT]:
        log("validation has another text or another metric than before: the best checkpoint is chosen from here on")
        of_validation = ("valid_", "first_valid_", "best_", "selection_", "worse_")
        facts = {key: value for key, value in facts.items() if not key.startswith(of_validation)}
    return replace(state, facts=facts | now)


def _weights_of(plan: RunPlan, processes: Processes) -> ComputedTensors:
    """The weights of the Hugging Face folder that a run starts from; the first process alone reads it."""
    config, shape = plan.resolved, plan.shape
    weights: Iterator[tuple[str, Tensor]] = iter(())

    def open_weights() -> str:
        nonlocal weights
        folder = Path(config.init_from)
        vocabulary = from_hf.vocabulary_of(folder, plan.encoder, config.new_embeddings)
        weights = from_hf.open_weights(folder, shape, vocabulary)
        return ""

    processes.from_one(open_weights)
    shapes = shape.parameter_shapes()
    in_order = {rule.ours: shapes[rule.ours] for rule in families.rules_for(shape)}
    return sent_tensors(lambda _: next(weights)[1], 0, in_order, processes)


def _teachers_of(plan: RunPlan, device: torch.device) -> Teachers:
    """The teachers, each whole in every process, in the number format of the computation."""
    models, dtype = list[Model](), families.TORCH_DTYPES[plan.resolved.number_format]
    for name in plan.resolved.teachers:
        shape = from_hf.teacher_of(Path(name), plan.encoder, plan.shape.seq_len, partial(plan.teacher_fault, name))
        teacher = builder.build(shape, dtype).requires_grad_(False)
        for parameter, weight in from_hf.open_weights(Path(name), shape):
            teacher.get_parameter(parameter).copy_(weight)
        models.append(teacher.eval().to(device))
    return Teachers(models, plan.resolved.teacher_weight)


def state_of(plan: RunPlan, samples: int, **reached: Any) -> TrainingState:
    """Return the state of a run after `samples` samples; `reached` are the fields that the plan does not hold."""
    return TrainingState(
        samples=samples,
        tokens=samples * plan.schedule.sample_tokens,
        shape=plan.shape.as_json(),
        tokenizer_sha256=plan.encoder.sha256,
        data_sha256=plan.data.sha256,
        precision=plan.resolved.precision,
        **reached,
    )
