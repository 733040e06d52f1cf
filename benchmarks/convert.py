"""Step 4 beside ``zero_to_fp32`` and ``save_pretrained``: time and peak memory from the same weights, in turn.

``python -m benchmarks.convert [--size 1B] [--dtype bf16] [--rounds 1] [--folder PLACE]`` makes a Llama of random
weights, spread enough for a proof to mean something, twice: as a checkpoint of ours with AdamW's moments, and as
DeepSpeed saves it (ZeRO 1, bf16: a real engine trains and saves a thin model, and its files are filled with the large
one's tensors). Then it converts both in turn, each in a process of its own:

- ours: the whole of step 4, with both proofs, and how long each part took;
- theirs: ``get_fp32_state_dict_from_zero_checkpoint``, ``from_pretrained`` from it, ``save_pretrained``. That writes
  the weights once; the way over the script ``zero_to_fp32.py`` writes them twice.

*Private* is memory that belongs to the processes alone (RssAnon), *resident* also counts the pages of files that they
map (VmRSS); both are summed over the process tree, every 20 ms. What both will read is in the page cache before. The
weights that each wrote are compared at the end, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = {
    # layers, width, heads, kv heads, feed-forward, vocabulary
    "tiny": (4, 256, 8, 4, 704, 2000),
    "125M": (12, 768, 12, 4, 2048, 16000),
    "350M": (24, 1024, 16, 4, 2816, 16000),
    "1B": (22, 2048, 32, 4, 5632, 32000),
}
SEQ_LEN = 2048
SPREAD = 1.4
"""Standard deviation of the logits: after the last norm a row of width D gives that of the weights times √D."""
OURS, THEIRS = "ours", "deepspeed"
ROOT = Path(__file__).resolve().parents[1]
PROGRAM = [sys.executable, "-m", "benchmarks.convert"]


def main() -> int:
    """Make, measure, print, delete; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1B")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the checkpoints here for another call")
    parser.add_argument("--stage", choices=("make", "theirs", "template"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.stage == "make":
        make(given.folder, SIZES[given.size])
    elif given.stage == "template":
        save_deepspeed_template(given.folder)
    elif given.stage == "theirs":
        convert_theirs(given.folder, given.dtype)
    elif given.folder is not None:
        compare(given.folder, given.size, given.dtype, given.rounds)
    else:
        with tempfile.TemporaryDirectory() as folder:
            compare(Path(folder), given.size, given.dtype, given.rounds)
    return 0


def compare(folder: Path, size: str, dtype: str, rounds: int) -> None:
    """Measure both conversions in turn and print them side by side."""
    again = [*PROGRAM, "--size", size, "--dtype", dtype, "--folder", str(folder), "--stage"]
    if not (folder / "made").exists():
        subprocess.run([*again, "make"], check=True)
    print(f"{size} parameters, {dtype}, {len(os.sched_getaffinity(0))} cores", flush=True)
    commands = {
        "ours": [sys.executable, "-m", "zerokara.steps", "convert_to_hf", "--config", str(folder / "convert.yaml"),
                 "--set", f"dtype={dtype}", "--redo"],
        "theirs": [*again, "theirs"],
    }  # fmt: skip
    outputs = {"ours": folder / "ours_hf", "theirs": folder / "theirs_hf"}
    found: dict[str, list[Measured]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            shutil.rmtree(outputs[name], ignore_errors=True)
            warm(folder)
            found[name].append(measure(command))
    exported = sum(file.stat().st_size for file in outputs["ours"].glob("*.safetensors"))
    print(f"exported weights: {exported / 1e9:.2f} GB")
    print(f"{'':8} {'seconds':>8} {'and on disk':>12} {'private':>9} {'resident':>9}   copies of the exported weights")
    for name, runs in found.items():
        middle = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
        print(
            f"{name:8} {middle.seconds:8.1f} {middle.seconds_on_disk:12.1f} {middle.private / 1e9:6.2f} GB "
            f"{middle.resident / 1e9:6.2f} GB   {middle.private / exported:.2f} private, "
            f"{middle.resident / exported:.2f} resident"
        )
    facts = json.loads((outputs["ours"] / "manifest.json").read_text(encoding="utf-8"))["facts"]
    print("ours, by part:", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in facts["seconds"].items()))
    proofs = sum(seconds for name, seconds in facts["seconds"].items() if name.startswith("proof"))
    pairs = list(zip(found["ours"], found["theirs"], strict=True))
    ratio = statistics.median(ours.seconds_on_disk / theirs.seconds_on_disk for ours, theirs in pairs)
    last_ours, last_theirs = pairs[-1]
    bare = (last_ours.seconds_on_disk - proofs) / last_theirs.seconds_on_disk
    print(f"time until it is on the disk, ours / theirs: {ratio:.2f}; ours without the proofs: {bare:.2f}")
    same_weights(outputs["ours"], outputs["theirs"])


@dataclass(frozen=True)
class Measured:
    """One conversion; bytes of the whole process tree at their peak."""

    seconds: float
    seconds_on_disk: float
    """Until all that was written is on the disk; what the process itself has not synced, `sync` waits for."""
    private: int
    resident: int


def measure(command: list[str]) -> Measured:
    """Run a command and watch its processes."""
    os.sync()
    started = time.monotonic()
    paths = [str(ROOT / "original_codes"), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)},
    )  # fmt: skip
    peaks = {"RssAnon": 0, "VmRSS": 0}
    while process.poll() is None:
        for name, value in memory(process.pid).items():
            peaks[name] = max(peaks[name], value)
        time.sleep(0.02)
    seconds = time.monotonic() - started
    os.sync()
    on_disk = time.monotonic() - started
    assert process.stdout is not None
    said = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{said}")
    return Measured(seconds, on_disk, peaks["RssAnon"], peaks["VmRSS"])


