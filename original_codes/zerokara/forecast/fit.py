"""A scaling law from small runs: the bits per byte of a model, from its parameters and the tokens it was trained on.

    L(N, D) = E + (A·N^(-α/γ) + B·D^(-β/γ))^γ          (Busbridge et al., 2025, arXiv 2502.08606)

In: minutes to spend. Out: the law, which predicts other sizes and lengths with an interval, and a plot.

*Runs.* Three neighbouring sizes on three lengths, the next twice as long: nine runs of step 3, several at a time, each
to the end of its learning rate. More minutes first make them longer, then larger: runs closer to the target
extrapolate better. A finished run is not trained again, an interrupted one goes on.
*Form.* With γ = 1 it is the sum of Hoffmann et al. (2022, arXiv 2203.15556); the smaller γ, the more the worse of the
two terms decides, as in Kaplan et al. (2020, arXiv 2001.08361, equation 1.5), and as small runs have it.
*Fit.* With E, α, β and γ fixed, (L - E)^(1/γ) is linear in A and B, which least squares of the relative error find
exactly at each point of a grid of the four. Nine runs tell slopes and little more, so weak priors hold the rest: α and
β near what large models have (Besiroglu et al., 2024, arXiv 2404.10102, found 0.35 and 0.37), and E near a third of
what the best run reached; else most of the loss of a small model would be taken for irreducible.
*Interval.* Points of the grid are drawn as often as runs and priors make them likely; BEND widens it with distance.

Shape suffixes: P runs, G points of the grid, R draws.
"""

import hashlib
import heapq
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from zerokara.base.durable import atomic_file, make_folders, read_back, write_json
from zerokara.base.errors import Fault, RunError, UserError
from zerokara.base.progress import Progress, count_text
from zerokara.base.resources import available_cores, available_memory, end_with_parent
from zerokara.config.engine import MonitoringSettings
from zerokara.config.writing import overrides
from zerokara.forecast.sizes import (
    LEFT_TO_RECIPE,
    VALIDATION_COST,
    Planner,
    Prediction,
    Speed,
    effective_parameters,
    size_settings,
)
from zerokara.model.shapes import ModelShape
from zerokara.training.monitoring import step_metrics
from zerokara.training.planning import recipe
from zerokara.training.planning.earlier_run import PLACES
from zerokara.training.planning.processors import VARIABLE, named_gpus
from zerokara.training.resume_proof import QUIET

Numbers = NDArray[np.float64]

PRIOR_EXPONENT, EXPONENT_WIDTH = 0.3, 0.15  # mean and standard deviation of α and β before any run
PRIOR_FLOOR, FLOOR_WIDTH = 0.35, 0.15
"""The same for E, as a share of the fewest bits per byte of any run: 0.6 of 1.7 for English in Hoffmann et al."""
SEED_NOISE = 0.003  # standard deviation of the relative error of a run, from its seed alone
BEND = 0.02
"""Standard deviation of the relative error of a law for one doubling of size or length beyond the small runs; it grows
as the square root of the doublings. From the few runs that it was checked on (docs/recipe.md)."""
NUM_DRAWS = 1000
_EXPONENTS = np.arange(0.05, 0.9001, 0.025)
_FLOORS = np.arange(0.02, 0.9001, 0.04)  # E as a share of the fewest bits per byte
_GAMMAS = np.array([1, 0.7, 0.5, 0.35, 0.25, 0.2, 0.15])
_UNIT_N, _UNIT_D = 1e6, 1e7  # N and D inside the fit, for numbers near 1

