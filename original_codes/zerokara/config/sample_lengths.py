"""The lengths of a training sample: tokens taken from the corpus, input tokens and target tokens of the model.

A causal sample of S tokens is its own input; each token is predicted from those before it, the first of the next sample
as well. In span corruption (Raffel et al., 2020) the raw length is the longest whose encoder input still fits. Of n raw
tokens, N = round(n · density) are noise tokens in M = round(N / mean length) masked spans. The encoder input is the
other n − N tokens, a sentinel for each span, and an end token; the decoder target is the noise tokens, a sentinel for
each span, and an end token. The input length is met exactly, except where half of the tokens or more are noise in spans
of one token: there it may be one shorter. Source of the form and of the roundings: T5's preprocessors
(text-to-text-transfer-transformer, `random_spans_helper`).

Example: density 0.15, mean length 3, encoder input 512. Then n = 568, N = 85, M = 28, and the target has 114 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

MIN_CONTEXT = 0.5
"""Share of the context that, in bits per byte, stands before each token of a document that is longer than it."""


@dataclass(frozen=True)
class SampleLengths:
    """The lengths of one sample, in tokens."""

    raw: int
    """Tokens taken from the corpus."""
    input: int
    """Input tokens of the model, or of its encoder where it has one."""
    target: int
    """Predicted tokens."""
    overlap: int = 0
    """Tokens beyond `raw` that the sample shares with the next one: the last label is the next sample's first token."""
    num_noise_tokens: int = 0
    """Tokens hidden from the encoder."""
    num_spans: int = 0
    """Masked spans that hold the noise tokens."""

    def samples_in(self, num_tokens: int) -> int:
        """Number of samples in `num_tokens` tokens."""
        return max(0, (num_tokens - self.overlap) // self.raw)

    @property
    def requirement(self) -> str:
        """The least number of tokens that makes a sample, for people."""
        if self.num_noise_tokens:
            return f"{self.raw:,} (an encoder input of {self.input:,} after span corruption)"
        return f"seq_len + {self.overlap} = {self.raw + self.overlap:,}"


def causal(seq_len: int) -> SampleLengths:
    """Lengths for next-token prediction."""
    return SampleLengths(raw=seq_len, input=seq_len, target=seq_len, overlap=1)


def packed(input_length: int, target_length: int, is_encoder_decoder: bool) -> SampleLengths:
    """Lengths for rows of packed examples; of an encoder-decoder, both its inputs count as tokens of the corpus."""
    raw = input_length + target_length if is_encoder_decoder else input_length
    return SampleLengths(raw=raw, input=input_length, target=target_length)


def with_spans(seq_len: int, noise_density: float, mean_span_length: float) -> SampleLengths:
    """Lengths for span corruption with an encoder input of `seq_len` tokens, 3 or more."""
    lengths = _of_raw(2, noise_density, mean_span_length)
    while (longer := _of_raw(lengths.raw + 1, noise_density, mean_span_length)).input <= seq_len:
        lengths = longer
    return lengths


def _of_raw(raw: int, noise_density: float, mean_span_length: float) -> SampleLengths:
    noise = min(max(round(raw * noise_density), 1), raw - 1)
    spans = min(max(round(noise / mean_span_length), 1), raw - noise)
    return SampleLengths(raw, raw - noise + spans + 1, noise + spans + 1, num_noise_tokens=noise, num_spans=spans)
