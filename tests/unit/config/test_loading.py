"""Strict loading: every fault at once, with file, line, value, rule and remedy."""

import os
import re
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path

import pytest
from configs import fault_of, faults_of, loaded, refused
from huggingface_hub.utils import validate_repo_id
from quiet_core import seconds_of

from zerokara.base.errors import Fault, UserError
from zerokara.config.convert_config import ConvertConfig
from zerokara.config.finetune_config import FinetuneConfig
from zerokara.config.loading import FILES, load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.training.planning.schedule import Schedule

ROOT = Path(__file__).resolve().parents[3]
LLAMA3 = "{rope_type: llama3, factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_position_embeddings: 8}"


def test_every_fault_is_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = "lr: 6e-4\nlr: 3\nhiden_size: 5\nhidden_size: 250\nmicro_batch_size: abc\nepochs: -1\nnum_kv_heads: 3\n"
    faults = faults_of(tmp_path, text)
    assert [(fault.where, fault.key, fault.value) for fault in faults if fault.key != "lr"] == [
        (":3", "hiden_size", 5),
        (":4", "hidden_size", 250),
        (":5", "micro_batch_size", "abc"),
        (":6", "epochs", -1),
        (":7", "num_kv_heads", 3),
    ]
    assert (faults[0].where, faults[0].key) == (":2", "lr") and "line 1" in faults[0].rule
    remedies = [fault.remedy for fault in faults]
    assert "hidden_size" in remedies[1] and "248 or 252" in remedies[2] and "[1, 2, 4]" in remedies[5]
    assert str(replace(faults[2], where="config.yaml:4")) == (
        "config.yaml:4: hidden_size = 250: must be a multiple of num_attn_heads = 4; try 248 or 252, or give head_dim"
    )


