"""The plan of a run as a file: what the training processes read is what the launching process planned."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import RunError
from zerokara.tokens.indexed import IndexedTokens
from zerokara.training.planning.run_plan import RunPlan, make_plan, read_plan


@pytest.fixture
def plan(tiny_data: dict[str, str]) -> RunPlan:
    stages = "stages=[{tokens: 5000, order: sequential}, {tokens: rest, order: shuffle}]"
    overrides = ["lr=auto", "optimizer=auto", "sample_prompts=[ab, c]", "max_hours=1.5", stages]
    plan = make_plan(load(PretrainConfig, tiny_data["config"], overrides), 2)
    return plan.with_settings(precision="fp32", micro_batch_size=1)


def test_what_is_read_is_what_was_planned(plan: RunPlan, tmp_path: Path) -> None:
    plan.write(tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert (read.resolved, read.requested) == (plan.resolved, plan.requested)
    assert read.resolved.precision == "fp32" and read.resolved.micro_batch == 1
    assert read.resolved.where("seq_len") == plan.resolved.where("seq_len")
    assert (read.shape, read.schedule) == (plan.shape, plan.schedule)
    assert (read.num_processes, read.nodes, read.template) == (plan.num_processes, plan.nodes, plan.template)
    assert read.reasons == plan.reasons
    assert plan.reasons and read.data.reading.identity() == plan.data.reading.identity()
    assert read.consumption == plan.consumption
    read.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_prompts_of_auto_are_beginnings_of_held_out_documents(tiny_data: dict[str, str], tmp_path: Path) -> None:
    settings = ["sample_prompts=auto", "model_size=1M", "num_layers=2", "hidden_size=48", "num_attn_heads=4"]
    plan = make_plan(load(PretrainConfig, tiny_data["config"], settings))
    prompts = plan.requested.sample_prompts
    tokens = IndexedTokens(plan.data.valid_prefix)
    held_out = [plan.encoder.decode(tokens[number].tolist()) for number in range(len(tokens))]
    assert len(prompts) == 3 and all(any(text.startswith(prompt) for text in held_out) for prompt in prompts)
    assert make_plan(load(PretrainConfig, tiny_data["config"], settings)).requested.sample_prompts == prompts
    plan.write(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").resolved.sample_prompts == prompts
    assert plan.reasons.keys() >= {"sample_prompts", "model_size"}  # numbers stand beside it


@pytest.mark.parametrize("hashed", ["data_sha256", "tokenizer_sha256"])
def test_files_that_were_replaced_since_are_refused(plan: RunPlan, tmp_path: Path, hashed: str) -> None:
    path = tmp_path / "plan.json"
    plan.write(path)
    path.write_bytes(orjson.dumps({**orjson.loads(path.read_bytes()), hashed: "0" * 64}))
    with pytest.raises(RunError, match="replaced"):
        read_plan(path)
