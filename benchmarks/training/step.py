"""How fast is a training step, beside what a user would pick instead, and does it learn the same?

    python -m benchmarks.training.step [--precision fp32|bf16] [--rounds 6] [--peers DIR] [--only NAME …] \\
        [--set key=value …]

The same model (about 40M parameters unless --set says otherwise), the same initial weights, the same batches in the
same order, fused AdamW of torch with the same settings, constant learning rate. Every contender runs in a process of
its own, and they take one step each in turn, so that the machine's mood hits all alike:

* ``ours``: the training loop of step 3 around DeepSpeed's ZeRO, as `config.yaml` sets it; ``ours, compiled``: the same
  with ``compile: on``.
* ``hugging face``: `LlamaForCausalLM` under `transformers.Trainer`; ``hugging face, compiled``: with `torch_compile`.
* ``litgpt``: its GPT, Fabric and chunked cross-entropy as in its `pretrain.py`, without the `torch.compile` that it
  always uses; ``litgpt, compiled``: with it.

A contender that is not installed is left out with a word. What they need besides this project's packages:

    pip install --no-deps --target /tmp/peers -r benchmarks/training/requirements.txt     and     --peers /tmp/peers

Prints for each: tokens a second (median), its share of the matrix product's peak that was measured before each round,
the ratio to ours taken within each round (median), peak memory, seconds from the start of Python to the end of the
first step (compiling included; with --warm from a folder of what was compiled before), and the loss on tokens that were
not trained on, after the same steps. What ours spends outside of the model and its update: `loop.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from zerokara.base.progress import bytes_text, count_text
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.huggingface import families, weight_rules
from zerokara.model.shapes import ModelShape
from zerokara.training.planning import processors
from zerokara.training.processes import joining

SHAPE = [
    "num_layers=8", "hidden_size=512", "num_attn_heads=8", "num_kv_heads=4", "ffn_hidden_size=1408", "seq_len=512",
    "micro_batch_size=4", "optimizer=adamw", "lr=0.001", "min_lr=0.001", "lr_schedule=constant", "warmup_fraction=0",
    "weight_decay=0.1", "muon_momentum=0.95", "tensorboard=false",
]  # fmt: skip
"""About 40 million parameters with a vocabulary of 32,000."""
VALIDATION_SEQUENCES = 8
WARM_UP_STEPS = 1
"""The first step makes what later ones find: it is the time to the first step, and counts in no median."""


@dataclass
class Task:
    """What every contender is given."""

    settings: PretrainConfig
    shape: ModelShape
    ids: np.ndarray
    """Training sequences in order, then those of the validation: [sequences, S + 1]."""
    weights: str
    """File of the initial weights by our names."""

    @property
    def device(self) -> torch.device:
        """Where all of them compute."""
        return joining.local_device()

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights in the matrix products."""
        return families.TORCH_DTYPES[self.settings.precision]

    def batch(self, step: int) -> Tensor:
        """The sequences of a step, counted from 0: [B, S + 1]."""
        size = self.settings.global_batch_size
        return torch.from_numpy(self.ids[step * size : (step + 1) * size])

    def validation(self) -> Iterator[Tensor]:
        """Sequences that no step trains on, in micro batches."""
        return iter(torch.from_numpy(self.ids[-VALIDATION_SEQUENCES:]).split(self.settings.micro_batch))

    def initial(self) -> dict[str, Tensor]:
        """The initial weights by Hugging Face's names."""
        ours = torch.load(self.weights)
        return dict(weight_rules.to_hf(families.rules_for(self.shape), ours, self.shape))


