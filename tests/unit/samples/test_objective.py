"""Objectives. Span corruption as in T5: no token is lost, each cut is as likely, and the spans are the sample's own."""

from itertools import pairwise
from math import comb

import numpy as np
import pytest
from configs import config_of, fault_of
from unit.samples.span_texts import merged

from zerokara.config.data import SampleLengths, causal, with_spans
from zerokara.config.finetune_config import FinetuneRunConfig
from zerokara.samples.objective import (
    Causal,
    Prompt,
    SpanCorruption,
    beginnings,
    noise_mask,
    objective,
    with_sentinels,
)
from zerokara.tokenizer.encoder import Encoder

KEYS = np.arange(2)


def test_causal_labels_are_the_inputs_one_further() -> None:
    tokens = np.array([[5, 6, 2, 7], [8, 2, 2, 9]])
    batch = Causal(causal(3))(tokens, KEYS)
    assert batch.inputs.tolist() == [[5, 6, 2], [8, 2, 2]] and batch.inputs.flags.c_contiguous
    assert batch.labels.tolist() == [[6, 2, 7], [2, 2, 9]] and batch.labels.flags.c_contiguous
    assert batch.loss_mask.tolist() == [[1, 1, 1], [1, 1, 1]]  # the end of a document (2) counts as any token
    assert batch.loss_mask.dtype == np.float32


def span_corruption(seq_len: int = 32) -> SpanCorruption:
    return SpanCorruption(
        with_spans(seq_len, 0.15, 3), seed=1, sentinel_ids=np.arange(99, 89, -1), end_id=2, start_id=3
    )


def test_the_decoder_reads_what_it_wrote_one_later() -> None:
    made = span_corruption()
    tokens = np.random.default_rng(0).integers(4, 80, (3, made.lengths.raw))
    batch = made(tokens, np.arange(3))
    assert batch.inputs.shape == (3, 32) and batch.labels.shape == (3, made.lengths.target)
    assert (batch.decoder_inputs[:, 0] == 3).all() and np.array_equal(batch.decoder_inputs[:, 1:], batch.labels[:, :-1])
    assert (batch.inputs[:, -1] == 2).all() and (batch.labels[:, -1] == 2).all() and (batch.labels[:, 0] == 99).all()
    assert batch.loss_mask.all() and len(batch.arguments()) == 5
    for row in range(3):
        assert np.array_equal(merged(batch.inputs[row], batch.labels[row], made.sentinel_ids, 2), tokens[row])


def test_a_prompt_has_sentinels(span_data: dict[str, str]) -> None:
    encoder, made = Encoder(span_data["input_tokenizer_file"]), span_corruption()
    ids = {number: int(made.sentinel_ids[number]) for number in range(10)}
    first, last = encoder.encode("abc").tolist(), encoder.encode(" de").tolist()
    assert made.prompt(encoder, "abc <extra_id_0> de<extra_id_1>", 5) == Prompt([*first, ids[0], *last, ids[1], 2], [3])
    assert made.prompt(encoder, "abc", 5).encoder_ids == [*first, ids[0], 2], (
        "a text without a sentinel gets one at its end"
    )
    assert len(made.prompt(encoder, "abc " * 100, 5).encoder_ids) == made.lengths.input
    spelt = made.prompt(encoder, "abc<extra_id_77>", 5).encoder_ids
    assert spelt[len(first) : -1] == encoder.encode("<extra_id_77>").tolist(), "no sentinel of that name: it is text"


def test_beginnings_are_a_few_words_or_characters() -> None:
    texts = [
        "\n Nel mezzo del cammin di nostra vita mi ritrovai\nper una",
        " \n",
        "ciao",
        "吾輩は猫である。名前はまだ無い。",
        "ciao",
    ]
    burmese = "နိုင်ငံတော်" * 3
    assert burmese.startswith(beginnings([burmese], has_span=False)[0] + "န"), "a mark stays with its letter"
    assert beginnings(texts, has_span=False) == ("Nel mezzo del cammin", "ciao", "吾輩は猫である。名前")
    span = "<extra_id_0>"
    expected = (f"Nel mezzo del cammin {span} vita mi ritrovai", f"ciao {span}", f"吾輩は猫である。名前{span}だ無い。")
    assert beginnings(texts, has_span=True) == expected


