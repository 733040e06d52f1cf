"""The training processes of a machine, started and watched by torchrun's agent (torch elastic); alone or among several.

The agents of several machines agree on ranks (rendezvous), start their processes, and look after them. Added to torch's
own is what an unattended run needs: a lost machine or a cut link is noticed (`Heartbeat`) and the processes that would
wait for it are killed; what would fail again is not started again; a request to stop is passed on, and the processes
save. A lone machine opens no port. Source: torch 2.13, torch/distributed/elastic/agent/server and rendezvous.
"""

from __future__ import annotations

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
from torch.distributed import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    LogsDest,
    MultiprocessContext,
    Std,
    SubprocessContext,
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from zerokara import supervision
from zerokara.errors import INTERRUPTED, RunError
from zerokara.training.nodes.machines import Machines
from zerokara.training.nodes.meeting import LostFirstMachine, Meeting
from zerokara.training.processes import rendezvous

RETURN_SECONDS = 600
"""How long the others wait for a lost machine to come back, where they are too few without it."""
END_SECONDS = 15
"""How long after one process has failed the others may take to end. One that waits for a collective in C or on the
device never runs a signal handler, and is killed then."""
INTERVAL_SECONDS, LOST_SECONDS = 1.0, 10.0
"""Between two signs of life of a machine, and without one for how long it counts as lost."""
_NAME = "zerokara"
_TAIL_LINES = 40


class Heartbeat:
    """Signs of life between the machines of one round of training; a context manager.

    torch's agent does not see that another machine is gone, and processes that wait for it on a GPU wait for half an
    hour. So a thread on each machine counts up a number in the store, and looks whether those of the others do. On a
    cut link every request hangs: then the thread's own silence is the sign.
    """

    def __init__(self, store: Store, index: int, hosts: Mapping[int, str], also: Callable[[], None]):
        """`store` is of this round alone; `hosts` names the other machines by their index in it.

        `also` is called with each sign of life: it may use the network too.
        """
        self._store, self._index, self._hosts, self._also = store, index, dict(hosts), also
        self._ended = threading.Event()
        self._answered = time.monotonic()
        """When the store answered last."""
        self._counted: dict[int, tuple[int, float]] = {}
        """The number of each other machine, and since when it is that."""
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(2 * INTERVAL_SECONDS)  # one that hangs in a request is left alone

    @property
    def reaches_store(self) -> bool:
        """Whether the store has answered lately."""
        return time.monotonic() - self._answered <= LOST_SECONDS

    def lost(self) -> str:
        """Return what is lost, for display: a machine, or the way to the first one; empty while all is well."""
        now = time.monotonic()
        if not self.reaches_store:
            return f"no answer from the first machine for {now - self._answered:.0f} s"
        for index, (_, since) in sorted(self._counted.items()):
            if now - since > LOST_SECONDS:
                return f"no sign of life from {self._hosts[index]} for {now - since:.0f} s"
        return ""

    def _beat(self) -> None:
        self._answered = time.monotonic()
        self._counted = dict.fromkeys(self._hosts, (-1, self._answered))
        number = 0
        while not self._ended.wait(INTERVAL_SECONDS):
            number += 1
            try:
                self._store.set(f"beat/{self._index}", str(number))
                for index in self._hosts:
                    key = f"beat/{index}"
                    found = int(self._store.get(key)) if self._store.check([key]) else -1
                    if found != self._counted[index][0]:
                        self._counted[index] = (found, time.monotonic())
                self._also()
                self._answered = time.monotonic()
            except (RuntimeError, OSError):  # the store is gone; not answering for long enough says so
                continue


class _LoneMachine(StaticTCPRendezvous):
    """The rendezvous of one machine: with itself, without a port."""

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(self.master_addr, self.master_port))


class _Rendezvous(DynamicRendezvousHandler):
    """torch's own, whose question for new machines does not keep the agent waiting on a cut link."""

    _num_waiting = 0

    def num_nodes_waiting(self) -> int:
        return self._num_waiting

    def look(self) -> None:
        """Ask the store; for a thread that may wait."""
        self._num_waiting = super().num_nodes_waiting()

    def next_rendezvous(self) -> RendezvousInfo:
        found = super().next_rendezvous()
        self._num_waiting = 0  # who waited is in now
        return found


