"""Step 2: raw text → token files (.bin/.idx) for training and validation."""

import time
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from zerokara.base import manifest
from zerokara.base.errors import Fault, UserError, refuse
from zerokara.base.progress import bytes_text, count_text, log, plural, summary
from zerokara.base.resources import start_fork_server
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus.find import FoundFiles, InputFile, check_unchanged, find_files, for_manifest, note_tests
from zerokara.corpus.format_check import check_formats
from zerokara.steps import command, preflight
from zerokara.tokenizer.compatibility import notes
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import HuggingFaceEncoder, encoder_of
from zerokara.tokens import work_folder
from zerokara.tokens.encode import PRELOADED, Stage, encode_corpus, manifest_facts, summary_rows
from zerokara.tokens.estimate import prepare
from zerokara.tokens.indexed import TokenPaths, bin_path
from zerokara.tokens.quarantine import SourceTally, check_bad_fraction
from zerokara.tokens.shard_tasks import WHOLE, Part, num_workers


def tokenize(config: PretrainConfig, options: command.Options) -> None:
    """Tokenize the corpus or a part of it, unless it is done already; with --dry-run only say what would be done."""
    started, paths, name = time.monotonic(), TokenPaths(config.output_prefix), "step 2 tokenise"
    if options.part and options.merge:
        raise UserError(Fault("--part and --merge", "are two steps", remedy="merge when all parts are done"))
    stage: Stage = "encode" if options.part else "merge" if options.merge else "all"
    part = Part(*(options.part or options.merge or WHOLE))
    is_part = stage == "encode" or part != WHOLE
    if is_part:
        name += f", {stage} {part.number}/{part.num_parts}"
    files, faults = FoundFiles(), list[Fault]()
    try:
        encoder = encoder_of(config)
    except UserError as error:
        faults += error.faults
    try:
        files = find_files([entry for _, entry in config.entries], [config.where(key) for key, _ in config.entries])
        note_tests([file for file in files if config.entries[file.source][0] == "input_jsonl"])
    except UserError as error:
        faults += error.faults
    refuse(faults)
    work, steps = manifest_work(config, files, encoder), ("count_tokens.py", "3_train_node1.sh")
    following = "\nthen: ".join(command.next_command(step, options, config) for step in steps)
    if done := manifest.already_done(paths.manifest, work, redo=options.redo):
        # Version 1.0.0 recorded a damaged file as an object.
        damaged = [one if isinstance(one, str) else one["name"] for one in done.facts["damaged"]]
        tally = TypeAdapter(SourceTally).validate_python({**done.facts, "damaged": damaged})
        check_bad_fraction(config, tally, paths)
        if not options.dry_run and not any(paths.work_folder.glob("*.lengths")):  # those of parts that wait for a merge
            work_folder.discard(paths)  # of a step that was killed after it had written its manifest
        log(f"step 2 tokenise: done already, {bin_path(paths.train)} was made from the same text (--redo: again)")
        log(f"next: {following}")
        return
    other = TokenPaths(config.output_prefix.removesuffix("_valid"))
    if other.train != paths.train and (other.manifest.exists() or other.work_folder.exists()):
        rule = f"would give the training tokens the name of the validation tokens of {other.output_prefix}"
        raise UserError(config.fault("output_prefix", rule, "choose another name"))
    preflight.check(config, preflight.of_tokens(config), input_jsonl=files)
    check_formats(files, config.text_field, config.txt_document, config.where("text_field"))
    start_fork_server(PRELOADED)  # it imports while this process prepares
    choice, expected, texts = prepare(config, files, encoder)
    if isinstance(encoder, HuggingFaceEncoder) or encoder.model.charsmap:
        from zerokara.huggingface.tokenizer_proof import prove, tokenizer_of_exports  # transformers, seconds to import

        if differences := prove(encoder, tokenizer_of_exports(encoder, False), texts).faults:
            rule = f"gives other ids in transformers, so that no export could be proved: {differences[0]}"
            remedy = "use another tokenizer; one of step 1 with normalization_rule_name: identity is always equal"
            raise UserError(config.fault("input_tokenizer_file", rule, remedy))
    corpus = f"{plural(len(files), 'file')}, {bytes_text(sum(file.bytes for file in files))}"
    tokens = f"about {count_text(expected.tokens)} tokens, {bytes_text(expected.output_bytes)}"
    workers = plural(num_workers(config, files), "worker")
    log(f"{name}: {corpus} → {bin_path(paths.train)} ({tokens}), {workers}")
    log(f"  encoder: {choice.name}, {choice.reason}")
    for note in [*notes(encoder), *([expected.loss] if expected.loss else [])]:
        log(f"  tokenizer: {note}")
    if options.dry_run:
        log("dry run: nothing was written")
        return
    encoded = encode_corpus(config, files, encoder, choice, stage, part)
    if is_part:
        before = plural(encoded.resumed_shards, "shard")
        text = f"{bytes_text(encoded.text_bytes)} of text encoded, {before} there before"
        flags = ["--merge", *(["--redo"] if options.redo else [])]
        following = command.next_command("2_tokenize.sh", options, config, flags=flags)
        summary(f"{name}: done", [("work", text)], f"when all {part.num_parts} are done: {following}")
        return
    facts = manifest_facts(config, files, encoded, encoder)
    seconds = time.monotonic() - started
    check = partial(check_unchanged, files)
    manifest.write(paths.manifest, work, {"tokens": paths.outputs}, facts, seconds, encoded.hashes, check=check)
    work_folder.discard(paths)
    rows = summary_rows(config, encoded, time.monotonic() - started)
    summary(f"{name}: done", [*rows, *([("text lost", expected.loss)] if expected.loss else [])], following)


def manifest_work(config: PretrainConfig, files: list[InputFile], encoder: Encoder) -> manifest.StepSpec:
    """Return the settings and inputs that the token files depend on."""
    names = ("text_field", "txt_document", "valid_fraction", "valid_min_documents", "split_seed")
    settings = {name: getattr(config, name) for name in names}
    inputs: dict[str, Any] = {"input_tokenizer_file": encoder.record}
    for source, (key, _) in enumerate(config.entries):
        of_entry = for_manifest([file for file in files if file.source == source])
        settings.setdefault(f"{key} (number of files of each entry)", []).append(len(of_entry))
        inputs.setdefault(key, []).extend(of_entry)
    return manifest.StepSpec(preflight.TOKENS_STEP, settings, inputs)


main = partial(
    command.run,
    "2_tokenize.sh",
    tokenize,
    __doc__,
    part="encode part I of N (0/20 to 19/20), and do not merge; all parts share the disk, and run on any machines",
    merge="merge what all parts have encoded; with I/N only a share of it, so that several machines can merge at once",
)
