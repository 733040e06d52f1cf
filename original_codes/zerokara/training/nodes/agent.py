"""The processes of this machine among several, by torchrun's agent (torch elastic): started, watched, started again.

The agents of all machines agree on ranks (rendezvous), start their processes, and look after them. Added to torch's own
is what an unattended run needs: a lost machine or a cut link is noticed (`heartbeat`) and the processes that would wait
for it are killed; what would fail again is not started again; a request to stop is passed on, and the processes save.
Source: torch 2.13, torch/distributed/elastic/agent/server and rendezvous/dynamic_rendezvous.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import orjson
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, ProcessFailure, Std, SubprocessContext
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from zerokara.errors import RunError
from zerokara.training.nodes.heartbeat import Heartbeat
from zerokara.training.nodes.meeting import LostFirstMachine, Meeting
from zerokara.training.processes import launcher, rendezvous

RETURN_SECONDS = 600
"""How long the others wait for a lost machine to come back, where they are too few without it."""
_NAME = "zerokara"
_END_SECONDS = 20
"""How long processes may take to end that were asked to."""
_TAIL_LINES = 40


@dataclass(frozen=True)
class Failure:
    """The process of a machine that failed first. JSON."""

    host: str
    rank: int
    exit_code: int
    time: float
    log: str
    """The file with what it printed, on its machine."""
    tail: str
    """The end of it."""

    def __str__(self) -> str:
        how = f"signal {-self.exit_code}" if self.exit_code < 0 else f"exit code {self.exit_code}"
        return f"process {self.rank} on {self.host} failed first ({how}; {self.log}):\n{self.tail}"


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


class NodeAgent(LocalElasticAgent):
    """The agent of one machine."""

    def __init__(
        self,
        spec: WorkerSpec,
        handler: _Rendezvous,
        logs: DefaultLogsSpecs,
        meeting: Meeting,
        environment: dict[str, str],
    ):
        """`handler` is the one of `spec`; `environment` is what the processes get beside torch's own variables."""
        super().__init__(spec, logs, log_line_prefix_template="[${rank}] ")
        self._meeting, self._environment, self._handler = meeting, environment, handler
        self._running = contextlib.ExitStack()
        """What lasts as long as the processes of one round."""
        self._heartbeat: Heartbeat | None = None
        self._attempt = ""
        self.is_stopped = False
        """Whether somebody asked to stop on this machine."""
        self.failure: Failure | None = None

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        store, rank, count = self._round()
        store.set(f"host/{rank}", f"{socket.gethostname()} ({self._meeting.address})")
        if rank == 0:
            store.set("attempt", str(time.time_ns()))
        self._attempt = store.get("attempt").decode()
        hosts = {index: store.get(f"host/{index}").decode() for index in range(count) if index != rank}
        beats = PrefixStore(f"beats/{self._attempt}", connection(self._meeting))
        self._heartbeat = Heartbeat(beats, rank, hosts, self._handler.look)

    def _round(self) -> tuple[Store, int, int]:
        """The store of the present round, this machine among those in it, and their number."""
        store, rank, count = (getattr(self._worker_group, name) for name in ("store", "group_rank", "group_world_size"))
        assert store is not None and rank is not None and count is not None
        return store, rank, count

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        endpoint = self._meeting.endpoint
        os.environ.update(self._environment)
        os.environ[rendezvous.VARIABLE] = rendezvous.at(endpoint.host, endpoint.port, self._attempt)
        pids = super()._start_workers(worker_group)
        assert self._heartbeat is not None and isinstance(self._pcontext, SubprocessContext)
        self._running.enter_context(self._heartbeat)
        started = [handler.proc for handler in self._pcontext.subprocess_handlers.values()]
        self._forwarding = self._running.enter_context(launcher.SignalForwarding(started))
        return pids

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _END_SECONDS) -> None:
        super()._shutdown(death_sig, min(timeout, _END_SECONDS))
        if self._attempt and self._heartbeat is not None:
            self.is_stopped = self.is_stopped or self._forwarding.requested
        self._running.close()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        assert self._heartbeat is not None
        if lost := self._heartbeat.lost():
            self._kill()
            self._tell_lost()
            print(f"{lost}: the processes of this machine were killed", file=sys.stderr, flush=True)
            if not self._heartbeat.reaches_store:
                raise LostFirstMachine(
                    f"{lost}: it was switched off, or the network is cut. Its checkpoints are whole: start all "
                    "machines again, and they go on from the newest"
                )
            return RunResult(state=WorkerState.UNHEALTHY)
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED:
            self.failure = self._told(min(result.failures.values(), key=lambda each: each.timestamp), worker_group)
            if self._forwarding.requested or not launcher.may_restart(self.failure.exit_code):
                self._remaining_restarts = 0
        return result

    def _exit_barrier(self) -> None:
        """Wait until the processes of all machines are done, for as long as these show signs of life."""
        assert self._heartbeat is not None
        store, _, count = self._round()
        with contextlib.suppress(RuntimeError):
            done = store.add("done", 1)
            while done < count:
                if lost := self._heartbeat.lost():
                    print(f"{lost}: it is not waited for any more", file=sys.stderr, flush=True)
                    self._tell_lost()
                    return
                time.sleep(0.2)
                done = store.add("done", 0)

    def _tell_lost(self) -> None:
        """Let nobody wait for a lost machine at the end."""
        if self._meeting.is_first:
            self._meeting.left()

    def _kill(self) -> None:
        assert self._pcontext is not None
        for pid in self._pcontext.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _told(self, failed: ProcessFailure, worker_group: WorkerGroup) -> Failure:
        """Tell all machines of a failure of this one."""
        assert self._pcontext is not None
        log = Path(self._pcontext.stderrs[failed.local_rank])
        rank = worker_group.workers[failed.local_rank].global_rank
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
        failure = Failure(socket.gethostname(), rank, failed.exitcode, failed.timestamp, str(log), tail)
        with contextlib.suppress(RuntimeError):
            store, own, _ = self._round()
            store.set(f"failure/{own}", orjson.dumps(asdict(failure)).decode())
        return failure

    def first_failure(self) -> Failure | None:
        """The earliest failure of this round on any machine that has told of one."""
        found: list[Failure] = []
        store, _, count = self._round()
        for index in range(count):
            with contextlib.suppress(RuntimeError):
                if store.check([f"failure/{index}"]):
                    found.append(Failure(**orjson.loads(store.get(f"failure/{index}"))))
        return min(found, key=lambda each: each.time, default=self.failure)