START_SECONDS = 8.0  # of a run before its first step and after its last
MAX_EVAL_TOKENS = 200_000
"""Maximum tokens of a validation; fewer than step 3's are another part of the text, with other bits per byte."""
LENGTHS, NUM_SIZES = (1, 2, 4), 3
NUM_RUNS = NUM_SIZES * len(LENGTHS)
MIN_TOKENS_PER_PARAMETER = 5  # of the largest size in its longest run, before larger sizes are taken
MIN_STEPS = 400  # in fewer a model hardly gets beyond the frequencies of words, and no law holds
MIN_BATCH = 4  # sequences
SLOT_BYTES = 1.5e9  # main memory for a small run: twice what one of a million parameters holds
SHAPES: tuple[dict[str, Any], ...] = tuple(
    {**size_settings(""), "num_layers": layers, "hidden_size": width, "num_attn_heads": width // 32}
    for layers, width in ((2, 64), (3, 96), (4, 128), (4, 192), (4, 256), (6, 320), (6, 448))
)
"""Settings of the sizes, from the smallest to the largest."""
_SIZE_AND_LENGTH = {*size_settings(""), "train_tokens", "epochs"}
_KEPT = {"keep_best": False, "keep_every": 0, "keep_last": 1}
_QUIET = {**QUIET, **_KEPT, "max_steps": "auto", "stages": (), "init_from": ""}


@dataclass(frozen=True)
class MeasuredRun:
    """A run that was trained to its end: N (`effective_parameters`), D, and its bits per byte."""

    parameters: float
    tokens: float
    bits_per_byte: float


@dataclass(frozen=True)
class ScalingLaw:
    drawn: Numbers
    """E, A, B, α, β and γ of each draw, for N in millions and D in tens of millions: [6, R]."""
    noise: float
    """Standard deviation of the relative error of a single run."""
    largest: tuple[float, float]
    """N and D, each of the run that has most of it."""

    def predict(self, parameters: float, tokens: float) -> Prediction:
        """Predict the bits per byte of a run: the median of the draws."""
        values_R = _evaluate(self.drawn, parameters, tokens)
        beyond = max(parameters / self.largest[0], tokens / self.largest[1], 1.0)
        spread = math.hypot(self.noise, BEND * math.sqrt(math.log2(beyond)))
        chance_R = np.random.default_rng(0).normal(1, spread, NUM_DRAWS)
        value = float(np.median(values_R))
        low, high = np.quantile(values_R * chance_R, [0.025, 0.975])
        return Prediction(value, min(value, float(low)), max(value, float(high)))


def fit(runs: Sequence[MeasuredRun], seed: int = 0) -> ScalingLaw:
    """Fit the law to three runs or more, of different sizes and lengths."""
    assert len(runs) >= 3, f"{len(runs)} runs do not make a law"
    parameters_P, tokens_P, values_P = np.array([(run.parameters, run.tokens, run.bits_per_byte) for run in runs]).T
    every = np.meshgrid(_FLOORS, _EXPONENTS, _EXPONENTS, _GAMMAS, indexing="ij")
    share_G, alpha_G, beta_G, gamma_G = (axis.ravel() for axis in every)
    floor_G = share_G * values_P.min()
    rest_GP, gamma_G1 = values_P - floor_G[:, None], gamma_G[:, None]
    # (L - E)^(1/γ) = A·n + B·d. An error of the left side times this weight is a relative error of L.
    weight_GP = gamma_G1 * rest_GP ** (1 - 1 / gamma_G1) / values_P
    target_GP = gamma_G1 * rest_GP / values_P
    n_GP = (parameters_P / _UNIT_N) ** (-alpha_G[:, None] / gamma_G1) * weight_GP
    d_GP = (tokens_P / _UNIT_D) ** (-beta_G[:, None] / gamma_G1) * weight_GP
    nn, dd, nd = ((x * y).sum(axis=1) for x, y in ((n_GP, n_GP), (d_GP, d_GP), (n_GP, d_GP)))
    nt, dt = (n_GP * target_GP).sum(axis=1), (d_GP * target_GP).sum(axis=1)
    determinant = np.maximum(nn * dd - nd**2, 1e-12 * nn * dd)
    a_G, b_G = (dd * nt - nd * dt) / determinant, (nn * dt - nd * nt) / determinant
    # Where one is below 0, the best without it; targets are above 0, so then the other is.
    a_G, b_G = np.where(b_G < 0, nt / nn, np.maximum(a_G, 0)), np.where(a_G < 0, dt / dd, np.maximum(b_G, 0))
    laws_6G = np.stack([floor_G, a_G, b_G, alpha_G, beta_G, gamma_G])
    prior_G = ((share_G - PRIOR_FLOOR) / FLOOR_WIDTH) ** 2
    prior_G += ((alpha_G - PRIOR_EXPONENT) / EXPONENT_WIDTH) ** 2 + ((beta_G - PRIOR_EXPONENT) / EXPONENT_WIDTH) ** 2
    squares_G = ((_evaluate(laws_6G[..., None], parameters_P, tokens_P) / values_P - 1) ** 2).sum(axis=1)
    best = (squares_G / SEED_NOISE**2 + prior_G).argmin()
    # As many numbers as were fitted are no longer free to differ; the priors stand for three of the six.
    noise = max(SEED_NOISE, math.sqrt(squares_G[best] / max(1, len(runs) - 3)))
    cost_G = squares_G / noise**2 + prior_G
    chance_G = np.exp((cost_G.min() - cost_G) / 2)
    places_R = np.random.default_rng(seed).choice(len(cost_G), NUM_DRAWS, p=chance_G / chance_G.sum())
    return ScalingLaw(laws_6G[:, places_R], noise, (float(parameters_P.max()), float(tokens_P.max())))


def _evaluate(laws: Numbers, parameters: float | Numbers, tokens: float | Numbers) -> Numbers:
    """L(N, D) of laws [6, ...]."""
    e, a, b, alpha, beta, gamma = laws
    sizes, lengths = (parameters / _UNIT_N) ** (-alpha / gamma), (tokens / _UNIT_D) ** (-beta / gamma)
    return np.asarray(e + (a * sizes + b * lengths) ** gamma)


@dataclass(frozen=True)
class CalibrationRun:
    settings: dict[str, Any]
    """Settings of its size."""
    shape: ModelShape
    tokens: int
    eval_tokens: int

    @property
    def batch(self) -> int:
        """Sequences in a step: the recipe's before it is rounded to a power of two, which would put a kink into the law
        where it doubles between two runs."""
        return max(MIN_BATCH, round(recipe.batch_tokens(self.tokens) / self.shape.raw_len))

    def seconds(self, speed: Speed) -> float:
        return START_SECONDS + (self.tokens + VALIDATION_COST * self.eval_tokens) * speed.seconds_of_token(self.shape)


def plan_runs(
    shapes: Sequence[ModelShape], speed: Speed, minutes: float, num_slots: int, unique_tokens: int, eval_tokens: int
) -> list[CalibrationRun]:
    """Plan the runs that fit into the time, one in each slot at a time, the costliest first; no token is read twice.

    Raises:
        UserError: the time is too short for any, or the corpus, or nothing was held out.
    """
    least = MIN_STEPS * MIN_BATCH * shapes[0].raw_len * LENGTHS[-1]  # tokens of the longest, where all are short
    if unique_tokens < least:
        rule = f"needs a corpus of {least:,} training tokens, and there are {unique_tokens:,}"
        raise UserError(Fault("--fit", rule, remedy="plan without it"))
    if not eval_tokens:
        rule = "needs held-out documents, and step 2 left none"
        raise UserError(Fault("--fit", rule, remedy="plan without it, or do step 2 with valid_fraction above 0"))

    def runs_of(first: int, longest: int) -> list[CalibrationRun]:
        return [
            CalibrationRun(SHAPES[size], shapes[size], round(longest * length / LENGTHS[-1]), eval_tokens)
            for length in reversed(LENGTHS)
            for size in reversed(range(first, first + NUM_SIZES))
        ]

    def seconds_of(first: int, longest: int) -> float:
        ends = [0.0] * num_slots
        for seconds in sorted((run.seconds(speed) for run in runs_of(first, longest)), reverse=True):
            heapq.heapreplace(ends, ends[0] + seconds)  # a run begins as soon as a slot is free
        return max(ends)

    for first in reversed(range(len(shapes) - NUM_SIZES + 1)):
        longest = bisect_right(range(1, unique_tokens + 1), 60 * minutes, key=partial(seconds_of, first))
        is_long = longest >= MIN_TOKENS_PER_PARAMETER * shapes[first + NUM_SIZES - 1].num_parameters()
        if longest >= least and (is_long or not first):
            return runs_of(first, longest)
    needed = math.ceil(1.1 * seconds_of(0, least) / 60)
    rule = "minutes are too short for nine small runs on this machine"
    raise UserError(Fault("--fit", rule, value=f"{minutes:g}", remedy=f"give {needed}"))


class Slot(NamedTuple):
    """Cores, and a GPU where there is one, for one run: a tiny model keeps neither many cores nor a GPU busy."""

    cores: tuple[int, ...]
    gpu: str | None  # number or UUID, as CUDA_VISIBLE_DEVICES names it


def slots(most: int, num_gpus: int) -> list[Slot]:
    """Share out the GPUs, or the cores where there is none, among up to `most` slots."""
    cores = sorted(os.sched_getaffinity(0))[: available_cores()]
    gpus = named_gpus() or [str(number) for number in range(num_gpus)]
    number = max(1, min(most, len(cores), int(available_memory() // SLOT_BYTES), num_gpus or most))
    return [Slot(tuple(cores[slot::number]), gpus[slot] if num_gpus else None) for slot in range(number)]


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Restrict this thread, and the programs that it starts in the block, to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class SmallRuns:
    """The small runs of a configuration, each a run of step 3."""

    planner: Planner
    plan_folder: Path

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Settings of a small run, which is one process, and learns by the optimizer of the run that is planned."""
        alone = {"num_processes": 1, "nodes": 1, "min_nodes": "auto", "tensor_parallel_size": 1, "offload": "none"}
        optimizer = self.planner.local_plan(**LEFT_TO_RECIPE).resolved.optimizer
        return {**alone, **LEFT_TO_RECIPE, "optimizer": optimizer}

    @cached_property
    def folder(self) -> Path:
        """Folder of the runs that one law holds for: one kind of model, tokenizer, corpus and recipe."""
        plan, kind = self.planner.local_plan(), self.planner.config(**{**_QUIET, **self.settings})
        settings = kind.model_dump_json(exclude={*PLACES, *MonitoringSettings.model_fields, *_SIZE_AND_LENGTH})
        contents = plan.encoder.sha256, plan.data.sha256, plan.data.valid_sha256, str(recipe.VERSION)
        return self.plan_folder / hashlib.sha256(" ".join([settings, *contents]).encode()).hexdigest()[:12]

    @cached_property
    def shapes(self) -> list[ModelShape]:
        """The sizes in `SHAPES`. Raises UserError if a setting of the configuration does not go with one of them."""
        vocab_size = self.planner.local_plan().encoder.vocab_size
        return [ModelShape.from_config(self.planner.config(**settings), vocab_size) for settings in SHAPES]

    def results(self, eval_tokens: int) -> list[MeasuredRun]:
        """Read the results of all runs that were validated on so many tokens, those of earlier plans included."""
        paths = sorted(self.folder.glob(f"*_validation{eval_tokens}.json"))
        return [MeasuredRun(**read_back(path, "delete it; the run is then measured again")) for path in paths]

    def measure_speed(self, slot: Slot) -> Speed:
        """Measure the speed of a small run in a slot, a few steps of two sizes; once, or each start would plan other
        runs."""
        path = self.folder / f"speed_{len(slot.cores)}_cores{'_gpu' if slot.gpu else ''}.json"
        if path.exists():
            return Speed(**read_back(path, "delete it; the speed is then measured again"))
        settings = {**self.settings, "global_batch_size": 2 * MIN_BATCH}
        with pinned(slot.cores):
            speed = Speed.of(*(self.planner.measure({**settings, **SHAPES[size]}) for size in (0, 4)))
        write_json(path, speed)
        return speed

    def train(self, runs: Sequence[CalibrationRun], speed: Speed, free: list[Slot]) -> None:
        """Train the runs without a result, in each free slot one at a time.

        Raises:
            RunError: step 3 failed; names its log.
            KeyboardInterrupt: it was stopped; the same call goes on.
        """
        make_folders(self.folder)
        waiting = [run for run in runs if not self.result_path(run).exists()]
        running: list[tuple[subprocess.Popen[bytes], CalibrationRun, Slot]] = []
        total, left = (sum(run.seconds(speed) for run in some) for some in (runs, waiting))
        with Progress("training small models", total, unit="s", done=total - left) as progress:
            try:
                while waiting or running:
                    while waiting and free:
                        run, slot = waiting.pop(0), free.pop()
                        running.append((self._start(run, slot), run, slot))
                    time.sleep(0.1)
                    progress.advance(0)
                    for program, run, slot in [entry for entry in running if entry[0].poll() is not None]:
                        running.remove((program, run, slot))
                        free.append(slot)
                        self._finish(run, program.returncode)
                        progress.advance(run.seconds(speed))
            finally:
                for program, *_ in running:  # they save, and go on the next time
                    program.terminate()
                for program, *_ in running:
                    program.wait()

    def result_path(self, run: CalibrationRun) -> Path:
        """File of the result; beside it are the run's log, and its folder while it trains."""
        return self.folder / f"width{run.shape.hidden_size}_tokens{run.tokens}_validation{run.eval_tokens}.json"

    def _start(self, run: CalibrationRun, slot: Slot) -> subprocess.Popen[bytes]:
        path = self.result_path(run)
        self.planner.config()  # ends the plan if the file, which the run reads anew, was edited
        settings = {**_QUIET, **self.settings, **run.settings, "output_model_dir": str(path.with_suffix(""))}
        settings |= {"train_tokens": run.tokens, "eval_tokens": run.eval_tokens, "global_batch_size": run.batch}
        command = [sys.executable, "-P", "-m", "zerokara.steps", "train", "--config", str(self.planner.config_path)]
        for setting in (*self.planner.overrides, *overrides(settings)):
            command += ["--set", setting]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment |= {VARIABLE: slot.gpu} if slot.gpu else {}
        with pinned(slot.cores), open(path.with_suffix(".log"), "ab") as log:
            ending = partial(end_with_parent, os.getpid(), signal.SIGTERM)  # it saves, and goes on the next time
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, preexec_fn=ending
            )

    def _finish(self, run: CalibrationRun, code: int) -> None:
        path = self.result_path(run)
        lines = step_metrics.read(path.with_suffix(""))
        values = [line["valid_bits_per_byte"] for line in lines if "valid_bits_per_byte" in line]
        if code or not values:
            reason = f"ended with exit code {code}" if code else "was not validated"
            raise RunError(f"a small run {reason}; {path.with_suffix('.log')} says why")
        tokens = [line["tokens"] for line in lines if "tokens" in line][-1]
        write_json(path, asdict(MeasuredRun(effective_parameters(run.shape), tokens, values[-1])))
        shutil.rmtree(path.with_suffix(""))


def draw(path: Path, law: ScalingLaw, runs: Sequence[MeasuredRun]) -> None:
    """Draw into `path`, a PNG, how well the law fits the small runs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.8), layout="constrained")
    axes = figure.subplots()
    lengths = np.geomspace(min(run.tokens for run in runs), max(run.tokens for run in runs))
    for size in sorted({run.parameters for run in runs}):
        some = [run for run in runs if run.parameters == size]
        line = axes.plot(lengths, [law.predict(size, length).value for length in lengths], label=count_text(size))[0]
        axes.plot([run.tokens for run in some], [run.bits_per_byte for run in some], "o", color=line.get_color())
    axes.set(xscale="log", xlabel="tokens", ylabel="bits per byte", title="small runs (dots) and the law (lines)")
    axes.legend(title="parameters")
    axes.grid(alpha=0.3)
    with atomic_file(path) as file:
        figure.savefig(file, format="png", dpi=110)
