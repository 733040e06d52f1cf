"""Training on packed examples: neither the micro batch nor the processes change it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rounding
import torch
import torch.distributed
from configs import RECIPE
from drawn_models import build
from engines import open_with_weights
from forked import answers_of
from made_examples import conversation, pair, write_examples

from zerokara.config.data import packed
from zerokara.config.deepspeed_template import load_template
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.shapes import ModelShape
from zerokara.samples.batches import Batches, BatchLayout
from zerokara.samples.packed_examples import ExampleData, PackedExamples, Pairs
from zerokara.training.guards import StepGuard
from zerokara.training.loop import train_step
from zerokara.training.processes.joining import Processes
from zerokara.training.run import load_batches

PAD, END, VOCABULARY, NUM_STEPS = 0, 2, 300, 4
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


class OwnTokens(Processes):
    """The broken twin: the count of another process does not matter."""

    def sum(self, values: Sequence[float]) -> list[float]:
        return [value * torch.distributed.get_world_size() for value in values]


def train(config: PretrainConfig, folder: str, own_tokens: bool = False) -> dict[str, Any]:
    both = config.traits.is_encoder_decoder
    lengths = packed(32, 24, True) if both else packed(32, 32, False)
    sizes = {"input_len": lengths.input, "target_len": lengths.target, "raw_len": lengths.raw}
    shape = replace(ModelShape.from_config(config, VOCABULARY), **sizes)
    model = build(shape, seed=1, settings=config)
    template = load_template(config.deepspeed_template)
    engine = open_with_weights(model, config, template, torch.device("cpu"))
    prefix = Path(folder) / ("pairs" if both else "conversations")
    data = ExampleData.of_rows(PackedExamples(prefix, lengths, both, PAD, seed=3))
    layout = BatchLayout(config.global_batch_size, config.micro_batch, parallel.data_size())
    objective = Pairs(lengths, PAD if both else None)
    batches = Batches(data.tokens(), data.order(), layout, objective, parallel.data_rank())
    guard = StepGuard(config)
    processes = (OwnTokens if own_tokens else Processes)(torch.device("cpu"), torch.distributed.get_rank())

    numbers = range(1, NUM_STEPS + 1)
    loader = load_batches(batches, lambda step: (step - 1) * config.global_batch_size, numbers, torch.device("cpu"))
    steps = [train_step(engine, processes, loader, number, 3e-3, guard, lambda: False) for number in numbers]
    return {"losses": [step.loss for step in steps], "grad_norms": [step.grad_norm for step in steps]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, python_path: None, warm_server: Path | None) -> dict[str, Any]:
    folder, chance = tmp_path_factory.mktemp("packed"), np.random.default_rng(1)
    # Answers of very different lengths: a mean of means is another number.
    longer = [[conversation(chance, VOCABULARY, END)[0], [*[7] * 20, END]] for _ in range(15)]
    write_examples(folder / "conversations", [*(conversation(chance, VOCABULARY, END) for _ in range(60)), *longer])
    write_examples(folder / "pairs", [pair(chance, VOCABULARY, END) for _ in range(100)])
    more = {"more": {"folder": str(folder)}}
    jobs = {name: {**COMMON, **settings, **more} for name, settings in (ONE | OTHERS).items()}
    jobs["own tokens"] = {**jobs["llama"], "processes": 2, "more": {"folder": str(folder), "own_tokens": True}}
    return {
        name: ranks[0] for name, ranks in answers_of(train, jobs, folder, warm_server).items()
    }  # all found the same


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
