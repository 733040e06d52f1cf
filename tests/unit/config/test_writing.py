"""Configuration files that are written: by the program, and changed in the user's."""

from pathlib import Path
from typing import Any

import pytest
from configs import loaded

from zerokara.base.errors import RunError, UserError
from zerokara.config.convert_config import ConvertConfig
from zerokara.config.finetune_config import FinetuneConfig
from zerokara.config.loading import FILES, load, read_value
from zerokara.config.model import RopeScaling
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.settings import Settings
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.config.writing import as_yaml, help_text, value_text, write_values

ROOT = Path(__file__).resolve().parents[3]
TEXT = """# A run of mine.
train_tokens: auto   # as long as it takes
lr : "auto"
model_size:
stages: [{tokens: 8e6}]  # lr: 3 is no setting here
#lr: 0.5
seed: 7"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(TEXT.replace("model_size:\n", "model_size: ''\n"), encoding="utf-8")
    return path


def test_values_change_and_nothing_else(config: Path) -> None:
    before = config.read_text(encoding="utf-8")
    write_values(
        config, {"train_tokens": 1234, "lr": 0.0125, "model_size": "5M", "num_layers": "auto", "adam_epsilon": 1e-09}
    )
    after = config.read_text(encoding="utf-8")
    expected = before.replace("train_tokens: auto ", "train_tokens: 1234 ").replace('lr : "auto"', "lr : 0.0125")
    assert after == expected.replace("model_size: ''", "model_size: 5M") + "\nnum_layers: auto\nadam_epsilon: 1e-09\n"
    found = load(PretrainConfig, config)
    assert (found.train_tokens, found.lr, found.model_size, found.seed) == (1234, 0.0125, "5M", 7)
    said = write_values(config, {"model_size": "", "num_layers": 6, "seed": 7})
    assert said == f"written: {config}; replaced model_size: 5M → ''; num_layers: auto → 6"
    assert load(PretrainConfig, config).model_size == ""
    assert [path.name for path in config.parent.iterdir()] == ["config.yaml"]


SCALING = RopeScaling(
    rope_type="llama3", factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=64
)


@pytest.mark.parametrize(
    "old",
    [
        "",
        "rope_scaling:   # mine\n",
        "'rope_scaling': {rope_type: linear, # mine\n  factor: 2}\n",
        "rope_scaling:\n  # mine\n  rope_type: linear\n  factor: 2\n",
        "rope_scaling:\n  rope_type: linear # mine\n  factor: 2\n\n",
    ],
)
@pytest.mark.parametrize("layers", ["", "moe_layers: [0]\n", "moe_layers:\n- 0 # one\n- 1\n# end\n"])
def test_mappings_and_lists_are_written_over_whatever_stood_there(tmp_path: Path, old: str, layers: str) -> None:
    path, rest = tmp_path / "config.yaml", "# of mine\nseed: 7 # kept\n"
    path.write_text(f"{layers}{old}{rest}architecture: qwen3_moe\nnum_layers: 4\n", encoding="utf-8")
    write_values(path, {"rope_scaling": SCALING, "moe_layers": (1, 3), "seq_len": 128, "lr": "auto"})
    after, found = path.read_text(encoding="utf-8"), load(PretrainConfig, path)
    assert (found.rope_scaling, found.moe_layers, found.seq_len, found.seed) == (SCALING, (1, 3), 128, 7)
    assert rest in after and all(
        after.count(mark) == (layers + old).count(mark) for mark in ("# mine", "# one", "# end")
    )
    write_values(path, {"rope_scaling": None})
    assert load(PretrainConfig, path).rope_scaling is None


@pytest.mark.parametrize("block", ["{seed: 1}\n", "seed: 1\n...\n"])
def test_what_would_touch_something_else_is_left_as_it_was(config: Path, block: str) -> None:
    config.write_text(block, encoding="utf-8")
    with pytest.raises(RunError, match=r"write by hand: lr: 0\.5"):
        write_values(config, {"lr": 0.5})
    assert config.read_text(encoding="utf-8") == block


def test_a_value_that_breaks_a_rule_is_not_written(config: Path) -> None:
    before = config.read_bytes()
    with pytest.raises(UserError, match="min_lr"):
        write_values(config, {"lr": 1e-9, "min_lr": 0.1})
    assert config.read_bytes() == before


@pytest.mark.parametrize(
    ("config_class", "override"),
    [
        (PretrainConfig, "lr=6e-4"),
        (FinetuneConfig, "label_words={0: no}"),
        (FinetuneConfig, "label_words={'a: b': 'no', 1: \"it's\"}"),
        (TokenizerConfig, "input=x"),
        (ConvertConfig, "test_prompt_text=[x]"),
    ],
)
def test_saved_config_loads_to_an_equal_object(tmp_path: Path, config_class: type, override: str) -> None:
    config = loaded(tmp_path, "", override, of=config_class)
    assert loaded(tmp_path, as_yaml(config), of=config_class) == config != config_class()


@pytest.mark.parametrize(
    "path", sorted([*ROOT.glob("[!.]*.yaml"), *ROOT.glob("model_configs/*.yaml")]), ids=lambda p: p.name
)
def test_shipped_yaml_loads_and_its_comments_are_the_docstrings(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == as_yaml(
        load(next(FILES[name] for name in FILES if path.name.endswith(name)), path)
    )


SHORT_RUN = ("model_size", "num_layers", "hidden_size", "num_attn_heads", "epochs", "sample_prompts")
OF_ITS_OWN = {
    "config.yaml": (*SHORT_RUN, "log_interval", "eval_interval", "save_interval"),
    "sentence_piece_config.yaml": ("vocab_size",),
    "finetune_config.yaml": ("muon_momentum",),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_shipped_is_the_default_but_for_what_makes_the_first_run_short(name: str) -> None:
    shipped, default = load(FILES[name], ROOT / name).model_dump(), FILES[name]().model_dump()
    assert {key for key in shipped if shipped[key] != default[key]} == {*OF_ITS_OWN.get(name, ())}


@pytest.mark.parametrize("config_class", [PretrainConfig, FinetuneConfig])
def test_what_most_people_change_stands_first_and_every_setting_once(config_class: type[Settings]) -> None:
    text = as_yaml(config_class())
    keys = [line.partition(":")[0] for line in text.splitlines() if line and line[0] not in "# "]
    assert tuple(keys[: len(config_class.first)]) == config_class.first
    assert sorted(keys) == sorted(config_class.model_fields)
    told = help_text(config_class)
    assert all(f"  {key}: " in told for key in keys)


def test_a_docstring_that_is_not_repeated_leaves_out_an_auto_that_is_not_accepted() -> None:
    text = " ".join(help_text(FinetuneConfig).split())
    assert "warmup_fraction: 0.05 Warm-up: share of the steps over which the learning rate rises to lr. warm" in text
    assert "Learning rate at the last step; `auto` is 0." in " ".join(help_text(PretrainConfig).split())


@pytest.mark.parametrize(
    "value",
    ["?.jsonl", ["? a", "Who?"], {"?n": 1.5, "x": "?"}, ["a\x85b\u2028c\u2029d 𝄞"], [{"name": "?", "tokens": 1e-08}]],
)
def test_a_text_that_yaml_reads_otherwise_is_in_quotes(value: Any) -> None:
    text = value_text(value)
    assert "\n" not in text and read_value(text) == value
