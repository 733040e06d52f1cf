"""Faults that keep machines from training together are all named, with the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zerokara.training.nodes import meeting

GOOD = {
    "host": "alpha", "address": "10.0.0.1", "code": "c0de", "packages": {"torch": "2.13.0"},
    "settings": {"lr": 0.01, "zero_stage": 1}, "tokenizer": "t", "data": {"train": "d", "train.bin": "a"},
    "processes": 8, "device": "cuda", "devices": "GPU, 8 × H200", "precision": "bf16", "free_bytes": 10**12,
    "clock": [1e9, 1e9 + 0.2],
}  # fmt: skip
BETA = {**GOOD, "host": "beta", "address": "10.0.0.2"}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("code", "0ther", ("another zerokara", "commit")),
        ("packages", {"torch": "2.12.0"}, ("torch 2.13.0, here 2.12.0", "setup.sh")),
        ("settings", {"lr": 0.01, "zero_stage": 2}, ("zero_stage 1, here 2", "config.yaml")),
        ("tokenizer", "x", ("another tokenizer", "copy")),
        ("data", {"train": "x", "train.bin": "b"}, ("other token files", "train d, here x, train.bin a, here b")),
        ("processes", 4, ("8, here 4", "num_processes")),
        ("device", "cpu", ("cuda, here cpu", "CUDA_VISIBLE_DEVICES")),
        ("precision", "fp32", ("bf16, here fp32",)),
    ],
)
def test_a_difference_is_named_with_machine_and_remedy(key: str, value: Any, words: tuple[str, ...]) -> None:
    assert not list(meeting.faults([GOOD, BETA]))
    (fault,) = meeting.faults([GOOD, {**BETA, key: value}])
    assert fault.where == "machine 1, beta (10.0.0.2)"
    assert all(word in str(fault) for word in words), str(fault)


def test_every_fault_is_named_at_once() -> None:
    broken = {**BETA, "precision": "fp32", "tokenizer": "x"}
    own = {key: GOOD[key] for key in ("host", "free_bytes", "clock")}
    own |= {"address": "10.0.0.3", "faults": ["config.yaml:3: -1: lr must be positive"]}
    found = list(meeting.faults([GOOD, broken, own]))
    assert len(found) == 3
    assert "10.0.0.3" in found[2].where and "lr must be positive" in found[2].rule
    assert len(list(meeting.faults([own, GOOD, BETA]))) == 1


@pytest.mark.parametrize(
    ("seconds", "waited", "words"),
    [(-6.0, 0.1, "5.9 s behind that of alpha"), (6.0, 0.1, "5.8 s ahead of"), (6.0, 2.0, "ahead of"), (4.0, 0.1, "")],
)
def test_clocks(seconds: float, waited: float, words: str) -> None:
    """A busy machine sees the moment between two looks that lie far apart, and is not accused."""
    beta = {**BETA, "clock": [1e9 + seconds, 1e9 + seconds + waited]}
    found = list(map(str, meeting.faults([GOOD, beta])))
    assert len(found) == bool(words) and words in "".join(found)
    for first, other in (([0.0, 30.0], [25.0, 31.0]), ([29.0, 30.0], [0.0, 31.0])):
        assert not list(meeting.faults([{**GOOD, "clock": first}, {**BETA, "clock": other}]))


def test_a_copy_with_other_bytes_is_seen_by_its_sample(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    content = bytearray(range(256)) * 100_000
    path.write_bytes(content)
    whole = meeting._sampled(path)
    assert meeting._sampled(path) == whole
    half = len(content) // 2
    for copy in (content[:half] + bytes(half), content[:-1], b""):  # the first broke off, of full size
        path.write_bytes(copy)
        assert meeting._sampled(path) != whole
