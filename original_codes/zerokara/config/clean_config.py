"""`clean_config.yaml`: cleaning the text before step 1."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from zerokara.base.errors import Fault
from zerokara.config.settings import Auto, Fraction, Names, NaturalInt, PositiveInt, Settings, Text, Words

FilterName = Literal["GopherQualityFilter", "GopherRepetitionFilter", "FineWebQualityFilter"]


class CleanedText(Settings):
    """Cleaning the text (before step 1)"""

    input: Names = ("data/embedded/corpus.jsonl",)
    """Raw text; each entry is one source: a file (.jsonl or .txt, plain or compressed as .gz or .zst; or .parquet), a
    glob, a folder, a file that lists such entries ("@files.txt"), or a dataset on the Hub
    (hf://datasets/owner/name[@revision][/path]). Of equal texts the first is kept, so name the best source first."""
    text_field: Text = "text"
    """Field of a JSON line, or column of a .parquet, that holds the text."""
    txt_document: Literal["file", "line"] = "file"
    """Document of a .txt file: the whole `file`, or each `line`."""
    max_bad_fraction: Fraction = 0.01
    """Largest tolerated share of unreadable documents, and of bytes that damaged files lost; above it no clean text is
    written."""
    output_dir: Text = "data/embedded/clean"
    """Folder for report.html, the clean text (text/*.jsonl.zst), and what each rule dropped (dropped/)."""
    report_only: bool = True
    """Only report what is in the text and what the rules would drop; false also puts the clean text into output_dir."""


class Rules(Settings):
    """Rules, in their order; 0, false, [] or {} turns one off"""

    encoding_damage: Fraction = 0.01
    """Drop documents in which a wrong decoding damaged more than this share of the characters: U+FFFD, and mojibake as
    ftfy recognises it."""
    evaluation_overlap: NaturalInt = 13
    """Drop documents that share this many words in a row (in scripts without spaces, three times as many characters)
    with evaluation_data: scores on it would be worthless. A shorter text must occur as a whole; a text of fewer than 8
    words is not looked for."""
    evaluation_data: Words = ("config.yaml", "evaluate_config.yaml", "finetune_config.yaml")
    """Text files; or configuration files, whose texts, test_data, valid_data and valid_jsonl name the files to look
    for."""
    languages: Words = ()
    """Keep only documents in these languages, e.g. [pt, en], as fastText's lid.176 recognises them: ISO 639 codes of
    176 languages."""
    filters: dict[FilterName, dict[str, Any]] = Field(default_factory=dict)
    """Filters of datatrove (GopherQualityFilter, GopherRepetitionFilter, FineWebQualityFilter) with their thresholds,
    e.g. {GopherQualityFilter: {min_doc_words: 20}, FineWebQualityFilter: {}}. They were made for English web pages: see
    in the report what they would drop."""
    exact_duplicates: bool = True
    """Drop all but the first of equal texts."""
    near_duplicates: Annotated[float, Field(ge=0, le=0.95)] = 0.8
    """Drop documents with about this similarity to an earlier one, or more. It is the Jaccard similarity of their
    n-grams, five words or signs in a row (characters in scripts without spaces), which MinHash estimates to within
    0.05. The setting must be at least 0.5."""
    repeated_lines: NaturalInt = 20
    """Remove menus, cookie notices and signatures: lines beside each other, with at least 40 characters together (20 in
    scripts without spaces), that this many documents or more repeat. They go from the beginning and the end of all
    documents but the first."""


class CleanConfig(Rules, CleanedText):
    """Cleaning the text."""

    executor: Literal["local", "slurm", "ray"] = "local"
    """Where the work is done: on this machine, as Slurm jobs, or on a running Ray cluster. The last two use datatrove's
    executors, and all machines must see the same disk."""
    executor_options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of SlurmPipelineExecutor or RayPipelineExecutor, e.g. {partition: cpu, time: "24:00:00"}."""
    num_workers: PositiveInt | Auto = "auto"
    """Processes on this machine; `auto` is one per core, but at most one per 2 GB of free memory."""

    def rules(self) -> Iterator[Fault]:
        for key, least in (("near_duplicates", 0.5), ("evaluation_overlap", 8), ("repeated_lines", 2)):
            if 0 < getattr(self, key) < least:
                yield self.fault(key, f"must be 0, or at least {least}")
        if self.executor == "slurm" and not self.executor_options.get("partition"):
            yield self.fault("executor_options", "must name a partition", "e.g. {partition: cpu}", ["executor"])
        if self.executor == "local" and self.executor_options:
            yield self.fault("executor_options", "has no effect with executor: local", "remove them", ["executor"])
