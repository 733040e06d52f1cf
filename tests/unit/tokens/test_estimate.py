"""The number of tokens foreseen from a sample, and the disk it takes."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerokara.config import PretrainConfig
from zerokara.corpus.inputs import find_files
from zerokara.errors import UserError
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens import estimate as estimating
from zerokara.tokens.estimate import Estimate, check_disk_space, estimate, plain_bytes


@pytest.mark.parametrize("gzipped", [False, True])
def test_the_estimate_is_near(
    make_config: Callable[..., PretrainConfig], corpus: Path, monkeypatch: pytest.MonkeyPatch, gzipped: bool
) -> None:
    monkeypatch.setattr(estimating, "SAMPLE_CHARACTERS", 10_000)
    content = corpus.read_text(encoding="utf-8")
    config = make_config()
    encoder = Encoder(config.input_tokenizer_file)
    whole = estimate(config, find_files([str(corpus)], ""), encoder)
    path = corpus
    if gzipped:
        path = corpus.with_suffix(".jsonl.gz")
        path.write_bytes(gzip.compress((content * 20).encode()))
        (file,) = find_files([str(path)], "")
        assert plain_bytes(file) == pytest.approx(20 * len(content.encode()), rel=0.05)
    monkeypatch.setattr(estimating, "SAMPLE_CHARACTERS", 10**9)
    exact = estimate(config, find_files([str(corpus)], ""), encoder)
    assert whole.tokens == pytest.approx(exact.tokens, rel=0.15)
    assert whole.output_bytes == 2 * whole.tokens


def test_a_disk_too_small(make_config: Callable[..., PretrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    check_disk_space(make_config(), Estimate(0, 5_000_000))
    with pytest.raises(
        UserError, match=r"output_prefix = .*: needs about 6.0 MB, and 5.0 MB are free at /.*larger disk"
    ):
        check_disk_space(make_config(), Estimate(0, 6_000_000))
