"""Initial weights: each whole parameter is drawn from the seed and its name, by any process.

So they do not depend on the order of the parameters, on the number of processes or on tensor parallelism.

The distribution is megatron-core's (0.16.1, transformer/transformer_config.py): normal around 0 with `init_std`; for
matrices that add to the residual stream, `init_std` / √(2·layers) (GPT-2, Radford et al., 2019); norms 1, biases 0.
Where outputs are normalized, all matrices have `init_std`, as in OLMo 2 (arXiv 2501.00656).

T5's rule is another (Raffel et al., 2020; transformers 5.23, `T5PreTrainedModel._init_weights`): each matrix has
1 / √fan-in, an untied output projection too (t5x; with transformers' 1, training would start at a loss of a hundred
nats), embeddings 1. It belongs to Adafactor, whose steps scale with the weights; those of AdamW and Muon hardly move an
embedding of 1. In an encoder-decoder queries are smaller by the root of the head dim, in place of scaled scores.
"""

import hashlib
import math
from collections.abc import Iterator

import torch
import torch.distributed
from torch import Tensor

from zerokara.model.shapes import VOCABULARY_NAMES, ModelShape, parts_of

_RESIDUAL = ("linear_proj.weight", "linear_fc2.weight", "experts_fc2.weight")
"""Matrices whose products are added to the residual stream, two in each layer."""


def drawn_by_all(shape: ModelShape, seed: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole fp32 tensor of each parameter, on `device`; every process must read them all.

    Each process draws a tensor of its own, all at the same time; then they are broadcast one after another. A process
    holds two tensors: the one that it has drawn, and the one that it yields, until it is asked for the next.
    """
    rank, num_processes = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shapes = shape.parameter_shapes()
    names = sorted(shapes, key=lambda name: -math.prod(shapes[name]))  # those drawn at the same time are alike in size
    for first in range(0, len(names), num_processes):
        round_ = names[first : first + num_processes]
        mine = [torch.empty(shapes[name]) for name in round_[rank : rank + 1]]
        if mine:
            fill(mine[0], round_[rank], shape, seed)
        for source, name in enumerate(round_):
            whole = mine.pop().to(device) if source == rank else torch.empty(shapes[name], device=device)
            torch.distributed.broadcast(whole, src=source)
            yield name, whole
            del whole


def fill(whole: Tensor, name: str, shape: ModelShape, seed: int) -> None:
    """Draw the whole parameter `name`."""
    if name.endswith(".bias"):
        whole.zero_()
    elif name.endswith("layernorm.weight"):
        whole.fill_(1)
    else:
        digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        # T5's relative position biases are drawn as if D numbers were added.
        fan_in = shape.hidden_size if "relative_attention_bias" in name else whole.size(-1)
        whole.normal_(0, _std(name, shape, fan_in), generator=generator)
        if shape.traits.is_encoder_decoder and name.endswith("linear_q.weight"):
            whole /= math.sqrt(shape.head_dim)
        elif shape.traits.is_encoder_decoder and name.endswith("linear_qkv.weight"):
            queries, _, _ = parts_of(whole, name, shape)
            queries /= math.sqrt(shape.head_dim)
    if name.endswith(VOCABULARY_NAMES):
        # Padding rows are no part of the model; at zero they add nothing to any gradient either.
        whole[shape.vocab_size :].zero_()


def _std(name: str, shape: ModelShape, fan_in: int) -> float:
    if shape.init_std:
        is_smaller = name.endswith(_RESIDUAL) and not shape.traits.norms_outputs
        return shape.init_std / math.sqrt(2 * shape.num_layers) if is_smaller else shape.init_std
    return 1.0 if name.endswith("word_embeddings.weight") else 1 / math.sqrt(fan_in)
