"""A plan, opened: process groups → model → engine → state → batches, made once and in this order.

Each part is made from the part before it, so no other order is possible: `join` gives `Processes`, which `build_model`
and `open_run` ask for. Training (`trainer`), the trial of a dry run (`trial`), the evaluation of a checkpoint
(`evaluation`) and the proof of resume (`resume_proof`) are callers of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerokara import checkpoint
from zerokara.checkpoint import TrainingState
from zerokara.errors import RunError
from zerokara.huggingface import from_hf
from zerokara.model import builder, compilation, parallel
from zerokara.model.builder import Model, num_parameters
from zerokara.model.experts import Routing
from zerokara.progress import count_text
from zerokara.samples.batches import Batches, BatchLayout
from zerokara.training.batch_loader import BatchLoader
from zerokara.training.compute import updater
from zerokara.training.compute.engine import Engine
from zerokara.training.planning.memory_forecast import MachineMemory
from zerokara.training.planning.position import Position
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes import authentication, joining
from zerokara.training.processes.joining import Processes


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

    @property
    def position(self) -> Position:
        """Where each step of this start stands in the data."""
        return Position.resumed_from(self.state, self.plan.config.global_batch_size, self.plan.schedule.sample_tokens)

    def loader(self, last_step: int) -> BatchLoader:
        """Open a loader of the batches of each step up to `last_step`; the caller closes it."""
        position = self.position
        return BatchLoader(self.batches, lambda step: position.samples(step - 1), last_step, self.processes.device)


def join(plan: RunPlan) -> Processes:
    """Become one of the processes of a run.

    Raises:
        RunError: a process did not answer, or is none of this run.
    """
    config = plan.config
    on_cpu = MachineMemory.available(plan.num_processes, gpu_bytes=None)
    keeps_freed_memory = plan.memory_forecast(on_cpu).can_keep_freed_memory
    return joining.join(plan.num_processes, config.tensor_parallel_size, config.seed, keeps_freed_memory)


def build_model(plan: RunPlan, processes: Processes, seed: int | None) -> Model:
    """Build this process's part of the model, on the CPU and in fp32; with seed None its weights are undefined."""
    model = builder.build(
        plan.shape,
        seed=seed,
        activation_checkpointing=plan.config.activation_checkpointing,
        routing=Routing.from_config(plan.config),
    )
    if (count := num_parameters(model)) != plan.shape.num_parameters():
        raise RunError(f"the model has {count:,} parameters, {plan.shape.num_parameters():,} were planned")
    return model


def open_run(plan: RunPlan, processes: Processes, resume_from: Path | None = None) -> Run:
    """Open a plan: at the checkpoint `resume_from`, or else at its first step."""
    config = plan.config
    has_weights = resume_from is not None or config.init_from
    model = build_model(plan, processes, seed=None if has_weights else config.seed)
    engine = updater.open_engine(model, config, plan.updater, parallel.data_size(), plan.template)
    authentication.authenticate(joining.ANSWER_SECONDS)  # of the groups that DeepSpeed has made
    state = _resumed(engine, resume_from, plan, processes) if resume_from else _first_state(engine, plan, processes)
    batch = config.micro_batch, config.intra_document_masking
    if compilation.reason_against(config.compile, processes.device.type, config.zero_stage) is None:
        compilation.start(model, *batch, processes.log)
    elif compilation.compiles_functions(config.compile, processes.device.type):
        compilation.start_functions(model, *batch, processes.log)
    share = BatchLayout(config.global_batch_size, config.micro_batch, parallel.data_size())
    reading = plan.reading
    batches = Batches(reading.tokens(), reading.order(), share, plan.objective, parallel.data_rank())
    return Run(plan, processes, model, engine, state, batches)


def _resumed(engine: Engine, folder: Path, plan: RunPlan, processes: Processes) -> TrainingState:
    state, optimizer = checkpoint.read_state(folder), plan.config.optimizer
    if state.optimizer == optimizer:
        engine.load_state(checkpoint.read_weights(folder), checkpoint.read_moments(folder), state.updates)
    else:
        engine.load_state(checkpoint.read_weights(folder), {}, num_updates=0)
        processes.log(f"optimizer was {state.optimizer}, is {optimizer}: the optimizer state restarts from zero")
    processes.log(f"resuming from {folder}: step {state.step}, {count_text(state.tokens)} tokens done")
    return state


def _first_state(engine: Engine, plan: RunPlan, processes: Processes) -> TrainingState:
    init_from = plan.config.init_from
    if init_from:
        engine.load_state(from_hf.weights(Path(init_from), plan.shape), {}, num_updates=0)
        surplus = from_hf.num_surplus_rows(Path(init_from), plan.shape)
        without = f", without {surplus:,} rows of its embedding that no token has" if surplus else ""
        processes.log(f"starting from the weights of {init_from}{without}")
    facts: dict[str, object] = {"init_from": init_from} if init_from else {}
    return state_of(plan, step=0, samples=0, facts=facts, seconds=0.0)


def state_of(plan: RunPlan, step: int, samples: int, facts: dict[str, object], seconds: float) -> TrainingState:
    """Return the state of a run after `step` steps and `samples` samples."""
    return TrainingState(
        step=step,
        samples=samples,
        tokens=samples * plan.schedule.sample_tokens,
        seconds=seconds,
        shape=plan.shape.as_json(),
        tokenizer_sha256=plan.tokenizer_sha256,
        data_sha256=plan.data_sha256,
        precision=plan.config.precision,
        facts=facts,
    )
