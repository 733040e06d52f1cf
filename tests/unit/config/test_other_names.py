"""Settings by other names: what a user of an earlier version, or of another program, is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerokara.config import other_names
from zerokara.config.convert_config import ConvertConfig
from zerokara.config.evaluate_config import EvaluateConfig
from zerokara.config.finetune_config import FinetuneConfig
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.settings import Settings
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.errors import Fault, UserError

ROOT = Path(__file__).resolve().parents[3]
CLASSES = (TokenizerConfig, PretrainConfig, ConvertConfig, FinetuneConfig, EvaluateConfig)


def fault_of(config_class: type[Settings], path: str | Path, *overrides: str) -> Fault:
    with pytest.raises(UserError) as caught:
        load(config_class, path, overrides)
    (fault,) = caught.value.faults
    return fault


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("sparse_layers", "moe_layers"),
        ("router_balance_loss", "router_aux_loss_coef"),
        ("router_z_loss", "router_z_loss_coef"),
        ("expert_capacity", "expert_capacity_factor"),
        ("expert_ffn_hidden_size", "moe_ffn_hidden_size"),
        ("isolate_documents", "intra_document_masking"),
        ("head_size", "head_dim"),
        ("relative_attention_buckets", "relative_attention_num_buckets"),
        ("relative_attention_distance", "relative_attention_max_distance"),
        ("relative_attention_lr_factor", "relative_attention_lr_multiplier"),
        ("num_attention_heads", "num_attn_heads"),
        ("per_device_train_batch_size", "micro_batch_size"),
        ("expert_parallel_size", "zero_stage"),
        ("train_samples", "train_tokens"),
        ("tokenized_data_path", "output_prefix"),
        ("data_path", "output_prefix"),
        ("vocab_size", "sentence_piece_config.yaml"),
        ("test_prompt_text", "convert_config.yaml"),
        ("hidden_sise", "hidden_size"),
    ],
)
def test_a_refused_name_is_answered_with_ours(old: str, new: str) -> None:
    fault = fault_of(PretrainConfig, "/dev/null", f"{old}=1")
    assert (fault.where, fault.key) == ("--set", old) and new in fault.remedy


@pytest.mark.parametrize(
    ("old", "new"), [("model_prefix", "output_dir"), ("input_tokenizer_file", "config.yaml"), ("input_jsonl", "input")]
)
def test_names_that_step_1_does_not_know(old: str, new: str) -> None:
    assert new in fault_of(TokenizerConfig, "/dev/null", f"{old}=x").remedy


def test_every_name_leads_to_a_setting_and_hides_none() -> None:
    known = set().union(*(config_class.model_fields for config_class in CLASSES))
    assert other_names.OTHER_NAMES.keys() <= known
    others, gone = (" ".join(each).split() for each in (other_names.OTHER_NAMES.values(), other_names.ADVICE.values()))
    assert not set(others) & set(gone)
    assert {file.config_class for file in other_names.FILES} == set(CLASSES)


@pytest.mark.parametrize("read_by", CLASSES)
@pytest.mark.parametrize("file", other_names.FILES, ids=lambda file: file.name)
def test_the_file_of_another_step_is_one_fault_that_names_it(
    file: other_names.ConfigFile, read_by: type[Settings]
) -> None:
    if file.config_class is read_by:
        load(read_by, ROOT / file.name)
        return
    fault = fault_of(read_by, ROOT / file.name)
    assert fault.where == str(ROOT / file.name) and file.steps in fault.rule
    assert other_names.file_of(read_by).name in fault.remedy


def test_a_part_of_a_value_is_answered_with_how_to_set_it() -> None:
    fault = fault_of(PretrainConfig, "/dev/null", "stages[1].order=shuffle")
    assert fault.key == "stages[1].order" and "--set 'stages=[" in fault.remedy
