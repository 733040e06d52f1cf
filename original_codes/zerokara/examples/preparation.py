"""Examples of a task → token files of each split, their counts, and the manifest: the data half of step 7.

`prepare` writes ``<output_prefix>_train.bin`` and ``.idx``, the same for ``_valid`` and ``_test`` where there are any,
texts, the bad lines, and last the manifest. Where the same was done before, it does nothing.

The texts are JSON lines in the order of the token files: ``place`` (file:line), ``input``, ``reference`` (the answer),
``label`` (or null), ``seen`` (true if an example of an earlier split has the same input, white space aside). Those of
the training examples are the first conversations, on which the export is proved (`facts.conversations`). Validation
examples that are drawn from the training data are whole groups of equal inputs, so that no text is on both sides; but
of an input that is a common one (`MAX_INPUT_SHARE`, "Write a review.") whole groups of equal answers, and it is told.
"""

from __future__ import annotations

import glob
import math
import os
import re
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from zerokara.base import file_lock, manifest
from zerokara.base.durable import PARTIAL_SUFFIX, atomic_file
from zerokara.base.errors import Fault, UserError, refuse
from zerokara.base.progress import Progress, bytes_text, log, plural, seconds_text, summary
from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.config.settings import resolved
from zerokara.corpus.find import TABLES, InputFile, check_unchanged, find_files, for_manifest
from zerokara.corpus.token_hashes import composed
from zerokara.examples import chat_template, formats
from zerokara.examples.chat_template import Segments
from zerokara.examples.encoding import Fate, encode, fit
from zerokara.examples.example_files import SPLITS, STEP, ExampleFiles, ExamplePaths, Split, example_writer
from zerokara.examples.facts import SplitCounts
from zerokara.examples.formats import Example, ExampleFormat, Found, Record, Unlearnable, extra_keys
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.indexed import bin_path, dtype_for, idx_path

MAX_FAULTS = 5
"""Lines that cannot be learned, of which each is told by itself."""
MAX_INPUT_SHARE = 0.05
"""Share of the training examples above which their input is on both sides of a drawn validation."""
MAX_CONVERSATIONS = 1_000
"""Maximum number of training conversations on which the export is proved."""


def prepare(
    config: FinetuneRunConfig, encoder: Encoder, load_tokenizer: Callable[[], Any], redo: bool = False
) -> ExampleFiles:
    """Write the token files of the examples, unless that is done already.

    `load_tokenizer` gives the tokenizer as `AutoTokenizer` loads it from the export of a model with this encoder.

    Raises:
        UserError: the files are missing, damaged, of no known format, or hold lines that cannot be learned or too many
            bad ones; names file, line, value and remedy. Once writing has begun, an earlier result is gone.
        OSError: the disk or the network fails.
    """
    started, paths = time.monotonic(), ExamplePaths(config.output_prefix)
    is_encoder_decoder, packed_length = config.traits.is_encoder_decoder, resolved(config.packed_length)
    files = _find(config)
    all_files = [file for split in SPLITS for file in files[split]]
    form = formats.resolve(config, all_files, is_encoder_decoder)
    settings = {key: getattr(config, key) for key in ("label_words", "prompt_template", "system_prompt", "overlong")}
    # Resolved, not as given: `auto` depends on the metric, too.
    settings |= {"data_format": form.name, "input_field": form.input_field, "output_field": form.output_field}
    settings |= {"packed_length": packed_length, "init_from (is its model an encoder-decoder)": is_encoder_decoder}
    if not files["valid"]:
        settings |= {"valid_fraction": config.valid_fraction, "seed": config.seed}
    inputs: dict[str, manifest.Inputs] = {"input_tokenizer_file": encoder.record}
    inputs |= {f"{split}_data": for_manifest(files[split]) for split in SPLITS if files[split]}
    if config.chat_template != "auto":
        inputs["chat_template"] = Path(config.chat_template)
    spec = manifest.StepSpec(STEP, settings, inputs)
    if manifest.already_done(paths.manifest, spec, redo=redo):
        prepared = ExampleFiles.read(config.output_prefix)
        _check_counts(config, paths, {name: split.counts for name, split in prepared.splits.items()})
        log(f"examples: prepared already, {bin_path(paths.prefix('train'))} was made from the same files")
        return prepared
    size = bytes_text(sum(file.bytes for file in all_files))
    log(f"examples: {plural(len(all_files), 'file')}, {size}, {form.name} → {bin_path(paths.prefix('train'))}")
    tokenizer = load_tokenizer()
    template = chat_template.of_config(config, encoder, tokenizer) if form.name == "messages" else None
    encoding = {"encoder": encoder, "tokenizer": tokenizer, "template": template}
    encode_example = partial(encode, **encoding, is_encoder_decoder=is_encoder_decoder)
    fits = partial(fit, is_encoder_decoder=is_encoder_decoder, bos_id=encoder.bos_id)
    fits = partial(fits, length=packed_length, overlong=config.overlong)
    with _claimed(paths) as outputs:
        splitter = _Splitter(config, paths, files, form, encode_example, fits, encoder)
        counts = splitter.run()
        outputs += [paths.quarantine] if any(each.bad for each in counts.values()) else []
        _check_counts(config, paths, counts)
        made = [path_of(paths.prefix(split)) for split in counts for path_of in (bin_path, idx_path)]
        made += [paths.texts(split) for split in counts if split != "train" or template is not None]
        facts = {
            "data_format": form.name,
            "prompt_template": form.prompt_template,
            "labels": sorted(set(form.label_words.values()) or splitter.labels),
            "chat_template": template.source if template else None,
            "end_ids": template.end_ids if template else [encoder.eos_id],
            "splits": {split: asdict(each) for split, each in counts.items()},
        }
        seconds, check = time.monotonic() - started, partial(check_unchanged, all_files)
        manifest.write(paths.manifest, spec, {"examples": [*made, *outputs]}, facts, seconds, check=check)
        outputs += made
    prepared = ExampleFiles.read(config.output_prefix)
    summary("examples: prepared", [*_summary_rows(paths, prepared), ("time", seconds_text(time.monotonic() - started))])
    return prepared


