"""`init_from`: which Hugging Face folders a training may start from, what is wrong with others, and the weights."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import configs
import foreign_models
import made_tasks
import pytest
import torch
import transformers
from foreign_models import QWEN_3, byte_level
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from zerokara import checkpoint
from zerokara.base.errors import Fault, UserError
from zerokara.config.loading import load
from zerokara.config.model import ARCHITECTURES
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.evaluation.inputs import check_folder
from zerokara.huggingface import families, from_hf, proof, to_hf
from zerokara.huggingface.new_vocabulary import NewVocabulary, new_vocabulary
from zerokara.model import builder, parallel
from zerokara.model.shapes import ModelShape
from zerokara.publishing.checkpoint_source import CheckpointSource
from zerokara.samples.objective import Prompt
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import CONFIG_NAME, JSON_NAME, open_encoder

SIZES = ["num_layers=2", "hidden_size=24", "num_attn_heads=4", "ffn_hidden_size=40", "seq_len=16"]
YARN = "{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 8, beta_slow: 0.5}"
LLAMA3 = (
    "{rope_type: llama3, factor: 2.5, original_max_position_embeddings: 8, low_freq_factor: 1, high_freq_factor: 4}"
)
VARIANTS = {
    "llama": ["num_kv_heads=2", "rope_theta=5000.0", "head_dim=8"],
    "qwen3": ["num_kv_heads=2", "norm_epsilon=1e-6", "rope_scaling={rope_type: linear, factor: 2}"],
    "mistral": ["num_kv_heads=1", "head_dim=10"],
    "qwen2": ["num_kv_heads=2", "rope_theta=1000000.0", "head_dim=8"],
    "smollm3": ["num_layers=5", "num_kv_heads=2", "rope_theta=5000000.0", f"rope_scaling={YARN}"],
    "olmo2": ["num_kv_heads=2", "norm_epsilon=1e-6"],
    "mixtral": ["num_experts=3", f"rope_scaling={YARN}"],
    "qwen3_moe": ["moe_layers=[1]", "num_experts=3", "moe_ffn_hidden_size=16", f"rope_scaling={LLAMA3}"],
    "switch": ["num_layers=4", "num_experts=3", "relative_attention_num_buckets=8"],
    "t5": ["head_dim=8", "relative_attention_max_distance=64"],
}
"""Values that are no class's default, and not ours either."""


@pytest.fixture(scope="module")
def encoder(tiny_data: dict[str, str]) -> Encoder:
    return Encoder(tiny_data["input_tokenizer_file"])


def settings_of(folder: Path, *overrides: str) -> PretrainConfig:
    return load(PretrainConfig, "/dev/null", [*SIZES, f"init_from={folder}", *overrides])


def exported(folder: Path, encoder: Encoder, *overrides: str, shared: bool = True, **hf_values: Any) -> PretrainConfig:
    """Make a Hugging Face folder of random weights; gives the settings that start from it."""
    settings = settings_of(folder, *overrides)
    made_tasks.make_folder(folder, encoder, settings, shared, **hf_values)
    return settings


def check(settings: PretrainConfig, encoder: Encoder, shape: ModelShape | None = None) -> None:
    shape = shape or ModelShape.from_config(settings, encoder.vocab_size)
    from_hf.check_source(Path(settings.init_from), shape, encoder, settings.new_embeddings, settings.fault)


def fault_of(settings: PretrainConfig, encoder: Encoder, key: str | None = "init_from") -> Fault:
    """The only fault, which is of `key`."""
    fault = configs.fault_of(check, settings, encoder)
    assert fault.key == key and "\n" not in str(fault)
    return fault


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | values), encoding="utf-8")


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("architecture", families.FAMILIES)
def test_a_model_comes_here_and_goes_back_without_losing_a_bit(
    tmp_path: Path, encoder: Encoder, architecture: str, tied: str
) -> None:
    heads = ["num_kv_heads=2"] if ARCHITECTURES[architecture].supports_gqa else []
    overrides = [*heads, *VARIANTS.get(architecture, []), f"tie_word_embeddings={tied}"]
    settings = exported(tmp_path / "hf", encoder, f"architecture={architecture}", *overrides)
    read = PretrainConfig(**from_hf.settings_of(tmp_path / "hf", settings.fault), init_from=str(tmp_path / "hf"))
    shape, expected = (
        replace(ModelShape.from_config(each, encoder.vocab_size), raw_len=0, target_len=0, init_std=0.0)
        for each in (read, settings)
    )
    assert shape == expected
    check(read, encoder)
    weights = dict(from_hf.open_weights(tmp_path / "hf", shape))
    parallel.start_alone()
    assert weights.keys() == dict(builder.build(shape).named_parameters()).keys()
    (tmp_path / "back").mkdir()
    to_hf.write_model(tmp_path / "back", weights, shape, families.SpecialIds(bos=1, eos=2, pad=3), "fp32", "40KB")
    shards = list((tmp_path / "back").glob("model-*.safetensors"))
    back = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    copies = set(families.FAMILIES[architecture].copies)  # which a file of transformers may hold as well
    assert back.keys() - copies == theirs.keys() - copies
    assert all(torch.equal(back[name], theirs[name]) for name in back) and len(shards) > 1


