"""What fits into which memory: pools, the advice in numbers, and which runs are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from configs import TINY, config_of

from zerokara import resources
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import Fault, UserError
from zerokara.model.shapes import ModelShape
from zerokara.progress import bytes_text
from zerokara.steps import train
from zerokara.training.planning import memory, memory_forecast
from zerokara.training.planning.memory import TrainingLayout
from zerokara.training.planning.memory_forecast import SAFE_SHARE, MachineMemory, MemoryForecast

GB = 10**9
LARGE: dict[str, Any] = {
    "num_layers": 24,
    "hidden_size": 2048,
    "num_attn_heads": 16,
    "seq_len": 2048,
    "global_batch_size": 256,
    "precision": "bf16",
    "micro_batch_size": 32,
}
"""1.3 billion parameters."""


def forecast_of(
    settings: dict[str, Any], processes: int = 1, gpu: float | None = None, main: float = 2000 * GB, **changes: Any
) -> MemoryForecast:
    loaded = config_of(**{**settings, **changes})
    machine = MachineMemory(None if gpu is None else int(gpu), int(main))
    shape = ModelShape.from_config(loaded, 32_000 if settings is LARGE else 500)
    layout = TrainingLayout.from_config(
        loaded, shape, processes, machine.device, {"zero_optimization": {"reduce_bucket_size": 50_000_000}}
    )
    return MemoryForecast(layout, machine)


def refused(forecast: MemoryForecast, given: PretrainConfig) -> Fault:
    with pytest.raises(UserError) as caught:
        memory_forecast.check_fits(forecast, given)
    (fault,) = caught.value.faults
    return fault


def test_on_a_cpu_all_processes_share_main_memory() -> None:
    (pool,) = forecast_of(LARGE, processes=4, main=500 * GB).pools
    assert (pool.name, pool.num_processes, pool.available_bytes) == ("memory", 4, 500 * GB)
    parts = {part.name: part.num_bytes for part in pool.parts}
    assert pool.fixed_bytes == 4 * sum(parts.values())
    (alone,) = forecast_of(LARGE, processes=1, main=500 * GB).pools
    whole = {part.name: part.num_bytes for part in alone.parts}[memory.SAVE_COPY]
    assert parts[memory.SAVE_COPY] == whole // 4, "each process saves its share"
    assert pool.room_bytes == (500 * GB - pool.fixed_bytes) // 4
    assert pool.min_bytes == pool.fixed_bytes + 4 * pool.activation_bytes < pool.ample_bytes


def test_hierarchical_partitioning_keeps_the_weights_once_more_on_each_machine() -> None:
    template = {"zero_optimization": {"zero_hpz_partition_size": 8}}
    loaded = config_of(**{**LARGE, "zero_stage": 3})
    shape = ModelShape.from_config(loaded, 32_000)
    layout = TrainingLayout.from_config(loaded, shape, 16, "cuda", template, nodes=2)
    parts = {part.name: part.num_bytes for part in memory.state_parts(layout)}
    assert parts["weights of the machine"] == pytest.approx(2 * shape.num_parameters() / 8, rel=0.01)
    plain = TrainingLayout.from_config(loaded, shape, 16, "cuda", {}, nodes=2)
    assert "weights of the machine" not in {part.name for part in memory.state_parts(plain)}


def test_beside_a_gpu_main_memory_holds_what_is_offloaded_and_saved() -> None:
    gpu, main = forecast_of(LARGE, processes=4, gpu=80 * GB, offload="optimizer", zero_stage=2).pools
    assert (gpu.name, gpu.num_processes, main.name, main.num_processes) == ("GPU memory", 1, "main memory", 4)
    assert "optimizer state" in gpu.text + main.text and "optimizer state" not in gpu.text
    assert memory.SAVE_COPY in main.text and main.activation_bytes == 0
    assert gpu.text.startswith("80.0 GB: ") and bytes_text(gpu.room_bytes) in gpu.text


def test_the_advice_fits_and_leaves_the_optimisation_alone() -> None:
    asked = forecast_of(LARGE, processes=4, gpu=80 * GB)
    assert not asked.fits and "note" in dict(asked.rows())
    remedies = asked.remedies()
    assert next(iter(remedies[0][0])) == "micro_batch_size"
    for changes, changed in remedies:
        assert changed.fits and asked.changed(**changes).fits
    keys = {key for changes, _ in remedies for key in changes}
    assert keys <= {"micro_batch_size", "activation_checkpointing", "zero_stage", "offload", "tensor_parallel_size"}
    # The least change of its kind: the next larger micro batch would not have fitted.
    size = remedies[0][0]["micro_batch_size"]
    larger = min(one for one in asked.layout.micro_batch_sizes if one > size)
    assert not asked.changed(micro_batch_size=larger).fits
    assert f"micro_batch_size: {size} (" in asked.advice()
    roomy = asked.changed(micro_batch_size=1)
    assert roomy.fits and "note" not in dict(roomy.rows())


def test_where_no_single_change_is_enough_several_are_named_together() -> None:
    asked = forecast_of(LARGE, processes=8, gpu=20 * GB, zero_stage=1)
    [(changes, changed)] = asked.remedies()
    assert len(changes) > 1 and changed.fits
    assert forecast_of(LARGE, gpu=GB).remedies() == []


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_only_what_the_optimizer_can_do_is_advised(optimizer: str) -> None:
    asked = forecast_of(LARGE, processes=4, gpu=30 * GB, optimizer=optimizer, zero_stage=0)
    for changes, _ in asked.remedies():
        assert changes.get("zero_stage", 0) <= 1 and not {"offload", "tensor_parallel_size"} & changes.keys()


@pytest.mark.parametrize("gpu", [False, True])
def test_a_run_is_refused_where_it_certainly_does_not_fit(gpu: bool) -> None:
    needed = forecast_of(TINY, gpu=1 if gpu else None).pools[0].min_bytes
    given = config_of(**TINY)

    def of(size: int) -> MemoryForecast:
        return forecast_of(TINY, gpu=size) if gpu else forecast_of(TINY, main=size)

    memory_forecast.check_fits(of(needed), given)
    assert not of(needed).fits and "note" in dict(of(needed).rows()), "between, there is a note"
    assert ("GPU memory" in refused(of(needed - 1), given).rule) is gpu


def test_main_memory_beside_a_gpu_counts_too() -> None:
    settings = {**LARGE, "offload": "optimizer", "micro_batch_size": 1}
    fault = refused(forecast_of(LARGE, gpu=80 * GB, main=15 * GB, **settings), config_of(**settings))
    assert "main memory" in fault.rule
    memory_forecast.check_fits(forecast_of(LARGE, gpu=80 * GB, main=60 * GB, **settings), config_of(**settings))


def test_a_refusal_names_the_key_that_makes_it_fit() -> None:
    wide = {**TINY, "global_batch_size": 16384, "micro_batch_size": 16384}
    forecast = forecast_of(TINY, main=GB, **wide)
    fault = refused(forecast, config_of(**wide))
    assert (fault.key, fault.value) == ("micro_batch_size", 16384)
    (changes, changed), *_ = forecast.remedies()
    assert f"micro_batch_size: {changes['micro_batch_size']} (" in fault.remedy and changed.fits


def test_fewer_processes_share_a_machine_better() -> None:
    settings = {"num_processes": 4, "global_batch_size": 4, "micro_batch_size": 1}
    fault = refused(forecast_of(TINY, processes=4, main=1.1 * GB, **settings), config_of(**{**TINY, **settings}))
    assert (fault.key, fault.value) == ("num_processes", 4) and fault.remedy.startswith("2 would fit")


def test_where_nothing_else_helps_the_number_of_layers_that_fit_is_named() -> None:
    settings = {**TINY, "num_layers": 40, "hidden_size": 1024, "num_attn_heads": 8, "micro_batch_size": 1}
    forecast, given = forecast_of(TINY, main=4 * GB, **settings), config_of(**settings)
    fault = refused(forecast, given)
    assert (fault.key, fault.value) == ("num_layers", 40)
    number = int(fault.remedy.rpartition("num_layers: ")[2].split()[0])
    shape = forecast.layout.shape
    fits = [forecast.changed(shape=replace(shape, num_layers=layers)).fits for layers in (number, number + 1)]
    assert fits == [True, False]
    assert refused(forecast_of(TINY, main=0.3 * GB, **settings), given).key == "hidden_size", "libraries take more"


def test_freed_memory_is_kept_only_where_there_is_plenty() -> None:
    ample = forecast_of(TINY).pools[0].ample_bytes
    enough = memory_forecast.KEPT_SHARE * ample / SAFE_SHARE
    assert forecast_of(TINY, main=1.01 * enough).can_keep_freed_memory
    assert not forecast_of(TINY, main=0.99 * enough).can_keep_freed_memory
    assert not forecast_of(TINY, activation_checkpointing="full").can_keep_freed_memory


def test_a_trial_may_take_the_safe_share_of_a_process() -> None:
    assert forecast_of(TINY, processes=2, main=8 * GB).peak_limit_bytes == SAFE_SHARE * 4 * GB
    on_gpu = forecast_of(TINY, processes=2, gpu=80 * GB).peak_limit_bytes
    assert on_gpu == SAFE_SHARE * 80 * GB - memory_forecast.CUDA_CONTEXT_BYTES


def test_the_measured_peak_stands_beside_what_is_available() -> None:
    text = forecast_of(TINY, processes=2, main=8 * GB).measured_text(GB)
    assert "1.0 GB" in text and "4.0 GB" in text and "25%" in text


@pytest.mark.parametrize("options", [["--dry-run"], [], ["--verify-resume", "1"]])
def test_a_start_and_a_dry_run_refuse_alike(
    tiny_data: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
) -> None:
    monkeypatch.setattr(resources, "total_memory", lambda processes: int(0.3 * GB))
    given = ["--config", tiny_data["config"], "--set", f"output_model_dir={tmp_path / 'run'}"]
    assert train.main([*given, *options]) == 2
    printed = capsys.readouterr()
    assert "hidden_size = 48: " in printed.err and not printed.out and not any(tmp_path.iterdir())
