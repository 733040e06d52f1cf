"""On a GPU: in a training step the host waits for the device once, in the one read of the step's numbers.

torch raises an error at every other wait that it knows of (`torch.cuda.set_sync_debug_mode`): numbers that are read,
copies from and to memory that is not pinned, `nonzero` and its kind. Waits for a stream or the whole device, which only
DeepSpeed asks for, are counted.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from configs import RECIPE
from drawn_models import build
from engines import engine_of
from forked import config_from
from gpu_device import DEVICE, PRECISION, REHEARSED
from step_kinds import KINDS, VOCABULARY, batches_of, stepper

from zerokara.model import compilation
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import engine, zero
from zerokara.training.processes.joining import Processes

pytestmark = pytest.mark.gpu

SYNCHRONIZE = "synchronize"
COMMON = RECIPE | {
    "num_layers": 2, "hidden_size": 64, "num_attn_heads": 4, "seq_len": 64, "global_batch_size": 4,
    "micro_batch_size": 2, "precision": PRECISION,
}  # fmt: skip


@contextmanager
def waits_refused() -> Iterator[Counter[str]]:
    """Make every wait an error but those of `engine.read_once`; yields a count of these, by kind.

    A read counts by the device of its numbers.
    """
    waits: Counter[str] = Counter()

    def counted(wait: Callable[..., Any], kind: Callable[..., str]) -> Callable[..., Any]:
        def waiting(*arguments: Any) -> Any:
            waits[kind(*arguments)] += 1
            set_mode("default")
            try:
                return wait(*arguments)
            finally:
                set_mode("error")

        return waiting

    read_once = counted(engine.read_once, lambda norm, _: norm.device.type)
    with (
        mock.patch.object(engine, "read_once", read_once),
        mock.patch.object(zero, "read_once", read_once),
        mock.patch.object(torch.cuda, "synchronize", counted(torch.cuda.synchronize, lambda *_: SYNCHRONIZE)),
        mock.patch.object(
            torch.cuda.Stream, "synchronize", counted(torch.cuda.Stream.synchronize, lambda _: SYNCHRONIZE)
        ),
    ):
        set_mode("error")
        try:
            yield waits
        finally:
            set_mode("default")


def set_mode(mode: str) -> None:
    if not REHEARSED:
        torch.cuda.set_sync_debug_mode(mode)


def check_third_step(settings: dict[str, Any], compiles: bool = False) -> None:
    """Two steps may wait (kernels are chosen, memory is taken); the third is watched, with its edge."""
    config = config_from(COMMON | settings)
    model = build(ModelShape.from_config(config, VOCABULARY), seed=1, settings=config)
    trained = engine_of(model, config, chosen_for=2)
    if compiles:
        first = batches_of(config, torch.Generator(), ranks=1, pins=False).micro_batches[0]
        assert compilation.start(model, [each.to(DEVICE) for each in first], log=print)
    step = stepper(config, trained, Processes(DEVICE, 0, host_group()), seed=2, pins=not REHEARSED)
    step(1)
    step(2)
    with waits_refused() as waits:
        step(3)
    assert waits == Counter([DEVICE.type])


def host_group() -> Any:
    """A run's group of the host's memory: `joining.join`."""
    return None if REHEARSED else torch.distributed.new_group(backend="gloo")


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.get("zero_stage") != 3])
def test_the_host_waits_once_a_step(name: str) -> None:
    """Not at stage 3, where DeepSpeed waits for what it has gathered and reduced."""
    check_third_step(KINDS[name])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "t5", "mixtral"])
def test_the_host_waits_once_a_compiled_step(architecture: str) -> None:
    check_third_step({"architecture": architecture}, compiles=True)
