"""Starts training processes by the dozen: everything is imported once, and each start is a fork that takes no time.

Reads jobs as JSON lines on stdin and runs one at a time, as the training process of step 3 or 7 that the launcher would
start: the same entry point, one rank, and the plan as a file. Writes {"pid": …} when a job was started, {"ended": true}
when it ended, and after a further line on stdin {"code": …} (minus the signal's number, where a signal ended it).

A job: ``step`` (``train`` or ``finetune``), its ``arguments`` (--config FILE, --set KEY=VALUE, …), the worker's
``work``, ``log`` (where its output goes), ``events`` (where it records what it does, as JSON lines, see
`_record_events`), and ``fault``, done to the process from within:

========================  ============================================================================================
{}                        none
{"count_lines": path}     writes the number of lines of our code that each save runs, as JSON
{"at_line": k, "save": s} kill -9 before the k-th line of our code in the s-th save of this start, or in the next one
                          that has so many
{"nan_at": [c, …]}        the loss of the sequence at position c of the run is nan, whenever it is read
{"wild_at": [step, …]}    the gradient of the step is infinite, its loss is not
{"signal": {…}}           see `_signal_at`
{"hold": [{…}, …]}        see `_hold`
{"fill_in": [[step…], f]} the saves of these steps find the disk full, by a file f, before they write the optimizer
{"nice": n}               the process starts with this niceness
{"retry_seconds": …, …}   other values for the waiting times of `saving`
========================  ============================================================================================

All of it goes through public functions and methods, so that what lies below them can change.
"""

import contextlib
import gc
import importlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import numpy as np

import zerokara
from zerokara import checkpoint
from zerokara.base.errors import UserError
from zerokara.checkpoint import tensor_file
from zerokara.checkpoint.store import CheckpointStore
from zerokara.config.finetune_config import FinetuneConfig
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.finetuning import worker as finetuning_worker
from zerokara.finetuning.task import FINETUNING, prepared
from zerokara.samples.batches import Batches
from zerokara.training import loop, run, saving, validation, worker
from zerokara.training.compute.engine import LoneEngine
from zerokara.training.compute.zero import ZeroEngine
from zerokara.training.planning import processors, run_folder
from zerokara.training.planning.run_plan import PLAN_NAME, PRETRAINING, make_plan

PACKAGE = str(Path(zerokara.__file__).parent)
LOADED_LATE = (
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "numpy.ma",
    "sentencepiece.sentencepiece_model_pb2",
)
ENGINES = LoneEngine, ZeroEngine
Call = Callable[..., object]
HOLD_SECONDS = 60


