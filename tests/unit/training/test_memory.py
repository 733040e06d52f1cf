"""The arithmetic of memory, its bounds on what layers really keep, what fits, and which runs are refused.

`micro_batch_size: auto`: the size that is chosen, from measured peaks on a GPU, and that a run keeps it. Training
processes are stood in.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import TINY, config_of
from drawn_models import build

from zerokara.base import resources
from zerokara.base.errors import Fault, RunError, UserError
from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.shapes import ModelShape
from zerokara.steps import train
from zerokara.training import auto_settings
from zerokara.training.auto_settings import CPU_TOKENS, first_micro_batch, kept_micro_batch, try_steps
from zerokara.training.planning import memory, processors
from zerokara.training.planning.earlier_run import EarlierRun
from zerokara.training.planning.memory import MemoryForecast, min_activation_bytes
from zerokara.training.planning.processors import Devices
from zerokara.training.planning.run_plan import RunPlan
from zerokara.training.processes import supervision

LAYERS = 3
GB = 10**9


def shape_of(architecture: str = "llama") -> ModelShape:
    shape = ModelShape(architecture, LAYERS, 64, 4, 4, 192, 32, 500, True, 1e4, 1e-5, 0.02)
    if shape.traits.is_encoder_decoder:
        # Heads that are together wider than the model, and a decoder shorter than its encoder.
        shape = replace(shape, head_dim=24, target_len=20)
    if not shape.traits.moe_every:
        return shape
    per_token = shape.traits.experts_per_token
    experts = {"num_experts": 6, "experts_per_token": per_token, "moe_ffn_hidden_size": 96}
    return replace(shape, **experts, moe_layers=tuple(range(LAYERS)))


BUCKET: dict[str, Any] = {"zero_optimization": {"reduce_bucket_size": 50_000_000}}


def layout_of(
    shape: ModelShape | None = None, num_processes: int = 1, nodes: int = 1, gpu: float | None = None,
    main: float = 2000 * GB, template: dict[str, Any] = BUCKET, **settings: Any,
) -> MemoryForecast:  # fmt: skip
    config = config_of(**{"global_batch_size": 16, "micro_batch_size": 2, **settings})
    gpu_bytes = None if gpu is None else int(gpu)
    return MemoryForecast(config, shape or shape_of(), num_processes, nodes, template, int(main), gpu_bytes)


def kept_bytes(layout: MemoryForecast) -> int:
    """Return the bytes kept for the backward pass when the layers are done, without weights."""
    parallel.start_alone()
    shape, config = layout.shape, layout.config
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    model = build(shape, dtype, activation_checkpointing=config.activation_checkpointing, settings=config).train()
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
        torch.randint(4, 500, (config.micro_batch, length), generator=generator)
        for length in (shape.seq_len, shape.target_len)
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        numbers = torch.arange(config.micro_batch)
        model(inputs, targets, None, numbers, targets if shape.traits.is_encoder_decoder else None)
    return counted[-1]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "t5", "switch", "mixtral"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_bounds_hold_what_layers_keep(architecture: str, dropout: float) -> None:
    shape = shape_of(architecture)
    layout = layout_of(shape, dropout=dropout, precision="fp32" if architecture == "mixtral" else "bf16")
    whole = kept_bytes(layout)
    for mode in ("off", "selective", "full"):
        of_mode = layout.with_settings(activation_checkpointing=mode)
        kept = whole if mode == "off" else kept_bytes(of_mode)
        # What is not kept is computed again for one layer at a time.
        held = kept + (whole - kept) / (LAYERS * (2 if shape.traits.is_encoder_decoder else 1))
        least = min_activation_bytes(of_mode)
        assert least < held < memory.ACTIVATION_MARGIN * least


LARGE: dict[str, Any] = {
    "num_layers": 24, "hidden_size": 2048, "num_attn_heads": 16, "seq_len": 2048, "global_batch_size": 256,
    "precision": "bf16", "micro_batch_size": 32,
}  # fmt: skip
"""1.3 billion parameters."""


def forecast_of(settings: dict[str, Any], processes: int = 1, **changes: Any) -> MemoryForecast:
    given = {**settings, **changes}
    loaded = config_of(**{key: value for key, value in given.items() if key in PretrainConfig.model_fields})
    shape = ModelShape.from_config(loaded, 32_000 if settings is LARGE else 500)
    return layout_of(shape, processes, **given)


EAGER = {"compile": "off", "optimizer": "adamw"}
MIXTURE = {"architecture": "mixtral", "num_experts": 8, "experts_per_token": 2} | {
    "micro_batch_size": 16,
    "global_batch_size": 64,
}
T5 = {"architecture": "t5", "seq_len": 512, "head_dim": 64, "micro_batch_size": 64, "global_batch_size": 256}
SIMULATED = [
    (25.0, {}),
    (
        36.0,
        {"num_layers": 24, "hidden_size": 1024, "num_attn_heads": 16, "ffn_hidden_size": 2816, "micro_batch_size": 16},
    ),
    (
        49.45,
        {"num_layers": 24, "hidden_size": 2048, "num_attn_heads": 16, "ffn_hidden_size": 5504, "micro_batch_size": 8},
    ),
    (28.7, {"compile": "off"}),
    (28.8, {"compile": "off", "architecture": "qwen3"}),
    (22.66, {"architecture": "gpt2", "ffn_hidden_size": "auto"}),
    (16.1, {**EAGER, "activation_checkpointing": "selective"}),
    (16.25, {**EAGER, "activation_checkpointing": "selective", "architecture": "qwen3"}),
    (33.0, {**EAGER, **MIXTURE}),
    (33.1, {**EAGER, **MIXTURE, "architecture": "qwen3_moe"}),
    (21.9, {**EAGER, **T5}),
    (28.4, {**EAGER, **T5, "architecture": "t5_moe", "num_experts": 8}),
    (22.0, {**EAGER, **T5, "seq_len": 2048, "micro_batch_size": 16, "global_batch_size": 64}),
]
"""GB at the peak of a step on one H100, as benchmarks/gpu/simulation simulates it, of decoders without experts and
recomputation with Muon; of 125M where no size is named."""


RECOMPUTED = [
    (7.2, {}),
    (7.2, {"architecture": "qwen3"}),
    (10.7, SIMULATED[1][1]),
    (28.0, SIMULATED[2][1]),
    (13.4, MIXTURE),
    (13.4, {**MIXTURE, "architecture": "qwen3_moe"}),
    (7.1, T5),
]
"""The same of eager layers that are computed again."""


@pytest.mark.parametrize(("peak", "changes"), SIMULATED)
def test_what_a_gpu_needs_is_within_a_sixth_above_the_simulated_peak(peak: float, changes: dict[str, Any]) -> None:
    assert peak <= needed_on_gpu(changes) <= 1.15 * peak


@pytest.mark.parametrize(("peak", "changes"), RECOMPUTED)
def test_with_recomputation_it_is_less_than_3_gb_above(peak: float, changes: dict[str, Any]) -> None:
    assert peak <= needed_on_gpu({**changes, **EAGER, "activation_checkpointing": "full"}) <= peak + 3
    assert needed_on_gpu({**changes, **EAGER, "precision": "fp32"}) > 3 * peak, "attention may keep scores"


def needed_on_gpu(changes: dict[str, Any]) -> float:
    """GB that torch counts."""
    size = {"num_layers": 12, "hidden_size": 768, "num_attn_heads": 12, "ffn_hidden_size": 2048, "micro_batch_size": 32}
    common = {"seq_len": 2048, "precision": "bf16", "optimizer": "muon", "global_batch_size": 128}
    config = config_of(**{**common, **size, **changes})
    forecast = MemoryForecast(config, ModelShape.from_config(config, 49_500), 1, 1, {}, 10**12, 80 * GB)
    needed = forecast.pools[0].needed_bytes - sum(forecast.uncounted.values())
    return needed / GB


def test_validations_that_generate_answers_need_a_copy_of_the_model() -> None:
    """Instead of activations: of a large model with small batches it is more."""
    sizes = {"num_layers": 32, "hidden_size": 4096, "num_attn_heads": 32, "packed_length": 64, "precision": "bf16"}
    given = {**sizes, "micro_batch_size": 1, "global_batch_size": 8, "zero_stage": 3, "optimizer": "adamw"}
    configs = [FinetuneRunConfig(metric=metric, **given) for metric in ("loss", "accuracy")]
    shape = ModelShape.from_config(configs[0], 32_000)
    of_loss, of_answers = (MemoryForecast(each, shape, 8, 1, {}, 10**12, 80 * GB).pools[0] for each in configs)
    rest = sum(of_loss.parts.values())
    assert of_answers.needed_bytes == pytest.approx(rest + 2 * shape.num_parameters(), rel=0.01)
    assert of_loss.needed_bytes < rest + shape.num_parameters()


def test_main_memory_is_shared_and_beside_a_gpu_holds_what_is_offloaded_and_saved() -> None:
    (pool,) = forecast_of(LARGE, processes=4, main=500 * GB).pools
    assert (pool.name, pool.num_processes, pool.available_bytes) == ("memory", 4, 500 * GB)
    gpu, main = forecast_of(LARGE, processes=4, gpu=80 * GB, offload="optimizer", zero_stage=2).pools
    assert (gpu.name, gpu.num_processes, main.name, main.num_processes) == ("GPU memory", 1, "main memory", 4)
    assert "optimizer state" in main.parts_text and "optimizer state" not in gpu.parts_text
    assert memory.SAVE_COPY in main.parts_text and main.activation_bytes == 0
    at_first = forecast_of(LARGE, processes=4, gpu=80 * GB, offload="optimizer", zero_stage=1)
    first, share = at_first.pools[0], at_first.shape.num_parameters() // 4
    largest = max(map(math.prod, at_first.shape.parameter_shapes().values()))
    assert gpu.parts["sums of gradients"] == pytest.approx(4 * share + 2 * largest, rel=1e-3), "copied once a step"
    assert first.parts["sums of gradients"] == pytest.approx(20 * share + 2 * largest, rel=1e-3)
    assert "80.0 GB there" in gpu.text and "by 4 processes" in main.text


def test_the_advice_is_the_cheapest_setting_that_fits() -> None:
    asked = forecast_of(LARGE, processes=4, gpu=80 * GB)
    assert not asked.fits and "note" in dict(asked.rows())
    key, words = asked.remedy()
    size = int(words.split()[1])
    assert key == "micro_batch_size" and words.startswith(f"micro_batch_size: {size} (at most ")
    assert asked.with_settings(micro_batch_size=size).fits
    larger = min(one for one in asked.micro_batch_sizes if one > size)
    assert not asked.with_settings(micro_batch_size=larger).fits
    crowded = forecast_of(LARGE, processes=8, gpu=20 * GB, micro_batch_size=1)
    key, words = crowded.remedy()
    assert key in ("activation_checkpointing", "zero_stage") and "would fit" in words


def test_all_settings_together_are_advised_before_none() -> None:
    crowded = forecast_of(LARGE, processes=4, gpu=6 * GB, main=52 * GB, zero_stage=1)
    key, words = crowded.remedy()
    assert key == "micro_batch_size" and "zero_stage: 3, offload: optimizer" in words


@pytest.mark.parametrize("optimizer", ["adafactor", "muon", "adamw"])
def test_only_what_the_optimizer_can_do_is_advised(optimizer: str) -> None:
    settings = {"optimizer": optimizer, "zero_stage": 0, "micro_batch_size": 1}
    advised = " ".join(forecast_of(LARGE, 4, gpu=gpu * GB, **settings).remedy()[1] for gpu in range(2, 60))
    assert max(re.findall(r"zero_stage: (\d)", advised)) == "3"
    assert ("offload: all" in advised) is (optimizer == "adamw")


def refused(forecast: MemoryForecast, given: PretrainConfig) -> Fault:
    (fault,) = forecast.faults(given)
    return fault


@pytest.mark.parametrize("gpu", [False, True])
def test_a_run_is_refused_where_it_certainly_does_not_fit(gpu: bool) -> None:
    needed = forecast_of(TINY, gpu=1 if gpu else None).pools[0].least_bytes
    given = config_of(**TINY)

    def of(size: int) -> MemoryForecast:
        return forecast_of(TINY, gpu=size) if gpu else forecast_of(TINY, main=size)

    assert not list(of(needed).faults(given))
    assert not of(needed).fits and "note" in dict(of(needed).rows()), "between, there is a note"
    assert ("GPU memory" in refused(of(needed - 1), given).rule) is gpu


def test_what_torch_does_not_count_is_planned_with() -> None:
    """NCCL's buffers of processes that communicate, and the context of each."""
    alone, several = (layout_of(num_processes=number, gpu=GB, zero_stage=2).pools[0].parts for number in (1, 4))
    assert "NCCL" in several and "NCCL" not in alone and "CUDA context" in alone


