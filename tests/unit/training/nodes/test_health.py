"""What keeps machines from training together is named, all of it, on each machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerokara.training.nodes import health
from zerokara.training.nodes.health import Health, Report
from zerokara.training.nodes.links import Link

GOOD = Report(
    host="alpha", address="10.0.0.1", code="c0de", python="3.11.2", packages={"torch": "2.13.0"},
    settings={"lr": 0.01, "zero_stage": 1}, tokenizer="t", data="d", valid="v", files={"train.bin": "a"},
    processes=8, device="cuda", devices="GPU, 8 × H200", precision="bf16", free_bytes=10**12,
)  # fmt: skip
LINK = Link(bytes_a_second=2e9, round_trip_seconds=0.001)


def health_of(second: Report | None = None, **links: Link) -> Health:
    other = second or replace(GOOD, host="beta", address="10.0.0.2")
    found = {(0, 1): LINK, (1, 0): LINK}
    found |= {(int(key[4]), int(key[5])): link for key, link in links.items()}
    return Health([GOOD, other], found)


def test_nothing_is_wrong() -> None:
    found = health_of()
    assert found.faults() == [] and not list(found.warnings())
    header, first, second = found.table()
    assert "beta" in second and "10.0.0.2" in second and "2.0 GB/s to 0" in second and "+0.00 s" in second
    assert header.index("address") == first.index("10.0.0.1") == second.index("10.0.0.2")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("code", "0ther", ("another zerokara", "commit")),
        ("python", "3.12.1", ("3.11.2, here 3.12.1",)),
        ("packages", {"torch": "2.12.0"}, ("torch 2.13.0, here 2.12.0", "setup.sh")),
        ("settings", {"lr": 0.01, "zero_stage": 2}, ("zero_stage 1, here 2", "config.yaml")),
        ("tokenizer", "x", ("another tokenizer", "copy")),
        ("data", "x", ("other training data", "manifest")),
        ("valid", "x", ("other validation data",)),
        ("files", {"train.bin": "b"}, ("train.bin a, here b", "copy them")),
        ("processes", 4, ("8, here 4", "num_processes")),
        ("device", "cpu", ("cuda, here cpu", "CUDA_VISIBLE_DEVICES")),
        ("precision", "fp32", ("bf16, here fp32",)),
    ],
)
def test_a_difference_is_named_with_machine_and_remedy(key: str, value: Any, words: tuple[str, ...]) -> None:
    other = replace(GOOD, host="beta", address="10.0.0.2", **{key: value})
    (fault,) = health_of(other).faults()
    assert fault.where == "machine 1, beta (10.0.0.2)"
    assert all(word in str(fault) for word in words), str(fault)


def test_every_fault_is_named_at_once() -> None:
    broken = replace(GOOD, host="beta", precision="fp32", data="x")
    cut = Link(fault="no answer")
    ahead = replace(LINK, clock_seconds=7.5)
    assert len(health_of(broken, link10=cut).faults()) == 3
    assert len(health_of(broken, link01=ahead).faults()) == 3
    own = replace(GOOD, host="beta", faults=("config.yaml:3: lr = -1: must be positive",), settings={}, data="")
    (fault,) = health_of(own).faults()
    assert "beta" in fault.where and "lr = -1" in fault.rule


def test_a_cut_link_is_named_once_and_from_the_side_that_saw_it() -> None:
    cut = Link(fault="no answer")
    (both,) = health_of(link01=cut, link10=cut).faults()
    (one,) = health_of(link10=cut).faults()
    assert "machine 0" in both.where and "machine 1" in both.rule
    assert "machine 1" in one.where and "machine 0" in one.rule and "TCP ports" in one.remedy


@pytest.mark.parametrize(("seconds", "faults"), [(-6.0, 1), (6.0, 1), (4.0, 0)])
def test_clocks(seconds: float, faults: int) -> None:
    found = health_of(link01=replace(LINK, clock_seconds=seconds)).faults()
    assert len(found) == faults
    if found:
        assert ("ahead of alpha" if seconds > 0 else "behind alpha") in str(found[0]).replace("that of ", "")


def test_a_slow_link_is_pointed_out() -> None:
    reports = [replace(GOOD, host=name) for name in ("a", "b", "c")]
    links = {(one, other): LINK for one in range(3) for other in range(3) if one != other}
    links[2, 0] = replace(LINK, bytes_a_second=1e8)
    (warning,) = Health(reports, links).warnings()
    assert "from a to c" in warning and "100.0 MB/s" in warning


def test_a_copy_with_other_bytes_is_seen_by_its_sample(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    content = bytearray(range(256)) * 1_000_000
    path.write_bytes(content)
    whole = health._sampled(path)
    path.write_bytes(content)
    assert health._sampled(path) == whole
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) // 2))  # a copy that broke off, of full size
    assert health._sampled(path) != whole
    path.write_bytes(content[:-1])
    assert health._sampled(path) != whole
    path.write_bytes(b"")
    assert health._sampled(path) != whole
