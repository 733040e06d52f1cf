"""Tokens and documents of the token files that step 2 wrote, and what `train_tokens` means in epochs."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from zerokara import manifest
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.config.sample_lengths import SampleLengths
from zerokara.durable import write_text
from zerokara.errors import RunError, UserError
from zerokara.progress import bytes_text, summary
from zerokara.steps import command, next_command, outputs
from zerokara.tokens.count import SplitCount, count
from zerokara.tokens.layout import TokenPaths, bin_path

WRITE_HELP = "write the tokens of `epochs` passes into the configuration file as train_tokens, keeping its comments"


def count_tokens(config: PretrainConfig, options: command.Options) -> None:
    """Print the table, and set `train_tokens` in the configuration file when asked."""
    if options.write:
        outputs.check(outputs.of_count(config, options.config_path))
    counts = count(config.output_prefix)
    paths = TokenPaths(config.output_prefix)
    lengths = config.lengths
    one_pass = lengths.samples_in(counts.train.tokens) * lengths.raw
    if one_pass == 0:
        rule = f"is longer than the whole training text, which has {counts.train.tokens:,} tokens"
        raise UserError(config.fault("seq_len", rule, f"set it below {counts.train.tokens:,}, or use more text"))
    is_mixed = bool(config.stages) or config.source_weights != "proportional"
    wanted, table = _mixture(config) if is_mixed else (round(config.epochs * one_pass), [])
    rows = [("train", _split_text(counts.train, lengths))]
    rows.append(("valid", _split_text(counts.valid, lengths) if counts.valid else "none (valid_fraction is 0)"))
    rows += _source_rows(paths)
    if config.train_tokens == "auto":
        passes = "as the table below says" if is_mixed else f"{config.epochs:g} passes of {one_pass:,}"
        rows.append(("train_tokens", f"auto: {wanted:,} tokens, {passes}"))
    else:
        passes = f"{config.train_tokens / one_pass:.3f} passes of {one_pass:,}"
        rows.append(("train_tokens", f"{config.train_tokens:,} tokens: {passes}"))
    if options.write:
        if options.dry_run:
            rows.append(("dry run", f"would write train_tokens: {wanted} into {options.config_path}"))
        else:
            write_train_tokens(options.config_path, wanted)
            rows.append(("written", f"train_tokens: {wanted} into {options.config_path}"))
    following = next_command.render(next_command.TRAIN, options, "config.yaml", config)
    summary(f"{bin_path(paths.train)}", rows, None if table else following)
    if table:
        print("", *table, f"next: {following}", sep="\n")


def _mixture(config: PretrainConfig) -> tuple[int, list[str]]:
    """The tokens of a run that mixes sources, and the table of what it takes of each."""
    # Half a second with numpy and the order itself: only where sources are mixed.
    from zerokara.samples.reading_plan import ReadingPlan
    from zerokara.training.planning import consumption

    plan = ReadingPlan.from_config(config)
    schedule = consumption.schedule_of(config, plan)
    table = consumption.consumption(plan, schedule)
    consumption.check_epochs(config, table)
    return schedule.num_tokens, [*consumption.table_lines(table), *consumption.warnings(config, table)]


def _source_rows(paths: TokenPaths) -> list[tuple[str, str]]:
    """The training documents of each source, where there are several and step 2 has ended."""
    if not paths.manifest.exists():
        return []
    sources = manifest.read(paths.manifest).facts.get("sources", [])
    named = [(f"  {source['entry']}", source["train"]) for source in sources if sources[1:]]
    return [
        (name, f"{split['documents']:,} documents, {split['tokens']:,} tokens to train on") for name, split in named
    ]


def write_train_tokens(config_path: Path, train_tokens: int) -> None:
    """Change the value of `train_tokens` in a YAML file, or append the key, and nothing else.

    Raises:
        RunError: the file does not load to the same configuration with that one value; it is left as it was.
    """
    before = config_path.read_bytes().decode("utf-8")
    pattern = re.compile(r"""^(train_tokens[ \t]*:[ \t]*)("[^"\n]*"|'[^'\n]*'|[^\s#]+)?""", re.MULTILINE)
    if pattern.search(before):
        after = pattern.sub(lambda found: f"{found[1].rstrip()} {train_tokens}", before, count=1)
    else:
        after = before + ("" if before.endswith("\n") or not before else "\n") + f"train_tokens: {train_tokens}\n"
    trial = config_path.with_name(config_path.name + ".trial.partial")
    expected = load(PretrainConfig, config_path, [f"train_tokens={train_tokens}"])
    try:
        trial.write_bytes(after.encode("utf-8"))
        as_wished = load(PretrainConfig, trial).model_dump() == expected.model_dump()
    except UserError:
        as_wished = False
    finally:
        trial.unlink(missing_ok=True)
    if not as_wished:
        raise RunError(
            f"{config_path}: cannot change train_tokens without touching something else; write by hand: "
            f"train_tokens: {train_tokens}"
        )
    write_text(config_path, after)


def _split_text(split: SplitCount, lengths: SampleLengths) -> str:
    return (
        f"{split.documents:,} documents, {split.tokens:,} tokens ({split.mean_tokens:.1f} a document with its end, "
        f"{bytes_text(split.bytes)}), {lengths.samples_in(split.tokens):,} sequences of {lengths.raw}"
    )


def main(argv: Sequence[str]) -> int:
    """Command line of the count; gives the exit code."""
    return command.run(count_tokens, argv, PretrainConfig, "config.yaml", __doc__ or "", write=WRITE_HELP)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
