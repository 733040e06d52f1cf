"""Dropout whose masks are a function of the seed, the sequence's number in the run, the layer, the position and the
feature.

So they are the same for any number of processes, in any micro batch, with tensor parallelism, compiled, recomputed in
the backward pass, and after a resume: nothing is drawn, and no state of a generator is kept. It stands where
megatron-core has it (Srivastava et al., 2014; megatron/core/fusions/fused_bias_dropout.py): behind the embedding, and
behind the last matrix of attention and of the feed-forward network, before the residual is added.

A number is dropped if a hash of its place is below a threshold. The hash is lowbias32, in torch's int32, which wraps
(https://github.com/skeeto/hash-prospector).

Shape suffixes: B batch, S sequence, D hidden size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerokara.model.layers import sequence_first

_FACTORS = 0x7FEB352D, 0x846CA68B - 2**32
_GOLDEN = 0x9E3779B9 - 2**32
"""2^32 over the golden ratio, an odd number whose multiples spread evenly over 32 bits."""


def _folded(bits: Tensor, by: int) -> Tensor:
    """XOR int32 with itself, shifted right without its sign."""
    return bits ^ ((bits >> by) & ((1 << (32 - by)) - 1))


def _stirred(bits: Tensor) -> Tensor:
    """Hash int32, for its highest bits alone: the last fold leaves them as they are."""
    return _folded(_folded(bits, 16) * _FACTORS[0], 15) * _FACTORS[1]


def _mixed(bits: Tensor) -> Tensor:
    """Hash int32 to int32, one to one."""
    return _folded(_stirred(bits), 16)


class Dropout:
    """The dropout of one model, in training alone: validation has no gradients."""

    def __init__(self, probability: float, seed: int):
        self.probability, self._seed, self._num_places = probability, seed, 0
        self._sequence_numbers_B: Tensor | None = None

    def begin(self, sequence_numbers_B: Tensor | None) -> None:
        """Begin a forward pass over these sequences, by their numbers in the run; without gradients nothing drops.

        Asked here: megatron-core turns gradients on around a residual (`bias_dropout_add_exec_handler`).
        """
        trains = self.probability > 0 and torch.is_grad_enabled()
        assert not trains or sequence_numbers_B is not None, "dropout needs the numbers of the sequences"
        self._sequence_numbers_B = sequence_numbers_B if trains else None

    def new_place(self) -> Tensor:
        """Number the places of a model, in the order in which it is built.

        It is a tensor, because the compiler would generate separate code for each number, and so for each layer.
        """
        self._num_places += 1
        return torch.tensor(self._num_places, dtype=torch.int32)

    def __call__(self, hidden: Tensor, place: Tensor | int = 0) -> Tensor:
        """Drop numbers of hidden states, as they lie, and scale up the others; embeddings have the places 0 and -1."""
        if self._sequence_numbers_B is None:
            return hidden
        (length, _, size), device = sequence_first(hidden).shape, hidden.device
        places_S, features_D = (torch.arange(1, n + 1, dtype=torch.int32, device=device) for n in (length, size))
        keys_B = _mixed(_mixed(self._sequence_numbers_B.int() + self._seed * _GOLDEN % 2**31) + place * _GOLDEN)
        keys_SB = _mixed(keys_B + places_S[:, None] * _GOLDEN)
        bits = _stirred(sequence_first(keys_SB)[..., None] ^ _mixed(features_D * _GOLDEN))
        is_dropped = bits < round(self.probability * 2**32) - 2**31
        return hidden.masked_fill(is_dropped, 0) * (1 / (1 - self.probability))


class BiasDropoutAdd:
    """One of a layer's `*_bda`: adds the bias, drops, and adds the residual."""

    def __init__(self, dropout: Dropout, **_: Any):
        self._dropout, self._place = dropout, dropout.new_place()

    def __call__(self, *_: bool) -> Callable[..., Tensor]:
        """Return the function, as megatron-core asks for it."""
        return self._add

    def _add(self, output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, _: float) -> Tensor:
        output, bias_D = output_and_bias
        return residual + self._dropout(output if bias_D is None else output + bias_D, self._place)
