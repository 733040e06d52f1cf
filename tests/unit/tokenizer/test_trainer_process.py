"""While SentencePiece works, something is shown all the time; and it does not go on working for nobody."""

import io
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from zerokara.base import progress
from zerokara.tokenizer import trainer_process

UNIGRAM_LOG = [
    "trainer.cc] Starts training with :",
    "unigram.cc] [Chunk #1] Start processing 20005137 bytes (base_min_freq=2)...",
    "",
    "unigram.cc] Using 91099 sentences for EM training",
    "",
    "unigram.cc] PruneUnreachableSentencePieces pruned 0 unreachable pieces out of 35200",
]
"""What the trainer says, in short; an empty line stands for a silence."""
BPE_LOG = ["trainer.cc] Starts training with :", "bpe.cc] Added: freq=5 size=20 all=99", ""]


def _follow(said: list[str], model_type: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Follow a log that is written with silences; gives the log and the last line."""
    monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr(trainer_process, "BEAT_SECONDS", 0.02)
    reading, writing = os.pipe()

    def speak() -> None:
        with open(writing, "wb") as file:
            for line in said:
                if not line:
                    time.sleep(0.6)
                    continue
                # A line may come in parts, and a part may end within a character.
                for part in (line.encode()[:20], line.encode()[20:] + b"\n"):
                    file.write(part)
                    file.flush()

    speaker = threading.Thread(target=speak)
    speaker.start()
    log = io.StringIO()
    with open(reading, "rb") as words:
        last = trainer_process.follow(words, model_type, 400, log, 20_005_137)
    speaker.join()
    return log.getvalue(), last


def test_each_silence_is_named_and_timed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    log, last = _follow(UNIGRAM_LOG, "unigram", monkeypatch)
    assert log == "".join(line + "\n" for line in UNIGRAM_LOG if line)
    assert last == UNIGRAM_LOG[-1]
    shown = capsys.readouterr().err
    for phase in ("sorting all suffixes for candidates", "estimating probabilities"):
        assert len(re.findall(rf"^training unigram: 00:0\d, {phase}.* \(about \d", shown, re.MULTILINE)) >= 2, shown
    _follow(BPE_LOG, "bpe", monkeypatch)
    assert "training bpe:   5% 20/400 [00:00<" in capsys.readouterr().err, "merges are counted"


_STEP = """
import os, sys
from pathlib import Path
from zerokara.config.tokenizer_config import TokenizerConfig
from zerokara.tokenizer import training
folder = Path(sys.argv[1])
training.train(TokenizerConfig(), folder / "sentences", folder, folder / "log")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_the_trainer_ends_when_the_step_is_killed(root: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "sentences")  # Nobody writes to it, so that the trainer waits for ever.
    environment = {**os.environ, "PYTHONPATH": str(root / "original_codes")}
    step = subprocess.Popen([sys.executable, "-c", _STEP, str(tmp_path)], env=environment)
    trainer = None
    try:
        end = time.monotonic() + 30
        while trainer is None and time.monotonic() < end:
            time.sleep(0.05)
            children = psutil.Process(step.pid).children()
            at_work = (one for one in children if any("sentencepiece" in entry.path for entry in one.memory_maps()))
            trainer = next(at_work, None)
        assert trainer is not None and trainer.is_running()
        step.kill()
        step.wait()
        _, alive = psutil.wait_procs([trainer], timeout=10)
        for process in alive:
            process.kill()
        assert not alive
    finally:
        step.kill()
        step.wait()
