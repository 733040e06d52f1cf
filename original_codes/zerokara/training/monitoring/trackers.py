"""What shows a run while it is trained: its plots, TensorBoard, and Weights & Biases. None of them delays a step.

TensorBoard (2.21): each start writes a file of its own. Its first entry says from which step on its numbers replace
those of earlier files, so that each step is shown once (of a text that was written again, its reader shows both).

Weights & Biases (wandb 0.31.0): a run keeps its id over all its starts, so that online a resumed run extends the same
curves. Offline, each start writes a folder of its own; ``WANDB_RESUME=allow WANDB_PROGRAM=zerokara wandb sync <run
folder>/wandb/offline-run-*`` sends them in the order of their starts (core/internal/runupserter/runupserter.go: without
WANDB_RESUME each would replace the one before; without WANDB_PROGRAM the path of the `wandb` program is sent). What is
sent: numbers, sample texts, settings with only the last name of each path, and the machine's load; no folder, user,
host, git remote, program, list of packages or log.
"""

from __future__ import annotations

import html
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

from zerokara.config.pretrain_config import RunConfig
from zerokara.durable import write_json
from zerokara.errors import redacted

Values = Mapping[str, float | str]
"""Numbers of a step by the name of their curve, and texts, in Markdown."""

_PLOTS_MODULE = "zerokara.training.monitoring.plots"
_DRAWING_SECONDS = 60.0
"""How long the end of a run waits for its last plots."""
INIT_SECONDS = 60
"""How long W&B's server may take to answer when the run is opened."""
_FINISH_SECONDS = 60
"""How long wandb may send the rest at the end of the run; what is left stays in the folder, for ``wandb sync``."""
_CLOSE_SECONDS = 90.0
"""How long the end of a run waits for all of wandb."""
_PRIVATE: dict[str, Any] = {
    "console": "off",  # the log has folder names
    "disable_git": True,
    "save_code": False,
    "x_disable_meta": True,  # program, its arguments, folder, interpreter, user, host
    "x_save_requirements": False,
    "host": "",
    "program": "zerokara",
}
"""By default wandb sends all of this."""


