"""A run whose memory is far beyond all that the machine has is refused; one that may just fit is not."""

from __future__ import annotations

import resource
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from zerokara import resources
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import Fault, UserError
from zerokara.steps import train
from zerokara.training import launching
from zerokara.training.planning import memory_budget, memory_limit, run_plan
from zerokara.training.planning.memory_budget import Budget
from zerokara.training.planning.run_plan import RunPlan

GB = 10**9


def prepared(tiny_data: dict[str, str], *settings: str, processes: int = 1) -> RunPlan:
    given = load(PretrainConfig, tiny_data["config"], [*settings])
    return run_plan.make_plan(given, processes, "fp32")


def machine(monkeypatch: pytest.MonkeyPatch, main_memory: float) -> None:
    """Let the machine have so many bytes of main memory, shared out among the processes."""

    def whole(num_processes: int, gpu_bytes: int | None) -> Budget:
        each = int(main_memory) // num_processes
        return Budget("cpu", each, each) if gpu_bytes is None else Budget("cuda", gpu_bytes, each)

    monkeypatch.setattr(memory_limit, "whole_machine", whole)


def refused(plan: RunPlan, gpu_bytes: int | None = None) -> Fault:
    with pytest.raises(UserError) as caught:
        memory_limit.check(plan, gpu_bytes)
    (fault,) = caught.value.faults
    return fault


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_is_refused_from_a_quarter_more_than_all_there_is(
    tiny_data: dict[str, str], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    plan = prepared(tiny_data)
    there = Budget(device, GB, 100 * GB)  # type: ignore[arg-type]
    needed = plan.memory_question(there).needed().device_bytes
    machine(monkeypatch, 100 * GB)
    for share, fits in ((1.0, True), (1.24, True), (1.26, False), (100, False)):
        size = int(needed / share)
        if device == "cpu":
            machine(monkeypatch, size)
        gpu_bytes = size if device == "cuda" else None
        if fits:
            memory_limit.check(plan, gpu_bytes)
        else:
            assert ("GPU memory" in refused(plan, gpu_bytes).rule) is (device == "cuda")
        if share == 1.24:
            asked = Budget(device, size, 100 * GB)  # type: ignore[arg-type]
            rows = dict(launching._memory_rows(launching.LocalPlan(plan, asked)))
            assert "may not fit" in rows["note"], "between, there is a note"


def test_main_memory_beside_a_gpu_counts_too(tiny_data: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    size = ("num_layers=24", "hidden_size=1024", "num_attn_heads=8", "offload=optimizer", "micro_batch_size=1")
    plan = prepared(tiny_data, *size)
    machine(monkeypatch, GB)
    assert "of main memory" in refused(plan, 80 * GB).rule
    machine(monkeypatch, 20 * GB)
    memory_limit.check(plan, 80 * GB)
    machine(monkeypatch, GB)
    memory_limit.check(prepared(tiny_data), 80 * GB)  # the libraries are counted in the estimate, and not here


def test_what_would_fit_is_told_with_its_key(tiny_data: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    wide = ("global_batch_size=4096", "micro_batch_size=4096", "train_tokens=131072", "max_epochs_per_source=100")
    plan = prepared(tiny_data, *wide)
    machine(monkeypatch, GB)
    fault = refused(plan)
    assert (fault.where, fault.key, fault.value) == ("--set", "micro_batch_size", 4096)
    question = plan.memory_question(Budget("cpu", GB, GB))
    (changed, needed), *_ = question.remedies()
    assert f"micro_batch_size: {changed['micro_batch_size']} (about " in fault.remedy
    assert question.there.holds(needed) and not question.there.holds(question.needed())


def test_fewer_processes_share_a_machine_better(tiny_data: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = prepared(tiny_data, "num_processes=4", "global_batch_size=4", "micro_batch_size=1", processes=4)
    machine(monkeypatch, 1.3 * GB)
    fault = refused(plan)
    assert fault.key == "num_processes" and fault.value == 4 and fault.remedy.startswith("2 would fit (about ")


def test_where_nothing_else_helps_the_layers_that_fit_are_told(
    tiny_data: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = ("num_layers=40", "hidden_size=1024", "num_attn_heads=8", "micro_batch_size=1", "precision=fp32")
    plan = prepared(tiny_data, *size)
    machine(monkeypatch, 4 * GB)
    fault = refused(plan)
    assert fault.key == "num_layers" and fault.value == 40
    number = int(fault.remedy.rpartition("num_layers: ")[2].split()[0])
    question = plan.memory_question(Budget("cpu", 4 * GB, 4 * GB))
    fits = [replace(question, shape=replace(plan.shape, num_layers=layers)) for layers in (number, number + 1)]
    assert [question.there.holds(each.needed()) for each in fits] == [True, False]
    machine(monkeypatch, 0.3 * GB)
    assert refused(plan).key == "hidden_size", "libraries alone take more"


def test_what_else_runs_does_not_count_and_limits_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory = namedtuple("memory", "total available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory(64 * GB, 1 * GB))
    monkeypatch.setattr(resources, "control_groups", lambda: iter([tmp_path]))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memory_budget.whole_machine(2, None) == Budget("cpu", 32 * GB, 32 * GB)
    assert memory_budget.whole_machine(2, 80 * GB) == Budget("cuda", 80 * GB, 32 * GB)
    assert memory_budget.budget(1, None).device_bytes == GB
    for name, content in (("memory.max", 16 * GB), ("memory.current", 15 * GB)):
        (tmp_path / name).write_text(f"{content}\n", encoding="utf-8")
    assert memory_budget.whole_machine(1, None).device_bytes == 16 * GB
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * GB, 8 * GB))
    assert memory_budget.whole_machine(1, None).device_bytes == 8 * GB


@pytest.mark.parametrize("options", [["--dry-run"], [], ["--verify-resume", "1"]])
def test_a_start_and_a_dry_run_refuse_alike(
    tiny_data: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    machine(monkeypatch, 0.3 * GB)
    given = ["--config", tiny_data["config"], "--set", f"output_model_dir={tmp_path / 'run'}"]
    assert train.main([*given, *options]) == 2
    told = capsys.readouterr()
    assert "hidden_size = 48: makes each training process (of 1) need about " in told.err
    assert not told.out and not any(tmp_path.iterdir())
