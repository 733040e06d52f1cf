"""The training processes of a machine, started and watched by torchrun's agent (torch elastic); alone or among several.

The agents of several machines agree on ranks (rendezvous), start their processes, and look after them. An unattended
run needs more than torch's own: a lost machine or a cut link is noticed (`Heartbeat`) and the processes that would wait
for it are killed; a run that would fail again is not restarted; a request to stop is passed on, and the processes save.
A single machine opens no port. Source: torch 2.13, torch/distributed/elastic/agent/server and rendezvous.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
from torch.distributed import HashStore, PrefixStore, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from zerokara.base.errors import INTERRUPTED, RunError
from zerokara.training.nodes.rendezvous import LostFirstMachine, Rendezvous
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes import supervision

RETURN_SECONDS = 600
"""Wait for a lost machine to come back, where the others are fewer than `min_nodes`."""
END_SECONDS = 15
"""Time that the others may take to end once a process has failed. One that waits for a collective in C or on the device
never runs a signal handler, and is killed then; torch's own 30 seconds are too many, with the time to notice."""
INTERVAL_SECONDS, LOST_SECONDS = 1.0, 10.0
"""Time between two heartbeats of a machine, and without one until it counts as lost."""
_NAME = "zerokara"
_TAIL_LINES = 40
_RESUME = "The checkpoints are whole: start all machines again, and they resume from the newest"


class Heartbeat:
    """Heartbeats between the machines of one round of training.

    torch's agent does not see that another machine is gone, and processes on a GPU wait half an hour for it. So a
    thread on each machine counts up a number in the store, and watches those of the others. On a cut link every request
    hangs, whatever its time-out: then the thread's own silence is the sign.
    """

    def __init__(self, store: Store, index: int, hosts: Mapping[int, str], on_beat: Callable[[], None]):
        """`store` is of this round alone, `hosts` names the other machines by their index in it."""
        self._store, self._index, self._hosts, self._on_beat = store, index, hosts, on_beat
        self._ended = threading.Event()
        self._beats = dict.fromkeys((index, *hosts), (0, time.monotonic()))
        """Beats of each machine, and the time of the last; for this one the time of the store's last answer."""
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; one that hangs in a request is left alone."""
        self._ended.set()
        self._thread.join(2 * INTERVAL_SECONDS)

    def lost(self) -> RunError | None:
        """Return an error for a lost machine, the first (where the store is) or another; None if all is well."""
        for index, (_, since) in self._beats.items():
            if (seconds := time.monotonic() - since) > LOST_SECONDS:
                silence = f"no sign of life from {self._hosts.get(index, 'the first machine')} for {seconds:.0f} s"
                if index == self._index:
                    return LostFirstMachine(f"{silence}: it was switched off, or the network is cut. {_RESUME}")
                return RunError(f"{silence}: the processes of this machine were killed")
        return None

    def _beat(self) -> None:
        while not self._ended.wait(INTERVAL_SECONDS):
            with contextlib.suppress(RuntimeError, RendezvousError):  # silence for long enough says that it is gone
                own = self._store.add(f"beat/{self._index}", 1)
                for index in self._hosts:
                    if (number := self._store.add(f"beat/{index}", 0)) != self._beats[index][0]:
                        self._beats[index] = number, time.monotonic()
                self._on_beat()
                self._beats[self._index] = own, time.monotonic()


class _Handler(DynamicRendezvousHandler):
    """torch's own, with a heartbeat in each round. That looks for new machines, too: the agent must not wait for it."""

    joined: Rendezvous
    heartbeat: Heartbeat | None = None
    _num_waiting = 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Agree on the machines of a round; tell this machine's processes where they meet, and start the heartbeat."""
        self.stop_heartbeat()
        info = super().next_rendezvous()
        store, rank = info.store, info.rank
        if info.world_size < self.joined.min_count:  # torch drops one whose heartbeat looks old by this machine's clock
            remedy = "set them right on all (timedatectl set-ntp true), and start all machines again"
            raise RunError(f"the clocks of the machines have drifted apart: {remedy}")
        store.set(f"host/{rank}", f"{socket.gethostname()} ({self.joined.address})")
        hosts = {index: store.get(f"host/{index}").decode() for index in range(info.world_size) if index != rank}
        start = store.compare_set("start", "", str(time.time_ns())).decode()
        host, port = self.joined.endpoint
        os.environ[supervision.RENDEZVOUS_NAME] = f"{host} {port} {start}"
        self._num_waiting = 0  # who waited is in now
        self.heartbeat = Heartbeat(store.clone(), rank, hosts, self._update)  # type: ignore[attr-defined]
        return info

    def num_nodes_waiting(self) -> int:
        return self._num_waiting

    def _update(self) -> None:
        self._num_waiting = super().num_nodes_waiting()

    def stop_heartbeat(self) -> None:
        if self.heartbeat is not None:
            self.heartbeat.stop()

    def shutdown(self) -> bool:
        self.stop_heartbeat()
        with contextlib.suppress(RendezvousError, RuntimeError):
            return super().shutdown()
        return False


