"""setup.sh installs what the lock files name, by hashes, with the build of torch that fits the machine."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = [*ROOT.glob("requirements/*.lock"), *ROOT.glob("tests/clients/*.lock")]
FILES = ("zerokara.in", "zerokara.lock", "torch.lock")
LOCKS = [path for path in LOCKS if path.name != "requirements-javascript.lock"]  # npm's: tests/clients/run.sh


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
        hashes = re.findall(r"--hash=sha256:[0-9a-f]{64}(?![0-9a-f])", entry)
        assert 0 < len(hashes) == entry.count("--hash"), f"{name} has no hash, or one that is none"


def test_the_locks_hold_what_is_asked_for() -> None:
    asked, *locks = (entries((ROOT / "requirements" / name).read_text(encoding="utf-8")) for name in FILES)
    locked = {name: entry.split()[0] for lock in locks for name, entry in lock.items()}
    pins = {re.sub(r"[._]", "-", entry.split()[0].lower()) for entry in asked.values()}
    assert pins <= {re.sub(r"[._]", "-", pin) for pin in locked.values()}


STAND_IN = """#!/usr/bin/env bash
# Stands in for .venv/bin/python: writes down what pip was to install.
case "$*" in
    *"pip install"*) echo "pip $*" >>calls; cat "${@: -1}" >>calls || true ;;
    *"pip index versions torch"*) echo "Available versions: 9.9.9, $OFFERED, 1.0" ;;
    *requires*) [[ $OFFERED != *cpu* ]] ;;
    *sysconfig*) echo .venv ;;
esac
"""


@pytest.mark.parametrize(
    ("offered", "cards", "asked", "expected"),
    [
        ("2.13.0+cpu", "", "", "torch==2.13.0+cpu"),
        ("2.13.0", "580.82.07, 9.0\\n580.82.07, 7.5\\n", "", "torch==2.13.0"),
        ("2.13.0", "570.195.03, 9.0\\n", "", "TORCH_BUILD=cu126 ./setup.sh"),
        ("2.13.0", "570.195.03, 9.0\\n", "cu126", "torch==2.13.0+cu126"),
        ("2.13.0", "575.57.08, 12.0\\n575.57.08, 8.9\\n", "", "TORCH_BUILD=cu129 ./setup.sh"),
        ("2.13.0", "565.57.01, 12.0\\n", "", "driver 565.57.01 is too old"),
        ("2.13.0+rocm7.1", "", "", "torch for rocm7.1 is not supported"),
    ],
)
def test_what_is_installed(tmp_path: Path, offered: str, cards: str, asked: str, expected: str) -> None:
    """By a driver that shows these cards, from an index that offers this build; `asked` is what a user asks for."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "setup.sh", tmp_path)
    shows = f"#!/bin/sh\nprintf '{cards}'\n"
    for path, text in {".venv/bin/python": STAND_IN, "bin/nvidia-smi": shows, "calls": ""}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
        (tmp_path / path).chmod(0o755)
    environment = {
        **os.environ,
        "TORCH_BUILD": asked,
        "OFFERED": offered,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    }
    done = subprocess.run([tmp_path / "setup.sh", "--further"], env=environment, capture_output=True, text=True)
    calls = (tmp_path / "calls").read_text(encoding="utf-8")
    if "torch==" not in expected:
        assert done.returncode == 2 and expected in done.stderr and not calls
        return
    assert done.returncode == 0 and f"2/4: {expected} (" in done.stdout, done.stderr
    commands = re.findall("^pip .*", calls, re.MULTILINE)
    assert len(commands) == 3 and all("--further" in command for command in commands)
    unverified = [command for command in commands if not {"--require-hashes", "--no-deps"} <= {*command.split()}]
    assert len(unverified) == ("NOT VERIFIED" in done.stdout) == ("+cu" in expected)
    locked = entries("".join((ROOT / "requirements" / name).read_text(encoding="utf-8") for name in FILES[1:])).keys()
    cuda = {name for name in locked if re.match("nvidia|cuda|triton", name)}
    left_out = (cuda if "+" in expected else set()) | ({"torch"} if "+cu" in expected else set())
    assert len(cuda) > 15 and entries(calls.replace("pip -P", "#")).keys() == locked - left_out
