"""Training in one process, from a plan to the last step, or to where it was stopped.

One step is: batch → loss → backward → guard → clip → update → record; `train_step` is the only place where one is made:
training, the trial of a dry run and the proof of resume call it. After each step: log, validate, sample, save; and end
where a signal, a limit or the file STOP asks for it.
"""

import contextlib
import math
import shlex
import time
from collections.abc import Callable, Iterator

import psutil
import torch
import torch.distributed

from zerokara.base.progress import seconds_text
from zerokara.model import parallel
from zerokara.model.experts import statistics
from zerokara.training.compute.engine import Engine
from zerokara.training.guards import DivergenceCheck, MustEnd, StepGuard, StepRecord, find_bad_samples
from zerokara.training.logbook import Logbook
from zerokara.training.planning import run_folder
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.planning.schedule import RAISE, has_reached_max_hours
from zerokara.training.processes.joining import Processes, join
from zerokara.training.processes.supervision import StopRequest
from zerokara.training.run import StepBatches, newest_checkpoint, open_run, state_of
from zerokara.training.sample_texts import Sampler
from zerokara.training.saving import Saver
from zerokara.training.validation import Validation, of_loss


class Trainer:
    """A run at its newest checkpoint or its first step, which locks the run folder until it has trained."""

    def __init__(
        self,
        plan: RunPlan,
        validations: Callable[[RunPlan, Processes], list[Validation]] = of_loss,
        stop_after: int | None = None,
    ):
        """The last of the `validations` chooses the best checkpoint.

        The run is left after step `stop_after`, for a caller that wants a part of it.
        """
        config, self._stop_after = plan.resolved, stop_after
        self.stop = stop = StopRequest()
        self.processes = processes = join(plan)
        self._folder_lock, self._stop_path = contextlib.ExitStack(), plan.run_dir / run_folder.STOP_NAME
        if processes.leads:
            self._folder_lock.enter_context(run_folder.training_lock(plan.run_dir))
            stop.reasons.append(lambda: f"the file {self._stop_path}" if self._stop_path.exists() else "")
        self.run = run = open_run(plan, processes, newest_checkpoint(plan, processes))
        self.state = run.state
        """The newest state that was saved, or that the start began with."""
        self.guard = StepGuard(config, run.state)
        self.divergence = DivergenceCheck(run.model, run.state.step)
        self.logbook = Logbook(plan, run.samples, run.state, processes)
        if processes.is_first:
            limit = f"max_hours = {config.max_hours} ({RAISE})"
            stop.reasons.append(lambda: limit if has_reached_max_hours(config, self.logbook.seconds) else "")
        self.validations = validations(plan, processes)
        self.sampler: Sampler | None = None
        if config.sample_prompts:
            self.sampler = Sampler(plan.encoder, plan.data.objective, config, processes.device)
        self.saver = Saver(run)

    def train(self) -> None:
        """Train to the end, or to where somebody asks to stop.

        Raises:
            RunError: too many steps in a row had to be skipped, the processes no longer agree, or the disk would not
                take the last checkpoint. Only the first process says so; the others leave with its exit code.
        """
        run, processes, done = self.run, self.processes, self.state.step
        schedule, stop_path = run.plan.schedule, self._stop_path
        waited = seconds_text(time.time() - psutil.Process().create_time())
        processes.log(
            f"ready after {waited}; stop with Ctrl-C, SIGTERM, or: touch {shlex.quote(str(stop_path))}; nothing is lost"
        )
        try:
            # True if the validation of the step that was reached is due and has not been done, because of a stop.
            is_due = done % run.plan.resolved.eval_interval == 0 and done < schedule.num_steps
            is_due = is_due and self.state.facts.get("valid_step") != done
            if is_due and self._validate(done) and done and self.validations:
                self.save(done)  # anew: the checkpoint of the stop does not know how good it is
            self.logbook.log_stages(done)
            self.stop.at_once = False
            with contextlib.closing(run.loader(schedule.num_steps)) as loader:
                for step in range(done + 1, schedule.num_steps + 1):
                    learning_rate = schedule.learning_rate(step)
                    record = train_step(run.engine, processes, loader, step, learning_rate, self.guard, self.stop.poll)
                    if self.after_step(record):
                        break
            self.saver.finish()
            self.logbook.close()
            if self.state.step < schedule.num_steps:
                other = "its caller" if self.state.step == self._stop_after else "another process"
                reason = self.stop.reason or other
                processes.log(f"stopped by {reason} after step {self.state.step}, saved")
                if processes.is_first:
                    stop_path.unlink(missing_ok=True)  # the request was obeyed
        except MustEnd as error:
            self.saver.finish()
            if not processes.is_first:
                raise SystemExit(error.exit_code) from None
            raise
        except KeyboardInterrupt:  # the second one: it waits for nothing
            raise
        except BaseException:
            self.saver.abandon()
            raise
        finally:
            self._folder_lock.close()

    def after_step(self, record: StepRecord) -> bool:
        """Record, validate, sample and save; return whether to leave. Every process must call it."""
        run, config, step = self.run, self.run.plan.resolved, record.step
        is_last = step == run.plan.schedule.num_steps
        stops = record.stop_requested or step == self._stop_after
        self.logbook.add(record)
        if is_last or step % config.log_interval == 0 or step == 1:
            self.logbook.log_step(statistics(run.model.all_layers()))
        if record.skip_reason:
            with self.logbook.pause():
                consumed = run.samples(step - 1)
                found = find_bad_samples(run.engine.module, run.batches, run.plan.data.training, consumed)
            self.logbook.log_skipped(record, found)
            self.guard.check_skipped_in_row(step, record.skip_reason)
        if is_last or (step % config.eval_interval == 0 and not stops):
            stops |= not self._validate(step, to_the_end=is_last)
        if is_last or stops or step % config.save_interval == 0 or self._is_best(step):
            self.save(step)
        if not is_last:
            self.logbook.log_stages(step)
        return stops

    def _validate(self, step: int, to_the_end: bool = False) -> bool:
        """Validate; return False when a request to stop ended it early."""
        self.divergence.check(step)

        def give_up() -> bool:
            return not to_the_end and self.processes.sum([self.stop.poll()]) != [0]

        with self.logbook.pause():
            results = []
            for validate in self.validations:
                if (result := validate(self.run.engine, give_up)) is None:
                    return False
                results.append(result)
            if results:
                self.logbook.log_validations(step, results)
            if self.sampler is not None and (step or self.run.plan.resolved.init_from):  # new weights write nothing
                self.logbook.log_samples(step, self.sampler(self.run.engine.module))
        return True

    def _is_best(self, step: int) -> bool:
        """Return True if this step is to be saved as the best so far, so that the best one always exists."""
        plan = self.run.plan
        return plan.task.saves_every_best and plan.resolved.keep_best and self.logbook.facts.get("best_step") == step

    def save(self, step: int) -> None:
        """Save the state after `step`; every process must call it."""
        self.divergence.check(step)
        run, book, guard = self.run, self.logbook, self.guard
        self.state = state_of(
            run.plan,
            run.samples(step),
            step=step,
            seconds=book.seconds,
            facts={
                **book.facts,
                "learning_rate": run.plan.schedule.learning_rate(step),
                "epochs": run.samples(step) / run.plan.schedule.samples_per_epoch,
            },
            skipped_steps=guard.skipped_steps,
            skipped_in_row=guard.skipped_in_row,
            recent_losses=guard.recent_losses,
            optimizer=run.plan.resolved.optimizer_name,
            earlier_updates=step - guard.skipped_steps - run.engine.optimizer.num_updates,
        )
        book.flush()
        with book.pause():
            self.saver.save(self.state)


