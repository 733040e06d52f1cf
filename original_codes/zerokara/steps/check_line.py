"""Check the three YAML files of a pipeline at once, before any of its steps spends hours (`run_all.sh`).

``python -m zerokara.steps.check_line sentence_piece_config.yaml config.yaml convert_config.yaml``: each file is checked
as its steps would, each step must read what the one before it writes, and all outputs must be writable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from zerokara.config.convert_config import ConvertConfig
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.settings import Settings
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.errors import Fault, UserError, guarded
from zerokara.steps import outputs

_Config = TypeVar("_Config", bound=Settings)
_ONE_BY_ONE = "or run the steps one by one"


def check_line(paths: Sequence[str]) -> None:
    """Check the files of steps 1, 2 to 3, and 4 to 6, and print that they are in order.

    Raises:
        UserError: with the faults of all three.
    """
    faults: list[Fault] = []
    tokenizer = _load(TokenizerConfig, paths[0], faults)
    training = _load(PretrainConfig, paths[1], faults)
    converting = _load(ConvertConfig, paths[2], faults)
    if tokenizer and training and converting:
        faults += chain_faults(tokenizer, training, converting)
        faults += outputs.of_line(tokenizer, training, converting)
    if faults:
        raise UserError(faults)
    for path in paths:
        print(f"{path}: in order")


def chain_faults(tokenizer: TokenizerConfig, training: PretrainConfig, converting: ConvertConfig) -> Iterator[Fault]:
    """The faults of a step that does not read what the step before it writes."""
    made = Path(tokenizer.output_dir) / "tokenizer.model"
    if not _same(training.input_tokenizer_file, made):
        rule = f"is not the tokenizer of step 1, {made} (output_dir, {tokenizer.where('output_dir')})"
        yield training.fault("input_tokenizer_file", rule, f"write {made}, {_ONE_BY_ONE}")
    run = Path(training.output_model_dir)
    checkpoint = Path(converting.input_model_dir)
    if not (_same(checkpoint, run) or _same(checkpoint.parent, run)):
        rule = f"is not the run of step 3, {run} (output_model_dir, {training.where('output_model_dir')})"
        yield converting.fault("input_model_dir", rule, f"write {run}, {_ONE_BY_ONE}")


def _load(config_class: type[_Config], path: str, faults: list[Fault]) -> _Config | None:
    try:
        return load(config_class, Path(path))
    except UserError as error:
        faults += error.faults
        return None


def _same(one: str | Path, other: str | Path) -> bool:
    return os.path.abspath(one) == os.path.abspath(other)


if __name__ == "__main__":
    sys.exit(guarded(lambda: check_line(sys.argv[1:4])))
