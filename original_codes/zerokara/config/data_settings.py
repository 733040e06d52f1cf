"""What step 2 reads of `config.yaml`: where the text is, and how it becomes tokens."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from zerokara.config.settings import Auto, Fraction, NaturalWhole, PositiveWhole, Settings, Text, Words


class DataSettings(Settings):
    """Text to tokens (step 2)."""

    input_jsonl: Words = ("data/embedded/corpus.jsonl",)
    """Raw text, each entry one source: a file (.jsonl or .txt, each plain, .gz or .zst; .parquet), a glob, a folder, a
    file that lists such entries ("@files.txt"), or a dataset on the Hub (hf://datasets/owner/name[@revision][/path])."""
    text_field: Text = "text"
    """Field of a JSON line, or column of a .parquet, that holds the text."""
    txt_document: Literal["file", "line"] = "file"
    """Whether a document of a .txt file is the whole `file` or each `line`."""
    input_tokenizer_file: Text = "tokenizers/embedded/tokenizer.model"
    """The tokenizer.model of step 1, or another SentencePiece model, such as that of the model that init_from names."""
    output_prefix: Text = "data/embedded/tokens"
    """Path and beginning of the name of the token files: <output_prefix>_text_document.bin and .idx."""
    num_workers: PositiveWhole | Auto = "auto"
    """Worker processes, on a cluster those of each part; `auto` is one per core."""
    cluster: Literal["none", "slurm", "ray"] = "none"
    """Where step 2 tokenises: `none` is this machine; `slurm` submits an array of jobs (2_tokenize.sbatch), `ray` gives
    tasks to the Ray cluster that runs. All machines see this repository, the text and output_prefix at the same
    paths."""
    cluster_parts: PositiveWhole | Auto = "auto"
    """Parts of the work on a cluster, each for one machine; as many run at once as the cluster has room for. `auto` is
    one for each 8 GB of text, 4 at least."""
    max_bad_fraction: Fraction = 0.01
    """Largest tolerated share of bad documents, and of bad bytes of the files on disk; above either the step fails. Bad
    are lines that are no documents or longer than 64 MiB, and what damaged files lost or cannot verify (all of a
    truncated packed file)."""
    valid_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.01
    """Share of each source's documents held out for validation: drawn at random, never trained on; 0 for none."""
    valid_min_documents: NaturalWhole = 10
    """Least number of validation documents from each source (unless valid_fraction is 0)."""
    split_seed: NaturalWhole = 1234
    """Seed of that draw."""