class _NoLogs(DefaultLogsSpecs):
    """The processes print where this one does, and leave no files."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        streams = dict.fromkeys(envs, "")
        return LogsDest(streams, streams, error_files=dict.fromkeys(envs, os.devnull))


class NodeAgent(LocalElasticAgent):
    """The agent of one machine."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, meeting: Meeting | None):
        """`meeting` is the one of several machines."""
        super().__init__(spec, logs, start_method="fork", log_line_prefix_template="[${rank}] " if meeting else None)
        self._meeting = meeting
        self._running = contextlib.ExitStack()
        """What lasts as long as the processes of one round."""
        self._heartbeat: Heartbeat | None = None
        self._forwarding: supervision.SignalForwarding | None = None
        self.is_stopped = False
        """Whether somebody asked to stop on this machine."""
        self.failure: dict[str, Any] | None = None
        """The first failure of a process of this machine: its ``text``, ``exit_code`` and ``time``."""

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        if self._meeting is None:
            return
        store, rank, count = self._round()
        store.set(f"host/{rank}", f"{socket.gethostname()} ({self._meeting.address})")
        if rank == 0:
            store.set("attempt", str(time.time_ns()))
        attempt = store.get("attempt").decode()
        hosts = {index: store.get(f"host/{index}").decode() for index in range(count) if index != rank}
        handler = worker_group.spec.rdzv_handler
        assert isinstance(handler, _Rendezvous)
        beats = PrefixStore(f"beats/{attempt}", connection(self._meeting))
        self._heartbeat = Heartbeat(beats, rank, hosts, handler.look)
        endpoint = self._meeting.endpoint
        os.environ[rendezvous.VARIABLE] = rendezvous.at(endpoint.host, endpoint.port, attempt)

    def _round(self) -> tuple[Store, int, int]:
        """Return the store of the present round, this machine's index among those in it, and their number."""
        store, rank, count = (getattr(self._worker_group, name) for name in ("store", "group_rank", "group_world_size"))
        assert store is not None and rank is not None and count is not None
        return store, rank, count

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        assert self._pcontext is not None
        end = self._pcontext.close
        # torch would give the others half a minute.
        self._pcontext.close = lambda death_sig=None, timeout=0: end(death_sig, END_SECONDS)  # type: ignore[method-assign]
        if self._heartbeat is not None:
            self._running.enter_context(self._heartbeat)
        self._forwarding = self._running.enter_context(supervision.SignalForwarding(list(pids.values())))
        return pids

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = END_SECONDS) -> None:
        super()._shutdown(death_sig, timeout)
        if self._forwarding is not None:
            self.is_stopped = self.is_stopped or self._forwarding.requested
        self._running.close()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._forwarding is not None and self._pcontext is not None
        if self._heartbeat is not None and (lost := self._heartbeat.lost()):
            supervision.kill(self._pcontext.pids().values())
            self._mark_departed()
            print(f"{lost}: the processes of this machine were killed", file=sys.stderr, flush=True)
            if not self._heartbeat.reaches_store:
                raise LostFirstMachine(
                    f"{lost}: it was switched off, or the network is cut. Its checkpoints are whole: start all "
                    "machines again, and they go on from the newest"
                )
            return RunResult(state=WorkerState.UNHEALTHY)
        codes = self._exit_codes()
        if isinstance(self._pcontext, MultiprocessContext):
            # Forked processes end as soon as they are done, where torch's would wait for each other, and for an answer.
            self._pcontext._return_values = {rank: 0 for rank, code in codes.items() if code == 0}
            if any(codes.values()):
                self._pcontext.close()  # torch would give the others half a minute here, too
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            failures = sorted(result.failures.values(), key=lambda each: each.timestamp)
            ended = {rank: code for rank, code in codes.items() if code} or {
                each.local_rank: each.exitcode for each in failures
            }
            # Where several have ended since the last look, one that lost another was not the first.
            first = min(ended, key=lambda rank: ended[rank] == supervision.LOST_CONNECTION)
            self.failure = self._published(first, ended[first], worker_group)
            if self._forwarding.requested or not supervision.may_restart(ended[first]):
                self._remaining_restarts = 0
        return result

    def _exit_barrier(self) -> None:
        """Wait until the processes of all machines are done, for as long as these show signs of life."""
        if self._heartbeat is None:
            return
        store, _, count = self._round()
        with contextlib.suppress(RuntimeError):
            done = store.add("done", 1)
            while done < count:
                if lost := self._heartbeat.lost():
                    print(f"{lost}: it is not waited for any more", file=sys.stderr, flush=True)
                    self._mark_departed()
                    return
                time.sleep(0.2)
                done = store.add("done", 0)

    def _mark_departed(self) -> None:
        """Let nobody wait for a lost machine at the end."""
        if self._meeting is not None and self._meeting.is_first:
            self._meeting.left()

    def _exit_codes(self) -> dict[int, int | None]:
        """Return the exit code of each process here that has ended, by its local rank."""
        if isinstance(self._pcontext, MultiprocessContext):
            assert self._pcontext._pc is not None
            return dict(enumerate(process.exitcode for process in self._pcontext._pc.processes))
        assert isinstance(self._pcontext, SubprocessContext)
        return {rank: handler.proc.poll() for rank, handler in self._pcontext.subprocess_handlers.items()}

    def _published(self, local_rank: int, exit_code: int, worker_group: WorkerGroup) -> dict[str, Any]:
        """Tell all machines of a failure of this one."""
        failure = {"exit_code": exit_code, "time": time.time(), "text": ""}
        if self._meeting is not None:
            assert self._pcontext is not None
            log = Path(self._pcontext.stderrs[local_rank])
            rank = worker_group.workers[local_rank].global_rank
            tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
            how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
            failure["text"] = f"process {rank} on {socket.gethostname()} failed first ({how}; {log}):\n{tail}"
            with contextlib.suppress(RuntimeError):
                store, own, _ = self._round()
                store.set(f"failure/{own}", orjson.dumps(failure).decode())
        return failure

    def first_failure(self) -> dict[str, Any] | None:
        """Return the earliest failure of this round on any machine that has told of one."""
        found: list[dict[str, Any]] = []
        store, _, count = self._round()
        for index in range(count):
            with contextlib.suppress(RuntimeError):
                if store.check([f"failure/{index}"]):
                    found.append(orjson.loads(store.get(f"failure/{index}")))
        return min(found, key=lambda each: float(each["time"]), default=self.failure)

    def _construct_event(self, state: str, source: EventSource, *_: object, **__: object) -> Event:
        return Event(state, source)  # torch's own has the host's full name, for which it waits where no DNS answers


