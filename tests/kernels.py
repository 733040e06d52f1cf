"""Runs the numerical tests with the kernels of other processors, and prints a table of what passed with which.

    ./run_tests.sh --kernels                                      all settings, tests/numerics and tests/unit/model
    ./run_tests.sh --kernels --only oldest,threads_4 tests/numerics/test_resume.py -k offload

Rounding depends on the processor: on the width of its vectors, the kernels that a library has for it, and how many
threads share a sum. These environment variables choose each on one machine; they can only take away, so that a
processor without AVX-512 has some of these settings alike. All other arguments go to pytest. What the tolerances are:
tests/rounding.py. What was found: docs/rounding.md.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/numerics", "tests/unit/model")

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SETTINGS: dict[str, dict[str, str]] = {
    "as_it_is": {},
    "threads_1": ONE_THREAD,
    "threads_2": {"OMP_NUM_THREADS": "2", "MKL_DYNAMIC": "FALSE"},
    "threads_4": {"OMP_NUM_THREADS": "4", "MKL_DYNAMIC": "FALSE"},  # also where there are fewer cores
    "aten_avx2": {**ONE_THREAD, "ATEN_CPU_CAPABILITY": "avx2"},
    "aten_default": {**ONE_THREAD, "ATEN_CPU_CAPABILITY": "default"},
    "bf16_imitated": {**ONE_THREAD, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "bf16_without_onednn": {**ONE_THREAD, "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "mkl_compatible": {**ONE_THREAD, "MKL_CBWR": "COMPATIBLE"},
    "oldest": {
        **ONE_THREAD,
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE",
    },
}
"""ATen is torch's own: sums, softmax, norms. oneDNN multiplies matrices in bf16: with AVX512_CORE it imitates what the
processor lacks, below that ATen multiplies them. MKL multiplies them in fp32."""


@dataclass(frozen=True)
class Outcome:
    """The result of the tests under one setting."""

    passed: int
    failed: tuple[str, ...]
    nearest: float
    """The largest share of its tolerance that any test used."""
    nearest_test: str

    @classmethod
    def read(cls, junit: Path) -> Outcome:
        """Read the report that pytest writes with --junitxml."""
        cases = ElementTree.parse(junit).getroot().findall(".//testcase")
        names = {case: f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in cases}
        failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        skipped = [case for case in cases if case.find("skipped") is not None]
        shares = [
            (float(each.get("value", 0)), names[case])
            for case in cases
            for each in case.iterfind("properties/property[@name='share_of_tolerance']")
        ]
        nearest, nearest_test = max(shares, default=(0.0, ""))
        passed = len(cases) - len(failed) - len(skipped)
        return cls(passed, tuple(names[case] for case in failed), nearest, nearest_test)


def environment(setting: str) -> dict[str, str]:
    """The environment of this process, in which only `setting` chooses kernels."""
    chosen = {name for values in SETTINGS.values() for name in values}
    return {name: value for name, value in os.environ.items() if name not in chosen} | SETTINGS[setting]


def run(setting: str, arguments: Sequence[str]) -> Outcome:
    """Run pytest in a process of its own: libraries choose their kernels when they are loaded."""
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
        code = subprocess.run(
            [*command, f"--junitxml={junit}", *arguments], cwd=ROOT, env=environment(setting)
        ).returncode
        if code not in (0, 1):  # interrupted, nothing collected, wrong arguments
            sys.exit(code)
        return Outcome.read(junit)


def row(setting: str, outcome: Outcome, seconds: float) -> str:
    """A line of the table."""
    test = outcome.nearest_test.rpartition("/")[2]
    nearest = f"{outcome.nearest:.2f} of its tolerance: {test}" if test else ""
    return f"{setting:20} {outcome.passed:6} {len(outcome.failed):6} {seconds:6.0f} s  {nearest}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests under each setting; the exit code is 1 where a test failed."""
    parser = argparse.ArgumentParser(prog="./run_tests.sh --kernels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join(SETTINGS)}")
    given, for_pytest = parser.parse_known_args(arguments)
    names = given.only.split(",") if given.only else list(SETTINGS)
    if unknown := [name for name in names if name not in SETTINGS]:
        parser.error(f"--only {','.join(unknown)}: must be of {', '.join(SETTINGS)}")
    rows, failed = [], []
    for name in names:
        print(f"── {name}: {' '.join(f'{key}={value}' for key, value in SETTINGS[name].items())}", flush=True)
        started = time.monotonic()
        outcome = run(name, for_pytest or TESTS)
        rows.append(row(name, outcome, time.monotonic() - started))
        failed += [f"{name}: {test}" for test in outcome.failed]
    print(f"\n{'kernels':20} passed failed     time  nearest", *rows, *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
