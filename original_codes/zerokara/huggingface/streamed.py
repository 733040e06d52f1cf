"""Our own model, computing from a checkpoint without ever being in memory as a whole.

It is built without content (torch's device ``meta``). A layer takes its weights from the checkpoint when it is called
and lets go of them when it is done; what stands outside the layers (embeddings, last norm, output matrix) stays for the
pass. So each pass reads the checkpoint once, and all tokens that there are should go through it together.

Shape suffixes: B batch, S sequence, V real vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zerokara.model import megatron, parallel
from zerokara.model.shapes import ModelShape


class StreamedModel:
    """Our model over `weights` that are mapped from disk, each going through `changed` on its way."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        shape: ModelShape,
        device: torch.device,
        changed: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ):
        parallel.start_alone()
        with torch.device("meta"):
            self._model = megatron.build(shape).eval()
        parameters = dict(self._model.named_parameters())
        assert parameters.keys() == weights.keys(), "the rules were checked against these weights"
        self._weights, self._shape, self._device, self._changed = weights, shape, device, changed
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        layers = [
            layer
            for name, module in self._model.named_modules()
            if name.rpartition(".")[2] == "layers"
            for layer in module.children()
        ]
        for layer in layers:
            filled = _Filled(self, list(layer.modules()))
            layer.register_forward_pre_hook(lambda *_, filled=filled: filled.__enter__())
            layer.register_forward_hook(lambda *_, filled=filled: filled.__exit__())
        inside = {id(module) for layer in layers for module in layer.modules()}
        self._outside = _Filled(self, [module for module in self._model.modules() if id(module) not in inside])

    def logits(
        self,
        tokens_BS: Tensor,
        encoder_input_ids_BR: Tensor | None = None,
        encoder_attention_mask_BR: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, V] in fp32 on the CPU; the rows that pad the vocabulary, which never win, are cut off.

        `encoder_input_ids_BR` is what an encoder reads, `encoder_attention_mask_BR` False behind its texts.
        """
        with torch.inference_mode(), self._outside:
            tokens = tokens_BS.to(self._device)
            if encoder_input_ids_BR is None or encoder_attention_mask_BR is None:
                logits = self._model(tokens)
            else:
                readable = encoder_attention_mask_BR.to(self._device)
                logits = self._model(
                    encoder_input_ids_BR.to(self._device),
                    decoder_input_ids_BT=tokens,
                    encoder_attention_mask_BS=readable,
                )
            return logits[..., : self._shape.vocab_size].float().cpu()

    def read(self, parameter: Tensor) -> torch.nn.Parameter:
        """The content of an empty parameter."""
        with torch.inference_mode(False), torch.no_grad():
            content = self._changed(self._weights[self._names[id(parameter)]]).to(self._device)
            # By `requires_grad` megatron-core chooses the function that computes with it: the same as in training.
            return torch.nn.Parameter(content, requires_grad=parameter.requires_grad)


class _Filled:
    """Modules whose own parameters have content while this context lasts."""

    def __init__(self, model: StreamedModel, modules: Iterable[torch.nn.Module]):
        self._model = model
        self._empty = [(module, dict(module._parameters)) for module in modules if module._parameters]

    def __enter__(self) -> None:
        for module, parameters in self._empty:
            for name, parameter in parameters.items():
                if parameter is not None:
                    module._parameters[name] = self._model.read(parameter)

    def __exit__(self, *_: Any) -> None:
        for module, parameters in self._empty:
            module._parameters.update(parameters)
