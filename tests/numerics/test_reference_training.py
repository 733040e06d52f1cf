"""Twenty fp32 steps of our models and of Hugging Face's under torch AdamW, from equal weights on equal batches.

Muon and Adafactor against their papers, implemented plainly here; Adafactor on our own model, whose matrices it splits.

Tensor-parallel ranks train as one process does (test_processes.py), and so as Hugging Face's.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import rounding
import torch
from configs import config_of
from drawn_models import build
from engines import chains, engine_of, join_alone
from torch import Tensor

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.huggingface.families import SpecialIds, stock_model_of
from zerokara.model import parallel
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import engine_choice
from zerokara.training.compute.engine import master_weights
from zerokara.training.compute.engine_choice import settings_for
from zerokara.training.compute.optimizers import COEFFICIENTS
from zerokara.training.planning.schedule import Schedule

NUM_STEPS, BATCH, LENGTH, VOCAB = 20, 4, 48, 300
Update = Callable[[int, float], None]
"""Changes the weights: step, learning rate."""
SETTINGS: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 64, "num_attn_heads": 8, "num_kv_heads": 2, "seq_len": LENGTH,
    "global_batch_size": 4, "micro_batch_size": 4, "lr": 0.005, "warmup_fraction": 0.2, "zero_stage": 0,
    "tie_word_embeddings": False, "train_tokens": NUM_STEPS * BATCH * LENGTH, "init_std": 0.05,
    "adam_beta1": 0.85, "adam_beta2": 0.9, "adam_epsilon": 1e-6,
}  # fmt: skip

BETAS = SETTINGS["adam_beta1"], SETTINGS["adam_beta2"]


@pytest.fixture(scope="module")
def batches() -> list[Tensor]:
    return chains(NUM_STEPS, BATCH, LENGTH, VOCAB)


def arguments(ids: Tensor, shape: ModelShape) -> list[Tensor]:
    """Arguments of our model for a batch; an encoder gets the first half as input, the second is the target."""
    if not shape.traits.is_encoder_decoder:
        return [ids[:, :-1], ids[:, 1:], torch.ones(ids[:, 1:].shape), torch.arange(len(ids))]
    inputs, labels = ids[:, :24], ids[:, 24:]
    start = torch.full((len(ids), 1), 3)
    return [inputs, labels, torch.ones(labels.shape), torch.arange(len(ids)), torch.cat([start, labels[:, :-1]], dim=1)]


def loss_of(model: Any, ids: Tensor, shape: ModelShape) -> Tensor:
    """The loss of transformers' model on the same batch."""
    if not shape.traits.is_encoder_decoder:
        return model(input_ids=ids[:, :-1], labels=ids[:, 1:], shift_labels=ids[:, 1:].contiguous()).loss
    return model(input_ids=ids[:, :24], labels=ids[:, 24:].contiguous()).loss


def losses_of_ours(settings: PretrainConfig, shape: ModelShape, batches: list[Tensor]) -> list[float]:
    engine = engine_of(build(shape, seed=1), settings, chosen_for=2)
    schedule = Schedule.from_config(settings, settings.lengths.raw, samples_per_epoch=1)
    losses = []
    for step, ids in enumerate(batches, start=1):
        count = float(arguments(ids, shape)[1].numel())
        nats = engine.accumulate(arguments(ids, shape), count, len(ids))
        engine.update(schedule.learning_rate(step))
        losses.append(nats.item() / count)
    return losses


