"""What step 2 tells of its result: the facts of the manifest, and the rows of the summary on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerokara.config.data import DataSettings
from zerokara.corpus.find import InputFile
from zerokara.errors import shown
from zerokara.progress import bytes_text, plural, seconds_text
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.accounts import damaged_text, reasons_text, total
from zerokara.tokens.encode import EncodedCorpus
from zerokara.tokens.indexed import dtype_for
from zerokara.tokens.layout import TokenPaths


def manifest_facts(
    config: DataSettings, files: Sequence[InputFile], encoded: EncodedCorpus, encoder: Encoder
) -> dict[str, Any]:
    """What the manifest records beside settings, inputs and outputs: counts in total, by split and by source."""
    sources = [
        {
            "entry": entry,
            "files": sum(file.source == source for file in files),
            **tally.facts(),
            "train": tally.train,
            "valid": tally.valid,
        }
        for source, (entry, tally) in enumerate(zip(config.input_jsonl, encoded.sources, strict=True))
    ]
    whole = total(encoded.sources)
    return {
        **whole.facts(),
        "documents_written": whole.train.documents + whole.valid.documents,
        "train": whole.train,
        "valid": whole.valid,
        "sources": sources,
        "text_bytes": whole.train.text_bytes + whole.valid.text_bytes,
        "text_bytes_per_second": round(encoded.done.text_bytes / max(encoded.seconds, 1e-9)),
        "encoder": encoded.encoder_name,
        "resumed_shards": encoded.resumed_shards,
        "tokenizer_sha256": encoder.sha256,
        "vocab_size": encoder.vocab_size,
        "eos_id": encoder.eos_id,
        "dtype": dtype_for(encoder.vocab_size).name,
    }


def summary_rows(
    config: DataSettings, encoded: EncodedCorpus, facts: dict[str, Any], seconds: float
) -> list[tuple[str, str]]:
    """Rows of (name, value); `seconds` are those of the whole step."""
    rows = []
    for entry, tally in zip(config.input_jsonl, encoded.sources, strict=True):
        not_read = tally.bytes_skipped.total() + tally.bytes_lost
        share = f" ({bytes_text(not_read)} of {bytes_text(tally.bytes_in)})" if not_read else ""
        rows.append((shown(entry), f"{tally.documents_in:,} documents in, {tally.skipped.total():,} skipped{share}"))
        for name, split in (("  train", tally.train), ("  valid", tally.valid)):
            text = f"{split.documents:,} documents, {split.tokens:,} tokens, {bytes_text(split.text_bytes)} of text"
            rows.append((name, text))
    whole = total(encoded.sources)
    if whole.skipped:
        quarantine = TokenPaths(config.output_prefix).quarantine
        rows.append(("skipped", f"{reasons_text(whole.skipped)}; listed in {quarantine}"))
    if whole.damaged:
        rows.append(("damaged", f"{plural(len(whole.damaged), 'file')}: {damaged_text(whole.damaged)}"))
    time_text = seconds_text(seconds)
    if facts["text_bytes_per_second"]:
        time_text += f"; encoding {bytes_text(facts['text_bytes_per_second'])}/s of text"
    if encoded.resumed_shards:
        time_text += f", after {encoded.resumed_shards:,} shards that an earlier run had finished"
    return [*rows, ("time", time_text)]
