"""A run's numbers and sample texts for Weights & Biases (wandb 0.31.0), ``online``, or ``offline`` into files.

Everything happens in a thread: a network that does not answer delays no training step, and an error ends only the
recording. At the end of the run the thread is given 90 seconds.

A run keeps its id over all its starts (``wandb/zerokara.json`` in the run folder), so that online a resumed run extends
the same curves. Offline, wandb knows of no earlier start: each writes a folder ``wandb/offline-run-…`` of its own, with
the same id. ``WANDB_RESUME=allow WANDB_PROGRAM=zerokara wandb sync <run folder>/wandb/offline-run-*`` sends them in the
order of their starts, each resuming where the one before ended (cli/cli.py, `sync`; core/internal/runupserter/
runupserter.go: without WANDB_RESUME each would replace the one before; without WANDB_PROGRAM the path of the `wandb`
program is sent). Steps that were recorded before a crash and are trained again are not recorded twice: W&B accepts no
step before its last.

What is sent: the numbers, the sample texts, the settings with only the last name of each path, and the machine's load;
no folder, user, host, git remote, program, list of packages or log.
"""

from __future__ import annotations

import html
import queue
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from zerokara.config.pretrain_config import RunConfig
from zerokara.durable import write_json
from zerokara.errors import redacted

FOLDER_NAME = "wandb"
STATE_NAME = "zerokara.json"
INIT_SECONDS = 60
"""How long the server may take to answer when the run is opened."""
FINISH_SECONDS = 60
"""How long wandb may send the rest at the end of the run; what is left stays in the folder, for ``wandb sync``."""
_CLOSE_SECONDS = 90.0
_PROMPTS = "sample_prompts"
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


class WeightsAndBiases:
    """The recording of one start: a `metrics.Watcher`."""

    def __init__(self, run_dir: Path, config: RunConfig, log: Callable[[str], None]):
        """Record a run; all its settings are sent, as `shared` has them."""
        self._run_dir, self._config, self._log = run_dir, config, log
        self._state_path = run_dir / FOLDER_NAME / STATE_NAME
        self._waiting: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue()
        # A daemon: a run that is left at once does not wait for the server.
        self._thread = threading.Thread(target=self._record_all, name="wandb", daemon=True)
        self._thread.start()

    def numbers(self, step: int, values: dict[str, float]) -> None:
        self._waiting.put((step, dict(values)))

    def text(self, step: int, name: str, markdown: str) -> None:
        self._waiting.put((step, {name: markdown}))

    def flush(self) -> None:
        """Do nothing: the thread sends all the time."""

    def close(self) -> None:
        """Send what is left, and stop waiting for it after 90 seconds."""
        self._waiting.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._log(f"wandb: did not finish within {_CLOSE_SECONDS:g} s; training ends without it")

    def _record_all(self) -> None:
        try:
            import wandb  # seconds to import, and nothing waits for this thread

            state = self._state()
            run = self._start(wandb, state["id"])
            while (item := self._waiting.get()) is not None:
                step, values = item
                if step <= state["step"]:
                    continue
                run.log({name: _as_wandb(wandb, value) for name, value in values.items()}, step=step)
                write_json(self._state_path, {"id": state["id"], "step": step})
            run.finish()
        except Exception as error:  # no key, no network, a full disk: the training continues
            message = redacted(" ".join(str(error).split())) or type(error).__name__
            self._log(f"wandb: {message}; training continues without it")

    def _start(self, wandb: Any, run_id: str) -> Any:
        from wandb.sdk.lib import wbauth

        online = self._config.wandb == "online"
        # Nobody would answer a prompt in the middle of a log.
        if online and not wbauth.authenticate_session(
            host=wandb.setup().settings.base_url, source="zerokara", prompt=False
        ):
            raise LookupError("no API key: put it into WANDB_API_KEY, or log in once with .venv/bin/wandb login")
        return wandb.init(
            project=self._config.wandb_project,
            name=self._run_dir.name,
            id=run_id,
            resume="allow" if online else None,
            dir=str(self._run_dir),
            mode="online" if online else "offline",
            config=shared(self._config.model_dump(mode="json")),
            settings=wandb.Settings(init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS, **_PRIVATE),
        )

    def _state(self) -> dict[str, Any]:
        """The run's id at W&B, and the last step recorded there."""
        if not self._state_path.exists():
            write_json(self._state_path, {"id": f"zerokara-{secrets.token_hex(4)}", "step": -1})
        state: dict[str, Any] = orjson.loads(self._state_path.read_bytes())
        return state


def shared(value: Any) -> Any:
    """Settings as they are sent: of each path only the last name, of each address no password.

    Every text is taken for a path, except the prompts, which are sent whole.
    """
    if isinstance(value, dict):
        return {key: each if key == _PROMPTS else shared(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shared(each) for each in value]
    return redacted(value).rstrip("/").rpartition("/")[2] if isinstance(value, str) else value


def _as_wandb(wandb: Any, value: Any) -> Any:
    """A number as it is, a text as preformatted HTML."""
    return wandb.Html(f"<pre>{html.escape(value, quote=False)}</pre>") if isinstance(value, str) else value
