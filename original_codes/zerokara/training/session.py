"""One start of a training run in one process: from a preparation to the last step, or to where it was stopped.

Puts the parts together and tells the loop what is to happen at each step's edge: record, validate, save, draw.
"""

from __future__ import annotations

import os
import time

import psutil
import torch
import torch.distributed

from zerokara import checkpoint
from zerokara.checkpoint import TrainingState
from zerokara.errors import RunError
from zerokara.model import parallel
from zerokara.model.megatron import build, num_parameters
from zerokara.progress import count_text, seconds_text
from zerokara.samples.batches import Batches, BatchPlan
from zerokara.samples.evaluation import EvaluationTokens
from zerokara.tokenizer.encoder import Encoder
from zerokara.training import devices, run_folder
from zerokara.training.engine import Engine, init_distributed
from zerokara.training.evaluation import Validation
from zerokara.training.logbook import Logbook
from zerokara.training.loop import StepRecord, train
from zerokara.training.position import Position
from zerokara.training.preparation import Preparation, cpu_threads, has_validation
from zerokara.training.saving import Saver
from zerokara.training.stopping import StopRequest


class Session:
    """A training process at work. `run` does it all."""

    def __init__(self, preparation: Preparation):
        self.preparation, self.config = preparation, preparation.config
        self.schedule, self.run_dir = preparation.schedule, preparation.run_dir
        self.stop = StopRequest()
        self.stop.listen()
        self.device = devices.local_device(int(os.environ.get("LOCAL_RANK", "0")))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(cpu_threads(preparation.num_processes))
        init_distributed(self.device.type)
        parallel.start(self.config.seed, self.config.tensor_parallel_size)
        self.rank = torch.distributed.get_rank()
        self._lock = run_folder.lock(self.run_dir) if self.rank == 0 else None
        if self.rank == 0:
            checkpoint.sweep(self.run_dir)
        torch.distributed.barrier()
        self.state = self._start_state()
        self.position = Position.going_on(self.state, self.config.global_batch_size, self.config.seq_len)
        self.engine = self._start_engine()
        self.validation = self._start_validation()
        self.logbook = Logbook(preparation, self.state, self.device, self.rank)
        self.saver = Saver(preparation, self.engine, self.rank, self.logbook.say)
        self._done_step = self.state.step

    def run(self) -> bool:
        """Train to the end; False when somebody asked to stop before it."""
        config, done = self.config, self.state.step
        waited = time.time() - psutil.Process().create_time()
        self._say(f"ready after {seconds_text(waited)}; stop with Ctrl-C or SIGTERM at any time, nothing is lost")
        if not done:
            self._validate(0)
        plan = BatchPlan(config.global_batch_size, config.micro_batch, parallel.data_size())
        reading = self.preparation.reading
        batches = Batches(reading.tokens(), reading.order(), plan, parallel.data_rank())
        self.logbook.say_stages(done, resumed=done > 0)
        finished = train(
            engine=self.engine,
            batches=batches,
            objective=self.preparation.objective,
            schedule=self.schedule,
            first_step=done + 1,
            position=self.position.samples,
            device=self.device,
            stop=self.stop,
            at_edge=self._at_edge,
        )
        if not finished and self.state.step != self._done_step:
            self._save(self._done_step)
        self.saver.close()
        self.logbook.close()
        if self._lock is not None:
            self._lock.close()
        if not finished:
            reason = self.stop.reason or "another process"
            self._say(f"stopped by {reason} after step {self._done_step}, saved; run the same command to go on")
        return finished

    def _start_state(self) -> TrainingState:
        folder = checkpoint.newest_complete(self.run_dir, self._say)
        self._resumed_from = folder
        return checkpoint.read_state(folder) if folder else self._state_at(0, samples=0, facts={}, seconds=0.0)

    def _start_engine(self) -> Engine:
        preparation, folder = self.preparation, self._resumed_from
        model = build(
            preparation.shape,
            seed=None if folder else self.config.seed,
            activation_checkpointing=self.config.activation_checkpointing,
        )
        count = num_parameters(model)
        if count != preparation.shape.num_parameters():
            raise RunError(f"the model has {count:,} parameters, {preparation.shape.num_parameters():,} were announced")
        engine = Engine(model, self.config, parallel.data_size(), preparation.template)
        if folder:
            engine.load_state(checkpoint.read_weights(folder), checkpoint.read_moments(folder), self.state.step)
            self._say(f"going on from {folder}: step {self.state.step}, {count_text(self.state.tokens)} tokens done")
        return engine

    def _start_validation(self) -> Validation | None:
        config, paths = self.config, self.preparation.token_paths
        if not has_validation(paths):
            return None
        encoder = Encoder(config.input_tokenizer_file)
        limit = None if config.eval_tokens == "all" else config.eval_tokens
        return Validation(
            EvaluationTokens(paths.valid, config.seq_len, encoder.eos_id, limit),
            encoder.piece_bytes(),
            self.preparation.objective,
            config.micro_batch,
            self.device,
        )

    def _at_edge(self, record: StepRecord) -> None:
        config, step = self.config, record.step
        self._done_step = step
        last = step == self.schedule.num_steps
        self.logbook.add(record)
        if last or step % config.log_interval == 0 or step == 1:
            self.logbook.log()
        if last or step % config.eval_interval == 0:
            self._validate(step)
        if last or step % config.save_interval == 0:
            self._save(step)
        if not last:
            self.logbook.say_stages(step)

    def _validate(self, step: int) -> None:
        if self.validation is not None:
            self.logbook.log_validation(step, self.validation(self.engine.module))

    def _save(self, step: int) -> None:
        book = self.logbook
        self.state = self._state_at(step, self.position.samples(step), dict(book.facts), book.seconds)
        self.saver.save(self.state)
        book.draw()

    def _state_at(self, step: int, samples: int, facts: dict[str, object], seconds: float) -> TrainingState:
        preparation = self.preparation
        return TrainingState(
            step=step,
            samples=samples,
            tokens=samples * self.config.seq_len,
            seconds=seconds,
            shape=preparation.shape.as_json(),
            tokenizer_sha256=preparation.tokenizer_sha256,
            data_sha256=preparation.data_sha256,
            precision=self.config.precision,
            facts=facts,
        )

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)