class Plots:
    """Draws the plots of a run in a process of its own, since drawing is seconds of Python.

    There is never more than one, during training with the lowest priority, and after each a pause of ten times as long.
    A failure ends nothing but the drawing, and is logged once.
    """

    def __init__(self, run_dir: Path, log: Callable[[str], None]):
        self._run_dir, self._log = run_dir, log
        self._process: subprocess.Popen[bytes] | None = None
        self._started = self._paused_until = 0.0
        self._has_failed = False

    def show(self, step: int, values: Values) -> None:
        """Draw what is recorded so far if this is a validation, unless a drawing is running or has just ended."""
        if not step or not any(name.startswith("valid/") for name in values):
            return
        if self._process is not None and self._process.poll() is not None:
            self._wait()
        if self._process is None and time.monotonic() >= self._paused_until:
            self._start(niceness=19)

    def flush(self) -> None:
        """Do nothing: it reads what is on disk."""

    def close(self) -> None:
        """Draw for the last time, and wait for it."""
        if self._process is not None:
            self._process.kill()  # its plots would be out of date; each file appears whole or not at all
            self._process.communicate()
        self._start(niceness=0)
        self._wait()

    def _start(self, niceness: int) -> None:
        # It needs no GPU and one thread, and finds its modules where this process does, whatever the launcher changed.
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._process, self._started = None, time.monotonic()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _PLOTS_MODULE, str(self._run_dir), str(niceness)],
                env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            self._log_once(str(error))

    def _wait(self) -> None:
        """Wait for the process to end, and log its failure."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            _, message = process.communicate(timeout=_DRAWING_SECONDS)
            if process.returncode:
                text = message.decode(errors="replace").strip() or f"exit code {process.returncode}"
                self._log_once(text.splitlines()[-1])
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            self._log_once(f"not drawn within {_DRAWING_SECONDS:g} s")
        self._paused_until = time.monotonic() + 10 * (time.monotonic() - self._started)

    def _log_once(self, reason: str) -> None:
        if not self._has_failed:
            self._log(f"plots: {reason}; training continues")
        self._has_failed = True


class TensorBoard:
    """The file of one start."""

    def __init__(self, run_dir: Path, resumed_step: int):
        """Open the file of a start that resumes from `resumed_step` (0: a new run); later steps are replaced."""
        from torch.utils.tensorboard import SummaryWriter  # seconds to import, and only needed where asked for

        first_step = resumed_step + 1 if resumed_step else 0  # a new run begins with the validation of step 0
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def show(self, step: int, values: Values) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, step)
            else:
                self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """The recording of one start, in a thread: no network is waited for, and an error ends only the recording."""

    def __init__(self, run_dir: Path, config: RunConfig, log: Callable[[str], None]):
        """Record a run; all its settings are sent, as `shared` has them."""
        self._run_dir, self._config, self._log = run_dir, config, log
        self._waiting: queue.Queue[tuple[int, Values] | None] = queue.Queue()
        # A daemon: a run that is left at once does not wait for the server.
        self._thread = threading.Thread(target=self._record_all, name="wandb", daemon=True)
        self._thread.start()

    def show(self, step: int, values: Values) -> None:
        self._waiting.put((step, values))

    def flush(self) -> None:
        """Do nothing: the thread sends all the time."""

    def close(self) -> None:
        """Send what is left, for as long as the end of a run may wait."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._log(f"wandb: did not finish within {_CLOSE_SECONDS:g} s; training ends without it")

    def _record_all(self) -> None:
        try:
            import wandb  # seconds to import, and nothing waits for this thread

            # The run's id at W&B, and the last step recorded there: it accepts none before it.
            path = self._run_dir / "wandb" / "zerokara.json"
            if not path.exists():
                write_json(path, {"id": f"zerokara-{secrets.token_hex(4)}", "step": -1})
            state = orjson.loads(path.read_bytes())
            run = self._open(wandb, state["id"])
            for step, values in iter(self._waiting.get, None):
                if step <= state["step"]:
                    continue
                sent = {
                    name: wandb.Html(f"<pre>{html.escape(value, quote=False)}</pre>")
                    if isinstance(value, str)
                    else value
                    for name, value in values.items()
                }
                run.log(sent, step=step)
                write_json(path, {"id": state["id"], "step": step})
            run.finish()
        except Exception as error:  # no key, no network, a full disk: the training continues
            message = redacted(" ".join(str(error).split())) or type(error).__name__
            self._log(f"wandb: {message}; training continues without it")

    def _open(self, wandb: Any, run_id: str) -> Any:
        from wandb.sdk.lib import wbauth

        online, server = self._config.wandb == "online", wandb.setup().settings.base_url
        # Nobody would answer a prompt in the middle of a log.
        if online and not wbauth.authenticate_session(host=server, source="zerokara", prompt=False):
            raise LookupError("no API key: put it into WANDB_API_KEY, or log in once with .venv/bin/wandb login")
        return wandb.init(
            project=self._config.wandb_project,
            name=self._run_dir.name,
            id=run_id,
            resume="allow" if online else None,
            dir=str(self._run_dir),
            mode="online" if online else "offline",
            config=shared(self._config.model_dump(mode="json")),
            settings=wandb.Settings(init_timeout=INIT_SECONDS, finish_timeout=_FINISH_SECONDS, **_PRIVATE),
        )


def shared(value: Any) -> Any:
    """Settings as they are sent: of each path only the last name, of each address no password.

    Every text is taken for a path, except the prompts, which are sent whole.
    """
    if isinstance(value, dict):
        return {key: each if key == "sample_prompts" else shared(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shared(each) for each in value]
    return redacted(value).rstrip("/").rpartition("/")[2] if isinstance(value, str) else value
