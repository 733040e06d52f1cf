"""What is looked at before a run that costs days: the data, the memory, the processes, the kernels, the speed.

`rows` is the cheap part, shown at every start: nothing is loaded for it. `trial` is the dear one, for ``--dry-run``
(and for ``micro_batch_size: auto`` on a GPU): the real processes build the real model and train a few steps on the
real data. What they learn is thrown away, and nothing is written.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy as np

from zerokara.errors import Fault, RunError, UserError
from zerokara.progress import count_text, log, seconds_text
from zerokara.samples.batches import Batches, BatchPlan
from zerokara.tokens.indexed import IndexedTokens
from zerokara.training.planning.memory_forecast import MachineMemory, MemoryForecast
from zerokara.training.planning.preparation import Preparation

if TYPE_CHECKING:
    import torch

    from zerokara.training.compute.engine import Engine

TRIAL_STEPS = 3
"""The first is slow (memory is taken, kernels are chosen) and does not count."""
_HEAD_TOKENS = 24
_LOOKED_AT = 1 << 20
"""Ids whose range is checked, at the beginning and at the end of the data."""


def rows(preparation: Preparation, available: MachineMemory) -> list[tuple[str, str]]:
    """The head of the data, the tokenizer, and the memory by part against what is available.

    Raises:
        UserError: an id of the data is none of the tokenizer's.
    """
    return [
        ("data begins", _data_head(preparation)),
        ("tokenizer", f"sha256 {preparation.tokenizer_sha256[:12]}…, the one that the data was made with"),
        *preparation.memory_forecast(available).rows(),
    ]


def _data_head(preparation: Preparation) -> str:
    encoder = preparation.encoder
    path = preparation.token_paths.train
    tokens = IndexedTokens(path).tokens
    for part in (tokens[:_LOOKED_AT], tokens[-_LOOKED_AT:]):
        largest = int(part.max(initial=0))
        if largest >= encoder.vocab_size:
            rule = f"holds the id {largest}; the tokenizer has {encoder.vocab_size} pieces"
            raise UserError(Fault(where=f"{path}.bin", rule=rule, remedy="run step 2 again with --redo"))
    head = np.asarray(tokens[:_HEAD_TOKENS], dtype=np.int64)
    return f"{' '.join(str(one) for one in head[:8])} … = {encoder.decode(head.tolist())!r}"


def trial(preparation: Preparation) -> None:
    """Train a few steps in this process and the others, tell speed and memory, write nothing.

    Raises:
        OutOfMemory: a process had too little; says what would fit.
        RunError: a process did not answer, or a loss was not finite.
    """
    from zerokara.training import out_of_memory
    from zerokara.training.compute import devices
    from zerokara.training.processes import joining

    device = devices.local_device(int(os.environ.get("LOCAL_RANK", "0")))
    forecast = preparation.memory_forecast(out_of_memory.machine_memory(device, preparation.num_processes))
    with out_of_memory.explained(preparation, device):
        joining.join(preparation, device)
        seconds, loss = _trial_steps(preparation, device)
        _tell(preparation, forecast, device, seconds, loss)


def _trial_steps(preparation: Preparation, device: torch.device) -> tuple[float, float]:
    """The time of one step, and the loss of the last."""
    import torch

    from zerokara.huggingface import from_hf
    from zerokara.model import compilation, parallel
    from zerokara.model.experts import Routing
    from zerokara.model.megatron import build
    from zerokara.training.compute.engine import Engine

    config, reading = preparation.config, preparation.reading
    seed = None if config.init_from else config.seed
    routing = Routing.from_config(config)
    model = build(
        preparation.shape, seed=seed, activation_checkpointing=config.activation_checkpointing, routing=routing
    )
    engine = Engine(model, config, parallel.data_size(), preparation.template)
    if config.init_from:
        engine.load_state(from_hf.weights(config, preparation.shape), {}, num_updates=0)
    reason = compilation.reason_against(config.compile, device.type, config.zero_stage)
    if reason is None:
        compilation.start(model, config.micro_batch, config.intra_document_masking, _log)
    _log(f"kernels: {_kernels(preparation, device)}{f'; layers not compiled ({reason})' if reason else ''}")
    plan = BatchPlan(config.global_batch_size, config.micro_batch, parallel.data_size())
    batches = Batches(reading.tokens(), reading.order(), plan, preparation.objective, parallel.data_rank())
    times, loss = [], 0.0
    for step in range(1, TRIAL_STEPS + 1):
        torch.distributed.barrier()
        started = time.perf_counter()
        loss = _step(preparation, engine, batches, step, device)
        times.append(time.perf_counter() - started)
        if not np.isfinite(loss):
            raise RunError(f"the loss of trial step {step} is {loss}: see lr, precision and the data")
    return sum(times[1:]) / len(times[1:]), loss


def _step(preparation: Preparation, engine: Engine, batches: Batches, step: int, device: torch.device) -> float:
    import torch

    from zerokara.model import parallel
    from zerokara.training.loop import as_tensors

    config = preparation.config
    nats = torch.zeros((), device=device)
    ready = list(batches.at((step - 1) * config.global_batch_size))
    counted = torch.tensor(sum(float(batch.loss_mask.sum()) for batch in ready), dtype=torch.float64, device=device)
    torch.distributed.all_reduce(counted, group=parallel.data_group())
    num_tokens = counted.item()
    for index, batch in enumerate(ready):
        if index:
            engine.finish_micro_batch()
        nats += engine.accumulate(as_tensors(batch, device), num_tokens)
    torch.distributed.all_reduce(nats, group=parallel.data_group())
    engine.update(preparation.schedule.learning_rate(step))
    return nats.item() / num_tokens


def _kernels(preparation: Preparation, device: torch.device) -> str:
    config = preparation.config
    names = {"adamw": "torch's fused AdamW", "adafactor": "Adafactor", "muon": "Muon, and torch's fused AdamW"}
    return f"{_attention_kernel(preparation, device)}; {names[config.optimizer]}"


def _attention_kernel(preparation: Preparation, device: torch.device) -> str:
    """Which kernel `scaled_dot_product_attention` takes, as torch tells it."""
    import torch

    shape, isolated = preparation.shape, preparation.config.intra_document_masking
    biased = shape.traits.positions == "relative"
    if device.type == "cpu":
        plain = "plain operations, since each distance has a learned bias, and "
        return f"attention by {plain if biased else ''}torch's flash kernel for CPUs"
    dtype = torch.bfloat16 if preparation.config.precision == "bf16" else torch.float32
    size = (1, shape.num_attn_heads, shape.seq_len, shape.head_dim)
    query = torch.empty(size, dtype=dtype, device=device)
    pairs = (1, 1, shape.seq_len, shape.seq_len)
    mask = torch.ones(pairs, dtype=torch.bool, device=device) if isolated else None
    if biased:
        mask = torch.zeros(pairs, dtype=dtype, device=device, requires_grad=True).expand(-1, size[1], -1, -1)
    asked = torch.backends.cuda.SDPAParams(query, query, query, mask, 0.0, mask is None, False)
    for name, can in (
        ("FlashAttention", torch.backends.cuda.can_use_flash_attention),
        ("cuDNN", torch.backends.cuda.can_use_cudnn_attention),
        ("the memory-efficient kernel", torch.backends.cuda.can_use_efficient_attention),
    ):
        if can(asked, False):
            return f"attention by {name}"
    return "attention by plain operations, slow and with a matrix of all pairs: no fused kernel takes this shape"


def _tell(
    preparation: Preparation, forecast: MemoryForecast, device: torch.device, seconds: float, loss: float
) -> None:
    import torch

    from zerokara.training.compute import devices

    peak = torch.tensor([float(devices.peak_memory(device))], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(peak, torch.distributed.ReduceOp.MAX)
    schedule = preparation.schedule
    speed = schedule.batch_tokens / seconds
    _log(
        f"trial of {TRIAL_STEPS} steps: loss {loss:.3f}, {seconds_text(seconds)} a step, {count_text(speed)} tok/s; "
        f"all {schedule.num_steps:,} steps would take {seconds_text(schedule.num_steps * seconds)}, validations and "
        "saves not counted"
    )
    _log(f"memory: {forecast.measured_text(int(peak.item()))}")


def _log(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        log(text)
