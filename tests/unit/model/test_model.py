"""Shapes count what is built, padding is not seen, and megatron-core loads no more than is used."""

import math
from typing import Any

import pytest
import rounding
import torch
from configs import config_of
from drawn_models import build
from programs import run_program
from shapes import named, shape_of

from zerokara.model.shapes import ModelShape

IMPORTS = """
import sys, torch
compile_before = torch.compile
import zerokara.training.worker
assert torch.compile is compile_before, "torch.compile is another"
loaded = {"torch._inductor.compile_fx", "torch._dynamo", "wandb", "deepspeed"} & sys.modules.keys()
assert not loaded, loaded
import wandb
assert wandb.init and torch.compile(lambda x: x + 1, backend="eager")(torch.ones(())) == 2
"""


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_kv_heads": 2, "tie_word_embeddings": False},
        {"architecture": "qwen3"},
        {"architecture": "qwen2", "num_kv_heads": 2},
        {"architecture": "olmo2", "num_kv_heads": 2, "head_dim": 20},
        {"architecture": "smollm3", "num_layers": 4},
        {"architecture": "gpt2", "tie_word_embeddings": False, "ffn_hidden_size": 100},
        {"architecture": "t5", "tie_word_embeddings": True, "head_dim": 16},
        {"architecture": "mixtral", "num_kv_heads": 2, "num_experts": 4},
        {"architecture": "qwen3_moe", "num_layers": 3, "num_experts": 4, "moe_layers": [1], "moe_ffn_hidden_size": 40},
        {"architecture": "switch", "num_experts": 4},
        {"architecture": "t5_moe", "num_experts": 4, "moe_layers": [0], "experts_per_token": 3},
    ],
    ids=named,
)
def test_counted_parameters_are_those_built(overrides: dict[str, Any]) -> None:
    shape = shape_of(**overrides)
    model = build(shape)
    built = {name: tuple(part.shape) for name, part in model.named_parameters()}
    sizes = {name: math.prod(size) for name, size in built.items()}
    assert built == shape.parameter_shapes()
    assert sum(sizes.values()) == shape.num_parameters()
    padding = (shape.padded_vocab_size - shape.vocab_size) * 48 * (1 if shape.tie_word_embeddings else 2)
    assert shape.num_parameters() - shape.num_parameters(padded=False) == padding
    in_experts = sum(size for name, size in sizes.items() if ".experts_" in name)
    idle = in_experts // max(1, shape.num_experts) * (shape.num_experts - shape.experts_per_token)
    assert shape.num_active_parameters() == shape.num_parameters() - padding - idle


def test_the_korean_base_has_the_parameters_that_its_authors_state() -> None:
    """About 700.6M and 304.2M active: 12 + 12 layers of hidden size 768, 16 experts in layers 3, 7, 11, two a token."""
    settings = config_of(
        architecture="t5_moe", num_layers=12, hidden_size=768, num_attn_heads=12, ffn_hidden_size=2048,
        num_experts=16, seq_len=512,
    )  # fmt: skip
    assert settings.resolved_sizes()["moe_layers"] == (3, 7, 11) and settings.resolved_sizes()["experts_per_token"] == 2
    shape = ModelShape.from_config(settings, vocab_size=50_358)
    assert shape.num_parameters(padded=False) == pytest.approx(700.6e6, rel=1e-3)
    assert shape.num_active_parameters() == pytest.approx(304.2e6, rel=1e-3)


def test_an_encoder_does_not_see_padding_and_one_position_has_the_logits_of_all() -> None:
    model = build(shape_of(architecture="t5"))
    generator = torch.Generator().manual_seed(0)
    ids, target = (torch.randint(0, 300, (1, length), generator=generator) for length in (9, 5))
    longer = torch.cat([ids, torch.randint(0, 300, (1, 4), generator=generator)], dim=1)
    given: dict[str, Any] = {"decoder_input_ids_BT": target}
    with torch.no_grad():
        padded = model(longer, **given, encoder_attention_mask_BS=torch.tensor([[1] * 9 + [0] * 4]))
        rounding.assert_same_tensor(padded, model(ids, **given))
        rounding.assert_same_tensor(model(ids, **given, at_B=torch.tensor([3])), model(ids, **given)[:, 3:4])
        assert rounding.tensor_times_tolerance(model(longer, **given), padded) > rounding.BROKEN


def test_flops_of_documents_leave_out_what_attention_leaves_out() -> None:
    shape = shape_of()
    size, queries = shape.seq_len, shape.num_layers * shape.query_projection_size
    in_halves = shape.flops_per_token(2 * (size / 2) ** 2)
    assert shape.flops_per_token() - in_halves == pytest.approx(6 * queries * size / 2)
    assert shape.flops_per_token(None) - shape.flops_per_token() == pytest.approx(6 * queries * size)


def test_flops_of_an_encoder_decoder_by_hand() -> None:
    """One sample of 34 raw tokens, 32 for the encoder and 8 for the decoder: weights by the tokens they multiply."""
    shape = shape_of(architecture="t5", head_dim=16, num_attn_heads=6, ffn_hidden_size=100)
    assert (shape.raw_len, shape.seq_len, shape.target_len) == (34, 32, 8)
    attention, mlp, queries = 4 * 48 * 96, 3 * 48 * 100, 96
    encoder = 32 * (attention + mlp) + 2 * 32 * 32 * queries
    decoder = 8 * (attention + mlp) + 8 * 8 * queries  # causal: half
    cross_attention = 8 * 2 * 48 * 96 + 32 * 2 * 48 * 96 + 2 * 32 * 8 * queries
    expected = 6 * (2 * (encoder + decoder + cross_attention) + 8 * 384 * 48) / 34
    assert shape.flops_per_token() == pytest.approx(expected)


def test_megatron_core_loads_no_compiler_and_no_wandb_and_both_work_afterwards() -> None:
    run_program(IMPORTS)
