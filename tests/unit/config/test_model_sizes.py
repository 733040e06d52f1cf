from __future__ import annotations

from typing import get_args

import pytest
from configs import config_of

from zerokara.config.architectures import SIZES, SizeName
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.errors import UserError
from zerokara.model.shapes import ModelShape

AUTO = {"num_layers": "auto", "hidden_size": "auto", "num_attn_heads": "auto"}
VOCABULARIES = {"1M": 2000, "3M": 4000, "5M": 8000, "10M": 8000, "20M": 8000, "30M": 8000, "60M": 16_000}


@pytest.mark.parametrize("name", get_args(SizeName))
def test_a_name_says_about_how_many_parameters_there_are(name: SizeName) -> None:
    shape = ModelShape.from_config(config_of(model_size=name, **AUTO), VOCABULARIES.get(name, 32_000))
    said = float(name[:-1]) * (1e9 if name.endswith("B") else 1e6)
    assert shape.num_parameters() == pytest.approx(said, rel=0.13)
    assert 64 <= shape.head_dim <= 128 and 32 <= shape.hidden_size / shape.num_layers <= 128


def test_every_name_has_a_shape_and_they_grow() -> None:
    assert tuple(SIZES) == get_args(SizeName)
    assert [size.hidden_size for size in SIZES.values()] == sorted({size.hidden_size for size in SIZES.values()})


def sizes_of(config: PretrainConfig) -> tuple[int, ...]:
    return tuple(config.resolved_sizes()[key] for key in ("num_layers", "hidden_size", "num_attn_heads"))


def test_what_is_given_stands() -> None:
    config = config_of(model_size="125M", **{**AUTO, "num_layers": 3})
    assert sizes_of(config) == (3, 768, 12)
    config = config_of(model_size="760M", **{**AUTO, "hidden_size": 1024})
    assert sizes_of(config) == (24, 1024, 16)  # not its 16 heads of 96
    config = config_of(architecture="t5", model_size="60M", **AUTO)
    assert config.resolved_sizes()["num_layers"] == SIZES["60M"].num_layers // 2


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        ({"model_size": "125M"}, "model_size", "has no effect"),
        ({"hidden_size": "auto"}, "hidden_size", "model_size, which is empty"),
        ({**AUTO, "model_size": "5M", "head_dim": "auto", "hidden_size": 200}, "hidden_size", "multiple"),
    ],
)
def test_a_size_is_given_once(settings: dict[str, str], key: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        config_of(**settings)
    (fault,) = caught.value.faults
    assert fault.key == key and said in fault.rule