def test_all_differing_settings_are_listed_at_once(tmp_path: Path, encoder: Encoder) -> None:
    exported(tmp_path, encoder, "num_kv_heads=2", "rope_theta=5000", attention_bias=True)
    other = ("num_kv_heads=4", "num_layers=3", "rope_theta=10000", "norm_epsilon=1e-6", "tie_word_embeddings=false")
    values = {
        "num_layers": 2, "num_kv_heads": 2, "rope_theta": 5000.0, "norm_epsilon": 1e-05, "tie_word_embeddings": True,
    }  # fmt: skip
    faults = {fault.key: fault for fault in configs.refused(check, settings_of(tmp_path, *other), encoder)}
    remedies = {key: f"set {key}: {value}" for key, value in values.items()} | {"attention_bias": ""}
    assert {key: fault.remedy for key, fault in faults.items()} == remedies
    assert faults["attention_bias"].where == str(tmp_path / "config.json")


SLIDING = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("architecture", "key", "values"),
    [
        ("mistral", "sliding_window", {"sliding_window": 8}),
        *((name, "use_sliding_window", SLIDING) for name in ("qwen2", "qwen3", "smollm3")),
        ("qwen2", "layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("smollm3", "no_rope_layers", {"no_rope_layers": [1, 0]}),
        ("smollm3", "no_rope_layers", {"no_rope_layers": None, "no_rope_layer_interval": 2}),
        *((name, "attention_bias", {"attention_bias": True}) for name in ("llama", "qwen3", "smollm3", "olmo2")),
        ("smollm3", "mlp_bias", {"mlp_bias": True}),
        ("olmo2", "hidden_act", {"hidden_act": "gelu_pytorch_tanh"}),
        ("llama", "init_from", {"quantization_config": {"quant_method": "fp8"}}),
        ("mistral", "attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
        ("llama", "final_logit_softcapping", {"final_logit_softcapping": 30.0}),
        ("llama", "partial_rotary_factor", {"partial_rotary_factor": 0.5}),
        ("qwen2", "partial_rotary_factor", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("t5", "decoder_start_token_id", {"decoder_start_token_id": 1}),
        ("olmo2", "rope_parameters", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        *(
            ("llama", "architecture", {"model_type": name})
            for name in ("gemma", "gemma2", "gemma3_text", "olmo3", "phi3")
        ),
    ],
)
def test_what_is_not_computed_here_is_refused_by_its_name_in_config_json(
    tmp_path: Path, encoder: Encoder, architecture: str, key: str, values: dict[str, Any]
) -> None:
    settings = exported(tmp_path, encoder, f"architecture={architecture}")
    check(settings, encoder)
    edit(tmp_path / "config.json", **values)
    fault = fault_of(settings, encoder, key)
    assert key in ("architecture", "init_from") or fault.where == str(tmp_path / "config.json")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", families.FAMILIES)
def test_no_switch_that_changes_what_a_model_computes_is_passed_over(
    tmp_path: Path, encoder: Encoder, architecture: str
) -> None:
    """Each switch of a family's config.json, turned: the same results of transformers, or a fault."""
    settings = exported(tmp_path, encoder, f"architecture={architecture}", *VARIANTS.get(architecture, ()))
    original = (tmp_path / "config.json").read_text(encoding="utf-8")
    default = type(transformers.AutoConfig.from_pretrained(tmp_path))().to_dict()
    known = {*transformers.PreTrainedConfig().to_dict(), "is_gated_act"}  # the latter follows from feed_forward_proj
    passed_over = dict[str, bool]()
    for key in (key for key, value in default.items() if isinstance(value, bool) and key not in known):
        turned = not json.loads(original).get(key, default[key])
        edit(tmp_path / "config.json", **{key: turned})
        try:
            check(settings, encoder)
            passed_over[key] = turned
        except UserError:
            pass
        (tmp_path / "config.json").write_text(original, encoding="utf-8")

    def results(**changed: Any) -> torch.Tensor:
        edit(tmp_path / "config.json", **changed)
        model = getattr(transformers, families.FAMILIES[architecture].auto_class).from_pretrained(tmp_path).eval()
        (tmp_path / "config.json").write_text(original, encoding="utf-8")
        inputs = {"input_ids": torch.arange(5, 15)[None]}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = inputs["input_ids"]
        with torch.inference_mode():
            logits: torch.Tensor = model(**inputs).logits
            return logits

    expected = results()
    assert not [key for key, turned in passed_over.items() if not torch.equal(results(**{key: turned}), expected)]


@pytest.mark.parametrize("ours", ["null", "{rope_type: linear, factor: 4}", YARN.replace("0.5", "0.25")])
def test_another_scaling_of_rotary_positions_is_told_with_the_models(
    tmp_path: Path, encoder: Encoder, ours: str
) -> None:
    exported(tmp_path, encoder, f"rope_scaling={YARN}")
    settings = settings_of(tmp_path, f"rope_scaling={ours}")
    assert fault_of(settings, encoder, "rope_scaling").remedy == f"set rope_scaling: {YARN}"
    older = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "beta_slow": 0.5}
    edit(tmp_path / "config.json", rope_scaling=older, rope_parameters=None)  # as transformers 4 wrote it
    assert fault_of(settings, encoder, "rope_scaling").remedy == f"set rope_scaling: {YARN}"
    edit(tmp_path / "config.json", rope_scaling={**older, "mscale": 0.7, "mscale_all_dim": 1.0})
    fault = fault_of(settings, encoder, "rope_parameters")
    assert "mscale" in fault.rule and fault.where == str(tmp_path / "config.json")
    edit(tmp_path / "config.json", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UserError, match=r"rope_type: Input should be 'linear', 'yarn' or 'llama3'"):
        from_hf.settings_of(tmp_path, settings.fault)


def test_a_model_may_read_other_lengths_where_positions_are_not_learned(tmp_path: Path, encoder: Encoder) -> None:
    """The rotation may change for longer sequences, and only for these."""
    exported(tmp_path / "llama", encoder)
    for length in (8, 32):
        check(settings_of(tmp_path / "llama", f"seq_len={length}"), encoder)
    for rotation in ("rope_theta=50000", f"rope_scaling={YARN}"):
        check(settings_of(tmp_path / "llama", "seq_len=32", rotation), encoder)
        fault_of(settings_of(tmp_path / "llama", rotation), encoder, rotation.partition("=")[0])
    exported(tmp_path / "gpt2", encoder, "architecture=gpt2")
    for length in (8, 32):
        fault = fault_of(settings_of(tmp_path / "gpt2", "architecture=gpt2", f"seq_len={length}"), encoder, "seq_len")
        assert fault.remedy == "set seq_len: 16"


def test_a_folder_without_a_known_model_is_refused(tmp_path: Path, encoder: Encoder) -> None:
    assert "hf download" in fault_of(settings_of(tmp_path / "nowhere"), encoder).remedy
    run = tmp_path / "run"
    (run / "global_step10").mkdir(parents=True)
    for folder in (run, run / "global_step10"):
        assert "4_convert_to_HF.sh" in fault_of(settings_of(folder), encoder).remedy
    exported(tmp_path / "qwen3", encoder, "architecture=qwen3")
    assert fault_of(settings_of(tmp_path / "qwen3"), encoder, "architecture").remedy == "set architecture: qwen3"
    settings = settings_of(tmp_path / "bert")
    shutil.copytree(tmp_path / "qwen3", tmp_path / "bert")
    (tmp_path / "bert/config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    remedy = fault_of(settings, encoder, "architecture").remedy
    assert all(architecture in remedy for architecture in families.FAMILIES)
    with pytest.raises(UserError, match="bert"):
        from_hf.settings_of(tmp_path / "bert", settings.fault)
    (tmp_path / "bert/config.json").write_text('{"model_type": ', encoding="utf-8")
    assert fault_of(settings, encoder, None).where == str(tmp_path / "bert/config.json")


def test_a_pickle_is_refused_and_never_opened(tmp_path: Path, encoder: Encoder) -> None:
    folder, trace = tmp_path / "hf", tmp_path / "trace"
    settings = exported(folder, encoder)
    (folder / "pytorch_model.bin").write_bytes(f"cos\nmkdir\n(V{trace}\ntR.".encode())  # runs as it is unpickled
    check(settings, encoder)  # beside safetensors it does no harm
    (folder / "model.safetensors").unlink()
    fault = fault_of(settings, encoder)
    assert "pytorch_model.bin" in fault.rule
    assert "*.safetensors" in fault.remedy and "save_pretrained" in fault.remedy
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        dict(from_hf.open_weights(folder, ModelShape.from_config(settings, encoder.vocab_size)))
    index = folder / "model.safetensors.index.json"
    for part in ("pytorch_model.bin", "../model.safetensors", 3):
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": part}}), encoding="utf-8")
        assert f": {part} (named by {index.name}" in fault_of(settings, encoder).rule
    for text in ("[3]", "{"):
        index.write_text(text, encoding="utf-8")
        assert fault_of(settings, encoder, None).where == str(index)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("config.json", {"hidden_size": "x"}),
        ("config.json", {"dtype": "x"}),
        ("config.json", {"model_type": ["x"]}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
    ],
)
def test_whatever_stands_in_a_folders_json_there_is_a_fault(
    tmp_path: Path, encoder: Encoder, name: str, values: dict[str, Any]
) -> None:
    settings = exported(tmp_path, encoder)
    edit(tmp_path / name, **values)
    fault = configs.fault_of(check, settings, encoder)
    assert re.search("transformers|JSON", fault.rule)
    assert (fault.key or fault.where) == ("init_from" if fault.key else str(tmp_path / name))


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_key_value_heads", "rms_norm_eps"])
def test_a_size_that_no_model_has_is_told_by_its_name_in_config_json(
    tmp_path: Path, encoder: Encoder, key: str
) -> None:
    settings = exported(tmp_path, encoder)
    edit(tmp_path / "config.json", **{key: 0})
    fault = configs.fault_of(from_hf.settings_of, tmp_path, settings.fault)
    assert key in f"{fault.rule} {fault.where}"


def test_code_that_a_folder_brings_is_not_run(tmp_path: Path, encoder: Encoder) -> None:
    folder, trace = tmp_path / "hf", tmp_path / "trace"
    settings = exported(folder, encoder)
    code = f"import os\nos.mkdir({str(trace)!r})\nclass Evil: pass\n"
    (folder / "evil.py").write_text(code, encoding="utf-8")
    names = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
    edit(folder / "config.json", auto_map=dict.fromkeys(names, "evil.Evil"))
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]})
    check(settings, encoder)
    dict(from_hf.open_weights(folder, ModelShape.from_config(settings, encoder.vocab_size)))
    edit(folder / "config.json", model_type="evil")
    fault = fault_of(settings, encoder, None)
    assert fault.where == str(folder / "config.json") and "auto_map" in fault.rule and "trust" not in str(fault)
    assert not trace.exists()


