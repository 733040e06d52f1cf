"""What fits into which memory: the advice in numbers, `micro_batch_size: auto`, and that it stays what it was."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model.shapes import ModelShape
from zerokara.training.planning import machine, memory_budget
from zerokara.training.planning.memory_budget import Budget, Question

GB = 10**9
LARGE = (
    "num_layers=24",
    "hidden_size=2048",
    "num_attn_heads=16",
    "seq_len=2048",
    "global_batch_size=256",
    "precision=bf16",
    "micro_batch_size=32",
)
"""1.3 billion parameters."""


def question(*overrides: str, processes: int = 1, device: str = "cuda", gigabytes: float = 80) -> Question:
    loaded = load(PretrainConfig, "/dev/null", [*LARGE, *overrides])
    there = Budget(device, int(gigabytes * GB), 2000 * GB)  # type: ignore[arg-type]
    return Question(loaded, ModelShape.from_config(loaded, 32_000), processes, {}, there)


def test_the_advice_fits_and_leaves_the_optimisation_alone() -> None:
    asked = question(processes=4)
    assert not asked.there.holds(asked.needed())
    remedies = asked.remedies()
    assert next(iter(remedies[0][0])) == "micro_batch_size"
    for changes, needed in remedies:
        assert asked.there.holds(needed) and asked.there.holds(asked.needed(**changes))
    keys = {key for changes, _ in remedies for key in changes}
    allowed = {"micro_batch_size", "activation_checkpointing", "zero_stage", "offload", "tensor_parallel_size"}
    assert keys <= allowed
    # The least change of its kind: the next larger micro batch would not have fitted.
    size = remedies[0][0]["micro_batch_size"]
    larger = min(one for one in asked.micro_batches if one > size)
    assert not asked.there.holds(asked.needed(micro_batch_size=larger))
    words = memory_budget.advice(asked)
    assert f"micro_batch_size: {size} (about " in words and not re.search(r"\blr\b|global_batch|seq_len", words)


def test_where_no_single_change_is_enough_several_are_told_together() -> None:
    asked = question("zero_stage=1", processes=8, gigabytes=12)
    [(changes, needed)] = asked.remedies()
    assert len(changes) > 1 and asked.there.holds(needed)
    assert "no setting makes it fit here" in memory_budget.advice(question(gigabytes=1))


def test_auto_is_the_largest_that_fits_on_a_gpu() -> None:
    asked = question("micro_batch_size=auto")
    chosen = asked.widest()
    assert asked.there.holds(asked.needed(micro_batch_size=chosen))
    assert not asked.there.holds(asked.needed(micro_batch_size=2 * chosen)) and 256 % chosen == 0
    roomier = replace(asked, there=replace(asked.there, device_bytes=140 * GB))
    assert roomier.widest() > chosen
    assert question("micro_batch_size=auto", gigabytes=1).widest() == 1


def test_auto_on_a_cpu_stops_where_it_gets_no_faster() -> None:
    settings = ("micro_batch_size=auto", "num_layers=2", "hidden_size=64", "num_attn_heads=4", "precision=fp32")
    enough = memory_budget.CPU_MICRO_BATCH_TOKENS
    for seq_len in (128, 2048, 8192):
        asked = question(*settings, f"seq_len={seq_len}", device="cpu")
        assert asked.widest() * seq_len == max(enough, seq_len)
    few = question(*settings, "seq_len=16", "global_batch_size=24", device="cpu", processes=2)
    assert few.widest() == 12  # all that a process has


def test_a_choice_is_kept_until_what_it_was_made_for_changes(tmp_path: Path) -> None:
    asked = question("micro_batch_size=auto")
    chosen, words = machine.micro_batch(asked, tmp_path)
    assert words == [] and not machine.is_recorded(asked, tmp_path)
    machine.record(asked, tmp_path, chosen // 2)  # as after a trial that did not fit
    busy = replace(asked, there=replace(asked.there, host_bytes=GB))
    assert machine.is_recorded(busy, tmp_path)
    assert machine.micro_batch(busy, tmp_path) == (chosen // 2, [])
    smaller = replace(asked, there=replace(asked.there, device_bytes=40 * GB))
    chosen_there, words = machine.micro_batch(smaller, tmp_path)
    assert chosen_there == smaller.widest() and not machine.is_recorded(smaller, tmp_path)
    if chosen_there != chosen // 2:
        assert f"auto was {chosen // 2}, is now {chosen_there} (the GPU's memory in bytes was {80 * GB}" in words[0]


def test_freed_memory_is_kept_only_where_twice_the_estimate_is_there() -> None:
    needed = question(device="cpu", gigabytes=1).needed().device_bytes / GB
    assert question(device="cpu", gigabytes=2.4 * needed).is_roomy
    assert not question(device="cpu", gigabytes=2.2 * needed).is_roomy


def test_the_estimate_is_told_by_part() -> None:
    asked = question("offload=optimizer", "zero_stage=2", processes=4)
    rows = dict(memory_budget.table(asked.needed(), asked.there))
    assert "activations of 24 layers" in rows["GPU memory"] and "of 80.0 GB" in rows["GPU memory"]
    assert "optimizer" in rows["main memory"] and "optimizer" not in rows["GPU memory"]
