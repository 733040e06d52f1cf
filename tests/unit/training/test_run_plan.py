"""A plan: what it refuses, and what it makes of the machine that it is for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zerokara import resources
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import UserError
from zerokara.training import launching
from zerokara.training.planning import processors, run_plan
from zerokara.training.planning.processors import Devices


@pytest.fixture
def settings(tiny_data: dict[str, str], tmp_path: Path):  # type: ignore[no-untyped-def]
    def make(*overrides: str) -> PretrainConfig:
        place = f"output_model_dir={tmp_path / 'run'}"
        return load(PretrainConfig, tiny_data["config"], [place, *overrides])

    return make


def test_the_vocabulary_must_be_shared_in_whole_rows(settings) -> None:  # type: ignore[no-untyped-def]
    heads = ("hidden_size=60", "num_attn_heads=6", "num_kv_heads=3", "ffn_hidden_size=96", "tensor_parallel_size=3")
    with pytest.raises(UserError) as caught:
        run_plan.make_plan(settings(*heads), 3)
    (fault,) = caught.value.faults
    assert (fault.key, fault.value) == ("tensor_parallel_size", 3) and "512" in fault.rule


def test_tokens_of_another_tokenizer_are_refused(settings, tiny_data: dict[str, str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    other = tmp_path / "other.model"
    # The same pieces, one more field at the end of the file: another content.
    other.write_bytes(Path(tiny_data["input_tokenizer_file"]).read_bytes() + b"\x3a\x00")
    with pytest.raises(UserError) as caught:
        run_plan.make_plan(settings(f"input_tokenizer_file={other}"), 1)
    (fault,) = caught.value.faults
    assert "sha256" in fault.rule and "--redo" in fault.remedy


def test_on_a_cpu_processes_share_the_cores(settings, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    def processes(*overrides: str) -> int:
        return launching.on_this_machine(run_plan.make_plan(settings(*overrides))).num_processes

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(processors, "available_cores", lambda: 4)
    assert processes("micro_batch_size=auto") == 1  # a step has 256 tokens
    monkeypatch.setattr(processors, "MIN_PROCESS_TOKENS", 64)
    assert processes("micro_batch_size=auto") == 4
    assert processes("micro_batch_size=4") == 2  # of eight sequences
    assert processes("micro_batch_size=auto", "num_processes=1") == 1
    monkeypatch.setattr(resources, "available_memory", lambda count: 6 * 10**8)
    assert processes("micro_batch_size=auto") == 1  # each has libraries of its own


def test_precision_follows_the_hardware_only_when_asked(settings) -> None:  # type: ignore[no-untyped-def]
    for given in ("fp32", "bf16"):
        assert Devices(computes_bf16=given == "fp32").precision(settings(f"precision={given}")) == given
    config = settings("precision=auto")
    assert [Devices(computes_bf16=each).precision(config) for each in (True, False)] == ["bf16", "fp32"]
    plan = run_plan.make_plan(config, 1).with_settings(precision="fp32")
    assert (plan.resolved.precision, plan.requested.precision) == ("fp32", "auto")


def test_without_init_from_nothing_is_imported_for_it(settings, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(sys.modules, "zerokara.huggingface.from_hf", None)  # importing it fails from now on
    monkeypatch.delattr("zerokara.huggingface.from_hf", raising=False)
    launching.check_fits(run_plan.make_plan(settings(), 1).with_settings(precision="fp32"), starts=True)
    with pytest.raises(ImportError):
        launching.check_fits(run_plan.make_plan(settings("init_from=a_model"), 1), starts=True)


def test_a_plan_for_several_machines(settings) -> None:  # type: ignore[no-untyped-def]
    plan = run_plan.make_plan(settings("num_processes=2", "nodes=2", "micro_batch_size=2"), 4, nodes=2)
    assert (plan.num_processes, plan.processes_per_node, plan.data_parallel_size) == (4, 2, 4)
    alone = plan.on_processes(2, 1)
    assert (alone.num_processes, alone.nodes, alone.data_parallel_size) == (2, 1, 2)
    assert plan.with_settings(precision="fp32").memory.pools[0].num_processes == 2, (
        "those of one machine share its memory"
    )
    with pytest.raises(UserError, match="global_batch_size"):
        plan.on_processes(6, 3)


def test_tensor_parallelism_stays_inside_a_machine(settings) -> None:  # type: ignore[no-untyped-def]
    given = settings("num_processes=1", "nodes=2", "tensor_parallel_size=2", "micro_batch_size=2", "optimizer=adamw")
    plan = run_plan.make_plan(given, 2, nodes=2)
    with pytest.raises(UserError, match="tensor_parallel_size = 2: must divide the 1 processes of each machine"):
        plan.on_processes(2)


def test_a_hierarchy_of_the_users_own_is_checked_with_the_final_number_of_processes(settings, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """Where that is auto, the plan is first made for one."""
    template = tmp_path / "template.json"
    template.write_text('{"zero_optimization": {"zero_hpz_partition_size": 2}}', encoding="utf-8")
    given = settings(
        "zero_stage=3",
        "optimizer=adamw",
        "global_batch_size=12",
        "micro_batch_size=1",
        f"deepspeed_template={template}",
    )
    plan = run_plan.make_plan(given, 1)
    assert plan.on_processes(4).template["zero_optimization"]["zero_hpz_partition_size"] == 2
    with pytest.raises(UserError, match=r"template.json: its zero_hpz_partition_size, 2, must divide the 3 processes"):
        plan.on_processes(3)
