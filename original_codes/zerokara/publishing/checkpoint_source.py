"""Source of an export: the checkpoint in its run folder, and real text to prove the export on. No torch here.

A run folder holds, besides its checkpoints: ``tokenizer.model`` (or ``tokenizer/tokenizer.json``, and what lay beside
it), ``config_resolved.yaml``, ``metrics.jsonl``.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from zerokara import checkpoint
from zerokara.base import manifest
from zerokara.base.errors import Fault, UserError, nearest
from zerokara.checkpoint.folders import EXPORTED_PARTS, read_metrics
from zerokara.config.convert_config import ConvertSettings
from zerokara.config.data import DataSettings
from zerokara.config.loading import RESOLVED_NAME, load_run
from zerokara.config.pretrain_config import RunConfig
from zerokara.corpus.find import InputFile, find_files
from zerokara.corpus.read import Document, Range, ranges, read
from zerokara.examples.example_files import ExampleFiles
from zerokara.model.shapes import ModelShape
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import JSON_NAME, RUN_FOLDER, open_encoder
from zerokara.tokens.indexed import EXAMPLES_STEP, IndexedTokens

if TYPE_CHECKING:  # torch is imported only when weights are read
    from torch import Tensor

TOKENIZER_NAME = "tokenizer.model"
RANGE_BYTES = 1 << 20
_PLACES = 16
"""Places of a source that are read from in turn, one document at a time."""


@dataclass(frozen=True)
class CheckpointSource:
    """A complete checkpoint, checked by content."""

    run_dir: Path
    folder: Path
    state: checkpoint.TrainingState
    config: RunConfig
    averaged: tuple[int, ...] = ()
    """Steps of the checkpoints whose mean is exported, ascending; empty where it is `folder` alone."""

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer that the run was trained with."""
        path = self.run_dir / RUN_FOLDER / JSON_NAME
        return path if path.is_file() else self.run_dir / TOKENIZER_NAME

    @cached_property
    def encoder(self) -> Encoder:
        """The tokenizer, opened, with the start that documents had in the training."""
        encoder = open_encoder(self.tokenizer_path, self.config.end_of_document)
        encoder.start_id = self.state.facts.get("start_id", -1)
        return encoder

    @cached_property
    def shape(self) -> ModelShape:
        """Shape of the model; its context is that of `init_from`'s, which the run may have read less of."""
        shape = ModelShape.from_json(self.state.shape)
        return replace(shape, seq_len=max(shape.seq_len, self.state.facts.get("context_length") or 0))

    @property
    def averaged_folders(self) -> list[Path]:
        return [checkpoint.folder_of(self.run_dir, step) for step in self.averaged]

    def weights(self) -> Mapping[str, "Tensor"]:
        """Fp32 weights, each read from disk, and averaged, when it is asked for."""
        return checkpoint.read_weights(*self.averaged_folders or [self.folder])

    def metrics(self) -> list[dict[str, Any]]:
        """Lines of ``metrics.jsonl`` up to this checkpoint."""
        return [line for line in read_metrics(self.run_dir) if line.get("step", 0) <= self.state.step]


def find(settings: ConvertSettings) -> CheckpointSource:
    """Find the checkpoint that `input_model_dir` names, and check its exported parts by content.

    Raises:
        UserError: no such folder, no complete checkpoint or too few, a damaged one, another tokenizer than in training.
    """
    named = Path(settings.input_model_dir)
    if not named.is_dir():
        remedy = nearest(named, "name a run folder (output_model_dir of step 3) or one global_stepN folder in it")
        raise UserError(settings.fault("input_model_dir", "there is no such folder", remedy))
    if named.resolve().name.startswith("global_step"):
        checkpoint.check(folder := named.resolve(), EXPORTED_PARTS)
    else:
        folder = _of_run(settings, named)
    step, broken = checkpoint.step_of(folder), checkpoint.broken_names(named)
    if newer := [name for name in broken if checkpoint.step_of(Path(name.partition(".")[0])) > step]:
        print(f"{folder} is taken: step 3 has set aside {', '.join(newer)} as broken")
    config_path = folder.parent / RESOLVED_NAME
    source = CheckpointSource(folder.parent, folder, checkpoint.read_state(folder), load_run(config_path))
    tokenizer, expected = source.tokenizer_path, source.state.tokenizer_sha256
    if not tokenizer.is_file():
        remedy = "keep the checkpoint in the folder where step 3 wrote it"
        raise UserError(Fault(str(tokenizer), "is missing next to the checkpoint", remedy=remedy))
    sha256 = manifest.sha256_of(tokenizer) if tokenizer.name == TOKENIZER_NAME else source.encoder.sha256
    if sha256 != expected:
        rule = f"is not the tokenizer of {folder.name}: sha256 {sha256[:12]}, trained with {expected[:12]}"
        raise UserError(Fault(str(tokenizer), rule, remedy="put the right file back"))
    return replace(source, averaged=_averaged(settings, source)) if settings.average > 1 else source