class NodeAgent(LocalElasticAgent):
    """torch's agent of one machine. Among several it also tells all why the first process failed."""

    _store: Any  # torch's own: the store of the present round
    _pcontext: Any  # torch's own: the processes of this machine

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs):
        super().__init__(spec, logs, "fork", log_line_prefix_template="[${rank}] ")
        self._handler = spec.rdzv_handler if isinstance(spec.rdzv_handler, _Handler) else None
        self.forwarding = supervision.SignalForwarding(self.pids)

    def pids(self) -> list[int]:
        """Return the training processes of this machine; none before they are started."""
        return [worker.id for worker in self._worker_group.workers if worker.id]

    def first_failure(self) -> tuple[int, str]:
        """Return exit code and message of the process that failed first in this round, on whichever machine."""
        store = self._store
        found = store and self._ask(lambda: store.get("failure") if store.check(["failure"]) else None)
        return tuple(orjson.loads(found)) if found else (RunError.exit_code, "")

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
        super()._shutdown(death_sig, END_SECONDS)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if lost := self._lost():
            supervision.kill(self.pids())
        result = super()._monitor_workers(worker_group)
        if isinstance(lost, LostFirstMachine):
            raise lost
        if result.is_failed():
            ((rank, failure), *_) = result.failures.items()
            self._publish(rank, failure, lost)
        return result

    def _publish(self, rank: int, failure: ProcessFailure, lost: RunError | None) -> None:
        """Publish the first failure on this machine, or that another one is `lost`; decide whether to restart."""
        code, text = failure.exitcode, str(lost or "")
        if not lost and self._handler and code != INTERRUPTED:
            log = Path(self._pcontext.stderrs[failure.local_rank])
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            text = f"process {rank} on {socket.gethostname()} failed first ({how}; {log}):\n{tail}"
        self._ask(lambda: self._store.compare_set("failure", "", orjson.dumps([code, text]).decode()))
        # What was not killed would fail again.
        if self.forwarding.requested or not (code < 0 or code == supervision.LOST_CONNECTION):
            self._remaining_restarts = 0

    def _exit_barrier(self) -> None:
        # torch's own waits in C, where no Ctrl-C reaches it, and for a lost machine, too.
        number, here = self._worker_group.group_world_size or 1, self._ask(lambda: self._store.add("done", 1))
        while here is not None and here < number and not self._lost():
            time.sleep(0.2)
            here = self._ask(lambda: self._store.add("done", 0))

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Return the store's answer to a request, None where it fails.

        On a cut link it hangs: a thread waits for the answer, and this one for the heartbeat.

        Raises:
            LostFirstMachine: no answer comes, and the machine that holds the store is lost.
        """
        answers: list[Any] = []

        def wait() -> None:
            with contextlib.suppress(RuntimeError):
                answers.append(request())

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.2)
            if thread.is_alive() and isinstance(lost := self._lost(), LostFirstMachine):
                raise lost
        return answers[0] if answers else None

    def _lost(self) -> RunError | None:
        """Return the error of the heartbeat; the first machine does not wait for a lost one to leave."""
        if not self._handler or not self._handler.heartbeat or not (lost := self._handler.heartbeat.lost()):
            return None
        if self._handler.joined.index == 0:
            self._handler.joined.store.add("departed", 1)
        return lost

    def _construct_event(self, state: str, source: EventSource, *_: object, **__: object) -> Event:
        return Event(state, source)  # torch's own has the host's full name, for which it waits where no DNS answers


def run(plan: RunPlan, arguments: Sequence[str], is_forked: bool, rendezvous: Rendezvous | None) -> int:
    """Run this machine's processes of a plan, alone or as one of a rendezvous: forked, or in new interpreters.

    Returns the exit code of the one that failed first, 0 where none did, 130 where a stop was asked for here.

    Raises:
        RunError: the first machine is lost; or too few machines are left, and none came back within `RETURN_SECONDS`.
    """
    os.environ |= {
        # Not needed: the processes use the store of the rendezvous. torch would open a port for a second one.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # Requests to stop are passed on by `SignalForwarding`; torch's handlers would kill after half a minute.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
    }
    for name in [each for each in logging.root.manager.loggerDict if each.startswith("torch.")]:
        if "elastic" in name or "multiprocessing" in name:
            logging.getLogger(name).setLevel(logging.CRITICAL)  # this module logs it
    handler: StaticTCPRendezvous | _Handler
    if rendezvous is None:
        handler, logs = StaticTCPRendezvous("localhost", 0, 0, 1, _NAME, 0), DefaultLogsSpecs(os.devnull)
        handler._store = HashStore()  # torch would open a port for one
    else:
        handler = _handler_among(rendezvous)
        log_dir = plan.run_dir / "logs" / f"{socket.gethostname()}-{time.strftime('%Y%m%d-%H%M%S')}"
        logs = DefaultLogsSpecs(str(log_dir), redirects=Std.ALL, tee=Std.ALL)
    module, restarts = plan.task.worker, plan.requested.max_restarts if rendezvous else 0
    entrypoint = supervision.forked if is_forked else sys.executable
    command = (module, *arguments) if is_forked else ("-u", "-m", module, *arguments)
    count = plan.processes_per_node
    spec = WorkerSpec(_NAME, count, handler, entrypoint=entrypoint, args=command, max_restarts=restarts)
    agent = NodeAgent(spec, logs)
    code, text = 0, ""
    with agent.forwarding:
        try:
            result = agent.run()
            if result is None or result.state is not WorkerState.SUCCEEDED:
                code, text = agent.first_failure()
        except RendezvousClosedError:
            code, text = agent.first_failure()
            text = text or "another machine has given up; see what it printed"
        except KeyboardInterrupt:  # the second one, or there were no processes yet
            code = INTERRUPTED
        except RendezvousTimeoutError:
            rule = f"fewer machines than min_nodes are left, and none came back within {RETURN_SECONDS} s"
            raise RunError(f"{rule}. {_RESUME}") from None
        except RendezvousError as error:
            raise LostFirstMachine(f"the first machine does not answer any more: {error}") from error
    if text:
        print(text, file=sys.stderr)
    handler.shutdown()
    # A run that was asked to stop, and could not save, has failed; before the first step the signal itself may end it.
    stopped = agent.forwarding.requested and code in (0, INTERRUPTED, -signal.SIGTERM, -signal.SIGINT)
    return INTERRUPTED if stopped else code


def _handler_among(rendezvous: Rendezvous) -> _Handler:
    # Two connections: the threads may hang in theirs.
    own, of_threads = (PrefixStore("elastic", rendezvous.store.clone()) for _ in range(2))  # type: ignore[attr-defined]
    handler = _Handler.from_backend(
        _NAME,
        own,
        C10dRendezvousBackend(of_threads, _NAME),
        rendezvous.min_count,
        rendezvous.count,
        # torch sorts the machines by this text: the first one gets the first ranks.
        local_addr=f"{rendezvous.index:06} {rendezvous.address}",
        timeout=RendezvousTimeout(join=timedelta(seconds=RETURN_SECONDS), last_call=timedelta(seconds=5)),
        keep_alive_interval=2,
        keep_alive_max_attempt=5,
    )
    handler.joined = rendezvous
    return handler
