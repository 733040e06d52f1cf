"""The ready sets of model_configs/: each is whole, its steps fit together, and sets that share a file agree on it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from zerokara.config.convert_config import ConvertConfig
from zerokara.config.data import DataSettings
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.errors import UserError
from zerokara.steps import preflight

ROOT = Path(__file__).resolve().parents[3]
KINDS = {"sentence_piece": TokenizerConfig, "": PretrainConfig, "convert": ConvertConfig}
STEP_2 = DataSettings.model_fields.keys() - {"num_workers"}


def names() -> list[str]:
    """Whatever a file in model_configs/ begins with, before its kind."""
    endings = sorted((f"{kind}_config.yaml".lstrip("_") for kind in KINDS), key=len, reverse=True)
    found = set()
    for path in (ROOT / "model_configs").iterdir():
        ending = next(ending for ending in endings if path.name.endswith(f"_{ending}"))
        found.add(path.name.removesuffix(f"_{ending}"))
    return sorted(found)


def files(name: str) -> list[Path]:
    return [ROOT / "model_configs" / "_".join(filter(None, (name, kind, "config.yaml"))) for kind in KINDS]


def loaded(name: str) -> tuple[TokenizerConfig, PretrainConfig, ConvertConfig]:
    tokenizer, training, converting = files(name)
    return (
        load(TokenizerConfig, tokenizer),
        load(PretrainConfig, training),
        load(ConvertConfig, converting),
    )


@pytest.mark.parametrize("name", names())
def test_a_set_is_whole_and_its_steps_fit_together(name: str) -> None:
    assert [path.name for path in files(name) if not path.is_file()] == []
    tokenizer, training, converting = loaded(name)
    assert list(preflight.chain_faults(tokenizer, training, converting)) == []
    assert tokenizer.input == training.input_jsonl
    assert (training.output_model_dir, converting.output_tokenizer_and_model_dir) == (
        f"models/{name}",
        f"models/{name}_hf",
    )
    assert (tokenizer.extra_ids > 0) == training.traits.is_encoder_decoder
    prompts = [
        each for some in (converting.test_prompt_text, training.sample_prompts) if some != "auto" for each in some
    ]
    assert all(("<extra_id_0>" in prompt) == training.traits.is_encoder_decoder for prompt in prompts)


def test_what_two_sets_write_to_one_place_is_the_same() -> None:
    """One tokenizer, or the tokens of one text, made for several sets: the second finds its step done."""
    made: dict[str, list[Any]] = defaultdict(list)
    for name in names():
        tokenizer, training, _ = loaded(name)
        made[tokenizer.output_dir].append(tokenizer.model_dump())
        made[training.output_prefix].append(training.model_dump(include=set(STEP_2)))
    shared = {place for place, each in made.items() if len(each) > 1}
    assert shared == {"tokenizers/t5_32k", "data/corpus/t5_tokens", "tokenizers/ko_moe_16k", "data/ko/moe_tokens"}
    for place in shared:
        assert all(each == made[place][0] for each in made[place]), place


def write(folder: Path, **changed: str) -> list[str]:
    texts = {
        "sentence_piece_config": "output_dir: here/tokenizer\n",
        "config": "input_tokenizer_file: ./here/tokenizer/tokenizer.model\noutput_model_dir: here/run\n",
        "convert_config": "input_model_dir: here/run/\n",
        **changed,
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return [str(folder / f"{name}.yaml") for name in texts]


def test_what_a_step_reads_is_what_the_one_before_it_wrote(tmp_path: Path) -> None:
    preflight.check_line(write(tmp_path))
    preflight.check_line(write(tmp_path, convert_config="input_model_dir: here/run/global_step20\n"))
    with pytest.raises(UserError) as caught:
        preflight.check_line(
            write(
                tmp_path,
                config="output_model_dir: here/run\ninput_tokenizer_file: there/tokenizer.model\n",
                convert_config="input_model_dir: here/another\n",
            )
        )
    reported = [(fault.where, fault.key, fault.value) for fault in caught.value.faults]
    assert reported == [
        (f"{tmp_path}/config.yaml:2", "input_tokenizer_file", "there/tokenizer.model"),
        (f"{tmp_path}/convert_config.yaml:1", "input_model_dir", "here/another"),
    ]
    assert [fault.remedy.split(",")[0] for fault in caught.value.faults] == [
        "write here/tokenizer/tokenizer.model",
        "write here/run",
    ]


def test_the_faults_of_all_three_files_are_told(tmp_path: Path) -> None:
    wrong = {
        "sentence_piece_config": "vocab_size: many\n",
        "config": "num_layer: 2\n",
        "convert_config": "dtype: fp64\n",
    }
    with pytest.raises(UserError) as caught:
        preflight.check_line(write(tmp_path, **wrong))
    assert [fault.key for fault in caught.value.faults] == ["vocab_size", "num_layer", "dtype"]
