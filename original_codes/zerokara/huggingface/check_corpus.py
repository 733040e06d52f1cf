"""Real text for the proofs: documents from every source of the corpus, from places spread over it. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import cast

from zerokara.config.convert_config import ConvertSettings
from zerokara.config.data import DataSettings
from zerokara.config.pretrain_config import RunConfig
from zerokara.corpus import inputs, reading
from zerokara.errors import UserError
from zerokara.examples.preparation import ExampleFiles
from zerokara.examples.token_files import ExampleTokens
from zerokara.tokenizer.encoder import Encoder

RANGE_BYTES = 1 << 20
_PLACES = 16
"""Places of a source that are read from in turn, one document at a time."""


def files_for(settings: ConvertSettings, trained_with: RunConfig) -> list[inputs.InputFile]:
    """The files of `check_corpus`, or of the corpus that the run was trained on; none for the examples of a task.

    Raises:
        UserError: a file is not there.
    """
    if settings.check_corpus:
        return inputs.find_files(settings.check_corpus, settings.where("check_corpus"))
    if trained_with.packs_examples:
        return []
    try:
        return inputs.find_files(trained_with.source_entries, settings.where("check_corpus"))
    except UserError as error:
        rule = f"the corpus that the model was trained on is gone ({error})"
        raise UserError(settings.fault("check_corpus", rule, "name raw text of the same kind here")) from error


def documents(
    files: list[inputs.InputFile], trained_with: RunConfig, num_lines: int, encoder: Encoder | None = None
) -> list[str]:
    """Documents with at least `num_lines` non-empty lines in all, if the corpus has that many; sources take turns.

    Without files they are the examples that a fine-tuning prepared, as `encoder` decodes them.
    """
    if not files and encoder is not None:
        return _examples(trained_with.output_prefix, encoder, num_lines)
    data = DataSettings() if trained_with.packs_examples else cast(DataSettings, trained_with)
    by_source: dict[int, list[inputs.InputFile]] = {}
    for file in files:
        by_source.setdefault(file.source, []).append(file)
    readers = [_spread(members, data) for members in by_source.values()]
    chosen: list[str] = []
    lines = 0
    for turn in zip_longest(*readers):
        for document in turn:
            if document is not None and lines < num_lines:
                chosen.append(document)
                lines += len(lines_of(document))
        if lines >= num_lines:
            break
    return chosen


def lines_of(document: str) -> list[str]:
    """The non-empty lines of a document."""
    return [line for line in document.split("\n") if line.strip()]


def _examples(output_prefix: str, encoder: Encoder, num_lines: int) -> list[str]:
    """The texts of training examples."""
    tokens = ExampleTokens(ExampleFiles.read(output_prefix).train.prefix)
    chosen: list[str] = []
    lines = 0
    for number in range(len(tokens)):
        if lines >= num_lines:
            break
        for ids in tokens.segments(number):
            text = encoder.decode(ids)
            if text.strip():
                chosen.append(text)
                lines += len(lines_of(text))
    return chosen


def _spread(files: list[inputs.InputFile], trained_with: DataSettings) -> Iterator[str]:
    """Documents of one source: from `_PLACES` places of it in turn, then from the next ones."""
    ranges = reading.ranges(files, RANGE_BYTES, trained_with.txt_document)
    step = max(1, -(-len(ranges) // _PLACES))
    for first in range(step):
        places = [_texts(place, trained_with) for place in ranges[first::step]]
        for turn in zip_longest(*places):
            yield from (document for document in turn if document is not None)


def _texts(place: reading.Range, trained_with: DataSettings) -> Iterator[str]:
    for item in reading.read(place, trained_with.text_field, trained_with.txt_document):
        if isinstance(item, reading.Document):
            yield item.text
