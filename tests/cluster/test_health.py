"""Faults that keep machines from training together are found before anything starts, and printed on every machine."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster.hosts import OWN, Host, Training, cluster
from tiny import ROOT

WRONG = 2
"""Exit code of wrong settings or input."""


@pytest.fixture
def three() -> Iterator[list[Host]]:
    with cluster(3) as made:
        yield made


def assert_refused(run: Training, *words: tuple[str, ...]) -> None:
    """All machines refuse, each prints a line with each group of words, and nothing was trained."""
    assert run.wait(120) == [WRONG] * len(run.hosts), "\n\n".join(map(run.log, range(len(run.hosts))))
    for number in range(len(run.hosts)):
        errors = [line for line in run.log(number).splitlines() if line.startswith("error: ")]
        assert len(errors) == len(words), run.log(number)
        for group in words:
            assert any(all(word in line for word in group) for line in errors), (group, errors)
    for host in run.hosts:
        assert not host.seen(OWN / "run" / "run.json").exists() and host.num_processes() == 0


def test_every_fault_of_all_machines_at_once(
    three: list[Host], train: Callable[..., Training], data: dict[str, str], tmp_path: Path
) -> None:
    """One has other settings, another zerokara and another package, one a patched token file, whose manifest is the
    same, and a clock that is late."""
    copy, patched = tmp_path / "code", tmp_path / "patched"
    fake = tmp_path / "packages" / "sentencepiece-0.0.1.dist-info"
    shutil.copytree(ROOT / "original_codes", copy / "original_codes", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "3_train_node1.sh", copy)  # a link would lead it back here
    (copy / ".venv").symlink_to(ROOT / ".venv")
    with open(copy / "original_codes/zerokara/base/progress.py", "a", encoding="utf-8") as file:
        file.write("# a change of one's own\n")
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: sentencepiece\nVersion: 0.0.1\n", encoding="utf-8")
    shutil.copytree(Path(data["output_prefix"]).parent, patched)
    prefix = patched / Path(data["output_prefix"]).name
    tokens = Path(f"{prefix}_text_document.bin")
    content = bytearray(tokens.read_bytes())
    content[1000:1002] = content[1002:1004]
    tokens.write_bytes(content)
    clock = shutil.which("faketime")
    environment = {"PYTHONPATH": str(fake.parent)}
    late = [clock, "-f", "-30s"] if clock else []
    run = train(
        three,
        global_batch_size=24,
        precision="fp32",
        of={
            1: {"zero_stage": 2, "num_processes": 2, "script": copy / "3_train_node1.sh", "environment": environment},
            2: {"output_prefix": prefix, "before": late},
        },
    )
    faults = [
        ("host-1 (", "zero_stage auto, here 2", "num_processes"),
        ("host-1 (", "another zerokara"),
        ("host-1 (", "other packages", "sentencepiece", "here 0.0.1"),
        ("host-1 (", "another number of processes", "1, here 2"),
        ("host-2 (", "other token files", ": train.bin "),
    ]
    if clock:
        faults.append(("host-2 (", "its clock is 3", "behind that of host-0"))
    else:
        print("the clock is left out: no faketime (apt-get install faketime)")
    assert_refused(run, *faults)


def test_what_a_machine_finds_by_itself_is_told_to_all(hosts: list[Host], train: Callable[..., Training]) -> None:
    """A disk without room for the checkpoints."""
    hosts[1].run("sh", "-c", f"head -c 400m /dev/zero > {OWN}/full 2>/dev/null; true")
    run = train(hosts)
    assert run.wait(120) == [WRONG, WRONG], run.log(0) + run.log(1)
    assert "machine 1, host-1" in run.log(0) and "leaves no room for its checkpoints" in run.log(0)
    assert "leaves no room for its checkpoints" in run.log(1)
    assert not hosts[0].seen(OWN / "run" / "run.json").exists()
