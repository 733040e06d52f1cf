"""Strict loading: every fault at once, with file, line, value, rule and remedy (U2)."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from zerokara.config.convert_config import ConvertConfig
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.refresh import class_for
from zerokara.config.rendering import as_yaml, help_text
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.errors import UserError
from zerokara.training.planning.schedule import Schedule

ROOT = Path(__file__).resolve().parents[3]


def faults_of(
    tmp_path: Path, text: str, config_class: type = PretrainConfig, overrides: tuple[str, ...] = ()
) -> list[str]:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load(config_class, path, overrides)
    return [str(fault).replace(str(tmp_path) + "/", "") for fault in caught.value.faults]


def test_every_fault_is_told_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = "lr: 6e-4\nlr: 3\nhiden_size: 5\nhidden_size: 250\nmicro_batch_size: abc\nepochs: -1\nnum_kv_heads: 3\n"
    assert faults_of(tmp_path, text) == [
        "config.yaml:2: lr: stands twice, first at line 1; keep one",
        "config.yaml:3: hiden_size = 5: there is no such setting; did you mean hidden_size?",
        "config.yaml:4: hidden_size = 250: must be a multiple of num_attn_heads = 4; try 248 or 252, or give head_dim",
        "config.yaml:5: micro_batch_size = abc: must be a whole number or 'auto'; "
        "write a number without quotes or units",
        "config.yaml:6: epochs = -1: must be greater than 0",
        "config.yaml:7: num_kv_heads = 3: must divide num_attn_heads = 4; one of [1, 2, 4]",
    ]


def test_what_cannot_be_shared_by_processes_is_told(tmp_path: Path) -> None:
    layers = "hidden_size: 96\nnum_attn_heads: 8\nnum_kv_heads: 2\nffn_hidden_size: 100\n"
    shared = "must divide num_attn_heads, num_kv_heads, ffn_hidden_size"
    assert faults_of(tmp_path, layers + "tensor_parallel_size: 8\n") == [
        f"config.yaml:5: tensor_parallel_size = 8: {shared}: num_kv_heads = 2 and ffn_hidden_size = 100 cannot be "
        "shared by 8 processes; one of [1, 2]"
    ]
    text = layers + "tensor_parallel_size: 2\nnum_processes: 3\n"
    assert faults_of(tmp_path, text) == [
        "config.yaml:5: tensor_parallel_size = 2: must divide the number of processes, 3; "
        "lower it, or change num_processes"
    ]
    text = layers + "tensor_parallel_size: 2\nnum_processes: 4\nglobal_batch_size: 8\nmicro_batch_size: 4\n"
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    load(PretrainConfig, tmp_path / "config.yaml")  # two readers of four sequences, each of two processes


def test_global_batch_is_explained_with_numbers(tmp_path: Path) -> None:
    text = "global_batch_size: 500\nmicro_batch_size: 8\nnum_processes: 4\n"
    (fault,) = faults_of(tmp_path, text)
    assert fault == (
        "config.yaml:1: global_batch_size = 500: must be a multiple of micro_batch_size × processes = 8 × 4 = 32; "
        "try 480 or 512"
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("tie_word_embeddings: yes\n", "tie_word_embeddings = yes: must be true or false or 'auto'; write true"),
        ("wandb: maybe\n", "wandb = maybe: must be 'off', 'offline' or 'online'"),
        ("min_lr: 1\n", "min_lr = 1.0: must be at most lr = 0.001; try 0.0001"),
        ("train_tokens: 1.5\n", "train_tokens = 1.5: must be a whole number or 'auto'"),
        ("hidden_size: 12\n", "hidden_size = 12: must give heads of even width for rotary positions; they have 3"),
        ("architecture: gpt2\nnum_kv_heads: 2\n", "must be auto for architecture gpt2"),
        ("architecture: t5\nintra_document_masking: true\n", "must be false for architecture t5, whose gaps may reach"),
        ("relative_attention_num_buckets: 30\n", "must be a multiple of 4"),
        ("architecture: t5\nrelative_attention_max_distance: 16\n", "must be more than 16: half of"),
        ("architecture: t5\nseq_len: 2\n", "must be at least 3: a token, the sentinel of a gap, and an end"),
        ("head_dim: 7\n", "head_dim = 7: must give heads of even width"),
        (
            "keep_every: 150\nsave_interval: 100\n",
            "keep_every = 150: must be a multiple of save_interval = 100; try 200",
        ),
        ("valid_fraction: 0.9\n", "valid_fraction = 0.9: must be at most 0.5"),
        ("lr: .nan\n", "lr = nan: must be"),
        ("- a\n- b\n", "config.yaml:1: must be a list of `key: value` lines"),
        ("lr: [1\n", "is not valid YAML"),
    ],
)
def test_message(tmp_path: Path, text: str, fault: str) -> None:
    assert any(fault in found for found in faults_of(tmp_path, text))


def test_tokenizer_and_convert_rules(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, "vocab_size: 400\nextra_ids: 200\n", TokenizerConfig)
    assert "vocab_size = 400: must be greater than the 461 pieces that are fixed" in fault
    (fault,) = faults_of(tmp_path, "character_coverage: 0.95\n", TokenizerConfig)
    assert "character_coverage = 0.95: must be at least 0.98" in fault
    (fault,) = faults_of(tmp_path, "huggingface_name: only-a-name\n", ConvertConfig)
    assert "must be user/name" in fault
    (fault,) = faults_of(tmp_path, "user_defined_symbols: ['</s>']\n", TokenizerConfig)
    assert "which is a piece already" in fault


def test_overrides_win_and_are_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("lr: 1e-3\n", encoding="utf-8")
    assert load(PretrainConfig, path, ["lr=6e-4", "train_tokens=1e9"]).lr == 6e-4
    faults = faults_of(tmp_path, "lr: 1e-3\n", overrides=("lr=-1", "nonsense"))
    assert "--set: lr = -1: must be greater than 0" in faults
    assert "--set: nonsense: must be key=value; e.g. --set lr=3e-4" in faults


@pytest.mark.parametrize(
    ("override", "where", "key"),
    [
        ("lr=abc", "--set", "lr"),
        (" lr = abc", "--set", "lr"),
        ("hiden_size=8", "--set", "hiden_size"),
        ("stages=[{tokens: 5, order: up}]", "--set", "stages[0].order"),  # stands in the file as well
        ("stages=[{tokens: 5, source_weights: [1, 2]}]", "--set", "stages[0].source_weights"),
        ("=5", "--set", None),
        ("num_attn_heads=5", "config.yaml:1, --set num_attn_heads", "hidden_size"),
        ("num_processes=3", "config.yaml, --set num_processes", "global_batch_size"),
        ("lr=1e-6", "config.yaml:2, --set lr", "min_lr"),
    ],
)
def test_a_fault_that_the_command_line_made_cites_it(
    tmp_path: Path, override: str, where: str, key: str | None
) -> None:
    path = tmp_path / "config.yaml"
    text = "hidden_size: 256\nmin_lr: 1e-4\nstages:\n  - {tokens: 5, source_weights: [1], order: shuffle}\n"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load(PretrainConfig, path, [override])
    (fault,) = caught.value.faults
    assert (fault.where.replace(f"{tmp_path}/", ""), fault.key) == (where, key)


def test_a_fault_of_the_file_does_not_cite_the_command_line(tmp_path: Path) -> None:
    text = "lr: 1e-3\nmin_lr: 1\nhidden_size: 250\n"
    overrides = ("seed=5", "num_attn_heads=4", "lr=0.01")
    places = {fault.split(": ")[0] for fault in faults_of(tmp_path, text, overrides=overrides)}
    # min_lr is too large for the file's lr too, but it is the other one's value that is told.
    assert places == {"config.yaml:2, --set lr", "config.yaml:3"}


def test_a_later_check_cites_the_command_line_too(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("warmup_steps: 50\nmax_steps: 100\nglobal_batch_size: 8\n", encoding="utf-8")
    with pytest.raises(UserError) as caught:
        Schedule.from_config(load(PretrainConfig, path, ["max_steps=20"]), 10**6)
    assert caught.value.faults[0].where == f"{path}:1, --set max_steps"
    assert (
        load(PretrainConfig, path, ["max_steps=20"])
        .fault("warmup_steps", "is no max_steps")
        .where.endswith("max_steps")
    )
    assert load(PretrainConfig, path, ["warmup_steps=20"]).fault("warmup_steps", "is no max_steps").where == "--set"


def test_numbers_and_lists_read_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("\ufefflr: 6e-4\ntrain_tokens: 2.5e9\ninput_jsonl: one.jsonl\n", encoding="utf-8")
    config = load(PretrainConfig, path)
    assert (config.lr, config.train_tokens, config.input_jsonl) == (6e-4, 2_500_000_000, ("one.jsonl",))


def test_missing_file_names_the_option() -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml: there is no such configuration file; name one with --config"):
        load(PretrainConfig, "nowhere.yaml")


@pytest.mark.parametrize("config_class", [PretrainConfig, TokenizerConfig, ConvertConfig])
def test_saved_config_loads_to_an_equal_object(tmp_path: Path, config_class: type) -> None:
    overrides = ["lr=6e-4"] if config_class is PretrainConfig else []
    config = load(config_class, "/dev/null", overrides)
    path = tmp_path / "saved.yaml"
    path.write_text(as_yaml(config), encoding="utf-8")
    assert load(config_class, path) == config
    assert (load(config_class, path, ["test_prompt_text=[x]"]) if config_class is ConvertConfig else 0) != config


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("*.yaml"), *ROOT.glob("model_configs/*.yaml")]), ids=lambda p: p.name
)
def test_shipped_yaml_loads_and_its_comments_are_the_docstrings(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == as_yaml(load(class_for(path), path))


def test_help_tells_every_setting() -> None:
    text = help_text(PretrainConfig)
    assert all(f"  {key}: " in text for key in PretrainConfig.model_fields)
    assert "Highest learning rate." in text


def test_every_setting_has_a_docstring() -> None:
    for config_class in (PretrainConfig, TokenizerConfig, ConvertConfig):
        for key, field in config_class.model_fields.items():
            assert field.description, f"{config_class.__name__}.{key}"


@pytest.mark.parametrize("module", ["train_tokenizer", "tokenize", "count_tokens", "train", "convert_to_hf", "upload"])
def test_a_wrong_config_answers_before_torch_is_imported(tmp_path: Path, module: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("no_such_key: 1\n", encoding="utf-8")
    code = (
        f"import sys; from zerokara.steps import {module} as step\n"
        f"code = step.main(['--config', {str(path)!r}])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert 'transformers' not in sys.modules, 'transformers was imported'\n"
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT / "original_codes"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "no_such_key = 1: there is no such setting" in done.stderr


@pytest.mark.parametrize(("text", "word"), [("[@files.txt]", "@files.txt"), ("*.jsonl", "*.jsonl"), ("%x", "%x")])
def test_a_value_that_must_be_quoted(tmp_path: Path, text: str, word: str) -> None:
    (in_file,) = faults_of(tmp_path, f"lr: 1\ninput_jsonl: {text}\n")
    assert in_file.startswith("config.yaml:2: ") and in_file.endswith(f'put it in quotes: "{word}"')
    (on_line,) = faults_of(tmp_path, "lr: 1\n", overrides=(f"input_jsonl={text.strip('[]')}",))
    assert on_line.startswith("--set: input_jsonl = ") and on_line.endswith(f'put it in quotes: "{word}"')


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij"))


@pytest.mark.parametrize("config_class", [PretrainConfig, TokenizerConfig, ConvertConfig])
@pytest.mark.parametrize(
    ("text", "place", "rule"),
    [
        ("lr: !!python/object/apply:os.mkdir [made]\n", ":1", "has a tag (tag:yaml.org,2002:python/object"),
        ("# mine\n!foo\nlr: 1\n", ":2", "has a tag (!foo)"),
        (BOMB, ":1", "mark of an alias (*) or an anchor (&)"),
        ("lr: &a [*a]\n", ":1", "mark of an alias (*) or an anchor (&)"),
        ("stages: [{<<: {order: shuffle}}]\n", ":1", "has a merge key (<<)"),
        ("stages: [{? [a, b] : 1}]\n", ":1", "has a list or a mapping as a key"),
        ("\ninput: " + "[" * 100_000, ":2", "has lists or mappings in more than 8 levels"),
        ("".join(f"{' ' * level}a:\n" for level in range(600)), ":8", "has lists or mappings in more than 8 levels"),
        ("input: [" + "a," * 100_000 + "]\n", ":1", "has more than 10,000 values"),
        ("".join(f"k{number}: 1\n" for number in range(1000)), "", "has 1,000 settings that are unknown here"),
        ("a: " + "1" * 1_000_000, "", "is larger than 256 kB"),
        ("lr: 2024-13-45\n", ":1", "lr: is no value of YAML (month"),
    ],
)
def test_what_is_more_than_plain_yaml_is_one_fault_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config_class: type, text: str, place: str, rule: str
) -> None:
    monkeypatch.chdir(tmp_path)
    started = time.process_time()
    fault = faults_of(tmp_path, text, config_class)[0]
    assert time.process_time() - started < 1
    assert fault.startswith(f"config.yaml{place}: ") and rule in fault and len(fault) < 700
    assert not Path("made").exists()


def test_an_endless_file_is_no_configuration() -> None:
    with pytest.raises(UserError, match="/dev/zero: is larger than 256 kB"):
        load(PretrainConfig, "/dev/zero")


@pytest.mark.parametrize("value", ["!foo 1", "&a 1", "2024-13-45", "[" * 9 + "1" + "]" * 9])
def test_a_value_of_the_command_line_is_plain_too(tmp_path: Path, value: str) -> None:
    (fault,) = faults_of(tmp_path, "", overrides=(f"lr={value}",))
    assert fault.startswith("--set: lr = ") and "is not a YAML value" in fault
