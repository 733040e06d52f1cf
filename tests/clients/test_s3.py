"""Step 2 reads a corpus from an object store: moto's S3, by s3fs, gives the token files of the same files on a disk."""

import gzip
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from clients.client_exports import PACKAGES, ROOT
from configs import typed
from corpus_files import json_lines, parquet
from made_runs import corpus_lines, make_tokenizer

SECRET = "aSecretThatMustShowUpNowhere0123456789"


def _jsonl(first: int, count: int) -> bytes:
    return json_lines(corpus_lines(first + count)[first:])


FILES = {
    "a.jsonl": _jsonl(0, 30_000),
    "sub/b.jsonl.gz": gzip.compress(_jsonl(700, 20_000)),
    "sub/c.parquet": parquet(50, id=range(400), text=corpus_lines(400)),
    "sub/d.jsonl.gz": gzip.compress(_jsonl(0, 5000))[:-500],
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[str]:
    """The address of a server with the files in the bucket ``poems``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(PACKAGES / "s3")}
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    with open(tmp_path / "moto.log", "wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            with suppress(OSError):
                urllib.request.urlopen(url, timeout=5).close()
                break
            time.sleep(0.1)
        _put(f"{url}/poems", b"")
        for name, content in FILES.items():
            _put(f"{url}/poems/data/{name}", content)
        yield url
    finally:
        server.terminate()
        server.wait()


def _put(address: str, content: bytes) -> None:
    signed = "AWS4-HMAC-SHA256 Credential=ada/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    headers = {"Content-Type": "application/octet-stream", "Authorization": signed}
    urllib.request.urlopen(urllib.request.Request(address, content, headers, method="PUT"), timeout=30).close()


def _step(place: Path, store: str, entry: str, prefix: str) -> subprocess.CompletedProcess[str]:
    settings = {"input_jsonl": entry, "input_tokenizer_file": "tokenizer.model", "output_prefix": prefix}
    own = {"AWS_ENDPOINT_URL": store, "AWS_ACCESS_KEY_ID": "ada", "AWS_SECRET_ACCESS_KEY": SECRET}
    packages = os.pathsep.join(filter(None, [str(PACKAGES / "s3"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | own | {"AWS_DEFAULT_REGION": "us-east-1", "PYTHONPATH": packages}
    command = ["bash", str(ROOT / "2_tokenize.sh"), "--config", "/dev/null", *typed(**settings, num_workers=2)]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_step_2_reads_from_an_object_store(tmp_path: Path, store: str) -> None:
    make_tokenizer(tmp_path)
    for name, content in FILES.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(content)
    local = _step(tmp_path, store, "data", "here")
    assert local.returncode == 0, local.stdout + local.stderr
    far = _step(tmp_path, store, "s3://poems/data", "far")
    assert far.returncode == 0, far.stdout + far.stderr
    made = sorted(path.name.removeprefix("here") for path in tmp_path.glob("here_*.[bi][id][nx]"))
    assert len(made) == 4
    for name in made:
        assert (tmp_path / f"far{name}").read_bytes() == (tmp_path / f"here{name}").read_bytes(), name
    quarantine = [(tmp_path / f"{prefix}_quarantine.jsonl").read_text() for prefix in ("here", "far")]
    assert "s3://poems/data/sub/d.jsonl.gz" in quarantine[1]
    assert quarantine[1].replace("s3://poems/", "") == quarantine[0]
    assert "done already" in _step(tmp_path, store, "s3://poems/data", "far").stdout
    assert not any(SECRET.encode() in path.read_bytes() for path in tmp_path.glob("far*") if path.is_file())
    _put(f"{store}/poems/data/a.jsonl", FILES["a.jsonl"][:-100])
    assert "done already" not in _step(tmp_path, store, "s3://poems/data", "far").stdout


def test_what_goes_wrong_is_told_in_a_line(tmp_path: Path, store: str) -> None:
    make_tokenizer(tmp_path)
    missing = _step(tmp_path, store, "s3://poems/nothing", "x")
    assert missing.returncode == 2 and "s3://poems/nothing: names no file" in missing.stderr
    assert "poems holds data" in missing.stderr
    bucket = _step(tmp_path, store, "s3://nowhere/data", "x")
    assert bucket.returncode == 2 and "s3://nowhere/data: names no file" in bucket.stderr
    away = _step(tmp_path, "http://127.0.0.1:9", "s3://poems/data", "x")
    assert away.returncode == 1 and "Could not connect to the endpoint" in away.stderr
    for done in (missing, bucket, away):
        assert "Traceback" not in done.stderr and SECRET not in done.stderr + done.stdout
