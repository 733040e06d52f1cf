"""What must hold before several machines train together, found out in a minute and shown in one table.

Each machine reports what it has; all compare the reports with the first machine's, and measure their links. A fault on
any machine keeps all from starting, and each of them prints every fault of all.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from zerokara.errors import Fault, UserError
from zerokara.progress import bytes_text
from zerokara.tokens.layout import bin_path, idx_path
from zerokara.training.nodes import links
from zerokara.training.nodes.links import Link
from zerokara.training.nodes.meeting import Meeting
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.planning.setting_names import PLACES

PACKAGES = ("torch", "deepspeed", "megatron-core", "numpy", "sentencepiece", "safetensors", "transformers")
"""Those whose version may change a number."""
MAX_CLOCK_SECONDS = 5.0
"""By how much clocks may differ: modification times and logs are compared across machines."""
SAMPLES, SAMPLE_BYTES = 256, 64 * 1024
"""Blocks of each token file that are compared, and their size."""
SLOW_SHARE = 0.5
"""A link with less than so much of the median's speed is pointed out."""
COMPARED = {
    "code": ("another zerokara", "check out the same commit on every machine, without changes of its own"),
    "python": ("another Python", "run ./setup.sh with the same Python on every machine"),
    "packages": ("other packages", "run ./setup.sh on this machine: it installs the versions of the lock file"),
    "settings": ("other settings", "copy config.yaml to every machine, and give each the same --set"),
    "tokenizer": ("another tokenizer", "copy it from the first machine"),
    "data": ("other training data", "copy the token files from the first machine, with their manifest"),
    "valid": ("other validation data", "copy the token files from the first machine, with their manifest"),
    "files": ("other bytes in the token files", "copy them from the first machine again: the manifest is the same"),
    "processes": ("another number of processes", "set num_processes to what every machine has"),
    "device": ("another kind of device", "set CUDA_VISIBLE_DEVICES, or leave this machine out"),
    "precision": ("another precision", "set precision: bf16, or fp32, rather than auto"),
}
"""What must be the same on all machines: what to call a difference, and its remedy."""


@dataclass(frozen=True)
class Report:
    """What one machine has. JSON."""

    host: str
    address: str
    code: str
    python: str
    packages: dict[str, str]
    settings: dict[str, Any]
    tokenizer: str
    data: str
    valid: str
    files: dict[str, str]
    """Of the token files of both splits, by name (`_sampled`)."""
    processes: int
    device: str
    """``cpu`` or ``cuda``."""
    devices: str
    """For people."""
    precision: str
    free_bytes: int
    faults: tuple[str, ...] = ()
    """What this machine's own checks have found."""


