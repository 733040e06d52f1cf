"""The rendezvous of the machines that train together: who is there, and a check that all have the same code and data.

The first machine holds a store (torch's TCPStore), which the others find at its address; the machines agree on
everything through it, torchrun's own rendezvous included. Whoever reaches its port can read and change it, and the
rendezvous holds pickles: the machines need a private network.

Each machine publishes a report, and all compare the reports with the first machine's. A fault on any machine keeps all
from starting, and each of them prints every fault of all.
"""

import contextlib
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
from torch.distributed import DistNetworkError, PrefixStore, Store, TCPStore

from zerokara.base import manifest
from zerokara.base.durable import made_folder
from zerokara.base.errors import Fault, RunError, Stopped, UserError, refuse
from zerokara.base.progress import bytes_text, plural
from zerokara.base.resources import free_bytes
from zerokara.tokens.indexed import bin_path, idx_path
from zerokara.training.nodes.machines import HOST, JOIN, Endpoint, Machines, address_towards, own_addresses
from zerokara.training.planning.earlier_run import PLACES, weights_id
from zerokara.training.planning.run_plan import RunPlan, code_sha256

CONNECT_SECONDS = 300.0
"""Wait of a machine for the first one, which may be started later."""
ANSWER_SECONDS = 60.0
"""Wait for the answer of a machine that has arrived."""
GRACE_SECONDS = 30.0
"""Wait for further machines once `min_nodes` are there."""
LEAVE_SECONDS = 20.0
"""Wait of the first machine, at its end, for the others to leave."""
_POLL_SECONDS = 0.2
PACKAGES = (
    "torch", "deepspeed", "megatron-core", "numpy", "sentencepiece", "tokenizers", "safetensors", "transformers",
)  # fmt: skip
"""Packages whose version may change a number."""
MAX_CLOCK_SECONDS = 5.0
"""Largest difference of clocks: torch's rendezvous takes a machine for lost whose last heartbeat, by the clock of that
machine, is ten seconds old by the clock of another."""
COMPARED = {
    "code": ("another zerokara", "check out the same commit on every machine, without changes of its own"),
    "packages": ("other packages", "run ./setup.sh on this machine: it installs the versions of the lock file"),
    "settings": ("other settings", "copy config.yaml and a run folder to every machine, and give each the same --set"),
    "tokenizer": ("another tokenizer", "copy it from the first machine"),
    "data": ("other token files or teachers", "copy them from the first machine, with their manifest"),
    "processes": ("another number of processes", "set num_processes to what every machine has"),
    "device": ("another kind of device", "set CUDA_VISIBLE_DEVICES, or leave this machine out"),
    "precision": ("another precision", "set precision: bf16, or fp32, rather than auto"),
}
"""Entries of a report that must be the same on all machines: the name of a difference, and its remedy."""


