"""Folders of today's families, as published but small, come here and go back, and compute what transformers computes.

Each config.json has the keys and values of the one on the Hub (in October 2026); only sizes are smaller, and ids of
control tokens. Weights are random and wide, so that logits spread and every tensor matters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rounding
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from zerokara.config.loading import load
from zerokara.config.model import ARCHITECTURES
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.huggingface import families, from_hf, to_hf, tokenizer_json
from zerokara.model import builder, parallel
from zerokara.model.shapes import ModelShape
from zerokara.tokenizer.encoder import Encoder

SPECIAL = families.SpecialIds(bos=1, eos=2, pad=3)
LLAMA3 = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000, "hidden_act": "silu",
    "initializer_range": 0.02, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
LLAMA3_ROTATION = {
    "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
QWEN = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu",
    "initializer_range": 0.02, "rms_norm_eps": 1e-06, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False,
}  # fmt: skip
OLMO2 = {
    "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257, "hidden_act": "silu",
    "initializer_range": 0.02, "max_position_embeddings": 4096, "model_type": "olmo2", "pad_token_id": 100277,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": False, "vocab_size": 100352,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B-Instruct": {
        **LLAMA3, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 16, "rope_scaling": {"factor": 32.0, **LLAMA3_ROTATION},
        "tie_word_embeddings": True,
    },
    "SmolLM2-135M": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu",
        "hidden_size": 576, "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
        "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 49152,
    },
    "SmolLM3-3B": {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "eos_token_id": 128012,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536, "max_window_layers": 28,
        "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004,
        "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0,
        "sliding_window": None, "torch_dtype": "bfloat16", "use_cache": False, "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "Qwen2.5-7B": {
        **QWEN, "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 131072,
        "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
        "use_mrope": False, "vocab_size": 152064,
    },
    "Qwen3-0.6B": {
        **QWEN, "attention_bias": False, "eos_token_id": 151645, "head_dim": 128, "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
        "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True, "vocab_size": 151936,
    },
    "Mistral-7B-v0.3": {
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 32768,
    },
    "OLMo-2-0425-1B": {
        **OLMO2, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_hidden_layers": 16,
        "num_key_value_heads": 16,
    },
}  # fmt: skip
LAYERS, WIDTH, HEADS, LENGTH = 5, 48, 6, 64
WITHOUT_EFFECT = {
    "head_dim": "classes without the key compute it", "initializer_range": "of the training",
    "max_window_layers": "without sliding windows", "no_rope_layer_interval": "no_rope_layers stands there",
    "pretraining_tp": "unread", "use_cache": "of the generation", "transformers_version": "",
    "is_llama_config": "unread", "rope_interleaved": "unread", "use_mrope": "unread",
}  # fmt: skip


@pytest.fixture(scope="module")
def encoder(tiny_data: dict[str, str]) -> Encoder:
    return Encoder(tiny_data["input_tokenizer_file"])


def smaller(name: str, vocab_size: int, tied: bool) -> dict[str, Any]:
    """A published configuration with smaller sizes, in about the same proportions."""
    given = PUBLISHED[name]
    heads_per_group = given["num_attention_heads"] // given["num_key_value_heads"]
    sizes = {
        "vocab_size": vocab_size, "hidden_size": WIDTH, "intermediate_size": 80, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS // min(heads_per_group, 3),
        "max_position_embeddings": LENGTH, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
        "tie_word_embeddings": tied,
    }  # fmt: skip
    if "head_dim" in given:
        widened = given["head_dim"] * given["num_attention_heads"] // given["hidden_size"]
        sizes["head_dim"] = widened * WIDTH // HEADS
    if given.get("rope_scaling"):
        sizes["rope_scaling"] = {**given["rope_scaling"], "original_max_position_embeddings": 16}
    sizes |= {key: given[key][:LAYERS] for key in ("layer_types", "no_rope_layers") if key in given}
    return given | sizes


def write_folder(folder: Path, encoder: Encoder, config: dict[str, Any], dtype: str, max_shard_size: str) -> None:
    """Write what a download would be: config.json as given, wide weights from transformers, a tokenizer."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))
    for name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        parameter.data = mean + 0.2 * torch.randn(parameter.shape, generator=generator)
    model.to(families.TORCH_DTYPES[dtype]).save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer_json.write(encoder, folder, LENGTH)


