"""Sizes by name, and the lengths of samples: T5's own numbers, and its definition written down a second time."""

from pathlib import Path
from typing import get_args

import pytest
from configs import config_of, faults_of, loaded

from zerokara.config.data import SampleLengths, causal, with_spans
from zerokara.config.model import SIZES, SizeName
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model.shapes import ModelShape

AUTO = {"num_layers": "auto", "hidden_size": "auto", "num_attn_heads": "auto"}
VOCABULARIES = {"1M": 2000, "3M": 4000, "5M": 8000, "10M": 8000, "20M": 8000, "30M": 8000, "60M": 16_000}


@pytest.mark.parametrize("name", get_args(SizeName))
def test_a_name_says_about_how_many_parameters_there_are(name: SizeName) -> None:
    shape = ModelShape.from_config(config_of(model_size=name, **AUTO), VOCABULARIES.get(name, 32_000))
    said = float(name[:-1]) * (1e9 if name.endswith("B") else 1e6)
    assert shape.num_parameters() == pytest.approx(said, rel=0.13)
    assert 64 <= shape.head_dim <= 128 and 32 <= shape.hidden_size / shape.num_layers <= 128


def sizes_of(config: PretrainConfig) -> tuple[int, ...]:
    return tuple(config.resolved_sizes()[key] for key in ("num_layers", "hidden_size", "num_attn_heads"))


def test_what_is_given_stands() -> None:
    config = config_of(model_size="125M", **{**AUTO, "num_layers": 3})
    assert sizes_of(config) == (3, 768, 12)
    config = config_of(model_size="760M", **{**AUTO, "hidden_size": 1024})
    assert sizes_of(config) == (24, 1024, 16)  # not its 16 heads of 96
    config = config_of(architecture="t5", model_size="60M", **AUTO)
    assert config.resolved_sizes()["num_layers"] == SIZES["60M"].num_layers // 2


def test_numbers_win_over_a_size_by_name_that_was_not_typed(tmp_path: Path) -> None:
    numbers = ["num_layers=3", "hidden_size=96", "num_attn_heads=4"]
    text = "".join(each.replace("=", ": ") + "\n" for each in [*numbers, "model_size=1M"])
    assert sizes_of(loaded(tmp_path, text)) == (3, 96, 4)
    assert sizes_of(loaded(tmp_path, text, *numbers, "model_size=5M")) == (3, 96, 4)
    (fault,) = faults_of(tmp_path, text, "model_size=5M")
    assert (fault.where, fault.key) == ("--set", "model_size")


@pytest.mark.parametrize(
    ("read", "taken", "written", "noise", "spans"),
    [(512, 568, 114, 85, 28), (128, 141, 29, 21, 7), (256, 284, 58, 43, 14), (1024, 1137, 229, 171, 57)],
)
def test_t5s_own_lengths(read: int, taken: int, written: int, noise: int, spans: int) -> None:
    """`written` counts a sentinel for each span and an end; noise is what else there is."""
    found = with_spans(read, 0.15, 3)
    assert found == SampleLengths(taken, read, written, overlap=0, num_noise_tokens=noise, num_spans=spans)
    assert noise + spans + 1 == written and taken - noise + spans + 1 == read


@pytest.mark.parametrize("density", [0.05, 0.15, 0.4, 0.7])
@pytest.mark.parametrize("mean", [1.0, 3.0, 8.5])
def test_every_length_is_met_exactly_by_the_longest_text(density: float, mean: float) -> None:
    for read in range(16, 300, 7):
        found = with_spans(read, density, mean)
        noise = round(found.raw * density)
        exactly = density < 0.5 or mean > 1
        assert found.input in ((read,) if exactly else (read, read - 1)) and found.num_noise_tokens == noise
        assert 1 <= found.num_spans <= min(noise, found.raw - noise)
        assert with_spans(read + 1, density, mean).raw >= found.raw


def test_causal_samples_look_one_token_further() -> None:
    lengths = causal(256)
    assert [lengths.samples_in(tokens) for tokens in (0, 256, 257, 512, 513)] == [0, 0, 1, 1, 2]
    assert with_spans(256, 0.15, 3).samples_in(568) == 2
