"""Step 8 as a user starts it: two models of others, side by side; done already; refused."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import evaluated_models
import pytest
import warm
from configs import typed
from corpus_files import write_texts
from foreign_models import documents
from huggingface_hub import ModelCard

from zerokara.base import file_lock

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    evaluated_models.save(folder / "bytes", evaluated_models.byte_level(), "gpt2")
    evaluated_models.save(folder / "prefix", evaluated_models.dummy_prefix(), "llama")
    write_texts(folder / "held_out.jsonl", documents(40, seed=9))
    config = "models: [bytes, prefix]\ntexts: [held_out.jsonl]\noutput_dir: out\nadd_to_card: [prefix]\ndevice: cpu\n"
    (folder / "evaluate_config.yaml").write_text(config, encoding="utf-8")
    return folder


def step(root: Path, place: Path, *arguments: str) -> Any:
    command = [warm.python(), str(root / "8_evaluate.py"), *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=300)


def test_two_models_side_by_side(root: Path, place: Path) -> None:
    dry = step(root, place, "--dry-run")
    assert dry.returncode == 0 and not (place / "out").exists(), dry.stderr
    made = step(root, place)
    assert made.returncode == 0, made.stdout + made.stderr
    (section,) = json.loads((place / "out" / "results.json").read_text(encoding="utf-8"))["sections"]
    values = {row["model"]: row["value"] for row in section["rows"]}
    assert values.keys() == {"bytes", "prefix"} and all(3 < value < 30 for value in values.values())
    assert section["differences"][0]["difference"] == pytest.approx(values["bytes"] - values["prefix"])
    assert all(f"{value:.4f}" in made.stdout for value in values.values())
    assert f"{values['bytes']:.4f}" in (place / "out" / "report.html").read_text(encoding="utf-8")
    result, *_ = ModelCard((place / "prefix" / "README.md").read_text(encoding="utf-8")).data.eval_results
    assert result.metric_value == round(values["prefix"], 4) and not (place / "bytes" / "README.md").exists()
    with file_lock.held(place / "out" / "evaluate.lock"):
        other = step(root, place, "--redo")
    assert other.returncode == 2 and "is writing here" in other.stderr
    manifest = place / "out" / "manifest.json"
    finished = manifest.read_bytes()
    manifest.unlink()  # as a run leaves the folder that is killed before its end
    assert step(root, place).returncode == 0 and manifest.exists()
    manifest.write_bytes(finished)
    again = step(root, place)
    assert again.returncode == 0 and "done already" in again.stdout and f"{values['bytes']:.4f}" in again.stdout
    card = place / "prefix" / "README.md"
    whole = card.read_bytes()
    card.write_text("---\nlicense: mit\n---\n", encoding="utf-8")  # as step 4 writes it anew
    mended = step(root, place)
    assert mended.returncode == 0 and "done already" not in mended.stdout, mended.stderr
    assert b"license: mit" in card.read_bytes() and whole.split(b"model-index:")[1] in card.read_bytes()
    assert "done already" in step(root, place).stdout


def test_a_card_that_cannot_be_read_is_told_before_the_work(root: Path, place: Path) -> None:
    card = place / "bytes" / "README.md"
    card.write_text("---\nlicense: [mit\n---\n", encoding="utf-8")
    refused = step(root, place, *typed("add_to_card=[bytes]", "output_dir=other"))
    card.unlink()
    assert refused.returncode == 2 and str(card.relative_to(place)) in refused.stderr
    assert "Traceback" not in refused.stderr and not (place / "other").exists()


def test_the_same_files_are_done_wherever_they_lie_but_not_as_other_texts(root: Path, place: Path) -> None:
    for name in ("a", "b"):
        write_texts(place / "two" / f"{name}.jsonl", [f"Text {name}."])
    (place / "test.tsv").write_text("text\tlabel\na\t1\nb\t0\n", encoding="utf-8")
    (place / "bad.tsv").write_text("text\tlabel\nno label\n", encoding="utf-8")

    def run(test: str, texts: str, output: str = "small") -> Any:
        task = f"tasks=[{{name: t, test_data: {test}, max_new_tokens: 2}}]"
        settings = ("models=[bytes]", "add_to_card=[]", f"output_dir={output}", f"texts=[{texts}]", task)
        return step(root, place, *typed(*settings))

    first = run("test.tsv", "two/a.jsonl, two/b.jsonl")
    assert first.returncode == 0, first.stderr
    (place / "test.tsv").rename(place / "moved.tsv")
    moved = run("moved.tsv", "two/a.jsonl, two/b.jsonl")
    assert moved.returncode == 0 and "done already" in moved.stdout, moved.stderr
    one = run("moved.tsv", "two")
    assert one.returncode == 2 and "texts[1]" in one.stderr
    for told in ("evaluate: done\n", "done already"):
        inside = run("moved.tsv", "two", "two/results")
        assert inside.returncode == 0 and told in inside.stdout, inside.stdout + inside.stderr
    bad = run("bad.tsv", "two", "bad")
    assert bad.returncode == 2 and "bits per byte" not in bad.stdout and "bad.tsv" in bad.stderr
