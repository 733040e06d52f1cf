"""Start the training processes of one node through the DeepSpeed launcher.

The launcher of a node (deepspeed/launcher/launch.py, 0.19.8) sets RANK, LOCAL_RANK, WORLD_SIZE and the master's address
for each process, passes signals on, and ends all when one dies. It is called directly: the `deepspeed` command in front
of it looks for other nodes and costs a second and a half.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

from zerokara.config import PretrainConfig
from zerokara.training.preparation import cpu_threads

_LAUNCHER = "deepspeed.launcher.launch"


def is_training_process() -> bool:
    """Whether this process was started by the launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def num_processes(config: PretrainConfig) -> int:
    """Processes to start: as asked, or one for each GPU that torch sees, or one on a CPU."""
    if config.num_processes != "auto":
        return config.num_processes
    import torch  # about a second: only a run that leaves the choice to us pays for it

    return max(1, torch.cuda.device_count())


def launch(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run ``python -m module arguments`` in `processes` processes on this node; gives the exit code."""
    import torch

    environment = dict(os.environ)
    devices: list[int | str] = list(range(processes))
    if torch.cuda.is_available():
        # The launcher sets CUDA_VISIBLE_DEVICES itself, from the ids that it is given.
        named = environment.get("CUDA_VISIBLE_DEVICES")
        devices = list(named.split(",")[:processes]) if named else devices
    else:
        environment["DS_ACCELERATOR"] = "cpu"
        environment["OMP_NUM_THREADS"] = str(cpu_threads(processes))
    nodes = base64.urlsafe_b64encode(json.dumps({"localhost": devices}).encode()).decode()
    command = [sys.executable, "-m", _LAUNCHER, f"--world_info={nodes}", "--master_addr=127.0.0.1"]
    command += [f"--master_port={_free_port()}", "--no_local_rank", "--quiet", "--module", module, *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