class LostFirstMachine(RunError):
    """The first machine, which holds the rendezvous, is gone or out of reach."""


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll `condition` until it is true, for at most `seconds`; return its last answer."""
    deadline = time.monotonic() + seconds
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return is_true


@dataclass
class Rendezvous:
    """The rendezvous, as one of the machines sees it."""

    store: Store
    endpoint: Endpoint
    address: str
    """Address of this machine, as the others reach it."""
    index: int
    """Order of arrival; the first machine, which holds the store, is 0."""
    min_count: int
    count: int = 0
    """Machines that have arrived."""
    clock: tuple[float, float] = (0.0, 0.0)
    """Clock of this machine before and after one moment, the same on all machines."""
    folder_owner: int = 0
    """Index of the machine that owns the run folder that this one sees (`owns_run_dir`)."""

    def publish(self, name: str, content: object = None) -> None:
        """Publish a JSON value of this machine."""
        self.store.set(f"{name}/{self.index}", orjson.dumps(content).decode())

    def wait_for(self, name: str, index: int = 0, seconds: float = ANSWER_SECONDS) -> Any:
        """Wait for the value that machine `index` publishes, and return it.

        Raises:
            RunError: it has not come in time; names the machine.
        """
        key = f"{name}/{index}"
        if not wait_until(lambda: self.store.check([key]), seconds):
            who = f"machine {index}" if index else f"the first machine, {self.endpoint},"
            raise RunError(f"{who} has given up before the start; see what it printed")
        return orjson.loads(self.store.get(key))

    def gather(self, name: str, content: object = None, seconds: float = ANSWER_SECONDS) -> list[Any]:
        """Publish a value, and `wait_for` those of all machines, in their order; every machine must call it."""
        self.publish(name, content)
        return [self.wait_for(name, index, seconds) for index in range(self.count)]

    def owns_run_dir(self, run_dir: Path) -> bool:
        """Find out whether this machine makes the run folder: the first of those that see the same one.

        Each leaves a file in the folder, and looks for those of the others.
        """
        own = run_dir / f".{secrets.token_hex(8)}.partial"
        with made_folder(run_dir):  # mkdir asks the server; NFS may still remember no folder
            try:
                own.write_bytes(b"")
                probes = [own.with_name(name) for name in self.gather("probe", own.name)]
                self.folder_owner = next(index for index, probe in enumerate(probes) if probe.exists())
                self.gather("looked")
            finally:
                own.unlink(missing_ok=True)
        if self.folder_owner != self.index:
            print(f"the run folder {run_dir} is shared with machine {self.folder_owner}", flush=True)
        return self.folder_owner == self.index


@contextlib.contextmanager
def join_rendezvous(machines: Machines) -> Iterator[Rendezvous]:
    """Meet the other machines, as long as the block lasts; log how they find this one, and how many it waits for.

    Raises:
        UserError: the first machine cannot listen at its address, or nobody does there.
        RunError: the run has started without this machine; one that had arrived has left; a task of Slurm never came.
    """
    endpoint = machines.endpoint
    assert endpoint is not None
    machines.has_met = True
    if machines.is_first:
        server = _listening(endpoint)
        print(f"waiting for {plural(machines.number - 1, 'more machine')} at {endpoint}", flush=True)
        if machines.command_to_join:
            print(f"on each, with the same settings and data: {machines.command_to_join}", flush=True)
    else:
        print(f"looking for the first machine at {endpoint}", flush=True)
        server = _connected(endpoint)
    store, leaves = PrefixStore("zerokara", server), True
    rendezvous = Rendezvous(store, endpoint, address_towards(endpoint.host), 0, machines.min_number)

    def has_changed(count: int) -> bool:
        return store.add("arrived", 0) >= count or store.add("departed", 0) > 0

    try:
        if machines.is_first:
            count = 1
            while count < machines.number:
                # Slurm starts all at once; people come later.
                seconds = float("inf") if machines.command_to_join else CONNECT_SECONDS
                seconds = seconds if count < machines.min_number else GRACE_SECONDS
                if not wait_until(partial(has_changed, count), seconds):
                    break
                if store.add("departed", 0):
                    raise RunError("a machine that had arrived has left; see what it printed, and start all again")
                count = 1 + store.add("arrived", 0)
            if count < machines.min_number:
                missing = plural(machines.min_number - count, "machine")
                raise RunError(f"{missing} of the Slurm step did not come within {CONNECT_SECONDS:.0f} s; see the log")
            rendezvous.publish("count", min(count, machines.number))
        else:
            rendezvous.index = store.add("arrived", 1)
        rendezvous.count = rendezvous.wait_for("count", seconds=float("inf"))
        if rendezvous.index >= rendezvous.count:
            raise RunError("the run has started without this machine; it may join the next start")
        before = time.time()
        rendezvous.gather("here")  # the moment at which the last machine publishes it lies between both clocks of each
        rendezvous.clock = before, time.time()
        yield rendezvous
    except DistNetworkError as error:
        raise LostFirstMachine(f"the first machine, {endpoint}, has ended; see what it printed") from error
    except LostFirstMachine:
        leaves = False  # on a cut link a request hangs
        raise
    except KeyboardInterrupt as stop:
        # While machines wait for the first one, its end is what tells them; from training all of them leave together.
        leaves = not machines.is_first or isinstance(stop, Stopped)
        raise
    finally:
        with contextlib.suppress(RuntimeError):
            if leaves and machines.is_first:  # the others still read here why they end
                wait_until(lambda: store.add("departed", 0) >= store.add("arrived", 0), LEAVE_SECONDS)
            elif leaves:
                store.add("departed", 1)


def _listening(endpoint: Endpoint) -> TCPStore:
    """Open a store at an address of this machine, and at no other."""
    host, port = endpoint
    try:
        listener = socket.create_server(endpoint, family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        fd, timeout = listener.detach(), timedelta(seconds=ANSWER_SECONDS)
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd)
    except (RuntimeError, OSError) as error:
        rule = f"this machine cannot listen there ({str(error).splitlines()[0]})"
        remedy = f"name a port that is free, e.g. {port + 1}, at one of its addresses: {', '.join(own_addresses())}"
        raise UserError(Fault(HOST, rule, value=str(endpoint), remedy=remedy)) from error


def _connected(endpoint: Endpoint) -> TCPStore:
    """Connect to the store of the first machine, and try for `CONNECT_SECONDS`, for `ANSWER_SECONDS` at a time.

    A single long attempt was seen to hang, once in hundreds, where both machines started at the same moment.
    """
    deadline, timeout, has_route = time.monotonic() + CONNECT_SECONDS, timedelta(seconds=ANSWER_SECONDS), False
    while True:
        try:
            has_route = bool(address_towards(endpoint.host))
            socket.create_connection(endpoint, ANSWER_SECONDS).close()  # torch logs C++ frames where nobody answers
            return TCPStore(*endpoint, is_master=False, wait_for_workers=False, timeout=timeout)
        except (RuntimeError, OSError) as error:
            if not has_route or time.monotonic() > deadline:
                rule = f"nobody answers there ({str(error).splitlines()[0]})"
                firewall = f"if it waits already, see whether its firewall lets port {endpoint.port} in"
                remedy = f"start the first machine, and type the line that it prints; {firewall}"
                raise UserError(Fault(JOIN, rule, value=str(endpoint), remedy=remedy)) from error
        time.sleep(_POLL_SECONDS)  # a refusal comes at once


def check_consistent(rendezvous: Rendezvous, plan: RunPlan) -> RunPlan:
    """Compare the reports of the machines; print them, and return the plan for the machines that arrived.

    Raises:
        UserError: they must not start together; holds every fault of all.
        RunError: a machine has given up.
    """
    plan = plan.on_processes(rendezvous.count * plan.processes_per_node, rendezvous.count)
    # The content of files is compared, and not the names: a copy may have been cut off or patched since the manifest.
    prefixes = {"train": plan.data.training.prefix, "valid": plan.data.valid_prefix}
    files = {name + path.suffix: path for name, at in prefixes.items() for path in (bin_path(at), idx_path(at))}
    tokens = {"train": plan.data.sha256[:12], "valid": plan.data.valid_sha256[:12]}
    tokens |= {name: manifest.sampled_sha256([path]) for name, path in files.items() if path.exists()}
    tokens |= {folder: weights_id(folder) for folder in plan.requested.teachers}
    settings = plan.requested.model_dump(mode="json") | {"deepspeed_template": plan.requested_template}
    own = _machine(rendezvous, plan.run_dir) | {
        "code": code_sha256(),
        "packages": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "settings": {key: value for key, value in settings.items() if key not in PLACES},
        "tokenizer": plan.encoder.sha256,
        "data": tokens,
        "processes": plan.processes_per_node,
        "device": plan.memory.device,
        "devices": plan.devices.text(plan.processes_per_node),
        "precision": plan.resolved.precision,
        "stage": plan.resolved.stage,
    }
    reports = rendezvous.gather("report", own, CONNECT_SECONDS)  # a cold disk needs long for the samples
    lines = map(_line, range(rendezvous.count), reports)
    print(f"{rendezvous.count} machines are here:", *lines, sep="\n  ", flush=True)
    refuse(faults(reports))
    if plan.requested.zero_stage == "auto":  # each has chosen by its own memory
        plan = plan.with_settings(zero_stage=max(report["stage"] for report in reports))
        print(f"zero_stage: auto: {plan.resolved.stage}, the highest that a machine needs", flush=True)
    return plan


def report_faults(machines: Machines, faults: Sequence[Fault]) -> None:
    """Report to the others why this machine cannot take part, so that all print it; do nothing once they have met."""
    if not machines.has_met:
        with contextlib.suppress(UserError, RunError), join_rendezvous(machines) as rendezvous:
            rendezvous.gather("report", _machine(rendezvous, Path.cwd()) | {"faults": [str(each) for each in faults]})


def _machine(rendezvous: Rendezvous, folder: Path) -> dict[str, Any]:
    free = free_bytes(folder)
    return {"host": socket.gethostname(), "address": rendezvous.address, "free_bytes": free, "clock": rendezvous.clock}


def faults(reports: Sequence[dict[str, Any]]) -> Iterator[Fault]:
    """Yield everything that keeps the machines from training together."""
    first = reports[0]
    for index, report in enumerate(reports):
        where = f"machine {index}, {report['host']} ({report['address']})"
        if "faults" in report:
            yield from (Fault(where, text) for text in report["faults"])
            continue  # the rest of its report is missing
        for key, (what, remedy) in COMPARED.items():
            if "faults" not in first and report[key] != first[key]:
                was, now = first[key], report[key]
                text = f"{str(was)[:12]}, here {str(now)[:12]}"
                if isinstance(was, dict):
                    names = [name for name in sorted({*was, *now}) if was.get(name) != now.get(name)]
                    none = "(none)"
                    text = ", ".join(f"{name} {was.get(name, none)}, here {now.get(name, none)}" for name in names)
                yield Fault(where, f"has {what} than {first['host']}: {text}", remedy=remedy)
        (before, after), (first_before, first_after) = report["clock"], first["clock"]
        for seconds, side in ((before - first_after, "ahead of"), (first_before - after, "behind")):
            if seconds > MAX_CLOCK_SECONDS:
                rule = f"its clock is at least {seconds:.1f} s {side} that of {first['host']}"
                yield Fault(where, rule, remedy="set it right: timedatectl set-ntp true")


def _line(index: int, report: dict[str, Any]) -> str:
    """``1  beta (10.0.0.2)  8 processes on GPU, 8 × H200  zerokara 1f0c9a2b  data 77d0c2e1  1.2 TB free``."""
    what = "cannot take part"
    if "faults" not in report:
        processes = plural(report["processes"], "process", "processes")
        what = f"{processes} on {report['devices']}  zerokara {report['code'][:8]}  data {report['data']['train'][:8]}"
    return f"{index}  {report['host']} ({report['address']})  {what}  {bytes_text(report['free_bytes'])} free"