def _find(config: FinetuneRunConfig) -> dict[Split, list[InputFile]]:
    """Find the files of each split; no entry may name nothing or an output, no two splits the same file."""
    found, faults, used = dict[Split, list[InputFile]](), list[Fault](), dict[Path, Split]()
    written = ExamplePaths(config.output_prefix).written
    outputs = [*written, Path(config.output_model_dir)]
    for split in SPLITS:
        key, entries = f"{split}_data", getattr(config, f"{split}_data")
        found[split] = find_files(entries, config.where(key), TABLES, outputs) if entries else []
        for file in found[split]:
            path = file.path.resolve()
            if file.remote is None and any(map(path.samefile, filter(Path.exists, written))):
                rule = f"names {file.name}, which this step writes itself"
                faults.append(config.fault(key, rule, "rename or move the input"))
            if file.remote is None and used.setdefault(path, split) != split:
                rule = f"names {file.name}, which is in {used[path]}_data too"
                faults.append(config.fault(key, rule, "name each file once"))
    if not found["train"]:
        faults.append(config.fault("train_data", "names no file", "name the training examples"))
    refuse(faults)
    return found


@contextmanager
def _claimed(paths: ExamplePaths) -> Iterator[list[Path]]:
    """Lock the output, and remove the manifest of an earlier preparation and the partial files of a killed one.

    In the end only files stay that the block has listed: the next preparation would take others for somebody else's.
    """
    with file_lock.claimed(paths.lock, paths.manifest):
        paths.manifest.unlink(missing_ok=True)
        for path in map(os.path.realpath, (*paths.written, paths.manifest)):
            for leftover in glob.glob(f"{glob.escape(path)}.[0-9]*{PARTIAL_SUFFIX}"):
                os.unlink(leftover)
        outputs: list[Path] = []
        try:
            yield outputs
        finally:
            for file in {*paths.written} - {*outputs}:  # of a preparation with more splits, or bad lines
                file.unlink(missing_ok=True)


def _check_counts(config: FinetuneRunConfig, paths: ExamplePaths, counts: Mapping[Split, SplitCounts]) -> None:
    """Raise UserError if too many lines are bad, or a split has no examples; the quarantine file stays."""
    bad, lines = max(((each.bad, each.read) for each in counts.values()), key=lambda both: both[0] / max(1, both[1]))
    if bad > config.max_bad_fraction * lines:
        enough = math.ceil(1000 * bad / lines) / 1000
        first = orjson.loads(paths.quarantine.read_bytes().partition(b"\n")[0])
        place = f"{first['file']}:{first['line']}: {first['reason']}"
        rule = f"{bad:,} of {lines:,} lines hold no example ({100 * bad / lines:.3g} %); a first one is at {place}"
        remedy = f"each is listed in {paths.quarantine}; repair them, or set max_bad_fraction to {enough:g}"
        raise UserError(config.fault("max_bad_fraction", rule, remedy))
    faults = []
    for split, each in counts.items():
        if not each.kept + each.cut:
            key = f"{split}_data" if getattr(config, f"{split}_data") else "valid_fraction"
            why, remedy = f"{each.dropped:,} were dropped, {each.bad:,} lines are bad", "raise packed_length"
            if key == "valid_fraction" and not each.read:
                why = f"each of the {counts['train'].read:,} training examples is there too often to be drawn"
                remedy = "give valid_data, or set it to 0"
            faults.append(config.fault(key, f"leaves no {split} example: {why}", remedy))
    refuse(faults)


