"""What a run trains on and validates with: token files of a corpus, or the examples of a task. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerokara import manifest
from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.config.pretrain_config import PretrainConfig, RunConfig
from zerokara.errors import Fault, UserError
from zerokara.examples.layout import ExamplePaths
from zerokara.examples.preparation import ExampleFiles
from zerokara.samples.data_plan import DataPlan
from zerokara.samples.evaluation import DocumentBatches, SampleBatches, evaluation_batches
from zerokara.samples.example_data import ExampleBatches, ExampleData
from zerokara.samples.objective import Objective, objective
from zerokara.samples.pairs import Pairs
from zerokara.samples.reading import Reading
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.count import check_belongs, entropy, token_counts
from zerokara.tokens.indexed import IndexedTokens
from zerokara.tokens.layout import TokenPaths

_VALID_ENDING = "_valid_text_document.bin"

RunObjective = Objective | Pairs
"""What turns samples into model inputs and targets."""


@dataclass(frozen=True)
class PlannedData:
    """The data of a run."""

    reading: Reading
    objective: RunObjective
    """Turns samples into model inputs and targets."""
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
    examples: ExampleFiles | None = None
    """Of a fine-tuning: the prepared examples."""

    def validation_batches(
        self, end_id: int, max_tokens: int | None, prefix: Path | None = None
    ) -> DocumentBatches | SampleBatches | ExampleBatches:
        """The batches of the validation tokens, or of other token files at `prefix`; see `DataPlan`, `ExampleData`."""
        reading, objective, read = self.reading, self.objective, prefix or self.valid_prefix
        if isinstance(reading, ExampleData):
            assert isinstance(objective, Pairs)
            return reading.validation_batches(read, objective, end_id, max_tokens)
        assert not isinstance(objective, Pairs)
        counts = [] if prefix else [source.num_valid_tokens for source in reading.sources if source.num_valid_tokens]
        return evaluation_batches(read, objective, end_id, max_tokens=max_tokens, part_tokens=counts)


def of_run(config: RunConfig, encoder: Encoder) -> PlannedData:
    """Find the data of a run.

    Raises:
        UserError: the token files are missing or were made with another tokenizer; the tokenizer lacks what is needed;
            the corpus is shorter than one sequence; the weights or the stages do not fit the sources.
    """
    if isinstance(config, FinetuneRunConfig):
        return _examples(config, encoder)
    assert isinstance(config, PretrainConfig)
    return _corpus(config, encoder)


def _corpus(config: PretrainConfig, encoder: Encoder) -> PlannedData:
    paths = TokenPaths(config.output_prefix)
    tokens = check_belongs(config.output_prefix, encoder.sha256)
    reading = DataPlan.from_config(config, config, config.lengths, config.seed)
    samples = reading.tokens(where=config.where("seq_len"))
    made = objective(config, encoder, config.seed, config.intra_document_masking)
    return PlannedData(
        reading=reading,
        objective=made,
        sha256=_data_hash(tokens),
        valid_sha256=_valid_hash(tokens),
        train_prefix=paths.train,
        valid_prefix=paths.valid,
        num_train_tokens=samples.num_tokens,
        num_valid_tokens=_num_tokens(paths.valid),
        unigram_entropy=entropy(made.target_counts(token_counts(IndexedTokens(paths.train)))),
    )


def _examples(config: FinetuneRunConfig, encoder: Encoder) -> PlannedData:
    files, is_encoder_decoder = ExampleFiles.read(config.output_prefix), config.traits.is_encoder_decoder
    reading = ExampleData(
        files.train.prefix,
        config.lengths,
        is_encoder_decoder,
        encoder.pad_id,
        config.seed,
        num_valid_tokens=files.valid.counts.tokens if files.valid else 0,
        name=", ".join(config.train_data),
    )
    packed = reading.tokens()
    return PlannedData(
        reading=reading,
        objective=Pairs.of_run(config.lengths, encoder, is_encoder_decoder),
        sha256=files.train.sha256,
        valid_sha256=files.valid.sha256 if files.valid else "",
        train_prefix=files.train.prefix,
        valid_prefix=ExamplePaths(config.output_prefix).prefix("valid"),
        num_train_tokens=packed.num_tokens,
        num_valid_tokens=reading.num_valid_tokens,
        unigram_entropy=entropy(packed.learned_counts(encoder.vocab_size)),
        examples=files,
    )


def _num_tokens(prefix: Path) -> int:
    """Tokens in a pair of token files; 0 if they are not there."""
    return len(IndexedTokens(prefix).tokens) if prefix.with_name(prefix.name + ".idx").exists() else 0


def _data_hash(tokens: manifest.Manifest) -> str:
    """One hash for the training documents, from the manifest of step 2 and so without reading gigabytes."""
    for record in _documents(tokens):
        if not record.path.endswith(_VALID_ENDING):
            return record.sha256
    raise UserError(
        Fault(where="the manifest of step 2", rule="names no training documents", remedy="run step 2 again with --redo")
    )


def _valid_hash(tokens: manifest.Manifest) -> str:
    return next((record.sha256 for record in _documents(tokens) if record.path.endswith(_VALID_ENDING)), "")


def _documents(tokens: manifest.Manifest) -> list[manifest.FileRecord]:
    records = (record for each in tokens.outputs.values() for record in each)
    return [record for record in records if record.path.endswith("_text_document.bin")]
