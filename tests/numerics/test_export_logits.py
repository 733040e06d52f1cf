"""The exported model, loaded from disk by stock transformers, computes what ours computes; broken twins do not.

Weights have a large spread, so that logits spread (std > 0.5) and every rule matters to them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import rounding
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from wide_weights import spread_weights

from zerokara.config.model import RopeScaling
from zerokara.huggingface import families, to_hf
from zerokara.huggingface import proof as export_proof
from zerokara.huggingface.tokenizer_proof import Proof
from zerokara.huggingface.weight_rules import QUERY_KEY_VALUE, Parts, Transform, WeightRule
from zerokara.model.shapes import ModelShape
from zerokara.samples.objective import Prompt

SPECIAL = families.SpecialIds(bos=1, eos=2, pad=3)
LLAMA = ModelShape("llama", 3, 48, 6, 3, 80, 48, 201, True, 5000.0, 1e-5, 0.02)
"""6 heads, 3 kv heads; 201 pieces padded to 256 rows."""
GPT2 = ModelShape("gpt2", 3, 48, 6, 6, 96, 48, 201, True, 10000.0, 1e-5, 0.02)
QWEN3 = replace(LLAMA, architecture="qwen3")
QWEN2, MISTRAL, OLMO2 = (replace(LLAMA, architecture=name) for name in ("qwen2", "mistral", "olmo2"))
SMOLLM3 = replace(LLAMA, architecture="smollm3", num_layers=5)
"""The fourth layer has no positions."""
T5 = ModelShape("t5", 3, 48, 6, 6, 80, 48, 201, True, 10000.0, 1e-6, 0.0, head_dim=12, raw_len=54, target_len=12)
"""Heads that are together wider than the model."""
MIXTRAL = replace(
    LLAMA, architecture="mixtral", num_experts=4, experts_per_token=2, moe_ffn_hidden_size=40, moe_layers=(0, 1, 2)
)
QWEN3_MOE = replace(MIXTRAL, architecture="qwen3_moe", num_experts=5, experts_per_token=3, moe_layers=(1,))
SWITCH = replace(T5, architecture="switch", num_experts=4, experts_per_token=1, moe_ffn_hidden_size=80, moe_layers=(1,))
SCALED = {
    name: replace(LLAMA, rope_theta=100.0, rope_scaling=RopeScaling(rope_type=name.split()[0], factor=4, **more))
    for name, more in {
        "linear": {},
        "llama3": {"original_max_position_embeddings": 12, "low_freq_factor": 1, "high_freq_factor": 4},
        "yarn": {"original_max_position_embeddings": 12, "beta_fast": 2, "beta_slow": 0.5},
        "yarn by default": {"original_max_position_embeddings": 40},
        "yarn with a factor": {"original_max_position_embeddings": 12, "beta_fast": 2, "attention_factor": 1.5},
    }.items()
}
"""Of the four frequencies of a head some are divided, some are not, and some lie in between."""
SHAPES = [
    shape
    for base in (LLAMA, QWEN3, QWEN2, OLMO2, SMOLLM3, MISTRAL, GPT2, MIXTRAL, QWEN3_MOE, T5, SWITCH)
    for shape in (base, replace(base, tie_word_embeddings=False))
]
CASES = [
    (shape, dtype)
    for shape in SHAPES
    for dtype in ("fp32", "bf16")
    if shape.architecture == "llama" or (dtype == "fp32") is shape.tie_word_embeddings
] + [(shape, "fp32") for shape in (*SCALED.values(), replace(QWEN3, rope_scaling=SCALED["yarn"].rope_scaling))]
"""Llama both ways; what is saved in bf16 goes the same way for all."""


def texts_and_prompts(shape: ModelShape) -> tuple[list[Prompt], list[Prompt]]:
    generator = torch.Generator().manual_seed(2)

    def ids(rows: int, length: int) -> list[list[int]]:
        return torch.randint(0, shape.vocab_size, (rows, length), generator=generator).tolist()

    if not shape.traits.is_encoder_decoder:
        return [Prompt([], row) for row in ids(3, 43)], [Prompt([], row) for row in ids(3, 1)]
    texts = [Prompt(*pair) for pair in zip(ids(3, 48), ids(3, 43), strict=True)]
    return texts, [Prompt(text, [SPECIAL.pad]) for text in (texts[1].encoder_ids, texts[2].encoder_ids[:17], [7])]


def export_and_prove(
    folder: Path,
    shape: ModelShape,
    dtype: str = "fp32",
    weights: dict[str, Tensor] | None = None,
    harm: Callable[[Path], None] = lambda folder: None,
) -> Proof:
    """Prove an export of spread weights, or of others, after `harm` was done to its folder."""
    folder.mkdir()
    weights = spread_weights(shape) if weights is None else weights
    to_hf.write_model(folder, weights, shape, SPECIAL, dtype, "4GB")
    harm(folder)
    texts, prompts = texts_and_prompts(shape)
    found, _, _ = export_proof.prove(folder, weights, shape, dtype, texts, prompts)
    return found


def rounded(found: Proof) -> float:
    """What rounding explains. Of thousands of logits the largest is about four standard deviations."""
    return rounding.tolerance(4 * found.facts["logit_std"], quantity="tensor")


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=lambda one: one if isinstance(one, str) else one.architecture)
def test_logits_arg_max_and_greedy_are_equal(tmp_path: Path, shape: ModelShape, dtype: str) -> None:
    found = export_and_prove(tmp_path / "hf", shape, dtype)
    assert found.faults == []
    assert found.facts["logit_std"] > export_proof.SPREAD and found.facts["notes"] == []
    assert found.facts["max_difference"] <= rounded(found)
    assert found.facts["positions"] == 3 * 43
    assert found.facts["greedy_tokens"] == 3 * (shape.seq_len - 1) >= 3 * 20
    assert found.facts["bf16_max_difference"] > 1e-3, "bf16 cannot be this exact: it was not computed"


def _swapped_names(rule: WeightRule) -> WeightRule:
    return replace(rule, hf=(*rule.hf[:-2], rule.hf[-1], rule.hf[-2]))


def _ungrouped(ours: Tensor, shape: ModelShape) -> Parts:
    """As if all queries stood before all keys, instead of kv head by kv head."""
    kv_rows = shape.num_kv_heads * shape.head_dim
    return ours.split((shape.hidden_size, kv_rows, kv_rows))


def _interleaved(ours: Tensor, shape: ModelShape) -> Parts:
    """As if rotary positions turned neighbours against each other and not halves."""

    def permute(rows: Tensor) -> Tensor:
        return rows.reshape(-1, shape.head_dim // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)

    query, key, value = QUERY_KEY_VALUE.to_hf(ours, shape)
    return permute(query), permute(key), value


def _dropped(ours: Tensor, shape: ModelShape) -> Parts:
    return (torch.zeros_like(ours),)


def _with_to_hf(to_hf: Callable[[Tensor, ModelShape], Parts]) -> Callable[[WeightRule], WeightRule]:
    return lambda rule: replace(rule, transform=Transform(to_hf, rule.transform.from_hf))


_BIAS = "decoder_relative_pos_emb.relative_attention_bias.weight"
TWINS = {
    "key and value swapped": (LLAMA, "linear_qkv.weight", _swapped_names),
    "heads not grouped": (LLAMA, "linear_qkv.weight", _with_to_hf(_ungrouped)),
    "rotary halves against neighbours": (LLAMA, "linear_qkv.weight", _with_to_hf(_interleaved)),
    "gate and up swapped": (LLAMA, "linear_fc1.weight", _swapped_names),
    "t5 relative position bias dropped": (T5, _BIAS, _with_to_hf(_dropped)),
    "experts in another order": (MIXTRAL, "layers.1.mlp.experts_fc2.weight", _swapped_names),
    "query, key and value biases swapped": (QWEN2, "linear_qkv.bias", _swapped_names),
    "query norm not by head": (OLMO2, "q_layernorm.weight", _with_to_hf(lambda ours, shape: (ours.flip(0),))),
    "one output norm dropped": (OLMO2, "layers.1.mlp.linear_fc2.output_layernorm.weight", _with_to_hf(_dropped)),
    "one bias dropped": (GPT2, "layers.1.mlp.linear_fc2.bias", _with_to_hf(_dropped)),
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_broken_twin_fails(twin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, ending, breaking = TWINS[twin]
    right = families.rules_for(shape)
    broken = [breaking(rule) if rule.ours.endswith(ending) else rule for rule in right]
    assert broken != right
    monkeypatch.setattr(families, "rules_for", lambda shape: broken)
    found = export_and_prove(tmp_path / "hf", shape)
    assert found.faults
    assert found.facts["max_difference"] > rounding.BROKEN * rounded(found)


def test_a_tensor_that_is_missing_on_disk_is_a_fault(tmp_path: Path) -> None:
    def rename(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.surplus.weight"] = tensors.pop("model.norm.weight")
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    faults = "\n".join(export_and_prove(tmp_path / "hf", LLAMA, harm=rename).faults)
    assert "missing_keys: ['model.norm.weight']" in faults
    assert "unexpected_keys: ['model.surplus.weight']" in faults


def test_an_untied_model_that_is_loaded_tied_fails(tmp_path: Path) -> None:
    def tie(folder: Path) -> None:
        path, untied = folder / "config.json", '"tie_word_embeddings": false'
        text = path.read_text(encoding="utf-8")
        assert untied in text
        path.write_text(text.replace(untied, untied.replace("false", "true")), encoding="utf-8")

    found = export_and_prove(tmp_path / "hf", replace(LLAMA, tie_word_embeddings=False), harm=tie)
    assert any("tie_word_embeddings" in fault for fault in found.faults)


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_a_scaling_that_others_do_not_read_fails(tmp_path: Path, name: str) -> None:
    def forget(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        del values["rope_scaling"]
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": values["rope_theta"]}
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")

    found = export_and_prove(tmp_path / "hf", SCALED[name], harm=forget)
    assert ModelShape.from_json(json.loads(json.dumps(SCALED[name].as_json()))) == SCALED[name]
    assert found.faults and found.facts["max_difference"] > rounding.BROKEN * rounded(found)


def test_flat_logits_get_a_note_and_no_numbers_do_not_pass(tmp_path: Path) -> None:
    weights = {name: tensor * 0.1 for name, tensor in spread_weights(LLAMA).items()}
    found = export_and_prove(tmp_path / "flat", LLAMA, weights=weights)
    assert found.facts["logit_std"] < export_proof.SPREAD and len(found.facts["notes"]) == 1
    weights["decoder.final_layernorm.weight"][3] = float("nan")
    found = export_and_prove(tmp_path / "nan", LLAMA, weights=weights)
    assert found.faults and found.facts["max_difference"] == float("inf")


def test_what_is_allowed_grows_with_the_logits(tmp_path: Path) -> None:
    """fp32 rounds large logits by more, in any two programs; a wrong rule moves them by more, too."""
    weights = spread_weights(LLAMA)
    small = export_and_prove(tmp_path / "small", LLAMA, weights=weights)
    weights["decoder.final_layernorm.weight"] *= 100
    large = export_and_prove(tmp_path / "large", LLAMA, weights=weights)
    assert large.faults == [] and large.facts["max_difference"] > small.facts["tolerance"]

    def harm(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][0] *= 1.001
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    assert export_and_prove(tmp_path / "harmed", LLAMA, weights=weights, harm=harm).faults
