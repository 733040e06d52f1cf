"""A run whose memory is far beyond all that the machine has is refused; what may just fit or not is only noted.

What counts is the memory that is built in (or that a container or a limit of this process grants), not what happens to
be free: other programs end, memory chips do not grow.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zerokara.errors import UserError
from zerokara.model.memory import Estimate
from zerokara.progress import bytes_text
from zerokara.training.planning.memory_budget import Budget, Question, advice, whole_machine
from zerokara.training.planning.run_plan import RunPlan as Preparation

REFUSED_SHARE = 1.25
"""Of all the memory there is, the estimate above which a run is refused. An estimate is at most 1.15 times the measured
peak (tests/numerics/test_memory.py): above that a process runs out of memory for certain. The rest is for settings and
machines on which none was measured."""


def check(plan: Preparation, gpu_bytes: int | None) -> None:
    """Check that a run may fit on this machine at all; `gpu_bytes` is the memory of one GPU, None without.

    Raises:
        UserError: it cannot; names the key that makes it fit, in numbers, or the model's size where none does.
    """
    question = plan.memory_question(whole_machine(plan.num_processes, gpu_bytes))
    needed, there = question.needed(), question.there
    place, least, most = _fullest(needed, there)
    if least <= REFUSED_SHARE * most:
        return
    key, remedy = _way_out(question, gpu_bytes)
    rule = (
        f"makes each training process (of {plan.num_processes}) need about {bytes_text(least)} of {place}; this "
        f"machine has {bytes_text(most)} in all for each"
    )
    raise UserError(plan.given.fault(key, rule, remedy))


def _fullest(needed: Estimate, there: Budget) -> tuple[str, int, int]:
    """The memory that is exceeded most: its name, the bytes needed, and the bytes there."""
    places = [("memory" if there.device == "cpu" else "GPU memory", needed.device_bytes, there.device_bytes)]
    if there.device == "cuda":
        # The libraries are left out: most of what they take beside a GPU is read from files, and shared by processes.
        on_host = (part for part in needed.parts if part.on_host and part.name != "framework")
        places.append(("main memory", sum(part.num_bytes for part in on_host), there.host_bytes))
    return max(places, key=lambda one: one[1] / max(1, one[2]))


def _way_out(question: Question, gpu_bytes: int | None) -> tuple[str, str]:
    """The key to change, and to what."""
    remedies = question.remedies()
    if remedies:
        return next(iter(remedies[0][0])), advice(question)
    if question.there.device == "cpu":
        for fewer in range(question.num_processes - 1, 0, -1):
            alone = replace(question, num_processes=fewer, there=whole_machine(fewer, gpu_bytes))
            if not list(question.config.batch_faults(fewer)) and alone.there.holds(alone.needed()):
                needed = bytes_text(alone.needed().device_bytes)
                return "num_processes", f"{fewer} would fit (about {needed}), and changes nothing that is learned"
    layers = next((smaller for smaller in _with_fewer_layers(question) if smaller.there.holds(smaller.needed())), None)
    if layers is None:
        return "hidden_size", f"{advice(question)}; or a smaller model"
    needed = bytes_text(layers.needed().device_bytes)
    return "num_layers", f"{advice(question)}; or a model with num_layers: {layers.shape.num_layers} (about {needed})"


def _with_fewer_layers(question: Question) -> Iterator[Question]:
    """The same model with fewer and fewer layers, at the smallest micro batch."""
    config = question.config.model_copy(update={"micro_batch_size": 1})
    for number in range(question.shape.num_layers - 1, 0, -1):
        sparse = tuple(layer for layer in question.shape.moe_layers if layer < number)
        shape = replace(question.shape, num_layers=number, moe_layers=sparse)
        yield replace(question, config=config, shape=shape)
