"""Training in one process, from an opened plan to the last step, or to where it was stopped.

After each step (`loop`): record, validate, sample, save.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import psutil

from zerokara import checkpoint, progress
from zerokara.checkpoint import Retention
from zerokara.errors import RunError
from zerokara.model.experts import statistics
from zerokara.progress import seconds_text
from zerokara.training.evaluation import Validation, of_loss
from zerokara.training.guards import StepGuard, TooManySkippedSteps, find_bad_samples
from zerokara.training.logbook import Logbook
from zerokara.training.loop import StepRecord, train_step
from zerokara.training.planning import run_lock
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.planning.schedule import reason_to_stop
from zerokara.training.processes import folder_sharing
from zerokara.training.processes.divergence import DivergenceCheck, ProcessesDiverged
from zerokara.training.processes.folder_sharing import FolderSharing
from zerokara.training.processes.joining import Processes, local_device
from zerokara.training.processes.stopping import FILE_NAME as STOP_NAME
from zerokara.training.processes.stopping import StopRequest
from zerokara.training.run import Run, join, open_run, state_of
from zerokara.training.sampling import Sampler
from zerokara.training.saving import Saver


@contextlib.contextmanager
def open_trainer(
    plan: RunPlan,
    validations: Callable[[RunPlan, Processes], list[Validation]] = of_loss,
    stop_after: int | None = None,
) -> Iterator[Trainer]:
    """Open a plan for training, at its newest checkpoint or at its first step, and hold its run folder.

    `validations` opens those of the run. The run is left after step `stop_after`, for a caller that wants a part of it.
    """
    stop = StopRequest(local_device())
    stop.listen()
    processes = join(plan)
    sharing = folder_sharing.find(processes, plan.run_dir)
    with contextlib.ExitStack() as held:
        if sharing.leads:
            held.enter_context(run_lock.lock(plan.run_dir))
            stop.watch_file(plan.run_dir / STOP_NAME)
        step, sent_by = _newest_checkpoint(plan, processes, sharing)
        run = open_run(plan, processes, checkpoint.folder_of(plan.run_dir, step) if step >= 0 else None, sent_by)
        yield Trainer(run, stop, sharing, validations(plan, processes), stop_after)


def _newest_checkpoint(plan: RunPlan, processes: Processes, sharing: FolderSharing) -> tuple[int, int | None]:
    """The step to resume from, -1 for none; and which process reads it, where not all see it."""

    def newest_step() -> int:
        newest = checkpoint.newest_to_resume(plan.run_dir, processes.log)
        return checkpoint.step_of(newest) if newest else -1

    step = processes.from_first(newest_step)  # for all that share a folder: it reads and hashes a whole checkpoint
    if sharing.leads:
        with contextlib.suppress(OSError):  # the two names are for people; the next save sets them right
            checkpoint.write_markers(plan.run_dir)
    if len(sharing.ranks) == processes.count:
        return step, None
    if sharing.leads and not processes.is_first:
        try:
            step = newest_step()
        except RunError as error:  # others have one, or this is how all of them find none
            progress.log(f"{sharing.host}: {error}")
            step = -1
    leaders, steps = sorted(set(processes.numbers_of_all(sharing.ranks[0]))), processes.numbers_of_all(step)
    source = max(leaders, key=lambda leader: steps[leader])  # the first of those with the newest
    return steps[source], None if all(steps[leader] == steps[source] for leader in leaders) else source


class Trainer:
    """An opened run, and what is done after each of its steps."""

    def __init__(
        self,
        run: Run,
        stop: StopRequest,
        sharing: FolderSharing,
        validations: Sequence[Validation] = (),
        stop_after: int | None = None,
    ):
        """The last of `validations` chooses the best checkpoint."""
        self.run, self.stop, self.validations = run, stop, validations
        self.state = run.state
        """The newest state that was saved, or that the start began with."""
        self._stop_after = stop_after
        plan, config, processes = run.plan, run.plan.resolved, run.processes
        self.divergence = DivergenceCheck(run.model, run.state.step)
        self.sampler: Sampler | None = None
        if config.sample_prompts:
            self.sampler = Sampler(plan.encoder, plan.data.objective, config, processes.device)
        self.logbook = Logbook(plan, run.samples, run.state, processes)
        if processes.is_first:
            stop.watch(lambda: reason_to_stop(config, plan.checkpoint_bytes, self.logbook.seconds))
        resumed_from = checkpoint.folder_of(plan.run_dir, run.state.step) if run.state.step else None
        retention = Retention(config.keep_last, config.keep_every, config.keep_best)
        self.saver = Saver(plan.run_dir, retention, run.engine, processes, sharing, resumed_from)
        self.guard = StepGuard(config.spike_sigmas, config.max_skipped_steps, run.state)

    def train(self) -> None:
        """Train to the end, or to where somebody asks to stop.

        Raises:
            RunError: too many steps in a row had to be skipped, the processes no longer agree, or the disk would not
                take the last checkpoint. Only the first process says so; the others leave with its exit code.
        """
        run, processes, done = self.run, self.run.processes, self.state.step
        plan, schedule, stop_path = run.plan, run.plan.schedule, run.plan.run_dir / STOP_NAME
        waited = seconds_text(time.time() - psutil.Process().create_time())
        processes.log(f"ready after {waited}; stop with Ctrl-C, SIGTERM, or: touch {stop_path}; nothing is lost")
        try:
            # The validation of the step that was reached, where somebody asked to stop in it or before it.
            is_due = done % plan.resolved.eval_interval == 0 and done < schedule.num_steps
            lacks = is_due and self.state.facts.get("valid_step") != done
            if lacks and self._validate(done) and done and self._is_best(done):
                self.save(done)  # anew: what was saved at the stop does not know how good it is
            self.logbook.log_stages(done, resumed=done > 0)
            self.stop.defer()
            with contextlib.closing(run.loader(schedule.num_steps)) as loader:
                for step in range(done + 1, schedule.num_steps + 1):
                    learning_rate = schedule.learning_rate(step)
                    record = train_step(
                        run.engine, processes, loader.take, step, learning_rate, self.guard, self.stop.poll
                    )
                    if self.after_step(record):
                        break
            self.saver.finish()
        except (TooManySkippedSteps, ProcessesDiverged) as error:
            self.saver.finish()
            if not processes.is_first:
                raise SystemExit(error.exit_code) from None
            raise
        except KeyboardInterrupt:  # the second one: it waits for nothing
            raise
        except BaseException:
            self.saver.abandon()
            raise
        self.logbook.close()
        if self.state.step < schedule.num_steps:
            reached = self.state.step == self._stop_after
            reason = self.stop.reason or ("its caller" if reached else "another process")
            processes.log(f"stopped by {reason} after step {self.state.step}, saved")
            if processes.is_first:
                stop_path.unlink(missing_ok=True)  # the request was obeyed

    def after_step(self, record: StepRecord) -> bool:
        """Record, validate, sample and save; return whether to leave. Every process must call it."""
        config, step = self.run.plan.resolved, record.step
        is_last = step == self.run.plan.schedule.num_steps
        stops = record.stop_requested or step == self._stop_after
        self.logbook.add(record)
        if record.skip_reason:
            run, consumed = self.run, self.run.samples(step - 1)
            found = find_bad_samples(run.engine.module, run.batches, run.plan.data.reading, consumed)
            self.logbook.log_skipped(record, found)
            self.guard.check_skipped_in_row(step, record.skip_reason)
        if is_last or step % config.log_interval == 0 or step == 1:
            self.logbook.log_step(statistics(self.run.model.all_layers()))
        if is_last or (step % config.eval_interval == 0 and not stops):
            stops |= not self._validate(step, to_the_end=is_last)
        if is_last or stops or step % config.save_interval == 0 or self._is_best(step):
            self.save(step)
        if not is_last:
            self.logbook.log_stages(step)
        return stops

    def _validate(self, step: int, to_the_end: bool = False) -> bool:
        """Validate; return False when it was given up because somebody asked to stop."""
        self.divergence.check(step)
        give_up = None if to_the_end else self.stop.requested_anywhere
        with self.logbook.pause():
            results = []
            for validate in self.validations:
                if (result := validate(self.run.engine, give_up)) is None:
                    return False
                results.append(result)
            if results:
                self.logbook.log_validations(step, results)
            if self.sampler is not None:
                self.logbook.log_samples(step, self.sampler(self.run.engine.module))
        return True

    def _is_best(self, step: int) -> bool:
        """Whether this step is to be saved as the best so far, so that the best one always exists."""
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
            facts=dict(book.facts),
            skipped_steps=guard.skipped_steps,
            skipped_in_row=guard.skipped_in_row,
            recent_losses=guard.recent_losses,
            optimizer=run.plan.resolved.optimizer_name,
            earlier_updates=step - guard.skipped_steps - run.engine.num_updates,
        )
        book.flush()
        with book.pause():
            self.saver.save(self.state)
