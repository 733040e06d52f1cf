"""The estimate counts what torch really keeps, and grows and shrinks with the settings as it must."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from zerokara.model import activations, loss, memory, parallel
from zerokara.model.experts import Routing
from zerokara.model.megatron import build
from zerokara.model.memory import Layout, estimate
from zerokara.model.shapes import ModelShape
from zerokara.model.sharding import Sharding


def shape_of(architecture: str = "llama", kv_heads: int = 4, tied: bool = True, layers: int = 2) -> ModelShape:
    shape = ModelShape(architecture, layers, 64, 4, kv_heads, 192, 32, 500, tied, 1e4, 1e-5, 0.02)
    if (
        shape.traits.is_encoder_decoder
    ):  # heads that are not as wide together as the model, and fewer tokens written than read
        shape = replace(shape, head_dim=24, target_len=20)
    if not shape.traits.moe_every:
        return shape
    per_token = shape.traits.experts_per_token
    # The second layer, which the tests count, and in switch no other.
    sparse = (1,) if architecture == "switch" else tuple(range(layers))
    return replace(shape, num_experts=6, experts_per_token=per_token, moe_ffn_hidden_size=96, moe_layers=sparse)


def layout_of(shape: ModelShape | None = None, **settings: Any) -> Layout:
    shape = shape or shape_of()
    given = {"micro_batch": 2, "precision": "fp32", "device": "cpu", "optimizer_bytes": 8 * shape.num_parameters()}
    return Layout(shape, **{**given, **settings})


def kept_before_each_layer(layout: Layout) -> list[int]:
    """Bytes of all that is kept for the backward pass when each layer begins, in their order, weights left out."""
    parallel.start_alone()
    dtype = torch.bfloat16 if layout.precision == "bf16" else torch.float32
    mode, routing = layout.activation_checkpointing, Routing(balance=0.01, z=0.001)
    model = build(layout.shape, dtype, activation_checkpointing=mode, routing=routing).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}
    counted: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    for layer in model.all_layers():
        layer.register_forward_pre_hook(lambda *_: counted.append(sum(one.nbytes() for one in kept.values())))
    generator = torch.Generator().manual_seed(1)
    read, written = (
        torch.randint(4, 500, (layout.micro_batch, length), generator=generator)
        for length in (layout.shape.seq_len, layout.shape.target_len)
    )
    segments = (read < 50).cumsum(1) if layout.intra_document_masking else None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(read, written, None, written if layout.shape.traits.is_encoder_decoder else segments)
    return counted


@pytest.mark.parametrize("mode", ["off", "selective", "full"])
@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("architecture", "kv_heads"), [("llama", 4), ("llama", 2), ("qwen3", 2), ("gpt2", 4), ("mixtral", 2)]
)
def test_a_layer_keeps_what_is_counted(
    architecture: str, kv_heads: int, precision: str, isolated: bool, mode: str
) -> None:
    layout = layout_of(
        shape_of(architecture, kv_heads, layers=3),
        precision=precision,
        intra_document_masking=isolated,
        activation_checkpointing=mode,
    )
    assert_each_second_layer_is_counted(layout)


@pytest.mark.parametrize("mode", ["off", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("architecture", ["t5", "switch"])
def test_a_layer_of_an_encoder_and_of_its_decoder_keeps_what_is_counted(
    architecture: str, precision: str, mode: str
) -> None:
    shape = shape_of(architecture, tied=False, layers=3)
    assert_each_second_layer_is_counted(layout_of(shape, precision=precision, activation_checkpointing=mode))


def assert_each_second_layer_is_counted(layout: Layout) -> None:
    counted = kept_before_each_layer(layout)
    for number, stack in enumerate(layout.stacks):
        # The third layer's beginning ends the count of the second.
        begin, end = counted[3 * number + 1], counted[3 * number + 2]
        # Where one layer ends and the next begins is blurred by what both share, the tensor between them.
        expected = activations.layer_activations(stack, layout.activation_checkpointing, stack.are_sparse[1])
        assert end - begin == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_the_layers_of_a_stack_share_is_counted_once(precision: str) -> None:
    # With all else computed again, the biases are kept as well, and count for much.
    layout = layout_of(shape_of("t5", layers=3), precision=precision, activation_checkpointing="full")
    encoder, decoder = layout.stacks
    expected = sum(activations.stack_activations(stack, "full") for stack in layout.stacks)
    kept = kept_before_each_layer(layout)[-1] + activations.layer_activations(decoder, "full")
    assert kept == pytest.approx(expected, rel=0.03)
    assert expected > 1.5 * sum(3 * activations.layer_activations(stack, "full") for stack in (encoder, decoder))


def test_constants_are_those_of_the_code_they_speak_of() -> None:
    assert memory.CHUNK_BYTES == loss.CHUNK_BYTES


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "t5", "mixtral", "switch"])
@pytest.mark.parametrize("size", [1, 2])
def test_a_process_holds_the_parameters_that_are_cut_for_it(architecture: str, size: int) -> None:
    shape = shape_of(architecture)
    cuts = Sharding.of(shape)
    held = sum(
        math.prod(of_one) // (1 if cuts.is_replicated(name) else size)
        for name, of_one in shape.parameter_shapes().items()
    )
    assert memory.local_parameters(layout_of(shape, tensor_parallel_size=size)) == held


def test_tensor_parallelism_shares_out_all_matrices() -> None:
    whole, half = layout_of(), layout_of(tensor_parallel_size=2)
    norms = 5 * 64
    assert memory.local_parameters(half) == (memory.local_parameters(whole) - norms) // 2 + norms
    assert of_a_layer(half) < 0.75 * of_a_layer(whole)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_more_tokens_need_more_wherever_they_are(device: str) -> None:
    shape = shape_of("t5")
    settings = {"device": device, "optimizer_bytes": 0}
    both = bytes_of(layout_of(shape, **settings))
    assert bytes_of(layout_of(replace(shape, seq_len=64), **settings)) > both
    assert bytes_of(layout_of(replace(shape, target_len=40), **settings)) > both


def test_a_bias_whose_gradient_is_needed_keeps_all_pairs_on_a_cpu_only() -> None:
    # Quadratic there: four times as much of twice as many tokens. On a GPU each sequence adds only its tokens.
    wide = replace(shape_of("t5"), seq_len=2048, target_len=2048)
    on_cpu, on_gpu = (
        [of_a_layer(layout_of(wide, device=device, micro_batch=size)) for size in (1, 2)] for device in ("cpu", "cuda")
    )
    pairs = 4 * 4 * 2048**2
    assert on_cpu[1] - on_cpu[0] > pairs > on_gpu[1] - on_gpu[0]


def of_a_layer(layout: Layout) -> int:
    return activations.layer_activations(layout.stacks[0], layout.activation_checkpointing)


def bytes_of(layout: Layout) -> int:
    return estimate(layout).device_bytes


def test_each_setting_that_saves_memory_does() -> None:
    large = replace(shape_of(layers=12), hidden_size=1024, ffn_hidden_size=2816, num_attn_heads=16, num_kv_heads=16)
    base = layout_of(large, device="cuda", precision="bf16", data_parallel_size=4, micro_batch=64, zero_stage=1)
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
    assert bytes_of(replace(base, tensor_parallel_size=2, data_parallel_size=2)) < bytes_of(
        replace(base, data_parallel_size=2)
    )
    assert bytes_of(replace(base, optimizer_bytes=0)) < bytes_of(base)


def test_what_is_saved_lies_in_main_memory() -> None:
    shape = shape_of()
    copy = 12 * shape.num_parameters()
    on_cpu, on_gpu = estimate(layout_of()), estimate(layout_of(device="cuda"))
    assert on_cpu.device_bytes - on_cpu.without_saving() == copy and on_cpu.host_bytes == 0
    assert on_gpu.without_saving() == on_gpu.device_bytes and on_gpu.host_bytes == copy + memory.HOST_FRAMEWORK_BYTES