def test_embeddings_that_are_not_shared_are_refused(tmp_path: Path, encoder: Encoder) -> None:
    settings = exported(tmp_path, encoder, "architecture=switch", "num_experts=2", shared=False)
    assert "embed_tokens.weight, which is not shared.weight" in fault_of(settings, encoder).rule


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of the only file of weights."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_an_output_matrix_of_its_own_is_trained_on_whatever_config_json_says(
    tmp_path: Path, encoder: Encoder, architecture: str, short: bool
) -> None:
    of_family = f"architecture={architecture}"
    settings = exported(tmp_path, encoder, of_family, "tie_word_embeddings=false")
    head, prefix = load_file(tmp_path / "model.safetensors")["lm_head.weight"], families.FAMILIES[architecture].rules[0]
    if short:  # as GPT-2's own file has its names

        def without_prefix(weights: dict[str, torch.Tensor]) -> None:
            for name in [name for name in weights if name != "lm_head.weight"]:
                weights[name.removeprefix(f"{prefix.hf[0].partition('.')[0]}.")] = weights.pop(name)

        edit_weights(tmp_path, without_prefix)
    edit(tmp_path / "config.json", tie_word_embeddings=True)
    assert from_hf.settings_of(tmp_path, settings.fault)["tie_word_embeddings"] is False
    check(settings, encoder)
    taken = dict(from_hf.open_weights(tmp_path, ModelShape.from_config(settings, encoder.vocab_size)))
    assert torch.equal(taken["output_layer.weight"][: encoder.vocab_size], head)
    tied = settings_of(tmp_path, of_family)
    assert fault_of(tied, encoder, "tie_word_embeddings").remedy == "set tie_word_embeddings: False"
    wte = next(iter(prefix.hf)) if not short else prefix.hf[0].partition(".")[2]
    edit_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": weights[wte].clone()}))
    check(tied, encoder)  # a copy
    edit(tmp_path / "config.json", tie_word_embeddings=False)
    edit_weights(tmp_path, lambda weights: weights.pop("lm_head.weight"))
    assert "lm_head.weight: " in fault_of(settings, encoder).rule


