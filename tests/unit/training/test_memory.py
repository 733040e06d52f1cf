"""The arithmetic of memory: it shrinks with the settings as it must, and its bounds hold what layers really keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from zerokara.model import parallel
from zerokara.model.builder import build
from zerokara.model.experts import Routing
from zerokara.model.shapes import ModelShape
from zerokara.training.planning import memory
from zerokara.training.planning.memory import TrainingLayout, min_activation_bytes, state_parts

ARCHITECTURES = ["llama", "qwen3", "gpt2", "t5", "mixtral", "switch"]
LAYERS = 3


def shape_of(architecture: str = "llama", kv_heads: int = 4) -> ModelShape:
    shape = ModelShape(architecture, LAYERS, 64, 4, kv_heads, 192, 32, 500, True, 1e4, 1e-5, 0.02)
    if shape.traits.is_encoder_decoder:
        # Heads that are together wider than the model, and a decoder shorter than its encoder.
        shape = replace(shape, head_dim=24, target_len=20)
    if not shape.traits.moe_every:
        return shape
    per_token = shape.traits.experts_per_token
    experts = {"num_experts": 6, "experts_per_token": per_token, "moe_ffn_hidden_size": 96}
    return replace(shape, **experts, moe_layers=tuple(range(LAYERS)))


def layout_of(shape: ModelShape | None = None, **settings: Any) -> TrainingLayout:
    given = {"num_processes": 1, "global_batch_size": 16, "micro_batch_size": 2, "precision": "fp32", "device": "cpu"}
    return TrainingLayout(shape or shape_of(), **{**given, **settings})


def by_name(layout: TrainingLayout, on_host: bool = False) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in state_parts(layout):
        if part.on_host == on_host:
            found[part.name] = found.get(part.name, 0) + part.num_bytes
    return found


def state_bytes(layout: TrainingLayout) -> int:
    return sum(part.num_bytes for part in state_parts(layout) if not part.on_host and part.name != memory.SAVE_COPY)


@pytest.mark.parametrize(
    ("precision", "optimizer", "expected"),
    [
        ("fp32", "adamw", {"weights": 4, "gradients": 4, "optimizer state": 8}),
        ("bf16", "adamw", {"weights": 2, "gradients": 4, "fp32 master weights": 4, "optimizer state": 8}),
        ("bf16", "adafactor", {"weights": 2, "gradients": 4, "fp32 master weights": 4}),
        ("fp32", "muon", {"weights": 4, "gradients": 4}),
    ],
)
def test_bytes_of_a_parameter_on_one_process(precision: str, optimizer: str, expected: dict[str, int]) -> None:
    shape = shape_of()
    found = by_name(layout_of(shape, precision=precision, optimizer=optimizer))
    count = shape.num_parameters()
    assert {name: found[name] for name in expected} == {name: size * count for name, size in expected.items()}
    assert found[memory.SAVE_COPY] == 4 * count + found["optimizer state"]
    assert found.keys() - expected.keys() <= {"optimizer state", memory.SAVE_COPY}


def test_tensor_parallelism_shares_out_all_matrices() -> None:
    shape = shape_of()
    whole, half = (sum(layout_of(num_processes=2, tensor_parallel_size=size).local_sizes.values()) for size in (1, 2))
    norms = (2 * LAYERS + 1) * shape.hidden_size
    assert whole == shape.num_parameters() and half == (whole - norms) // 2 + norms


def test_each_setting_that_saves_memory_does() -> None:
    large = replace(shape_of(), num_layers=12, hidden_size=1024, ffn_hidden_size=2816, num_attn_heads=16, head_dim=64)
    base = layout_of(large, device="cuda", precision="bf16", num_processes=4, global_batch_size=64, micro_batch_size=16)
    by_stage = [state_bytes(replace(base, zero_stage=stage)) for stage in (2, 1, 0)]
    assert by_stage == sorted(set(by_stage))
    # DeepSpeed keeps a whole bucket at hand: only of a model that is larger than that stage 3 saves memory.
    small_bucket = replace(base, reduce_bucket_size=1_000_000)
    assert state_bytes(replace(small_bucket, zero_stage=3)) < by_stage[0] < state_bytes(replace(base, zero_stage=0))
    assert state_bytes(replace(base, tensor_parallel_size=2)) < state_bytes(replace(base, num_processes=2))
    assert state_bytes(replace(base, optimizer="adafactor")) < state_bytes(base)
    offloaded = replace(base, offload="optimizer")
    assert state_bytes(offloaded) < state_bytes(base)
    assert by_name(offloaded, on_host=True).keys() == {
        "gradients",
        "fp32 master weights",
        "optimizer state",
        memory.SAVE_COPY,
    }
    assert "weights" in by_name(replace(base, offload="all", zero_stage=3), on_host=True)
    by_mode = [
        min_activation_bytes(replace(base, activation_checkpointing=mode)) for mode in ("full", "selective", "off")
    ]
    assert by_mode == sorted(set(by_mode))
    assert min_activation_bytes(replace(base, micro_batch_size=8)) == min_activation_bytes(base) / 2
    assert min_activation_bytes(replace(base, tensor_parallel_size=2)) < min_activation_bytes(base)


def test_the_tokens_of_an_encoder_and_of_its_decoder_count() -> None:
    shape = shape_of("t5")
    both = min_activation_bytes(layout_of(shape))
    assert min_activation_bytes(layout_of(replace(shape, input_len=64))) > both
    assert min_activation_bytes(layout_of(replace(shape, target_len=40))) > both


def test_micro_batch_sizes_divide_the_share_of_a_process() -> None:
    assert layout_of(global_batch_size=24, num_processes=2).micro_batch_sizes == [1, 2, 3, 4, 6, 12]
    assert layout_of(global_batch_size=24, num_processes=2, tensor_parallel_size=2).micro_batch_sizes[-1] == 24


def kept_bytes(layout: TrainingLayout) -> int:
    """What is kept for the backward pass when the layers are done, weights left out."""
    parallel.start_alone()
    shape, dtype = layout.shape, torch.bfloat16 if layout.precision == "bf16" else torch.float32
    mode, routing = layout.activation_checkpointing, Routing(aux_loss_coef=0.01, z_loss_coef=0.001)
    model = build(shape, dtype, activation_checkpointing=mode, routing=routing).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}
    counted: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    for layer in model.all_layers():
        layer.register_forward_hook(lambda *_: counted.append(sum(one.nbytes() for one in kept.values())))
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (
        torch.randint(4, 500, (layout.micro_batch_size, length), generator=generator)
        for length in (shape.seq_len, shape.target_len)
    )
    segments = (inputs < 50).cumsum(1) if layout.intra_document_masking else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs, targets, None, targets if shape.traits.is_encoder_decoder else segments)
    return counted[-1]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("architecture", "settings"),
    [*((name, {}) for name in ARCHITECTURES), ("llama", {"kv_heads": 2}), ("llama", {"masking": True})],
)
def test_the_bounds_hold_what_layers_keep(architecture: str, settings: dict[str, Any], precision: str) -> None:
    shape = shape_of(architecture, settings.get("kv_heads", 4))
    layout = layout_of(shape, precision=precision, intra_document_masking=settings.get("masking", False))
    whole = kept_bytes(layout)
    for mode in ("off", "selective", "full"):
        of_mode = replace(layout, activation_checkpointing=mode)
        kept = kept_bytes(of_mode)
        # What is not kept is computed again for one layer at a time.
        held = kept + (whole - kept) / LAYERS
        least = min_activation_bytes(of_mode)
        assert least < held < memory.ACTIVATION_MARGIN * least