def _summary_rows(paths: ExamplePaths, prepared: ExampleFiles) -> Iterator[tuple[str, str]]:
    """Rows of (name, value) on each split, with warnings."""
    for split, files in prepared.splits.items():
        counts = files.counts
        share = counts.learned_tokens / max(1, counts.tokens)
        text = f"{counts.read:,} examples = {counts.kept:,} kept + {counts.cut:,} cut + {counts.dropped:,} dropped"
        yield split, f"{text} + {counts.bad:,} bad; {counts.tokens:,} tokens, {share:.1%} of them learned"
        if counts.cut_learned_tokens:
            yield "", f"{counts.cut_learned_tokens:,} tokens of answers were cut away with their questions"
        used = f"of {files.num_examples:,} {split}"
        if counts.seen:  # which makes a result look better than it is
            yield "", f"warning: {counts.seen:,} {used} examples have the input of an example of an earlier split"
        if counts.unknown_answers:
            what = "have characters that the tokenizer does not know, or that it or the chat template changes"
            yield "", f"warning: {counts.unknown_answers:,} {used} answers {what}"
    if any(files.counts.bad for files in prepared.splits.values()):
        yield "bad lines", f"listed in {paths.quarantine}"
    if labels := prepared.labels:
        yield "labels", ", ".join(labels[:8]) + (f" and {len(labels) - 8:,} more" if labels[8:] else "")
    yield "longest answer", f"{prepared.train.counts.longest_answer:,} tokens"


@dataclass
class _SplitWriter:
    split: Split
    write: Callable[[Segments], None]
    texts: IO[bytes]