LAYER = "model.layers.{}.self_attn.q_proj.{}".format


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda weights: weights.update({LAYER(1, "bias"): torch.zeros(32)}), LAYER(1, "bias")),
        (lambda weights: weights.update({LAYER(2, "weight"): weights[LAYER(1, "weight")].clone()}), LAYER(2, "weight")),
        (lambda weights: weights.update({LAYER(0, "weight_scale"): torch.ones(1)}), LAYER(0, "weight_scale")),
        (lambda weights: weights.pop("model.norm.weight"), "model.norm.weight"),
        (lambda weights: weights.update({"model.norm.weight": torch.ones(25)}), "[25]"),
        (lambda weights: weights.update({"model.norm.weight": torch.ones(24, dtype=torch.int8)}), "type I8"),
        (lambda weights: weights.update({"norm.weight": torch.ones(24)}), "norm.weight"),
        (lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}), ""),
    ],
)
def test_every_tensor_of_a_folder_is_used_or_the_folder_refused(
    tmp_path: Path, encoder: Encoder, change: Callable[[dict[str, torch.Tensor]], object], named: str
) -> None:
    settings = exported(tmp_path, encoder, "head_dim=8")
    edit_weights(tmp_path, change)
    if not named:  # a constant that older versions of transformers wrote
        check(settings, encoder)
        return
    assert named in fault_of(settings, encoder).rule
    assert configs.fault_of(from_hf.settings_of, tmp_path, settings.fault).key == "init_from", "step 0 and step 7"


