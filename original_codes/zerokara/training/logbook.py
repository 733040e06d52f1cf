"""The records of a run in progress: the log line, `metrics.jsonl` and the trackers beside it, and samples."""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from zerokara.base.progress import bytes_text, count_text, seconds_text
from zerokara.checkpoint import TrainingState
from zerokara.samples.order import MixedOrder
from zerokara.training import sample_texts
from zerokara.training.guards import StepRecord
from zerokara.training.monitoring.step_metrics import Plots, Recorder, TensorBoard, Tracker, WeightsAndBiases
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.planning.schedule import stage_title
from zerokara.training.processes.joining import Processes, peak_memory
from zerokara.training.sample_texts import Sample
from zerokara.training.validation import ValidationResult

OVERFITTING = (
    "More data, a higher weight_decay, fewer epochs or a lower lr may help; step 4 takes the best checkpoint if it is "
    "much better"
)
_UNLOGGED = "unlogged_losses"

PEAK_BF16_FLOPS = {
    # NVIDIA: the datasheet of each; those that state sparse numbers, halved.
    "A100": 312e12,
    "H100": 989e12,  # SXM
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989e12,
    "H200": 989e12,  # SXM
    "H200 NVL": 835e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "B300": 2250e12,  # HGX; Blackwell Ultra is faster in fp4 alone
    "GB300": 2500e12,
    "L40S": 362e12,
    "RTX A6000": 155e12,
    "RTX 6000 Ada": 364e12,
    # The architecture whitepapers of Ampere GA102, Ada and Blackwell, with fp32 accumulation, as training has it.
    "RTX 3090": 71e12,
    "RTX 3090 Ti": 80e12,
    "RTX 4090": 165e12,
    "RTX 5090": 210e12,
}
"""Dense bf16 operations a second, by words of the name that torch gives."""
_OTHER_CHIP = re.compile(r"\b(Laptop|D)\b")
"""Words of a name that make another card of it, with fewer cores or a lower clock."""