def test_a_refusal_names_the_key_that_makes_it_fit() -> None:
    wide = {**TINY, "global_batch_size": 16384, "micro_batch_size": 16384}
    forecast = forecast_of(wide, main=GB)
    fault = refused(forecast, config_of(**wide))
    assert (fault.key, fault.value) == ("micro_batch_size", 16384)
    assert fault.remedy.startswith("micro_batch_size: ") and "GB" in fault.rule
    settings = {"global_batch_size": 4, "micro_batch_size": 1}
    fault = refused(forecast_of({**TINY, **settings}, processes=4, main=1.1 * GB), config_of(**{**TINY, **settings}))
    assert fault.key == "hidden_size" and "use fewer num_processes, a smaller model" in fault.remedy


def test_a_start_and_a_dry_run_refuse_alike(
    tiny_data: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resources, "total_memory", lambda processes: int(0.3 * GB))
    given = ["--config", tiny_data["config"], "--set", f"output_model_dir={tmp_path / 'run'}"]
    for options in (["--dry-run"], [], ["--verify-resume", "1"]):
        assert train.main([*given, *options]) == 2
        printed = capsys.readouterr()
        assert "hidden_size = 48: " in printed.err and not printed.out and not any(tmp_path.iterdir())


@pytest.fixture
def plan(plan_of: Callable[..., RunPlan]) -> RunPlan:
    plan = plan_of("micro_batch_size=auto", "global_batch_size=256")
    return plan.with_settings(precision="fp32", micro_batch_size=64)


