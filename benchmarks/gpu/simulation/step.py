"""The step: the product's own model, engine, loss and optimizer on a pretended device, with each operator recorded."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import layer_norm

from benchmarks.gpu.simulation import inductor
from benchmarks.gpu.simulation.recorder import Recorder, on_device
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import attention, builder, compilation, language_model, layers, loss, parallel, weight_gradients
from zerokara.model.megatron_core import random
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import engine as engines
from zerokara.training.compute import engine_choice


def a_step(config: PretrainConfig, shape: ModelShape, document: int) -> tuple[Recorder, int]:
    """Return what a step does, and its micro batches; those after the first are equal, and one of them is computed.

    Sections: ``first`` and ``others``, each with its backward pass; ``loss`` of both; ``update``.
    """
    device = torch.device("cuda", 0)
    _leave_out_what_needs_numbers()
    recorder = Recorder(document)
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        recorder.is_on = False
        # A FakeTensor keeps the device that it was made on, whatever becomes of its `data`: all are made on the GPU.
        torch.nn.Module.to = lambda self, *_, **__: self  # type: ignore[assignment,method-assign]
        with device:
            model = builder.build(shape, activation_checkpointing=config.activation_checkpointing, settings=config)
        compiles = compilation.compiles_functions(config.compile, "cuda")
        _take_one_kernel_for_norms(model, [] if not compiles else model.all_layers())
        engine = engine_choice.open_engine(model, config, {}, device)
        gc.collect()
        recorder.peak = recorder.now
        if config.precision == "fp8":
            layers.multiply_in_float8(model)
        if compiles:
            inductor.start()
            known: dict[Any, Any] = {}
            for layer in model.all_layers():
                layer.compiled = inductor.compiled_layer(layer, known, recorder)
            model.kernels.softmax = [inductor.compiled_function(each, recorder) for each in loss.SOFTMAX]
        recorder.is_on = True
        num_micro_batches = config.global_batch // config.micro_batch
        assert num_micro_batches > 1, "a first micro batch, and another one"
        plain_loss = loss.cross_entropy

        def named_loss(*arguments: Any) -> Any:
            before, recorder.section = recorder.section, "loss"
            nats = plain_loss(*arguments)
            recorder.section = before
            return nats

        language_model.cross_entropy = named_loss
        tokens = float(config.global_batch * shape.input_len)
        for recorder.section in ("first", "others"):
            engine.accumulate(_batch(config, shape, document), tokens, float(config.global_batch))
        recorder.section = "update"
        engine.update(1e-3, on_device(2, torch.float64))
    return recorder, num_micro_batches


def _take_one_kernel_for_norms(model: torch.nn.Module, compiled: list[Any]) -> None:
    """Outside of compiled layers: torch for a CPU has no _fused_rms_norm, but the like of it for LayerNorm."""
    inside = {id(module) for layer in compiled for module in layer.modules()}
    for module in model.modules():
        if type(module) is torch.nn.RMSNorm and id(module) not in inside:
            module.forward = partial(_norm, module)  # type: ignore[method-assign]


def _norm(module: torch.nn.RMSNorm, hidden: Tensor) -> Tensor:
    return layer_norm(hidden, module.normalized_shape, module.weight, None, module.eps or 0.0)


def _batch(config: PretrainConfig, shape: ModelShape, document: int) -> list[Tensor]:
    """The arguments of the model, as `Batch.arguments` orders them."""
    batch, length, target = config.micro_batch, shape.input_len, shape.target_len
    tensors = [on_device((batch, length)), on_device((batch, target))]
    tensors += [on_device((batch, target), torch.float32), on_device(batch)]
    if shape.traits.is_encoder_decoder:
        tensors.append(on_device((batch, target)))
    if config.intra_document_masking:
        tensors += [on_device((batch, length)), on_device(batch * length // document + 1, torch.int32)]
    return tensors


def _leave_out_what_needs_numbers() -> None:
    """Answer for the device what a run asks it, and take the kernels that a GPU would."""
    parallel.prepare_device = lambda seed: random.initialize_rng_tracker(inference_rng_tracker=True)  # type: ignore[attr-defined]
    parallel.start_alone()

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False, scale: Any = None, **_: Any
    ) -> Any:
        if attn_mask is not None:
            kernel = torch.ops.aten._scaled_dot_product_efficient_attention
            return kernel(query, key, value, attn_mask, True, 0.0, is_causal, scale=scale)[0]
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)[0]

    attention.scaled_dot_product_attention = attend
    weight_gradients.adds_in_fp32 = lambda device, dtype: dtype != torch.float32  # type: ignore[assignment]
    engines.read_once = lambda norm, numbers: (0.5, [1.0, 0.0])
