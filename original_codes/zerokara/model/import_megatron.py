"""Brings megatron-core (0.16.1) in without what comes along and nobody here uses; import it before megatron-core.

Its fusions are wrapped in torch.compile as they are defined (megatron/core/jit.py), which loads torch's compiler,
though none of them is ever called here (`megatron._common`); its inference loads wandb. Together that was two fifths of
what all imports take. (DeepSpeed loads the compiler when ZeRO is set up; other updaters never do.) megatron-core only
tries for each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def _without_extras() -> Iterator[None]:
    compile_, wandb = torch.compile, sys.modules.get("wandb")
    torch.compile = _as_it_is  # type: ignore[assignment]
    sys.modules["wandb"] = None  # type: ignore[assignment]  # `import wandb` then says that there is none
    try:
        yield
    finally:
        torch.compile = compile_
        del sys.modules["wandb"]
        if wandb is not None:
            sys.modules["wandb"] = wandb


def _as_it_is(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    return function if function is not None else _as_it_is


with _without_extras():
    import megatron.core
    import megatron.core.models.gpt  # noqa: F401