def connection(meeting: Meeting) -> Store:
    """Open a new connection to the store of a meeting."""
    endpoint, timeout = meeting.endpoint, timedelta(seconds=60)
    return TCPStore(endpoint.host, endpoint.port, is_master=False, wait_for_workers=False, timeout=timeout)


def run(
    module: str,
    arguments: Sequence[str],
    processes: int,
    is_forked: bool,
    machines: Machines | None,
    max_restarts: int,
    log_dir: Path | None,
) -> int:
    """Run ``module.main(arguments)`` in `processes` processes, forked or in new interpreters, as `launching.spawn`.

    Raises:
        RunError: the first machine is lost; or too few machines are left, and none came back within `RETURN_SECONDS`.
    """
    os.environ |= {
        # Not needed: the processes use the store of the meeting. torch would open a port for a second one.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # Requests to stop are passed on by `SignalForwarding`; torch's handlers would kill after half a minute.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
        "TORCH_ELASTIC_WORKER_IDENTICAL": "1",
    }
    for name in [each for each in logging.root.manager.loggerDict if each.startswith("torch.")]:
        if "elastic" in name or "multiprocessing" in name:
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what it reports is told here
    meeting = machines.meeting if machines is not None else None
    handler: StaticTCPRendezvous | _Rendezvous
    logs: DefaultLogsSpecs
    if meeting is None:
        handler, logs = _LoneMachine("localhost", 0, 0, 1, _NAME, 0), _NoLogs(os.devnull)
    else:
        assert machines is not None and log_dir is not None
        handler = _Rendezvous.from_backend(
            _NAME,
            PrefixStore("elastic", connection(meeting)),
            C10dRendezvousBackend(PrefixStore("elastic", connection(meeting)), _NAME),
            machines.least,
            machines.number,
            # torch sorts the machines by this text: the first one gets the first ranks.
            local_addr=f"{meeting.index:06} {meeting.address}",
            timeout=RendezvousTimeout(join=timedelta(seconds=RETURN_SECONDS), last_call=timedelta(seconds=5)),
            keep_alive_interval=2,
            keep_alive_max_attempt=5,
        )
        log_dir.mkdir(parents=True, exist_ok=True)
        logs = DefaultLogsSpecs(str(log_dir), redirects=Std.ALL, tee=Std.ALL)
    entrypoint = supervision.forked if is_forked else sys.executable
    command = (module, *arguments) if is_forked else ("-u", "-m", module, *arguments)
    spec = WorkerSpec(_NAME, processes, handler, entrypoint=entrypoint, args=command, max_restarts=max_restarts)
    spec.monitor_interval = 0.2
    agent = NodeAgent(spec, logs, meeting)
    code = RunError.exit_code
    try:
        result = agent.run()
        if result is not None and result.state is WorkerState.SUCCEEDED:
            code = 0
    except RendezvousClosedError:
        pass  # another machine has given up: its failure says why
    except RendezvousTimeoutError:
        raise RunError(
            f"fewer than {machines.least if machines else 1} machines are left, and none came back within "
            f"{RETURN_SECONDS} s. The checkpoints are whole: start all machines again, and they go on from the newest"
        ) from None
    except RendezvousError as error:
        raise LostFirstMachine(f"the first machine does not answer any more: {error}") from error
    if code and (failure := agent.first_failure()):
        code = failure["exit_code"]
        print(failure["text"], end="\n" if failure["text"] else "", file=sys.stderr)
    with contextlib.suppress(RendezvousError, RuntimeError):
        handler.shutdown()
    # A run that was asked to stop, and could not save, has failed.
    return INTERRUPTED if agent.is_stopped and code != RunError.exit_code else code