def test_files_that_are_cut_missing_or_read_by_nothing_are_told(tmp_path: Path, encoder: Encoder) -> None:
    folder, whole = tmp_path / "hf", tmp_path / "hf" / "model.safetensors"
    settings = exported(folder, encoder)
    weights, content = load_file(whole), whole.read_bytes()
    shutil.copyfile(whole, folder / "consolidated.safetensors")  # Mistral's own format of the same
    check(settings, encoder)
    shutil.copyfile(whole, folder / "model-00002-of-00002.safetensors")
    assert "model-00002-of-00002.safetensors" in fault_of(settings, encoder).rule
    (folder / "model-00002-of-00002.safetensors").unlink()
    whole.write_bytes(content[:-1])
    assert "model.safetensors (" in fault_of(settings, encoder).rule
    whole.unlink()
    save_file(weights, folder / "a.safetensors", {"format": "pt"})
    save_file({"model.norm.weight": weights["model.norm.weight"]}, folder / "b.safetensors", {"format": "pt"})
    named, index = dict.fromkeys(weights, "a.safetensors"), folder / "model.safetensors.index.json"
    for part, rule in (
        ("a.safetensors", "b.safetensors, beside a.safetensors"),
        ("b.safetensors", "model.norm.weight is in a.safetensors, too"),
    ):
        index.write_text(json.dumps({"weight_map": named | {"model.norm.weight": part}}), encoding="utf-8")
        assert rule in fault_of(settings, encoder).rule
    (folder / "b.safetensors").unlink()
    assert "b.safetensors (No such file" in fault_of(settings, encoder).rule
    edit(folder / "config.json", transformers_weights="elsewhere")
    assert "(elsewhere)" in fault_of(settings, encoder).rule


