"""A function of a few tensors that is compiled by itself, because the layer around it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Fused:
    """A function compiled for the sizes of tensors that it is shown while `is_learning`; eager for others.

    Should the compiler fail, the function runs eagerly from then on, and `error` says why. It fails in one place only:
    within the call that shows it a new size, so that no process leaves a forward pass in which others communicate.
    """

    def __init__(self, function: Callable[..., Any], num_differentiable: int = 0):
        """Its first `num_differentiable` arguments need gradients in training, where they are tensors.

        Without any, the second size that it is shown is compiled for all further ones.
        """
        self.function, self._num_differentiable = function, num_differentiable
        self._compiled = torch.compile(function, fullgraph=True, dynamic=False if num_differentiable else None)
        self._sizes: set[Any] = set()
        self.is_learning = True
        """Whether it compiles for sizes that it has not met."""
        self.error: Exception | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function."""
        sizes = tuple((each.shape, each.stride()) for each in arguments if isinstance(each, Tensor))
        if self.is_learning and self.error is None and sizes not in self._sizes:
            try:
                self._learn(arguments, named)
                self._sizes.add(sizes)
            except Exception as error:  # whatever the compiler dislikes, training works without it
                self.error = error
        use = self._compiled if self.error is None and sizes in self._sizes else self.function
        return use(*arguments, **named)

    @property
    def name(self) -> str:
        """The function's."""
        return self.function.__name__.strip("_")

    def stop_learning(self) -> None:
        """Compile for no further size, unless one compiled function serves them all."""
        self.is_learning = not self._num_differentiable

    def _learn(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Compile as for evaluation; then forward and backward, on copies that nobody else sees."""
        with torch.no_grad():
            self._compiled(*arguments, **named)
        if not self._num_differentiable:
            return
        with torch.enable_grad():
            copies = (
                _copy(each) if isinstance(each, Tensor) and index < self._num_differentiable else each
                for index, each in enumerate(arguments)
            )
            self._compiled(*copies, **named).sum().backward()


def _copy(tensor: Tensor) -> Tensor:
    """A copy that needs a gradient: of equal strides, and a parameter if it is one, for the compiler looks at both."""
    with torch.no_grad():
        copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        copied.copy_(tensor)
    return torch.nn.Parameter(copied) if isinstance(tensor, torch.nn.Parameter) else copied.requires_grad_()
