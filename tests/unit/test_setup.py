"""setup.sh installs the files that the lock files name by their hashes, and nothing else."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "requirements", ROOT / "tests" / "clients")
LOCKS = [
    path
    for folder in FOLDERS
    for path in sorted(folder.glob("*.lock"))
    if path.name != "requirements-javascript.lock"  # npm's: tests/clients/run.sh
]
SHA256 = re.compile(r"--hash=sha256:[0-9a-f]{64}(?![0-9a-f])")
CPU_BUILD = "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
CUDA_BUILD = "60fcdcb2f3876e21146cb4524ef06397d727ca9ad5f020818547e25075fe3cb7"
"""torch's wheels for Python 3.11 on x86-64, the one of PyTorch's own index and that of PyPI."""


def entries(lock: str) -> dict[str, str]:
    """Each requirement of a lock file and what belongs to it, by the name of the package."""
    joined = re.sub(r"#.*", "", lock).replace("\\\n", " ")
    return {re.split(r"[=; ]", line)[0]: line for line in joined.splitlines() if line.strip()}


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_requirement_has_one_version_and_a_hash(path: Path) -> None:
    found = entries(path.read_text(encoding="utf-8"))
    assert found
    for name, entry in found.items():
        assert re.match(r"[a-z0-9-]+(\[[a-z0-9,-]+\])?==[^ *]+ ", entry), f"{name} is not pinned"
        assert SHA256.search(entry), f"{name} has no hash"
        assert len(SHA256.findall(entry)) == entry.count("--hash"), f"{name} has a hash that is none"


def test_the_locks_hold_what_is_asked_for() -> None:
    asked = entries((ROOT / "requirements/zerokara.in").read_text(encoding="utf-8"))
    locked = entries((ROOT / "requirements/zerokara.lock").read_text(encoding="utf-8"))
    locked |= entries((ROOT / "requirements/torch.lock").read_text(encoding="utf-8"))
    pins = {re.sub(r"[._]", "-", name.lower()): entry.split()[0].partition("==")[2] for name, entry in asked.items()}
    assert pins == {name: locked[name].split()[0].partition("==")[2] for name in pins}


def test_what_is_installed_on_top_changes_nothing() -> None:
    locked, further = (
        {package: entry.split()[0] for package, entry in entries((ROOT / file).read_text(encoding="utf-8")).items()}
        for file in ("requirements/zerokara.lock", "requirements/ray.lock")
    )
    shared = locked.keys() & further.keys()
    assert len(shared) > 10 and further.keys() - shared and "torch" not in further
    assert {package: further[package] for package in shared} == {package: locked[package] for package in shared}


def test_torch_is_locked_in_both_builds_with_what_the_one_for_cuda_needs() -> None:
    torch = (ROOT / "requirements/torch.lock").read_text(encoding="utf-8")
    hashes = SHA256.findall(torch)
    assert f"--hash=sha256:{CPU_BUILD}" in hashes and f"--hash=sha256:{CUDA_BUILD}" in hashes
    described = re.findall(r"^#    cp3\d+ (?:x86_64|aarch64) +([0-9a-f]{64})$", torch, re.MULTILINE)
    assert hashes[-8:] == [f"--hash=sha256:{each}" for each in described]
    names = entries((ROOT / "requirements/zerokara.lock").read_text(encoding="utf-8")).keys()
    assert {"triton", "cuda-bindings", "nvidia-nccl-cu13", "nvidia-cudnn-cu13"} <= names and "torch" not in names


STAND_IN = """#!/usr/bin/env bash
# Stands in for .venv/bin/python: writes down what pip was to install.
case "$*" in
    *"pip install"*)
        number=$(ls calls | wc -l)
        printf '%s\\n' "$*" "safe path: ${PYTHONSAFEPATH:-}" >calls/$number
        cat "${@: -1}" >>calls/$number
        echo "WARNING: Location 'file:///no/wheels' is ignored: it is neither a file nor a directory." >&2
        echo "WARNING: Retrying" >&2 ;;
    *"pip index versions torch"*) echo "Available versions: 9.9.9, $OFFERED, 1.0" ;;
    *requires*) [[ $OFFERED != *cpu* ]] ;;
    *sysconfig*) echo .venv ;;