def test_the_home_folder_is_what_a_shell_takes_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every setting that is a path by its name or default; entries of a corpus are expanded where they are read."""
    monkeypatch.setenv("HOME", str(tmp_path))
    home = f"{tmp_path}/a"
    corpus = re.compile("input|input_jsonl|texts|check_corpus|pretraining_data|(train|valid|test)_data|prompt_template")
    for config_class in FILES.values():
        for key, value in config_class():
            first = value[0] if isinstance(value, tuple) and value else value
            is_path = key in ("compare_with", "teachers") or (isinstance(first, str) and "/" in first)
            is_path |= isinstance(value, str) and re.search("_(dir|file|prefix|template|tokenizer)$", key) is not None
            if is_path and not corpus.fullmatch(key):
                is_list = isinstance(value, tuple)
                given = loaded(tmp_path, f"{key}: {'[~/a, b]' if is_list else '~/a'}\n", of=config_class)
                assert getattr(given, key) == ((home, "b") if is_list else home), key
    assert loaded(tmp_path, "prompt_template: ~/{input}\n", of=FinetuneConfig).prompt_template == "~/{input}"
    assert loaded(tmp_path, "", "output_prefix=~/a").output_prefix == home
    cards = loaded(tmp_path, "models: ~/a\nadd_to_card: ['~/a']\n", of=FILES["evaluate_config.yaml"])
    assert cards.add_to_card == cards.models == (home,)


def test_labels_are_the_texts_that_are_written_whatever_yaml_would_read(tmp_path: Path) -> None:
    text = "label_words: {true: a, False: b, 7: c, 2.0: d, no: e, 01: f, 010: g, '3': h, null: i, 1_0: j, 0x10: k}\n"
    words = loaded(tmp_path, text, of=FinetuneConfig).label_words
    written = ["true", "False", "7", "2.0", "no", "01", "010", "3", "null", "1_0", "0x10"]
    assert [*words] == written
    assert [*loaded(tmp_path, "", text.strip().replace(": ", "=", 1), of=FinetuneConfig).label_words] == written
    (fault,) = faults_of(tmp_path, "label_words: {1: a, '1': b}\n", of=FinetuneConfig)
    assert fault.key == "label_words.1" and "twice" in fault.rule


def test_a_seed_is_one_that_torch_takes(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, f"seed: {2**63}\n")
    assert (fault.where, fault.key) == (":1", "seed")


def test_tensor_parallelism_divides_what_it_shards(tmp_path: Path) -> None:
    layers = "hidden_size: 96\nnum_attn_heads: 8\nnum_kv_heads: 2\nffn_hidden_size: 100\n"
    (fault,) = faults_of(tmp_path, layers + "tensor_parallel_size: 8\n")
    assert (fault.where, fault.key, fault.value) == (":5", "tensor_parallel_size", 8) and "[1, 2]" in fault.remedy
    assert "num_kv_heads = 2 and ffn_hidden_size = 100" in fault.rule
    (fault,) = faults_of(tmp_path, layers + "tensor_parallel_size: 2\nnum_processes: 3\n")
    assert (fault.where, fault.key) == (":5", "tensor_parallel_size") and "num_processes" in fault.remedy
    two_ranks = "tensor_parallel_size: 2\nnum_processes: 4\nglobal_batch_size: 8\nmicro_batch_size: 4\n"
    loaded(tmp_path, layers + two_ranks)  # data-parallel, of four sequences each


def assert_reads_all_of(text: str, fault: Fault) -> None:
    """A rule (the loader's own faults are none) says that it reads every setting of a text that breaks it."""
    assert not fault.reads or {*re.findall(r"^\w+", text, re.MULTILINE)} <= {*fault.reads}


@pytest.mark.parametrize(
    ("text", "where", "key", "keyword"),
    [
        ("global_batch_size: 500\nmicro_batch_size: 8\nnum_processes: 4\n", ":1", "global_batch_size", "480 or 512"),
        ("tie_word_embeddings: yes\n", ":1", "tie_word_embeddings", "true or false"),
        ("lr: 1e-3\nmin_lr: 1\n", ":2", "min_lr", "lr = 0.001"),
        ("train_tokens: 1.5\n", ":1", "train_tokens", "whole number"),
        ("hidden_size: 12\n", ":1", "hidden_size", "even"),
        ("architecture: gpt2\nnum_kv_heads: 2\n", ":2", "num_kv_heads", "gpt2"),
        ("architecture: gpt2\nhead_dim: 12\nhidden_size: 64\nnum_attn_heads: 8\n", ":2", "head_dim", "= 8 for"),
        ("architecture: mixtral\nexperts_per_token: 1\n", ":2", "experts_per_token", "at least 2"),
        ("architecture: t5\nintra_document_masking: true\n", ":2", "intra_document_masking", "t5"),
        ("architecture: t5\nrelative_attention_max_distance: 16\n", ":2", "relative_attention_max_distance", "16"),
        ("architecture: t5\nseq_len: 2\n", ":2", "seq_len", "at least 3"),
        ("head_dim: 7\n", ":1", "head_dim", "even"),
        ("rope_scaling:\n  rope_type: ntk\n  factor: 2\n", ":2", "rope_scaling.rope_type", "'yarn'"),
        ("rope_scaling: {rope_type: yarn, factor: 2}\n", ":1", "rope_scaling", "original_max_position_embeddings"),
        (f"rope_scaling: {LLAMA3}\n".replace("1,", "4,"), ":1", "rope_scaling", "4 is not below 4"),
        (f"rope_scaling: {LLAMA3}\n".replace("low_", "lo_"), ":1", "rope_scaling.lo_freq_factor", "low_freq_factor"),
        (f"rope_scaling: {LLAMA3}\n".replace("llama3", "linear"), ":1", "rope_scaling.high_freq_factor", "remove it"),
        (f"architecture: gpt2\nrope_scaling: {LLAMA3}\n", ":2", "rope_scaling", "gpt2"),
        ("keep_every: 150\nsave_interval: 100\n", ":1", "keep_every", "try 200"),
        ("lr: .nan\n", ":1", "lr", "must be"),
        ("- a\n- b\n", ":1", None, "key: value"),
    ],
)
def test_a_fault_names_the_line_the_setting_and_the_rule(
    tmp_path: Path, text: str, where: str, key: str | None, keyword: str
) -> None:
    (fault,) = faults_of(tmp_path, text)
    assert (fault.where, fault.key) == (where, key) and keyword in f"{fault.rule}; {fault.remedy}"
    assert_reads_all_of(text, fault)


@pytest.mark.parametrize(
    ("text", "key", "keyword"),
    [
        ("vocab_size: 400\nextra_ids: 200\n", "vocab_size", "469"),
        ("user_defined_symbols: ['</s>']\n", "user_defined_symbols", "</s>"),
        ('user_defined_symbols: ["\\ud83d"]\n', "user_defined_symbols", "ud83d"),
        ("user_defined_symbols: [good, two words]\n", "user_defined_symbols", "'two words'"),
        ("reserved_pieces: [<b>]\n", "reserved_pieces", "<b>"),
        ("reserved_pieces: [<|a|>, <|a|>]\n", "reserved_pieces", "twice"),
        ("user_defined_symbols: [<|user|>]\n", "user_defined_symbols", "<|user|>"),
        ("add_dummy_prefix: true\nuser_defined_symbols: [a]\n", "add_dummy_prefix", "user_defined"),
        ("add_dummy_prefix: true\nextra_ids: 100\n", "add_dummy_prefix", "extra_ids"),
    ],
)
def test_tokenizer_rules(tmp_path: Path, text: str, key: str, keyword: str) -> None:
    (fault,) = faults_of(tmp_path, text, of=TokenizerConfig)
    assert (fault.where, fault.key) == (":1", key) and keyword in fault.rule
    assert_reads_all_of(text, fault)


def test_a_rule_holds_unless_a_setting_that_it_reads_is_wrong_itself(tmp_path: Path) -> None:
    text = "save_interval: 100\nkeep_every: 150\n"
    for wrong, keys in (("save_interval=many", ["save_interval"]), ("lr=many", ["keep_every", "lr"])):
        assert sorted(fault.key or "" for fault in faults_of(tmp_path, text, wrong)) == keys


def test_overrides_win_and_are_named(tmp_path: Path) -> None:
    assert loaded(tmp_path, "lr: 1e-3\n", "lr=6e-4", "train_tokens=1e9").lr == 6e-4
    assert loaded(tmp_path, "init_from: somewhere\n", "init_from=").init_from == "", "the shell takes quotes away"
    nonsense, wrong = faults_of(tmp_path, "lr: 1e-3\n", "lr=-1", "nonsense")
    assert (wrong.where, wrong.key, wrong.value) == ("--set", "lr", -1)
    assert (nonsense.where, nonsense.key, nonsense.value) == ("--set", None, "nonsense") and "lr=" in nonsense.remedy


@pytest.mark.parametrize(
    ("override", "where", "key"),
    [
        ("lr=abc", "--set", "lr"),
        ("lr=!foo 1", "--set", "lr"),
        (" lr = abc", "--set", "lr"),
        ("hiden_size=8", "--set", "hiden_size"),
        ("stages=[{tokens: 5, order: up}]", "--set", "stages[0].order"),  # stands in the file as well
        ("stages=[{tokens: 5, source_weights: [1, 2]}]", "--set", "stages[0].source_weights"),
        ("source_weights=replay", "--set", "source_weights"),
        ("=5", "--set", None),
        ("num_attn_heads=5", ":1, --set num_attn_heads", "hidden_size"),
        ("num_processes=3", ":5, --set num_processes", "global_batch_size"),
        ("lr=1e-6", ":2, --set lr", "min_lr"),
    ],
)
def test_a_fault_that_the_command_line_made_cites_it(
    tmp_path: Path, override: str, where: str, key: str | None
) -> None:
    text = "hidden_size: 256\nmin_lr: 1e-4\nstages:\n  - {tokens: 5, source_weights: [1], order: shuffle}\n"
    text += "global_batch_size: 8\n"
    (fault,) = faults_of(tmp_path, text, override)
    assert (fault.where, fault.key) == (where, key)


def test_a_later_check_cites_the_command_line_too(tmp_path: Path) -> None:
    config = loaded(tmp_path, "warmup_steps: 50\nmax_steps: 100\nglobal_batch_size: 8\n", "max_steps=20")
    assert refused(Schedule.from_config, config, 256, 10**6)[0].where == f"{tmp_path}/config.yaml:1, --set max_steps"


def test_numbers_and_lists_read_as_people_write_them(tmp_path: Path) -> None:
    config = loaded(tmp_path, "\ufefflr: 6e-4\ntrain_tokens: 2.5e9\ninput_jsonl: one.jsonl\n")
    assert (config.lr, config.train_tokens, config.input_jsonl) == (6e-4, 2_500_000_000, ("one.jsonl",))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("lr: 1\ninput_jsonl: [@files.txt]\n", 2),
        ("input_jsonl: *.jsonl\n", 1),
        ("lr:\t3e-4\n", 1),
        ("max_steps: 5\n\tlr: 3e-4\n", 2),
        ("input_jsonl:\n  - a.jsonl\n\t- b.jsonl\n", 3),
    ],
)
def test_a_value_that_must_be_quoted_and_a_tab(tmp_path: Path, text: str, line: int) -> None:
    (in_file,) = faults_of(tmp_path, text)
    assert in_file.where == f":{line}" and "spaces" in in_file.remedy and "quotes" in in_file.remedy
    (on_line,) = faults_of(tmp_path, "lr: 1\n", "input_jsonl=@files.txt")
    assert (on_line.where, on_line.key) == ("--set", "input_jsonl") and "quotes" in on_line.remedy


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij"))


