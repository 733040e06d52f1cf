"""The ready sets of model_configs/: each is whole, its steps fit together, and sets that share a file agree on it."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from zerokara.base.errors import Fault, UserError
from zerokara.config.convert_config import ConvertConfig
from zerokara.config.data import DataSettings
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.steps import preflight

ROOT = Path(__file__).resolve().parents[3]
KINDS = {"sentence_piece": TokenizerConfig, "": PretrainConfig, "convert": ConvertConfig}
STEP_2 = DataSettings.model_fields.keys() - {"num_workers"}


def names() -> list[str]:
    """What the files in model_configs/ begin with, before the kind."""
    ending = re.compile(r"_(sentence_piece_|convert_)?config\.yaml")
    return sorted({ending.sub("", path.name) for path in (ROOT / "model_configs").iterdir()})


def files(name: str) -> list[Path]:
    return [ROOT / "model_configs" / "_".join(filter(None, (name, kind, "config.yaml"))) for kind in KINDS]


def loaded(name: str) -> list[Any]:
    return [load(kind, path) for kind, path in zip(KINDS.values(), files(name), strict=True)]


@pytest.mark.parametrize("name", names())
def test_a_set_is_whole_and_its_steps_fit_together(name: str) -> None:
    assert [path.name for path in files(name) if not path.is_file()] == []
    tokenizer, training, converting = loaded(name)
    preflight.check_line(list(map(str, files(name))))
    assert tokenizer.input == training.input_jsonl
    assert training.output_model_dir == f"models/{name}"
    assert converting.output_tokenizer_and_model_dir == f"models/{name}_hf"
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


def line_faults(folder: Path, **changed: str) -> list[Fault]:
    """The faults of three files that fit together but for what is changed."""
    texts = {
        "sentence_piece_config": "output_dir: here/tokenizer\n",
        "config": "input_tokenizer_file: ./here/tokenizer/tokenizer.model\noutput_model_dir: here/run\n",
        "convert_config": "input_model_dir: here/run/\n",
        **changed,
    }
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    try:
        preflight.check_line([str(folder / f"{name}.yaml") for name in texts])
    except UserError as error:
        return list(error.faults)
    return []


def test_what_a_step_reads_is_what_the_one_before_it_wrote(tmp_path: Path) -> None:
    assert line_faults(tmp_path) == []
    assert line_faults(tmp_path, convert_config="input_model_dir: here/run/global_step20\n") == []
    first, second = line_faults(
        tmp_path,
        config="output_model_dir: here/run\ninput_tokenizer_file: there/tokenizer.model\n",
        convert_config="input_model_dir: here/another\n",
    )
    assert (first.where, first.key) == (f"{tmp_path}/config.yaml:2", "input_tokenizer_file")
    assert (second.where, second.key) == (f"{tmp_path}/convert_config.yaml:1", "input_model_dir")
    assert (first.value, second.value) == ("there/tokenizer.model", "here/another")
    assert "here/tokenizer/tokenizer.model" in first.remedy and "here/run" in second.remedy


def test_the_faults_of_all_three_files_are_told_at_once(tmp_path: Path) -> None:
    wrong = {
        "sentence_piece_config": "vocab_size: many\n",
        "config": "num_layer: 2\n",
        "convert_config": "dtype: fp64\n",
    }
    assert [fault.key for fault in line_faults(tmp_path, **wrong)] == ["vocab_size", "num_layer", "dtype"]
    places = {
        "sentence_piece_config": "output_dir: /proc/tokenizer\n",
        "config": "input_tokenizer_file: /proc/tokenizer/tokenizer.model\noutput_prefix: /proc/tokens\n"
        "output_model_dir: /proc/run\n",
        "convert_config": "input_model_dir: /proc/run\noutput_tokenizer_and_model_dir: /proc/hf\n",
    }
    found = [fault.key for fault in line_faults(tmp_path, **places)]
    assert found == ["output_dir", "output_prefix", "output_model_dir", "output_tokenizer_and_model_dir"]
