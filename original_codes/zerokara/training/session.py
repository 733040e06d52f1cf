"""One start of a training run in one process: from a preparation to the last step, or to where it was stopped.

Puts the parts together and hands the loop what is to happen at each step's edge: record, validate, save, draw.
"""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
import torch
import torch.distributed

from zerokara import checkpoint
from zerokara.checkpoint import TrainingState
from zerokara.errors import RunError
from zerokara.model import parallel
from zerokara.model.megatron import build
from zerokara.progress import bytes_text, count_text, seconds_text
from zerokara.samples.batches import Batches, BatchPlan
from zerokara.samples.evaluation import EvaluationTokens
from zerokara.samples.mixed_order import MixedOrder
from zerokara.tokenizer.encoder import Encoder
from zerokara.training import devices, metrics, plots, run_folder
from zerokara.training.consumption import stages_told
from zerokara.training.engine import Engine, init_distributed
from zerokara.training.evaluation import Validation, ValidationResult
from zerokara.training.loop import StepRecord, train
from zerokara.training.preparation import Preparation, cpu_threads, has_validation
from zerokara.training.stopping import StopRequest


class Session:
    """A training process at work. `run` does it all."""

    def __init__(self, preparation: Preparation):
        self.preparation, self.config = preparation, preparation.config
        self.schedule, self.run_dir = preparation.schedule, preparation.run_dir
        self.order = preparation.reading.order()
        self.stop = StopRequest()
        self.stop.listen()
        self._started = time.monotonic()
        self.device = devices.local_device(int(os.environ.get("LOCAL_RANK", "0")))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(cpu_threads(preparation.num_processes))
        init_distributed(self.device.type)
        parallel.start(self.config.seed)
        self.rank = torch.distributed.get_rank()
        self._lock = run_folder.lock(self.run_dir) if self.rank == 0 else None
        if self.rank == 0:
            checkpoint.sweep(self.run_dir)
        torch.distributed.barrier()
        self.state = self._start_state()
        self.engine = self._start_engine()
        self.validation = self._start_validation()
        self.recorder = metrics.Recorder(self.run_dir, self.config, self.state.step) if self.rank == 0 else None
        self._window: list[StepRecord] = []
        self._done_step = self.state.step
        self._facts = dict(self.state.facts)
        self._earlier_seconds = self.state.seconds

    def run(self) -> bool:
        """Train to the end; False when somebody asked to stop before it."""
        config, first_step = self.config, self.state.step + 1
        waited = time.time() - psutil.Process().create_time()
        self._say(f"ready after {seconds_text(waited)}; stop with Ctrl-C or SIGTERM at any time, nothing is lost")
        if first_step == 1:
            self._validate(0)
        plan = BatchPlan(config.global_batch_size, config.micro_batch_size, self.preparation.num_processes)
        batches = Batches(self.preparation.reading.tokens(), self.order, plan, self.rank)
        self._say_stages(self.state.step, resumed=first_step > 1)
        finished = train(
            engine=self.engine,
            batches=batches,
            objective=self.preparation.objective,
            schedule=self.schedule,
            first_step=first_step,
            position=self._samples_after,
            device=self.device,
            stop=self.stop,
            at_edge=self._at_edge,
        )
        if not finished and self.state.step != self._done_step:
            self._save(self._done_step)
        if self.recorder is not None:
            self.recorder.close()
            assert self._lock is not None
            self._lock.close()
            plots.draw_loss(self.run_dir)
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
        torch.manual_seed(self.config.seed)
        model = build(preparation.shape)
        count = sum(parameter.numel() for parameter in model.parameters())
        if count != preparation.shape.num_parameters():
            raise RunError(f"the model has {count:,} parameters, {preparation.shape.num_parameters():,} were announced")
        if folder:
            model.load_state_dict(checkpoint.read_weights(folder), strict=False, assign=False)
        engine = Engine(model, self.config, preparation.num_processes, preparation.template)
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
            config.micro_batch_size,
            self.device,
        )

    def _samples_after(self, step: int) -> int:
        """Sequences consumed after `step`; counted on from the checkpoint, whose global batch may have been another."""
        return self.state.samples + (step - self.state.step) * self.config.global_batch_size

    def _at_edge(self, record: StepRecord) -> None:
        config, step = self.config, record.step
        self._done_step = step
        last = step == self.schedule.num_steps
        self._window.append(record)
        if last or step % config.log_interval == 0 or step == 1:
            self._log(record)
        if last or step % config.eval_interval == 0:
            self._validate(step)
        if last or step % config.save_interval == 0:
            self._save(step)
        if not last:
            self._say_stages(step)

    def _say_stages(self, step: int, resumed: bool = False) -> None:
        """Tell which stages begin in the step after `step`, or in which one a resumed run stands."""
        next_samples = range(self._samples_after(step), self._samples_after(step + 1))
        for words in stages_told(self.preparation.reading, self.order, next_samples, resumed):
            self._say(f"step {step + 1}  {words}")

    def _log(self, record: StepRecord) -> None:
        steps, schedule = self._window, self.schedule
        self._window = []
        seconds = sum(one.seconds for one in steps)
        speed = len(steps) * schedule.batch_tokens / seconds
        peak = devices.peak_flops(self.device)
        mfu = None
        if peak:
            mfu = speed * self.preparation.shape.flops_per_token() / (peak * self.preparation.num_processes)
        line: dict[str, Any] = {
            "step": record.step,
            "tokens": self._samples_after(record.step) * schedule.seq_len,
            "epoch": self._samples_after(record.step) / schedule.samples_per_epoch,
            "loss": sum(one.loss for one in steps) / len(steps),
            "learning_rate": record.learning_rate,
            "grad_norm": record.grad_norm,
            "tokens_per_second": speed,
            "mfu": mfu,
            "memory_bytes": devices.peak_memory(self.device),
            "seconds": self._seconds(),
        }
        if isinstance(self.order, MixedOrder):
            counts = self.order.counts(self._samples_after(record.step))
            line["source_tokens"] = [count * schedule.seq_len for count in counts]
        self._facts["loss"] = line["loss"]
        self._facts.setdefault("first_loss", line["loss"])
        if self.recorder is not None:
            self.recorder.record(line)
        left = (schedule.num_steps - record.step) * seconds / len(steps)
        self._say(
            f"step {record.step}/{schedule.num_steps}  loss {line['loss']:.4f}  lr {record.learning_rate:.2e}  "
            f"norm {record.grad_norm:.3f}  {count_text(speed)} tok/s  mfu {'n/a' if mfu is None else f'{mfu:.1%}'}  "
            f"memory {bytes_text(line['memory_bytes'])}  epoch {line['epoch']:.3f}  {seconds_text(left)} left"
        )

    def _validate(self, step: int) -> ValidationResult | None:
        if self.validation is None:
            return None
        result = self.validation(self.engine.module)
        if self.recorder is not None:
            self.recorder.record(
                {
                    "step": step,
                    "tokens": self._samples_after(step) * self.schedule.seq_len,
                    "valid_loss": result.loss,
                    "valid_bits_per_byte": result.bits_per_byte,
                    "valid_tokens": result.num_tokens,
                }
            )
        self._facts.setdefault("first_valid_bits_per_byte", result.bits_per_byte)
        self._facts.setdefault("first_valid_loss", result.loss)
        self._facts.update(valid_loss=result.loss, valid_bits_per_byte=result.bits_per_byte)
        self._say(f"step {step}  validation loss {result.loss:.4f}  {result.bits_per_byte:.4f} bits per byte")
        return result

    def _save(self, step: int) -> None:
        weights: dict[str, torch.Tensor] = {}
        moments: dict[str, torch.Tensor] = {}
        started = time.monotonic()
        # Every process takes part in gathering; the first one keeps what is gathered.
        for kept, gathered in ((weights, self.engine.weights()), (moments, self.engine.moments())):
            for name, tensor in gathered:
                if self.rank == 0:
                    kept[name] = tensor
        self.state = self._state_at(step, self._samples_after(step), dict(self._facts), self._seconds())
        if self.rank == 0:
            folder = checkpoint.save(self.run_dir, self.state, weights, moments)
            checkpoint.prune(self.run_dir, self.config.keep_last, self.config.keep_every)
            plots.draw_loss(self.run_dir)
            self._say(f"step {step}  saved {folder} in {seconds_text(time.monotonic() - started)}")
        torch.distributed.barrier()

    def _state_at(self, step: int, samples: int, facts: dict[str, Any], seconds: float) -> TrainingState:
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

    def _seconds(self) -> float:
        """Time spent in this run, earlier starts included."""
        return self._earlier_seconds + time.monotonic() - self._started

    def _say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)