def test_an_adapter_is_named_beside_a_model_and_alone(tmp_path: Path, encoder: Encoder) -> None:
    settings = exported(tmp_path, encoder)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}', encoding="utf-8")
    for gone in ((), ("model.safetensors", "config.json")):
        for name in gone:
            (tmp_path / name).unlink()
        fault, of_step_8 = fault_of(settings, encoder), check_folder(tmp_path)
        assert "adapter (PEFT) of org/base" in fault.rule and "merge_and_unload" in fault.remedy
        assert of_step_8 and (of_step_8.rule, of_step_8.remedy) == (fault.rule, fault.remedy)


LLAMA_31 = (
    "{rope_type: llama3, factor: 8, original_max_position_embeddings: 32, low_freq_factor: 1, high_freq_factor: 4}"
)


def test_an_export_keeps_context_and_generation_settings_of_the_model_that_it_continues(
    tmp_path: Path, encoder: Encoder, caplog: pytest.LogCaptureFixture
) -> None:
    long, short = (f"rope_scaling={LLAMA_31}", "seq_len=256"), (f"rope_scaling={LLAMA_31}", "seq_len=16")
    settings = exported(tmp_path / "hf", encoder, *long)
    chosen = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    (tmp_path / "hf" / "generation_config.json").unlink(missing_ok=True)
    edit(tmp_path / "hf" / "config.json", eos_token_id=[7, 2])
    assert from_hf.carried(tmp_path / "hf", "none")["generation"]["eos_token_id"] == [7, 2]
    theirs = {**chosen, "eos_token_id": [7, 8], "max_new_tokens": 99, "transformers_version": "4.1.0"}
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(theirs), encoding="utf-8")
    facts = from_hf.carried(tmp_path / "hf", settings.new_embeddings)
    assert facts["context_length"] == 256
    exported(tmp_path / "t5", encoder, "architecture=t5")
    edit(tmp_path / "t5" / "tokenizer_config.json", model_max_length=99)
    assert from_hf.carried(tmp_path / "t5", "none")["context_length"] == 99, "config.json states none"
    assert from_hf.carried(tmp_path / "hf", "overlap")["generation"] == chosen, "their ids are other pieces here"
    trained = ModelShape.from_config(settings_of(tmp_path, *short), encoder.vocab_size).as_json()
    state = checkpoint.TrainingState(1, 1, 1, 1.0, trained, "", "", "fp32", facts)
    source = CheckpointSource(tmp_path, tmp_path, state, settings)
    assert source.shape.seq_len == 256 and source.shape.raw_len == 16
    weights = dict(from_hf.open_weights(tmp_path / "hf", source.shape))
    (tmp_path / "back").mkdir()
    special = families.SpecialIds(bos=1, eos=2, pad=3, other_ends=(5, 7))
    to_hf.write_model(tmp_path / "back", weights, source.shape, special, "fp32", "4GB", state.facts["generation"])
    transformers.utils.logging.set_verbosity_warning()
    transformers.utils.logging.enable_propagation()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert not caplog.records and model.config.max_position_embeddings == 256
    own, made = model.generation_config, json.loads((tmp_path / "back/generation_config.json").read_bytes())
    assert own.eos_token_id == [2, 5, 7, 8] and (own.max_new_tokens, own.bos_token_id, own.pad_token_id) == (99, 1, 3)
    assert made | chosen == made and made["transformers_version"] == transformers.__version__


def test_another_tokenizer_is_refused(tmp_path: Path, encoder: Encoder) -> None:
    settings = exported(tmp_path, encoder)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[400], vocabulary[401] = vocabulary[401], vocabulary[400]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    rule = fault_of(settings, encoder, "input_tokenizer_file").rule
    assert "2 of 500 ids" in rule and "first id 400" in rule
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model"):
        (tmp_path / name).unlink(missing_ok=True)
    assert "tokenizer" in fault_of(settings, encoder).rule


