"""What `new_embeddings` is worth: a model of one language learns another, for the same tokens, in each way.

    python -m benchmarks.recipe.new_language OUT --old pt.jsonl --new ro.jsonl --seeds 1,2,3
    python -m benchmarks.recipe.new_language OUT --old pt.jsonl --new ro.jsonl --seeds 1 \\
        --arms mean_of_pieces,rate_1,replay

Of both texts the last documents are held out. A model of the old language is trained once; then for each seed the new
language with the old tokenizer, with a new one and each of `new_embeddings`, and from scratch; or with `mean_of_pieces`
and a setting changed. Equal vocabularies make equal steps, so equal tokens take equal time. All is done by the numbered
steps, which skip what is done: a run that was stopped goes on, and arms may be added. The table has the bits per byte
of both held-out texts (step 8): the mean of the seeds, and the least and the most.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {
    "clean_corpus": "clean_config.yaml",
    "train_tokenizer": "sentence_piece_config.yaml",
    "convert_to_hf": "convert_config.yaml",
    "evaluate": "evaluate_config.yaml",
}
HALF = {"lr_share": 0.5}
PIECES = {**HALF, "new_embeddings": "mean_of_pieces"}
ARMS: dict[str, dict[str, Any]] = {
    "old_tokenizer": HALF,
    "mean_of_pieces": PIECES,
    "scratch": {},
    **{f"rate_{share}": {**PIECES, "lr_share": share} for share in (0.125, 0.25, 1)},
    "weight_decay_0.1": {**PIECES, "weight_decay": 0.1},
    "replay": {**PIECES, "source_weights": "replay"},
    "replay_0.05": {**PIECES, "source_weights": "[19, 1]"},
}
"""Settings of each way; `lr_share` is of a new model's rate."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--old", type=Path, required=True, help=".jsonl or .jsonl.gz with text")
    parser.add_argument("--new", type=Path, required=True)
    parser.add_argument("--size", default="5M")
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--old-tokens", type=int, default=3_000_000)
    parser.add_argument("--new-tokens", type=int, default=500_000)
    parser.add_argument("--held-out", type=int, default=100, help="documents")
    parser.add_argument("--arms", default=",".join(list(ARMS)[:3]), help=", ".join(ARMS))
    parser.add_argument("--seeds", default="1,2,3")
    given = parser.parse_args()
    out = given.out.resolve()
    for name, path in (("old", given.old), ("new", given.new)):
        _split(path, out, name, given.held_out)
        if not (out / f"{name}_tokenizer").exists():
            sizes = {"input": f"[{out}/{name}.jsonl]", "vocab_size": given.vocab_size}
            step("train_tokenizer", output_dir=out / f"{name}_tokenizer", **sizes)
    base = _model(given, out, "base", ["old"], "old", given.old_tokens)
    rate = json.loads((out / "base" / "plan.json").read_text())["resolved"]["lr"]
    models = {"base": [base]}
    for seed in given.seeds.split(","):
        for arm in given.arms.split(","):
            settings = {**ARMS[arm], **({} if arm == "scratch" else {"init_from": base})}
            if share := settings.pop("lr_share", None):
                settings["lr"] = rate * share
            texts = ["new", "old"] if "source_weights" in settings else ["new"]
            tokenizer = "old" if arm == "old_tokenizer" else "new"
            model = _model(given, out, f"{arm}_{seed}", texts, tokenizer, given.new_tokens, seed=seed, **settings)
            models.setdefault(arm, []).append(model)
    folders = ", ".join(str(model) for each in models.values() for model in each)
    texts = f"[{out}/new_held_out.jsonl, {out}/old_held_out.jsonl]"
    step("evaluate", "--redo", models=f"[{folders}]", texts=texts, output_dir=out / "evaluation", tasks="[]")
    sections = json.loads((out / "evaluation" / "results.json").read_text())["sections"]
    print("| | " + " | ".join(section["name"] for section in sections) + " |")
    for arm, folders_of_arm in models.items():
        cells = []
        for section in sections:
            values = [row["value"] for row in section["rows"] if row["model"] in {each.name for each in folders_of_arm}]
            cells.append(f"{fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})")
        print(f"| {arm} | " + " | ".join(cells) + " |")


def _split(path: Path, out: Path, name: str, held_out: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    lines = (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8").readlines()
    for file, some in ((f"{name}.jsonl", lines[:-held_out]), (f"{name}_held_out.jsonl", lines[-held_out:])):
        if not (out / file).exists():
            (out / file).write_text("".join(some), encoding="utf-8")


def _model(
    given: argparse.Namespace, out: Path, name: str, texts: list[str], tokenizer: str, tokens: int, **more: object
) -> Path:
    """Tokenise, train and export; return the Hugging Face folder."""
    settings = {
        "input_jsonl": f"[{', '.join(f'{out}/{text}.jsonl' for text in texts)}]",
        "output_prefix": out / f"{'_'.join(texts)}_by_{tokenizer}",
        "input_tokenizer_file": out / f"{tokenizer}_tokenizer" / "tokenizer.model", "output_model_dir": out / name,
        "model_size": given.size, "num_layers": "auto", "hidden_size": "auto", "num_attn_heads": "auto",
        "train_tokens": tokens, "max_epochs_per_source": 16, "sample_prompts": "[]", "eval_interval": 100_000, **more,
    }  # fmt: skip
    if not (out / f"{name}_hf").exists():
        step("tokenize", **settings)
        step("train", **settings)
        exported = {"input_model_dir": out / name, "output_tokenizer_and_model_dir": out / f"{name}_hf"}
        step("convert_to_hf", **exported, language="[mul]")
    return out / f"{name}_hf"


def step(name: str, *flags: str, **settings: object) -> None:
    """Run a numbered step with its configuration as shipped, but for these settings."""
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    config = ROOT / CONFIGS.get(name, "config.yaml")
    command = [sys.executable, "-m", "zerokara.steps", name, "--config", str(config), *flags, *options]
    subprocess.run(command, check=True, cwd=ROOT / "original_codes")


if __name__ == "__main__":
    main()
