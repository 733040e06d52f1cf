"""Step 2 on a disk with just the space that it estimates, and with a little less, started and resumed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from faults.running import with_small_disk

from zerokara.steps import tokenize

BODY = '''
import json, os, shutil, sys
from pathlib import Path
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.corpus.find import find_files
from zerokara.corpus.read import total_plain_bytes
from zerokara.steps import tokenize
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens import encode, estimate

given = dict(word.split("=", 1) for word in sys.argv[1:])
disk = Path(given["output_prefix"]).parents[1]
config = PretrainConfig(**given | {"input_jsonl": [given["input_jsonl"]], "num_workers": 1, "max_bad_fraction": 1.0})
files = find_files(config.input_jsonl, "")
places = estimate.sample_corpus(config, files)
expected = estimate.estimate_tokens(total_plain_bytes(files), places, Encoder(config.input_tokenizer_file))
estimated = estimate.peak_bytes(config, files, expected)

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
leave(estimated - used - little)
results["less, resumed"] = run()
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
    assert results["less, started"] == [2, ["filler"]] and done.stderr.count("output_prefix = disk/out/tokens: ") == 2
    assert results["stopped"] == 130
    assert results["less, resumed"] == 2 and "unfinished" in done.stderr
    assert results["resumed"] == results["started"] == 0, done.stderr
    assert results["estimated"] < 1.7 * results["ids"], "twice the ids would need no shard to be let go of"
    settings = [word for one in given for word in ("--set", one.replace("disk/out", "free"))]
    assert tokenize.main(["--config", "/dev/null", *settings]) == 0
    for name in ("text_document.bin", "text_document.idx", "valid_text_document.bin", "quarantine.jsonl"):
        content = Path(f"free/tokens_{name}").read_bytes()
        assert content == Path(f"resumed/tokens_{name}").read_bytes() == Path(f"started/tokens_{name}").read_bytes()
