"""A plan, opened: process groups → model → engine → state → compiled code → batches, made once and in this order.

Training and the trial of a dry run open all of it, the evaluation of a checkpoint only groups and model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from zerokara import checkpoint
from zerokara.checkpoint import TrainingState
from zerokara.errors import RunError
from zerokara.huggingface import from_hf
from zerokara.model import builder, compilation, initial_weights, parallel
from zerokara.model.builder import Model
from zerokara.model.experts import Routing
from zerokara.progress import count_text
from zerokara.samples.batches import Batches, BatchLayout
from zerokara.samples.objective import Batch
from zerokara.training.compute import optimizers, updater
from zerokara.training.compute.engine import Engine, load_state
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes import joining
from zerokara.training.processes.folder_sharing import SentTensors
from zerokara.training.processes.joining import Processes


@dataclass(frozen=True)
class StepBatches:
    """What one process computes in one step."""

    micro_batches: list[list[Tensor]]
    """For each micro batch the model's arguments, with labels; in main memory, pinned where the device is a GPU."""
    num_tokens: float
    """Predicted tokens in them."""


class BatchLoader:
    """Gives the batches of a step, and prepares those of the next step in a thread; to be closed."""

    def __init__(self, batches: Batches, consumed_before: Callable[[int], int], last_step: int, device: torch.device):
        """`consumed_before` gives the samples that the run has consumed before a step."""
        self._batches, self._consumed_before, self._last_step = batches, consumed_before, last_step
        self._pins_memory = device.type == "cuda"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._next: tuple[int, Future[StepBatches]] | None = None

    def take(self, step: int) -> StepBatches:
        """Return the batches of `step`, and begin to prepare those of the step after it."""
        if self._next is None or self._next[0] != step:
            self._next = (step, self._thread.submit(self._prepare, step))
        ready = self._next[1].result()
        self._next = (step + 1, self._thread.submit(self._prepare, step + 1)) if step < self._last_step else None
        return ready

    def close(self) -> None:
        """Prepare nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, step: int) -> StepBatches:
        batches = list(self._batches.at(self._consumed_before(step)))
        num_tokens = sum(float(batch.loss_mask.sum()) for batch in batches)
        return StepBatches([as_tensors(batch, self._pins_memory) for batch in batches], num_tokens)


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
    """Where this start begins."""
    batches: Batches
    """The micro batches of this process."""

    def samples(self, step: int) -> int:
        """Sequences read after `step` steps; an earlier start may have had another global batch."""
        return self.state.samples + (step - self.state.step) * self.plan.resolved.global_batch

    def loader(self, last_step: int) -> BatchLoader:
        """Open a loader of the batches of each step up to `last_step`; the caller closes it."""
        return BatchLoader(self.batches, lambda step: self.samples(step - 1), last_step, self.processes.device)


def join(plan: RunPlan) -> Processes:
    """Become one of the processes of a run.

    Raises:
        RunError: a process did not answer, or is none of this run.
    """
    config = plan.resolved
    keeps_freed_memory = plan.memory.can_keep_freed_memory
    return joining.join(plan.processes_per_node, config.tensor_parallel_size, config.seed, keeps_freed_memory)


def build_model(plan: RunPlan) -> Model:
    """Build this process's part of the model, on the CPU and in fp32, with undefined weights; after `join`."""
    config, shape = plan.resolved, plan.shape
    routing, recomputes = Routing.from_config(config), config.activation_checkpointing
    model = builder.build(shape, seed=None, activation_checkpointing=recomputes, routing=routing)
    if (count := builder.num_parameters(model)) != shape.num_parameters():
        raise RunError(f"the model has {count:,} parameters, {shape.num_parameters():,} were planned")
    return model


