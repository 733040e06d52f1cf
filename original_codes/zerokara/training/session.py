"""One start of a training run in one process: from a preparation to the last step, or to where it was stopped.

Puts the parts together and tells the loop what is to happen at each step's edge: record, validate, save, draw.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace

import psutil
import torch
import torch.distributed

from zerokara import checkpoint
from zerokara.checkpoint import TrainingState
from zerokara.errors import RunError
from zerokara.huggingface import from_hf
from zerokara.model import compilation, parallel
from zerokara.model.experts import Routing, statistics
from zerokara.model.megatron import Model, build, num_parameters
from zerokara.progress import count_text, log, seconds_text
from zerokara.samples.batches import Batches, BatchLayout
from zerokara.training import bad_samples
from zerokara.training.compute import devices
from zerokara.training.compute.engine import Engine
from zerokara.training.evaluation import start_validation
from zerokara.training.guards import GivenUp, StepGuard
from zerokara.training.logbook import Logbook
from zerokara.training.loop import StepRecord, train
from zerokara.training.planning import run_lock
from zerokara.training.planning.limits import TimeLimits
from zerokara.training.planning.position import Position
from zerokara.training.planning.preparation import Preparation
from zerokara.training.processes import identity, joining
from zerokara.training.processes.agreement import Agreement, ProcessesDiverged
from zerokara.training.processes.stopping import FILE_NAME as STOP_NAME
from zerokara.training.processes.stopping import StopFile, StopRequest
from zerokara.training.sampling import Sampler
from zerokara.training.saving import Saver


class Session:
    """A training process at work. `run` does it all."""

    def __init__(self, preparation: Preparation, stop_after: int | None = None):
        """Get ready; the run is left after step `stop_after`, for whoever wants only a part of it."""
        self._stop_after = stop_after
        self.preparation, self.config = preparation, preparation.config
        self.schedule, self.run_dir = preparation.schedule, preparation.run_dir
        self.device = devices.local_device(int(os.environ.get("LOCAL_RANK", "0")))
        self.stop = StopRequest(self.device)
        self.stop.listen()
        joining.join(preparation, self.device)
        self.rank = torch.distributed.get_rank()
        self._lock = run_lock.lock(self.run_dir) if self.rank == 0 else None
        self._stop_file = StopFile(self.run_dir)
        if self.rank == 0:
            self._stop_file.forget()
            self.stop.watch(self._stop_file.look)
        self.state = self._start_state()
        self.position = Position.going_on(self.state, self.config.global_batch_size, self.schedule.sample_tokens)
        self.engine = self._start_engine()
        identity.prove(joining.ANSWER_SECONDS)  # of the groups that DeepSpeed has made
        self.validation, self.sampler = start_validation(preparation, self.device), self._start_sampler()
        self.logbook = Logbook(preparation, self.state, self.device, self.rank)
        if self.rank == 0:
            self.stop.watch(TimeLimits(self.config, preparation.checkpoint_bytes, lambda: self.logbook.seconds).look)
        self.saver = Saver(preparation, self.engine, self.device, self.rank, self._log, self._resumed_from)
        self.guard = StepGuard(self.config, self.state)
        plan = BatchLayout(self.config.global_batch_size, self.config.micro_batch, parallel.data_size())
        reading = preparation.reading
        self.batches = Batches(reading.tokens(), reading.order(), plan, preparation.objective, parallel.data_rank())

    def run(self) -> bool:
        """Train to the end; False when somebody asked to stop before it.

        Raises:
            RunError: too many steps in a row had to be skipped, the processes no longer agree, or the disk would not
                take the last checkpoint. Only the first process says so; the others leave with its exit code.
        """
        try:
            finished = self._train()
            self.saver.finish()
        except (GivenUp, ProcessesDiverged) as error:
            self.saver.finish()
            if self.rank:
                raise SystemExit(error.exit_code) from None
            raise
        except KeyboardInterrupt:  # the second one: it waits for nothing
            raise
        except BaseException:
            self.saver.abandon()
            raise
        self.logbook.close()
        if not finished:
            reached = self.state.step == self._stop_after
            reason = self.stop.reason or ("its caller" if reached else "another process")
            self._log(f"stopped by {reason} after step {self.state.step}, saved")
            if self.rank == 0:
                self._stop_file.forget()
        if self._lock is not None:
            self._lock.close()
        return finished

    def _train(self) -> bool:
        done = self.state.step
        waited = time.time() - psutil.Process().create_time()
        self._log(
            f"ready after {seconds_text(waited)}; stop with Ctrl-C, SIGTERM, or: touch {self.run_dir / STOP_NAME}; "
            "nothing is lost"
        )
        if self._lacks_validation(done):
            self._validate(done)
        self.logbook.say_stages(done, resumed=done > 0)
        self.stop.can_wait()
        return train(
            engine=self.engine,
            batches=self.batches,
            schedule=self.schedule,
            first_step=done + 1,
            position=self.position.samples,
            device=self.device,
            guard=self.guard,
            stop=self.stop,
            at_edge=self._at_edge,
        )

    def _start_state(self) -> TrainingState:
        # The first process looks, for all: hashing is reading the whole checkpoint.
        newest = checkpoint.newest_to_resume(self.run_dir, self._log) if self.rank == 0 else None
        found = torch.tensor([checkpoint.step_of(newest) if newest else -1], device=self.device)
        torch.distributed.broadcast(found, src=0)
        step = int(found.item())
        folder = self._resumed_from = checkpoint.folder_of(self.run_dir, step) if step >= 0 else None
        if self.rank == 0:
            with contextlib.suppress(OSError):  # the two names are for people; the next save sets them right
                checkpoint.mark(self.run_dir)
        return (
            checkpoint.read_state(folder)
            if folder
            else self._state_at(0, samples=0, facts=self._first_facts(), seconds=0.0)
        )

    def _first_facts(self) -> dict[str, object]:
        return {"init_from": self.config.init_from} if self.config.init_from else {}

    def _start_engine(self) -> Engine:
        preparation, folder = self.preparation, self._resumed_from
        model = build(
            preparation.shape,
            seed=None if folder or self.config.init_from else self.config.seed,
            activation_checkpointing=self.config.activation_checkpointing,
            routing=Routing.from_config(self.config),
        )
        self._layers = model.all_layers()
        count = num_parameters(model)
        if count != preparation.shape.num_parameters():
            raise RunError(f"the model has {count:,} parameters, {preparation.shape.num_parameters():,} were announced")
        engine = Engine(model, self.config, parallel.data_size(), preparation.template)
        self.agreement = Agreement(model, self.config.seed)
        if folder:
            state = self.state
            if state.optimizer == self.config.optimizer:
                engine.load_state(checkpoint.read_weights(folder), checkpoint.read_moments(folder), state.updates)
            else:
                engine.load_state(checkpoint.read_weights(folder), {}, num_updates=0)
                self._log(f"optimizer was {state.optimizer}, is {self.config.optimizer}: its state starts anew")
            self._log(f"going on from {folder}: step {self.state.step}, {count_text(self.state.tokens)} tokens done")
        elif self.config.init_from:
            engine.load_state(from_hf.weights(self.config, preparation.shape), {}, num_updates=0)
            surplus = from_hf.num_surplus_rows(self.config, preparation.shape)
            without = f", without {surplus:,} rows of its embedding that no token has" if surplus else ""
            self._log(f"starting from the weights of {self.config.init_from}{without}")
        self._compile(model)
        return engine

    def _compile(self, model: Model) -> None:
        config = self.config
        if compilation.reason_against(config.compile, self.device.type, config.zero_stage) is None:
            compilation.start(model, config.micro_batch, config.intra_document_masking, self._log)

    def _start_sampler(self) -> Sampler | None:
        config = self.config
        if not config.sample_prompts:
            return None
        objective, encoder = self.preparation.objective, self.preparation.encoder
        return Sampler(encoder, objective, config.sample_prompts, config.sample_tokens, config.seed, self.device)

    def _at_edge(self, record: StepRecord, asked_to_stop: bool) -> bool:
        """All that happens between two steps; whether to leave."""
        config, step = self.config, record.step
        last = step == self.schedule.num_steps
        asked_to_stop |= step == self._stop_after
        self.agreement.check(step)
        self.logbook.add(record)
        if record.skip_reason:
            self._report_bad_samples(record)
            self.guard.require_patience(step, record.skip_reason)
        if last or step % config.log_interval == 0 or step == 1:
            self.logbook.log_step(statistics(self._layers))
        if last or (step % config.eval_interval == 0 and not asked_to_stop):
            asked_to_stop |= not self._validate(step, to_the_end=last)
        if last or asked_to_stop or step % config.save_interval == 0:
            self._save(step)
        if not last:
            self.logbook.say_stages(step)
        return asked_to_stop

    def _lacks_validation(self, done: int) -> bool:
        """Whether the run begins, or was stopped in a validation or before one: the next start makes up for it."""
        is_due = done % self.config.eval_interval == 0 and done < self.schedule.num_steps
        return is_due and self.state.facts.get("valid_step") != done

    def _validate(self, step: int, to_the_end: bool = False) -> bool:
        """Validate; False when it was given up because somebody asked to stop."""
        with self.logbook.pace.pause("validation"):
            if self.validation is not None:
                result = self.validation(self.engine.module, None if to_the_end else self.stop.agreed)
                if result is None:
                    return False
                self.logbook.log_validation(step, result)
            if self.sampler is not None:
                self.logbook.log_samples(step, self.sampler(self.engine.module))
        return True

    def _report_bad_samples(self, record: StepRecord) -> None:
        consumed = self.position.samples(record.step - 1)
        found = bad_samples.find(self.engine.module, self.batches, self.preparation.reading, consumed)
        self.logbook.log_skipped(record, found)

    def _save(self, step: int) -> None:
        book, guard = self.logbook, self.guard
        self.state = replace(
            self._state_at(step, self.position.samples(step), dict(book.facts), book.seconds),
            skipped_steps=guard.skipped_steps,
            skipped_in_row=guard.skipped_in_row,
            recent_losses=guard.recent_losses,
            optimizer=self.config.optimizer,
            earlier_updates=step - guard.skipped_steps - self.engine.num_updates,
        )
        book.flush()
        with book.pace.pause("save"):
            self.saver.save(self.state)

    def _state_at(self, step: int, samples: int, facts: dict[str, object], seconds: float) -> TrainingState:
        preparation = self.preparation
        return TrainingState(
            step=step,
            samples=samples,
            tokens=samples * self.schedule.sample_tokens,
            seconds=seconds,
            shape=preparation.shape.as_json(),
            tokenizer_sha256=preparation.tokenizer_sha256,
            data_sha256=preparation.data_sha256,
            precision=self.config.precision,
            facts=facts,
        )

    def _log(self, text: str) -> None:
        if self.rank == 0:
            log(text)
