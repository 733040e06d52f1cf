"""Starting the training processes of a plan from the launching process. Without torch until they start.

They get the plan as a file, and RANK, LOCAL_RANK and WORLD_SIZE as torchrun has it. torchrun's agent starts and watches
them (`nodes.agent`), which needs torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from zerokara import supervision
from zerokara.errors import INTERRUPTED
from zerokara.model import loopback
from zerokara.progress import plural
from zerokara.resources import num_oom_kills
from zerokara.training.nodes.machines import Machines
from zerokara.training.planning.run_plan import PLAN_NAME, RunPlan
from zerokara.training.processes import rendezvous


@dataclass(frozen=True)
class Commands:
    """What the step is called, and what a person types after it."""

    title: str
    """At the head of its plan."""
    resume: str
    """Resumes the run."""
    convert: str
    """Converts what the run has made so far."""


def spawn(plan: RunPlan, *work: str, machines: Machines | None = None, path: Path | None = None) -> int:
    """Run the training processes, which do `work` (`worker.main`), here or on each of several machines.

    `path` is the file of the plan, where the run folder has one; otherwise a temporary one is written.

    Returns the exit code of the first process that fails, 0 where none does; the others are ended. Ctrl-C, SIGTERM and
    SIGHUP ask the training processes to stop at the end of a step; a second Ctrl-C kills them. If this process is
    killed, they save and exit. A process that was killed is reported with the likely reason. On several machines a lost
    process or machine is made up for, at most `max_restarts` times.

    Raises:
        KeyboardInterrupt: they were asked to stop, and have saved.
    """
    several = machines if machines and machines.are_several else None
    processes = plan.processes_per_node
    network, oom_kills_before = several.network_environment() if several else loopback.environment(), num_oom_kills()
    log_dir = plan.run_dir / "logs" / f"{socket.gethostname()}-{time.strftime('%Y%m%d-%H%M%S')}"
    with contextlib.ExitStack() as held:
        if path is None:
            path = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="zerokara-plan-")), PLAN_NAME)
            plan.write(path)
        place = held.enter_context(rendezvous.held())
        held.enter_context(_environment({**network, **plan.devices.environment(processes), **place}))
        # Where torch is loaded for the agent alone, the processes are forked, and need not load it once more. Where it
        # is there already it may have used a GPU or threads, with which a process cannot be forked.
        is_forked = "torch" not in sys.modules
        from zerokara.training.nodes import agent

        restarts = plan.requested.max_restarts if several else 0
        code = agent.run(plan.task.worker, [str(path), *work], processes, is_forked, several, restarts, log_dir)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code == -signal.SIGKILL and several is None:
        print(f"failed: {supervision.kill_message(oom_kills_before)}", file=sys.stderr)
    return code


@contextlib.contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """Have variables in the environment as long as the block lasts: libraries read some when they are loaded."""
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def processes_text(plan: RunPlan) -> str:
    """Return how many processes a plan has, for display."""
    return plural(plan.num_processes, "process", "processes")