def test_a_teacher_is_a_decoder_of_any_size_with_the_same_ids(tmp_path: Path, encoder: Encoder) -> None:
    for name, architecture in (("large", "qwen3"), ("t5", "t5"), ("other", "llama")):
        exported(tmp_path / name, encoder, f"architecture={architecture}", "num_layers=3")
    fault = settings_of(tmp_path).fault
    shape = from_hf.teacher_of(tmp_path / "large", encoder, 16, fault)
    assert (shape.num_layers, shape.vocab_size, shape.architecture) == (3, encoder.vocab_size, "qwen3")
    path = tmp_path / "other/tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"].reverse()
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    assert "encoder-decoder" in configs.fault_of(from_hf.teacher_of, tmp_path / "t5", encoder, 16, fault).rule
    other = configs.fault_of(from_hf.teacher_of, tmp_path / "other", encoder, 16, fault)
    assert other.key == "input_tokenizer_file" and f"than that of {tmp_path / 'other'}" in other.rule
    short = configs.fault_of(from_hf.teacher_of, tmp_path / "large", encoder, 17, fault)
    assert short.rule == "has a context of 16 tokens; seq_len is 17", "rotary positions, too"
    (tmp_path / "large/model.safetensors").write_bytes(b"damaged")
    assert "cannot be read" in configs.fault_of(from_hf.teacher_of, tmp_path / "large", encoder, 16, fault).rule


def test_the_start_of_a_decoder_is_that_of_the_vocabulary_it_is_to_have(tmp_path: Path, encoder: Encoder) -> None:
    """Google's T5 begins with 0, which is another piece here."""
    exported(tmp_path, encoder, "architecture=t5")
    edit(tmp_path / "config.json", decoder_start_token_id=0, pad_token_id=0)
    check(settings_of(tmp_path, "architecture=t5", "new_embeddings=mean_of_pieces"), encoder)


def test_a_piece_that_both_vocabularies_have_keeps_its_row(tmp_path: Path, encoder: Encoder) -> None:
    exported(tmp_path / "hf", encoder, "tie_word_embeddings=false")
    (tmp_path / "hf" / "tokenizer.model").write_bytes(encoder.model_bytes)
    lines = [" ".join(words) for words in itertools.permutations(["stea", "zilei", "śnieg", "the", "of"])]
    new = Encoder(foreign_models.train(tmp_path / "new.model", foreign_models.STEP_1, lines, vocab_size=300))
    shape = ModelShape.from_config(settings_of(tmp_path / "hf", "tie_word_embeddings=false"), new.vocab_size)
    old = dict(from_hf.open_weights(tmp_path / "hf", replace(shape, vocab_size=encoder.vocab_size)))
    their_id = {encoder.pieces[i]: i for i in range(encoder.vocab_size)}
    kept = [i for i in range(new.vocab_size) if new.pieces[i] in their_id]
    word = next(i for i in range(new.vocab_size) if i not in kept and new.pieces[i].endswith("zilei"))
    split = encoder.encode(new.token_texts[word].decode()).tolist()
    settings = settings_of(tmp_path / "hf", "tie_word_embeddings=false", "new_embeddings=mean_of_pieces")
    vocabulary = from_hf.check_source(tmp_path / "hf", shape, new, settings.new_embeddings, settings.fault)
    weights = dict(from_hf.open_weights(tmp_path / "hf", shape, vocabulary))
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        rows, theirs = weights[name], old[name][: encoder.vocab_size]
        assert rows.shape == (shape.padded_vocab_size, 24) and rows[new.vocab_size :].eq(0).all()
        assert torch.equal(rows[kept], theirs[[their_id[new.pieces[i]] for i in kept]])
        torch.testing.assert_close(rows[word], theirs[split].mean(dim=0))
    made = NewVocabulary([[2], [0, 2], []], [True, False, False], 3).rows(torch.arange(6.0).view(3, 2))
    assert made.tolist() == [[4.0, 5.0], [2.0, 3.0], [2.0, 3.0]]


