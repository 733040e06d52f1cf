"""Training on packed examples: neither the micro batch nor the processes change it (measure_packed_steps.py)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rounding
import torch
from configs import RECIPE
from grouped import plain_grouped_mm
from made_examples import conversation, pair, write_examples
from programs import answers_of
from shapes import shape_of
from tiny import nothing_small

from zerokara.config.data import packed
from zerokara.model import compilation, experts, parallel
from zerokara.model.builder import Model, build
from zerokara.model.experts import Routing
from zerokara.samples.packed_examples import PackedExamples, Pairs
from zerokara.training.run import as_tensors

PAD, END, VOCABULARY = 0, 2, 300
COMMON = RECIPE | {
    "num_layers": 2, "hidden_size": 48, "num_attn_heads": 4, "seq_len": 48, "precision": "fp32",
    "global_batch_size": 8, "micro_batch_size": 4, "zero_stage": 0, "processes": 1,
}  # fmt: skip
T5 = {"architecture": "t5", "head_dim": 16}
SWITCH = {**T5, "architecture": "switch", "num_experts": 4, "moe_layers": "[1]"}
ROUTING = {"router_aux_loss_coef": 0.02, "expert_capacity_factor": 1.0}
ONE: dict[str, dict[str, Any]] = {"llama": {}, "t5": T5, "switch": {**SWITCH, **ROUTING}}
OTHERS: dict[str, dict[str, Any]] = {
    "llama, micro batch 1": {"micro_batch_size": 1},
    "llama, two processes": {"processes": 2},
    "t5, tensor parallel, micro batch 1": {**T5, "micro_batch_size": 1, "processes": 2, "tensor_parallel_size": 2},
    "t5, ZeRO 3, checkpointing": {**T5, "processes": 2, "zero_stage": 3, "activation_checkpointing": "full"},
    "switch, two processes": {**SWITCH, **ROUTING, "processes": 2, "zero_stage": 1},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, python_path: None) -> dict[str, dict[str, Any]]:
    folder, chance = tmp_path_factory.mktemp("packed"), np.random.default_rng(1)
    # Answers of very different lengths: a mean of means is another number.
    longer = [[conversation(chance, VOCABULARY, END)[0], [*[7] * 20, END]] for _ in range(15)]
    write_examples(folder / "conversations", [*(conversation(chance, VOCABULARY, END) for _ in range(60)), *longer])
    write_examples(folder / "pairs", [pair(chance, VOCABULARY, END) for _ in range(100)])
    template = {"deepspeed_template": str(nothing_small(folder))}
    jobs = {
        name: {**COMMON, **settings, **template, "folder": str(folder)} for name, settings in (ONE | OTHERS).items()
    }
    jobs["own tokens"] = {**jobs["llama"], "processes": 2, "own_tokens": True}
    return answers_of("measure_packed_steps.py", jobs, folder)


@pytest.mark.parametrize("name", OTHERS)
def test_micro_batch_and_processes_change_nothing(runs: dict[str, Any], name: str) -> None:
    one = runs[name.split(",")[0]]
    assert one["losses"][-1] < one["losses"][0] - 0.2, "nothing was learned: equality would mean nothing"
    rounding.assert_same_curve(runs[name]["losses"], one["losses"])
    rounding.assert_same_curve(runs[name]["grad_norms"], one["grad_norms"], quantity="grad_norm")


def test_a_process_that_counts_its_own_tokens_is_noticed(runs: dict[str, Any]) -> None:
    """The broken twin: each process divides by its own count of learned tokens."""
    found, one = runs["own tokens"]["grad_norms"], runs["llama"]["grad_norms"]
    assert rounding.times_tolerance(found, one, quantity="grad_norm") > rounding.BROKEN


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_layers": 1},
    "mixtral": {"num_layers": 1, "architecture": "mixtral", "num_experts": 4},
    "switch": {"num_layers": 1, **SWITCH, "moe_layers": (0,)},
}


def compiled_case(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Model, list[list[torch.Tensor]]]:
    """A model, and micro batches of packed examples with padding; experts take the way that they take on a GPU."""
    parallel.start_alone()
    monkeypatch.setenv(compilation.CACHE_VARIABLE, str(folder))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(experts, "has_kernel", lambda _: True)
    monkeypatch.setattr(experts, "grouped_mm", plain_grouped_mm)
    torch._dynamo.reset()
    is_pair, chance = family == "switch", np.random.default_rng(2)
    lengths = packed(32, 24, True) if is_pair else packed(32, 32, False)
    examples = [(pair if is_pair else conversation)(chance, VOCABULARY, END) for _ in range(40)]
    rows = PackedExamples(write_examples(folder / "examples", examples), lengths, is_pair, PAD)
    shape = shape_of(VOCABULARY, seq_len=48, **MODELS[family])
    shape = replace(shape, input_len=lengths.input, target_len=lengths.target)
    model = build(shape, seed=1, routing=Routing(0.3, 0.2, capacity_factor=1.0))
    objective = Pairs(lengths, PAD if is_pair else None)
    return model, [as_tensors(objective(rows.many([row, row + 1]), np.zeros(2))) for row in range(3)]


def nats_and_gradients(model: Model, batch: list[torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    if model.auxiliary:
        model.auxiliary.set_weight(float(batch[2].sum()), torch.device("cpu"))  # as large as the nats
    nats = model(*batch)
    nats.backward()
    return float(nats.detach()), {name: part.grad.clone() for name, part in model.named_parameters()}


@pytest.mark.parametrize("family", MODELS)
def test_compiled_layers_take_packed_examples(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = compiled_case(family, tmp_path, monkeypatch)
    expected = [nats_and_gradients(model, batch) for batch in batches]
    assert compilation.start(model, 2, intra_document_masking=True, log=print, packs_examples=True)
    torch.compiler.set_stance("fail_on_recompile")
    try:
        for batch, (nats, gradients) in zip(batches, expected, strict=True):
            found_nats, found = nats_and_gradients(model, batch)
            rounding.assert_same_loss(found_nats, nats)
            for name, gradient in gradients.items():
                rounding.assert_same_tensor(found[name], gradient, name)
    finally:
        torch.compiler.set_stance("default")


def test_layers_compiled_without_the_number_of_examples_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken twin: such layers would be compiled twice, once at the start and once in the first step."""
    model, batches = compiled_case("mixtral", tmp_path, monkeypatch)
    assert compilation.start(model, 2, intra_document_masking=True, log=print)
    torch.compiler.set_stance("fail_on_recompile")
    try:
        with pytest.raises(RuntimeError, match="recompile"):
            nats_and_gradients(model, batches[0])
    finally:
        torch.compiler.set_stance("default")