class Turns:
    """A contender's talk with the program that gives it its turns: one line for each step, one back."""

    def __init__(self) -> None:
        self._answers, sys.stdout = sys.stdout, sys.stderr  # whatever the libraries print is no answer
        self._started = 0.0

    def wait(self) -> bool:
        """Wait for the next turn; False when there is none."""
        going_on = sys.stdin.readline().strip() == "step"
        self._started = time.perf_counter()
        return going_on

    def done(self) -> None:
        """Say that the step of this turn is done, on the device too."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.answer(seconds=time.perf_counter() - self._started)

    def answer(self, **values: Any) -> None:
        """Send numbers."""
        print(json.dumps(values), file=self._answers, flush=True)


def ours(task: Task, turns: Turns, compiled: bool) -> Callable[[Tensor], Tensor]:
    """Our loop; gives the loss of a validation batch, like the others."""
    from zerokara.model import compilation, parallel
    from zerokara.model.builder import build
    from zerokara.samples.objective import Batch, Causal
    from zerokara.training.compute import engine_choice
    from zerokara.training.compute.engine import load_state
    from zerokara.training.guards import StepGuard
    from zerokara.training.loop import train_step
    from zerokara.training.planning.schedule import Schedule
    from zerokara.training.processes.joining import Processes, init_process_group
    from zerokara.training.run import load_batches, to_device

    settings = task.settings
    if task.device.type == "cpu":
        joining.keep_freed_memory(True)
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"})
    init_process_group(task.device)
    parallel.start(settings.seed)
    model = build(task.shape)
    engine = engine_choice.open_engine(model, settings, {}, task.device)
    load_state(engine, torch.load(task.weights).items())
    made = Causal(settings.lengths)

    class Batches:
        def at(self, consumed: int) -> Iterator[Batch]:
            whole = task.batch(consumed // settings.global_batch_size).numpy()
            parts = np.split(whole, len(whole) // settings.micro_batch)
            return (made(part, np.arange(len(part))) for part in parts)

    if compiled and not compilation.start(model, to_device(next(Batches().at(0)), task.device), log=print):
        raise RuntimeError("the layers could not be compiled")
    schedule = Schedule.from_config(settings, settings.lengths.raw, samples_per_epoch=len(task.ids))
    if turns.wait():
        steps = range(1, schedule.num_steps + 1)
        loader = load_batches(
            Batches(),  # type: ignore[arg-type]
            consumed_before=lambda step: (step - 1) * settings.global_batch_size,
            steps=steps,
            device=task.device,
        )
        with contextlib.closing(loader):
            host_group = torch.distributed.new_group(backend="gloo") if task.device.type == "cuda" else None
            processes = Processes(task.device, rank=0, host_group=host_group)
            guard = StepGuard(settings)
            for step in steps:
                train_step(engine, processes, loader, step, schedule.learning_rate(step), guard, stop=lambda: False)
                turns.done()
                if not turns.wait():
                    break
    engine.module.eval()
    return lambda ids: engine.module(ids[:, :-1], ids[:, 1:]) / ids[:, 1:].numel()


def hugging_face(task: Task, turns: Turns, compiled: bool) -> Callable[[Tensor], Tensor]:
    """`LlamaForCausalLM` under its Trainer."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    settings = task.settings
    model = AutoModelForCausalLM.from_config(
        families.hf_config(task.shape, families.SpecialIds(1, 2, 3), settings.precision)
    ).to(task.dtype)
    model.load_state_dict(task.initial(), strict=False)
    model.config.use_cache = False

    class Edges(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            turns.done()
            control.should_training_stop = not turns.wait()

    rows = [{"input_ids": row[:-1], "labels": row, "shift_labels": row[1:]} for row in torch.from_numpy(task.ids)]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.global_batch_size // settings.micro_batch,
        max_steps=(len(rows) - VALIDATION_SEQUENCES) // settings.global_batch_size,
        learning_rate=settings.lr, lr_scheduler_type="constant", weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1, adam_beta2=settings.adam_beta2, adam_epsilon=settings.adam_epsilon,
        max_grad_norm=settings.gradient_clipping, optim="adamw_torch_fused", torch_compile=compiled,
        use_cpu=task.device.type == "cpu", dataloader_pin_memory=task.device.type == "cuda",
        remove_unused_columns=False, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Edges()])
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)  # the others' order
    if turns.wait():
        trainer.train()
    model.eval()
    return lambda ids: model(input_ids=ids[:, :-1], labels=ids, shift_labels=ids[:, 1:].contiguous()).loss


