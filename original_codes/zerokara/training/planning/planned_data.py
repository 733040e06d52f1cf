"""What a run trains on and validates with, as a value; and the data of pretraining: the token files of a corpus."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerokara.config.pretrain_config import PretrainConfig, RunConfig
from zerokara.samples.data_plan import DataPlan
from zerokara.samples.evaluation import DocumentBatches, SampleBatches, evaluation_batches
from zerokara.samples.example_data import ExampleBatches
from zerokara.samples.objective import Objective, objective
from zerokara.samples.pairs import Pairs
from zerokara.samples.reading import Reading
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.count import check_belongs, entropy, token_counts
from zerokara.tokens.indexed import IndexedTokens
from zerokara.tokens.layout import TokenPaths

_TEXT_ENDING, _VALID_ENDING = "_text_document.bin", "_valid_text_document.bin"

RunObjective = Objective | Pairs
"""What turns samples into model inputs and targets."""


@dataclass(frozen=True)
class PlannedData:
    """The data of a run."""

    reading: Reading
    """The training samples and their order."""
    objective: RunObjective
    """Turns samples into model inputs and targets."""
    validation_batches: Callable[[Path, int | None], DocumentBatches | SampleBatches | ExampleBatches]
    """Opens the batches of token files, or of their first tokens, so many at most."""
    sha256: str
    """One hash for the training data, by which a run knows them again."""
    valid_sha256: str
    """The same of the validation data; empty without any."""
    train_prefix: Path
    """Prefix of the .bin and .idx of the training tokens."""
    valid_prefix: Path
    """The same of the validation tokens, which need not be there."""
    num_train_tokens: int
    num_valid_tokens: int
    unigram_entropy: float
    """Nats per token of a model that knows only the frequency of each predicted token: the baseline of the loss."""
    plan_rows: tuple[tuple[str, str], ...] = ()
    """Further rows of the plan, by name."""
    run_files: Mapping[str, str] = field(default_factory=dict)
    """Texts that belong into the run folder, by file name."""


@dataclass(frozen=True)
class Task:
    """What a run is for. Pretraining is one; a room above adds its own."""

    title: str
    """What the step is called at the head of its plan."""
    config_class: type[RunConfig]
    data_of: Callable[[Any, Encoder], PlannedData]
    """Opens the data that such settings name."""
    worker: str
    """The module that is run as a training process."""
    saves_every_best: bool = False
    """Whether `keep_best` saves each time a validation finds a better model, and not only at `save_interval`."""
    finish: Callable[[Any, Any, Path], list[tuple[str, str]]] = lambda plan, commands, newest: []
    """Called with the plan, the commands of the step and the newest checkpoint of a finished run; returns rows of its
    summary."""


def of_corpus(config: PretrainConfig, encoder: Encoder) -> PlannedData:
    """Open the token files that step 2 has made.

    Raises:
        UserError: they are missing or were made with another tokenizer; the tokenizer lacks what is needed; the corpus
            is shorter than one sequence; the weights or the stages do not fit the sources.
    """
    paths = TokenPaths(config.output_prefix)
    tokens = check_belongs(config.output_prefix, encoder.sha256)
    reading = DataPlan.from_config(config, config, config.lengths, config.seed)
    samples = reading.tokens(where=config.where("seq_len"))
    made = objective(config, encoder, config.seed, config.intra_document_masking)
    parts = [source.num_valid_tokens for source in reading.sources if source.num_valid_tokens]
    # The manifest of step 2 has their hashes: known without reading gigabytes.
    records = [record for each in tokens.outputs.values() for record in each if record.path.endswith(_TEXT_ENDING)]
    train = [record.sha256 for record in records if not record.path.endswith(_VALID_ENDING)]
    valid = [record.sha256 for record in records if record.path.endswith(_VALID_ENDING)]
    is_validated = paths.valid.with_name(paths.valid.name + ".idx").exists()
    return PlannedData(
        reading=reading,
        objective=made,
        validation_batches=lambda prefix, most: evaluation_batches(prefix, made, encoder.eos_id, most, parts),
        sha256=train[0],
        valid_sha256=valid[0] if valid else "",
        train_prefix=paths.train,
        valid_prefix=paths.valid,
        num_train_tokens=samples.num_tokens,
        num_valid_tokens=len(IndexedTokens(paths.valid).tokens) if is_validated else 0,
        unigram_entropy=entropy(made.target_counts(token_counts(IndexedTokens(paths.train)))),
    )


PRETRAINING = Task("step 3 train", PretrainConfig, of_corpus, "zerokara.training.worker")