@dataclass
class _Splitter:
    """Writer of all splits, for one `run`."""

    config: FinetuneRunConfig
    paths: ExamplePaths
    files: Mapping[Split, list[InputFile]]
    form: ExampleFormat
    encode: Callable[[Example], Segments]
    fit: Callable[[Segments], tuple[Segments, Fate]]
    encoder: Encoder
    counts: dict[Split, SplitCounts] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)  # the first `MAX_FAULTS` of the lines that are refused
    num_refused: int = 0
    num_quoted: int = 0  # lines of tables
    labels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)  # of all lines
    keys: array[int] = field(default_factory=lambda: array("Q"))
    """Hash of each example's input, so far."""
    drawn: set[int] = field(default_factory=set)  # keys of the drawn validation examples
    seen: frozenset[int] = frozenset()  # keys of earlier splits, and of what is on both sides of a drawn validation

    def run(self) -> dict[Split, SplitCounts]:
        """Write every split and the quarantine; return the counts. UserError for damaged files, unlearnable lines."""
        draws = not self.files["valid"] and self.config.valid_fraction > 0
        read = [*chain.from_iterable(self.files.values()), *(self.files["train"] if draws else ())]
        passes: list[tuple[Split, ...]] = [("train", "valid")] if draws else [("train",), ("valid",)]
        with (
            Progress("examples", sum(file.bytes for file in read), "B") as progress,
            atomic_file(self.paths.quarantine) as quarantine,
        ):
            if draws:
                self._draw(progress)
            for splits in (*passes, ("test",)):
                if files := self.files[splits[0]]:
                    self._pass(splits, self._examples(files, progress), quarantine)
        if unread := sorted(self.fields - {self.form.input_field, self.form.output_field}):
            log(f"examples: not read are the fields {', '.join(unread)}")
        if self.num_quoted:
            log(f"note: in {plural(self.num_quoted, 'line')} of tables a field is in quotation marks: they are text")
        return self.counts

    def _pass(self, splits: Sequence[Split], examples: Iterator[Found], quarantine: IO[bytes]) -> None:
        """Write examples into the first of these splits, drawn ones into the last; bad lines count as the first's."""
        self.seen, dtype = frozenset(self.keys), dtype_for(self.encoder.vocab_size)
        with ExitStack() as stack:  # whose files appear at its end, if there was no error
            outputs = list[_SplitWriter]()
            for split in splits:
                write = stack.enter_context(example_writer(self.paths.prefix(split), dtype))
                texts = stack.enter_context(atomic_file(self.paths.texts(split)))
                self.counts[split] = SplitCounts()
                outputs.append(_SplitWriter(split, write, texts))
            for record, example in examples:
                self.fields |= record.values.keys()
                if record.file.format == "tsv":
                    self.num_quoted += any(re.fullmatch('".*"', cell) for cell in record.values.values())
                if example is None:
                    self.counts[splits[0]].bad += 1
                    line = {"file": record.file.name, "line": record.line, "offset": record.offset}
                    line |= {"reason": record.reason, "excerpt": record.excerpt}
                    quarantine.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
                elif isinstance(example, Unlearnable):
                    self._refuse(record, example)
                else:
                    try:
                        self._add(record, example, outputs[0 if self.drawn.isdisjoint(example.keys[:2]) else -1])
                    except Unlearnable as error:
                        self._refuse(record, error)
            if more := self.num_refused - len(self.faults):
                self.faults.append(Fault(plural(more, "more line"), "cannot be learned either"))
            refuse(self.faults)

    def _add(self, record: Record, example: Example, output: _SplitWriter) -> None:
        """Write an example, as far as it fits a training sequence, and count it; raise Unlearnable if it cannot be."""
        counts, segments = self.counts[output.split], self.encode(example)
        fitted, fate = self.fit(segments)
        setattr(counts, fate, getattr(counts, fate) + 1)
        if fate == "dropped":
            return
        output.write(fitted)
        learned, key = fitted[1::2], example.keys[2]
        counts.tokens += sum(map(len, fitted))
        counts.learned_tokens += sum(map(len, learned))
        counts.cut_learned_tokens += sum(map(len, segments[1::2])) - sum(map(len, learned))
        counts.longest_answer = max(counts.longest_answer, *map(len, learned))
        is_more = example.messages and extra_keys(example.messages[-1])  # its calls of tools are an answer, too
        spelt = example.answer if is_more else self.encoder.decode(segments[-1])
        is_changed = composed(spelt).strip() != composed(example.answer).strip()
        counts.unknown_answers += is_changed or any(self.encoder.unk_id in answer for answer in learned)
        self.keys.append(key)
        self.labels |= set() if example.label is None else {example.answer}
        text: dict[str, Any] = {}
        if output.split != "train":
            counts.seen += key in self.seen
            reference = self.encoder.decode(segments[-1]) if is_more else example.answer
            text = {"place": record.place, "input": example.input, "reference": reference}
            text |= {"label": example.label, "seen": key in self.seen}
        elif example.messages and fate == "kept" and counts.kept <= MAX_CONVERSATIONS:
            prompt, answer = np.concatenate(fitted[:-1]).tolist(), fitted[-1].tolist()
            text = {"messages": example.messages, "prompt_ids": prompt, "answer_ids": answer}
        if text:
            output.texts.write(orjson.dumps(text, option=orjson.OPT_APPEND_NEWLINE))

    def _refuse(self, record: Record, error: Unlearnable) -> None:
        """Note a line that cannot be learned; of those with the same label, which one word remedies, the first."""
        found = error.fault
        is_new = not found.key or all((each.key, each.value) != (found.key, found.value) for each in self.faults)
        if is_new and len(self.faults) < MAX_FAULTS:
            self.faults.append(replace(found, where=record.place))
        self.num_refused += is_new

    def _draw(self, progress: Progress) -> None:
        """Draw examples for validation, by their keys: at most the share asked for, but one if it is less than one."""
        triples = array("Q")
        for _, example in self._examples(self.files["train"], progress):
            if isinstance(example, Example):
                triples.extend(example.keys)
        keys = np.array(triples, dtype=np.uint64).reshape(-1, 3)
        wanted = max(1, int(self.config.valid_fraction * len(keys) + 1e-9))
        _, group, sizes = np.unique(keys[:, 0], return_inverse=True, return_counts=True)
        is_common = sizes[group] > min(wanted, max(1, MAX_INPUT_SHARE * len(keys)))
        self.keys.extend(set(keys[is_common, 2].tolist()))
        distinct, counts = np.unique(np.where(is_common, keys[:, 1], keys[:, 0]), return_counts=True)
        order = np.random.default_rng(self.config.seed).permutation(len(distinct))[:-1]  # never all
        for key, count in zip(distinct[order].tolist(), counts[order].tolist(), strict=True):
            if count <= wanted:
                self.drawn.add(key)
                wanted -= count

    def _examples(self, files: Sequence[InputFile], progress: Progress) -> Iterator[Found]:
        records = (formats.read_records(file, progress.advance) for file in files)
        return formats.read_examples(self.form, chain.from_iterable(records))
