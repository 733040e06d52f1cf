"""All that is taken from megatron-core (0.16.1), and what it needs to start without a GPU: no other file names it.

megatron-core deprecates `GPTModel` from 0.19 on.
"""

# ruff: noqa: F401  # imported here for the other modules

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# On import megatron-core says what it would use if Apex and Transformer Engine were there; neither is asked for here.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")


@contextmanager
def _without_unused_packages() -> Iterator[None]:
    """Import megatron-core without torch's compiler and wandb: 1.2 s instead of 3.5 s in each process, on two cores.

    megatron/core/jit.py wraps fusions in torch.compile as they are defined, which loads the compiler, though none of
    them is ever called here (`megatron._common`); megatron/core/inference/engines/dynamic_engine.py:78 tries for wandb.
    """
    compile_ = torch.compile
    torch.compile = lambda function=None, **_: function or torch.compile  # type: ignore[assignment]
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # `import wandb` then raises ImportError
    try:
        yield
    finally:
        torch.compile = compile_
        if sys.modules["wandb"] is None:
            del sys.modules["wandb"]


with _without_unused_packages():
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.tensor_parallel import random
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        gather_from_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
        scatter_to_tensor_model_parallel_region,
    )
    from megatron.core.transformer.attention import (
        CrossAttention,
        CrossAttentionSubmodules,
        SelfAttention,
        SelfAttentionSubmodules,
    )
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


def prepare_device(seed: int) -> None:
    """Let megatron-core build and run where this process computes: on its GPU, or on the CPU where there is none.

    Each line for the CPU names the upstream line that it answers, and can go when that line asks torch for the device.
    """
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        # megatron/core/models/common/embeddings/rotary_pos_embedding.py:78 and :162, tensor_parallel/mappings.py:91,
        # :141, :181 place tensors on `torch.cuda.current_device()`.
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    # megatron/core/tensor_parallel/random.py: without a GPU there is no generator per device to fork; the fork of
    # InferenceCudaRNGStatesTracker is a no-op. Dropout is 0, so nothing is drawn.
    random.initialize_rng_tracker(inference_rng_tracker=not on_gpu)
    if on_gpu:
        random.model_parallel_cuda_manual_seed(seed)
