"""The records of a run in progress: the log line, `metrics.jsonl` and the watchers beside it, samples and plots.

Every process has a logbook, since its facts go into the checkpoint's state; only the first one writes and logs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zerokara.checkpoint import TrainingState
from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.progress import bytes_text, count_text, seconds_text
from zerokara.samples.mixed_order import MixedOrder
from zerokara.training import sampling
from zerokara.training.bad_samples import BadSample
from zerokara.training.compute import devices
from zerokara.training.evaluation import ValidationResult
from zerokara.training.loop import StepRecord
from zerokara.training.monitoring.drawing import Drawing
from zerokara.training.monitoring.metrics import Recorder, Watcher
from zerokara.training.monitoring.pace import Pace
from zerokara.training.monitoring.tensorboard import TensorBoard
from zerokara.training.monitoring.weights_and_biases import WeightsAndBiases
from zerokara.training.planning.consumption import stage_messages
from zerokara.training.planning.position import Position
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes.joining import Processes
from zerokara.training.sampling import Sample
from zerokara.training.task_evaluation import TaskResult

_UNLOGGED = "unlogged_losses"


class Logbook:
    """The records of one start."""

    def __init__(self, plan: RunPlan, position: Position, state: TrainingState, processes: Processes):
        """Open the records of a start that begins at `state`."""
        self._plan, self._position, self._order = plan, position, plan.data.reading.order()
        self._device, self._log = processes.device, processes.log
        self._started, self._earlier_seconds = time.monotonic(), state.seconds
        self._window: list[StepRecord] = []
        self._last_step: float | None = None
        self._peak_flops = devices.peak_flops(self._device)
        intervals = {"validation": plan.config.eval_interval, "save": plan.config.save_interval}
        self.pace = Pace(plan.schedule.num_steps, intervals)
        """Speed of the run; its `pause` is to be held around every validation and save."""
        self._has_metric = isinstance(plan.config, FinetuneRunConfig) and plan.config.metric != "loss"
        self.facts: dict[str, Any] = dict(state.facts)
        """Numbers for the checkpoint's state and the model card."""
        self._recorder: Recorder | None = None
        self._drawing: Drawing | None = None
        if processes.is_first:
            self._open(state)
        if self._device.type == "cuda" and self._peak_flops is None:
            name = torch.cuda.get_device_name(self._device)
            self._log(f"mfu is n/a: the peak of {name} is not in training/compute/devices.py")

    def _open(self, state: TrainingState) -> None:
        config, run_dir = self._plan.config, self._plan.run_dir
        watchers: dict[str, Callable[[], Watcher]] = {}
        if config.tensorboard:
            watchers["tensorboard"] = lambda: TensorBoard(run_dir, state.step)
        if config.wandb != "off":
            watchers["wandb"] = lambda: WeightsAndBiases(run_dir, config, self._log)
        self._recorder = Recorder(run_dir, state.step, watchers, self._log)
        sampling.forget_after(run_dir, state.step if state.step else -1)
        if config.plots:
            self._drawing = Drawing(run_dir, self._log)
        if state.step:
            self._record({"step": state.step, "tokens": state.tokens, "resumed": True, "seconds": state.seconds})

    @property
    def seconds(self) -> float:
        """Time spent in this run, earlier starts included."""
        return self._earlier_seconds + time.monotonic() - self._started

    def add(self, record: StepRecord) -> None:
        """Add one step to the next `log_step`; one that was skipped only counts for the speed."""
        now, paused = time.monotonic(), self.pace.take_paused()
        if self._last_step is not None:  # from the end of one step to that of the next, its edge included
            record = replace(record, seconds=now - self._last_step - paused)
        self._last_step = now
        self.pace.step(record.seconds)
        if not record.skip_reason:
            self._window.append(record)
            # In the checkpoint, so that a resumed run logs the mean over all steps since the last line.
            self.facts[_UNLOGGED] = [*self.facts.get(_UNLOGGED, []), record.loss]

    def log_step(self, layer_statistics: Mapping[str, Sequence[float]] | None = None) -> None:
        """Record and log the steps since the last call as one line; no line if all of them were skipped.

        `layer_statistics` are numbers that the model keeps of itself, each a list by layer.
        """
        if not self._window:
            return
        steps, schedule, position = self._window, self._plan.schedule, self._position
        self._window = []
        record, losses = steps[-1], self.facts.pop(_UNLOGGED)
        speed = len(steps) * schedule.batch_tokens / sum(step.seconds for step in steps)
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
            **{name: list(values) for name, values in (layer_statistics or {}).items()},
        }
        if isinstance(self._order, MixedOrder):
            counts = self._order.counts(position.samples(record.step))
            line["source_tokens"] = [count * schedule.sample_tokens for count in counts]
        self.facts["loss"] = line["loss"]
        self.facts.setdefault("first_loss", line["loss"])
        self._record(line)
        mfu = "n/a" if line["mfu"] is None else f"{line['mfu']:.1%}"
        expert_load = f"expert_load {max(line['expert_load']):.2f}  " if "expert_load" in line else ""
        self._log(
            f"step {record.step}/{schedule.num_steps}  loss {line['loss']:.4f}  lr {record.learning_rate:.2e}  "
            f"grad_norm {record.grad_norm:.3f}  {count_text(speed)} tok/s  mfu {mfu}  "
            f"memory {bytes_text(line['memory_bytes'])}  {expert_load}epoch {line['epoch']:.3f}  "
            f"{seconds_text(line['seconds_left'])} left"
        )

    def _mfu(self, tokens_per_second: float) -> float | None:
        """Model FLOPs utilization: the share of the devices' peak that the model's own arithmetic takes."""
        if not self._peak_flops:
            return None
        return tokens_per_second * self._plan.shape.flops_per_token() / (self._peak_flops * self._plan.num_processes)

    def log_skipped(self, record: StepRecord, bad_samples: Sequence[BadSample]) -> None:
        """Record and log a step that was skipped, and the samples that are to blame."""
        step = record.step
        self._record(
            {
                "step": step,
                "tokens": self._position.tokens(step),
                "skipped": record.skip_reason,
                "bad_samples": [sample.as_json() for sample in bad_samples],
            }
        )
        self._log(f"step {step}  SKIPPED, the weights are unchanged: {record.skip_reason}")
        for sample in bad_samples:
            self._log(f"step {step}    {sample}")

    def log_validation(self, step: int, result: ValidationResult) -> None:
        """Record and log a validation."""
        self._record({"step": step, "tokens": self._position.tokens(step), **result.as_json()})
        facts, loss, bits = self.facts, result.whole.loss, result.whole.bits_per_byte
        if "valid_bits_per_byte" in facts and "valid_end_nats" not in facts:  # of a version that counted control tokens
            for name in ("first_valid_bits_per_byte", "best_valid_bits_per_byte"):
                facts.pop(name, None)
            self._log("bits per byte leave control tokens out from here on: earlier ones are not compared")
        facts.setdefault("first_valid_bits_per_byte", bits)
        facts.setdefault("first_valid_loss", loss)
        facts.update(valid_loss=loss, valid_bits_per_byte=bits, valid_end_nats=result.whole.end_nats, valid_step=step)
        if bits < facts.get("best_valid_bits_per_byte", float("inf")):
            facts.update(best_valid_bits_per_byte=bits, best_valid_step=step)
        if not self._has_metric:
            self._select(step, loss)
        control = "".join(f"  {nats:.3f} nats per {name}" for name, nats in result.whole.of_control_tokens())
        self._log(f"step {step}  valid_loss {loss:.4f}  {bits:.4f} bits per byte of text{control}")
        for score in result.sources:
            self._log(f"step {step}    {score.loss:.4f}  {score.bits_per_byte:.4f} bits per byte  {score.name}")
        if self._drawing is not None and step:
            self._drawing.refresh()

    def log_task(self, step: int, result: TaskResult) -> None:
        """Record and log the metric of generated answers, which from then on chooses the best checkpoint."""
        self._record({"step": step, "tokens": self._position.tokens(step), **result.as_json("valid")})
        self.facts.setdefault(f"first_valid_{result.metric}", result.value)
        self.facts[f"valid_{result.metric}"] = result.value
        self._select(step, result.badness)
        self._log(
            f"step {step}  valid_{result.metric} {result.value:.4f}{result.interval_text}  {result.num_examples:,} "
            f"examples, {result.stopped_share:.1%} end by themselves"
        )
        for reference, answer in list(zip(result.references, result.answers, strict=True))[:3]:
            self._log(f"step {step}    {sampling.excerpt(reference, 60)} ⟪{sampling.excerpt(answer, 60)}⟫")

    def _select(self, step: int, loss: float) -> None:
        """Note the number by which the best checkpoint is chosen, the least."""
        self.facts["selection_loss"] = loss
        if step and loss < self.facts.get("best_selection_loss", float("inf")):
            self.facts.update(best_selection_loss=loss, best_step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Record what the model wrote, and log the beginning of each sampled text."""
        if self._recorder is None:
            return
        try:
            sampling.add(self._plan.run_dir, step, samples)
        except OSError as error:  # a full disk: the next validation writes again
            self._log(f"{sampling.FILE_NAME}: {error.strerror or error}")
        self._recorder.text(step, "samples", sampling.as_markdown(samples))
        for sample in samples:
            self._log(f"step {step}  {sampling.excerpt(sample.prompt, 40)}⟪{sampling.excerpt(sample.sampled)}⟫")

    def log_stages(self, step: int, resumed: bool = False) -> None:
        """Log which stages begin in the step after `step`, and for a resumed run the stage that it is in."""
        next_samples = range(self._position.samples(step), self._position.samples(step + 1))
        for message in stage_messages(self._plan.data.reading, self._order, next_samples, resumed):
            self._log(f"step {step + 1}  {message}")

    def flush(self) -> None:
        """Bring the records to disk: a checkpoint that refers to them is about to be written."""
        if self._recorder is not None:
            self._recorder.flush()

    def close(self) -> None:
        """Bring the records to disk, and draw the plots for the last time."""
        if self._recorder is not None:
            self._recorder.close()
        if self._drawing is not None:
            self._drawing.finish()

    def _record(self, line: dict[str, Any]) -> None:
        if self._recorder is not None:
            self._recorder.record(line)
