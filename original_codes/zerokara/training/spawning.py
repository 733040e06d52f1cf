"""The start of training processes, by torchrun's agent (`nodes.agent`), and the file by which they find each other."""

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zerokara.base.errors import INTERRUPTED
from zerokara.base.resources import network_environment
from zerokara.training.planning.run_plan import PLAN_NAME, RunPlan
from zerokara.training.processes import supervision

if TYPE_CHECKING:  # it imports torch
    from zerokara.training.nodes.rendezvous import Rendezvous


def spawn(plan: RunPlan, *work: str, rendezvous: "Rendezvous | None" = None, path: Path | None = None) -> int:
    """Run the training processes, which do `work` (`worker.main`), here or on each of the machines of a `rendezvous`.

    `path` is the file of the plan, where the run folder has one; otherwise a temporary one is written.

    Returns the exit code of the first process that fails, 0 where none does; the others are ended. Ctrl-C, SIGTERM and
    SIGHUP ask the training processes to stop at the end of a step; a second Ctrl-C kills them. If this process is
    killed, they save and exit. On several machines the run survives lost processes and machines, `max_restarts` times.

    Raises:
        KeyboardInterrupt: they were asked to stop, and have saved.
    """
    network = network_environment()
    if rendezvous:
        network = network_environment(rendezvous.address) | {supervision.FOLDER_NAME: str(rendezvous.folder_owner)}
    with contextlib.ExitStack() as stack:
        if path is None:
            # Each restart reads the plan, and a system may have cleaned /tmp by then.
            place = plan.run_dir if rendezvous else None
            made = tempfile.TemporaryDirectory(prefix="zerokara-plan-", dir=place)
            path = Path(stack.enter_context(made), PLAN_NAME)
            plan.write(path)
        meeting = stack.enter_context(local_rendezvous())
        own = plan.devices.process_environment(plan.processes_per_node)
        # The environment of this process, too: libraries read some variables when they are loaded.
        stack.callback(os.environ.update, dict(os.environ))
        stack.callback(os.environ.clear)
        os.environ |= {**network, **own, **meeting}
        # Where torch is loaded for the agent alone, the processes are forked, and need not load it once more. Where it
        # is there already it may have used a GPU or threads, with which a process cannot be forked.
        is_forked = "torch" not in sys.modules
        from zerokara.training.nodes import agent

        code = agent.run(plan, [str(path), *work], is_forked, rendezvous)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code == -signal.SIGKILL and rendezvous is None:
        reason = "by the kernel, for lack of main memory (then dmesg tells), or by somebody"
        print(f"failed: a training process was killed (SIGKILL), {reason}", file=sys.stderr)
    return code


@contextlib.contextmanager
def local_rendezvous() -> Iterator[dict[str, str]]:
    """Keep the rendezvous of this machine's processes as long as the block lasts; yield it for their environment.

    torch's usual rendezvous is a TCP port: every user of the machine can reach it, and change what is agreed there.
    This one is a file without a name, in memory (memfd_create(2)). Processes open it through /proc, which Linux allows
    to the same user alone; it is gone with the last one that holds it.
    """
    with open(os.memfd_create("zerokara_rendezvous"), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        yield {supervision.RENDEZVOUS_NAME: f"/proc/{os.getpid()}/fd/{file.fileno()}"}
