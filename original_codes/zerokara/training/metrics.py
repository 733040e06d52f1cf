"""What a run records: ``metrics.jsonl`` (each step once, also after a resume), TensorBoard, and Weights & Biases.

A logged step has at least ``step``, ``tokens``, ``epoch``, ``loss`` (nats a token, mean over the steps since the line
before), ``learning_rate``, ``grad_norm``, ``tokens_per_second``, ``seconds``, and where sources are mixed
``source_tokens`` (a list: read so far of each source); a validation line has ``step``, ``valid_loss``,
``valid_bits_per_byte``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

import orjson

from zerokara.config import PretrainConfig
from zerokara.durable import write_bytes

FILE_NAME = "metrics.jsonl"


def read(run_dir: Path) -> list[dict[str, Any]]:
    """All lines; one cut short by a crash is left out."""
    path = run_dir / FILE_NAME
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            lines.append(orjson.loads(line))
        except orjson.JSONDecodeError:
            continue
    return lines


def forget_after(run_dir: Path, step: int) -> None:
    """Drop what was recorded behind `step`: those steps will be trained again and recorded again."""
    kept = [line for line in read(run_dir) if line["step"] <= step]
    write_bytes(run_dir / FILE_NAME, b"".join(orjson.dumps(line) + b"\n" for line in kept))


class Recorder:
    """Writes lines to every place where they are watched. Only the first process has one."""

    def __init__(self, run_dir: Path, config: PretrainConfig, resumed_step: int):
        forget_after(run_dir, resumed_step)
        self._file: IO[bytes] = open(run_dir / FILE_NAME, "ab")  # noqa: SIM115  # closed in `close`
        self._tensorboard: Any = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resumed_step + 1)
        self._wandb = _start_wandb(run_dir, config) if config.wandb != "off" else None

    def record(self, line: dict[str, Any]) -> None:
        """Write one line."""
        self._file.write(orjson.dumps(line) + b"\n")
        self._file.flush()
        numbers = {key: value for key, value in line.items() if key != "step" and isinstance(value, int | float)}
        if self._tensorboard is not None:
            for key, value in numbers.items():
                self._tensorboard.add_scalar(key, value, line["step"])
        if self._wandb is not None:
            try:
                self._wandb.log(numbers, step=line["step"])
            except Exception as error:  # whatever fails over there, the training goes on
                print(f"wandb: {error}; going on without it", flush=True)
                self._wandb = None

    def close(self) -> None:
        """Flush everything to disk."""
        os.fsync(self._file.fileno())
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def _start_wandb(run_dir: Path, config: PretrainConfig) -> Any:
    try:
        import wandb

        # The same id at every start lets W&B go on with the same curve.
        return wandb.init(
            project=config.wandb_project,
            name=run_dir.name,
            id=f"zerokara-{run_dir.name}",
            resume="allow",
            dir=str(run_dir),
            mode="online" if config.wandb == "online" else "offline",
            config=config.model_dump(),
        )
    except Exception as error:  # no key, no network, a full disk: the training goes on
        print(f"wandb: {error}; going on without it", flush=True)
        return None