def connection(meeting: Meeting) -> Store:
    """A connection of its own to the store of a meeting."""
    endpoint = meeting.endpoint
    return TCPStore(
        endpoint.host, endpoint.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


def run(
    meeting: Meeting,
    least: int,
    most: int,
    processes: int,
    command: Sequence[str],
    environment: dict[str, str],
    max_restarts: int,
    log_dir: Path,
) -> int:
    """Run `command` (a program and its arguments) in `processes` processes here, as on the other machines.

    Returns the exit code: 0, that of the process that failed first on any machine, or 130 if it was asked to stop here.

    Raises:
        RunError: the first machine is lost; or too few machines are left, and none came back within `RETURN_SECONDS`.
    """
    # Not needed: the processes use the store of the meeting. torch would open a port for a second one.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # Requests to stop are passed on by `launcher.SignalForwarding`; torch's handlers would kill after half a minute.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    for name in [each for each in logging.root.manager.loggerDict if each.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what it reports is told here, in words of our own
    handler = _Rendezvous.from_backend(
        _NAME,
        PrefixStore("elastic", connection(meeting)),
        C10dRendezvousBackend(PrefixStore("elastic", connection(meeting)), _NAME),
        least,
        most,
        # torch sorts the machines by this text: the first one gets the first ranks.
        local_addr=f"{meeting.index:06} {meeting.address}",
        timeout=RendezvousTimeout(join=timedelta(seconds=RETURN_SECONDS), last_call=timedelta(seconds=5)),
        keep_alive_interval=2,
        keep_alive_max_attempt=5,
    )
    program, *arguments = command
    spec = WorkerSpec(_NAME, processes, handler, entrypoint=program, args=tuple(arguments), max_restarts=max_restarts)
    spec.monitor_interval = 0.2
    log_dir.mkdir(parents=True, exist_ok=True)
    logs = DefaultLogsSpecs(str(log_dir), redirects=Std.ALL, tee=Std.ALL)
    agent = NodeAgent(spec, handler, logs, meeting, environment)
    code = 1
    try:
        result = agent.run()
        code = 0 if result is not None and not result.is_failed() and result.state is WorkerState.SUCCEEDED else 1
    except RendezvousClosedError:
        pass  # another machine has given up: its failure says why
    except RendezvousTimeoutError:
        raise RunError(
            f"fewer than {least} machines are left, and none came back within {RETURN_SECONDS} s. The checkpoints are "
            "whole: start all machines again, and they go on from the newest"
        ) from None
    except RendezvousError as error:
        raise LostFirstMachine(f"the first machine does not answer any more: {error}") from error
    failure = None if code == 0 else agent.first_failure()
    with contextlib.suppress(RendezvousError, RuntimeError):
        handler.shutdown()
    if failure is not None:
        print(failure, file=sys.stderr)
    if agent.is_stopped and code == 0:
        return launcher.INTERRUPTED
    return failure.exit_code if failure is not None else code
