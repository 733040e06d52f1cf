"""Initial weights: each parameter drawn whole from the seed and its name, then cut for this process.

So they do not depend on the order of the parameters, on how many processes there are or on how they share the model;
and no more than one whole parameter is ever held beside the model.

The distribution is megatron-core's (0.16.1, transformer/transformer_config.py): normal around 0 with `init_std`; for
what is added to the residual stream, `init_std` / √(2·layers) (GPT-2, Radford et al., 2019); norms 1, biases 0.

T5's rule is another (Raffel et al., 2020; transformers 5.23, `T5PreTrainedModel._init_weights`): each matrix by the
width that it multiplies; embeddings 1. The output matrix, if there is one, goes by its width too (t5x): transformers' 1
would let training start with a loss of a hundred nats. It belongs to Adafactor, whose steps go by the size of what they
change; those of AdamW and Muon do not, and hardly move an embedding of 1.

Where there is an encoder, queries are smaller by the root of a head's width: that stands in for the division of the
scores, which T5 has not.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from zerokara.model import parallel
from zerokara.model.parameters import row_blocks
from zerokara.model.shapes import ModelShape
from zerokara.model.sharding import Sharding

_PADDED = ("word_embeddings.weight", "output_layer.weight")
_ADDED = ("linear_proj.weight", "linear_fc2.weight", "experts_fc2.weight")
"""Their products are added to the residual stream, two in each layer."""


@torch.no_grad()
def draw(model: torch.nn.Module, shape: ModelShape, seed: int) -> None:
    """Fill the parameters of `model`, which are fp32 and this process's part of the whole."""
    sharding = Sharding.of(shape)
    for name, parameter in model.named_parameters():
        whole_shape = sharding.whole_shape(name, parameter.shape)
        if parameter.shape == whole_shape:
            _fill(parameter, name, shape, seed)
        else:
            whole = torch.empty(whole_shape, dtype=parameter.dtype)
            _fill(whole, name, shape, seed)
            parameter.copy_(sharding.local(name, whole, parallel.tensor_rank(), parallel.tensor_size()))


def _fill(whole: Tensor, name: str, shape: ModelShape, seed: int) -> None:
    if name.endswith(".bias"):
        whole.zero_()
    elif name.endswith("layernorm.weight"):
        whole.fill_(1)
    else:
        whole.normal_(0, _std(name, shape), generator=_generator(seed, name))
        if shape.traits.is_encoder_decoder and name.endswith("linear_q.weight"):
            whole /= math.sqrt(shape.head_dim)
        elif shape.traits.is_encoder_decoder and name.endswith("linear_qkv.weight"):
            queries, _, _ = row_blocks(name, shape)
            whole[torch.from_numpy(queries)] /= math.sqrt(shape.head_dim)
    if name.endswith(_PADDED):
        # Padding rows are no part of the model; zero, they add nothing to the gradient of anything either.
        whole[shape.vocab_size :].zero_()


def _std(name: str, shape: ModelShape) -> float:
    if not shape.init_std:
        return _std_by_width(name, shape)
    return shape.init_std / math.sqrt(2 * shape.num_layers) if name.endswith(_ADDED) else shape.init_std


def _std_by_width(name: str, shape: ModelShape) -> float:
    if name.endswith("word_embeddings.weight"):
        return 1.0
    width = shape.hidden_size
    if name.endswith("linear_proj.weight"):
        width = shape.query_projection_size
    elif name.endswith("linear_fc2.weight"):
        width = shape.ffn_hidden_size
    elif name.endswith("experts_fc2.weight"):
        width = shape.moe_ffn_hidden_size
    return 1 / math.sqrt(width)


def _generator(seed: int, name: str) -> torch.Generator:
    """Numbers that belong to a seed and a name alone."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
