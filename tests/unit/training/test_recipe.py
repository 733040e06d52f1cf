"""Values of the recipe for `auto`, which a run keeps."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from configs import config_of, fault_of

from zerokara import checkpoint
from zerokara.base.errors import UserError
from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.model.shapes import ModelShape
from zerokara.training.planning import earlier_run, plan_table, recipe, run_folder
from zerokara.training.planning.run_plan import RunPlan

AUTO: dict[str, Any] = dict.fromkeys([*recipe.RULES, "warmup_fraction"], "auto")
SMALL = {"model_size": "5M", "num_layers": "auto", "hidden_size": "auto", "num_attn_heads": "auto", "seq_len": 256}


def chosen(num_tokens: float, **settings: Any) -> dict[str, Any]:
    config = config_of(**SMALL, **{**AUTO, **settings})
    situation = ModelShape.from_config(config, 8000), lambda _: num_tokens / config.seq_len
    resolved, reasons = recipe.resolve(config, *situation)
    return {key: getattr(resolved, key) for key in reasons}


def test_the_rules_by_hand() -> None:
    """3.2 million tokens, as many as the layers have parameters."""
    assert chosen(3.2e6) == {
        "optimizer": "muon",
        "lr_schedule": "linear",
        "min_lr": 0.0,
        "global_batch_size": 16,  # 0.58 · 3.2e6^0.571 = 3,004 tokens, 11.7 sequences
        "lr": 0.0043,  # half of 0.0072, and a little more
        "muon_momentum": 0.89,  # 1 - 0.0043 / 0.038
        "warmup_steps": 16,  # 2 % of 781
        "weight_decay": pytest.approx(1 / (0.0043 * 781), rel=0.03),
    }
    by_adamw = chosen(3.2e6, optimizer="adamw")
    assert by_adamw["lr"] == recipe.MAX_ADAMW_LR
    assert by_adamw["warmup_steps"] == 100 and not {"optimizer", "muon_momentum"} & set(by_adamw)
    steep = chosen(3.2e6, lr=0.02)
    assert steep["muon_momentum"] == recipe.MIN_MOMENTUM and "lr" not in steep


def test_published_sizes_come_near_what_is_published() -> None:
    """125M on 2.5 billion tokens: half a million tokens a step at most, Muon's rate near 0.002, AdamW's near 0.003."""
    config = config_of(**{**SMALL, "model_size": "125M", "seq_len": 2048}, **AUTO)
    situation = ModelShape.from_config(config, 32_000), lambda _: 2.5e9 / 2048
    muon = recipe.resolve(config, *situation)[0]
    assert (muon.lr, muon.global_batch_size, muon.optimizer) == (0.0019, 64, "muon")
    assert 0.03 < muon.weight_decay < 0.2 and muon.muon_momentum == 0.95
    adamw = recipe.resolve(config.model_copy(update={"optimizer": "adamw"}), *situation)[0]
    assert adamw.lr == pytest.approx(0.003, rel=0.1) and adamw.weight_decay == pytest.approx(0.1, rel=0.2)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"zero_stage": 1, "offload": "optimizer"}, "offload is optimizer"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"architecture": "t5"}, "architecture t5"),
        ({"architecture": "mixtral"}, "architecture mixtral"),
    ],
)
def test_adamw_where_muon_cannot_run_or_nobody_knows(settings: dict[str, Any], reason: str) -> None:
    config = config_of(**{**AUTO, **settings})
    situation = ModelShape.from_config(config, 500), lambda _: 1000
    resolved, reasons = recipe.resolve(config, *situation)
    assert resolved.optimizer == "adamw" and reason in reasons["optimizer"]
    assert "muon_momentum" not in reasons and not recipe.left_to_rules(resolved)
    assert not list(resolved.rule_faults(set()))


def test_what_is_written_stands_and_the_rest_goes_by_it() -> None:
    written = {"optimizer": "adamw", "lr": 0.5, "min_lr": 0.25, "lr_schedule": "wsd", "global_batch_size": 7}
    written |= {"warmup_fraction": 0.1, "weight_decay": 3.0, "micro_batch_size": 1}
    config = config_of(**written)
    situation = ModelShape.from_config(config, 500), lambda _: 1000
    assert recipe.resolve(config, *situation) == (config, {}) and not recipe.left_to_rules(config)
    half = config_of(**{**written, "lr": "auto", "min_lr": 0.0})
    resolved, reasons = recipe.resolve(half, *situation)
    assert [*reasons] == ["lr"] and resolved.optimizer == "adamw" and recipe.left_to_rules(half) == ["lr"]


def test_text_that_is_read_again_and_again_is_forgotten_sooner() -> None:
    """4 million tokens, in all of the runs."""
    config = config_of(**SMALL, **AUTO)
    shape, samples = ModelShape.from_config(config, 8000), 4e6 / config.seq_len
    fresh, few, repeated, often, most = (
        recipe.resolve(config, shape, lambda _: samples, samples_per_epoch=samples / epochs)[0]
        for epochs in (1, 4, 8, 16, 40)
    )
    steps = samples / repeated.global_batch_size
    assert fresh.weight_decay < few.weight_decay < 1 < repeated.weight_decay < often.weight_decay
    weights = sum(math.prod(size) for name, size in shape.parameter_shapes().items() if ".layers." in name)
    sooner = (weights / (2.6 * 4e6 / 8)) ** 0.5
    assert repeated.weight_decay == pytest.approx(8**2 * sooner / (12 * repeated.lr * steps), rel=0.05) and sooner > 1.2
    assert often.weight_decay == pytest.approx(16**2 / (12 * often.lr * steps), rel=0.05), "over 46 steps as it is"
    assert most.weight_decay == 3.0, "by the epochs alone 10.6"
    small = ModelShape.from_config(config_of(**{**SMALL, **AUTO, "num_layers": 1}), 8000)
    run = recipe.resolve(config, small, lambda _: samples, samples_per_epoch=samples / 8)[0]
    assert run.weight_decay == pytest.approx(8**2 / (12 * run.lr * steps), rel=0.05), "of fewer weights than tokens"


def test_the_rate_rises_where_weights_are_averaged_over_few_steps() -> None:
    """4 million tokens, in all of the runs: 977 steps, the share of which is 12 / E^2 here."""
    config = config_of(**SMALL, **AUTO)
    shape, samples = ModelShape.from_config(config, 8000), 4e6 / config.seq_len

    def lr(epochs: float, **settings: Any) -> float:
        changed = config.model_copy(update=settings)
        return float(recipe.resolve(changed, shape, lambda _: samples, samples_per_epoch=samples / epochs)[0].lr)

    assert lr(1) == lr(6) == pytest.approx(0.0043), "averaged over more than 200 steps"
    assert lr(12) == pytest.approx(0.0043 * (200 / (977 * 12 / 144)) ** 0.5, rel=0.02)
    assert lr(16) == pytest.approx(1.8 * 0.0043, rel=0.03) == lr(80), "by the square root 2.1 and 10 times"
    assert lr(16, optimizer="adamw") == lr(1, optimizer="adamw")
    assert lr(16, init_from="models/trained") == lr(1), "where nothing was measured"


def test_max_steps_counts() -> None:
    """A run of 100 steps has few tokens, however large its corpus."""
    short = chosen(1e9, max_steps=100, global_batch_size=8)
    assert short["warmup_steps"] == 10
    assert short["weight_decay"] == chosen(100 * 8 * 256, global_batch_size=8)["weight_decay"]


def test_a_least_rate_above_the_rate() -> None:
    config = config_of(**{**AUTO, "min_lr": 0.5})
    fault = fault_of(recipe.resolve, config, ModelShape.from_config(config, 500), lambda _: 1000)
    assert fault.key == "min_lr" and "auto is 0.019" in fault.rule and fault.remedy


@pytest.fixture
def planned(plan_of: Callable[..., RunPlan]) -> Callable[..., RunPlan]:
    return partial(plan_of, *(f"{key}=auto" for key in AUTO))


def test_a_plan_has_numbers_whatever_the_processes(planned: Callable[..., RunPlan]) -> None:
    one, two = (planned("micro_batch_size=4", processes=count) for count in (1, 2))
    assert one.resolved == two.resolved and one.reasons == two.reasons and not recipe.left_to_rules(one.resolved)
    rows = [value for name, value in plan_table.rows(one, in_full=True) if name == "recipe"]
    assert len(rows) == len(recipe.RULES) and all(": " in row for row in rows)
    with pytest.raises(UserError, match="global_batch_size"):
        planned("micro_batch_size=1", processes=3)


def test_a_run_keeps_what_it_began_with(planned: Callable[..., RunPlan]) -> None:
    first = planned()
    assert run_folder.read_earlier(first.requested) is None
    run_folder.claim(first)
    assert run_folder.read_earlier(first.requested) is None  # nothing is saved yet: the next start begins
    checkpoint.folder_of(first.run_dir, 1).mkdir()
    earlier = run_folder.read_earlier(first.requested)
    initial = earlier.initial_settings
    longer = planned("train_tokens=400000000")
    assert longer.resolved.global_batch_size != first.resolved.global_batch_size
    resumed = planned("train_tokens=400000000", initial_settings=initial)
    assert {key: getattr(resumed.resolved, key) for key in recipe.RULES} == {
        key: getattr(first.resolved, key) for key in recipe.RULES
    }
    assert all("as the run began" in reason for reason in resumed.reasons.values())
    assert [*earlier_run.resumption(resumed, earlier, "").changed] == ["train_tokens"]
    other = planned("optimizer=adamw", initial_settings=initial)
    assert other.resolved.lr != first.resolved.lr  # Muon's rate is none of AdamW's
    written = planned("lr=0.001", initial_settings=initial)
    assert written.resolved.lr == 0.001 and written.resolved.weight_decay == first.resolved.weight_decay
    run_folder.claim(written)  # what was tried for one start is not kept
    back = planned(initial_settings=run_folder.read_earlier(first.requested).initial_settings)
    assert back.resolved.lr == first.resolved.lr and back.reasons["lr"] == "as the run began"


def for_examples(
    count: int,
    learned: int,
    rows: int,
    kept: dict[str, Any] | None = None,
    are_labels: bool = False,
    **settings: Any,
) -> Any:
    """A fine-tuning of a model of 1.02M parameters, by the recipe for its examples."""
    config = FinetuneRunConfig(packed_length=256, num_layers=4, hidden_size=128, num_attn_heads=2, **settings)
    found, reasons = recipe.resolve(
        config,
        ModelShape.from_config(config, 1500),
        lambda config: config.epochs * rows,
        kept,
        (count, learned, rows, are_labels),
    )
    return found, {key: reason for key, reason in reasons.items() if key in recipe.OF_EXAMPLES}


@pytest.mark.parametrize(
    ("examples", "batch", "epochs", "lr"),
    [
        ((200, 400, 16), 1, 6.2, 5e-4),  # labels: 12 examples a step are one row of 12; five epochs would be 80 steps
        ((20_000, 40_000, 1600), 4, 2.0, 1e-3),  # 48 examples a step; 5e-4 · 100^0.15
        ((200, 12_000, 64), 4, 10.0, 1.4e-4),  # texts: 6e-4 · 0.2^0.9
        ((200, 6000, 32), 2, 10.0, 1e-4),
        ((20_000, 600_000, 3200), 8, 10.0, 4e-3),
        ((200_000, 6_000_000, 32_000), 16, 4.0, 4e-3),
        ((200, 400, 4), 1, 25.0, 5e-4),  # so few rows that five epochs would be twenty steps
        ((3, 6, 1), 1, 40.0, 2.7e-4),  # and no more than forty epochs
    ],
)
def test_the_rules_for_examples_by_hand(examples: tuple[int, int, int], batch: int, epochs: float, lr: float) -> None:
    config, reasons = for_examples(*examples)
    assert (config.global_batch_size, config.epochs) == (batch, epochs)
    assert config.lr == pytest.approx(lr, rel=0.06)
    assert [*reasons] == ["global_batch_size", "epochs", "lr"]


def test_labels_are_no_texts_however_many_tokens_they_have() -> None:
    labels, texts = (for_examples(59, 499, 6, are_labels=each)[0] for each in (True, False))
    assert labels.lr == pytest.approx(5e-4 * (59 / 200) ** 0.15, rel=0.03)
    assert texts.lr == pytest.approx(recipe.MIN_FINETUNE_LR, rel=0.03), (
        "the model has a little more than a million parameters"
    )


def test_what_the_user_writes_and_what_the_run_began_with_stands_for_examples() -> None:
    written, reasons = for_examples(200, 400, 16, lr=0.003, global_batch_size=8, train_tokens=1000)
    assert (written.lr, written.global_batch_size, written.epochs, reasons) == (0.003, 8, "auto", {})
    assert for_examples(200, 400, 16, global_batch_size=4)[0].epochs == 25.0, "the length goes by the batch"
    first, _ = for_examples(200, 400, 16)
    resumed, reasons = for_examples(2000, 4000, 160, kept=first.model_dump(mode="json"))
    assert resumed == first and "as the run began" in reasons["lr"]


def test_a_larger_model_learns_more_slowly_and_adafactor_in_its_own_scale() -> None:
    config = FinetuneRunConfig(packed_length=256, num_layers=32, hidden_size=4096, num_attn_heads=32)
    shape = ModelShape.from_config(config, 32_000)
    assert 1e-5 < recipe.resolve(config, shape, lambda _: 9000.0, None, (50_000, 5_000_000, 9000, False))[0].lr < 5e-5
    assert for_examples(200, 400, 16, optimizer="adafactor")[0].lr == 1e-3
