"""What a step, a checkpoint and step 2 take on 1 to 64 machines of 8 GPUs, by arithmetic: the tables of docs/scale.md.

    .venv/bin/python -m benchmarks.training.scale

Nothing here was run on such machines. The program's own formulae give operations, memory, bytes of a checkpoint, and
what DeepSpeed sends at each stage (`Traffic`); link speeds, peaks and failures are published; speeds of the
host were measured (`Measured`). Failures are simulated.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.model.shapes import ModelShape
from zerokara.training.compute import optimizer_rules
from zerokara.training.compute.engine_choice import HIERARCHY_KEY, for_machines, hierarchy_of
from zerokara.training.planning import memory
from zerokara.training.planning.memory import MemoryForecast

ROOT = Path(__file__).resolve().parents[2]

GB = 1e9
NODES = (1, 2, 4, 8, 16, 32, 64)
SIZES = ("1.3B", "2.7B", "6.7B", "13B")
GPUS, SEQ_LEN, BATCH, VOCABULARY = 8, 4096, 512, 32_000
"""GPUs of a machine, and a run of 512 sequences of 4096 tokens a step: 2.1 million."""
PEAK, EFFICIENCY = 989e12, 0.4
"""Operations a second of an H100 (SXM, bf16, dense), and the share that matrix products and all between them reach
without communication: an assumption, since nothing of ours has been measured on a GPU."""
GPU_BYTES, FOR_STATE = 80 * GB, 0.75
"""Memory of a GPU, and the share of it that the state may take: activations need the rest."""
NVLINK = 450 * GB
"""Bytes a second of a GPU inside its machine, each way."""
NETWORKS = {"8 × 400 Gb/s InfiniBand": 8 * 50 * GB, "1 × 100 Gb/s Ethernet": 12.5 * GB}
"""Bytes a second of a machine, each way."""
DISKS = {"a file server of 2 GB/s": 2 * GB, "a parallel file system of 40 GB/s": 40 * GB}
PCIE = 50 * GB
NEARLY = 1.03
NODE_HOURS_A_FAILURE = 54 * 24 * 2048 / 419
"""Llama 3 (Meta, 2024): 419 unexpected interruptions in 54 days on 16,384 GPUs, 2,048 machines of eight."""


class Measured:
    """Of this project, on two cores of an AMD EPYC."""

    DETECTION_SECONDS = 12.0
    """From a lost machine to the end of the last process (tests/cluster)."""
    ENCODING = 15e6
    """Bytes of English text a second and core, unigram, from JSON lines to shards (`benchmarks/tokenizing.py`)."""
    UNPACKING = 250e6
    """Bytes of text a second out of a .gz, in one process."""
    MERGING = 1.0e9
    """Bytes of ids a second, read from shards and written to the token files."""
    HASHING = 0.55e9
    """Bytes a second and thread."""
    IDS = 0.47
    """Bytes of ids for a byte of English text, 16,000 pieces."""


START_SECONDS = 90.0
"""Of a restart: rendezvous, imports of torch from a shared disk, compiling from a warm cache. An assumption."""


@dataclass(frozen=True)
class Run:
    """A size on so many machines at a ZeRO stage."""

    shape: ModelShape
    layout: MemoryForecast
    nodes: int

    @property
    def compute_seconds(self) -> float:
        """Of a micro batch, without communication."""
        tokens = self.layout.config.micro_batch * SEQ_LEN
        return self.shape.flops_per_token() * tokens / (PEAK * EFFICIENCY)

    @property
    def micro_batches(self) -> int:
        """Of a step in each process."""
        return BATCH // (self.layout.config.micro_batch * self.layout.num_processes)

    @property
    def fits(self) -> bool:
        """Whether the state leaves room for activations."""
        state = sum(memory.state_bytes(self.layout).values())
        return state + memory.min_activation_bytes(self.layout) / 4 < FOR_STATE * GPU_BYTES


class Traffic:
    """Seconds of collectives, as NCCL does them: inside each machine by NVLink, then between by all its adapters."""

    def __init__(self, nodes: int, network: float):
        self._nodes, self._network = nodes, network

    def gather(self, num_bytes: float) -> float:
        """Every GPU gets all of it (all-gather), or sums its part of it (reduce-scatter)."""
        inside = num_bytes * (GPUS - 1) / GPUS / NVLINK
        return inside + num_bytes * (self._nodes - 1) / self._nodes / self._network

    def gather_inside(self, num_bytes: float) -> float:
        """The same within each machine alone."""
        return num_bytes * (GPUS - 1) / GPUS / NVLINK


def step_seconds(run: Run, network: float) -> float:
    """A step: what each stage sends, and what of it the forward and backward passes (a third, two thirds) hide.

    Gradients are scattered in fp32 beside the backward pass: at stage 1 in the last micro batch, at 2 and 3 in each.
    Weights are gathered after the update, beside nothing; at stage 3 beside both passes of each micro batch, or
    hierarchical, once a step between machines and then inside of them (DeepSpeed 0.19.8).
    """
    traffic, number = Traffic(run.nodes, network), run.micro_batches
    forward, backward = run.compute_seconds / 3, run.compute_seconds * 2 / 3
    parameters = run.shape.num_parameters()
    scattering, first = traffic.gather(4 * parameters), traffic.gather(2 * parameters)
    stage, later = run.layout.config.stage, 0.0
    if stage == 3:
        later = traffic.gather_inside(2 * parameters) if hierarchy_of(run.layout.template) > 1 else first
    scattered = 1 if stage == 1 else number
    return (
        (max(forward, first) if stage == 3 else first + forward)
        + (number - 1) * max(forward, later)
        + scattered * max(backward, later + scattering)
        + (number - scattered) * backward
    )


def runs(size: str, nodes: int) -> Iterator[Run]:
    """A size at each stage at which it fits, with the largest micro batch of 1, 2 and 4 that fits."""
    for stage in (1, 2, 3):
        for micro_batch in (4, 2, 1):
            processes = nodes * GPUS
            if BATCH % (processes * micro_batch):
                continue
            settings = [
                f"model_size={size}", f"seq_len={SEQ_LEN}", f"global_batch_size={BATCH}", "precision=bf16",
                f"micro_batch_size={micro_batch}", f"zero_stage={stage}", "optimizer=adamw",
                "activation_checkpointing=selective",
            ]  # fmt: skip
            config = load(PretrainConfig, ROOT / "config.yaml", settings)
            shape = ModelShape.from_config(config, VOCABULARY)
            template = for_machines({}, config, processes, nodes)
            layout = MemoryForecast(config, shape, processes, nodes, template, main_bytes=0, gpu_bytes=GPU_BYTES)
            run = Run(shape, layout, nodes)
            if run.fits:
                yield run
                break


def best(size: str, nodes: int, network: float) -> tuple[Run, float]:
    """The lowest stage that is nearly the fastest (it sends fewer messages), and its seconds a step."""
    found = [(run, step_seconds(run, network)) for run in runs(size, nodes)]
    fastest = min(seconds for _, seconds in found)
    return next((run, seconds) for run, seconds in found if seconds <= NEARLY * fastest)


def step_table(network: float) -> list[str]:
    """Seconds of a step at the fastest stage, with that stage, and the efficiency against one machine."""
    lines = [_row("machines", *NODES), _rule(len(NODES))]
    for size in SIZES:
        cells, alone = [], best(size, 1, network)[1]
        for nodes in NODES:
            run, seconds = best(size, nodes, network)
            cells.append(f"{_short(seconds)} ({run.layout.config.stage}; {alone / (nodes * seconds):.0%})")
        lines.append(_row(size, *cells))
    return lines


def stage_table(size: str, nodes: int) -> list[str]:
    """Every stage of one size, stage 3 with and without hierarchical partitioning."""
    lines = [_row(f"{size} on {nodes} machines", *NETWORKS), _rule(len(NETWORKS))]
    for run in runs(size, nodes):
        ways = {f"stage {run.layout.config.stage}": run}
        if hierarchy_of(run.layout.template) > 1:
            zero = {**run.layout.template["zero_optimization"], HIERARCHY_KEY: 1}
            flat = replace(run, layout=replace(run.layout, template={"zero_optimization": zero}))
            ways = {"stage 3, as without `zero_hpz_partition_size`": flat, "stage 3, hierarchical": run}
        for name, each in ways.items():
            lines.append(_row(name, *(_short(step_seconds(each, network)) for network in NETWORKS.values())))
    return lines


def checkpoint_table(nodes: int) -> list[str]:
    """What a save costs: of each size its bytes, how long training waits, and how long the writing takes."""
    names = [f"training waits, {name}" for name in NETWORKS] + [f"written to {name}" for name in DISKS]
    lines = [_row("size", "bytes", "of a process", *names), _rule(len(names) + 2)]
    for size in SIZES:
        run = next(runs(size, nodes))
        whole = optimizer_rules.checkpoint_bytes("adamw", run.shape)
        share = whole / run.layout.num_processes
        waits = [_short(waiting_seconds(run, network)) for network in NETWORKS.values()]
        written = [_short(max(whole / disk, share / Measured.HASHING)) for disk in DISKS.values()]
        lines.append(_row(size, f"{whole / GB:.0f} GB", f"{share / GB:.2g} GB", *waits, *written))
    return lines


def waiting_seconds(run: Run, network: float) -> float:
    """Every process sees every tensor whole, gathered from all, and keeps its rows."""
    whole = optimizer_rules.checkpoint_bytes("adamw", run.shape)
    return Traffic(run.nodes, network).gather(whole) + whole / run.layout.num_processes / PCIE


def tokenizing_table(text: float, cores: int) -> list[str]:
    """Step 2 on `text` bytes, in parts on machines of so many cores: each encodes, hashes and merges its share.

    The text is read twice, to encode and to hash it; ids are written as shards, read again and written once more.
    """
    ids = text * Measured.IDS
    encoding = [text / (nodes * cores) * (1 / Measured.ENCODING + 1 / Measured.HASHING) for nodes in NODES]
    merging = [ids / (nodes * Measured.MERGING) for nodes in NODES]
    lines = [_row("machines", *NODES), _rule(len(NODES))]
    lines.append(_row("encoding and hashing", *map(_short, encoding)))
    lines.append(_row("merging, on all of them", *map(_short, merging)))
    for name, speed in DISKS.items():
        parts = [max(seconds, (2 * text + ids) / speed) for seconds in encoding]
        merge = [max(seconds, 2 * ids / speed) for seconds in merging]
        lines.append(_row(f"**in all**, {name}", *map(_short, map(sum, zip(parts, merge, strict=True)))))
        single = [part + max(merging[0], 2 * ids / speed) for part in parts]
        lines.append(_row("the same, merged by one machine", *map(_short, single)))
    packed = [max(seconds, text / Measured.UNPACKING) for seconds in encoding]
    lines.append(_row("encoding a single .gz", *map(_short, packed)))
    return lines


def failure_table(size: str) -> list[str]:
    """The share of the time that is training, where machines fail and are replaced at once; simulated."""
    intervals = (10, 30, 120)
    lines = [_row("machines", "a failure every", *(f"saved every {each} min" for each in intervals)), _rule(4)]
    network, disk = NETWORKS["8 × 400 Gb/s InfiniBand"], DISKS["a file server of 2 GB/s"]
    for nodes in NODES:
        run, _ = best(size, nodes, network)
        whole = optimizer_rules.checkpoint_bytes("adamw", run.shape)
        restart = Measured.DETECTION_SECONDS + START_SECONDS + whole / disk
        shares = [useful_share(nodes, each * 60.0, waiting_seconds(run, network), restart) for each in intervals]
        lines.append(_row(nodes, _short(NODE_HOURS_A_FAILURE / nodes * 3600), *(f"{each:.2%}" for each in shares)))
    return lines


def useful_share(nodes: int, interval: float, waiting: float, restart: float, failures: int = 4000) -> float:
    """Simulate so many failures: what was trained since the last save is lost, and the restart costs time."""
    chance, useful, elapsed = random.Random(0), 0.0, 0.0
    for _ in range(failures):
        lasted = chance.expovariate(nodes / (NODE_HOURS_A_FAILURE * 3600))
        useful += lasted // (interval + waiting) * interval
        elapsed += lasted + restart
    return useful / elapsed


def tables() -> dict[str, list[str]]:
    """All of them, by name."""
    found = {f"step, {name}": step_table(network) for name, network in NETWORKS.items()}
    return {
        **found,
        "stages": stage_table("13B", 8),
        "checkpoint": checkpoint_table(8),
        "tokenizing": tokenizing_table(10e12, 64),
        "failures": failure_table("13B"),
    }


def filled(text: str) -> str:
    """A text with each table between its marks, ``<!-- table: NAME -->`` and ``<!-- end -->``, made anew."""
    for name, lines in tables().items():
        mark = f"<!-- table: {name} -->\n"
        before, found, after = text.partition(mark)
        assert found, f"docs/scale.md has no mark for {name}"
        text = before + mark + "\n".join(lines) + "\n<!-- end -->" + after.partition("<!-- end -->")[2]
    return text


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _rule(numbers: int) -> str:
    return "|---|" + "---:|" * numbers


def _short(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def main(argv: Sequence[str]) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/scale.md")
    if parser.parse_args(argv).write:
        page = ROOT / "docs" / "scale.md"
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for name, lines in tables().items():
        print(f"{name}\n")
        print("\n".join(lines), end="\n\n")


if __name__ == "__main__":
    main(sys.argv[1:])
