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
from zerokara.corpus.sizes import total_plain_bytes
from zerokara.errors import UserError
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens import estimate as estimating
from zerokara.tokens.estimate import Estimate, check_disk_space, estimate, sample


@pytest.mark.parametrize("gzipped", [False, True])
def test_the_estimate_is_near(
    make_config: Callable[..., PretrainConfig], corpus: Path, monkeypatch: pytest.MonkeyPatch, gzipped: bool
) -> None:
    monkeypatch.setattr(estimating, "PLACE_CHARACTERS", 4_000)
    content = corpus.read_text(encoding="utf-8")
    config = make_config()
    encoder = Encoder(config.input_tokenizer_file)
    path, times = corpus, 1
    if gzipped:
        path, times = corpus.with_suffix(".jsonl.gz"), 20
        path.write_bytes(gzip.compress((content * times).encode()))
        assert total_plain_bytes(find_files([str(path)], "")) == pytest.approx(times * len(content.encode()), rel=0.05)
    files = find_files([str(path)], "")
    places = sample(config, files)
    assert len(places) == (1 if gzipped else estimating.SAMPLE_PLACES)
    expected = estimate(total_plain_bytes(files), places, encoder)
    monkeypatch.setattr(estimating, "PLACE_CHARACTERS", 10**9)
    monkeypatch.setattr(estimating, "ESTIMATE_CHARACTERS", 10**9)
    files = find_files([str(corpus)], "")
    exact = estimate(total_plain_bytes(files), sample(config, files), encoder)
    assert expected.tokens == pytest.approx(times * exact.tokens, rel=0.15)
    assert expected.output_bytes == 2 * expected.tokens


def test_a_disk_too_small(make_config: Callable[..., PretrainConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    check_disk_space(make_config(), Estimate(0, 5_000_000))
    with pytest.raises(
        UserError, match=r"output_prefix = .*: needs about 6.0 MB, and 5.0 MB are free at /.*larger disk"
    ):
        check_disk_space(make_config(), Estimate(0, 6_000_000))