def torch_adamw(model: torch.nn.Module, weight_decay: float) -> Update:
    tables = {name: p for name, p in model.named_parameters() if "relative_attention_bias" in name}
    matrices = [p for name, p in model.named_parameters() if p.dim() > 1 and name not in tables]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "times": 1},
        {"params": vectors, "weight_decay": 0.0, "times": 1},
        {"params": list(tables.values()), "weight_decay": 0.0, "times": 30},
    ]
    optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=SETTINGS["adam_epsilon"])

    def update(step: int, learning_rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["times"]
        optimizer.step()

    return update


def for_each_parameter(model: torch.nn.Module, update_one: Callable[..., None]) -> Update:
    def update(step: int, learning_rate: float) -> None:
        for name, parameter in model.named_parameters():
            update_one(name, parameter, parameter.grad, step, learning_rate)

    return update


def plain_muon(model: torch.nn.Module, momentum: float, decay: float, scale: float) -> Update:
    """Liu et al., 2025, algorithm 1 with Nesterov momentum, on singular values; AdamW for all but layers' matrices."""
    buffers: dict[str, list[Tensor]] = {}

    def update_one(name: str, weight: Tensor, gradient: Tensor, step: int, learning_rate: float) -> None:
        first, second = buffers.setdefault(name, [torch.zeros_like(weight), torch.zeros_like(weight)])
        if weight.dim() == 2 and ".layers." in name:
            first.copy_(momentum * first + gradient)
            left, values, right = torch.linalg.svd(gradient + momentum * first, full_matrices=False)
            values = values / values.norm()
            for a, b, c in COEFFICIENTS:
                values = a * values + b * values**3 + c * values**5
            x = left * values @ right
            weight.copy_(weight - learning_rate * (scale * math.sqrt(max(weight.shape)) * x + decay * weight))
            return
        first.lerp_(gradient, 1 - BETAS[0])
        second.lerp_(gradient**2, 1 - BETAS[1])
        means = first / (1 - BETAS[0] ** step), second / (1 - BETAS[1] ** step)
        direction = means[0] / (means[1].sqrt() + SETTINGS["adam_epsilon"])
        weight.copy_(weight - learning_rate * (direction + (decay if weight.dim() > 1 else 0) * weight))

    return for_each_parameter(model, update_one)


def plain_adafactor(model: torch.nn.Module, decay: float, exponent: float) -> Update:
    """Shazeer and Stern, 2018, algorithms 4 and 5, with a given learning rate in the place of the relative step."""
    memory: dict[str, list[Tensor]] = {}

    def update_one(name: str, weight: Tensor, gradient: Tensor, step: int, learning_rate: float) -> None:
        beta = 1 - step**-exponent
        squares = gradient**2 + 1e-30
        if weight.dim() == 2:
            rows, columns = memory.setdefault(name, [torch.zeros(weight.size(0)), torch.zeros(weight.size(1))])
            rows.copy_(beta * rows + (1 - beta) * squares.sum(dim=1))
            columns.copy_(beta * columns + (1 - beta) * squares.sum(dim=0))
            second = torch.outer(rows, columns) / rows.sum()
        else:
            (second,) = memory.setdefault(name, [torch.zeros_like(weight)])
            second.copy_(beta * second + (1 - beta) * squares)
        direction = gradient / second.sqrt()
        direction = direction / max(1.0, direction.square().mean().sqrt().item())
        scaled = learning_rate * max(1e-3, weight.square().mean().sqrt().item())
        weight.copy_(weight - scaled * (direction + (decay if weight.dim() > 1 else 0) * weight))

    return for_each_parameter(model, update_one)


def losses_of_reference(
    settings: PretrainConfig, shape: ModelShape, batches: list[Tensor], scale: float = 0.176, exponent: float = 0.8
) -> list[float]:
    decay, is_ours = settings.weight_decay, settings.optimizer == "adafactor"
    model = build(shape, seed=1)
    if not is_ours:
        special = SpecialIds(bos=1, eos=2, pad=3)
        model = stock_model_of(shape, model.named_parameters(), special).train().requires_grad_()
    update = {
        "adamw": lambda: torch_adamw(model, decay),
        "muon": lambda: plain_muon(model, settings.muon_momentum, decay, scale),
        "adafactor": lambda: plain_adafactor(model, decay, exponent),
    }[settings.optimizer]()
    schedule = Schedule.from_config(settings, settings.lengths.raw, samples_per_epoch=1)
    losses = []
    for step, ids in enumerate(batches, start=1):
        loss = model(*arguments(ids, shape)) / (BATCH * LENGTH) if is_ours else loss_of(model, ids, shape)
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():  # an expert without a token: AdamW would skip it
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clipping)
        with torch.no_grad():
            update(step, schedule.learning_rate(step))
        losses.append(loss.item())
    return losses


