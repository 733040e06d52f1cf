"""What is told and recorded of a run while it goes on: the log line, `metrics.jsonl` and its kin, the plots.

Every process has a logbook, for its facts go into the checkpoint's state; only the first one writes and speaks.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from zerokara.checkpoint import TrainingState
from zerokara.progress import bytes_text, count_text, seconds_text
from zerokara.samples.mixed_order import MixedOrder
from zerokara.training import devices, metrics, plots
from zerokara.training.consumption import stages_told
from zerokara.training.evaluation import ValidationResult
from zerokara.training.loop import StepRecord
from zerokara.training.position import Position
from zerokara.training.preparation import Preparation


class Logbook:
    """One start's records."""

    def __init__(self, preparation: Preparation, state: TrainingState, device: torch.device, rank: int):
        self._preparation, self._device, self._rank = preparation, device, rank
        config = preparation.config
        self._position = Position.going_on(state, config.global_batch_size, config.seq_len)
        self._order = preparation.reading.order()
        self._started, self._earlier_seconds = time.monotonic(), state.seconds
        self._window: list[StepRecord] = []
        self.facts: dict[str, Any] = dict(state.facts)
        """Numbers for the checkpoint's state and the model card."""
        self._recorder = metrics.Recorder(preparation.run_dir, config, state.step) if rank == 0 else None

    @property
    def seconds(self) -> float:
        """Time spent in this run, earlier starts included."""
        return self._earlier_seconds + time.monotonic() - self._started

    def add(self, record: StepRecord) -> None:
        """Take in one step; it is told by the next `log`."""
        self._window.append(record)

    def log(self) -> None:
        """Record and tell the steps since the last call, as one line."""
        steps, schedule, position = self._window, self._preparation.schedule, self._position
        self._window = []
        record, seconds = steps[-1], sum(one.seconds for one in steps)
        speed = len(steps) * schedule.batch_tokens / seconds
        peak = devices.peak_flops(self._device)
        mfu = None
        if peak:
            mfu = speed * self._preparation.shape.flops_per_token() / (peak * self._preparation.num_processes)
        line: dict[str, Any] = {
            "step": record.step,
            "tokens": position.tokens(record.step),
            "epoch": position.samples(record.step) / schedule.samples_per_epoch,
            "loss": sum(one.loss for one in steps) / len(steps),
            "learning_rate": record.learning_rate,
            "grad_norm": record.grad_norm,
            "tokens_per_second": speed,
            "mfu": mfu,
            "memory_bytes": devices.peak_memory(self._device),
            "seconds": self.seconds,
        }
        if isinstance(self._order, MixedOrder):
            counts = self._order.counts(position.samples(record.step))
            line["source_tokens"] = [count * schedule.seq_len for count in counts]
        self.facts["loss"] = line["loss"]
        self.facts.setdefault("first_loss", line["loss"])
        self._record(line)
        left = (schedule.num_steps - record.step) * seconds / len(steps)
        self.say(
            f"step {record.step}/{schedule.num_steps}  loss {line['loss']:.4f}  lr {record.learning_rate:.2e}  "
            f"norm {record.grad_norm:.3f}  {count_text(speed)} tok/s  mfu {'n/a' if mfu is None else f'{mfu:.1%}'}  "
            f"memory {bytes_text(line['memory_bytes'])}  epoch {line['epoch']:.3f}  {seconds_text(left)} left"
        )

    def log_validation(self, step: int, result: ValidationResult) -> None:
        """Record and tell what a validation found."""
        self._record(
            {
                "step": step,
                "tokens": self._position.tokens(step),
                "valid_loss": result.loss,
                "valid_bits_per_byte": result.bits_per_byte,
                "valid_tokens": result.num_tokens,
            }
        )
        self.facts.setdefault("first_valid_bits_per_byte", result.bits_per_byte)
        self.facts.setdefault("first_valid_loss", result.loss)
        self.facts.update(valid_loss=result.loss, valid_bits_per_byte=result.bits_per_byte)
        self.say(f"step {step}  validation loss {result.loss:.4f}  {result.bits_per_byte:.4f} bits per byte")

    def say_stages(self, step: int, resumed: bool = False) -> None:
        """Tell which stages begin in the step after `step`, or in which one a resumed run stands."""
        next_samples = range(self._position.samples(step), self._position.samples(step + 1))
        for words in stages_told(self._preparation.reading, self._order, next_samples, resumed):
            self.say(f"step {step + 1}  {words}")

    def draw(self) -> None:
        """Refresh the plots in the run folder."""
        if self._rank == 0:
            plots.draw_loss(self._preparation.run_dir)

    def say(self, text: str) -> None:
        """Print a line, once for all processes."""
        if self._rank == 0:
            print(text, flush=True)

    def close(self) -> None:
        """Flush what was recorded to disk, and draw it."""
        if self._recorder is not None:
            self._recorder.close()
        self.draw()

    def _record(self, line: dict[str, Any]) -> None:
        if self._recorder is not None:
            self._recorder.record(line)