def _of_run(settings: ConvertSettings, run_dir: Path) -> Path:
    """Checkpoint that `checkpoint` asks for; it is printed where it is not the newest."""
    newest, best = checkpoint.newest_complete(run_dir, parts=EXPORTED_PARTS), checkpoint.best(run_dir)
    if newest is None:
        rule = "there is no complete checkpoint (global_stepN) in it"
        remedy = "run step 3 until it has saved one (save_interval), or name another run folder"
        raise UserError(settings.fault("input_model_dir", rule, remedy))
    if best in (None, newest) or settings.checkpoint == "newest":
        return newest
    is_tested = (run_dir / RESOLVED_NAME).is_file() and load_run(run_dir / RESOLVED_NAME).packs_examples
    if not is_tested and (settings.average > 1 or not checkpoint.is_much_worse(newest)):
        return newest
    try:
        checkpoint.check(best, EXPORTED_PARTS)
    except UserError as error:
        print(f"skipping the best by validation, {newest} is taken: {error}")
        return newest
    print(f"{best.name} is exported, the best by validation; checkpoint: newest would export {newest.name}")
    return best


def _averaged(settings: ConvertSettings, source: CheckpointSource) -> tuple[int, ...]:
    """Steps of the checkpoint of `source` and of the complete ones before it, `average` in all."""
    before = checkpoint.complete(source.run_dir, parts=EXPORTED_PARTS, before=checkpoint.step_of(source.folder))
    folders = [source.folder, *islice(before, settings.average - 1)]
    if (found := len(folders)) < settings.average:
        names = ", ".join(folder.name for folder in folders)
        rule = f"there are {found} complete checkpoints up to {source.folder.name} in {source.run_dir}: {names}"
        remedy = f"at most {found}; or train with keep_last: {settings.average} (it was {source.config.keep_last})"
        raise UserError(settings.fault("average", rule, remedy))
    return tuple(sorted(map(checkpoint.step_of, folders)))


def corpus_files(settings: ConvertSettings, trained_with: RunConfig, data_sha256: str) -> list[InputFile]:
    """Files of `check_corpus`, or of the corpus that the run was trained on; none for the examples of a task.

    Raises:
        UserError: a file is not there.
    """
    if settings.check_corpus:
        return find_files(settings.check_corpus, settings.where("check_corpus"))
    try:
        if trained_with.packs_examples:
            if ExampleFiles.read(trained_with.output_prefix).train.sha256 != data_sha256:
                raise UserError(Fault(trained_with.output_prefix, "another fine-tuning has made others there"))
            return []
        return find_files(trained_with.source_entries, settings.where("check_corpus"))
    except UserError as error:
        rule = f"the {'examples' if trained_with.packs_examples else 'corpus'} of the training are gone ({error})"
        raise UserError(settings.fault("check_corpus", rule, "name raw text of the same kind here")) from error


def documents(
    files: list[InputFile], trained_with: RunConfig, num_lines: int, encoder: Encoder | None = None
) -> list[str]:
    """Documents with at least `num_lines` non-empty lines in all, if the corpus has that many; sources take turns.

    Without files they are the examples that a fine-tuning prepared, as `encoder` decodes them.
    """
    if not files and encoder is not None:
        segments = IndexedTokens(ExampleFiles.read(trained_with.output_prefix).train.prefix, EXAMPLES_STEP)
        decoded = (encoder.decode(segments[number]) for number in range(len(segments)))
        texts: Iterator[str] = filter(str.strip, decoded)
    else:
        data = DataSettings() if trained_with.packs_examples else cast(DataSettings, trained_with)
        by_source = groupby(files, key=lambda file: file.source)
        texts = _in_turn([_spread(list(members), data) for _, members in by_source])
    chosen: list[str] = []
    lines = 0
    for text in texts:
        chosen.append(text)
        lines += sum(bool(line.strip()) for line in text.split("\n"))
        if lines >= num_lines:
            break
    return chosen


def _spread(files: list[InputFile], data: DataSettings) -> Iterator[str]:
    """Documents of one source: from `_PLACES` places of it in turn, then from the next ones."""

    def texts(place: Range) -> Iterator[str]:
        items = read(place, data.text_field, data.txt_document)
        return (item.text for item in items if isinstance(item, Document))

    places = ranges(files, RANGE_BYTES, data.txt_document)
    step = max(1, -(-len(places) // _PLACES))
    for first in range(step):
        yield from _in_turn(texts(place) for place in places[first::step])


def _in_turn(sources: Iterable[Iterator[str]]) -> Iterator[str]:
    for turn in zip_longest(*sources):
        yield from (text for text in turn if text is not None)
