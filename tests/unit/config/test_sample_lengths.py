"""The lengths of samples: T5's own numbers, and its definition written down a second time."""

from __future__ import annotations

import pytest
from configs import config_of

from zerokara.config.data import SampleLengths, causal, with_spans
from zerokara.model.shapes import ModelShape


@pytest.mark.parametrize(
    ("read", "taken", "written", "noise", "spans"),
    [(512, 568, 114, 85, 28), (128, 141, 29, 21, 7), (256, 284, 58, 43, 14), (1024, 1137, 229, 171, 57)],
)
def test_t5s_own_lengths(read: int, taken: int, written: int, noise: int, spans: int) -> None:
    """`written` counts a sentinel for each span and an end; noise is what else there is."""
    found = with_spans(read, 0.15, 3)
    assert found == SampleLengths(taken, read, written, overlap=0, num_noise_tokens=noise, num_spans=spans)
    assert noise + spans + 1 == written and taken - noise + spans + 1 == read


@pytest.mark.parametrize("density", [0.05, 0.15, 0.4, 0.7])
@pytest.mark.parametrize("mean", [1.0, 3.0, 8.5])
def test_every_length_is_met_exactly_by_the_longest_text(density: float, mean: float) -> None:
    for read in range(16, 300, 7):
        found = with_spans(read, density, mean)
        noise = round(found.raw * density)
        exactly = density < 0.5 or mean > 1
        assert found.input in ((read,) if exactly else (read, read - 1)) and found.num_noise_tokens == noise
        assert 1 <= found.num_spans <= min(noise, found.raw - noise)
        assert with_spans(read + 1, density, mean).raw >= found.raw


def test_causal_samples_look_one_token_further() -> None:
    lengths = causal(256)
    assert [lengths.samples_in(tokens) for tokens in (0, 256, 257, 512, 513)] == [0, 0, 1, 1, 2]
    assert with_spans(256, 0.15, 3).samples_in(568) == 2


def test_a_configuration_has_them() -> None:
    settings = config_of(architecture="t5", seq_len=512)
    assert settings.lengths.raw == 568 and settings.resolved_sizes()["tie_word_embeddings"] is False
    denser = config_of(architecture="t5", seq_len=512, noise_density=0.5, mean_span_length=8)
    assert denser.lengths.target > settings.lengths.target
    shapes = [ModelShape.from_config(each, vocab_size=500) for each in (settings, denser)]
    assert shapes[0].as_json() != shapes[1].as_json(), "a run cannot resume with other samples"