@pytest.mark.parametrize(
    ("settings", "gpu", "stage"),
    [
        ({"micro_batch_size": 1}, 80, 1),
        ({"micro_batch_size": 4}, 80, 2),  # one micro batch a step
        ({"micro_batch_size": 4, "zero_stage": 1}, 80, 1),
        ({"micro_batch_size": 1, "hidden_size": 1536, "num_layers": 8}, 6.0, 3),  # the lowest that fits
        ({"micro_batch_size": 1, "offload": "all"}, 80, 3),
    ],
)
def test_the_stage_is_what_sends_least_and_fits(
    plan_of: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], gpu: float, stage: int
) -> None:
    monkeypatch.setattr(processors, "devices", lambda: Devices(("NVIDIA H200",) * 2, int(gpu * GB)))
    chosen = {"num_processes": 2, "optimizer": "adamw", "global_batch_size": 8, "precision": "fp32", **settings}
    plan = plan_of(*(f"{key}={value}" for key, value in chosen.items()))
    assert auto_settings.on_this_machine(plan).resolved.zero_stage == stage


def on_gpu(plan: RunPlan, gpu_bytes: float) -> RunPlan:
    return replace(plan, devices=Devices(("NVIDIA H200",), int(gpu_bytes)))


def choices_of(gpu: float | None = 80, seq_len: int = 2048, num_processes: int = 1, **settings: Any) -> MemoryForecast:
    shape = ModelShape("llama", 2, 64, 4, 4, 192, seq_len, 500, True, 1e4, 1e-5, 0.02)
    chosen = {"global_batch_size": 256, "micro_batch_size": 1, **settings}
    return layout_of(shape, num_processes, gpu=None if gpu is None else gpu * GB, main=64 * GB, template={}, **chosen)


