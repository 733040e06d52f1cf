"""How many tokens one training sample takes of the corpus, and how many the model reads and writes of it.

A causal sample of S tokens is read as it is; each token is predicted from those before it, the first of the next sample
as well. A sample with corrupted spans (Raffel et al., 2020) is cut so that what the encoder reads is just as long as it
may be: of n tokens, N = round(n · density) are noise, in M = round(N / mean length) spans; the encoder reads the other
n − N, a sentinel for each span, and an end; the decoder writes the noise, a sentinel for each span, and an end. That
length is met exactly, but where half of the text and more is noise, token by token: there it may be one less. Source of
the form and of the roundings: T5's preprocessors (text-to-text-transfer-transformer, `random_spans_helper`).

Example, density 0.15, mean length 3, 512 tokens to read: n = 568, N = 85, M = 28, and the decoder writes 114.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SampleLengths:
    """The lengths of one sample, in tokens."""

    taken: int
    """Of the corpus."""
    read: int
    """That the model (its encoder, where it has one) reads."""
    written: int
    """That are predicted."""
    overlap: int = 0
    """That are looked at beyond `taken`: the next sample begins with them."""
    noise: int = 0
    """That the encoder does not see."""
    spans: int = 0
    """In which the noise lies."""

    def samples_in(self, num_tokens: int) -> int:
        """Samples that a text of so many tokens makes."""
        return max(0, (num_tokens - self.overlap) // self.taken)

    @property
    def in_words(self) -> str:
        """The tokens that must be there for one sample."""
        if self.noise:
            return f"{self.taken:,} (a text whose gaps leave {self.read:,} to read)"
        return f"seq_len + {self.overlap} = {self.taken + self.overlap:,}"


def causal(seq_len: int) -> SampleLengths:
    """The lengths where each token is predicted from those before it."""
    return SampleLengths(taken=seq_len, read=seq_len, written=seq_len, overlap=1)


def with_spans(seq_len: int, noise_density: float, mean_span_length: float) -> SampleLengths:
    """The lengths where an encoder reads `seq_len` tokens, 3 or more, of a text with corrupted spans."""
    lengths = _of_text(2, noise_density, mean_span_length)
    while (longer := _of_text(lengths.taken + 1, noise_density, mean_span_length)).read <= seq_len:
        lengths = longer
    return lengths


def _of_text(taken: int, noise_density: float, mean_span_length: float) -> SampleLengths:
    noise = min(max(round(taken * noise_density), 1), taken - 1)
    spans = min(max(round(noise / mean_span_length), 1), taken - noise)
    return SampleLengths(taken, taken - noise + spans + 1, noise + spans + 1, noise=noise, spans=spans)
