"""Examples of a task → token files of each split, their counts, and the manifest: the data half of step 7.

`prepare` writes ``<output_prefix>_train.bin`` and ``.idx``, the same of ``_valid`` and ``_test`` where there are any
(`token_files`), texts (`splits`), the bad lines, and last the manifest. Where the same was done before, it does
nothing. `ExampleFiles.read` gives the same from the manifest, for the processes of the training.

The validation examples that are drawn from the training data are whole groups of equal inputs, so that no text is on
both sides.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from zerokara import file_lock, manifest
from zerokara.config.finetune_config import FinetuneConfig
from zerokara.corpus.inputs import InputFile, check_unchanged, for_manifest
from zerokara.durable import atomic_file, made_folder, remove_partials
from zerokara.errors import Fault, UserError
from zerokara.examples.chat_template import ChatTemplate, auto_source
from zerokara.examples.encoding import LengthLimit, encode
from zerokara.examples.example_files import SPLITS, STEP, ExampleFiles, ExamplePaths, Split
from zerokara.examples.facts import SplitCounts
from zerokara.examples.formats import Example, ExampleFormat, Unlearnable, read_examples, resolve
from zerokara.examples.reading import BadRecord, Record, find_example_files, read_records
from zerokara.examples.splits import Quarantine, SplitWriter
from zerokara.examples.token_files import example_writer
from zerokara.progress import Progress, bytes_text, log, opening, plural, seconds_text, summary
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.indexed import dtype_for
from zerokara.tokens.layout import bin_path, idx_path

Writers = Mapping[Split, SplitWriter]


def prepare(
    config: FinetuneConfig,
    encoder: Encoder,
    load_tokenizer: Callable[[], Any],
    *,
    is_encoder_decoder: bool,
    packed_length: int,
    redo: bool = False,
) -> ExampleFiles:
    """Write the token files of the examples, unless that is done already.

    `load_tokenizer` gives the tokenizer as `AutoTokenizer` loads it from the export of a model with this encoder.

    Raises:
        UserError: the files are missing, damaged, of no known format, or hold lines that cannot be learned or too many
            bad ones; names file, line, value and remedy. Once writing has begun, an earlier result is gone.
        OSError: the disk or the network fails.
    """
    started, paths = time.monotonic(), ExamplePaths(config.output_prefix)
    files = _find(config)
    all_files = [file for split in SPLITS for file in files[split]]
    form = resolve(config, all_files, is_encoder_decoder)
    spec = _spec(config, encoder, files, form, is_encoder_decoder, packed_length)
    if done := manifest.already_done(paths.manifest, spec, redo=redo):
        made = ExampleFiles.of(paths, done)
        _check_bad_lines(config, [split.counts for split in made.splits.values()], paths.quarantine)
        opening(f"examples: prepared already, {bin_path(paths.prefix('train'))} was made from the same files")
        return made
    size = bytes_text(sum(file.bytes for file in all_files))
    opening(f"examples: {plural(len(all_files), 'file')}, {size}, {form.name} → {bin_path(paths.prefix('train'))}")
    tokenizer = load_tokenizer()
    template = _template(config, encoder, tokenizer, is_encoder_decoder) if form.name == "messages" else None
    limit = LengthLimit(packed_length, config.overlong, is_encoder_decoder)
    with _claimed(paths):
        work = _Preparation(config, paths, files, form, encoder, tokenizer, template, limit)
        writers = work.run()
        check_unchanged(all_files)
        outputs = [path_of(paths.prefix(split)) for split in writers for path_of in (bin_path, idx_path)]
        outputs += [paths.texts(split) for split in writers if split != "train" or template is not None]
        outputs += [paths.quarantine] if any(writer.counts.bad for writer in writers.values()) else []
        for path in {*paths.written} - {*outputs}:  # of a preparation with more splits, or bad lines
            path.unlink(missing_ok=True)
        facts = {
            "data_format": form.name,
            "prompt_template": form.prompt_template,
            "labels": sorted(set(form.label_words.values()) or set().union(*(w.labels for w in writers.values()))),
            "chat_template": template.source if template else None,
            "end_ids": template.end_ids if template else [encoder.eos_id],
            "splits": {
                split: {"counts": asdict(writer.counts), "longest_answer": writer.longest_answer}
                for split, writer in writers.items()
            },
        }
        done = manifest.write(paths.manifest, spec, {"examples": outputs}, facts, time.monotonic() - started)
    made = ExampleFiles.of(paths, done)
    summary("examples: prepared", [*_summary_rows(paths, made), ("time", seconds_text(time.monotonic() - started))])
    for split, writer in writers.items():  # what may make a result look better, or worse, than it is
        used = f"of {made.splits[split].num_examples:,} {split}"
        earlier = "a training or validation" if split == "test" and "valid" in writers else "a training"
        if writer.seen:
            log(f"warning: {writer.seen:,} {used} examples have the input of {earlier} example")
        if writer.unknown_answers:
            what = "have characters that the tokenizer does not know, so that no answer can equal them"
            log(f"warning: {writer.unknown_answers:,} {used} answers {what}")
    return made


def _find(config: FinetuneConfig) -> dict[Split, list[InputFile]]:
    """The files of each split.

    Raises:
        UserError: an entry names nothing, or two splits the same file.
    """
    entries: dict[Split, Sequence[str]] = {
        "train": config.train_data,
        "valid": config.valid_data,
        "test": config.test_data,
    }
    found = {split: find_example_files(entries[split], config.where(f"{split}_data")) for split in SPLITS}
    if not found["train"]:
        raise UserError(config.fault("train_data", "names no file", "name the training examples"))
    faults, used = list[Fault](), dict[Path, Split]()
    for split, files in found.items():
        for file in files:
            path = file.path.resolve()
            if file.remote is None and used.setdefault(path, split) != split:
                rule = f"names {file.name}, which is in {used[path]}_data too"
                faults.append(config.fault(f"{split}_data", rule, "name each file once"))
    if faults:
        raise UserError(faults)
    return found


def _spec(
    config: FinetuneConfig,
    encoder: Encoder,
    files: Mapping[Split, list[InputFile]],
    form: ExampleFormat,
    is_encoder_decoder: bool,
    packed_length: int,
) -> manifest.StepSpec:
    """What the files depend on."""
    settings = {key: getattr(config, key) for key in ("label_words", "prompt_template", "system_prompt", "overlong")}
    # What `auto` came to: it goes by the metric, too.
    settings |= {"data_format": form.name, "input_field": form.input_field, "output_field": form.output_field}
    settings |= {"packed_length": packed_length, "is_encoder_decoder": is_encoder_decoder}
    if not files["valid"]:
        settings |= {"valid_fraction": config.valid_fraction, "seed": config.seed}
    inputs: dict[str, manifest.Inputs] = {"input_tokenizer_file": encoder.model_path}
    inputs |= {f"{split}_data": for_manifest(files[split]) for split in SPLITS if files[split]}
    if config.chat_template != "auto":
        inputs["chat_template"] = Path(config.chat_template)
    names = {"is_encoder_decoder": "init_from (is its model an encoder-decoder)"}
    return manifest.StepSpec(STEP, settings, inputs, lambda key: names.get(key, key))


def _template(config: FinetuneConfig, encoder: Encoder, tokenizer: Any, is_encoder_decoder: bool) -> ChatTemplate:
    """The template that the configuration names, or that of its own for this tokenizer."""
    path = config.chat_template
    if path == "auto":
        source = auto_source(encoder, is_encoder_decoder)
        return ChatTemplate(source, "chat_template: auto", tokenizer, is_encoder_decoder)
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise UserError(Fault(path, f"cannot be read as a chat template: {reason}")) from error
    return ChatTemplate(source, path, tokenizer, is_encoder_decoder)


@contextmanager
def _claimed(paths: ExamplePaths) -> Iterator[None]:
    """Claim the output for this process alone, and remove the manifest of what is there, and what a killed one left."""
    with made_folder(paths.manifest.parent), file_lock.held(paths.lock) as is_ours:
        if not is_ours:
            rule = f"{file_lock.read_holder(paths.lock) or 'another process'} is writing here"
            raise UserError(Fault(str(paths.manifest), rule, remedy="wait for it, or choose another output_prefix"))
        paths.manifest.unlink(missing_ok=True)
        for path in (*paths.written, paths.manifest):
            remove_partials(path)
        yield


@dataclass(frozen=True)
class _Preparation:
    """The work of `prepare`."""

    config: FinetuneConfig
    paths: ExamplePaths
    files: Mapping[Split, list[InputFile]]
    form: ExampleFormat
    encoder: Encoder
    tokenizer: Any
    template: ChatTemplate | None
    limit: LengthLimit

    def run(self) -> Writers:
        """Write every split and the quarantine; return what wrote the splits, with its counts.

        Raises:
            UserError: a file is damaged, lines cannot be learned, too many are bad, or no example is left of a split;
                the quarantine file stays where that tells of it.
        """
        config, files = self.config, self.files
        draws = not files["valid"] and config.valid_fraction > 0
        total = sum(file.bytes for each in files.values() for file in each)
        total += sum(file.bytes for file in files["train"]) if draws else 0
        passes: list[tuple[Split, ...]] = [("train", "valid")] if draws else [("train",), ("valid",)]
        made: dict[Split, SplitWriter] = {}
        with Progress("examples", total, "B") as progress, atomic_file(self.paths.quarantine) as file:
            quarantine = Quarantine(file)
            drawn = self._drawn(progress) if draws else frozenset()
            for splits in (*passes, ("test",)):
                if not files[splits[0]]:
                    continue
                seen = frozenset(chain.from_iterable(writer.keys for writer in made.values()))
                with ExitStack() as stack:
                    writers = [stack.enter_context(self._writer(split, quarantine, seen)) for split in splits]
                    for record, example in self._examples(files[splits[0]], progress):
                        if isinstance(record, BadRecord):
                            writers[0].counts.bad += 1
                            quarantine.add(record)
                        elif isinstance(example, Unlearnable):
                            quarantine.fault(example, record)
                        else:
                            assert example is not None
                            writers[-1 if example.key in drawn else 0].add(record, example)
                made |= zip(splits, writers, strict=True)
        _check_bad_lines(config, [writer.counts for writer in made.values()], self.paths.quarantine)
        faults = []
        for split, writer in made.items():
            if not (counts := writer.counts).kept + counts.cut:
                key = f"{split}_data" if files[split] else "valid_fraction"
                rule = f"leaves no {split} example: {counts.dropped:,} were dropped, {counts.bad:,} lines are bad"
                faults.append(config.fault(key, rule, "raise packed_length, or give other examples"))
        if faults:
            raise UserError(faults)
        return made

    @contextmanager
    def _writer(self, split: Split, quarantine: Quarantine, seen: frozenset[int]) -> Iterator[SplitWriter]:
        """Yield a writer of a split; its files appear when the block ends and every line could be learned."""
        prefix, encoder = self.paths.prefix(split), self.encoder
        encodes = partial(encode, encoder=encoder, tokenizer=self.tokenizer, template=self.template)
        with (
            atomic_file(self.paths.texts(split)) as texts,
            example_writer(prefix, dtype_for(encoder.vocab_size)) as write,
        ):
            writer = SplitWriter(write, texts, split == "train", encodes, self.limit, quarantine, seen, encoder.unk_id)
            yield writer
            writer.flush()
            if quarantine.faults:
                raise UserError(quarantine.faults)

    def _drawn(self, progress: Progress) -> frozenset[int]:
        """The inputs, by their keys, drawn for validation: their examples are about the share asked for."""
        keys, config = array("Q"), self.config
        for _, example in self._examples(self.files["train"], progress):
            if isinstance(example, Example):
                keys.append(example.key)
        distinct, counts = np.unique(np.array(keys, dtype=np.uint64), return_counts=True)
        order = np.random.default_rng(config.seed).permutation(len(distinct))[:-1]  # never all
        wanted = max(1, round(config.valid_fraction * len(keys)))
        num_drawn = int(np.searchsorted(np.cumsum(counts[order]), wanted)) + 1
        drawn = frozenset(distinct[order[:num_drawn]].tolist())
        if not drawn:
            rule = "leaves no validation example: all training examples have the same input"
            raise UserError(config.fault("valid_fraction", rule, "give valid_data, or set it to 0"))
        return drawn

    def _examples(
        self, files: Sequence[InputFile], progress: Progress
    ) -> Iterator[tuple[Record, Example | Unlearnable] | tuple[BadRecord, None]]:
        """Each record of files with its texts."""
        for file in files:
            done = 0

            def at(position: int) -> None:
                nonlocal done
                progress.advance(position - done)
                done = position

            yield from read_examples(self.form, read_records(file, at))


def _check_bad_lines(config: FinetuneConfig, counts: Sequence[SplitCounts], quarantine: Path) -> None:
    bad, lines = (sum(getattr(each, key) for each in counts) for key in ("bad", "read"))
    if bad > config.max_bad_fraction * lines:
        enough = math.ceil(1000 * bad / lines) / 1000
        rule = f"{bad:,} of {lines:,} lines hold no example ({bad / lines:.3g} of them)"
        remedy = f"each is listed in {quarantine}; repair them, or set max_bad_fraction to {enough:g}"
        raise UserError(config.fault("max_bad_fraction", rule, remedy))


def _summary_rows(paths: ExamplePaths, made: ExampleFiles) -> Iterator[tuple[str, str]]:
    """Rows of (name, value)."""
    for split, files in made.splits.items():
        counts = files.counts
        share = counts.learned_tokens / max(1, counts.tokens)
        text = f"{counts.read:,} examples = {counts.kept:,} kept + {counts.cut:,} cut + {counts.dropped:,} dropped"
        yield split, f"{text} + {counts.bad:,} bad; {counts.tokens:,} tokens, {share:.1%} of them learned"
        if counts.cut_learned_tokens:
            yield "", f"{counts.cut_learned_tokens:,} tokens of answers were cut away with their questions"
    if any(files.counts.bad for files in made.splits.values()):
        yield "bad lines", f"listed in {paths.quarantine}"
    if made.labels:
        yield "labels", ", ".join(made.labels[:8]) + (f" and {len(made.labels) - 8:,} more" if made.labels[8:] else "")
    yield "longest answer", f"{made.train.longest_answer:,} tokens"