def open_run(plan: RunPlan, processes: Processes, resume_from: Path | None = None, sent_by: int | None = None) -> Run:
    """Open a plan: at the checkpoint `resume_from`, or else at its first step.

    Where not every process sees the checkpoint, the process `sent_by` reads it for all.
    """
    config, device, log = plan.resolved, processes.device, processes.log
    model = build_model(plan)
    engine = updater.open_engine(model, config, plan.updater, plan.template, device)
    joining.set_timeouts()  # of the groups that DeepSpeed has made, too
    joining.authenticate(joining.ANSWER_SECONDS)
    if resume_from is not None:
        state, weights, moments = _read(resume_from, plan, processes, sent_by)
        if state.optimizer == config.optimizer_name:
            load_state(engine, weights.items(), moments, state.updates)
        else:
            load_state(engine, weights.items())
            change = f"optimizer was {state.optimizer}, is {config.optimizer_name}"
            log(f"{change}: the optimizer state restarts from zero")
        log(f"resuming from {resume_from}: step {state.step}, {count_text(state.tokens)} tokens done")
    elif config.init_from:
        load_state(engine, _sent_by_first(Path(config.init_from), plan, processes))
        state = state_of(plan, step=0, samples=0, seconds=0.0, facts={"init_from": config.init_from})
        surplus = from_hf.num_surplus_rows(Path(config.init_from), plan.shape)
        without = f", without {surplus:,} rows of its embedding that no token has" if surplus else ""
        log(f"starting from the weights of {config.init_from}{without}")
    else:
        load_state(engine, initial_weights.drawn_by_all(plan.shape, config.seed, device))
        state = state_of(plan, step=0, samples=0, seconds=0.0, facts={})
    batch = config.micro_batch, config.intra_document_masking, log, config.packs_examples
    whole_layers = compilation.reason_against(config.compile, device.type, config.zero_stage) is None
    if whole_layers or compilation.compiles_functions(config.compile, device.type):
        compilation.start(model, *batch, whole_layers=whole_layers)
    share, reading = BatchLayout(config.global_batch, config.micro_batch, parallel.data_size()), plan.data.reading
    batches = Batches(reading.tokens(), reading.order(), share, plan.data.objective, parallel.data_rank())
    return Run(plan, processes, model, engine, state, batches)


def _read(
    folder: Path, plan: RunPlan, processes: Processes, sent_by: int | None
) -> tuple[TrainingState, Mapping[str, Tensor], Mapping[str, Tensor]]:
    """The state, weights and moments in a checkpoint, read here or by the process `sent_by`."""
    if sent_by is None:
        return checkpoint.read_state(folder), checkpoint.read_weights(folder), checkpoint.read_moments(folder)
    reads, path = processes.rank == sent_by, folder / checkpoint.STATE_NAME
    text = processes.text_of(sent_by, path.read_text(encoding="utf-8") if reads else None)
    names, tensors = plan.shape.parameter_shapes().keys(), []
    stored = optimizers.checkpoint_shapes(plan.resolved.optimizer_name, plan.shape)
    for read, are_weights in ((checkpoint.read_weights, True), (checkpoint.read_moments, False)):
        shapes = {name: shape for name, shape in stored.items() if (name in names) == are_weights}
        tensors.append(SentTensors(read(folder) if reads else None, sent_by, shapes, processes.device))
    processes.log(f"process {sent_by} sends the checkpoint to those that do not see it")
    return checkpoint.parse_state(text, path), tensors[0], tensors[1]


def _sent_by_first(folder: Path, plan: RunPlan, processes: Processes) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole weights of a Hugging Face folder, which the first process alone reads, one after another."""
    shape, opened = plan.shape, list[Iterator[tuple[str, Tensor]]]()

    def open_weights() -> int:
        opened.append(from_hf.open_weights(folder, shape))
        return 0

    processes.from_first(open_weights)
    shapes = shape.parameter_shapes()
    for name in from_hf.names(shape):
        whole = next(opened[0])[1] if processes.is_first else torch.empty(shapes[name])
        whole = whole.to(processes.device).contiguous()
        torch.distributed.broadcast(whole, src=0)
        yield name, whole
        del whole


def state_of(plan: RunPlan, samples: int, **progress: Any) -> TrainingState:
    """Return the state of a run after `samples` samples; `progress` are the fields that the plan does not tell."""
    return TrainingState(
        samples=samples,
        tokens=samples * plan.schedule.sample_tokens,
        shape=plan.shape.as_json(),
        tokenizer_sha256=plan.encoder.sha256,
        data_sha256=plan.data.sha256,
        precision=plan.resolved.precision,
        **progress,
    )
