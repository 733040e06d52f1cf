"""Runs the numerical tests with the kernels of other processors, and prints a table of what passed with which.

    ./run_tests.sh --kernels                                      all settings, the tests that multiply
    ./run_tests.sh --kernels --only oldest,threads_4 tests/numerics/test_resume.py -k offload

Rounding depends on the processor: on the width of its vectors, the kernels that a library has for it, and how many
threads share a sum. These environment variables choose each on one machine; they can only take away, so that a
processor without AVX-512 has some of these settings alike. All other arguments go to pytest. What the tolerances are:
tests/support/rounding.py. What was found: docs/rounding.md.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/numerics", "tests/unit/model", "tests/unit/huggingface", "tests/unit/evaluation")
TESTS += ("tests/unit/training/test_validation.py", "tests/unit/training/test_optimizer_rules.py")

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SETTINGS: dict[str, dict[str, str]] = {
    "as_it_is": {},
    "threads_1": ONE_THREAD,
    "threads_2": {"OMP_NUM_THREADS": "2", "MKL_DYNAMIC": "FALSE"},
    "threads_4": {"OMP_NUM_THREADS": "4", "MKL_DYNAMIC": "FALSE"},  # also where there are fewer cores
    "aten_avx2": {**ONE_THREAD, "ATEN_CPU_CAPABILITY": "avx2"},
    "aten_default": {**ONE_THREAD, "ATEN_CPU_CAPABILITY": "default"},
    "without_amx": {**ONE_THREAD, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "bf16_imitated": {**ONE_THREAD, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "bf16_without_onednn": {**ONE_THREAD, "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "mkl_compatible": {**ONE_THREAD, "MKL_CBWR": "COMPATIBLE"},
    "avx2": {**ONE_THREAD, "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "oldest": {**ONE_THREAD, "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
}
"""ATen is torch's own: sums, softmax, norms. oneDNN multiplies matrices in bf16: by AMX, without it by AVX-512's own
instruction (AVX512_CORE_BF16); with AVX512_CORE it imitates what the processor lacks, below that ATen multiplies them.
MKL multiplies them in fp32."""


def environment(setting: str) -> dict[str, str]:
    """The environment of this process, in which only `setting` chooses kernels."""
    chosen = {name for values in SETTINGS.values() for name in values}
    return {name: value for name, value in os.environ.items() if name not in chosen} | SETTINGS[setting]


def run(setting: str, arguments: Sequence[str]) -> bool:
    """Run pytest in a process of its own, as libraries choose their kernels when they are loaded; True if all passed.

    It prints which tests came nearest to their tolerance (tests/conftest.py).
    """
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *arguments]
    code = subprocess.run(command, cwd=ROOT, env=environment(setting)).returncode
    if code not in (0, 1):  # interrupted, nothing collected, wrong arguments
        sys.exit(code)
    return code == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tests under each setting; the exit code is 1 where a test failed."""
    parser = argparse.ArgumentParser(prog="./run_tests.sh --kernels", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="NAME,NAME", help=f"of {', '.join(SETTINGS)}")
    given, for_pytest = parser.parse_known_args(arguments)
    names = given.only.split(",") if given.only else list(SETTINGS)
    if unknown := [name for name in names if name not in SETTINGS]:
        parser.error(f"--only {','.join(unknown)}: must be of {', '.join(SETTINGS)}")
    rows, has_failed = [], False
    for name in names:
        print(f"── {name}: {' '.join(f'{key}={value}' for key, value in SETTINGS[name].items())}", flush=True)
        started = time.monotonic()
        passed = run(name, for_pytest or TESTS)
        has_failed |= not passed
        rows.append(f"{name:20} {'passed' if passed else 'FAILED':6} {time.monotonic() - started:6.0f} s")
    print("", *rows, sep="\n")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