def train_step(
    engine: Engine,
    processes: Processes,
    loader: Iterator[StepBatches],
    step: int,
    learning_rate: float,
    guard: StepGuard,
    stop: Callable[[], bool],
) -> StepRecord:
    """Train one step; every process must call it. `stop` is True if this process was asked to stop."""
    started = time.perf_counter()
    batches, device = next(loader), processes.device
    # Tensor-parallel ranks compute the same sequences: one of them counts.
    counts = float(parallel.tensor_rank() == 0)
    global_tokens, global_pairs = processes.sum([counts * batches.num_tokens, counts * batches.num_pairs])
    global_sequences = sum(len(batch[0]) for batch in batches.micro_batches) * parallel.data_size()
    nats = torch.zeros((), device=device)  # not read here: the host goes on while the device works
    for micro_batch in batches.micro_batches:
        on_device = [tensor.to(device, non_blocking=True) for tensor in micro_batch]  # pinned: nothing waits
        nats += engine.accumulate(on_device, global_tokens, global_sequences)
    requests = torch.full_like(nats, float(stop()), dtype=torch.float64)
    numbers = torch.stack([counts * nats.double(), requests])
    torch.distributed.all_reduce(numbers)
    loss, stop_requested, skip_reason = math.nan, False, ""

    def accept(values: list[float]) -> bool:
        nonlocal loss, stop_requested, skip_reason
        loss, stop_requested = values[0] / global_tokens, values[1] > 0
        skip_reason = guard.skip_reason_of_loss(loss)
        return not skip_reason

    grad_norm = engine.update(learning_rate, numbers, accept)
    if skip_reason:
        grad_norm = math.nan
    elif not math.isfinite(grad_norm):
        skip_reason = "the gradient is not finite"
    guard.note(loss, skip_reason)
    seconds = time.perf_counter() - started
    return StepRecord(step, loss, learning_rate, grad_norm, seconds, skip_reason, stop_requested, global_pairs)
