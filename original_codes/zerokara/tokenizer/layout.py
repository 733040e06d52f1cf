"""The files of a tokenizer in its folder (`output_dir` of step 1), beside its manifest."""

from __future__ import annotations

from zerokara.durable import PARTIAL_SUFFIX

MODEL_NAME = "tokenizer.model"
VOCABULARY_NAME = "tokenizer.vocab"
REPORT_NAMES = ("report.json", "report.txt", "report.html")
TOKENIZER_NAMES = (MODEL_NAME, VOCABULARY_NAME, *REPORT_NAMES)
LOG_NAME = "training.log"
LOG_HEADER = "# zerokara, step 1: the log of SentencePiece's trainer\n"
"""First line of the log, by which a log without a manifest, of a training that failed, is known as ours."""
WORK_NAME = f"work{PARTIAL_SUFFIX}"
"""Folder that is there from the start of step 1 until its manifest is written."""
