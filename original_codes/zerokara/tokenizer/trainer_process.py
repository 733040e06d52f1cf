"""SentencePiece's trainer in a separate process, whose log is kept and shown as progress.

The trainer writes to the standard error of the whole process, takes many times the memory of the sample, and aborts
when there is not enough: so its output goes to a log, its memory is given back, and its abort becomes an error message.
That process (`python -m zerokara.tokenizer.trainer_process`) imports SentencePiece and little else.
Source: the log of sentencepiece 0.2.3, which is silent for minutes in some phases (suffixes, pruning).
"""

import json
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from zerokara.base.resources import end_with_parent

_PHASES = {
    "Starts training": ("reading the sentences", 0.01),
    "Normalizing sentences": ("counting characters", 0.06),
    "Start processing": ("sorting all suffixes for candidates", 0.4),
    "Filtering and sorting": ("choosing candidates", 0.04),
    "Tokenizing input sentences": ("gathering equal words", 0.03),
    "EM training": ("estimating probabilities and pruning", 0.25),
    "PruneUnreachableSentencePieces pruned": ("finishing", 0.0),
}
"""Phases, in their order, by a part of the line with which each begins: its name, and its seconds for a megabyte (4 MB
of Portuguese and of Japanese on one core)."""
_PHASE = re.compile("|".join(map(re.escape, _PHASES)))
_MERGE_LINE = re.compile(r"Added: freq=\d+ size=(\d+)")
_OTHER_DIGIT, _NO_DIGIT = re.compile(r"(?![0-9\uff10-\uff19])(\d)"), re.compile(r"(?!)")
"""Decimal digits (category Nd) but the ASCII and full-width ones, which are all that the trainer's own `split_digits`
splits; a pattern that is nowhere."""
BEAT_SECONDS = 1.0


def run(options: dict[str, Any], sentences: Path, model: Path, vocab_size: int, log: IO[str]) -> tuple[int, str, int]:
    """Train on a file with one sentence per line, and write the file `model`; the trainer's output goes to `log`.

    `options` are the keyword arguments of SentencePiece's trainer; the progress counts up to `vocab_size`. Return the
    exit code (negative for a signal), the last line of the log, and the peak memory in bytes (0 where it failed).
    """
    job = {"sentences": str(sentences), "model": str(model), "options": options, "parent": os.getpid()}
    job_path = model.with_suffix(".json")
    job_path.write_text(json.dumps(job), encoding="utf-8")
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "zerokara.tokenizer.trainer_process", str(job_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert process.stderr is not None and process.stdout is not None
    try:
        last_line = follow(process.stderr, options["model_type"], vocab_size, log, sentences.stat().st_size)
        code = process.wait()
        printed = process.stdout.read()
    finally:
        process.kill()
        process.communicate()
    return code, last_line, 0 if code else int(printed)


def follow(trainer_output: IO[bytes], model_type: str, vocab_size: int, log: IO[str], num_bytes: int) -> str:
    """Copy the trainer's output to the log, and show its phase, with the time it takes of so much text, and the pieces
    merged; return the last line."""
    from zerokara.base.progress import Progress, seconds_text  # tqdm: 3 MB that the trainer's process does without

    last = ""
    counted: dict[str, Any] = {"total": vocab_size, "unit": "piece"} if model_type == "bpe" else {"unit": ""}
    with Progress(f"training {model_type}", **counted) as progress:
        for line in _lines(trainer_output):
            log.write(line)
            last = line.strip() or last
            if phase := _PHASE.search(line):
                name, seconds = _PHASES[phase[0]]
                time = f" (about {seconds_text(seconds * num_bytes / 1e6)})" if seconds else ""
                progress.set_postfix_str(name + time, refresh=False)
            merged = _MERGE_LINE.search(line)
            progress.advance(int(merged[1]) - progress.n if merged else 0)
    log.flush()
    return last


def _lines(trainer_output: IO[bytes]) -> Iterator[str]:
    """Yield the lines as they come, and an empty string for every second without one."""
    rest = b""
    while True:
        if not select.select([trainer_output], [], [], BEAT_SECONDS)[0]:
            yield ""
            continue
        if not (content := os.read(trainer_output.fileno(), 65536)):
            break
        *lines, rest = (rest + content).split(b"\n")
        yield from (line.decode(errors="backslashreplace") + "\n" for line in lines)
    if rest:
        yield rest.decode(errors="backslashreplace")


def main(job_path: Path) -> None:
    """Train as the job says, in the trainer's process, and print its peak memory in bytes."""
    job = json.loads(job_path.read_text(encoding="utf-8"))
    end_with_parent(job["parent"])
    import sentencepiece

    # Each digit is a line, so that no piece holds it and another character; no dummy prefix may stand before it, then.
    options, prefix, digit = job["options"], "", _OTHER_DIGIT if job["options"]["split_digits"] else _NO_DIGIT
    if options["add_dummy_prefix"]:
        prefix, options["add_dummy_prefix"] = " ", False
        options["max_sentence_length"] += len(prefix)
    with open(job["sentences"], encoding="utf-8", newline="\n") as sentences, open(job["model"], "wb") as model:
        lines = (part for line in sentences for part in digit.split(prefix + line[:-1]) if part)
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **options)
    # The peak of this program alone; that of getrusage starts at the size of the parent process.
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    print(next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
