"""Examples of a task → token files of each split, their counts, and the manifest: the data half of step 7.

`prepare` writes ``<output_prefix>_train.bin`` and ``.idx``, the same of ``_valid`` and ``_test`` where there are any
(`token_files`), the texts of those two (`splits`), the bad lines, and last the manifest. Where the same was done
before, it does nothing. `ExampleFiles.read` gives the same from the manifest, for the processes of the training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zerokara import file_lock, manifest
from zerokara.config.finetune_config import FinetuneConfig
from zerokara.corpus.inputs import InputFile, check_unchanged, for_manifest
from zerokara.durable import atomic_file, made_folder, remove_partials
from zerokara.errors import Fault, UserError
from zerokara.examples import chat_template, splits
from zerokara.examples.chat_template import ChatTemplate
from zerokara.examples.encoding import ExampleEncoder, LengthLimit
from zerokara.examples.example_files import STEP, ExampleFiles, SplitFiles, manifest_facts
from zerokara.examples.facts import SplitCounts
from zerokara.examples.formats import ExampleFormat, resolve
from zerokara.examples.layout import SPLITS, ExamplePaths, Split
from zerokara.examples.reading import find_example_files
from zerokara.examples.splits import Keys, Quarantine, SplitTally, SplitWriter
from zerokara.progress import Progress, bytes_text, log, opening, plural, seconds_text, summary
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.indexed import dtype_for
from zerokara.tokens.layout import bin_path, idx_path

NOTHING: Keys = np.empty(0, dtype=np.uint64)

__all__ = ["ExampleFiles", "SplitFiles", "prepare"]


def prepare(
    config: FinetuneConfig, encoder: Encoder, *, is_encoder_decoder: bool, packed_length: int, redo: bool = False
) -> ExampleFiles:
    """Write the token files of the examples, unless that is done already.

    Raises:
        UserError: the files are missing, damaged, of no known format, or hold lines that cannot be learned or too many
            bad ones; names file, line, value and remedy. Once writing has begun, an earlier result is gone.
        OSError: the disk or the network fails.
    """
    started, paths = time.monotonic(), ExamplePaths(config.output_prefix)
    files = _find(config)
    template_path = None if config.chat_template == "auto" else Path(config.chat_template)
    form = resolve(config, [file for split in SPLITS for file in files[split]], is_encoder_decoder)
    spec = _spec(config, encoder, files, form, template_path, is_encoder_decoder, packed_length)
    if done := manifest.already_done(paths.manifest, spec, redo=redo):
        made = ExampleFiles.of(paths, done)
        _check_bad_lines(config, [split.counts for split in made.splits], paths.quarantine)
        opening(f"examples: prepared already, {bin_path(made.train.prefix)} was made from the same files")
        return made
    template = _template(form, template_path, encoder, is_encoder_decoder)
    size = sum(file.bytes for each in files.values() for file in each)
    num_files = plural(sum(map(len, files.values())), "file")
    opening(f"examples: {num_files}, {bytes_text(size)}, {form.name} → {bin_path(paths.prefix('train'))}")
    work = _Preparation(
        config,
        paths,
        files,
        form,
        ExampleEncoder(encoder, is_encoder_decoder, template),
        LengthLimit(packed_length, config.overlong, is_encoder_decoder),
        encoder,
    )
    with _claimed(paths):
        tallies = work.run()
        check_unchanged([file for each in files.values() for file in each])
        facts = manifest_facts(form, template, encoder, tallies)
        outputs = list(_outputs(paths, tallies))
        for path in {*paths.written} - {*outputs, paths.manifest}:  # of a preparation with more splits, or bad lines
            path.unlink(missing_ok=True)
        done = manifest.write(paths.manifest, spec, {"examples": outputs}, facts, time.monotonic() - started)
    made = ExampleFiles.of(paths, done)
    summary("examples: prepared", _summary_rows(paths, made, tallies, time.monotonic() - started))
    _warn(tallies)
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
    template_path: Path | None,
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
    if template_path is not None:
        inputs["chat_template"] = template_path
    names = {"is_encoder_decoder": "init_from (is its model an encoder-decoder)"}
    return manifest.StepSpec(STEP, settings, inputs, lambda key: names.get(key, key))


def _template(
    form: ExampleFormat, path: Path | None, encoder: Encoder, is_encoder_decoder: bool
) -> ChatTemplate | None:
    if form.name != "messages":
        return None
    if path is None:
        return chat_template.auto_template(encoder, is_encoder_decoder)
    return chat_template.from_file(path, encoder, is_encoder_decoder)


@contextmanager
def _claimed(paths: ExamplePaths) -> Iterator[None]:
    """Claim the output for this process alone, and remove the manifest of what is there, and what a killed one left."""
    with made_folder(paths.manifest.parent), file_lock.held(paths.lock) as is_ours:
        if not is_ours:
            rule = f"{file_lock.read_holder(paths.lock) or 'another process'} is writing here"
            raise UserError(Fault(str(paths.manifest), rule, remedy="wait for it, or choose another output_prefix"))
        paths.manifest.unlink(missing_ok=True)
        for path in paths.written:
            remove_partials(path)
        yield


def _outputs(paths: ExamplePaths, tallies: Mapping[Split, SplitTally]) -> Iterator[Path]:
    for split in tallies:
        yield from (bin_path(paths.prefix(split)), idx_path(paths.prefix(split)))
        if split != "train":
            yield paths.records(split)
    if any(tally.bad for tally in tallies.values()):
        yield paths.quarantine


@dataclass(frozen=True)
class _Preparation:
    """The work of `prepare`."""

    config: FinetuneConfig
    paths: ExamplePaths
    files: Mapping[Split, list[InputFile]]
    form: ExampleFormat
    encode: ExampleEncoder
    limit: LengthLimit
    encoder: Encoder

    def run(self) -> dict[Split, SplitTally]:
        """Write every split and the quarantine; return their tallies."""
        draws = not self.files["valid"] and self.config.valid_fraction > 0
        total = sum(file.bytes for files in self.files.values() for file in files)
        total += sum(file.bytes for file in self.files["train"]) if draws else 0
        with Progress("examples", total, "B") as progress, atomic_file(self.paths.quarantine) as file:
            quarantine = Quarantine(file)
            tallies = self._drawn(quarantine, progress) if draws else self._train(quarantine, progress)
            for split in SPLITS[1:]:
                if self.files[split]:
                    seen = np.unique(np.concatenate([tally.sorted_keys() for tally in tallies.values()]))
                    with self._writer(split, quarantine, seen) as writer:
                        splits.read_into(self.files[split], self.form, writer, quarantine, progress)
                    tallies[split] = writer.tally
        self._check(tallies)
        if not quarantine.num_lines:
            self.paths.quarantine.unlink()
        return tallies

    def _train(self, quarantine: Quarantine, progress: Progress) -> dict[Split, SplitTally]:
        with self._writer("train", quarantine) as writer:
            splits.read_into(self.files["train"], self.form, writer, quarantine, progress)
        return {"train": writer.tally}

    def _drawn(self, quarantine: Quarantine, progress: Progress) -> dict[Split, SplitTally]:
        """Write the training examples, but for those that are drawn for validation."""
        files, config = self.files["train"], self.config
        drawn = splits.draw(files, self.form, config.valid_fraction, config.seed, progress)
        if not drawn:
            rule = "leaves no validation example: all training examples have the same input"
            raise UserError(config.fault("valid_fraction", rule, "give valid_data, or set it to 0"))
        with self._writer("train", quarantine) as train, self._writer("valid", quarantine) as valid:
            splits.read_into(files, self.form, train, quarantine, progress, valid, drawn.__contains__)
        return {"train": train.tally, "valid": valid.tally}

    @contextmanager
    def _writer(self, split: Split, quarantine: Quarantine, seen: Keys = NOTHING) -> Iterator[SplitWriter]:
        texts, dtype = None if split == "train" else self.paths.records(split), dtype_for(self.encoder.vocab_size)
        prefix = self.paths.prefix(split)
        with splits.split_writer(prefix, texts, dtype, self.encode, self.limit, quarantine, seen) as writer:
            yield writer

    def _check(self, tallies: Mapping[Split, SplitTally]) -> None:
        """Check that examples are left in every split, and that few lines are bad.

        Raises:
            UserError: not so; the quarantine file stays.
        """
        config, faults = self.config, list[Fault]()
        _check_bad_lines(config, [tally.counts for tally in tallies.values()], self.paths.quarantine)
        for split, tally in tallies.items():
            if not tally.kept + tally.cut:
                key = f"{split}_data" if self.files[split] else "valid_fraction"
                rule = f"leaves no {split} example: {tally.dropped:,} were dropped, {tally.bad:,} lines are bad"
                faults.append(config.fault(key, rule, "raise packed_length, or give other examples"))
        if faults:
            raise UserError(faults)


def _check_bad_lines(config: FinetuneConfig, counts: Sequence[SplitCounts], quarantine: Path) -> None:
    bad, lines = (sum(getattr(each, key) for each in counts) for key in ("bad", "read"))
    if bad > config.max_bad_fraction * lines:
        enough = math.ceil(1000 * bad / lines) / 1000
        rule = f"{bad:,} of {lines:,} lines hold no example ({bad / lines:.3g} of them)"
        remedy = f"each is listed in {quarantine}; repair them, or set max_bad_fraction to {enough:g}"
        raise UserError(config.fault("max_bad_fraction", rule, remedy))


def _summary_rows(
    paths: ExamplePaths, made: ExampleFiles, tallies: Mapping[Split, SplitTally], seconds: float
) -> list[tuple[str, str]]:
    """Rows of (name, value)."""
    rows = list[tuple[str, str]]()
    for split, tally in tallies.items():
        counts = tally.counts
        share = counts.learned_tokens / max(1, counts.tokens)
        text = f"{counts.read:,} examples = {counts.kept:,} kept + {counts.cut:,} cut + {counts.dropped:,} dropped"
        rows.append((split, f"{text} + {counts.bad:,} bad; {counts.tokens:,} tokens, {share:.1%} of them learned"))
        if counts.cut_learned_tokens:
            rows.append(("", f"{counts.cut_learned_tokens:,} tokens of answers were cut away with their questions"))
    if any(tally.bad for tally in tallies.values()):
        rows.append(("bad lines", f"listed in {paths.quarantine}"))
    if made.labels:
        shown = ", ".join(made.labels[:8]) + (f" and {len(made.labels) - 8:,} more" if made.labels[8:] else "")
        rows.append(("labels", shown))
    rows.append(("longest answer", f"{made.longest_answer:,} tokens"))
    return [*rows, ("time", seconds_text(seconds))]


def _warn(tallies: Mapping[Split, SplitTally]) -> None:
    """Say what may make a result look better, or worse, than it is."""
    for split, tally in tallies.items():
        used = tally.kept + tally.cut
        earlier = "a training or validation" if split == "test" and "valid" in tallies else "a training"
        if tally.seen:
            log(f"warning: {tally.seen:,} of {used:,} {split} examples have the input of {earlier} example")
        if tally.unknown_answers:
            what = "have characters that the tokenizer does not know, so that no answer can equal them"
            log(f"warning: {tally.unknown_answers:,} of {used:,} {split} answers {what}")
