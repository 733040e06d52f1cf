"""The estimate counts what torch really keeps, and grows and shrinks with the settings as it must."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from zerokara.model import loss, memory, parallel
from zerokara.model.megatron import build
from zerokara.model.memory import Layout, estimate
from zerokara.model.shapes import ModelShape


def shape_of(architecture: str = "llama", kv_heads: int = 4, tied: bool = True, layers: int = 2) -> ModelShape:
    return ModelShape(architecture, layers, 64, 4, kv_heads, 192, 32, 500, tied, 1e4, 1e-5, 0.02)


def layout_of(shape: ModelShape | None = None, **settings: Any) -> Layout:
    shape = shape or shape_of()
    given = {"micro_batch": 2, "precision": "fp32", "device": "cpu", "optimizer_bytes": 8 * shape.num_parameters()}
    return Layout(shape, **{**given, **settings})  # type: ignore[arg-type]


def kept_by_a_layer(layout: Layout) -> int:
    """Bytes of all that the second layer keeps for the backward pass and the first did not, weights left out."""
    parallel.start_alone()
    dtype = torch.bfloat16 if layout.precision == "bf16" else torch.float32
    model = build(layout.shape, dtype, activation_checkpointing=layout.activation_checkpointing).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}
    counted: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda *_: counted.append(sum(one.nbytes() for one in kept.values())))
    ids = torch.randint(4, 500, (layout.micro_batch, layout.shape.seq_len), generator=torch.Generator().manual_seed(1))
    segments = (ids < 50).cumsum(1) if layout.isolate_documents else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(ids, ids, None, segments)
    return counted[2] - counted[1]


@pytest.mark.parametrize("mode", ["off", "selective", "full"])
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("architecture", "kv_heads"), [("llama", 4), ("llama", 2), ("qwen3", 2), ("gpt2", 4)])
def test_a_layer_keeps_what_is_counted(
    architecture: str, kv_heads: int, precision: str, isolated: bool, mode: str
) -> None:
    # The third layer's beginning ends the count of the second.
    layout = layout_of(
        shape_of(architecture, kv_heads, layers=3),
        precision=precision,
        isolate_documents=isolated,
        activation_checkpointing=mode,
    )
    # Where one layer ends and the next begins is blurred by what both share, the tensor between them.
    assert kept_by_a_layer(layout) == pytest.approx(memory.layer_activations(layout), rel=0.03)


def test_constants_are_those_of_the_code_they_speak_of() -> None:
    assert memory.CHUNK_BYTES == loss.CHUNK_BYTES
    assert memory.local_parameters(layout_of()) == shape_of().num_parameters()


def test_tensor_parallelism_shares_out_all_matrices() -> None:
    whole, half = layout_of(), layout_of(tensor_parallel_size=2)
    norms = 5 * 64
    assert memory.local_parameters(half) == (memory.local_parameters(whole) - norms) // 2 + norms
    assert memory.layer_activations(half) < 0.75 * memory.layer_activations(whole)


def bytes_of(layout: Layout) -> int:
    return estimate(layout).device_bytes


def test_each_setting_that_saves_memory_does() -> None:
    large = replace(shape_of(layers=12), hidden_size=1024, ffn_hidden_size=2816, num_attn_heads=16, num_kv_heads=16)
    base = layout_of(large, device="cuda", precision="bf16", num_readers=4, micro_batch=64, zero_stage=1)
    assert bytes_of(replace(base, micro_batch=32)) < bytes_of(base)
    by_mode = [bytes_of(replace(base, activation_checkpointing=mode)) for mode in ("full", "selective", "off")]
    assert by_mode == sorted(set(by_mode)) and bytes_of(replace(base, zero_stage=2)) < bytes_of(base)
    # DeepSpeed keeps up to a billion gathered weights at hand: below that, stage 3 saves nothing that stage 2 does not.
    vast = replace(large, num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attn_heads=32, num_kv_heads=32)
    base_of_vast = replace(base, shape=vast, optimizer_bytes=8 * vast.num_parameters(), micro_batch=1)
    by_stage = [bytes_of(replace(base_of_vast, zero_stage=stage)) for stage in (3, 2, 1)]
    assert by_stage == sorted(set(by_stage))
    offloaded = estimate(replace(base, offload="optimizer"))
    assert offloaded.device_bytes < bytes_of(base) and offloaded.host_bytes > estimate(base).host_bytes
    assert bytes_of(replace(base, tensor_parallel_size=2, num_readers=2)) < bytes_of(replace(base, num_readers=2))
    assert bytes_of(replace(base, optimizer_bytes=0)) < bytes_of(base)


def test_what_is_saved_lies_in_main_memory() -> None:
    shape = shape_of()
    copy = 12 * shape.num_parameters()
    on_cpu, on_gpu = estimate(layout_of()), estimate(layout_of(device="cuda"))
    assert on_cpu.device_bytes - on_cpu.without_saving() == copy and on_cpu.host_bytes == 0
    assert on_gpu.without_saving() == on_gpu.device_bytes and on_gpu.host_bytes == copy + memory.HOST_FRAMEWORK_BYTES
