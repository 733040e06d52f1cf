"""Starts training processes by the dozen: everything is imported once, and each start is a fork that takes no time.

Reads jobs as JSON lines on stdin and runs one at a time, as the training process of step 3 that the launcher would
start: the same entry point, one rank. Writes {"pid": …} when a job was started, {"ended": true} when it ended, and
after a further line on stdin {"code": …} (minus the signal's number, where a signal ended it).

A job: ``arguments`` of the step, ``log`` (where its output goes), and ``fault``, done to the process from within:

========================  ============================================================================================
{}                        none
{"count_lines": path}     writes the number of lines of our code that each save runs, as JSON
{"at_line": k, "save": s} kill -9 before the k-th line of our code in the s-th save of this start
{"nan_at": [c, …]}        the loss of the sequence at position c of the run is nan, whenever it is read
{"wild_at": [step, …]}    the gradient of the step is infinite, its loss is not
{"signal": {…}}           see `_signal_at`
{"slow_saves": seconds}   each save takes so much longer
{"slow_steps": seconds}   each step takes so much longer
{"fill_in_save": [n, f]}  the n-th save of this start finds the disk full, by a file f, before it writes the optimizer
{"retry_seconds": …, …}   other values for the waiting times of `saving`
========================  ============================================================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import zerokara
from zerokara import config
from zerokara.checkpoint import tensor_file
from zerokara.errors import UserError
from zerokara.samples.batches import Batches
from zerokara.steps import train
from zerokara.training import engine, evaluation, launcher, loop, preparation, run_folder, saving, session, suspects

PACKAGE = str(Path(zerokara.__file__).parent)


def main() -> None:
    """Serve jobs until stdin is closed."""
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


def _work(job: dict[str, Any]) -> None:
    code = 99
    try:
        output = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_port()))
        arm(job["fault"])
        loaded = config.load(config.PretrainConfig, job["arguments"][1], job["arguments"][3::2])
        run_folder.claim(preparation.prepare(loaded, 1, launcher.precision(loaded)))
        code = train.main(job["arguments"])
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


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def arm(fault: dict[str, Any]) -> None:
    """Make this process do to itself what a job's `fault` says."""
    if "at_line" in fault or "count_lines" in fault:
        _trace_saves(fault)
    if "nan_at" in fault:
        _spoil_losses(set(fault["nan_at"]))
    if "wild_at" in fault:
        _spoil_gradients(set(fault["wild_at"]))
    if "signal" in fault:
        _signal_at(**fault["signal"])
    if "slow_saves" in fault:
        put = saving._Shelf.put
        saving._Shelf.put = lambda *args: (time.sleep(fault["slow_saves"]), put(*args))[1]  # type: ignore[method-assign]
    if "slow_steps" in fault:
        update = engine.Engine.update
        engine.Engine.update = lambda *args: (time.sleep(fault["slow_steps"]), update(*args))[1]  # type: ignore[method-assign]
    if "fill_in_save" in fault:
        _fill_in_save(*fault["fill_in_save"])
    saving.RETRY_SECONDS = fault.get("retry_seconds", saving.RETRY_SECONDS)
    saving.PATIENCE_SECONDS = fault.get("patience_seconds", saving.PATIENCE_SECONDS)
    saving.WORD_SECONDS = fault.get("word_seconds", saving.WORD_SECONDS)


def _trace_saves(fault: dict[str, Any]) -> None:
    counts: list[int] = []

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if event == "call" and frame.f_code is saving._Writing._attempt.__code__:
            counts.append(0)
        if not counts or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            counts[-1] += 1
            if (len(counts), counts[-1]) == (fault.get("save"), fault.get("at_line")):
                os.kill(os.getpid(), signal.SIGKILL)
        if event == "return" and frame.f_code is saving._Writing._attempt.__code__ and "count_lines" in fault:
            Path(fault["count_lines"]).write_text(json.dumps(counts), encoding="utf-8")
        return trace

    threading.settrace(trace)