def litgpt(task: Task, turns: Turns, compiled: bool) -> Callable[[Tensor], Tensor]:
    """litgpt's GPT, driven as its `pretrain.py` (0.5.12) does."""
    import lightning
    from litgpt.model import GPT, Config
    from litgpt.utils import chunked_cross_entropy

    settings, shape = task.settings, task.shape
    precision = "bf16-true" if settings.precision == "bf16" else "32-true"
    fabric = lightning.Fabric(accelerator=task.device.type, devices=1, precision=precision)
    size = {
        "block_size": shape.seq_len, "n_layer": shape.num_layers, "n_embd": shape.hidden_size,
        "vocab_size": shape.vocab_size, "padded_vocab_size": shape.vocab_size, "n_head": shape.num_attn_heads,
        "n_query_groups": shape.num_kv_heads, "intermediate_size": shape.ffn_hidden_size, "rotary_percentage": 1.0,
        "rope_base": int(shape.rope_theta), "norm_class_name": "RMSNorm", "norm_eps": shape.norm_epsilon,
        "bias": False, "mlp_class_name": "LLaMAMLP", "parallel_residual": False,
    }  # fmt: skip
    with fabric.init_module():
        model = GPT(Config(**size))
    model.transformer.wte.weight = model.lm_head.weight
    model.load_state_dict(litgpt_weights(task.initial(), shape), strict=True)
    model = fabric.setup(torch.compile(model) if compiled else model)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=settings.lr, betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_epsilon, fused=True,
    )  # fmt: skip
    optimizer = fabric.setup_optimizers(optimizer)
    step = 0
    while turns.wait():
        micro_batches = task.batch(step).split(settings.micro_batch)
        for index, ids in enumerate(micro_batches):
            ids = fabric.to_device(ids)
            with fabric.no_backward_sync(model, enabled=index + 1 < len(micro_batches)):
                loss = chunked_cross_entropy(model(ids[:, :-1].contiguous()), ids[:, 1:].contiguous())
                fabric.backward(loss / len(micro_batches))
        fabric.clip_gradients(model, optimizer, max_norm=settings.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # ours and the Trainer know the loss of each step too
        turns.done()
        step += 1
    model.eval()
    return lambda ids: chunked_cross_entropy(model(ids[:, :-1].contiguous()), ids[:, 1:].contiguous())


def litgpt_weights(hf: dict[str, Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """Hugging Face's names to litgpt's."""
    made = {
        "transformer.wte.weight": hf["model.embed_tokens.weight"],
        "lm_head.weight": hf["model.embed_tokens.weight"],
        "transformer.ln_f.weight": hf["model.norm.weight"],
    }
    for number in range(shape.num_layers):
        theirs, mine = f"model.layers.{number}.", f"transformer.h.{number}."
        qkv = [hf[f"{theirs}self_attn.{letter}_proj.weight"] for letter in "qkv"]
        made[mine + "attn.qkv.weight"] = torch.cat(qkv)
        made[mine + "attn.proj.weight"] = hf[theirs + "self_attn.o_proj.weight"]
        made[mine + "norm_1.weight"] = hf[theirs + "input_layernorm.weight"]
        made[mine + "norm_2.weight"] = hf[theirs + "post_attention_layernorm.weight"]
        for name, theirs_name in (("fc_1", "gate"), ("fc_2", "up"), ("proj", "down")):
            made[f"{mine}mlp.{name}.weight"] = hf[f"{theirs}mlp.{theirs_name}_proj.weight"]
    return made


CONTENDERS: dict[str, tuple[Callable[[Task, Turns, bool], Callable[[Tensor], Tensor]], bool, tuple[str, ...]]] = {
    "ours": (ours, False, ()),
    "ours, compiled": (ours, True, ()),
    "hugging face": (hugging_face, False, ("accelerate",)),
    "hugging face, compiled": (hugging_face, True, ("accelerate",)),
    "litgpt": (litgpt, False, ("lightning", "litgpt")),
    "litgpt, compiled": (litgpt, True, ("lightning", "litgpt")),
}
"""Function, whether it compiles, and what it needs."""


def contend(name: str, task_file: str) -> None:
    """The life of a contender's process."""
    turns = Turns()
    given = torch.load(task_file, weights_only=False)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    task = Task(**given)
    run, compiled, _ = CONTENDERS[name]
    loss = run(task, turns, compiled)
    with torch.no_grad():
        losses = [float(loss(ids.to(task.device))) for ids in task.validation()]
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"{name} did not learn: validation losses {losses}")
    turns.answer(validation=statistics.fmean(losses), memory=joining.peak_memory(task.device))


@dataclass
class Measured:
    """What was seen of one contender."""

    process: Any
    first_step: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def turn(self) -> dict[str, Any]:
        """Let it take a step."""
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Its next line.

        Raises:
            RuntimeError: it has ended.
        """
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the contender ended with {self.process.wait()}; its words stand above")
        return json.loads(line)


def start(name: str, task_file: Path, environment: dict[str, str]) -> Measured:
    """Start a contender and take its first step."""
    command = [sys.executable, "-m", "benchmarks.training.step", "--contender", name, "--task", str(task_file)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        stderr=None if os.environ.get("ZEROKARA_BENCHMARK_WORDS") else subprocess.DEVNULL,
    )  # fmt: skip
    measured = Measured(process)
    measured.turn()
    measured.first_step = time.time() - psutil.Process(process.pid).create_time()
    return measured


def matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large square matrix product, the best of several."""
    size = 8192 if device.type == "cuda" else 2048
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product, best = torch.empty_like(left), float("inf")
    for _ in range(6):
        started = time.perf_counter()
        torch.mm(left, right, out=product)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def token_ids(count: int, length: int, vocab_size: int) -> np.ndarray:
    """Sequences [count, length] in which each token is followed by one of two: something to learn, and always the same.

    Ids begin at 4: Hugging Face gives the padding id, 3, no gradient.
    """
    chance = np.random.default_rng(7)
    following = chance.integers(4, vocab_size, (vocab_size, 2))
    ids = np.empty((count, length), dtype=np.int64)
    ids[:, 0] = chance.integers(4, min(vocab_size, 500), count)
    for place in range(1, length):
        ids[:, place] = following[ids[:, place - 1] % 500, chance.integers(0, 2, count)]
    return ids


def make_task(given: argparse.Namespace, folder: Path) -> Task:
    """The model, its weights and the data, in files that the contenders read."""
    from zerokara.model import initial_weights, parallel

    settings = load(PretrainConfig, "/dev/null", [*SHAPE, f"precision={given.precision}", *given.set])
    batch = given.batch or settings.micro_batch
    steps = given.rounds + WARM_UP_STEPS
    settings = settings.model_copy(
        update={
            "global_batch_size": batch,
            "precision": processors.devices().precision(settings),
            "train_tokens": steps * batch * settings.seq_len,
        }
    )
    shape = ModelShape.from_config(settings, given.vocab_size)
    parallel.start_alone()
    weights = folder / "weights.pt"
    # Rounded as all compute with them, so that in bf16 too all begin alike.
    dtype = families.TORCH_DTYPES[settings.precision]
    drawn = initial_weights.drawn_by_all(shape, 1, torch.device("cpu"))
    torch.save({name: weight.to(dtype).float() for name, weight in drawn}, weights)
    ids = token_ids(steps * batch + VALIDATION_SEQUENCES, settings.seq_len + 1, shape.vocab_size)
    return Task(settings, shape, ids, str(weights))


def compete(task: Task, given: argparse.Namespace, folder: Path) -> tuple[dict[str, Measured], list[float]]:
    """Start all that are here, and let them take turns; gives what was seen, and the peaks."""
    task_file = folder / "task.pt"
    torch.save(vars(task), task_file)
    sys.path += [given.peers] if given.peers else []
    taking_part: dict[str, Measured] = {}
    for name, (_, _, needs) in CONTENDERS.items():
        missing = [need for need in needs if importlib.util.find_spec(need) is None]
        if given.only and name not in given.only:
            continue
        if missing:
            print(f"{name}: left out, {' and '.join(missing)} missing (see --help for how to install the peers)")
            continue
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), given.peers]))
        compiled_in = given.warm or str(
            folder / name.replace(", ", "-").replace(" ", "-")
        )  # no spaces: it goes to a C++ compiler
        environment = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": compiled_in}
        taking_part[name] = start(name, task_file, environment)
        print(f"{name}: first step after {taking_part[name].first_step:.1f} s", flush=True)
    peaks = []
    for _ in range(given.rounds):
        peaks.append(matrix_peak(task.device, task.dtype))
        for measured in taking_part.values():
            measured.seconds.append(measured.turn()["seconds"])
    return taking_part, peaks


