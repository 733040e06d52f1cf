"""A full disk: a save that is refused, or fails in the middle, ends no run; later saves make up for it.

Step 2 on a disk with just the space that it estimates, and with a little less, started and resumed.
"""

import errno
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.running import COMMON, Forge, assert_equal, wait_for, whole_checkpoints, with_small_disk
from tiny import Trained

from zerokara.steps import tokenize

SETTINGS: dict[str, Any] = {**COMMON, "tensorboard": "true"}


class Disk:
    """The small disk, seen from here."""

    def __init__(self, disk: Path, forge: Forge, name: str):
        self.run_dir, self.filler = disk / name, disk / "filler"
        """As the training sees them."""
        self._root = f"/proc/{forge.process.pid}/root"
        self.seen = Path(f"{self._root}{self.run_dir}")
        """The run folder as we see it."""

    def fill(self, left: int = 0) -> None:
        block = b"x" * 4096
        with open(f"{self._root}{self.filler}", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(block)
            except OSError:
                pass
            file.truncate(max(0, file.tell() - left))

    def clear(self) -> None:
        Path(f"{self._root}{self.filler}").unlink(missing_ok=True)


@pytest.fixture
def small(forge: Forge, request: pytest.FixtureRequest) -> Iterator[Disk]:
    if forge.disk is None:
        pytest.skip("this machine gives its users no mounts of their own (unshare --user --mount)")
    made = Disk(forge.disk, forge, request.node.name)
    yield made
    made.clear()
    subprocess.run(["rm", "-rf", str(made.seen)], check=True)


def test_a_full_disk_ends_no_run_before_its_end(forge: Forge, small: Disk, unbroken: Trained) -> None:
    """Full before a save, then in the middle of one and for some steps, and at the very end."""
    small.fill(left=2**20)
    fault = {
        "retry_seconds": 0.1, "patience_seconds": 1.5, "reminder_seconds": 0.2,
        "fill_in": [[14, 44], str(small.filler)],
        "hold": [{"at_step": 7, "gone": str(small.filler)}, {"at_step": 19, "event": {"saved": 18}}],
    }  # fmt: skip

    def refusals() -> list[dict[str, Any]]:
        return [event for event in forge.events if "refused" in event]

    forge.start(small.run_dir, fault, **SETTINGS)
    wait_for(lambda: 6 in forge.values("step") and 4 in forge.values("refused"))
    before = refusals()  # once: there are more by the next look
    assert {event["errno"] for event in before} == {errno.ENOSPC}
    assert before[0]["refused"] == 2 and not forge.values("saved")
    assert "step 2  checkpoint NOT saved" in forge.log and "step 2  was not saved" in forge.log
    assert not whole_checkpoints(small.seen)
    small.clear()
    wait_for(lambda: 18 in forge.values("refused"))  # nothing can be recorded meanwhile
    middle = next(event for event in refusals() if event["refused"] >= 14)
    assert middle == {"refused": 14, "errno": errno.ENOSPC, "file": "optimizer.safetensors"}
    assert not list(small.seen.glob("global_step*.partial/optimizer.safetensors"))
    assert whole_checkpoints(small.seen)[-2:] == [10, 12]
    small.clear()
    assert forge.wait() == 1, forge.log
    assert forge.values("saved")[-1] == 42 and forge.values("refused")[-1] == 44
    assert "step 44  checkpoint not saved yet" in forge.log
    assert "failed: " in forge.log and f"{small.run_dir}/global_step42" in forge.log
    assert whole_checkpoints(small.seen)[-1] == 42
    small.clear()
    assert forge.run(small.run_dir, **SETTINGS) == 0, forge.log
    assert_equal(small.seen, unbroken)


BODY = '''
import json, os, shutil, sys
from pathlib import Path
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus.find import find_files
from zerokara.steps import tokenize
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens import encode, estimate

given = dict(word.split("=", 1) for word in sys.argv[1:])
disk = Path(given["output_prefix"]).parents[1]
config = PretrainConfig(**given | {"input_jsonl": [given["input_jsonl"]], "num_workers": 1, "max_bad_fraction": 1.0})
files = find_files(config.input_jsonl, "")
_, expected, _ = estimate.prepare(config, files, Encoder(config.input_tokenizer_file))
estimated = estimate.peak_bytes(expected)

def leave(num_bytes):
    """Leave so much free."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    num_blocks = (shutil.disk_usage(disk).free - num_bytes) // 4096
    filler.write_bytes(bytes(4096 * num_blocks))

def run():
    return tokenize.main(["--config", "/dev/null", *(word for one in sys.argv[1:] for word in ("--set", one))])

def interrupt(*_):
    raise KeyboardInterrupt

results, little = {"estimated": estimated, "ids": expected.output_bytes}, 64 * 1024
leave(estimated - little)
results["less, started"] = run(), sorted(path.name for path in disk.iterdir())
leave(estimated + little)
write, encode.write_quarantine = encode.write_quarantine, interrupt
results["stopped"] = run()
encode.write_quarantine = write
left_behind = Path(f"{config.output_prefix}_tokenizing.partial").iterdir()
used = sum(path.stat().st_blocks * 512 for path in left_behind)
leave(estimated - used + little)
results["resumed"] = run()
shutil.copytree(disk / "out", "resumed")
shutil.rmtree(disk / "out")
leave(estimated + little)
results["started"] = run()
shutil.copytree(disk / "out", "started")
Path("results.json").write_text(json.dumps(results))
'''


def test_the_estimated_space_is_enough_and_less_is_refused(
    tiny_data: dict[str, str], python_path: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("disk").mkdir()
    if not (inside := with_small_disk(Path("disk"), 48 * 2**20)):
        pytest.skip("this machine gives its users no mounts of their own (unshare --user --mount)")
    chance = random.Random(7)
    words = json.loads(Path(tiny_data["input_jsonl"]).read_text(encoding="utf-8").splitlines()[0])["text"].split()
    with open("corpus.jsonl", "w", encoding="utf-8") as file:
        for number in range(6000):
            text = " ".join(chance.choices(words, k=80))
            file.write(json.dumps({"text": text}) + ("\n\n" if number % 10 == 0 else "\n"))
    given = [
        "input_jsonl=corpus.jsonl",
        f"input_tokenizer_file={tiny_data['input_tokenizer_file']}",
        "output_prefix=disk/out/tokens",
        "num_workers=1",
        "max_bad_fraction=1.0",
    ]
    done = subprocess.run(
        [*inside, sys.executable, "-c", BODY, *given], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(Path("results.json").read_text(encoding="utf-8"))
    assert results["less, started"] == [2, ["filler"]] and done.stderr.count("output_prefix = disk/out/tokens: ") == 1
    assert results["stopped"] == 130
    assert results["resumed"] == results["started"] == 0, done.stderr
    assert results["estimated"] < 1.7 * results["ids"], "twice the ids would need no shard to be let go of"
    settings = [word for one in given for word in ("--set", one.replace("disk/out", "free"))]
    assert tokenize.main(["--config", "/dev/null", *settings]) == 0
    for name in ("text_document.bin", "text_document.idx", "valid_text_document.bin", "quarantine.jsonl"):
        content = Path(f"free/tokens_{name}").read_bytes()
        assert content == Path(f"resumed/tokens_{name}").read_bytes() == Path(f"started/tokens_{name}").read_bytes()