def test_the_first_choice_is_the_largest_that_surely_fits_on_a_gpu() -> None:
    tight = choices_of(gpu=2)
    chosen = first_micro_batch(tight)
    assert tight.with_settings(micro_batch_size=chosen).fits
    assert not tight.with_settings(micro_batch_size=2 * chosen).fits
    assert first_micro_batch(choices_of(gpu=8)) > chosen and 256 % chosen == 0
    assert first_micro_batch(choices_of(gpu=0.1)) == 1


def test_auto_on_a_cpu_stops_where_it_gets_no_faster_and_takes_all_where_that_is_little() -> None:
    for seq_len in (128, 2048, 8192):
        assert first_micro_batch(choices_of(None, seq_len)) * seq_len == max(CPU_TOKENS, seq_len)
    assert first_micro_batch(choices_of(None, 16, global_batch_size=24, num_processes=2)) == 12


def test_a_choice_is_kept_until_what_it_was_made_for_changes(plan: RunPlan, tmp_path: Path) -> None:
    plan = on_gpu(plan, 80 * GB).with_settings(micro_batch_size=16)
    plan.write(tmp_path / "plan.json")
    earlier = EarlierRun([], None, {}, json.loads((tmp_path / "plan.json").read_bytes()), ended_at=None)
    assert kept_micro_batch(plan, earlier) == kept_micro_batch(plan.with_settings(micro_batch_size=8), earlier) == 16
    assert kept_micro_batch(plan, None) is None
    asked = replace(plan, requested=plan.requested.model_copy(update={"zero_stage": 2}))
    for other in (on_gpu(plan, 40 * GB), asked, replace(plan, num_processes=2)):
        assert kept_micro_batch(other, earlier) is None
    replace(plan, requested=plan.resolved).write(tmp_path / "plan.json")  # chosen by the user
    assert kept_micro_batch(plan, replace(earlier, plan=json.loads((tmp_path / "plan.json").read_bytes()))) is None


