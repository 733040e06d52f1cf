"""Training processes: requests to stop reach them, a killed one is reported, who waits for whom, and their rendezvous.

No other machine and no other user can join that.
"""

import ctypes
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from programs import launch
from tiny import ROOT

from zerokara.base.resources import network_environment
from zerokara.training import spawning
from zerokara.training.planning import processors
from zerokara.training.processes import joining, supervision

TRAINER = """
import pathlib, signal, sys, time
def heard(number, frame):
    sys.exit(7)
signal.signal(signal.SIGTERM, heard)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""
LOADING = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
BLOCKED = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {LOADING}"
"""As a process that waits for the others in C, and never runs a signal handler."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Start a program as a training process; it has begun then."""
    started: list[subprocess.Popen[bytes]] = []

    def begun(program: str) -> subprocess.Popen[bytes]:
        path = tmp_path / f"{len(started)}.ready"
        started.append(subprocess.Popen([sys.executable, "-c", program, path], start_new_session=True))
        while not path.exists():
            assert started[-1].poll() is None
            time.sleep(0.01)
        return started[-1]

    yield begun
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_stop_is_forwarded(
    start: Callable[[str], subprocess.Popen[bytes]], capfd: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    """A process that does not listen yet would die of SIGINT with a traceback: SIGTERM ends it silently."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started by nohup
    processes = [start(program) for program in (TRAINER, TRAINER, LOADING)]
    with supervision.SignalForwarding(lambda: [each.pid for each in processes]) as forwarding:
        os.kill(os.getpid(), number)
        assert [process.wait(30) for process in processes] == [7, 7, -signal.SIGTERM]
    assert forwarding.requested
    output = capfd.readouterr()
    assert "saves after this step" in output.out and "KeyboardInterrupt" not in output.err


def test_it_is_forwarded_though_nobody_reads_the_output(
    start: Callable[[str], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C ends the `tee` behind a pipe, too: the run would be killed within a step."""

    def gone(*_: object, **__: object) -> None:
        raise BrokenPipeError

    process = start(TRAINER)
    monkeypatch.setattr("builtins.print", gone)
    with supervision.SignalForwarding(lambda: [process.pid]):
        os.kill(os.getpid(), signal.SIGINT)
        assert process.wait(30) == 7


def test_a_lost_terminal_does_not_stop_what_nohup_started(start: Callable[[str], subprocess.Popen[bytes]]) -> None:
    before, process = signal.signal(signal.SIGHUP, signal.SIG_IGN), start(TRAINER)
    try:
        with supervision.SignalForwarding(lambda: [process.pid]) as forwarding:
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(0.2)
        assert not forwarding.requested and process.poll() is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_kills_at_once_and_a_first_ends_this_process_before_there_are_others(
    start: Callable[[str], subprocess.Popen[bytes]],
) -> None:
    with pytest.raises(KeyboardInterrupt), supervision.SignalForwarding(lambda: []):
        os.kill(os.getpid(), signal.SIGTERM)
    process = start(BLOCKED)
    with supervision.SignalForwarding(lambda: [process.pid]):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        assert process.poll() is None
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert process.wait(30) == -signal.SIGKILL


def test_processes_that_wait_for_one_that_failed_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is that of the first one; one that lost it leaves a second later."""
    program = "import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '2' else time.sleep(60)\n"
    (tmp_path / "probe.py").write_text(program, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    started = time.monotonic()
    assert launch("probe", [], 4) == 7 and time.monotonic() - started < 30
    assert not [each for each in psutil.Process().children() if "probe" in each.cmdline()]


LATE = """
import atexit
from zerokara.training.processes import supervision

class Late:
    def __del__(self):
        print("taken apart", flush=True)

late = Late()
atexit.register(print, "exit function", end="")
supervision.leave(3)
"""


def test_what_ends_runs_its_exit_functions_and_is_not_taken_apart() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LATE], cwd=ROOT / "original_codes", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "exit function", "")


HELD = """
import os, psutil, torch
from zerokara.training.processes import joining
for keeps in (True, False):
    if not os.fork():
        torch.ones(2_000_000)  # loads what the first tensor needs
        joining.keep_freed_memory(keeps)
        before = psutil.Process().memory_info().rss
        tensors = [torch.ones(2_000_000) for _ in range(15)]
        del tensors[:-1]
        print(psutil.Process().memory_info().rss - before, flush=True)
        os._exit(0)
    os.wait()
"""
SLOW = f"""
import datetime, os, sys, time
import torch, torch.distributed
from zerokara.base.errors import RunError
from zerokara.training.processes import joining
rank = 0 if os.fork() else 1
torch.distributed.init_process_group("gloo", init_method=f"file://{{sys.argv[1]}}", rank=rank, world_size=2)
joining.TIMEOUT = datetime.timedelta(seconds=0.5)
processes = joining.Processes(torch.device("cpu"), rank)
def work():
    time.sleep(2)
    return "7"
def fail():
    raise RunError("no disk")
for call in (work, fail, work):
    try:
        end = processes.from_one(call)
    except (RunError, SystemExit) as error:
        end = error
    os.write(1, f"{{rank}} {{end}}\\n".encode())  # whole lines: two processes write
    if call == fail:
        os.environ[{processors.PARENT_NAME!r}] = "0"  # the launcher is gone
if rank == 0:
    os.wait()
"""


def run(program: str, folder: Path) -> list[str]:
    command = [sys.executable, "-c", program, str(folder / "rendezvous")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.splitlines()


@pytest.mark.slow
def test_freed_memory_is_kept_or_given_back(tmp_path: Path) -> None:
    """14 of 15 tensors of 8 MB are freed; in processes of their own, since the policy cannot be taken back."""
    kept, given_back = map(int, run(HELD, tmp_path))
    assert kept > 80e6 and given_back < 40e6


@pytest.mark.slow
def test_the_others_wait_for_as_long_as_the_launcher_is_alive(tmp_path: Path) -> None:
    """The first one's work takes longer than a collective may; where it fails, or the launcher is gone, they end."""
    assert sorted(run(SLOW, tmp_path)) == ["0 7", "0 7", "0 no disk", "1 1", "1 1", "1 7"]


GLOO = """
import os, psutil, torch.distributed
from zerokara.base.resources import network_environment
os.environ.update(network_environment())
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
print(*{each.laddr.ip for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN})
"""
CLONE_NEWUTS = 0x04000000
"""Source: linux/sched.h."""


def listening() -> set[int]:
    return {each.laddr.port for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


def test_processes_share_the_store_which_outlives_the_one_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And opens no port."""
    before, stores = listening(), []
    with spawning.local_rendezvous() as environment:
        monkeypatch.setenv(supervision.RENDEZVOUS_NAME, environment[supervision.RENDEZVOUS_NAME])
        for _ in range(2):
            joining.rendezvous_store.cache_clear()
            stores.append(joining.rendezvous_store())
    joining.rendezvous_store.cache_clear()
    one, other = stores
    one.set("word", "said")
    assert other.get("word") == b"said" and one is not other and listening() == before


def test_another_user_cannot_open_it() -> None:
    with spawning.local_rendezvous() as environment:
        path = environment[supervision.RENDEZVOUS_NAME]
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert subprocess.run(["cat", path], capture_output=True).returncode == 0
        if os.geteuid() == 0:  # who may become another user
            done = subprocess.run(["cat", path], capture_output=True, user=65534, group=65534, extra_groups=[])
            assert done.returncode == 1 and done.stderr


def test_gloo_listens_on_the_loopback_interface_whatever_the_hosts_name_is(root: Path) -> None:
    addresses = [
        each.address for every in psutil.net_if_addrs().values() for each in every if each.family == socket.AF_INET
    ]
    on_the_network = next((address for address in addresses if not address.startswith("127.")), "127.0.0.1")
    environment = {**os.environ, "PYTHONPATH": str(root / "original_codes")}
    environment.pop("GLOO_SOCKET_IFNAME", None)

    def rename_host() -> None:
        """For this process alone: gloo listens where the host's name leads."""
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUTS) == 0:
            socket.sethostname(on_the_network)

    command = [sys.executable, "-c", GLOO]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, preexec_fn=rename_host)
    assert done.stdout.split() == [b"127.0.0.1"]


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_RAS_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    ours = network_environment()
    assert ours["NCCL_SOCKET_IFNAME"] == "=" + ours["GLOO_SOCKET_IFNAME"]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert network_environment() == {**ours, "GLOO_SOCKET_IFNAME": "eth7"}