class Logbook:
    """The records of one start: every process keeps the facts for the checkpoint's state, the first writes and logs."""

    def __init__(self, plan: RunPlan, samples: Callable[[int], int], state: TrainingState, processes: Processes):
        """Open the records of a start that begins at `state`; `samples` gives the sequences read after a step."""
        self._plan, self._samples, self._order = plan, samples, plan.data.training.order()
        self._device, self._log = processes.device, processes.log
        self._started = time.monotonic() - state.seconds
        self._window: list[StepRecord] = []
        self._paused, self._first_step = 0.0, (0, 0.0)  # the latter once it is done: its number, and when it ended
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else ""
        self._peak_flops = peak_flops(name)
        if name and self._peak_flops is None:
            self._log(f"mfu is n/a: the peak of {name} is not in training/logbook.py")
        self.facts: dict[str, Any] = dict(state.facts)
        """Numbers for the checkpoint's state and the model card."""
        self._recorder: Recorder | None = None
        if processes.is_first:
            config, run_dir = plan.resolved, plan.run_dir
            trackers: dict[str, Callable[[], Tracker]] = {}
            if config.tensorboard:
                trackers["tensorboard"] = lambda: TensorBoard(run_dir, state.step)
            if config.wandb != "off":
                trackers["wandb"] = lambda: WeightsAndBiases(run_dir, state.step, config)
            if config.plots:
                trackers["plots"] = lambda: Plots(run_dir)
            is_due = state.step % config.eval_interval == 0 and state.facts.get("valid_step") != state.step
            self._recorder = Recorder(run_dir, state.step, trackers, repeats_validation=is_due)
        if state.step:
            self._record(state.step, {"resumed": True, "seconds": state.seconds})
        elif processes.is_first:  # those of a start that died before its first checkpoint
            (plan.run_dir / sample_texts.FILE_NAME).unlink(missing_ok=True)
        self._last_step = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time spent in this run, earlier starts included."""
        return time.monotonic() - self._started

    @property
    def _seconds_allowed(self) -> float:
        hours = self._plan.resolved.max_hours
        return math.inf if hours == "auto" else max(0.0, 3600 * hours - self.seconds)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time of the block, a validation or a save, out of the step times."""
        started = time.monotonic()
        yield
        self._paused += time.monotonic() - started

    def add(self, record: StepRecord) -> None:
        """Add one step to the next `log_step`, unless it was skipped."""
        now = time.monotonic()
        seconds = now - self._last_step - self._paused
        self._last_step, self._paused = now, 0.0
        if not self._first_step[0]:
            self._first_step = record.step, now
        if not record.skip_reason:
            self._window.append(replace(record, seconds=seconds))
            # In the checkpoint, so that a resumed run logs the mean over all steps since the last line.
            self.facts[_UNLOGGED] = [*self.facts.get(_UNLOGGED, []), record.loss]

    def log_step(self, layer_statistics: Mapping[str, Sequence[float]] | None = None) -> None:
        """Record and log the steps since the last call, if not all were skipped; `layer_statistics` are by layer."""
        if not self._window:
            return
        steps, self._window, schedule = self._window, [], self._plan.schedule
        record, losses, samples = steps[-1], self.facts.pop(_UNLOGGED), self._samples(steps[-1].step)
        speed = len(steps) * schedule.batch_tokens / sum(step.seconds for step in steps)
        causal, palm, share = None, None, "n/a"
        if self._peak_flops:  # model FLOPs utilization: the share of the peak that the model's own arithmetic takes
            per_flop = speed / (self._peak_flops * self._plan.num_processes)
            pairs = sum(step.num_pairs for step in steps) / (len(steps) * self._plan.resolved.global_batch)
            causal, palm = (per_flop * self._plan.shape.flops_per_token(of) for of in (pairs, None))
            share = f"{causal:.1%} causal, {palm:.1%} palm"
        # At the speed of this start, pauses included, without its first step, which is slow.
        first, ended = self._first_step
        pace = (self._last_step - ended) / (record.step - first) if record.step > first else record.seconds
        line: dict[str, Any] = {
            "epoch": samples / schedule.samples_per_epoch,
            "loss": sum(losses) / len(losses),
            "learning_rate": record.learning_rate,
            "grad_norm": record.grad_norm,
            "tokens_per_second": speed,
            "mfu_causal": causal,
            "mfu_palm": palm,
            "memory_bytes": peak_memory(self._device),
            "seconds": self.seconds,
            "seconds_left": min((schedule.num_steps - record.step) * pace, self._seconds_allowed),
            **{name: list(values) for name, values in (layer_statistics or {}).items()},
        }
        if isinstance(self._order, MixedOrder):
            line["source_tokens"] = [count * schedule.sample_tokens for count in self._order.counts(samples)]
        self.facts["loss"] = line["loss"]
        self.facts.setdefault("first_loss", line["loss"])
        self._record(record.step, line)
        expert_load = f"expert_load {max(line['expert_load']):.2f}  " if "expert_load" in line else ""
        self._log(
            f"step {record.step}/{schedule.num_steps}  loss {line['loss']:.4f}  lr {record.learning_rate:.2e}  "
            f"grad_norm {record.grad_norm:.3f}  {count_text(speed)} tok/s  mfu {share}  "
            f"memory {bytes_text(line['memory_bytes'])}  {expert_load}epoch {line['epoch']:.3f}  "
            f"{seconds_text(line['seconds_left'])} left"
        )

    def log_skipped(self, record: StepRecord, bad_samples: list[dict[str, Any]]) -> None:
        """Record and log a step that was skipped, and the samples that are to blame."""
        self._record(record.step, {"skipped": record.skip_reason, "bad_samples": bad_samples})
        self._log(f"step {record.step}  SKIPPED, the weights are unchanged: {record.skip_reason}")
        for sample in bad_samples:
            ranges = [f"documents {one['first']} to {one['last']} of {one['source']}" for one in sample["documents"]]
            self._log(f"step {record.step}    loss {float(sample['loss']):.4f}: {', '.join(ranges)}")

    def log_validations(self, step: int, results: Sequence[ValidationResult]) -> None:
        """Record and log the validations after a step; the last one chooses the best checkpoint."""
        facts = self.facts
        for result in results:
            self._record(step, result.line)
            for name, value in result.facts.items():
                facts |= {name: value} if step else {name: value, f"first_{name}": value}
            for message in result.messages:
                self._log(f"step {step}  {message}")
        if facts["valid_bits_per_byte"] < facts.get("best_valid_bits_per_byte", math.inf):
            facts.update(best_valid_bits_per_byte=facts["valid_bits_per_byte"], best_valid_step=step)
        before = facts.get("selection_loss")  # None after a checkpoint where it was not finite
        is_worse = before is not None and results[-1].badness > before
        facts["worse_in_row"] = facts.get("worse_in_row", 0) + 1 if is_worse else 0
        facts.update(valid_step=step, selection_loss=results[-1].badness)
        if not step and math.isfinite(results[-1].badness):
            facts["selection_loss_at_start"] = results[-1].badness
        if step and results[-1].badness < facts.get("best_selection_loss", math.inf):
            facts.update(best_selection_loss=results[-1].badness, best_step=step)
        if facts["worse_in_row"] == 2:
            is_better = facts["best_selection_loss"] < facts.get("selection_loss_at_start", math.inf)
            best = f"at step {facts['best_step']:,}" if is_better else "before the training"
            warning = f"validation became worse twice in a row; it was best {best}"
            self._log(f"step {step}  warning: {warning}. {OVERFITTING}; Ctrl-C saves and ends the run here")
            facts.setdefault("warning", f"at step {step:,} {warning}. {OVERFITTING}")

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Record what the model wrote, and log the beginning of each sampled text."""
        if self._recorder is None:
            return
        try:
            sample_texts.add(self._plan.run_dir, step, samples)
        except OSError as error:  # a full disk: the next validation writes again
            self._log(f"{sample_texts.FILE_NAME}: {error.strerror or error}")
        self._recorder.show(step, {"samples": sample_texts.as_markdown(samples)})
        for sample in samples:
            self._log(f"step {step}  {sample_texts.excerpt(sample.prompt, 40)}⟪{sample_texts.excerpt(sample.sampled)}⟫")

    def log_stages(self, step: int) -> None:
        """Log which stages of a curriculum begin in the step after `step`."""
        firsts = self._order.firsts if isinstance(self._order, MixedOrder) else ()
        next_samples, training = range(self._samples(step), self._samples(step + 1)), self._plan.data.training
        for number in (number for number, first in enumerate(firsts) if first in next_samples and firsts[1:]):
            self._log(f"step {step + 1}  stage {number + 1} of {len(firsts)} begins: {stage_title(training, number)}")

    def flush(self) -> None:
        """Bring the records to disk: a checkpoint that refers to them is about to be written."""
        if self._recorder is not None:
            self._recorder.flush()

    def close(self) -> None:
        """Bring the records to disk, and end."""
        if self._recorder is not None:
            self._recorder.close()

    def _record(self, step: int, numbers: Mapping[str, Any]) -> None:
        if self._recorder is not None:
            tokens = self._samples(step) * self._plan.schedule.sample_tokens
            self._recorder.record({"step": step, "tokens": tokens, **numbers})


def peak_flops(name: str) -> float | None:
    """Dense bf16 operations a second of the GPU with this name, by the entry with the most of its words."""
    fitting = [part for part in PEAK_BF16_FLOPS if re.search(rf"\b{re.escape(part)}\b", name)]
    return PEAK_BF16_FLOPS[max(fitting, key=len)] if fitting and not _OTHER_CHIP.search(name) else None
