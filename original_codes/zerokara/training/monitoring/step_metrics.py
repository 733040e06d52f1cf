"""The numbers of a run: ``metrics.jsonl``, which has each step once, also after a resume, and the trackers beside it.

docs/metrics.md lists the fields of its lines. Trackers (plots, TensorBoard, Weights & Biases) show the same numbers as
curves in groups: ``train/loss``. None of them delays a step. `Recorder` drops a tracker that fails.

Weights & Biases (wandb 0.31.0): a run keeps its id over all its starts, so that online a resumed run extends the same
curves. Offline, each start writes its own folder; docs/training.md has the command that sends them in order
(core/internal/runupserter/runupserter.go: without WANDB_RESUME each would replace the one before; without WANDB_PROGRAM
the path of the `wandb` program is sent). Of the machine only its load is sent.
"""

import contextlib
import html
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from zerokara.base.durable import write_file, write_json
from zerokara.base.errors import redacted
from zerokara.base.progress import log
from zerokara.checkpoint.folders import METRICS_NAME
from zerokara.checkpoint.folders import read_metrics as read
from zerokara.config.pretrain_config import RunConfig

_GROUPS = {
    **dict.fromkeys(("tokens_per_second", "memory_bytes", "seconds", "seconds_left"), "speed"),
    **dict.fromkeys(("mfu_causal", "mfu_palm"), "speed"),
    **dict.fromkeys(("tokens", "epoch", "source_tokens"), "data"),
    **dict.fromkeys(("expert_load", "expert_dropped", "router_entropy"), "router"),
}
"""Groups in which trackers arrange curves; all other numbers are in ``valid/`` and ``train/``."""
_NO_CURVES = ("step", "resumed", "bad_samples", "valid_source_positions")
_PLOTS_MODULE = "zerokara.training.monitoring.plots"
_DRAWING_SECONDS = 120.0
"""Most time for one drawing, which has the lowest priority as long as the run is trained."""
_PAUSE_SECONDS = 60.0
"""Least time from one drawing to the next."""
_WAITING_BYTES = 2**24
"""Most bytes of lines that wait for a disk that is full."""
SERVER_SECONDS = 60
"""Time for W&B's server to open the run, and to take the rest; what is left is for ``wandb sync``."""
_PRIVATE: dict[str, Any] = {
    "console": "off",  # the log has folder names
    "disable_git": True,
    "save_code": False,
    "x_disable_meta": True,  # program, its arguments, folder, interpreter, user, host
    "x_save_requirements": False,
    "host": "",
    "program": "zerokara",
}
"""Settings that keep private what wandb sends by default."""

Values = Mapping[str, float | str]
"""Numbers of a step by the name of their curve, and texts, in Markdown."""