GPT2 = {"architecture": "gpt2", "num_kv_heads": "auto", "lr": 0.003}
"""A lower rate than Llama's: only of a well-conditioned training do the last digits mean anything (rounding.py)."""
T5 = {"architecture": "t5", "num_kv_heads": "auto", "head_dim": 16, "lr": 0.003}
EXPERTS = {"num_experts": 4, "lr": 0.003, "router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0}
"""transformers balances over the whole batch and all layers at once: another loss, left out here."""
SMALL = {"num_layers": 2, "hidden_size": 32, "num_attn_heads": 4, "ffn_hidden_size": 64, "gradient_clipping": 0.5}
MUON = {**SMALL, "optimizer": "muon", "lr": 0.01, "muon_momentum": 0.9}
ADAFACTOR = {**SMALL, "optimizer": "adafactor", "lr": 0.05}
"""Its rate is a share of the weights, which are small."""
CASES: dict[str, dict[str, Any]] = {
    "0": {},
    "3": {"zero_stage": 3},
    "3-offload": {"zero_stage": 3, "offload": "all"},
    "gpt2-1-tied": {**GPT2, "zero_stage": 1, "tie_word_embeddings": True},
    "qwen3-0": {"architecture": "qwen3"},
    "qwen2-1": {"architecture": "qwen2", "zero_stage": 1},
    "olmo2-0": {"architecture": "olmo2"},
    "smollm3-0": {"architecture": "smollm3", "num_layers": 4},
    "t5-0": T5,
    "mixtral-0": {"architecture": "mixtral", **EXPERTS},
    # Untied, transformers' class trains an embedding for each of its two parts.
    "switch-0": {**T5, "architecture": "switch", **EXPERTS, "tie_word_embeddings": True},
    "muon-0": MUON,
    "adafactor-0": ADAFACTOR,
}


@pytest.mark.parametrize("case", CASES)
def test_losses_equal_hugging_faces(case: str, batches: list[Tensor]) -> None:
    join_alone()
    settings = config_of(**{**SETTINGS, **CASES[case]})
    shape = ModelShape.from_config(settings, VOCAB)
    if shape.traits.is_encoder_decoder:  # large weights learn more in so few steps
        shape = dataclasses.replace(shape, init_std=0.0)
    assert shape.padded_vocab_size > shape.vocab_size
    ours = losses_of_ours(settings, shape, batches)
    assert ours[0] - ours[-1] > (0.1 if settings.optimizer == "muon" else 0.5)
    rounding.assert_same_curve(ours, losses_of_reference(settings, shape, batches))


@pytest.mark.parametrize(
    ("stated", "wrong"),
    [
        ({}, {"weight_decay": 0.0}),
        ({}, {"gradient_clipping": 1e9}),
        (MUON, {"scale": 0.22}),
        (ADAFACTOR, {"exponent": 0.7}),
    ],
    ids=["weight decay", "no clipping", "scale of Muon", "exponent of Adafactor"],
)
def test_a_broken_twin_is_noticed(stated: dict[str, Any], wrong: dict[str, Any], batches: list[Tensor]) -> None:
    """One thing is wrong in the reference."""
    parallel.start_alone()
    settings = config_of(**{**SETTINGS, **stated})
    shape = ModelShape.from_config(settings, VOCAB)
    right = losses_of_reference(settings, shape, batches)
    constants = {name: wrong[name] for name in ("scale", "exponent") if name in wrong}
    others = {name: value for name, value in wrong.items() if name not in constants}
    broken = losses_of_reference(config_of(**{**SETTINGS, **stated, **others}), shape, batches, **constants)
    assert rounding.times_tolerance(broken, right) > rounding.BROKEN


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("zero_stage", "offload"), [(0, "none"), (1, "optimizer"), (3, "all")])
def test_precision_is_as_configured_or_nothing_starts(
    zero_stage: int, offload: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_alone()
    stated = {**SETTINGS, "zero_stage": zero_stage, "offload": offload}
    settings = config_of(**stated, precision=precision)
    shape = ModelShape.from_config(settings, VOCAB)
    model = build(shape)
    engine = engine_of(model, settings, chosen_for=2)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert {weight.dtype for _, weight in master_weights(engine)} == {torch.float32}
    if zero_stage:  # the twin: DeepSpeed gets another precision than the configuration states
        other = "fp32" if precision == "bf16" else "bf16"
        wrong = settings_for(config_of(**stated, precision=other), 1, {})
        monkeypatch.setattr(engine_choice, "settings_for", lambda *_: wrong)
        with pytest.raises(AssertionError, match="precision"):
            engine_of(build(shape), settings, chosen_for=2)
