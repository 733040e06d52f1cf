"""The arithmetic of memory, its bounds on what layers really keep, what fits, and which runs are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from configs import TINY, config_of

from zerokara import resources
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import Fault
from zerokara.model import parallel
from zerokara.model.builder import build
from zerokara.model.experts import Routing
from zerokara.model.shapes import ModelShape
from zerokara.progress import bytes_text
from zerokara.steps import train
from zerokara.training.planning import memory, preflight
from zerokara.training.planning.memory import SAFE_SHARE, MemoryForecast, MemoryPool, min_activation_bytes, state_parts

ARCHITECTURES = ["llama", "qwen3", "gpt2", "t5", "mixtral", "switch"]
LAYERS = 3
GB = 10**9


def shape_of(architecture: str = "llama", kv_heads: int = 4) -> ModelShape:
    shape = ModelShape(architecture, LAYERS, 64, 4, kv_heads, 192, 32, 500, True, 1e4, 1e-5, 0.02)
    if shape.traits.is_encoder_decoder:
        # Heads that are together wider than the model, and a decoder shorter than its encoder.
        shape = replace(shape, head_dim=24, target_len=20)
    if not shape.traits.moe_every:
        return shape
    per_token = shape.traits.experts_per_token
    experts = {"num_experts": 6, "experts_per_token": per_token, "moe_ffn_hidden_size": 96}
    return replace(shape, **experts, moe_layers=tuple(range(LAYERS)))


BUCKET: dict[str, Any] = {"zero_optimization": {"reduce_bucket_size": 50_000_000}}


def layout_of(shape: ModelShape | None = None, **settings: Any) -> MemoryForecast:
    given = {
        "num_processes": 1,
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "precision": "fp32",
        "template": BUCKET,
    }
    return MemoryForecast(shape or shape_of(), **{**given, "main_bytes": 2000 * GB, **settings})


def by_name(layout: MemoryForecast, on_host: bool = False) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in state_parts(layout):
        if part.on_host == on_host:
            found[part.name] = found.get(part.name, 0) + part.num_bytes
    return found


def state_bytes(layout: MemoryForecast) -> int:
    return sum(part.num_bytes for part in state_parts(layout) if not part.on_host and part.name != memory.SAVE_COPY)


@pytest.mark.parametrize(
    ("precision", "optimizer", "expected"),
    [
        ("fp32", "adamw", {"weights": 4, "gradients": 4, "optimizer state": 8}),
        ("bf16", "adamw", {"weights": 2, "gradients": 4, "fp32 master weights": 4, "optimizer state": 8}),
        ("bf16", "adafactor", {"weights": 2, "gradients": 4, "fp32 master weights": 4}),
        ("fp32", "muon", {"weights": 4, "gradients": 4}),
    ],
)
def test_bytes_of_a_parameter_on_one_process(precision: str, optimizer: str, expected: dict[str, int]) -> None:
    shape = shape_of()
    found = by_name(layout_of(shape, precision=precision, optimizer=optimizer))
    count = shape.num_parameters()
    assert {name: found[name] for name in expected} == {name: size * count for name, size in expected.items()}
    assert found[memory.SAVE_COPY] == 4 * count + found["optimizer state"]
    assert found.keys() - expected.keys() <= {"optimizer state", memory.SAVE_COPY}


def test_tensor_parallelism_shares_out_all_matrices() -> None:
    shape = shape_of()
    whole, half = (by_name(layout_of(num_processes=2, tensor_parallel_size=size))["weights"] for size in (1, 2))
    norms = 4 * (2 * LAYERS + 1) * shape.hidden_size
    assert whole == 4 * shape.num_parameters() and half == (whole - norms) // 2 + norms


def test_each_setting_that_saves_memory_does() -> None:
    large = replace(shape_of(), num_layers=12, hidden_size=1024, ffn_hidden_size=2816, num_attn_heads=16, head_dim=64)
    base = layout_of(
        large, gpu_bytes=80 * GB, precision="bf16", num_processes=4, global_batch_size=64, micro_batch_size=16
    )
    by_stage = [state_bytes(replace(base, zero_stage=stage)) for stage in (2, 1, 0)]
    assert by_stage == sorted(set(by_stage))
    # DeepSpeed keeps a whole bucket at hand: only of a model that is larger than that stage 3 saves memory.
    small_bucket = replace(base, template={"zero_optimization": {"reduce_bucket_size": 1_000_000}})
    assert state_bytes(replace(small_bucket, zero_stage=3)) < by_stage[0] < state_bytes(replace(base, zero_stage=0))
    assert state_bytes(replace(base, tensor_parallel_size=2)) < state_bytes(replace(base, num_processes=2))
    assert state_bytes(replace(base, optimizer="adafactor")) < state_bytes(base)
    offloaded = replace(base, offload="optimizer")
    assert state_bytes(offloaded) < state_bytes(base)
    assert by_name(offloaded, on_host=True).keys() == {
        "gradients",
        "fp32 master weights",
        "optimizer state",
        memory.SAVE_COPY,
    }
    assert "weights" in by_name(replace(base, offload="all", zero_stage=3), on_host=True)
    by_mode = [
        min_activation_bytes(replace(base, activation_checkpointing=mode)) for mode in ("full", "selective", "off")
    ]
    assert by_mode == sorted(set(by_mode))
    assert min_activation_bytes(replace(base, micro_batch_size=8)) == min_activation_bytes(base) / 2
    assert min_activation_bytes(replace(base, tensor_parallel_size=2)) < min_activation_bytes(base)


def test_the_tokens_of_an_encoder_and_of_its_decoder_count() -> None:
    shape = shape_of("t5")
    both = min_activation_bytes(layout_of(shape))
    assert min_activation_bytes(layout_of(replace(shape, input_len=64))) > both
    assert min_activation_bytes(layout_of(replace(shape, target_len=40))) > both


def test_micro_batch_sizes_divide_the_share_of_a_process() -> None:
    assert layout_of(global_batch_size=24, num_processes=2).micro_batch_sizes == [1, 2, 3, 4, 6, 12]
    assert layout_of(global_batch_size=24, num_processes=2, tensor_parallel_size=2).micro_batch_sizes[-1] == 24


def kept_bytes(layout: MemoryForecast, masking: bool) -> int:
    """What is kept for the backward pass when the layers are done, weights left out."""
    parallel.start_alone()
    shape, dtype = layout.shape, torch.bfloat16 if layout.precision == "bf16" else torch.float32
    mode, routing = layout.activation_checkpointing, Routing(aux_loss_coef=0.01, z_loss_coef=0.001)
    model = build(shape, dtype, activation_checkpointing=mode, routing=routing).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}
    counted: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    for layer in model.all_layers():
        layer.register_forward_hook(lambda *_: counted.append(sum(one.nbytes() for one in kept.values())))
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (
        torch.randint(4, 500, (layout.micro_batch_size, length), generator=generator)
        for length in (shape.seq_len, shape.target_len)
    )
    segments = (inputs < 50).cumsum(1) if masking else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs, targets, None, targets if shape.traits.is_encoder_decoder else segments)
    return counted[-1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [*((name, {}) for name in ARCHITECTURES), ("llama", {"kv_heads": 2}), ("llama", {"masking": True})],
)
def test_the_bounds_hold_what_layers_keep(architecture: str, settings: dict[str, Any], precision: str) -> None:
    shape = shape_of(architecture, settings.get("kv_heads", 4))
    layout = layout_of(shape, precision=precision)
    masking = settings.get("masking", False)
    whole = kept_bytes(layout, masking)
    for mode in ("off", "selective", "full"):
        of_mode = replace(layout, activation_checkpointing=mode)
        kept = kept_bytes(of_mode, masking)
        # What is not kept is computed again for one layer at a time.
        held = kept + (whole - kept) / LAYERS
        least = min_activation_bytes(of_mode)
        assert least < held < memory.ACTIVATION_MARGIN * least


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
    settings: dict[str, Any],
    processes: int = 1,
    gpu: float | None = None,
    main: float = 2000 * GB,
    template: dict[str, Any] = BUCKET,
    nodes: int = 1,
    **changes: Any,
) -> MemoryForecast:
    loaded = config_of(**{**settings, **changes})
    shape = ModelShape.from_config(loaded, 32_000 if settings is LARGE else 500)
    gpu_bytes = None if gpu is None else int(gpu)
    machine = {"num_processes": processes, "nodes": nodes, "main_bytes": int(main), "gpu_bytes": gpu_bytes}
    return MemoryForecast.of_run(loaded, shape, template=template, **machine)


def test_on_a_cpu_all_processes_share_main_memory() -> None:
    (pool,) = forecast_of(LARGE, processes=4, main=500 * GB).pools
    assert (pool.name, pool.num_processes, pool.available_bytes) == ("memory", 4, 500 * GB)
    parts = {part.name: part.num_bytes for part in pool.parts}
    (alone,) = forecast_of(LARGE, processes=1, main=500 * GB).pools
    whole = {part.name: part.num_bytes for part in alone.parts}[memory.SAVE_COPY]
    assert parts[memory.SAVE_COPY] == whole // 4, "each process saves its share"
    assert pool.needed_bytes(0) == 4 * sum(parts.values())
    assert pool.needed_bytes(2) == pool.needed_bytes(0) + 8 * pool.activation_bytes


def test_hierarchical_partitioning_keeps_the_weights_once_more_on_each_machine() -> None:
    template = {"zero_optimization": {"zero_hpz_partition_size": 8}}
    forecast = forecast_of(LARGE, processes=16, nodes=2, gpu=80 * GB, zero_stage=3, template=template)
    expected = 2 * forecast.shape.num_parameters() / 8
    assert by_name(forecast)["weights of the machine"] == pytest.approx(expected, rel=0.01)
    assert "weights of the machine" not in by_name(replace(forecast, template={}))


def test_beside_a_gpu_main_memory_holds_what_is_offloaded_and_saved() -> None:
    gpu, main = forecast_of(LARGE, processes=4, gpu=80 * GB, offload="optimizer", zero_stage=2).pools
    assert (gpu.name, gpu.num_processes, main.name, main.num_processes) == ("GPU memory", 1, "main memory", 4)
    assert "optimizer state" in main.text and "optimizer state" not in gpu.text
    assert memory.SAVE_COPY in main.text and main.activation_bytes == 0
    room = bytes_text(80 * GB - gpu.needed_bytes(0))
    assert gpu.text.startswith("80.0 GB: ") and gpu.text.endswith(f"{room} left for activations")


def test_the_advice_is_the_cheapest_setting_that_fits() -> None:
    asked = forecast_of(LARGE, processes=4, gpu=80 * GB)
    assert not asked.fits and "note" in dict(asked.rows())
    key, words = asked.remedy()
    size = int(words.split()[1])
    assert key == "micro_batch_size" and words.startswith(f"micro_batch_size: {size} (at most ")
    assert replace(asked, micro_batch_size=size).fits
    larger = min(one for one in asked.micro_batch_sizes if one > size)
    assert not replace(asked, micro_batch_size=larger).fits
    roomy = replace(asked, micro_batch_size=1)
    assert roomy.fits and "note" not in dict(roomy.rows())
    crowded = forecast_of(LARGE, processes=8, gpu=20 * GB, micro_batch_size=1)
    key, words = crowded.remedy()
    assert key in ("activation_checkpointing", "zero_stage") and "would fit" in words


def test_where_no_single_change_is_enough_several_are_named_together() -> None:
    words = forecast_of(LARGE, processes=8, gpu=18 * GB, zero_stage=1).remedy()[1]
    assert words.startswith("micro_batch_size: 1, activation_checkpointing: full (") and "would fit" in words
    key, words = forecast_of(LARGE, gpu=GB).remedy()
    assert key == "hidden_size" and "smaller model" in words


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_only_what_the_optimizer_can_do_is_advised(optimizer: str) -> None:
    asked = forecast_of(LARGE, processes=4, gpu=30 * GB, optimizer=optimizer, zero_stage=0)
    changes = list(asked._changes())
    assert {"zero_stage": 1} in changes and {"zero_stage": 2} not in changes
    assert not any("offload" in change for change in changes)
    assert {"offload": "all", "zero_stage": 3} in list(replace(asked, optimizer="adamw")._changes())


def refused(forecast: MemoryForecast, given: PretrainConfig) -> Fault:
    (fault,) = preflight.memory_faults(forecast, given)
    return fault


def least(pool: MemoryPool) -> int:
    return int(pool.needed_bytes(1))


@pytest.mark.parametrize("gpu", [False, True])
def test_a_run_is_refused_where_it_certainly_does_not_fit(gpu: bool) -> None:
    needed = least(forecast_of(TINY, gpu=1 if gpu else None).pools[0])
    given = config_of(**TINY)

    def of(size: int) -> MemoryForecast:
        return forecast_of(TINY, gpu=size) if gpu else forecast_of(TINY, main=size)

    assert not list(preflight.memory_faults(of(needed), given))
    assert not of(needed).fits and "note" in dict(of(needed).rows()), "between, there is a note"
    assert ("GPU memory" in refused(of(needed - 1), given).rule) is gpu


def test_main_memory_beside_a_gpu_counts_too() -> None:
    settings = {**LARGE, "offload": "optimizer", "micro_batch_size": 1}
    fault = refused(forecast_of(LARGE, gpu=80 * GB, main=15 * GB, **settings), config_of(**settings))
    assert "main memory" in fault.rule
    forecast = forecast_of(LARGE, gpu=80 * GB, main=60 * GB, **settings)
    assert not list(preflight.memory_faults(forecast, config_of(**settings)))


def test_a_refusal_names_the_key_that_makes_it_fit() -> None:
    wide = {**TINY, "global_batch_size": 16384, "micro_batch_size": 16384}
    forecast = forecast_of(TINY, main=GB, **wide)
    fault = refused(forecast, config_of(**wide))
    assert (fault.key, fault.value) == ("micro_batch_size", 16384)
    assert fault.remedy.startswith("micro_batch_size: ") and "GB" in fault.rule
    settings = {"num_processes": 4, "global_batch_size": 4, "micro_batch_size": 1}
    fault = refused(forecast_of(TINY, processes=4, main=1.1 * GB, **settings), config_of(**{**TINY, **settings}))
    assert fault.key == "hidden_size" and "use fewer num_processes, a smaller model" in fault.remedy


def test_freed_memory_is_kept_only_where_there_is_plenty() -> None:
    enough = memory.KEPT_SHARE * forecast_of(TINY).ample_bytes / SAFE_SHARE
    assert forecast_of(TINY, main=1.01 * enough).can_keep_freed_memory
    assert not forecast_of(TINY, main=0.99 * enough).can_keep_freed_memory
    assert not forecast_of(TINY, activation_checkpointing="full").can_keep_freed_memory


def test_a_trial_may_take_the_safe_share_of_a_process() -> None:
    assert forecast_of(TINY, processes=2, main=8 * GB).peak_limit_bytes == SAFE_SHARE * 4 * GB
    on_gpu = forecast_of(TINY, processes=2, gpu=80 * GB).peak_limit_bytes
    assert on_gpu == SAFE_SHARE * 80 * GB - memory.CUDA_CONTEXT_BYTES


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
