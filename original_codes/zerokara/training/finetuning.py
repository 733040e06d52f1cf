"""Fine-tuning before and after the training: the settings of its run, and the test at its end.

A fine-tuning is a run like any other, of `FinetuneRunConfig`: the model's settings come from the folder that it starts
from, its data are the prepared examples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerokara.config.finetune_config import FinetuneConfig, FinetuneRunConfig
from zerokara.errors import UserError
from zerokara.examples import preparation
from zerokara.examples.preparation import ExampleFiles
from zerokara.examples.token_files import ExampleTokens
from zerokara.samples.packing import target_length
from zerokara.tokenizer.encoder import Encoder

MAX_PACKED_LENGTH = 1024
"""Of `packed_length: auto`: longer rows hold more examples, and need a smaller micro batch for the same work."""


def with_model(config: FinetuneConfig) -> FinetuneRunConfig:
    """Return the settings of the run, with those of the model that it starts from. Loads torch.

    Raises:
        UserError: the folder holds no model, or its tokenizer is missing; a setting does not go with the model.
    """
    from zerokara.huggingface import model_settings

    folder = Path(config.init_from)
    values: dict[str, Any] = {**config.model_dump(), **model_settings.read(folder, config.fault)}
    if config.input_tokenizer_file == "auto":
        values["input_tokenizer_file"] = model_settings.tokenizer_of(folder, config.fault)
    if config.packed_length == "auto":
        values["packed_length"] = min(values["seq_len"], MAX_PACKED_LENGTH)
    made = FinetuneRunConfig(**values, intra_document_masking=True)
    made._origin = config._origin
    faults = list(made.rule_faults(set()))
    if not made.traits.is_encoder_decoder and values["packed_length"] > made.seq_len:
        rule = f"is longer than the model's context, {made.seq_len} tokens"
        faults.append(config.fault("packed_length", rule, f"set it to {made.seq_len}, or auto"))
    if faults:
        raise UserError(faults)
    return made


def prepared(config: FinetuneRunConfig, redo: bool = False) -> FinetuneRunConfig:
    """Write the token files of the examples, where they are not there yet; return the settings that go with them.

    Raises:
        UserError: the examples cannot be used; names file, line, value and remedy.
    """
    assert config.packed_length != "auto"
    files = preparation.prepare(
        config,
        Encoder(config.input_tokenizer_file),
        is_encoder_decoder=config.traits.is_encoder_decoder,
        packed_length=config.packed_length,
        redo=redo,
    )
    return with_examples(config, files)


def with_examples(config: FinetuneRunConfig, files: ExampleFiles) -> FinetuneRunConfig:
    """Return the settings with the length of a decoder target that the examples need."""
    if not config.traits.is_encoder_decoder:
        return config
    assert config.packed_length != "auto"
    tokens = ExampleTokens(files.train.prefix)
    length = target_length(tokens.read_lengths, tokens.learned_lengths, config.packed_length)
    made = config.model_copy(update={"packed_target_length": length})
    made._origin = config._origin
    return made