def report(task: Task, taking_part: dict[str, Measured], peaks: list[float]) -> None:
    """The table, last."""
    settings, shape, peak = task.settings, task.shape, statistics.median(peaks)
    batch_tokens = settings.global_batch_size * settings.seq_len
    words = f"{settings.seq_len} tokens × {settings.global_batch_size} sequences a step, {settings.precision}"
    print(
        f"\n{count_text(shape.num_parameters())} parameters, vocabulary {shape.vocab_size:,}, {words}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, matrix product {peak / 1e9:,.0f} GFLOP/s"
    )
    print("| contender | tokens/s | of the peak | ours is | peak memory | first step | validation loss |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    mine = taking_part.get("ours")
    for name, measured in taking_part.items():
        measured.process.stdin.write("end\n")
        measured.process.stdin.flush()
        end = measured.answer()
        speed = batch_tokens / statistics.median(measured.seconds)
        ratio = "" if mine is None else f"{statistics.median(map(_ratio, measured.seconds, mine.seconds)):.2f} ×"
        print(
            f"| {name} | {speed:,.0f} | {speed * shape.flops_per_token() / peak:.0%} | {ratio} | "
            f"{bytes_text(end['memory'])} | {measured.first_step:.0f} s | {end['validation']:.4f} |"
        )


def _ratio(theirs: float, mine: float) -> float:
    return theirs / mine


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batch", type=int, help="sequences a step; the micro batch unless given")
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any key of config.yaml")
    parser.add_argument("--peers", help="folder that the peers were installed into")
    parser.add_argument("--only", action="append", choices=list(CONTENDERS), help="these contenders alone")
    parser.add_argument("--warm", metavar="DIR", help="keep what is compiled here, and use it the next time")
    parser.add_argument("--contender", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contender:
        contend(given.contender, given.task)
        return
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as name:
        task = make_task(given, Path(name))
        taking_part, peaks = compete(task, given, Path(name))
        report(task, taking_part, peaks)


if __name__ == "__main__":
    main()
