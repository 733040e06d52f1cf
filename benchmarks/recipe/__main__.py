"""Which recipe makes the best small model in ten minutes? Ours, nanochat's, litgpt's and Hugging Face's run_clm's.

    python -m benchmarks.recipe OUT --config english.yaml --config japanese.yaml --size 3M --peers /tmp/peers \\
        --nanochat nanochat --run-clm transformers/examples/pytorch/language-modeling/run_clm.py

The same corpus, vocabulary (a SentencePiece model), cores, threads, context length and wall-clock for all, and three
seeds. A configuration names raw text, tokenizer and token files, as steps 1 and 2 leave them; the documents
that step 2 holds out are what all are measured with, by `score.py`, which says precisely how. The systems:

SYSTEMS
--size is the one that `plan.py` recommends for the minutes, or config.yaml's.

The wall-clock is that of training steps, without the first two, in which compilers work: start, preparation,
compilation and saving count for nobody. The speed of each system is measured first, in a short run, once for all seeds
(OUT/speeds.jsonl), in fp32 and, where ours takes it, in bf16, of which each other system gets its faster one. The speed
gives the number of steps, so that a learning-rate schedule ends with the minutes. How long they really took is in the
table, with (!) where a run was off by more than 5 %: the machine had other work.

OUT/results.jsonl has a line for each finished run. What stands there is not run again, so a call that was stopped goes
on, and more seeds only add; what failed is tried again. With --only, --seed and --cores the work is cut into parts; two
calls at once must not have a system and a corpus in common.
`python -m benchmarks.recipe.table OUT` prints the tables alone.

Install what the others need, without anything of one's own being replaced, and fetch nanochat and run_clm.py:

    pip install --no-deps --target /tmp/peers -r benchmarks/training/requirements.txt \\
        -r benchmarks/recipe/requirements.txt
    git clone https://github.com/karpathy/nanochat
    git clone --depth 1 --branch v4.57.3 https://github.com/huggingface/transformers
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.recipe.contender import Contender, Contest, Job, RunFailed, Trained, python, run
from benchmarks.recipe.corpus import prepare
from benchmarks.recipe.litgpt import LITGPT
from benchmarks.recipe.nanochat import NANOCHAT
from benchmarks.recipe.ours import Ours, plan_of, recipe_hash, shape_of, shipped_size
from benchmarks.recipe.run_clm import RUN_CLM
from benchmarks.recipe.table import RESULTS, lines_of, results, tables
from zerokara.base.errors import UserError

CONTENDERS: tuple[Contender, ...] = (Ours(), *NANOCHAT, *LITGPT, *RUN_CLM)
FAILURES = (RunFailed, UserError, OSError, ValueError, LookupError)
"""Of one run, which do not stop the others: its command, its settings, or what it wrote."""
SPEEDS = "speeds.jsonl"
FIRST_GUESS = 5000
"""Tokens a second, before anything is measured; only the batch of ours depends on it."""


def main() -> None:
    """Command line."""
    options = _options()
    os.sched_setaffinity(0, options.cores)
    options.out.mkdir(parents=True, exist_ok=True)
    for config in options.config:
        contest = _contest(options, config)
        chosen = [each for each in CONTENDERS if not options.only or each.name in options.only]
        for seed, contender in itertools.product(options.seed, chosen):
            place = Place(options.out.resolve(), options.minutes, options.trial_tokens, options.precision)
            _one(place, contest, contender, seed)
    for line in tables(results(options.out)):
        print(line)


def _options() -> argparse.Namespace:
    systems = "".join(f"  {each.name:<16} {each.explanation}\n" for each in CONTENDERS)
    description = (__doc__ or "").replace("SYSTEMS\n", systems + "\n")
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, action="append", default=[], help="a corpus; several times")
    parser.add_argument("--size", default=shipped_size(), help="model_size of ours and so of all (as shipped)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of training steps, for each run (10)")
    parser.add_argument("--seed", type=int, action="append", default=[], help="several times (1, 2, 3)")
    parser.add_argument("--only", action="append", choices=[each.name for each in CONTENDERS], help="several times")
    parser.add_argument("--cores", type=_cores, default=os.sched_getaffinity(0), help="e.g. 0,1 (all)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="of the others (the faster one for each)")
    parser.add_argument("--trial-tokens", type=int, default=200_000, help="to measure a speed with (200000)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="ours not as shipped")
    parser.add_argument("--peers", type=Path, help="folder of pip install --target")
    parser.add_argument("--nanochat", type=Path, help="its checkout")
    parser.add_argument("--run-clm", type=Path, help="the script")
    options = parser.parse_args()
    options.seed = options.seed or [1, 2, 3]
    return options


def _cores(text: str) -> set[int]:
    return {int(each) for each in text.split(",")}


def _contest(options: argparse.Namespace, config: Path) -> Contest:
    """What is equal for all with this corpus; the size and the precision are those of ours."""
    settings = tuple(options.set)
    corpus_folder = options.out / "corpora" / config.stem
    found = plan_of(config, options.size, round(FIRST_GUESS * 60 * options.minutes), settings)
    shape = shape_of(found)
    return Contest(
        corpus=prepare(config, corpus_folder, shape.seq_len),
        size=options.size,
        shape=shape,
        precision=options.precision or found.resolved.precision,
        threads=len(options.cores),
        peers=options.peers and options.peers.resolve(),
        nanochat=options.nanochat,
        run_clm=options.run_clm,
        settings=settings,
    )


@dataclass(frozen=True)
class Place:
    """Where results go, and how long a run is."""

    out: Path
    minutes: float
    trial_tokens: int
    precision: str | None
    """Of the others; None for the faster one."""


def _one(place: Place, contest: Contest, contender: Contender, seed: int) -> None:
    """Train and score one run, unless its result is there; a failure is a result that is tried again."""
    key = _key(contest, contender, seed=seed, minutes=place.minutes)
    if any(found["key"] == key and "error" not in found for found in lines_of(place.out / RESULTS)):
        return
    what = {"key": key, "corpus": contest.corpus.name, "system": contender.name, "seed": seed, "size": contest.size,
            "minutes": place.minutes, "seq_len": contest.shape.seq_len, "threads": contest.threads,
            "settings": list(contest.settings)}  # fmt: skip
    folder = place.out / key
    started = time.monotonic()
    try:
        contest = _with_precision(place, contest, contender)
        tokens = _tokens_for(place, contest, contender)
        job = Job(tokens, seed, folder)
        shutil.rmtree(folder, ignore_errors=True)
        trained = contender.train(contest, job)
        found = {"bits_per_byte": _score(contest, job, trained), "tokens": trained.tokens, "steps": trained.steps,
                 "seconds": trained.seconds, "seconds_in_all": time.monotonic() - started,
                 "precision": trained.facts.get("precision", contest.precision), "facts": trained.facts}  # fmt: skip
        shutil.copy(job.log, place.out / f"{contest.corpus.name}-{contender.name}-{seed}.log")
        shutil.rmtree(folder)
    except FAILURES as failure:
        found = {"error": " ".join(f"{type(failure).__name__}: {failure}".split())}
    _append(place.out / RESULTS, {**what, **found})
    shown = found.get("error") or {name: found[name] for name in ("bits_per_byte", "tokens", "seconds")}
    print(f"{contest.corpus.name}, {contender.name}, seed {seed}: {shown}", flush=True)


def _with_precision(place: Place, contest: Contest, contender: Contender) -> Contest:
    """The other systems' faster one; bf16 is tried where ours takes it, which it does where the processor has it."""
    if isinstance(contender, Ours) or place.precision or contest.precision == "fp32":
        return contest
    return max((replace(contest, precision=each) for each in ("fp32", "bf16")),
               key=lambda each: _speed(place, each, contender, *_guess(place, each, contender)))  # fmt: skip


