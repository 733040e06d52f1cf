"""A run's numbers and sample texts for Weights & Biases (wandb 0.31.0), ``online``, or ``offline`` into files.

All of it happens in a thread of its own: a network that does not answer holds nothing up, and an error in there ends
nothing but the recording. The thread is given 90 seconds at the end of the run.

A run keeps its id over all its starts (``wandb/zerokara.json`` in the run folder), so that online it goes on in the
same curve. Offline, wandb knows of no earlier start: each writes a folder ``wandb/offline-run-…`` of its own, with the
same id. ``WANDB_RESUME=allow WANDB_PROGRAM=zerokara wandb sync <run folder>/wandb/offline-run-*`` sends them in the
order in which they began, each going on where the one before ended (cli/cli.py, `sync`; core/internal/runupserter/
runupserter.go: without WANDB_RESUME each would take the place of the one before; without WANDB_PROGRAM it tells the
path of the `wandb` that sends). Steps that were recorded before a crash and are trained again are not recorded twice:
W&B takes no step that lies before its last.

What goes out are the numbers, the sample texts, the settings, of each path the last name, and the machine's load: no
folder, user, host, git remote, program, list of packages or log.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.durable import write_json
from zerokara.errors import redacted

FOLDER_NAME = "wandb"
STATE_NAME = "zerokara.json"
INIT_SECONDS = 60
"""How long a server may take to answer at first."""
FINISH_SECONDS = 60
"""How long the rest is sent at the end of the run; what was not stays in the folder, for ``wandb sync``."""
_LEAVE_SECONDS = 90.0
_TEXTS = "sample_prompts"
_PRIVATE: dict[str, Any] = {
    "console": "off",  # the log names folders
    "disable_git": True,
    "save_code": False,
    "x_disable_meta": True,  # program, its arguments, folder, interpreter, user, host
    "x_save_requirements": False,
    "host": "",
    "program": "zerokara",
}
"""wandb would send all of this by itself."""


class WeightsAndBiases:
    """The recording of one start."""

    def __init__(self, run_dir: Path, config: PretrainConfig, log: Callable[[str], None]):
        self._run_dir, self._config, self._log = run_dir, config, log
        self._waiting: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue()
        # A daemon: should the run be left at once, it does not wait for a server.
        self._thread = threading.Thread(target=self._record_all, name="wandb", daemon=True)
        self._thread.start()

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Record numbers of a step."""
        self._waiting.put((step, dict(values)))

    def text(self, step: int, name: str, markdown: str) -> None:
        """Record a text of a step."""
        self._waiting.put((step, {name: markdown}))

    def flush(self) -> None:
        """Nothing to do: the thread is always at it."""

    def close(self) -> None:
        """Send what is left, or give up after a while."""
        self._waiting.put(None)
        self._thread.join(_LEAVE_SECONDS)
        if self._thread.is_alive():
            self._log(f"wandb: did not end within {_LEAVE_SECONDS:g} s; left behind")

    def _record_all(self) -> None:
        try:
            run, state = self._start(), self._state()
            while (item := self._waiting.get()) is not None:
                step, values = item
                if step <= state["step"]:
                    continue
                run.log({name: _as_wandb(value) for name, value in values.items()}, step=step)
                write_json(self._state_path, {"id": state["id"], "step": step})
            run.finish()
        except Exception as error:  # no key, no network, a full disk: the training goes on
            said = redacted(" ".join(str(error).split())) or type(error).__name__
            self._log(f"wandb: {said}; going on without it")

    def _start(self) -> Any:
        import wandb
        from wandb.sdk.lib import wbauth

        online = self._config.wandb == "online"
        # A prompt in the middle of a log is answered by nobody.
        if online and not wbauth.authenticate_session(
            host=wandb.setup().settings.base_url, source="zerokara", prompt=False
        ):
            raise LookupError("no API key: put it into WANDB_API_KEY, or log in once with .venv/bin/wandb login")
        return wandb.init(
            project=self._config.wandb_project,
            name=self._run_dir.name,
            id=self._state()["id"],
            resume="allow" if online else None,
            dir=str(self._run_dir),
            mode="online" if online else "offline",
            config=shared(self._config.model_dump(mode="json")),
            settings=wandb.Settings(init_timeout=INIT_SECONDS, finish_timeout=FINISH_SECONDS, **_PRIVATE),
        )

    @property
    def _state_path(self) -> Path:
        return self._run_dir / FOLDER_NAME / STATE_NAME

    def _state(self) -> dict[str, Any]:
        """The run's id at W&B, and the last step that was recorded there."""
        if not self._state_path.exists():
            write_json(self._state_path, {"id": f"zerokara-{secrets.token_hex(4)}", "step": -1})
        state: dict[str, Any] = orjson.loads(self._state_path.read_bytes())
        return state


def shared(value: Any) -> Any:
    """Settings as they are sent: of each path the last name alone, of each address no password.

    Whatever is text is taken for a path but the prompts, which are quoted.
    """
    if isinstance(value, dict):
        return {key: each if key == _TEXTS else shared(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shared(each) for each in value]
    return redacted(value).rstrip("/").rpartition("/")[2] if isinstance(value, str) else value


def _as_wandb(value: Any) -> Any:
    """A number as it is, a text as W&B shows texts."""
    if not isinstance(value, str):
        return value
    import wandb

    return wandb.Html(f"<pre>{_escaped(value)}</pre>")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