esac
"""


UV = 'cat; echo "$*"; while [ $# -gt 0 ]; do test "$1" = --constraints && cat "$2"; shift; done; true'
"""Stands in for uv: prints what is to be locked, how, and the constraints."""


def run_setup(
    tmp_path: Path, offered: str, argument: str = "--further", cards: str = "", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run setup.sh with an index that offers these builds of torch, and a driver that shows these cards.

    What pip was asked for lies in calls/.
    """
    (tmp_path / "requirements").mkdir(exist_ok=True)
    for name in ("setup.sh", "requirements/zerokara.lock", "requirements/torch.lock"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (tmp_path / "calls").mkdir()
    python.write_text(STAND_IN, encoding="utf-8")
    python.chmod(0o755)
    (tmp_path / "bin").mkdir()
    programs = {"nvidia-smi": f"printf '{cards}'", "uname": "echo ${SYSTEM:-Linux}", "uv": UV}
    for name, prints in (programs | ({"rocm-smi": ""} if cards == "AMD" else {})).items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{prints}\n", encoding="utf-8")
        (tmp_path / "bin" / name).chmod(0o755)
    paths = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "OFFERED": offered, "PATH": paths, **variables}
    command = [str(tmp_path / "setup.sh"), *argument.split()]
    return subprocess.run(command, env=environment, check=False, capture_output=True, text=True)


@pytest.mark.parametrize("offered", ["2.13.0+cpu", "2.13.0"])
def test_all_that_setup_installs_must_have_the_hash_that_is_locked(tmp_path: Path, offered: str) -> None:
    done = run_setup(tmp_path, offered)
    assert done.returncode == 0 and done.stderr == "WARNING: Retrying\n" * 3
    calls = [path.read_text(encoding="utf-8").split("\n", 2) for path in sorted((tmp_path / "calls").iterdir())]
    assert len(calls) == 3
    for command, _, _ in calls:
        assert {"--require-hashes", "--no-deps", "--further"} <= set(command.split())
        assert ("--only-binary" in command) != ("--no-build-isolation" in command)
    assert [where for _, where, _ in calls] == ["safe path: 1", "safe path: 1", "safe path: "]
    torch, others, built = (entries(text) for *_, text in calls)
    assert torch.keys() == {"torch"} and torch["torch"].startswith(f"torch=={offered} ")
    assert built.keys() == {"deepspeed", "megatron-core"}
    locked = entries((ROOT / "requirements/zerokara.lock").read_text("utf-8")).keys()
    cuda = {name for name in locked if re.match("nvidia|cuda|triton", name)}
    assert len(cuda) > 15 and cuda & others.keys() == (set() if "cpu" in offered else cuda)
    assert torch.keys() | others.keys() | built.keys() | cuda == locked | {"torch"}


