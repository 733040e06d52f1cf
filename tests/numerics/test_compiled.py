"""Compiled layers train as eager ones, in every family, from the first step of a start and of a resume on.

Where layers cannot be compiled, functions are: they train as eager ones, and training calls what was compiled. What
torch.compile captures is what counts here (``aot_eager``); one run has the code that it generates. The experts take the
way that they take on a GPU, their kernel in plain operations.
"""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rounding
import torch
import torch.distributed
from configs import RECIPE, config_of
from drawn_models import build
from engines import engine_of, join_alone, open_with_weights, random_batch
from forked import answers_of
from grouped import plain_grouped_mm
from tiny import assert_same_bits
from torch import Tensor
from torch._dynamo.utils import counters

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import compilation, experts, layers, parallel, weight_gradients
from zerokara.model.experts import AuxiliaryLoss, statistics
from zerokara.model.shapes import ModelShape, is_layer_matrix
from zerokara.samples.objective import document_offsets
from zerokara.training.compute.engine import Engine, load_state, master_weights, optimizer_state
from zerokara.training.compute.engine_choice import HIERARCHY_KEY

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"activation_checkpointing": "selective"},
    "olmo2": {"num_kv_heads": 2},
    "smollm3": {"num_layers": 4},
    "gpt2": {"activation_checkpointing": "full"},
    "t5": {"tie_word_embeddings": True},
    "qwen3_moe": {"activation_checkpointing": "selective"},
    "t5_moe": {"moe_layers": [1], "activation_checkpointing": "full"},
}
PACKED = {"gpt2", "t5_moe"}
"""Rows of these hold packed examples, at last padding."""
MICRO_BATCHES, MICRO_BATCH, VOCAB = 2, 2, 300


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    join_alone()
    monkeypatch.setenv(compilation.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(experts, "has_kernel", lambda *_: True)
    monkeypatch.setattr(experts, "grouped_mm", plain_grouped_mm)
    monkeypatch.setattr(layers, "is_batch_first", lambda _: True)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()


def engine_for(family: str, compiled: bool, precision: str = "fp32") -> tuple[Engine, ModelShape]:
    config = config_of(
        **{"num_layers": 2, **FAMILIES[family]}, architecture=family, seq_len=24, precision=precision,
        global_batch_size=MICRO_BATCHES * MICRO_BATCH, micro_batch_size=MICRO_BATCH, compile="on",
        router_aux_loss_coef=0.3, router_z_loss_coef=0.2, dropout=0.1,
    )  # fmt: skip
    shape = ModelShape.from_config(config, VOCAB)
    model = build(shape, seed=2, activation_checkpointing=config.activation_checkpointing, settings=config)
    engine = engine_of(model, config)
    if compiled:
        draw = packed_batch if family in PACKED else random_batch
        assert compilation.start(model, draw(shape, MICRO_BATCH, torch.Generator()), log=print)
        assert statistics(model.all_layers()) == {}, "nothing is counted"
    return engine, shape


def packed_batch(shape: ModelShape, size: int, generator: torch.Generator) -> list[Tensor]:
    """Arguments with segments of ten positions, of which the last is padding, and their offsets for a decoder."""
    inputs, targets = (
        torch.arange(length).div(10, rounding_mode="floor").repeat(size, 1)
        for length in (shape.seq_len, shape.target_len)
    )
    second = targets if shape.traits.is_encoder_decoder else torch.from_numpy(document_offsets(inputs.numpy()))
    return [*random_batch(shape, size, generator), inputs, second, inputs[:, -1].clone()]


def train(
    engine: Engine, shape: ModelShape, num_steps: int, seed: int, micro_batches: int = MICRO_BATCHES,
    draw: Callable[..., list[Tensor]] = random_batch,
) -> list[float]:  # fmt: skip
    """Mean nats of each step, and the gradient norm: the norm alone tells of a gradient that no loss is made of."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    tokens = micro_batches * MICRO_BATCH * shape.target_len
    for _ in range(num_steps):
        nats = 0.0
        for _ in range(micro_batches):
            batch = draw(shape, MICRO_BATCH, generator)
            nats += engine.accumulate(batch, float(tokens), micro_batches * MICRO_BATCH).item()
        found += [nats / tokens, engine.update(1e-2)]
    return found


def state(engine: Engine) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    weights, moments = (
        {name: tensor.clone() for name, tensor in part(engine)} for part in (master_weights, optimizer_state)
    )
    return weights, moments


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] if name == "t5_moe" else []) for name in FAMILIES]
)
def test_compiled_layers_train_as_eager_ones(family: str) -> None:
    """And training compiles nothing that the warm-up has not, whichever layer it is and whatever was counted."""
    eager, shape = engine_for(family, compiled=False)
    compiled, _ = engine_for(family, compiled=True)
    learn = partial(train, shape=shape, draw=packed_batch if family in PACKED else random_batch)
    expected = learn(eager, num_steps=2, seed=3)
    with torch.compiler.set_stance("fail_on_recompile"):
        found = learn(compiled, num_steps=2, seed=3)
    rounding.assert_same_curve(found, expected, quantity="grad_norm")
    assert bool(statistics(compiled.model.all_layers())) == bool(shape.moe_layers)
    weights, moments = state(eager)
    rounding.assert_same_weights(state(compiled)[0], weights, at_step=2)
    resumed, _ = engine_for(family, compiled=True)
    for engine in (eager, resumed):
        load_state(engine, weights.items(), moments, eager.optimizer.num_updates)
    expected = learn(eager, num_steps=1, seed=4)
    for engine in (compiled, resumed):
        load_state(engine, weights.items(), moments, eager.optimizer.num_updates)
        with torch.compiler.set_stance("fail_on_recompile"):
            rounding.assert_same_curve(learn(engine, num_steps=1, seed=4), expected, quantity="grad_norm")


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "t5"])
def test_gradients_that_products_add_up_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """To the bit, where a CPU's product is rounded before it is added; with biases and layers that are computed again,
    eagerly and compiled, as one graph for all layers."""
    plain, shape = engine_for(family, compiled=False, precision="bf16")
    with monkeypatch.context() as patched:
        patched.setattr(weight_gradients, "adds_in_fp32", lambda *_: True)
        engines = [plain, *(engine_for(family, compiled=False, precision="bf16")[0] for _ in range(2))]
    assert compilation.start(engines[2].model, random_batch(shape, MICRO_BATCH, torch.Generator()), log=print)
    begun = {name for name, place in engines[1].optimizer._places.items() if place.tensor.grad is not None}
    assert begun == {name for name, each in shape.parameter_shapes().items() if is_layer_matrix(name, each)}
    for seed in (3, 4):
        found = []
        for engine in engines:
            generator = torch.Generator().manual_seed(seed)
            with torch.compiler.set_stance("fail_on_recompile"):
                for _ in range(MICRO_BATCHES):
                    engine.accumulate(random_batch(shape, MICRO_BATCH, generator), 96.0, 4.0)
            found.append({name: place.tensor.grad.clone() for name, place in engine.optimizer._places.items()})
            engine.update(0.0)  # weights stay, gradients begin anew
        for name, gradient in found[0].items():
            assert gradient.any() and [torch.equal(gradient, other[name]) for other in found[1:]] == [True, True], name


def test_the_warm_up_holds_the_gradients_of_one_layer() -> None:
    config = config_of(num_layers=8, hidden_size=128, num_attn_heads=4, seq_len=8, ffn_hidden_size=1024)
    model = build(ModelShape.from_config(config, VOCAB), seed=1)
    layer_bytes = 4 * sum(weight.numel() for weight in model.decoder.layers[0].parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        assert compilation.start(model, random_batch(model.shape, 1, torch.Generator()), log=print)
    # Changes of the memory of tensors, in bytes, as they came.
    changes = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = list(itertools.accumulate(event.nbytes() for event in sorted(changes, key=lambda each: each.start_ns())))
    assert layer_bytes < max(held) < 2 * layer_bytes, "of eight"
    assert held[-1] < layer_bytes / 4 and all(weight.grad is None for weight in model.parameters())


@pytest.mark.slow
def test_generated_code_trains_as_eager_layers_and_resumes_bit_for_bit(train_runs: Callable, tmp_path: Path) -> None:
    short = {"zero_stage": 1, "train_tokens": 10 * 8 * 32}
    on = {**short, "compile": "on"}
    runs = train_runs({"eager": short, "compiled": on, "resumed": {**on, "stop_at": 6}}, folder=tmp_path)
    runs |= train_runs({"resumed": on}, folder=tmp_path)
    assert_same_bits(runs["resumed"], runs["compiled"])
    eager, compiled = runs["eager"].losses, runs["compiled"].losses
    assert len(eager) == 10 and eager[0] - eager[-1] > 0.3
    rounding.assert_same_curve(compiled, eager)
    assert compiled != eager  # or nothing was compiled


def test_auxiliary_losses_without_their_weight_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin."""
    expected = train(*engine_for("qwen3_moe", compiled=False), 1, seed=3)
    monkeypatch.setattr(AuxiliaryLoss, "set_weight", lambda *_: None)
    found = train(*engine_for("qwen3_moe", compiled=False), 1, seed=3)
    assert rounding.times_tolerance(found, expected, quantity="grad_norm") > rounding.BROKEN


COMMON = RECIPE | {
    "num_layers": 2, "hidden_size": 64, "num_attn_heads": 4, "seq_len": 24, "micro_batch_size": 2,
    "global_batch_size": 4, "precision": "fp32",
}  # fmt: skip
ZERO_3 = {"zero_stage": 3}
SHARED = {"tensor_parallel_size": 2, "global_batch_size": 2}
RUNS: dict[str, dict[str, Any]] = {
    "llama, tensor parallel": {**SHARED, "num_kv_heads": 2},
    "gpt2, tensor parallel, checkpointing": {**SHARED, "architecture": "gpt2", "activation_checkpointing": "full"},
}
SHARDED: dict[str, dict[str, Any]] = {
    "gpt2, ZeRO 3, bf16, checkpointing": {
        **ZERO_3, "architecture": "gpt2", "precision": "bf16", "activation_checkpointing": "full",
    },
    "mixtral, ZeRO 3": {**ZERO_3, "architecture": "mixtral", "num_experts": 3},
    "llama, ZeRO 3, hierarchical": {**ZERO_3, "num_kv_heads": 2, "optimizer": "muon"},
}  # fmt: skip
"""Layers compiled whole, between DeepSpeed's hooks."""


def train_compiled(config: PretrainConfig, compiled: bool, whole_layers: bool) -> list[float]:
    """Train three steps on the same random ids, as `train` returns them; nothing is compiled after the start."""
    shape = ModelShape.from_config(config, VOCAB + 1)  # the last rank has rows of the vocabulary that are padding
    model = build(shape, seed=1, activation_checkpointing=config.activation_checkpointing, settings=config)
    template = {"zero_optimization": {HIERARCHY_KEY: 2}} if config.optimizer == "muon" else {}
    engine = open_with_weights(model, config, template, torch.device("cpu"))
    if compiled:
        assert compilation.start(model, random_batch(shape, config.micro_batch, torch.Generator()), print, whole_layers)
        torch.compiler.set_stance("fail_on_recompile")
    steps = [train(engine, shape, 1, seed=parallel.data_rank(), micro_batches=1) for _ in range(3)]
    return list(itertools.chain(*steps))


def compare(config: PretrainConfig, whole_layers: bool = False) -> dict[str, Any]:
    """Train eagerly, then compiled: nats and norm of each step, and the number of captured graphs."""
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    experts.has_kernel, experts.grouped_mm = lambda *_: True, plain_grouped_mm  # as on a GPU
    layers.is_batch_first = lambda _: True
    eager, compiled = (train_compiled(config, compiled, whole_layers) for compiled in (False, True))
    return {
        "rank": torch.distributed.get_rank(), "eager": eager, "compiled": compiled,
        "captured": counters["stats"]["unique_graphs"],
    }  # fmt: skip


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, python_path: None, warm_server: Path | None) -> dict[str, Any]:
    jobs = {name: COMMON | settings for name, settings in RUNS.items()}
    jobs |= {f"whole, {name}": {**COMMON, **each, "more": {"whole_layers": True}} for name, each in SHARDED.items()}
    found = answers_of(compare, jobs, tmp_path_factory.mktemp("functions"), warm_server)
    return {name: min(ranks, key=lambda answer: answer["rank"]) for name, ranks in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_compiled_functions_train_as_eager_ones(seen: dict[str, Any], name: str) -> None:
    """And training calls what was compiled: the softmax's two functions, activations, rotations of two sizes."""
    found = seen[name]
    rounding.assert_same_curve(found["compiled"], found["eager"], quantity="grad_norm")
    assert found["compiled"][0] > found["compiled"][4], "they train"
    assert found["captured"] == (5 if "llama" in name else 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
def test_compiled_layers_train_as_eager_ones_to_the_bit_under_zero(seen: dict[str, Any], name: str) -> None:
    """Losses and gradient norms of three steps, which two processes share."""
    found = seen[f"whole, {name}"]
    assert found["compiled"] == found["eager"] and found["captured"] > 0
    assert len({*found["eager"]}) == 6, "they train"