@pytest.mark.parametrize("old_kind", ["STEP_1", "LLAMA", "GEMMA", "LLAMA_3"])
@pytest.mark.parametrize("new_kind", ["STEP_1", "LLAMA", "QWEN_3"])
def test_a_new_piece_comes_from_the_pieces_that_make_its_text_within_a_line(
    tmp_path: Path, old_kind: str, new_kind: str
) -> None:
    def made(kind: str, name: str, texts: list[str]) -> Encoder:
        settings = getattr(foreign_models, kind)
        if isinstance(settings, str):
            path = foreign_models.byte_level(tmp_path / name, settings, texts, 300 if texts else 420)
        else:
            path = foreign_models.train(tmp_path / f"{name}.model", settings, texts, 300 if texts else 420)
        return open_encoder(path, foreign_models.SPECIAL[settings][1] if isinstance(settings, str) else "auto")

    lines = [" ".join(words) for words in itertools.permutations(["stea", "zilei", "śnieg", "the", "of"])]
    old, new = made(old_kind, "old", []), made(new_kind, "new", lines)
    found = new_vocabulary(old, new)
    for i, (text, ids) in enumerate(zip(new.token_texts, found.sources, strict=True)):
        if text:
            assert b"".join(old.token_texts[each] for each in ids) == text, new.pieces[i]
    named = [name for name in ("bos_id", "eos_id", "unk_id") if min(getattr(new, name), getattr(old, name)) >= 0]
    assert [found.sources[getattr(new, name)] for name in named] == [[getattr(old, name)] for name in named]
    assert any(len(ids) > 3 for ids in found.sources) and 256 < sum(found.kept) < new.vocab_size - 5


def test_a_tokenizer_json_is_compared_by_its_ids(tmp_path: Path) -> None:
    named, texts = {"eos_token": "<|endoftext|>"}, foreign_models.documents(99)
    of_model = open_encoder(byte_level(tmp_path / "tokenizer", QWEN_3, texts, tokenizer_config=named))
    settings = exported(tmp_path / "hf", of_model, "architecture=qwen3")
    for name in (JSON_NAME, CONFIG_NAME):
        assert (tmp_path / "hf" / name).read_bytes() == (tmp_path / "tokenizer" / name).read_bytes()
    check(settings, of_model)
    found = from_hf.tokenizer_of(tmp_path / "hf", settings.fault)
    assert open_encoder(found, "<|endoftext|>").sha256 == of_model.sha256
    other = open_encoder(byte_level(tmp_path / "other", QWEN_3, texts[:20], tokenizer_config=named))
    assert "other pieces" in fault_of(settings, other, "input_tokenizer_file").rule
    with_more = Tokenizer.from_file(found)
    with_more.add_tokens(["<one more>"])
    with_more.save(str(tmp_path / "more.json"))
    fault = fault_of(settings, open_encoder(tmp_path / "more.json", "<|endoftext|>"), "input_tokenizer_file")
    assert f"has {of_model.vocab_size + 1} pieces, the model in {tmp_path / 'hf'} {of_model.vocab_size}" in fault.rule
    assert f"<one more> (id {of_model.vocab_size})" in fault.rule and "resize_token_embeddings" in fault.remedy


@pytest.mark.parametrize(("architecture", "is_encoder_decoder"), [("mixtral", False), ("switch", True)])
def test_what_a_router_chooses_by_rounding_is_not_compared(
    tmp_path: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, architecture: str, is_encoder_decoder: bool
) -> None:
    """Two experts are chosen alike here, and one of them first in the export."""
    settings = exported(tmp_path, encoder, f"architecture={architecture}", *VARIANTS[architecture])
    shape = ModelShape.from_config(settings, encoder.vocab_size)
    weights = dict(from_hf.open_weights(tmp_path, shape))
    content = load_file(tmp_path / "model.safetensors")
    routers = [weights[name] for name in sorted(weights) if re.match(r"decoder.*router\.weight", name)]
    routers[-1][1] = routers[-1][0]  # of the decoder's last layer
    gates = [content[name] for name in sorted(content) if re.match(r"(?!encoder).*(gate|classifier)\.weight", name)]
    assert len(gates) == len(routers) > 0
    gates[-1][1] = gates[-1][0] * (1 + 2e-7)
    ids = torch.randint(4, 500, (16, 16), generator=torch.Generator().manual_seed(1)).tolist()
    texts = [Prompt(row if is_encoder_decoder else [], [3, *row[1:]] if is_encoder_decoder else row) for row in ids]

    def proved() -> proof.Proof:
        save_file(content, tmp_path / "model.safetensors", {"format": "pt"})
        return proof.prove(tmp_path, weights, shape, "fp32", texts, texts[:1])[0]

    found = proved()
    tied = found.facts["positions_after_router_ties"]
    assert not found.faults and 0 < tied < found.facts["positions"]
    monkeypatch.setattr(proof, "ROUTER_TIE", 0.0)
    assert "logits differ" in str(proved().faults)
    monkeypatch.undo()
    gates[-1].mul_(-1)
    assert "logits differ" in str(proved().faults), "no rounding"
