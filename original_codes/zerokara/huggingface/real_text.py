"""Real text to measure an exported model on: documents of the corpus for the proofs, validation documents for the
notebooks. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import cast

from zerokara import manifest
from zerokara.config.convert_config import ConvertSettings
from zerokara.config.data import DataSettings
from zerokara.config.loading import RESOLVED_NAME, load_run
from zerokara.config.pretrain_config import RunConfig
from zerokara.corpus.find import InputFile, find_files
from zerokara.corpus.read import Document, Range, ranges, read
from zerokara.errors import UserError
from zerokara.examples.example_files import ExampleFiles, ExampleTokens
from zerokara.huggingface.exported_folder import MANIFEST_NAME
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.indexed import IndexedTokens
from zerokara.tokens.layout import TokenPaths

RANGE_BYTES = 1 << 20
_PLACES = 16
"""Places of a source that are read from in turn, one document at a time."""


def files_for(settings: ConvertSettings, trained_with: RunConfig) -> list[InputFile]:
    """The files of `check_corpus`, or of the corpus that the run was trained on; none for the examples of a task.

    Raises:
        UserError: a file is not there.
    """
    if settings.check_corpus:
        return find_files(settings.check_corpus, settings.where("check_corpus"))
    if trained_with.packs_examples:
        return []
    try:
        return find_files(trained_with.source_entries, settings.where("check_corpus"))
    except UserError as error:
        rule = f"the corpus that the model was trained on is gone ({error})"
        raise UserError(settings.fault("check_corpus", rule, "name raw text of the same kind here")) from error


def documents(
    files: list[InputFile], trained_with: RunConfig, num_lines: int, encoder: Encoder | None = None
) -> list[str]:
    """Documents with at least `num_lines` non-empty lines in all, if the corpus has that many; sources take turns.

    Without files they are the examples that a fine-tuning prepared, as `encoder` decodes them.
    """
    if not files and encoder is not None:
        texts = _examples(trained_with.output_prefix, encoder)
    else:
        data = DataSettings() if trained_with.packs_examples else cast(DataSettings, trained_with)
        by_source: dict[int, list[InputFile]] = {}
        for file in files:
            by_source.setdefault(file.source, []).append(file)
        texts = _in_turn(_spread(members, data) for members in by_source.values())
    chosen: list[str] = []
    lines = 0
    for text in texts:
        chosen.append(text)
        lines += sum(bool(line.strip()) for line in text.split("\n"))
        if lines >= num_lines:
            break
    return chosen


def _examples(output_prefix: str, encoder: Encoder) -> Iterator[str]:
    """The texts of training examples."""
    tokens = ExampleTokens(ExampleFiles.read(output_prefix).train.prefix)
    for number in range(len(tokens)):
        yield from filter(str.strip, map(encoder.decode, tokens.segments(number)))


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


def validation_text(
    model_dir: Path, run_dir: Path, decode: Callable[[list[int]], str], max_tokens: int = 2000
) -> str | None:
    """Return the first validation documents, up to `max_tokens`, or None if they are not on this machine.

    `run_dir` is the run folder, or a checkpoint in it, that `model_dir` was exported from; `decode` turns token ids
    into text. They are what the model was validated on only if the hash of the training tokens is the one in the
    export's manifest.
    """
    folder = next((each for each in (run_dir, run_dir.parent) if (each / RESOLVED_NAME).is_file()), None)
    if folder is None:
        return None
    try:
        paths = TokenPaths(load_run(folder / RESOLVED_NAME).output_prefix)
        trained_on = manifest.read(model_dir / MANIFEST_NAME).facts.get("data", {}).get("sha256")
        on_disk = manifest.read(paths.manifest)
    except UserError:
        return None
    if trained_on not in {record.sha256 for records in on_disk.outputs.values() for record in records}:
        return None
    tokens, texts, room = IndexedTokens(paths.valid), [], max_tokens
    for number in range(len(tokens)):
        texts.append(decode(tokens[number][:room].tolist()))
        room -= len(tokens[number])
        if room <= 0:
            break
    return "\n".join(texts) or None
