"""Measures the most memory that training processes hold, as told by the kernel, each in a fresh process.

Reads a JSON file: the path of a configuration, and jobs {"processes": …, settings …}; prints a JSON list of bytes, the
first process's peak less what it held when its libraries were loaded; their code is not counted. Forks instead of
starting Python anew: that takes seconds, and the libraries' memory is subtracted anyway.
"""

import json
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # which torch.optim and DeepSpeed load when they are first used
import torch.distributed

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model import parallel
from zerokara.model.megatron import build
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import devices, updater
from zerokara.training.compute.deepspeed_settings import load_template
from zerokara.training.compute.engine import open_engine
from zerokara.training.planning.run_plan import template_path
from zerokara.training.processes import meeting
from zerokara.training.processes.process_group import init_process_group

VOCABULARY = 2000
STEPS = 2


def resident(key: str) -> int:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found
    return int(found[1]) * 1024


def train(config: PretrainConfig) -> int:
    """Train a few steps on random ids; gives the peak."""
    torch.set_num_threads(1)
    devices.give_back_freed_memory()
    if config.optimizer == "adafactor":
        import transformers.optimization  # noqa: F401  # of the libraries, as torch is
    init_process_group(torch.device("cpu"), meeting.init_method())
    parallel.start(config.seed, config.tensor_parallel_size)
    shape = ModelShape.from_config(config, VOCABULARY)
    torch.nn.Linear(512, 512)(torch.randn(256, 512)).sum().backward()  # starts what torch starts only when needed
    base = resident("RssAnon")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # VmHWM begins anew (proc(5))
    model = build(shape, seed=1, activation_checkpointing=config.activation_checkpointing)
    chosen = updater.choose(config.zero_stage, config.optimizer, config.offload, parallel.data_size())
    engine = open_engine(model, config, chosen, parallel.data_size(), load_template(template_path(config)))
    del model
    generator = torch.Generator().manual_seed(parallel.data_rank())
    for _ in range(STEPS):
        for index in range(config.global_batch_size // config.micro_batch // parallel.data_size()):
            if index:
                engine.finish_micro_batch()
            batch = random_batch(config, generator)
            engine.accumulate(batch, float(batch[1].numel()))
        engine.update(1e-3)
    # Pages of the libraries' code come in as they are first used; none of them goes again.
    return resident("VmHWM") - resident("RssFile") - resident("RssShmem") - base


def random_batch(config: PretrainConfig, generator: torch.Generator) -> list[torch.Tensor]:
    """The model's arguments for a micro batch, as `blank_arguments` has them."""
    read, labels = (
        torch.randint(4, VOCABULARY, (config.micro_batch, length), generator=generator)
        for length in (config.lengths.input, config.lengths.target)
    )
    further = [labels] if config.traits.is_encoder_decoder else []
    if config.intra_document_masking:
        further.append((read < 50).cumsum(1))
    return [read, labels, torch.ones(labels.shape), *further]


def fork(config: PretrainConfig, rank: int, processes: int, told: dict[str, str], write_to: int) -> int:
    child = os.fork()
    if child:
        return child
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes}
    os.environ.update({key: str(value) for key, value in place.items()}, DS_ACCELERATOR="cpu", **told)
    try:
        peak = train(config)
        if rank == 0:
            os.write(write_to, str(peak).encode())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def measure(config_path: str, processes: int, settings: dict[str, Any]) -> int:
    config = load(PretrainConfig, config_path, [f"{key}={value}" for key, value in settings.items()])
    read_from, write_to = os.pipe()
    with meeting.place() as told:
        children = [fork(config, rank, processes, told, write_to) for rank in range(processes)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    os.close(write_to)
    with os.fdopen(read_from, "rb") as answer:
        said = answer.read()
    assert not any(codes), f"{settings} ended with {codes}"
    return int(said)


if __name__ == "__main__":
    work = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps([measure(work["config"], job.pop("processes"), job) for job in work["jobs"]]))