def memory(pid: int) -> dict[str, int]:
    """Bytes of a process and all its descendants now."""
    total = {"RssAnon": 0, "VmRSS": 0}
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        try:
            status = Path(f"/proc/{one}/status").read_text(encoding="utf-8")
            for task in Path(f"/proc/{one}/task").iterdir():
                waiting += map(int, (task / "children").read_text(encoding="utf-8").split())
        except (FileNotFoundError, ProcessLookupError):
            continue
        for line in status.splitlines():
            name, _, value = line.partition(":")
            if name in total:
                total[name] += int(value.split()[0]) * 1024
    return total


def warm(folder: Path) -> None:
    """Read what both will read, so that neither finds it colder than the other."""
    for file in (*folder.glob("run/*/weights.safetensors"), *folder.glob("deepspeed/*/*.pt")):
        with open(file, "rb") as opened:
            while opened.read(1 << 24):
                pass


def convert_theirs(folder: Path, dtype: str) -> None:
    """What a user of DeepSpeed and transformers would write."""
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from transformers import LlamaConfig, LlamaForCausalLM

    weights = get_fp32_state_dict_from_zero_checkpoint(folder / THEIRS)
    model = LlamaForCausalLM.from_pretrained(
        None, config=LlamaConfig.from_pretrained(folder / "hf_config"), state_dict=weights,
        dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype],
    )  # fmt: skip
    del weights
    model.save_pretrained(folder / "theirs_hf")


def same_weights(ours: Path, theirs: Path) -> None:
    """Both must have made the same model: every tensor, bit by bit."""
    import torch
    from safetensors import safe_open

    def tensors(folder: Path) -> dict[str, Any]:
        opened = [safe_open(file, framework="pt") for file in sorted(folder.glob("*.safetensors"))]
        return {name: file.get_tensor(name) for file in opened for name in file.keys()}  # noqa: SIM118  # no mapping

    one, other = tensors(ours), tensors(theirs)
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    print(f"both made the same {len(one)} tensors, bit by bit")