def logits_of(folder: Path, ids_BS: Tensor) -> Tensor:
    """Logits of stock transformers, in fp32."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        return model.eval()(ids_BS).logits


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for part in folder.glob("*.safetensors") for name, tensor in load_file(part).items()}


def settings_of(folder: Path) -> PretrainConfig:
    found = from_hf.settings_of(folder, load(PretrainConfig, "/dev/null").fault)
    return PretrainConfig(**found, init_from=str(folder))


def ours(weights: dict[str, Tensor], shape: ModelShape, ids_BS: Tensor) -> Tensor:
    parallel.start_alone()
    model = builder.build(shape)
    model.load_state_dict(weights, strict=False)
    assert weights.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        return model.eval()(ids_BS)[..., : shape.vocab_size]


def ids_of(vocab_size: int) -> Tensor:
    return torch.randint(0, vocab_size, (3, LENGTH), generator=torch.Generator().manual_seed(2))


def cases() -> Iterator[Any]:
    for name, values in PUBLISHED.items():
        yield pytest.param(name, values.get("tie_word_embeddings", True), "bf16", "4GB", id=name)
    for name in ("Llama-3.2-1B-Instruct", "Qwen2.5-7B", "OLMo-2-0425-1B"):
        tied = not PUBLISHED[name]["tie_word_embeddings"]
        yield pytest.param(name, tied, "fp32", "400KB", id=f"{name}, {'tied' if tied else 'untied'}, shards")


@pytest.mark.parametrize(("name", "tied", "dtype", "max_shard_size"), cases())
def test_a_published_model_computes_the_same_here_and_after_it_went_back(
    tmp_path: Path, encoder: Encoder, name: str, tied: bool, dtype: str, max_shard_size: str
) -> None:
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    config = {**smaller(name, encoder.vocab_size, tied), "torch_dtype": str(families.TORCH_DTYPES[dtype])[6:]}
    write_folder(theirs, encoder, config, dtype, max_shard_size)
    settings = settings_of(theirs)
    shape = ModelShape.from_config(settings, encoder.vocab_size)
    from_hf.check_source(theirs, shape, encoder, False, settings.fault)
    weights = dict(from_hf.open_weights(theirs, shape))
    assert len(list(theirs.glob("*.safetensors"))) == (1 if max_shard_size == "4GB" else 2)

    ids_BS = ids_of(encoder.vocab_size)
    expected, found = logits_of(theirs, ids_BS), ours(weights, shape, ids_BS)
    assert expected.std() > 0.5
    rounding.assert_same_tensor(found, expected)
    back.mkdir()
    to_hf.write_model(back, weights, shape, SPECIAL, dtype, max_shard_size)
    assert torch.equal(logits_of(back, ids_BS), expected)

    there, here = tensors_of(theirs), tensors_of(back)
    assert there.keys() == here.keys()
    assert all(torch.equal(there[key], here[key]) and there[key].dtype == here[key].dtype for key in here)
    loaded = [transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (theirs, back)]
    differing = {key for key in {*loaded[0], *loaded[1]} if loaded[0].get(key) != loaded[1].get(key)}
    assert differing <= WITHOUT_EFFECT.keys() | {"architectures", "_name_or_path"}
    exported = json.loads((back / "config.json").read_text(encoding="utf-8"))
    unread = {*WITHOUT_EFFECT, *(["sliding_window"] if config.get("use_sliding_window") is False else [])}
    changed = {key for key, value in config.items() if key not in unread and exported.get(key) != value}
    assert not changed, "under the names of older clients"


TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "positions in all layers": ("SmolLM3-3B", {"unrotated_every": 0}),
    "positions missing in another layer": ("SmolLM3-3B", {"unrotated_every": 3}),
}


@pytest.mark.parametrize("twin", TWINS)
def test_a_broken_twin_is_noticed(tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, twin: str) -> None:
    """What no weight tells of; broken rules are in test_export_logits."""
    name, wrong = TWINS[twin]
    folder = tmp_path / "theirs"
    write_folder(folder, encoder, smaller(name, encoder.vocab_size, True), "fp32", "4GB")
    shape = ModelShape.from_config(settings_of(folder), encoder.vocab_size)
    weights, ids_BS = dict(from_hf.open_weights(folder, shape)), ids_of(encoder.vocab_size)
    table = ARCHITECTURES
    monkeypatch.setitem(table, shape.architecture, replace(table[shape.architecture], **wrong))
    found = ours(weights, shape, ids_BS)
    assert rounding.tensor_times_tolerance(found, logits_of(folder, ids_BS)) > rounding.BROKEN
