"""What is told and recorded of a run while it goes on: the log line, `metrics.jsonl` and its kin, samples, the plots.

Every process has a logbook, for its facts go into the checkpoint's state; only the first one writes and speaks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerokara.checkpoint import TrainingState
from zerokara.progress import bytes_text, count_text, log, seconds_text
from zerokara.samples.mixed_order import MixedOrder
from zerokara.training import sampling
from zerokara.training.bad_samples import BadSample
from zerokara.training.compute import devices
from zerokara.training.evaluation import ValidationResult
from zerokara.training.loop import StepRecord
from zerokara.training.monitoring import metrics
from zerokara.training.monitoring.drawing import Drawing
from zerokara.training.monitoring.pace import Pace
from zerokara.training.planning.consumption import stages_told
from zerokara.training.planning.position import Position
from zerokara.training.planning.run_plan import RunPlan as Preparation
from zerokara.training.sampling import Sample

_UNLOGGED = "unlogged_losses"


class Logbook:
    """One start's records."""

    def __init__(self, preparation: Preparation, state: TrainingState, device: torch.device, rank: int):
        self._preparation, self._device, self._rank = preparation, device, rank
        config = preparation.config
        self._position = Position.going_on(state, config.global_batch_size, preparation.schedule.sample_tokens)
        self._order = preparation.reading.order()
        self._started, self._earlier_seconds = time.monotonic(), state.seconds
        self._window: list[StepRecord] = []
        self.pace = Pace(
            preparation.schedule.num_steps, {"validation": config.eval_interval, "save": config.save_interval}
        )
        """How fast the run goes; whoever validates or saves measures it here."""
        self.facts: dict[str, Any] = dict(state.facts)
        """Numbers for the checkpoint's state and the model card."""
        self._recorder: metrics.Recorder | None = None
        self._drawing: Drawing | None = None
        if rank == 0:
            self._open(state)
        if device.type == "cuda" and devices.peak_flops(device) is None:
            name = torch.cuda.get_device_name(device)
            self.log(f"mfu is n/a: the peak of {name} is not in training/compute/devices.py")

    def _open(self, state: TrainingState) -> None:
        run_dir, config = self._preparation.run_dir, self._preparation.config
        self._recorder = metrics.Recorder(run_dir, config, state.step, self.log)
        sampling.forget_after(run_dir, state.step if state.step else -1)
        if config.plots:
            self._drawing = Drawing(run_dir, self.log)
        if state.step:
            self._record({"step": state.step, "tokens": state.tokens, "resumed": True, "seconds": state.seconds})

    @property
    def seconds(self) -> float:
        """Time spent in this run, earlier starts included."""
        return self._earlier_seconds + time.monotonic() - self._started

    def add(self, record: StepRecord) -> None:
        """Take in one step; it is told by the next `log_step`, or if it was skipped by `log_skipped`."""
        self.pace.step(record.seconds)
        if not record.skip_reason:
            self._window.append(record)
            # A start that goes on from here tells the mean of all steps since the last line, as if there were no break.
            self.facts[_UNLOGGED] = [*self.facts.get(_UNLOGGED, []), record.loss]

    def log_step(self, statistics: Mapping[str, Sequence[float]] | None = None) -> None:
        """Record and tell the steps since the last call, as one line; none where all of them were skipped.

        `statistics` are further numbers, each by layer, that the model has of itself.
        """
        if not self._window:
            return
        steps, schedule, position = self._window, self._preparation.schedule, self._position
        self._window = []
        record, losses = steps[-1], self.facts.pop(_UNLOGGED)
        speed = len(steps) * schedule.batch_tokens / sum(one.seconds for one in steps)
        line: dict[str, Any] = {
            "step": record.step,
            "tokens": position.tokens(record.step),
            "epoch": position.samples(record.step) / schedule.samples_per_epoch,
            "loss": sum(losses) / len(losses),
            "learning_rate": record.learning_rate,
            "grad_norm": record.grad_norm,
            "tokens_per_second": speed,
            "mfu": self._mfu(speed),
            "memory_bytes": devices.peak_memory(self._device),
            "seconds": self.seconds,
            "seconds_left": self.pace.seconds_left(record.step),
            **{name: list(values) for name, values in (statistics or {}).items()},
        }
        if isinstance(self._order, MixedOrder):
            counts = self._order.counts(position.samples(record.step))
            line["source_tokens"] = [count * schedule.sample_tokens for count in counts]
        self.facts["loss"] = line["loss"]
        self.facts.setdefault("first_loss", line["loss"])
        self._record(line)
        mfu = "n/a" if line["mfu"] is None else f"{line['mfu']:.1%}"
        busiest = f"busiest expert {max(line['expert_load']):.2f}  " if "expert_load" in line else ""
        self.log(
            f"step {record.step}/{schedule.num_steps}  loss {line['loss']:.4f}  lr {record.learning_rate:.2e}  "
            f"norm {record.grad_norm:.3f}  {count_text(speed)} tok/s  mfu {mfu}  "
            f"memory {bytes_text(line['memory_bytes'])}  {busiest}epoch {line['epoch']:.3f}  "
            f"{seconds_text(line['seconds_left'])} left"
        )

    def _mfu(self, tokens_per_second: float) -> float | None:
        """The share of the devices' peak that the model's own arithmetic takes (`ModelShape.flops_per_token`)."""
        preparation, peak = self._preparation, devices.peak_flops(self._device)
        if not peak:
            return None
        return tokens_per_second * preparation.shape.flops_per_token() / (peak * preparation.num_processes)

    def log_skipped(self, record: StepRecord, bad_samples: Sequence[BadSample]) -> None:
        """Record and tell a step that was skipped, and the sequences that are to blame."""
        step = record.step
        self._record(
            {
                "step": step,
                "tokens": self._position.tokens(step),
                "skipped": record.skip_reason,
                "bad_samples": [sample.as_json() for sample in bad_samples],
            }
        )
        self.log(f"step {step}  SKIPPED, the weights are as before: {record.skip_reason}")
        for sample in bad_samples:
            self.log(f"step {step}    {sample}")

    def log_validation(self, step: int, result: ValidationResult) -> None:
        """Record and tell what a validation found."""
        self._record({"step": step, "tokens": self._position.tokens(step), **result.as_json()})
        facts, bits = self.facts, result.bits_per_byte
        facts.setdefault("first_valid_bits_per_byte", bits)
        facts.setdefault("first_valid_loss", result.loss)
        facts.update(valid_loss=result.loss, valid_bits_per_byte=bits, valid_step=step)
        if bits < facts.get("best_valid_bits_per_byte", float("inf")):
            facts.update(best_valid_bits_per_byte=bits, best_valid_step=step)
        self.log(f"step {step}  validation loss {result.loss:.4f}  {bits:.4f} bits per byte")
        for score in result.sources:
            self.log(f"step {step}    {score.loss:.4f}  {score.bits_per_byte:.4f} bits per byte  {score.name}")
        if self._drawing is not None and step:
            self._drawing.refresh()

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Record what the model wrote, and tell how it begins."""
        if self._recorder is None:
            return
        try:
            sampling.add(self._preparation.run_dir, step, samples)
        except OSError as error:  # a full disk: the next validation writes again
            self.log(f"{sampling.FILE_NAME}: {error.strerror or error}")
        self._recorder.text(step, "samples", sampling.as_markdown(samples))
        for sample in samples:
            self.log(f"step {step}  {sampling.excerpt(sample.prompt, 40)}⟪{sampling.excerpt(sample.greedy)}⟫")

    def say_stages(self, step: int, resumed: bool = False) -> None:
        """Tell which stages begin in the step after `step`, or in which one a resumed run stands."""
        next_samples = range(self._position.samples(step), self._position.samples(step + 1))
        for words in stages_told(self._preparation.reading, self._order, next_samples, resumed):
            self.log(f"step {step + 1}  {words}")

    def flush(self) -> None:
        """Bring to disk what was recorded: a checkpoint is about to say that it happened."""
        if self._recorder is not None:
            self._recorder.flush()

    def log(self, text: str) -> None:
        """Print a line, once for all processes."""
        if self._rank == 0:
            log(text)

    def close(self) -> None:
        """Flush what was recorded to disk, and draw it."""
        if self._recorder is not None:
            self._recorder.close()
        if self._drawing is not None:
            self._drawing.finish()

    def _record(self, line: dict[str, Any]) -> None:
        if self._recorder is not None:
            self._recorder.record(line)