def _guess(place: Place, contest: Contest, contender: Contender) -> tuple[int, int]:
    """Tokens of a batch and of a run, before anything is measured."""
    tokens = round(FIRST_GUESS * 60 * place.minutes)
    return contender.batch_tokens(contest, tokens), tokens


def _tokens_for(place: Place, contest: Contest, contender: Contender) -> int:
    """Tokens that fit into the minutes, by the measured speed."""
    batch, tokens = _guess(place, contest, contender)
    for _ in range(3):  # the batch of ours goes by the tokens, and the speed a little by the batch
        speed = _speed(place, contest, contender, batch, tokens)
        tokens = max(1, round(speed * 60 * place.minutes / batch)) * batch
        if batch == (batch := contender.batch_tokens(contest, tokens)):
            break
    return tokens


def _speed(place: Place, contest: Contest, contender: Contender, batch: int, tokens: int) -> float:
    """Tokens a second, measured once and for all seeds."""
    key = _key(contest, contender, batch=batch, precision=contest.precision)
    for line in lines_of(place.out / SPEEDS):
        if line["key"] == key:
            return float(line["tokens_per_second"])
    folder = place.out / f"{key}-trial"
    shutil.rmtree(folder, ignore_errors=True)
    job = Job(tokens, 0, folder, is_trial=True, trial_tokens=place.trial_tokens)
    speed = contender.train(contest, job).tokens_per_second
    _append(place.out / SPEEDS, {"key": key, "corpus": contest.corpus.name, "system": contender.name,
                                 "precision": contest.precision, "batch_tokens": batch,
                                 "tokens_per_second": speed})  # fmt: skip
    shutil.rmtree(folder)
    return speed


def _score(contest: Contest, job: Job, trained: Trained) -> dict[str, Any]:
    """What `score.py` prints."""
    kind, model = trained.scoring
    command = [*python("score"), kind, model, contest.corpus.heldout, "--begin", trained.begin_id,
               "--context", contest.shape.seq_len]  # fmt: skip
    base = {"NANOCHAT_BASE_DIR": str(job.folder / "base")} if kind == "nanochat" else {}
    run(contest, job, command, [contest.nanochat and contest.nanochat.resolve(), contest.peers], **base)
    return dict(json.loads(job.log.read_text(encoding="utf-8").splitlines()[-1]))


def _key(contest: Contest, contender: Contender, **more: Any) -> str:
    """A name for what is the same run, or the same speed."""
    ours = [recipe_hash(), *contest.settings] if isinstance(contender, Ours) else []
    made_of = [contest.corpus.sha256, contest.corpus.name, contest.size, str(contest.shape), contest.threads,
               contender.name, ours, more]  # fmt: skip
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]


def _append(path: Path, line: dict[str, Any]) -> None:
    """Add a line; two calls may run at once, on cores of their own."""
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
