"""What must hold before several machines train together, compared in seconds.

Each machine reports what it has, and all compare the reports with the first machine's. A fault on any machine keeps all
from starting, and each of them prints every fault of all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import socket
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zerokara.errors import Fault, RunError, UserError
from zerokara.progress import bytes_text, plural
from zerokara.tokens.layout import bin_path, idx_path
from zerokara.training.nodes.machines import Machines
from zerokara.training.nodes.meeting import Meeting, meet
from zerokara.training.planning.run_folder import PLACES
from zerokara.training.planning.run_plan import RunPlan

PACKAGES = ("torch", "deepspeed", "megatron-core", "numpy", "sentencepiece", "safetensors", "transformers")
"""Those whose version may change a number."""
MAX_CLOCK_SECONDS = 5.0
"""By how much clocks may differ: modification times and logs are compared across machines."""
SAMPLES, SAMPLE_BYTES = 256, 64 * 1024
"""Blocks of each token file that are compared, and their size."""
COMPARED = {
    "code": ("another zerokara", "check out the same commit on every machine, without changes of its own"),
    "packages": ("other packages", "run ./setup.sh on this machine: it installs the versions of the lock file"),
    "settings": ("other settings", "copy config.yaml to every machine, and give each the same --set"),
    "tokenizer": ("another tokenizer", "copy it from the first machine"),
    "data": ("other token files", "copy them from the first machine, with their manifest"),
    "processes": ("another number of processes", "set num_processes to what every machine has"),
    "device": ("another kind of device", "set CUDA_VISIBLE_DEVICES, or leave this machine out"),
    "precision": ("another precision", "set precision: bf16, or fp32, rather than auto"),
}
"""What must be the same on all machines: what to call a difference, and its remedy."""


def agreed(meeting: Meeting, plan: RunPlan) -> RunPlan:
    """Compare what the machines have; show it, and return the plan for those that came.

    Raises:
        UserError: they must not start together; has every fault of all.
        RunError: a machine has given up.
    """
    plan = plan.on_processes(meeting.count * plan.processes_per_node, meeting.count)
    # Of files the content is compared, and not the names.
    settings = plan.requested.model_dump(mode="json") | {"deepspeed_template": plan.requested_template}
    own = _machine(meeting, plan.run_dir) | {
        "code": _code_hash(),
        "packages": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "settings": {key: value for key, value in settings.items() if key not in PLACES},
        "tokenizer": plan.encoder.sha256,
        "data": _token_files(plan),
        "processes": plan.processes_per_node,
        "device": plan.memory.device,
        "devices": plan.devices.text(plan.processes_per_node),
        "precision": plan.resolved.precision,
    }
    reports = meeting.gather("report", own)
    print(f"{meeting.count} machines are here:", *map(_line, range(meeting.count), reports), sep="\n  ", flush=True)
    if found := list(faults(reports)):
        raise UserError(found)
    return plan


def report_faults(machines: Machines, faults: Sequence[Fault]) -> None:
    """Tell the others what keeps this machine from taking part, so that all say it; nothing once they have met."""
    if not machines.has_met:
        with contextlib.suppress(UserError, RunError), meet(machines) as meeting:
            meeting.gather("report", _machine(meeting, Path.cwd()) | {"faults": [str(each) for each in faults]})


def _machine(meeting: Meeting, folder: Path) -> dict[str, Any]:
    folder = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    free_bytes = shutil.disk_usage(folder).free
    return {"host": socket.gethostname(), "address": meeting.address, "free_bytes": free_bytes, "clock": meeting.clock}


def faults(reports: Sequence[dict[str, Any]]) -> Iterator[Fault]:
    """Yield everything that keeps the machines from training together."""
    first = reports[0]
    for index, report in enumerate(reports):
        where = f"machine {index}, {report['host']} ({report['address']})"
        if "faults" in report:
            yield from (Fault(where, text) for text in report["faults"])
            continue  # what it could not find out differs, of course
        for key, (what, remedy) in COMPARED.items():
            if "faults" not in first and report[key] != first[key]:
                rule = f"has {what} than {first['host']}: {_difference(first[key], report[key])}"
                yield Fault(where, rule, remedy=remedy)
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


def _difference(was: Any, now: Any) -> str:
    """``zero_stage 1, here 2``."""
    if isinstance(was, dict) and isinstance(now, dict):
        keys = [key for key in sorted({*was, *now}) if was.get(key) != now.get(key)]
        return ", ".join(f"{key} {was.get(key, '(none)')}, here {now.get(key, '(none)')}" for key in keys)
    return f"{str(was)[:12]}, here {str(now)[:12]}"


def _code_hash() -> str:
    """One hash over the package's own source files."""
    root, digest = Path(__file__).resolve().parents[2], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _token_files(plan: RunPlan) -> dict[str, str]:
    """What the manifest says of the token files, and what they hold: a copy may have been cut off or patched."""
    found = {"train": plan.data.sha256[:12], "valid": plan.data.valid_sha256[:12]}
    for name, prefix in (("train", plan.data.train_prefix), ("valid", plan.data.valid_prefix)):
        paths = [path for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]
        found |= {name + path.suffix: _sampled(path) for path in paths}
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