def main() -> None:
    """Serve jobs until stdin is closed."""
    _prepare()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if not pid:
            _work(job)
        print(json.dumps({"pid": pid}), flush=True)
        # A process that has ended keeps its number until it is asked for: whoever kills it too late kills no other.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        print(json.dumps({"ended": True}), flush=True)
        sys.stdin.readline()
        print(json.dumps({"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)


def _prepare() -> None:
    """Do once what each process would do in its start: load what is loaded late, and probe for compilers."""
    for name in LOADED_LATE:
        importlib.import_module(name)
    # Threads that share so little work wait for each other, and on a busy machine for long.
    processors.threads = lambda num_processes: 1
    deepspeed.ops.__compatible_ops__.get("deepspeed_shm_comm")
    gc.collect()
    gc.freeze()  # or the first collection of each process would copy all of this one's memory


def _work(job: dict[str, Any]) -> None:
    code = 99
    try:
        output = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
        tunes, path, settings = job["step"] == "finetune", job["arguments"][1], job["arguments"][3::2]
        loaded = prepared(load(FinetuneConfig, path, settings)) if tunes else load(PretrainConfig, path, settings)
        with armed(job["fault"], job["events"]):
            task = FINETUNING if tunes else PRETRAINING
            plan = make_plan(loaded, task=task).with_settings(precision=processors.devices().precision(loaded))
            if job["work"] == ["train"]:
                run_folder.claim(plan)
                path = plan.run_dir / PLAN_NAME
            else:
                plan.write(path := Path(job["log"]).with_name(PLAN_NAME))
            code = (finetuning_worker if tunes else worker).main([str(path), *job["work"]])
    except UserError as error:
        print(error, flush=True)
        code = 2
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    except BaseException as error:
        print(repr(error), flush=True)
        raise
    finally:
        sys.stdout.flush()
        os._exit(code)


@contextlib.contextmanager
def armed(fault: dict[str, Any], events: str = os.devnull) -> Iterator[None]:
    """Let this process do to itself what a job's `fault` says, and record `events`, as long as the block lasts."""
    with contextlib.ExitStack() as patches:
        if "at_line" in fault or "count_lines" in fault:
            _trace_saves(patches, fault)
        if "nan_at" in fault:
            _spoil_losses(patches, set(fault["nan_at"]))
        if "wild_at" in fault:
            _spoil_gradients(patches, set(fault["wild_at"]))
        if "signal" in fault:
            _signal_at(patches, **fault["signal"])
        if "nice" in fault:
            os.nice(fault["nice"])
        for held in fault.get("hold", ()):
            _hold(patches, events, **held)
        if "fill_in" in fault:
            _fill_in_saves(patches, *fault["fill_in"])
        for name in ("retry_seconds", "patience_seconds", "reminder_seconds"):
            _patch(patches, saving, name.upper(), fault.get(name, getattr(saving, name.upper())))
        _record_events(patches, events)  # the outermost: what a fault holds up has not happened yet
        yield


def _patch(patches: contextlib.ExitStack, owner: object, name: str, value: object) -> None:
    patches.enter_context(mock.patch.object(owner, name, value))


def _record_events(patches: contextlib.ExitStack, path: str) -> None:
    """Record what this process does.

    {"resumed": step or null}; {"step": …} once a step is over; {"save": step} when it is asked for, {"saved": step} or
    {"refused": step, "errno": …, "file": …}; {"finishing": true} when the run waits for its last save.
    """

    def record(**event: object) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    store = CheckpointStore.save

    def storing(self: Any, state: Any, *tensors: Any) -> Path:
        try:
            folder = store(self, state, *tensors)
        except OSError as error:
            record(refused=state.step, errno=error.errno, file=Path(error.filename).name)
            raise
        record(saved=state.step)
        return folder

    def finishing(saver: Any, next_step: int | None = None) -> None:
        if next_step is None:
            record(finishing=True)

    def resumed(folder: Path | None, *_: object) -> None:
        record(resumed=checkpoint.step_of(folder) if folder else None)

    _around(patches, checkpoint, "newest_to_resume", after=resumed)
    _around(patches, loop.Trainer, "after_step", after=lambda _, trainer, step: record(step=step.step))
    _around(patches, saving.Saver, "save", before=lambda saver, state: record(save=state.step))
    _around(patches, saving.Saver, "finish", before=finishing)
    _patch(patches, CheckpointStore, "save", storing)


def _around(
    patches: contextlib.ExitStack,
    owner: object,
    name: str,
    before: Call = lambda *_: None,
    after: Call = lambda *_: None,
) -> None:
    """Call `before` with the arguments of a function, or `after` with its result and its arguments."""
    real = getattr(owner, name)

    def wrapped(*arguments: Any, **named: Any) -> Any:
        before(*arguments, **named)
        result = real(*arguments, **named)
        after(result, *arguments)
        return result

    _patch(patches, owner, name, wrapped)


def _clock(patches: contextlib.ExitStack) -> Callable[[], int]:
    """Give a function that tells which step is being made, 0 before the first."""
    now = {"step": 0}
    _around(patches, loop, "train_step", before=lambda engine, processes, loader, step, *_: now.update(step=step))
    return lambda: now["step"]


def _trace_saves(patches: contextlib.ExitStack, fault: dict[str, Any]) -> None:
    store, counts = CheckpointStore.save, []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            counts[-1] += 1
            if len(counts) >= fault.get("save", math.inf) and counts[-1] == fault["at_line"]:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    def traced(self: Any, *arguments: Any) -> Any:
        counts.append(0)
        sys.settrace(trace)
        try:
            return store(self, *arguments)
        finally:
            sys.settrace(None)
            if "count_lines" in fault:
                Path(fault["count_lines"]).write_text(json.dumps(counts), encoding="utf-8")

    _patch(patches, CheckpointStore, "save", traced)


def _spoil_losses(patches: contextlib.ExitStack, positions: set[int]) -> None:
    """Let the prediction mask of some sequences be nan on its way into the model."""
    rows: set[bytes] = set()
    at, as_tensors = Batches.at, run.as_tensors

    def watched(self: Batches, consumed: int) -> Any:
        for at_step, batch in zip(self.layout.positions(consumed, self.rank), at(self, consumed), strict=True):
            for position, row in zip(at_step, batch.inputs, strict=True):
                rows.discard(row.tobytes())
                if int(position) in positions:
                    rows.add(row.tobytes())
            yield batch

    def spoilt(batch: Any, pins_memory: bool = False) -> Any:
        tensors = as_tensors(batch, pins_memory)
        for index, row in enumerate(np.asarray(batch.inputs)):
            if row.tobytes() in rows:
                tensors[2][index] = float("nan")
        return tensors

    _patch(patches, Batches, "at", watched)
    _patch(patches, run, "as_tensors", spoilt)


def _spoil_gradients(patches: contextlib.ExitStack, steps: set[int]) -> None:
    """Let a gradient overflow: the loss is divided by next to nothing before the backward pass."""
    step = _clock(patches)

    def spoiling(accumulate: Callable[..., Any]) -> Callable[..., Any]:
        def spoilt(self: Any, batch: Any, global_tokens: float, *others: Any) -> Any:
            return accumulate(self, batch, 1e-300 if step() in steps else global_tokens, *others)

        return spoilt

    for engine in ENGINES:
        _patch(patches, engine, "accumulate", spoiling(engine.accumulate))


def _hold(
    patches: contextlib.ExitStack,
    events: str,
    at_step: int,
    what: str = "step",
    event: dict[str, object] | None = None,
    exists: str = "",
    gone: str = "",
    seconds: float = 0,
) -> None:
    """Hold the ``step`` at_step before its update, or its ``save`` before it begins, until something holds.

    Until this process has recorded `event`, until the path `exists` does or `gone` does not; and then for `seconds`
    more. So a test need not guess how fast the machine is.
    """

    def is_over() -> bool:
        recorded = event is None or f"{json.dumps(event)}\n" in Path(events).read_text(encoding="utf-8")
        return recorded and (not exists or Path(exists).exists()) and not (gone and Path(gone).exists())

    def hold() -> None:
        deadline = time.monotonic() + HOLD_SECONDS
        while not is_over():
            assert time.monotonic() < deadline, f"held for {HOLD_SECONDS} s: {event} {exists}{gone}"
            time.sleep(0.01)
        time.sleep(seconds)

    if what == "save":
        _around(patches, CheckpointStore, "save", before=lambda store, state, *_: state.step == at_step and hold())
    else:
        step = _clock(patches)
        _around(patches, loop.StepGuard, "skip_reason_of_loss", before=lambda *_: step() == at_step and hold())


def _fill_in_saves(patches: contextlib.ExitStack, steps: list[int], filler: str) -> None:
    write, left, now = tensor_file.write, set(steps), {"step": 0}

    def filling(path: Path, tensors: Any) -> str:
        if path.name.startswith("optimizer") and now["step"] in left:
            left.remove(now["step"])
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
        return write(path, tensors)

    _around(patches, CheckpointStore, "save", before=lambda store, state, *_: now.update(step=state.step))
    _patch(patches, tensor_file, "write", filling)


def _signal_at(patches: contextlib.ExitStack, number: int, where: str, at_step: int = 6, again: bool = False) -> None:
    """Send this process a signal in the middle of a ``step``, ``validation``, ``sampling``, ``save``, while it is
    ``answering`` validation examples, or in the ``start``.

    In the step `at_step`; or in the first validation, sampling or save after the first step. With `again` a second one
    follows at once.
    """
    step = _clock(patches)
    sent: list[int] = []

    def send() -> None:
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
            if again:
                time.sleep(0.05)
                os.kill(os.getpid(), number)

    def sending(owner: Any, name: str, when: Callable[[], bool] = lambda: True) -> None:
        _around(patches, owner, name, before=lambda *_, **__: when() and send())

    if where == "start":
        sending(run, "build_model")
    elif where == "step":
        for engine in ENGINES:
            sending(engine, "accumulate", lambda: step() == at_step)
    elif where == "validation":
        _patch(patches, validation, "BATCHES_BETWEEN_STOP_CHECKS", 2)
        sending(validation, "to_device", lambda: step() > 1)
    elif where == "sampling":
        sending(loop.Sampler, "__call__", lambda: step() > 1)
    elif where == "answering":
        sending(finetuning_worker, "generate", lambda: step() > 1)
    elif where == "save":
        sending(tensor_file, "write")
    else:
        raise AssertionError(where)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