@pytest.mark.parametrize(
    ("cards", "variables", "expected"),
    [
        ("580.82.07, 9.0\\n580.82.07, 7.5\\n", {}, "torch==2.13.0"),
        ("570.195.03, 9.0\\n", {}, "torch==2.13.0+cu126"),
        ("580.82.07, 9.0\\n580.82.07, 7.0\\n", {}, "torch==2.13.0+cu126"),
        ("575.57.08, 12.0\\n575.57.08, 8.9\\n", {}, "torch==2.13.0+cu129"),
        ("570.195.03, 9.0\\n", {"TORCH_BUILD": "cu130"}, "torch==2.13.0"),
        ("No devices were found\\n", {}, "torch==2.13.0"),
        ("565.57.01, 12.0\\n", {}, "driver 565.57.01 is too old"),
        ("520.61.05, 8.0\\n", {}, "driver 520.61.05 is too old"),
        ("AMD", {}, "torch for rocm is not supported"),
        ("580.82.07, 9.0\\n", {"TORCH_BUILD": "rocm7.1"}, "torch for rocm7.1 is not supported"),
        ("", {"SYSTEM": "Darwin"}, "macOS and Apple's GPUs are not supported"),
    ],
)
def test_torch_is_chosen_by_the_cards(tmp_path: Path, cards: str, variables: dict[str, str], expected: str) -> None:
    done = run_setup(tmp_path, "2.13.0", "--further", cards, **variables)
    calls = [path.read_text(encoding="utf-8") for path in sorted((tmp_path / "calls").iterdir())]
    if not expected.startswith("torch=="):
        assert done.returncode == 2 and expected in done.stderr and not calls
        return
    assert done.returncode == 0 and f"2/4: {expected} (" in done.stdout
    build = expected.partition("+")[2]
    assert ("NOT VERIFIED" in done.stdout) is bool(build)
    if build:  # the last that is no package to be built, after all that is locked
        assert f"--lock {build}" in done.stdout and f"--only-binary :all: {expected} --further" in calls[1]
        assert f"--extra-index-url https://download.pytorch.org/whl/{build}" in calls[1]
        assert not any(re.search("^(nvidia|cuda|triton|torch)", call, re.MULTILINE) for call in calls[::2])


def test_a_lock_of_another_build_has_the_versions_that_are_locked_here(tmp_path: Path) -> None:
    wanted, command, *constraints = run_setup(tmp_path, "2.13.0", "--lock cu126").stdout.splitlines()
    assert wanted == "torch==2.13.0+cu126" and command.endswith("--output-file requirements/torch-cu126.lock")
    assert "--generate-hashes" in command and "--extra-index-url https://download.pytorch.org/whl/cu126" in command
    names = {each.partition("==")[0] for each in constraints if "==" in each}
    assert {"sympy", "filelock"} <= names and not any(re.match("nvidia|cuda|triton", name) for name in names)


def test_a_build_that_is_locked_is_verified_and_one_that_is_none_of_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/torch-cu126.lock").write_text("torch==2.13.0+cu126 --hash=sha256:00", encoding="utf-8")
    done = run_setup(tmp_path, "2.13.0+cu126", cards="570.195.03, 9.0")
    first = (tmp_path / "calls" / "0").read_text(encoding="utf-8")
    assert done.returncode == 0 and "NOT VERIFIED" not in done.stdout and len(list((tmp_path / "calls").iterdir())) == 3
    assert (
        "--require-hashes" in first and "torch==2.13.0+cu126 --hash=sha256:00" in first and "pytorch.org" not in first
    )
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    done = run_setup(tmp_path, "2.13.0+rocm7.1, 2.13.0+cpu")
    assert done.returncode == 2 and not list((tmp_path / "calls").iterdir()) and "for rocm7.1 is not" in done.stderr


def test_help_of_setup_and_of_the_tests_prints_their_usage_and_does_nothing(tmp_path: Path) -> None:
    done = run_setup(tmp_path, "2.13.0+cpu", "--help")
    assert done.returncode == 0 and "./setup.sh [arguments for pip]" in done.stdout and "set -" not in done.stdout
    assert not list((tmp_path / "calls").iterdir())
    done = subprocess.run([str(ROOT / "run_tests.sh"), "-h"], capture_output=True, text=True, check=True)
    assert "--kernels" in done.stdout and "set -" not in done.stdout


def test_a_part_that_fails_is_not_passed_over() -> None:
    """Bash forgets `set -e` in whatever stands before an ``||``, functions included."""
    text = (ROOT / "run_tests.sh").read_text(encoding="utf-8")
    function = text[text.index("part() {") : text.index("\n}\n", text.index("part() {")) + 3]
    for command, code in (("part here false", 1), ("part here false || exit 3", 3), ("part here true || exit 3", 0)):
        done = subprocess.run(["bash", "-euc", function + command], capture_output=True, text=True, check=False)
        assert done.returncode == code and "here: " in done.stdout, command