def stand_in(
    monkeypatch: pytest.MonkeyPatch, peak_of: Callable[[int], float], memory: float, code: int = 0
) -> list[int]:
    """Let a trial take as many GB as `peak_of` says of its micro batch; gives the sizes that were tried."""
    tried: list[int] = []

    def spawn(plan: RunPlan, work: str, path: str) -> int:
        assert work == "trial"
        tried.append(plan.resolved.micro_batch)
        if peak_of(tried[-1]) > memory:
            return supervision.OUT_OF_MEMORY
        result = {"peak_bytes": int(peak_of(tried[-1]) * GB), "seconds_per_step": 0.5}
        Path(path).write_text(json.dumps(result), encoding="ascii")
        return code

    monkeypatch.setattr(auto_settings, "spawn", spawn)
    return tried


@pytest.mark.parametrize(
    ("first", "peak_of", "tried"),
    [
        (8, lambda size: 10 + size, [8, 16, 32, 64, 128]),
        (256, lambda size: 10 + 0.1 * size, [256]),  # all of the batch
        (64, lambda size: 2 * size, [64, 32]),  # 64 runs out of memory
        (64, lambda size: 1.5 * size, [64, 32]),  # 64 runs, with less to spare than is safe
        (1, lambda size: 60 + 15 * size, [1, 2]),
    ],
)
def test_on_a_gpu_the_largest_that_fits_is_found_in_few_trials(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch, first: int, peak_of: Callable[[int], float], tried: list[int]
) -> None:
    found = stand_in(monkeypatch, peak_of, memory=100)
    monkeypatch.setattr(auto_settings, "first_micro_batch", lambda _: first)
    chosen, result = try_steps(on_gpu(plan, 100 * GB))
    fitting = [size for size in found if peak_of(size) <= 86.5]
    assert found == tried and chosen.resolved.micro_batch == max(fitting)
    assert result.peak_bytes == int(peak_of(max(fitting)) * GB)


def test_a_size_that_one_machine_found_divides_the_share_of_several(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, lambda size: 10 + 0.1 * size, memory=100)
    several = replace(on_gpu(plan, 100 * GB), num_processes=4, nodes=4)
    alone = several.on_processes(1, 1).memory.micro_batch_sizes[-1]
    assert try_steps(several)[0].resolved.micro_batch == several.memory.micro_batch_sizes[-1] == alone // 4


def test_the_gpus_are_as_many_as_divide_a_batch_of_the_rule(
    plan_of: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "devices", lambda: Devices(("NVIDIA H200",) * 4, int(80 * GB)))
    asked = ("num_processes=auto", "optimizer=adamw", "micro_batch_size=1")
    by_rule = plan_of(*asked, "global_batch_size=auto", processes=None)
    for batch, number in ((6, 3), (256, 4), (2, 2), (7, 1)):
        requested = by_rule.requested.model_copy(update={"global_batch_size": batch})
        few = replace(by_rule, requested=requested, resolved=requested)
        assert auto_settings.on_this_machine(few).num_processes == number
    with pytest.raises(UserError, match="multiple"):
        auto_settings.on_this_machine(plan_of(*asked, "global_batch_size=6", processes=None))


def test_the_smallest_is_taken_though_it_leaves_little_and_where_nothing_fits_it_fails(
    plan: RunPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, lambda size: 90 + size, memory=95)
    assert try_steps(on_gpu(plan, 100 * GB))[0].resolved.micro_batch == 1
    stand_in(monkeypatch, lambda size: 84 + 0.2 * size, memory=95)
    for processes, chosen in ((1, 8), (2, 2)):  # two have NCCL's buffers, too
        several = replace(on_gpu(plan, 100 * GB), num_processes=processes)
        assert try_steps(several)[0].resolved.micro_batch == chosen
    stand_in(monkeypatch, lambda size: 50 * size, memory=20)
    for each in (plan, on_gpu(plan, 20 * GB)):
        with pytest.raises(RunError, match="out of memory"):
            try_steps(each)


def test_a_size_that_the_user_chose_is_tried_alone(plan: RunPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    requested = plan.requested.model_copy(update={"micro_batch_size": 64})
    chosen = replace(on_gpu(plan, 80 * GB), requested=requested)
    tried = stand_in(monkeypatch, float, memory=20)
    with pytest.raises(RunError):
        try_steps(chosen)
    assert tried == [64]
    stand_in(monkeypatch, float, memory=80)
    tried_plan, result = try_steps(chosen)
    assert tried_plan == chosen and result.seconds_per_step == 0.5
    stand_in(monkeypatch, float, memory=80, code=1)  # another failure is passed on
    with pytest.raises(RunError, match="exit code 1"):
        try_steps(plan)