@pytest.mark.parametrize(
    ("text", "where", "keyword"),
    [
        ("lr: !!python/object/apply:os.mkdir [made]\n", ":1", "tag:yaml.org,2002:python/object"),
        (BOMB, ":1", "anchor"),
        ("stages: [{? [a, b] : 1}]\n", ":1", "as a key"),
        ("\ninput: " + "[" * 100_000, ":2", "depth"),
        ("".join(f"k{number}: 1\n" for number in range(1000)), "", "1,000"),
        ("a: " + "1" * 1_000_000, "", "256 kB"),
        ("lr: 2024-13-45\n", ":1", "month"),
    ],
)
def test_what_is_more_than_plain_yaml_is_one_fault_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, where: str, keyword: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert seconds_of(lambda: faults_of(tmp_path, text)) < 1
    fault = faults_of(tmp_path, text)[0]
    assert fault.where == where and keyword in fault.rule and len(str(fault)) < 700
    assert not Path("made").exists()


@pytest.mark.parametrize(("path", "said"), [("/dev/zero", "256 kB"), ("nowhere.yaml", "--config")])
def test_a_file_that_is_endless_or_missing_is_no_configuration(path: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^{path}: .*{said}"):
        load(PretrainConfig, path)


@pytest.mark.parametrize(
    ("config_class", "name", "meant"),
    [
        (PretrainConfig, "hidden_sise", "hidden_size"),
        (PretrainConfig, "learning_rate", "lr"),
        (PretrainConfig, "stages[1].order", "--set 'stages=["),
        (PretrainConfig, "vocab_size", "belongs in sentence_piece_config.yaml"),
        (TokenizerConfig, "input_jsonl", "belongs in config.yaml"),
    ],
)
def test_a_refused_name_is_answered_with_ours(tmp_path: Path, config_class: type, name: str, meant: str) -> None:
    (fault,) = faults_of(tmp_path, "", f"{name}=1", of=config_class)
    assert (fault.where, fault.key) == ("--set", name) and meant in fault.remedy


@pytest.mark.parametrize(("name", "read_by"), permutations(FILES, 2))
def test_the_file_of_another_step_is_one_fault_that_names_it(name: str, read_by: str) -> None:
    fault = fault_of(load, FILES[read_by], ROOT / name)
    assert (fault.where, name in fault.rule, read_by in fault.remedy) == (str(ROOT / name), True, True)


def test_a_run_of_an_earlier_version_may_hold_settings_that_are_gone(tmp_path: Path) -> None:
    for name in ("config_resolved.yaml", "config.yaml"):
        (tmp_path / name).write_text(
            "seed: 7\nresize_vocabulary: true\nembedding_tokens: 0\nmax_hours_per_start: auto\n", encoding="utf-8"
        )
    assert load(PretrainConfig, tmp_path / "config_resolved.yaml").seed == 7
    with pytest.raises(UserError, match=r"resize_vocabulary = True: there is no such setting(.|\n)*it is gone"):
        load(PretrainConfig, tmp_path / "config.yaml")


@pytest.mark.parametrize("name", ["me/a--b", "me/a..b", "me/a.git", "a/b/c", "me/", "only-a-name"])
def test_names_of_repositories_are_those_of_the_hub(tmp_path: Path, name: str) -> None:
    validate_repo_id(loaded(tmp_path, "huggingface_name: my-team/ja_1.3B", of=ConvertConfig).huggingface_name)
    (fault,) = faults_of(tmp_path, f"huggingface_name: {name}", of=ConvertConfig)
    assert fault.key == "huggingface_name"


def test_a_number_that_no_json_holds_is_refused(tmp_path: Path) -> None:
    for given in ("seed=1e20", "keep_last=1e30", "log_interval=9223372036854775808"):
        fault = fault_of(loaded, tmp_path, "", given)
        assert fault.key == given.partition("=")[0] and "must be less than 922337203685477" in fault.rule
    assert loaded(tmp_path, "", "seed=9223372036854775807").seed == 2**63 - 1


def test_a_comment_on_the_command_line_is_no_part_of_the_value(tmp_path: Path) -> None:
    """What stands behind " #" would be lost without a word."""
    fault = fault_of(loaded, tmp_path, "", "output_model_dir=run #2")
    assert fault.key == "output_model_dir" and "comment" in fault.rule and '"run #2"' in fault.remedy
    assert loaded(tmp_path, "", 'output_model_dir="run #2"').output_model_dir == "run #2"
    assert loaded(tmp_path, "", "output_model_dir=run#2").output_model_dir == "run#2"
    assert loaded(tmp_path, "", "sample_prompts=['a # b', \"c #\"]").sample_prompts == ("a # b", "c #")


def test_a_pipe_is_refused_since_a_second_reading_would_be_empty(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    writer = os.open(tmp_path / "pipe.yaml", os.O_RDWR)
    try:
        assert "is a pipe" in fault_of(load, PretrainConfig, tmp_path / "pipe.yaml").rule
    finally:
        os.close(writer)