class Plots:
    """Draws the plots of a run, one drawing at a time, in another process, since drawing is seconds of Python."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="plots")
        self._drawing: Future[None] | None = None
        self._started = 0.0

    def show(self, step: int, values: Values) -> None:
        """Draw if this is a validation, unless a drawing is running or has just begun. Only `close` reports a
        failure."""
        if not step or not any(name.startswith("valid/") for name in values):
            return
        if self._drawing is None or (self._drawing.done() and time.monotonic() >= self._started + _PAUSE_SECONDS):
            self._started, self._drawing = time.monotonic(), self._thread.submit(self._draw, 19)

    def close(self) -> None:
        """Draw for the last time, and wait for it."""
        self._thread.submit(self._draw, 0).result()

    def _draw(self, niceness: int) -> None:
        # It finds its modules where this process does, whatever the launcher changed.
        path = os.pathsep.join(filter(None, sys.path))
        ended = subprocess.run(
            [sys.executable, "-P", "-m", _PLOTS_MODULE, str(self._run_dir), str(niceness)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            errors="replace",
            timeout=_DRAWING_SECONDS,
        )
        if ended.returncode:
            _, _, reason = ended.stderr.strip().rpartition("\n")
            raise RuntimeError(f"exit code {ended.returncode}: {reason}")


class TensorBoard:
    """The file of one start; its numbers replace those that earlier files (TensorBoard 2.21) have of later steps."""

    def __init__(self, run_dir: Path, resumed_step: int):
        from torch.utils.tensorboard import SummaryWriter  # seconds to import, and only needed where asked for

        first_step = resumed_step + 1 if resumed_step else 0  # a new run begins with the validation of step 0
        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def show(self, step: int, values: Values) -> None:
        for name, value in values.items():
            add = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            add(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """The recording of one start. Opening it imports wandb and waits for the server, for `SERVER_SECONDS` at most."""

    def __init__(self, run_dir: Path, resumed_step: int, config: RunConfig):
        import wandb  # seconds to import, and only needed where asked for
        from wandb.sdk.lib import wbauth

        # The run's id at W&B, and the last step recorded there: it accepts none before it.
        self._path = run_dir / "wandb" / "zerokara.json"
        if not self._path.exists() or not resumed_step:  # a start without a checkpoint was another run
            write_json(self._path, {"id": f"zerokara-{secrets.token_hex(4)}", "step": -1})
        self._state = orjson.loads(self._path.read_bytes())
        online, server = config.wandb == "online", wandb.setup().settings.base_url
        # Nobody would answer a prompt in the middle of a log.
        if online and not wbauth.authenticate_session(host=server, source="zerokara", prompt=False):
            raise LookupError("no API key: put it into WANDB_API_KEY, or log in once with .venv/bin/wandb login")
        start = partial(
            wandb.init,
            project=config.wandb_project,
            name=run_dir.name,
            id=self._state["id"],
            dir=str(run_dir),
            config=shared(config.model_dump(mode="json")),
            settings=wandb.Settings(init_timeout=SERVER_SECONDS, finish_timeout=SERVER_SECONDS, **_PRIVATE),
        )
        try:
            self._run = start(mode="online", resume="allow") if online else start(mode="offline")
        except wandb.errors.CommError as error:
            log(f"wandb: {reason(error)}; recorded offline; send it before the next start (docs/training.md)")
            wandb.teardown()  # its service, where this id is in use
            self._run = start(mode="offline")

    def show(self, step: int, values: Values) -> None:
        import wandb

        if step <= self._state["step"]:  # an earlier start has recorded it
            return
        texts = {name: text for name, text in values.items() if isinstance(text, str)}
        shown = {name: wandb.Html(f"<pre>{html.escape(text, quote=False)}</pre>") for name, text in texts.items()}
        self._run.log({**values, **shown}, step=step)
        write_json(self._path, {**self._state, "step": step})

    def close(self) -> None:
        """Send what is left, for as long as the end of a run may wait."""
        self._run.finish()


def shared(value: Any) -> Any:
    """Settings as they are sent: of each path only the last name, of each address no password.

    Every text is taken for a path, except the prompts, which are sent whole.
    """
    if isinstance(value, dict):
        return {key: item if key == "sample_prompts" else shared(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shared(item) for item in value]
    return redacted(value).rstrip("/").rpartition("/")[2] if isinstance(value, str) else value


def reason(error: Exception) -> str:
    """What an error says, on one line and without secrets."""
    return redacted(" ".join(str(error).split())) or type(error).__name__


Tracker = Plots | TensorBoard | WeightsAndBiases


class Recorder:
    """Writes lines to ``metrics.jsonl`` and shows them to the trackers; only the first process has one.

    Lines that the disk refuses wait in the file's buffer until it takes them, and a tracker that fails is dropped. Both
    are logged once.
    """

    def __init__(
        self,
        run_dir: Path,
        resumed_step: int,
        trackers: Mapping[str, Callable[[], Tracker]],
        repeats_validation: bool = False,
    ):
        """Record a start that resumes from `resumed_step` (0: a new run); `trackers` opens each tracker by name.

        Lines of later steps are dropped: these steps will be trained and recorded again. So are validations of
        `resumed_step`, if the start validates it again.
        """
        self._path = run_dir / METRICS_NAME
        kept = [line for line in read(run_dir) if 0 < resumed_step >= line["step"]]
        again = ("resumed", *(["valid_"] if repeats_validation else []))
        kept = [line for line in kept if line["step"] < resumed_step or not any(key.startswith(again) for key in line)]
        write_file(self._path, b"".join(orjson.dumps(line) + b"\n" for line in kept))
        self._file = open(self._path, "ab", buffering=_WAITING_BYTES)  # noqa: SIM115  # closed in `close`
        self._is_refused = False
        self._trackers: dict[str, Tracker] = {}
        for name, start in trackers.items():
            with self._dropping(name):
                self._trackers[name] = start()

    def record(self, line: dict[str, Any]) -> None:
        self._write(orjson.dumps(line) + b"\n")
        self.show(line["step"], _curves(line))

    def show(self, step: int, values: Values) -> None:
        """Show values to the trackers alone."""
        for name, tracker in list(self._trackers.items()):
            with self._dropping(name):
                tracker.show(step, values)

    def flush(self) -> None:
        """Bring the lines to disk: a checkpoint that refers to them is about to be written."""
        self._write(b"", syncs=True)

    def close(self) -> None:
        """Bring everything to disk, and end."""
        self.flush()
        with contextlib.suppress(OSError):  # logged by then
            self._file.close()
        for name, tracker in list(self._trackers.items()):
            with self._dropping(name):
                tracker.close()

    @contextlib.contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """Drop a tracker that fails in the block: no key, no network, a full disk; the training continues."""
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            log(f"{name}: {reason(error)}; training continues without it")

    def _write(self, content: bytes, syncs: bool = False) -> None:
        """Append `content`, behind what the disk has refused so far."""
        try:
            self._file.write(content)
            self._file.flush()
            if syncs:
                os.fsync(self._file.fileno())
        except OSError as error:
            if not self._is_refused:
                reason = error.strerror or error
                log(f"{self._path}: {reason}; new lines are kept in memory until they can be written")
            self._is_refused = True
        else:
            self._is_refused = False


def _curves(line: dict[str, Any]) -> dict[str, float]:
    """The numbers of a line by curve: each number of a list by itself, and 1 where a step was skipped."""
    curves: dict[str, Any] = {}
    for name, value in line.items():
        if name in _NO_CURVES:
            continue
        group = _GROUPS.get(name, "valid" if name.startswith("valid_") else "train")
        tag = f"{group}/{name.removeprefix(f'{group}_')}"
        if isinstance(value, list):
            curves.update({f"{tag}/{number}": item for number, item in enumerate(value)})
        else:
            curves[tag] = 1 if name == "skipped" else value
    return {tag: value for tag, value in curves.items() if isinstance(value, int | float)}