def make(folder: Path, size: tuple[int, ...]) -> None:
    """Make both checkpoints of one model."""
    import torch

    from zerokara.config.pretrain_config import PretrainConfig
    from zerokara.config.writing import as_yaml
    from zerokara.huggingface import families, weight_rules
    from zerokara.model.shapes import ModelShape

    folder.mkdir(parents=True, exist_ok=True)
    corpus, tokenizer = make_text(folder, size[5])
    config = PretrainConfig(
        input_jsonl=(str(corpus),), output_prefix=str(folder / "tokens"), num_layers=size[0], hidden_size=size[1],
        num_attn_heads=size[2], num_kv_heads=size[3], ffn_hidden_size=size[4], seq_len=SEQ_LEN,
        tie_word_embeddings=False,
    )  # fmt: skip
    run = folder / "run"
    run.mkdir()
    shutil.copyfile(tokenizer, run / "tokenizer.model")
    (run / "config_resolved.yaml").write_text(as_yaml(config), encoding="utf-8")
    shape = ModelShape.from_config(config, size[5])
    hf_config = families.hf_config(shape, families.SpecialIds(1, 2, 3), "bf16")
    hf_config.save_pretrained(folder / "hf_config")
    ordered = weight_rules.check(families.rules_for(shape), shape.parameter_shapes(), shape)
    total = sum(torch.Size(size).numel() for size in ordered.values())
    generator = torch.Generator().manual_seed(1)
    flat = torch.empty(total + total % 2)  # DeepSpeed fills up to a multiple of twice the processes
    weights = dict(zip(ordered, split(flat, ordered), strict=True))
    for name, tensor in weights.items():
        tensor.normal_(0.0, SPREAD / size[1] ** 0.5, generator=generator)
        if name.endswith("norm.weight"):
            tensor += 1
    save_ours(run, shape, dict(weight_rules.from_hf(families.rules_for(shape), weights, shape)), tokenizer)
    save_theirs(folder, flat, ordered)
    (folder / "convert.yaml").write_text(
        f"input_model_dir: {run}\noutput_tokenizer_and_model_dir: {folder / 'ours_hf'}\n", encoding="utf-8"
    )
    (folder / "made").touch()


def split(flat: Any, shapes: dict[str, tuple[int, ...]]) -> list[Any]:
    """Views of a flat tensor, one after another."""
    found, start = [], 0
    for size in shapes.values():
        count = 1
        for side in size:
            count *= side
        found.append(flat[start : start + count].view(size))
        start += count
    return found


def make_text(folder: Path, vocab_size: int) -> tuple[Path, Path]:
    """A corpus of made-up words, and a tokenizer of it."""
    import sentencepiece

    chance = random.Random(1)
    syllables = [a + b for a in "bcdfghjklmnpqrstvwz" for b in "aeiouy"]
    words = ["".join(chance.choices(syllables, k=chance.randint(1, 5))) for _ in range(2 * vocab_size)]
    lines = [" ".join(chance.choices(words, k=20)) for _ in range(20_000)]
    corpus = folder / "corpus.jsonl"
    texts = ["\n".join(lines[start : start + 10]) for start in range(0, len(lines), 10)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "tokenizer"), vocab_size=vocab_size, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False,
        user_defined_symbols=["\n"], pad_id=3, minloglevel=2,
    )  # fmt: skip
    return corpus, folder / "tokenizer.model"


