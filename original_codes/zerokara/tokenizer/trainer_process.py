"""One SentencePiece training, in a process of its own: `python -m zerokara.tokenizer.trainer_process JOB.json`.

A separate process, because the trainer writes to the standard error of the whole process, takes many times the memory
of the sample, and aborts when there is not enough: so its output goes to a log, its memory is given back, and its abort
becomes an error message. In: a JSON file with `sentences` (a file with one sentence per line), `model` (the file to
write), `options` (keyword arguments of SentencePiece's trainer) and `parent` (the id of the waiting process, with which
this one ends). Out: the model, and on standard output the peak memory of the process in bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import sentencepiece

from zerokara.resources import end_with_parent


def main(job_path: Path) -> None:
    """Train as the job says."""
    job = json.loads(job_path.read_text(encoding="utf-8"))
    end_with_parent(job["parent"])
    with open(job["sentences"], encoding="utf-8", newline="\n") as sentences, open(job["model"], "wb") as model:
        lines = (line[:-1] for line in sentences)
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **job["options"])
    print(_peak_memory_bytes())


def _peak_memory_bytes() -> int:
    """Of this program alone; the peak of getrusage starts at the size of the parent process."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
