"""datatrove's MinHash as its own example runs it, for `deduplication.py`; arguments: CORPUS OUT WORKERS PATTERN.

The settings are its own: 14 buckets of 8 hashes, of runs of 5 words; it says that half of the pairs are found from a
Jaccard of 0.72 on. A task takes whole files. Words are found by a pattern, which is quicker than its tokenizers of
languages, and its output is packed by zstd, which is quicker than its gzip.
"""

# mypy: disable-error-code="import-not-found, misc"
import re
import sys
from pathlib import Path

import regex
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.word_tokenizers import WordTokenizer


class Words(WordTokenizer):
    """What a pattern matches; MinHash asks for nothing else."""

    def __init__(self, pattern: str):
        super().__init__()
        self.pattern = (regex if "\\p" in pattern else re).compile(pattern)  # re is quicker, and knows no scripts

    def word_tokenize(self, text: str) -> list[str]:
        """The words."""
        return self.pattern.findall(text)

    sent_tokenize = span_tokenize = word_tokenize


if __name__ == "__main__":
    corpus, out, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    files = len(list(Path(corpus).glob("*.jsonl")))
    signatures, buckets, removed = (f"{out}/{name}" for name in ("signatures", "buckets", "removed"))
    reader = JsonlReader(corpus, glob_pattern="*.jsonl")
    kept, dropped = (JsonlWriter(f"{out}/{name}", "${rank}.jsonl.zst", "zstd") for name in ("kept", "dropped"))
    stages = [
        (files, [reader, MinhashDedupSignature(signatures, language=Words(sys.argv[4]))]),
        (14, [MinhashDedupBuckets(signatures, buckets)]),
        (1, [MinhashDedupCluster(buckets, removed)]),
        (files, [reader, MinhashDedupFilter(removed, dropped), kept]),
    ]
    for number, (tasks, pipeline) in enumerate(stages):
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=workers, logging_dir=f"{out}/logs/{number}").run()
