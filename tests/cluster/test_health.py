"""What keeps machines from training together is found before anything starts: each fault of each, on every machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster.hosts import OWN, Host, Training, cluster
from tiny import ROOT, make_data

WRONG = 2
"""Exit code of wrong settings or input."""


@pytest.fixture
def three() -> Iterator[list[Host]]:
    """Three hosts."""
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


def test_every_fault_of_all_machines_at_once(three: list[Host], train: Callable[..., Training], tmp_path: Path) -> None:
    """Other settings, another zerokara, other data and another tokenizer."""
    other = tmp_path / "other"
    other.mkdir()
    data = make_data(other, num_documents=140)
    copy = tmp_path / "code"
    shutil.copytree(ROOT / "original_codes", copy / "original_codes", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("3_train_node1.sh", ".venv"):
        (copy / name).symlink_to(ROOT / name)
    with open(copy / "original_codes/zerokara/progress.py", "a", encoding="utf-8") as file:
        file.write("# a change of one's own\n")
    run = train(
        three,
        num_processes=2,
        global_batch_size=24,
        of={
            1: {"zero_stage": 2, "script": copy / "3_train_node1.sh"},
            2: {"output_prefix": data["output_prefix"], "input_tokenizer_file": data["input_tokenizer_file"]},
        },
    )
    assert_refused(
        run,
        ("host-1 (", "zero_stage 1, here 2"),
        ("host-1 (", "another zerokara"),
        ("host-2 (", "other token files", "train ", "valid "),
        ("host-2 (", "another tokenizer"),
    )


def test_what_a_machine_finds_by_itself_is_told_to_all(hosts: list[Host], train: Callable[..., Training]) -> None:
    """A disk without room for the checkpoints."""
    hosts[1].run("sh", "-c", f"head -c 400m /dev/zero > {OWN}/full 2>/dev/null; true")
    run = train(hosts)
    assert run.wait(120) == [WRONG, WRONG], run.log(0) + run.log(1)
    assert "machine 1, host-1" in run.log(0) and "leaves no room for its checkpoints" in run.log(0)
    assert "leaves no room for its checkpoints" in run.log(1)
    assert not hosts[0].seen(OWN / "run" / "run.json").exists()


def test_what_the_setup_of_a_machine_has_wrong(
    three: list[Host], train: Callable[..., Training], data: dict[str, str], tmp_path: Path
) -> None:
    """Another version of a package, another number of processes and precision, a clock that is late, and a token file
    that was patched and whose manifest is the same."""
    fake = tmp_path / "packages" / "sentencepiece-0.0.1.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: sentencepiece\nVersion: 0.0.1\n", encoding="utf-8")
    patched = tmp_path / "patched"
    shutil.copytree(Path(data["output_prefix"]).parent, patched)
    tokens = patched / (Path(data["output_prefix"]).name + "_text_document.bin")
    content = bytearray(tokens.read_bytes())
    content[1000:1002] = content[1002:1004]
    tokens.write_bytes(content)
    clock = shutil.which("faketime")
    run = train(
        three,
        num_processes=1,
        global_batch_size=24,
        precision="fp32",
        of={
            1: {"environment": {"PYTHONPATH": str(fake.parent)}, "num_processes": 2},
            2: {"output_prefix": patched / Path(data["output_prefix"]).name,
                "before": [clock, "-f", "-30s"] if clock else []},
        },
    )  # fmt: skip
    words = [
        ("host-1 (", "other packages", "sentencepiece", "here 0.0.1"),
        ("host-1 (", "another number of processes", "1, here 2"),
        ("host-1 (", "other settings", "num_processes"),
        ("host-2 (", "other token files", ": train.bin "),
    ]
    if clock:
        words.append(("host-2 (", "its clock is 3", "behind that of host-0"))
    else:
        print("the clock is left out: no faketime (apt-get install faketime)")
    assert_refused(run, *words)
