"""Our own model, computing from a checkpoint layer by layer, without ever being in memory as a whole.

It is built without content (torch's device ``meta``). A layer loads its weights from the checkpoint when it is called
and drops them afterwards; what is outside the layers (embeddings, final norm, output matrix) stays for the forward
pass. Each forward pass thus reads the checkpoint once, so all tokens should go through in few of them.

Shape suffixes: B batch, S sequence, R encoder sequence, V real vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from zerokara.model import builder, parallel
from zerokara.model.shapes import ModelShape


class StreamedModel:
    """Our model over `weights` that are read from disk, each passed through `convert` when it is loaded."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        shape: ModelShape,
        device: torch.device,
        convert: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ):
        parallel.start_alone()
        with torch.device("meta"):
            self._model = builder.build(shape).eval()
        parameters = dict(self._model.named_parameters())
        assert parameters.keys() == weights.keys(), "the rules were checked against these weights"
        self._weights, self._shape, self._device, self._convert = weights, shape, device, convert
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        layers = [
            layer
            for name, module in self._model.named_modules()
            if name.rpartition(".")[2] == "layers"
            for layer in module.children()
        ]
        for layer in layers:
            loaded = _Loaded(self, layer.modules())
            layer.register_forward_pre_hook(lambda *_, loaded=loaded: loaded.__enter__())
            layer.register_forward_hook(lambda *_, loaded=loaded: loaded.__exit__())
        inside = {id(module) for layer in layers for module in layer.modules()}
        self._outside = _Loaded(self, [module for module in self._model.modules() if id(module) not in inside])

    def logits(
        self,
        tokens_BS: Tensor,
        encoder_input_ids_BR: Tensor | None = None,
        encoder_attention_mask_BR: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, V] in fp32 on the CPU, without the rows that pad the vocabulary.

        `encoder_attention_mask_BR` is False on the padding after the encoder inputs.
        """
        with torch.inference_mode(), self._outside:
            tokens = tokens_BS.to(self._device)
            if encoder_input_ids_BR is None or encoder_attention_mask_BR is None:
                logits = self._model(tokens)
            else:
                mask = encoder_attention_mask_BR.to(self._device)
                logits = self._model(
                    encoder_input_ids_BR.to(self._device),
                    decoder_input_ids_BT=tokens,
                    encoder_attention_mask_BS=mask,
                )
            return logits[..., : self._shape.vocab_size].float().cpu()

    def load(self, parameter: Tensor) -> torch.nn.Parameter:
        """Load the content of an empty parameter."""
        with torch.inference_mode(False), torch.no_grad():
            content = self._convert(self._weights[self._names[id(parameter)]]).to(self._device)
            # megatron-core chooses its linear function by `requires_grad`: the same one as in training.
            return torch.nn.Parameter(content, requires_grad=parameter.requires_grad)


class _Loaded:
    """Modules whose own parameters have content while this context lasts."""

    def __init__(self, model: StreamedModel, modules: Iterable[torch.nn.Module]):
        self._model = model
        self._empty = [(module, dict(module._parameters)) for module in modules if module._parameters]

    def __enter__(self) -> None:
        for module, parameters in self._empty:
            for name, parameter in parameters.items():
                if parameter is not None:
                    module._parameters[name] = self._model.load(parameter)

    def __exit__(self, *_: Any) -> None:
        for module, parameters in self._empty:
            module._parameters.update(parameters)