@dataclass(frozen=True)
class Health:
    """What the machines have found out about each other."""

    reports: list[Report]
    """In the order of the machines."""
    links: dict[tuple[int, int], Link]
    """What each machine (the first index) found of its link to another."""

    def faults(self) -> list[Fault]:
        """Everything that keeps them from training together."""
        return [*self._own(), *self._differing(), *self._unreachable(), *self._clocks()]

    def _own(self) -> Iterator[Fault]:
        for index, report in enumerate(self.reports):
            yield from (Fault(_name(index, report), text) for text in report.faults)

    def _differing(self) -> Iterator[Fault]:
        first = asdict(self.reports[0])
        for index, report in enumerate(self.reports[1:], start=1):
            if report.faults:
                continue  # what it could not find out differs, of course
            own = asdict(report)
            same_manifests = all(own[key] == first[key] for key in ("data", "valid"))
            for key, (what, remedy) in COMPARED.items():
                was, now = first[key], own[key]
                if was != now and (key != "files" or same_manifests):
                    rule = f"has {what} than {self.reports[0].host}: {_difference(was, now)}"
                    yield Fault(_name(index, report), rule, remedy=remedy)

    def _unreachable(self) -> Iterator[Fault]:
        for (one, other), link in sorted(self.links.items()):
            if link.fault and (one < other or not self.links.get((other, one), Link()).fault):
                there = self.reports[other]
                rule = f"cannot exchange data with {_name(other, there)}: {link.fault}"
                remedy = "let all TCP ports through between these machines, in both directions"
                yield Fault(_name(one, self.reports[one]), rule, remedy=remedy)

    def _clocks(self) -> Iterator[Fault]:
        for index, report in enumerate(self.reports[1:], start=1):
            link = self.links.get((0, index), Link())
            if not link.fault and abs(link.clock_seconds) - link.round_trip_seconds > MAX_CLOCK_SECONDS:
                side = "ahead of" if link.clock_seconds > 0 else "behind"
                rule = f"its clock is {abs(link.clock_seconds):.1f} s {side} that of {self.reports[0].host}"
                yield Fault(_name(index, report), rule, remedy="set it right: timedatectl set-ntp true")

    def table(self) -> list[str]:
        """One line for each machine, below a header."""
        header = ("machine", "address", "zerokara", "data", "processes", "disk free", "clock", "slowest link")
        rows = [header]
        for index, report in enumerate(self.reports):
            clock = self.links.get((0, index), Link()) if index else Link()
            own = [(link.bytes_a_second, other) for (one, other), link in self.links.items() if one == index]
            slowest = min(own, default=None)
            rows.append((
                f"{index} {report.host}",
                report.address,
                report.code[:8],
                report.data[:8],
                f"{report.processes} {report.devices}",
                bytes_text(report.free_bytes),
                f"{clock.clock_seconds:+.2f} s" if index and not clock.fault else "",
                f"{bytes_text(slowest[0])}/s to {slowest[1]}" if slowest else "",
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

    def warnings(self) -> Iterator[str]:
        """Links that slow all down."""
        speeds = sorted(link.bytes_a_second for link in self.links.values() if not link.fault)
        if len(speeds) < 4:
            return
        median = speeds[len(speeds) // 2]
        for (one, other), link in sorted(self.links.items()):
            if not link.fault and link.bytes_a_second < SLOW_SHARE * median:
                speeds_text = f"{bytes_text(link.bytes_a_second)}/s, where half of all have {bytes_text(median)}/s"
                ends = f"from {self.reports[other].host} to {self.reports[one].host}"
                yield f"the link {ends} is slow, and each step waits for it: {speeds_text}"


def report_of(plan: RunPlan | None, address: str, devices: tuple[str, str], faults: Sequence[str] = ()) -> Report:
    """This machine's report; `plan` is None where its own checks have failed. `devices`: the kind, and for people."""
    there = Path(plan.run_dir if plan else ".").absolute()
    folder = next(each for each in (there, *there.parents) if each.exists())
    return Report(
        host=socket.gethostname(),
        address=address,
        code=_code_hash(),
        python=platform.python_version(),
        packages={name: _version(name) for name in PACKAGES},
        settings=_settings(plan) if plan else {},
        tokenizer=plan.encoder.sha256 if plan else "",
        data=plan.data.sha256 if plan else "",
        valid=plan.data.valid_sha256 if plan else "",
        files=_token_files(plan) if plan else {},
        processes=plan.processes_per_node if plan else 0,
        device=devices[0],
        devices=devices[1],
        precision=plan.config.precision if plan else "",
        free_bytes=shutil.disk_usage(folder).free,
        faults=tuple(faults),
    )


def examine(meeting: Meeting, count: int, own: Report) -> Health:
    """Exchange reports, and measure the links of all pairs; every machine calls it at the same time.

    Raises:
        UserError: a machine has not reported.
    """
    meeting.tell("report", asdict(own))
    heard = [meeting.hear("report", index) for index in range(count)]
    if silent := [index for index, content in enumerate(heard) if content is None]:
        rule = "has come, and has not reported within a minute"
        raise UserError(Fault(f"machine {index}", rule, remedy="see what it prints") for index in silent)
    reports = [_read(content) for content in heard]
    meeting.tell("links", {str(other): asdict(link) for other, link in _measured(meeting, count, reports).items()})
    found: dict[tuple[int, int], Link] = {}
    for index in range(count):
        content = meeting.hear("links", index, 2 * links.TIMEOUT_SECONDS * count + 60)
        by_other: Any = content or {}
        found |= {(index, int(other)): Link(**link) for other, link in by_other.items()}
    return Health(reports, found)


def _measured(meeting: Meeting, count: int, reports: Sequence[Report]) -> dict[int, Link]:
    """The links of this machine, round by round; the one of a pair that came earlier listens.

    A machine may come late to a pair, from one that has waited in vain: each waits for the other's word before the time
    for an answer begins, or the fault of one pair would be found in others too.
    """
    found: dict[int, Link] = {}
    patience = links.TIMEOUT_SECONDS * count + 60
    with ThreadPoolExecutor(1) as thread:
        for number, other in links.pairs_of(meeting.index, count):
            if meeting.index < other:
                with links.listen(meeting.address) as server:
                    meeting.tell(f"port/{number}", server.getsockname()[1])
                    if meeting.hear(f"coming/{number}", other, patience) is None:
                        found[other] = Link(fault="it did not come")
                    else:
                        found[other] = thread.submit(links.measure_as_server, server).result()
            else:
                port: Any = meeting.hear(f"port/{number}", other, patience)
                meeting.tell(f"coming/{number}", True)
                if port is None:
                    found[other] = Link(fault="it opened no port")
                else:
                    found[other] = links.measure_as_client(reports[other].address, port)
    return found


def _read(content: Any) -> Report:
    return Report(**{**content, "faults": tuple(content["faults"])})


def _name(index: int, report: Report) -> str:
    return f"machine {index}, {report.host} ({report.address})"


def _difference(was: Any, now: Any) -> str:
    """``zero_stage 1, here 2``."""
    if isinstance(was, dict) and isinstance(now, dict):
        keys = [key for key in sorted({*was, *now}) if was.get(key) != now.get(key)]
        return ", ".join(f"{key} {was.get(key, '(none)')}, here {now.get(key, '(none)')}" for key in keys)
    return f"{str(was)[:12]}, here {str(now)[:12]}"


def _settings(plan: RunPlan) -> dict[str, Any]:
    """The settings but for names of files, whose content is compared, and the user's settings of DeepSpeed."""
    given = plan.given.model_dump(mode="json")
    settings: dict[str, Any] = {key: value for key, value in given.items() if key not in PLACES}
    content: dict[str, Any] = orjson.loads(orjson.dumps({**settings, "deepspeed_template": plan.given_template}))
    return content


def _code_hash() -> str:
    """One hash over the package's own source files."""
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _token_files(plan: RunPlan) -> dict[str, str]:
    """What the token files hold here, beside what their manifest says: a copy may have been cut off or patched."""
    found = {}
    for name, prefix in (("train", plan.data.train_prefix), ("valid", plan.data.valid_prefix)):
        for path in (bin_path(prefix), idx_path(prefix)):
            if path.exists():
                found[name + path.suffix] = _sampled(path)
    return found


def _sampled(path: Path) -> str:
    """One hash for a file's size and `SAMPLES` blocks spread over it: of terabytes within a second."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb", buffering=0) as file:
        last = max(0, size - SAMPLE_BYTES)
        for start in sorted({last * number // (SAMPLES - 1) for number in range(SAMPLES)}):
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, start))
    return digest.hexdigest()[:12]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(none)"


def seconds_of(count: int) -> float:
    """About how long `examine` takes."""
    return len(links.rounds(count)) * (links.SECONDS + 0.3) + 2


def now() -> float:
    """Seconds since the epoch, by this machine's clock."""
    return time.time()