def _spoil_losses(positions: set[int]) -> None:
    """Let the prediction mask of some sequences be nan on its way into the model."""
    rows: set[bytes] = set()
    at = Batches.at

    def watched(self: Batches, consumed: int) -> Any:
        for at_step, micro_batch in zip(self.plan.positions(consumed, self.rank), at(self, consumed), strict=True):
            for position, row in zip(at_step, micro_batch, strict=True):
                rows.discard(row[:-1].tobytes())
                if int(position) in positions:
                    rows.add(row[:-1].tobytes())
            yield micro_batch

    def spoilt(batch: Any, device: Any) -> Any:
        tensors = loop_as_tensors(batch, device)
        for index, row in enumerate(np.asarray(batch.inputs)):
            if row.tobytes() in rows:
                tensors[2][index] = float("nan")
        return tensors

    loop_as_tensors = loop.as_tensors
    Batches.at = watched  # type: ignore[method-assign]
    loop.as_tensors = suspects.as_tensors = spoilt


def _spoil_gradients(steps: set[int]) -> None:
    """Let a gradient overflow: the loss is divided by next to nothing before the backward pass."""
    accumulate, note, start = engine.Engine.accumulate, loop.StepGuard.note, loop.StepGuard.__init__
    now = {"step": 0}

    def starting(self: Any, settings: Any, state: Any) -> None:
        now["step"] = state.step + 1
        start(self, settings, state)

    def counting(self: Any, *arguments: Any) -> None:
        now["step"] += 1
        note(self, *arguments)

    def spoilt(self: Any, ids: Any, labels: Any, mask: Any, global_tokens: float, *rest: Any) -> Any:
        tokens = 1e-300 if now["step"] in steps else global_tokens
        return accumulate(self, ids, labels, mask, tokens, *rest)

    engine.Engine.accumulate = spoilt  # type: ignore[method-assign]
    loop.StepGuard.note = counting  # type: ignore[method-assign]
    loop.StepGuard.__init__ = starting  # type: ignore[method-assign]


def _fill_in_save(number: int, filler: str) -> None:
    write, saves = tensor_file.write, []

    def filling(path: Path, tensors: Any) -> str:
        if path.name.startswith("weights"):
            saves.append(path)
        elif len(saves) == number and not Path(filler).exists():
            with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as file:
                while True:
                    file.write(b"x" * 4096)
        return write(path, tensors)

    tensor_file.write = filling


def _signal_at(number: int, where: str, again: bool = False) -> None:
    """Send this process a signal in the middle of a ``step``, ``validation``, ``sampling``, ``save``, or the ``start``.

    With `again` a second one follows at once.
    """
    sent, seen_here = [], []

    def send() -> None:
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
            if again:
                time.sleep(0.05)
                os.kill(os.getpid(), number)

    if where == "start":
        build = session.build
        session.build = lambda *a, **k: (send(), build(*a, **k))[1]
    elif where == "step":
        accumulate = engine.Engine.accumulate

        def in_step(self: Any, *arguments: Any) -> Any:
            seen_here.append(1)
            if len(seen_here) == 11:
                send()
            return accumulate(self, *arguments)

        engine.Engine.accumulate = in_step  # type: ignore[method-assign]
    elif where == "validation":
        tensors = evaluation.as_tensors

        def in_validation(*arguments: Any) -> Any:
            seen_here.append(1)
            if len(seen_here) == 30:  # not in the validation before the first step
                send()
            return tensors(*arguments)

        evaluation.as_tensors = in_validation
        evaluation.BATCHES_BETWEEN_LOOKS = 2
    elif where == "sampling":
        draw = session.Sampler.__call__

        def in_sampling(self: Any, *arguments: Any) -> Any:
            if seen_here:
                send()
            seen_here.append(1)  # not in the one before the first step
            return draw(self, *arguments)

        session.Sampler.__call__ = in_sampling  # type: ignore[method-assign]
    elif where == "save":
        write = tensor_file.write
        tensor_file.write = lambda *a: (send(), write(*a))[1]
    else:
        raise AssertionError(where)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