def save_ours(run: Path, shape: Any, weights: dict[str, Any], tokenizer: Path) -> None:
    """A checkpoint as step 3 leaves it; AdamW's moments, all zero, are a sparse file."""
    from dataclasses import asdict

    from safetensors.torch import save_file

    from zerokara import checkpoint
    from zerokara.base import manifest
    from zerokara.checkpoint import state as names
    from zerokara.checkpoint import tensor_file
    from zerokara.checkpoint.state import Share

    folder = run / "global_step1000"
    folder.mkdir()
    save_file(weights, folder / Share().file_name(names.WEIGHTS), metadata={"format": "pt"})
    moments = {
        f"{name}.{kind}": tuple(tensor.shape) for name, tensor in weights.items() for kind in ("exp_avg", "exp_avg_sq")
    }
    import torch

    header = tensor_file.header(moments, torch.float32)
    with open(folder / Share().file_name(names.OPTIMIZER), "wb") as file:
        file.write(header)
        file.truncate(len(header) + sum(4 * math.prod(each) for each in moments.values()))
    state = checkpoint.TrainingState(
        step=1000, samples=8000, tokens=8000 * SEQ_LEN, seconds=3600.0, shape=shape.as_json(),
        tokenizer_sha256=manifest.sha256_of(tokenizer), data_sha256="0" * 64, precision="bf16", facts={},
    )  # fmt: skip
    (folder / names.STATE_NAME).write_text(json.dumps(asdict(state)), encoding="utf-8")
    outputs = {path.stem: path for path in folder.iterdir()}
    manifest.write(folder / "manifest.json", manifest.StepSpec("checkpoint", {}), outputs, {}, 0.0)


def save_theirs(folder: Path, flat: Any, shapes: dict[str, tuple[int, ...]]) -> None:
    """The same model as a DeepSpeed engine saves it: its own files of a thin model, filled with these tensors."""
    import torch

    template = folder / "template"
    subprocess.run([*PROGRAM, "--stage", "template", "--folder", str(template)], check=True)
    (saved,) = template.glob("global_step*")
    (optimizer_file,), (model_file,) = saved.glob("*optim_states.pt"), saved.glob("*model_states.pt")
    target = folder / THEIRS / saved.name
    target.mkdir(parents=True)
    shutil.copyfile(template / "latest", folder / THEIRS / "latest")

    model = torch.load(model_file, weights_only=False)
    narrow = dict(zip(shapes, split(flat.to(torch.bfloat16), shapes), strict=True))
    assert {name for name in narrow if ".layers." not in name} < set(model["module"]), "the engine names them otherwise"
    model["module"].clear()
    model["module"].update(narrow)
    model["param_shapes"] = [type(model["param_shapes"][0])((name, torch.Size(size)) for name, size in shapes.items())]
    torch.save(model, target / model_file.name)
    del model, narrow

    optimizer = torch.load(optimizer_file, weights_only=False)
    inside = optimizer["optimizer_state_dict"]
    inside["single_partition_of_fp32_groups"] = [flat]
    inside["param_alignment_paddings"] = [[0] * len(shapes)]
    for name in ("exp_avg", "exp_avg_sq"):
        inside["base_optimizer_state"]["state"][0][name] = torch.zeros_like(flat)
    with open(target / optimizer_file.name, "wb") as file:
        torch.save(optimizer, Sparse(file))
        file.truncate()
    shutil.rmtree(template)


class Sparse:
    """A file in which zeros become holes: AdamW's moments need no place on the disk."""

    def __init__(self, file: Any):
        self._file = file

    def write(self, content: Any) -> int:
        """Write, or step over."""
        view = memoryview(content).cast("B")
        for start in range(0, len(view), 1 << 20):
            piece = view[start : start + (1 << 20)]
            if piece[:64] == bytes(64) and piece == bytes(len(piece)):
                self._file.seek(len(piece), os.SEEK_CUR)
            else:
                self._file.write(piece)
        return len(view)

    def flush(self) -> None:
        """As a file."""
        self._file.flush()


def save_deepspeed_template(folder: Path) -> None:
    """Train a thin model of one step under ZeRO 1 in bf16, and let the engine save it."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29713")
    import deepspeed
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    # On a CPU with a compiler it would build a C++ operator first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_batch_size": 1, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
        },
    )  # fmt: skip
    tokens = torch.arange(16)[None]
    engine.backward(engine(tokens, labels=tokens).loss)
    engine.step()
    engine.save_checkpoint(str(folder))


if __name__ == "__main__":
    sys.exit(main())
