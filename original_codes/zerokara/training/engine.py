"""DeepSpeed's ZeRO (0.19.8) around a model, and the only file that names it.

What comes in: a model with fp32 weights, parameter groups, and settings. What goes out: an engine that accumulates
gradients, updates the weights with a given learning rate, and hands out and takes in the whole training state *by
parameter name in fp32*, whatever the ZeRO stage and the number of processes. So a checkpoint knows nothing of ZeRO,
and another stage or another number of processes goes on from it.

Source of the state access: deepspeed/utils/tensor_fragment.py (`safe_get_full_fp32_param` and its family).
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor

from zerokara.config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.megatron import Decoder
from zerokara.model.sharding import Cut
from zerokara.training.deepspeed_settings import settings_for

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names that torch.optim.AdamW gives to its running means."""


def init_distributed(device_type: str) -> None:
    """Join the processes that the launcher started (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT)."""
    deepspeed.logger.setLevel(logging.ERROR)
    # torch 2.13 renames collectives that DeepSpeed 0.19.8 still calls by their old names; nobody here can act on it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # deepspeed/comm/torch.py, build_shm_op: on a CPU with a compiler it would build a C++ operator while the run waits.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if device_type == "cuda" else "gloo", verbose=False)


class Engine:
    """A model under ZeRO."""

    def __init__(self, model: Decoder, config: PretrainConfig, num_processes: int, template: dict[str, Any]):
        """Wrap `model`, whose weights must be fp32: they become the optimizer's master weights unrounded.

        `num_processes` counts those that share out the data (`parallel.data_size`).
        """
        self.num_processes = num_processes
        self.accumulation = config.global_batch_size // (config.micro_batch * num_processes)
        initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optimizer = torch.optim.AdamW(
            _parameter_groups(model, config.weight_decay),
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_epsilon,
            fused=True,
        )
        # runtime/bf16_optimizer.py narrates its memory on stdout whatever the log level is.
        with contextlib.redirect_stdout(io.StringIO()):
            self._deepspeed, self._wrapper, _, _ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,
                config=settings_for(config, num_processes, template),
                dist_init_required=False,
                mpu=parallel.ModelParallelUnit() if parallel.tensor_size() > 1 else None,
            )
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        assert all(parameter.dtype == dtype for parameter in model.parameters()), f"weights are not {dtype}"
        self._adam = optimizer
        self._named = list(model.named_parameters())
        self._sharding = model.sharding
        self._make_moments()
        # DeepSpeed makes its fp32 weights from the rounded ones; give back what rounding took.
        self._load_local(initial, {}, num_updates=0)

    @property
    def module(self) -> torch.nn.Module:
        """The wrapped model, to be called for evaluation (every process must take part under ZeRO 3)."""
        return self._deepspeed

    def accumulate(
        self, tokens_BS: Tensor, labels_BS: Tensor, mask_BS: Tensor, global_tokens: float, *segments_BS: Tensor
    ) -> Tensor:
        """Forward and backward of one micro batch; gives its summed nats. Segments only where documents are isolated.

        `global_tokens` is the count of predicted tokens in the global batch, over all processes and micro batches:
        the gradient becomes that of the mean over these tokens.
        """
        nats = self._deepspeed(tokens_BS, labels_BS, mask_BS, *segments_BS)
        # DeepSpeed divides by the number of micro batches and averages over the processes; undo both.
        self._deepspeed.backward(nats * (self.num_processes * self.accumulation / global_tokens))
        return nats.detach()

    def finish_micro_batch(self) -> None:
        """Tell DeepSpeed that a micro batch is over which is not the last of its step."""
        self._deepspeed.step()

    def update(self, learning_rate: float) -> float:
        """Clip, update the weights, clear the gradients; gives the gradient's norm before clipping."""
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate
        norm: Any = None
        if not self._is_partitioned:
            norm = self._gradient_norm()
        self._deepspeed.step()
        if norm is None:
            norm = self._deepspeed.get_global_grad_norm()
        return float(norm)

    def load_state(self, weights: dict[str, Tensor], moments: dict[str, Tensor], num_updates: int) -> None:
        """Take in fp32 weights by parameter name and AdamW's running means by ``name.exp_avg``, ``name.exp_avg_sq``.

        All of them are whole, however the parameters are cut among the processes.
        """
        local_moments = {
            name: self._sharding.local(name.rpartition(".")[0], moment) for name, moment in moments.items()
        }
        local_weights = {name: self._sharding.local(name, weights[name]) for name, _ in self._named}
        self._load_local(local_weights, local_moments, num_updates)

    def _load_local(self, weights: dict[str, Tensor], moments: dict[str, Tensor], num_updates: int) -> None:
        for name, parameter in self._named:
            if self._is_partitioned:
                safe_set_full_fp32_param(parameter, weights[name].to(self._deepspeed.device))
            else:
                parameter.data.copy_(weights[name])
            for key in MOMENTS:
                moment = moments.get(f"{name}.{key}")
                if moment is None:
                    continue
                if self._is_partitioned:
                    safe_set_full_optimizer_state(parameter, moment.to(self._deepspeed.device), key)
                else:
                    self._adam.state[parameter][key].copy_(moment)
        for state in self._adam.state.values():
            state["step"].fill_(num_updates)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The fp32 weights by parameter name, whole, one after another; every process must read them all."""
        for name, parameter in self._named:
            whole = safe_get_full_fp32_param(parameter) if self._is_partitioned else parameter.data
            assert whole is not None, name
            yield name, self._whole(name, parameter, whole)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """AdamW's running means as ``name.exp_avg`` and ``name.exp_avg_sq``, as `weights`."""
        for name, parameter in self._named:
            for key in MOMENTS:
                if self._is_partitioned:
                    whole = safe_get_full_optimizer_state(parameter, key)
                else:
                    whole = self._adam.state[parameter][key]
                assert whole is not None, name
                yield f"{name}.{key}", self._whole(name, parameter, whole)

    def _whole(self, name: str, parameter: Tensor, local: Tensor) -> Tensor:
        """What has a parameter's shape, from all processes that hold a part of it, in fp32 and main memory."""
        whole = self._sharding.gathered(name, local.detach().view(self._shape(parameter)))
        return whole.to("cpu", torch.float32, copy=True)

    def _gradient_norm(self) -> Tensor:
        """The norm over all parameters; what every process of a tensor group holds alike counts once."""
        counted = [
            parameter.grad
            for name, parameter in self._named
            if parameter.grad is not None
            and (parallel.tensor_rank() == 0 or self._sharding.cut(name) is not Cut.REPLICATED)
        ]
        norm = torch.nn.utils.get_total_norm(counted)
        if parallel.tensor_size() == 1:
            return norm
        square = norm.square()
        torch.distributed.all_reduce(square, group=parallel.tensor_group())
        return square.sqrt()

    @property
    def _is_partitioned(self) -> bool:
        """Whether DeepSpeed holds the state; at stage 0 in fp32 the optimizer is torch's own, on the parameters."""
        return self._wrapper is not self._adam

    @staticmethod
    def _shape(parameter: Tensor) -> torch.Size:
        # Under ZeRO 3 a parameter at rest is empty and remembers its shape.
        return getattr(parameter, "ds_shape", parameter.shape)

    def _make_moments(self) -> None:
        """Make the optimizer's state now: AdamW would make it in the first update, too late for `load_state`."""
        for master in self._masters():
            self._adam.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                **{key: torch.zeros_like(master, dtype=torch.float32) for key in MOMENTS},
            }
        if hasattr(self._wrapper, "_lazy_init_hp_params_optimizer_state"):
            self._wrapper._lazy_init_hp_params_optimizer_state()

    def _masters(self) -> list[Tensor]:
        """The fp32 tensors that AdamW updates in this process: each wrapper of DeepSpeed names them differently."""
        for attribute in (
            "fp32_partitioned_groups_flat",  # stage 3: runtime/zero/stage3.py
            "single_partition_of_fp32_groups",  # stages 1 and 2: runtime/zero/stage_1_and_2.py
            "fp32_groups_flat_partition",  # stage 1 in bf16 with fp32 gradients: runtime/bf16_optimizer.py
        ):
            if hasattr(self._wrapper, attribute):
                return list(getattr(self._wrapper, attribute))
        return [parameter for _, parameter in self._named]


def _parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms and biases, which have one dimension, do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
