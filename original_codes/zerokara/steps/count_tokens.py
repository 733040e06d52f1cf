"""Tokens and documents of the token files that step 2 wrote, and the length of the run in tokens, steps and epochs."""

from functools import partial

from zerokara.base import manifest
from zerokara.base.errors import refuse
from zerokara.base.progress import bytes_text, log, summary
from zerokara.config.data import SampleLengths
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.writing import write_values
from zerokara.steps import command
from zerokara.tokens.indexed import IndexedTokens, TokenPaths, bin_path, open_splits
from zerokara.training.planning import run_folder, run_plan, schedule

WRITE_HELP = "write the tokens of `epochs` epochs into the configuration file as train_tokens, keeping its comments"


def count_tokens(config: PretrainConfig, options: command.Options) -> None:
    """Print the table; with --write, set `train_tokens` in the configuration file."""
    (train, valid), lengths = open_splits(config.output_prefix), config.lengths
    paths = TokenPaths(config.output_prefix)
    earlier = run_folder.read_earlier(config)
    plan = run_plan.make_plan(config, initial_settings=earlier.initial_settings if earlier else None)
    course, epoch_tokens = plan.schedule, lengths.samples_in(len(train.tokens)) * lengths.raw
    by_epochs = plan.requested.model_copy(update={"train_tokens": "auto"})
    samples = schedule.num_samples(by_epochs, *schedule.extent_of(plan.data.training))
    train_tokens, epochs = round(samples * lengths.raw), f"{config.epochs:g} epochs of {epoch_tokens:,}"
    refuse(schedule.epochs_faults(plan.requested, plan.consumption.sources))
    if config.is_mixture:
        epochs = "epochs and stages together"
        log("\n".join(schedule.table_lines(plan.data.training, course, plan.consumption)))
    length = f"auto: {train_tokens:,} tokens, {epochs}"
    if config.train_tokens != "auto":
        length = f"{config.train_tokens:,} tokens: {config.train_tokens / epoch_tokens:.3f} epochs of {epoch_tokens:,}"
    limit = ", which max_steps sets" if course.num_steps == config.max_steps else ""
    steps = f"{course.num_steps:,} steps{limit}, of {course.batch_tokens:,} tokens each"
    # The training documents of each source, where there are several and step 2 has finished.
    sources = manifest.read(paths.manifest).facts.get("sources", []) if paths.manifest.exists() else []
    trained = [source for source in sources if source["train"]["documents"] and sources[1:]]
    of_sources = [(f"  {source['entry']}", source["train"]) for source in trained]
    rows = [
        ("train", _split_text(train, lengths)),
        ("valid", _split_text(valid, lengths) if valid is not None else "none: step 2 held no document out"),
        *((name, f"{each['documents']:,} documents, {each['tokens']:,} training tokens") for name, each in of_sources),
        ("train_tokens", length),
        ("run", f"{steps}: {course.num_tokens:,} tokens, {course.epochs:.3f} epochs"),
        *plan.data.plan_rows,
    ]
    if options.write:
        rows.append(("config", write_values(options.config_path, {"train_tokens": train_tokens}, options.dry_run)))
    summary(f"{bin_path(paths.train)}", rows, command.next_command("3_train_node1.sh", options, config))


def _split_text(split: IndexedTokens, lengths: SampleLengths) -> str:
    documents, tokens = split.num_documents, len(split.tokens)
    per_document = f"{tokens / max(1, documents):.1f} per document with its end, {bytes_text(split.tokens.nbytes)}"
    sequences = f"{lengths.samples_in(tokens):,} sequences of {lengths.raw}"
    return f"{documents:,} documents, {tokens:,} tokens ({per_document}), {sequences}"


main = partial(command.run, "count_tokens.py", count_tokens, __doc__, write=WRITE_HELP)
