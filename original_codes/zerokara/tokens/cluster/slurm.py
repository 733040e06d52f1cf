"""Parts as the tasks of an array job of Slurm. Uses its commands (sbatch, squeue, scancel) and no accounting.

An array has a name that derives from the work folder, so it is found again after any death of the step, which leaves it
at work: the same command then waits for it.
"""

from __future__ import annotations

import getpass
import hashlib
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from zerokara.durable import write_json
from zerokara.errors import Fault, RunError, UserError
from zerokara.tokens.cluster.scheduler import SilentSchedulerError
from zerokara.tokens.work_folder import AT_WORK_NAME

SCRIPT = Path(__file__).resolve().parents[4] / "2_tokenize.sbatch"
COMMANDS = ("sbatch", "squeue", "scancel")
INSTALL = (
    "run it on a machine of a Slurm cluster where users may submit (Debian's package of the commands: slurm-client)"
)
END_SECONDS = 120.0
"""How long ending an array may take; Slurm gives each process half a minute."""
_ASK_SECONDS = 1.0


def missing() -> str:
    """The commands that are missing here, or empty."""
    return ", ".join(name for name in COMMANDS if shutil.which(name) is None)


class SlurmArray:
    """Slurm, as `scheduler.Scheduler`."""

    name = "slurm"

    def __init__(self, num_workers: int | None = None) -> None:
        """`num_workers` where the user has set it."""
        self.num_workers = num_workers

    def start(self, folder: Path, numbers: Sequence[int]) -> None:
        """Submit an array with one task for each part."""
        write_json(folder / AT_WORK_NAME, {"engine": self.name, "job_name": job_name(folder)})
        place = folder.resolve()
        output = str(place).replace("%", "%%") + "/part-%5a.log"
        command = ["sbatch", "--parsable", f"--job-name={job_name(folder)}", f"--array={as_array(numbers)}"]
        command += [f"--chdir={Path.cwd()}", f"--output={output}", "--open-mode=append"]
        command += [str(SCRIPT), str(SCRIPT.parent), str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunError(f"sbatch refused the array: {done.stderr.strip() or done.stdout.strip()}; see {SCRIPT}")

    def at_work(self, folder: Path) -> set[int]:
        """Ask squeue."""
        if not (folder / AT_WORK_NAME).exists():
            return set()
        done = subprocess.run(_squeue(folder), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SilentSchedulerError(f"slurm: squeue does not answer ({done.stderr.strip()})")
        return {int(index) for index in done.stdout.split() if index.isdecimal()}

    def end(self, folder: Path) -> None:
        """Cancel the array, and wait until Slurm has none of it any more."""
        end_leftover(folder)


def end_leftover(folder: Path) -> None:
    """End the array that an earlier start of the step may have left at work in this folder.

    Raises:
        UserError: there may be one, and Slurm's commands are missing here.
        RunError: it does not end.
    """
    mark = folder / AT_WORK_NAME
    if not mark.exists():
        return
    if missing():
        rule = f"a Slurm array, {job_name(folder)}, may be at work here, and Slurm's commands are not found"
        remedy = f"run the step where they are; or scancel --name={job_name(folder)} there, and delete {mark}"
        raise UserError(Fault(where=str(folder), rule=rule, remedy=remedy))
    deadline = time.monotonic() + END_SECONDS
    while True:
        done = subprocess.run(_squeue(folder), capture_output=True, text=True, check=False)
        if not done.returncode and not done.stdout.split():
            break
        if time.monotonic() > deadline:
            raise RunError(f"the array {job_name(folder)} does not end: scancel --name={job_name(folder)}")
        subprocess.run(
            ["scancel", f"--name={job_name(folder)}", f"--user={getpass.getuser()}"], capture_output=True, check=False
        )
        time.sleep(_ASK_SECONDS)
    mark.unlink(missing_ok=True)


def job_name(folder: Path) -> str:
    """The array's name, by which it is found again."""
    return f"zerokara-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]}"


def as_array(numbers: Sequence[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _squeue(folder: Path) -> list[str]:
    return ["squeue", "-h", "-r", f"--name={job_name(folder)}", f"--user={getpass.getuser()}", "-o", "%K"]
