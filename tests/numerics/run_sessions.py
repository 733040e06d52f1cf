"""Trains the runs that a JSON file names, one after another in the same processes: starting Python takes seconds.

Beside its settings a run may name ``stop_at``, a step to stop before, and ``spoil_at``, a step after whose update the
last process's weights are changed in one place; the message that this must lead to is then written to spoilt.txt. And
``fault``, which befalls it in every process (tests/faults/forge.py). Each process writes to seen_<rank>.json how many
bytes of optimizer state it holds, the addresses at which it listens, and its process groups' time-outs in seconds. Each
run that is done adds a line to the JSON file's neighbour that ends in .done.

Nothing that the processes send each other may be a pickle, whoever sends it.
"""

import contextlib
import datetime
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch.distributed

from zerokara.base.errors import RunError
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.training.guards import StepRecord
from zerokara.training.loop import Trainer
from zerokara.training.planning import processors, run_folder
from zerokara.training.planning.run_plan import make_plan


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("a pickle was sent from process to process")


for collective in ("_object_to_tensor", "_tensor_to_object"):  # torch's collectives for objects all go through these
    assert hasattr(torch.distributed.distributed_c10d, collective)
    setattr(torch.distributed.distributed_c10d, collective, refuse)
# As for NCCL, where a library states none; for gloo it would be the 30 minutes of ours.
assert hasattr(torch.distributed.distributed_c10d, "_get_default_timeout")
torch.distributed.distributed_c10d._get_default_timeout = lambda backend: datetime.timedelta(minutes=10)


def optimizer_bytes(trainer: Trainer) -> int:
    values = [value for state in trainer.run.engine.optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in values)


def watch_weights(trainer: Trainer, name: str = "", at_step: int = 0) -> None:
    """Compare the weights after every step; before that, change one number of `name` in the last process at a step."""
    after_step, parameters = trainer.after_step, trainer.divergence._copies

    def watching(record: StepRecord) -> bool:
        if record.step == at_step and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            parameters[name].detach().view(-1)[5] += 2**-10
        trainer.divergence.check(record.step)
        return after_step(record)

    trainer.after_step = watching  # type: ignore[method-assign]


def train(config_path: str, job: dict[str, Any]) -> None:
    if zero_groups := sys.modules.get("deepspeed.utils.groups"):  # it has the hierarchy of a run before this
        zero_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    stop_at, spoil_at = job.pop("stop_at", None), job.pop("spoil_at", None)
    overrides = [f"{key}={value}" for key, value in job.items()]
    loaded = load(PretrainConfig, config_path, overrides)
    plan = (
        make_plan(loaded)
        .on_processes(int(os.environ["WORLD_SIZE"]))
        .with_settings(precision=processors.devices().precision(loaded))
    )
    if int(os.environ["RANK"]) == 0:
        run_folder.claim(plan)
    trainer = Trainer(plan)
    watch_weights(trainer, *(spoil_at or ()))
    if stop_at is not None:
        after_step = trainer.after_step

        def stopping(record):  # type: ignore[no-untyped-def]
            leave = after_step(record)
            if record.step == stop_at - 1:
                trainer.stop.reason = "test"
            return leave

        trainer.after_step = stopping  # type: ignore[method-assign]
    place, rank = Path(job["output_model_dir"]), trainer.run.processes.rank
    listening = [each.laddr.ip for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    timeouts = [
        group._get_backend(torch.device("cpu")).options._timeout.total_seconds()  # type: ignore[attr-defined]
        for group in torch.distributed.distributed_c10d._world.pg_map
    ]
    seen = {"optimizer_bytes": optimizer_bytes(trainer), "listening": listening, "timeouts": timeouts}
    (place / f"seen_{rank}.json").write_text(json.dumps(seen), encoding="utf-8")
    if spoil_at is None:
        trainer.train()
    else:
        try:
            trainer.train()
        except RunError as error:
            (place / "spoilt.txt").write_text(str(error), encoding="utf-8")
        except SystemExit as leaving:
            assert leaving.code == RunError.exit_code
    torch.distributed.barrier()


def fault_of(job: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    if "fault" not in job:
        return contextlib.nullcontext()
    from faults.forge import armed  # loads what the other runs do without

    return armed(job.pop("fault"))


def main(arguments: Sequence[str]) -> int:
    path = Path(arguments[0])
    work = json.loads(path.read_text(encoding="utf-8"))
    for each in work["jobs"]:
        with fault_of(each):
            train(work["config"], each)
        if os.environ["RANK"] == "0":
            with path.with_suffix(".done").open("a", encoding="utf-8") as done:
                done.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
