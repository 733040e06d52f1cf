"""Several machines on one: each has a network, a host name and a folder of its own (Linux namespaces), at one switch.

A host is a process that sleeps in namespaces of its own; commands enter them (nsenter). Host names resolve nowhere, as
on many a cluster. All of it is inside a network namespace (`run.sh`), as root there, which any user may be where the
machine allows it: nothing here changes the machine's own network.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from configs import typed
from tiny import ROOT

PORT = 29400


class Host:
    """One machine."""

    def __init__(self, number: int, bridge: str):
        self.name, self.address, self.number = f"host-{number}", f"10.77.0.{number + 1}", number
        # Its own folder: at the same path on each host lies another disk.
        self._process = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c",
             f"hostname {self.name} && mount --make-rprivate / && mount -t tmpfs -o size=256m tmpfs {OWN}"
             " && ip link set lo up && echo ready && exec sleep infinity"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None and self._process.stdout.readline() == "ready\n"
        (inner,) = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self.pid = int(inner)
        for command in (
            f"ip link add {self.plug} type veth peer name eth0 netns {self.pid}",
            f"ip link set {self.plug} master {bridge} up",
        ):
            subprocess.run(command.split(), check=True)
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    @property
    def plug(self) -> str:
        return f"plug{self.number}"

    def run(self, *command: str) -> str:
        return subprocess.run([*self._enter(), *command], check=True, capture_output=True, text=True).stdout

    def start(self, *command: str, log: Path, **environment: str) -> subprocess.Popen[str]:
        """Start a command there, in the repository; its output goes into `log`."""
        with open(log, "ab") as file:
            return subprocess.Popen(
                [*self._enter(), *command], cwd=ROOT, stdout=file, stderr=file, text=True, start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip

    def num_processes(self) -> int:
        """Processes that run there, but for the one that keeps the host; what has ended and waits for it are none."""
        listed = self.run("sh", "-c", "grep -L '^State:.Z' /proc/[0-9]*/status 2>/dev/null; true").split()
        return len(listed) - 2  # the keeper and this shell

    def seen(self, path: Path) -> Path:
        return Path(f"/proc/{self.pid}/root{path}")

    def unplug(self) -> None:
        subprocess.run(["ip", "link", "set", self.plug, "down"], check=True)

    def crash(self) -> None:
        self.unplug()
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        # The kernel would take its time to do so when the network's last process is gone.
        subprocess.run(["ip", "link", "delete", self.plug], check=False, stderr=subprocess.DEVNULL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def _enter(self) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--pid", f"--wdns={ROOT}"]


OWN = Path("/tmp/zerokara-own")


@contextlib.contextmanager
def cluster(count: int) -> Iterator[list[Host]]:
    """So many hosts at one switch, as long as the block lasts."""
    OWN.mkdir(exist_ok=True)
    bridge = "switch"
    subprocess.run(["ip", "link", "add", bridge, "type", "bridge"], check=True)
    subprocess.run(["ip", "link", "set", bridge, "up"], check=True)
    hosts: list[Host] = []
    try:
        for number in range(count):
            hosts.append(Host(number, bridge))
        yield hosts
    finally:
        for host in hosts:
            host.close()
        subprocess.run(["ip", "link", "delete", bridge], check=True)


class Training:
    """One run on several hosts, begun by the commands that people type there."""

    def __init__(
        self,
        hosts: Sequence[Host],
        logs: Path,
        settings: Mapping[str, Any],
        of: Mapping[int, Mapping[str, Any]],
        start: Iterable[int],
    ):
        """The first of `hosts` gets ``nodes``, the others ``--join``.

        `of` has settings of single hosts, under ``script`` another script, under ``before`` what stands before the
        command, and an ``environment`` of their own; `start` are those that are started.
        """
        logs.mkdir(parents=True, exist_ok=True)
        self.hosts, self.logs = list(hosts), [logs / f"{host.name}.log" for host in hosts]
        self.started: dict[int, subprocess.Popen[str]] = {}
        for number in start:
            given = {"script": "3_train_node1.sh", "before": [], "environment": {}, **settings, **of.get(number, {})}
            before, script, config, environment = map(given.pop, ("before", "script", "config", "environment"))
            command = [*before, "bash", str(script), "--config", config]
            if len(hosts) > 1:
                given["nodes"] = len(hosts)
                command += ["--join" if number else "--host", hosts[0].address]
            command += typed(**given)
            environment = {"ZEROKARA_SHARE_CORES": "1", "OMP_NUM_THREADS": "1", **environment}
            self.started[number] = hosts[number].start(*command, log=self.logs[number], **environment)

    def log(self, number: int) -> str:
        return self.logs[number].read_text(encoding="utf-8", errors="replace")

    def wait(self, seconds: float = 180) -> list[int]:
        return [process.wait(seconds) for process in self.started.values()]

    def wait_for(self, text: str, number: int = 0, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.log(number):
            assert time.monotonic() < deadline, f"not printed within {seconds} s: {text}\n{self.log(number)}"
            assert self.started[number].poll() is None or text in self.log(number), self.log(number)
            time.sleep(0.1)


def requirements() -> str:
    """Return what this machine lacks for namespaces; empty where they can be had."""
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install iproute2 util-linux"
    user = ["--user", "--map-root-user"] if os.getuid() else []
    tried = subprocess.run(
        ["unshare", *user, "--net", "--uts", "--mount", "--pid", "--fork", "true"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"this machine gives its users no namespaces: {tried.stderr.strip()}" if tried.returncode else ""


if __name__ == "__main__":
    sys.exit(requirements() or 0)