def test_too_few_sentinels_are_an_error_with_numbers(span_data: dict[str, str]) -> None:
    encoder = Encoder(span_data["input_tokenizer_file"])
    settings = config_of(architecture="t5", seq_len=512)
    fault = fault_of(objective, settings, encoder, seed=1, intra_document_masking=False)
    assert fault.key == "input_tokenizer_file" and "extra_ids: 100" in fault.remedy
    assert {"10", "568", "28"} <= set(fault.rule.split())
    tuned = FinetuneRunConfig(architecture="t5", seq_len=64, packed_length=32)  # it is proved on running text, too
    assert objective(tuned, encoder, seed=1, intra_document_masking=False).lengths == with_spans(64, 0.15, 3)
    fitting = objective(config_of(architecture="t5", seq_len=64), encoder, seed=1, intra_document_masking=False)
    assert fitting.lengths.raw == with_spans(64, 0.15, 3).raw and len(fitting.sentinel_ids) == 10


END = 2


def test_the_example_of_the_docstring() -> None:
    noise = np.isin(np.arange(6), [2, 3, 5])[None]
    text, sentinels = np.arange(10, 16)[None], np.arange(1000, 900, -1)
    read, written = (with_sentinels(text, masked, sentinels, END) for masked in (noise, ~noise))
    assert read.tolist() == [[10, 11, 1000, 14, 999, END]] and written.tolist() == [[1000, 12, 13, 999, 15, END]]


@pytest.mark.parametrize(("read_len", "density", "mean"), [(512, 0.15, 3.0), (64, 0.5, 1.0), (40, 0.3, 6.0)])
def test_both_sides_together_are_the_text(read_len: int, density: float, mean: float) -> None:
    lengths, number = with_spans(read_len, density, mean), 200
    tokens = np.random.default_rng(1).integers(3, 900, (number, lengths.raw))
    sentinels = np.arange(10_000, 10_000 - lengths.num_spans, -1)
    noise = noise_mask(lengths, 7, np.arange(number))
    read, written = (with_sentinels(tokens, masked, sentinels, END) for masked in (noise, ~noise))
    assert read.shape == (number, lengths.input) and written.shape == (number, lengths.target)
    for row in range(number):
        assert merged(read[row], written[row], sentinels, END).tolist() == tokens[row].tolist()
        for side in (read[row], written[row]):
            assert [token for token in side if token in sentinels] == sentinels.tolist()


def runs_of(noise: np.ndarray) -> list[tuple[bool, int]]:
    edges = [0, *(np.flatnonzero(np.diff(noise.astype(int))) + 1).tolist(), len(noise)]
    return [(bool(noise[first]), end - first) for first, end in pairwise(edges)]


def test_spans_are_as_long_as_the_closed_form_says() -> None:
    """Of all ways to cut N into M parts, a part has length k in C(N − k − 1, M − 2) of C(N − 1, M − 1)."""
    lengths = with_spans(512, 0.15, 3)
    number, parts = 4000, lengths.num_spans
    noise = noise_mask(lengths, 3, np.arange(number))
    assert (noise.sum(axis=1) == lengths.num_noise_tokens).all()
    for kind, total in ((True, lengths.num_noise_tokens), (False, lengths.raw - lengths.num_noise_tokens)):
        found = [length for row in noise for is_noise, length in runs_of(row) if is_noise is kind]
        assert len(found) == number * parts
        for k in (1, 2, 3, 5, 10):
            share = comb(total - k - 1, parts - 2) / comb(total - 1, parts - 1)
            deviation = (share * (1 - share) / len(found)) ** 0.5
            assert found.count(k) / len(found) == pytest.approx(share, abs=5 * deviation), (kind, k)
    # Every text begins with what is kept and ends in noise; far from both each place is as likely as its neighbours.
    assert not noise[:, 0].any() and noise[:, -1].all()
    middle = noise[:, 100:468].mean(axis=0)
    assert middle.mean() == pytest.approx(lengths.num_noise_tokens / lengths.raw, rel=0.03)
    assert abs(middle - middle.mean()).max() < 5 * (0.15 * 0.85 / number) ** 0.5


def test_spans_belong_to_the_seed_and_the_key_alone() -> None:
    lengths, keys = with_spans(64, 0.15, 3), np.array([5, 999, 2**40, 0])
    together = noise_mask(lengths, 1, keys)
    for key, row in zip(keys, together, strict=True):
        assert np.array_equal(noise_mask(lengths, 1, np.array([key]))[0], row)
    assert not np.array_equal(noise_mask(lengths, 2, keys), together)
    assert len({row.tobytes() for row in noise_mask(lengths, 1, np.arange(500))}) > 480  # of 61,596 that there are
    single = SampleLengths(raw=5, input=5, target=4, num_noise_tokens=2, num_spans=1)
    assert noise_mask(single, 1, np.arange(3)).tolist() == [[False, False, False, True, True]] * 3
