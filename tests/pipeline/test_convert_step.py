"""Step 4 on a run folder with a checkpoint: what it writes, proves, refuses and prints."""

import json
import resource
import shutil
import socket
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configs import config_of
from huggingface_hub import ModelCard
from made_checkpoints import flip_last_byte
from made_runs import make_run, make_tokenizer
from safetensors.torch import load_file
from wide_weights import spread_weights

from zerokara import checkpoint
from zerokara.base import file_lock
from zerokara.base.durable import write_file, write_json
from zerokara.checkpoint import store
from zerokara.config.convert_config import ConvertSettings
from zerokara.examples.chat_template import ChatTemplate, auto_source
from zerokara.examples.facts import FinetuneFacts, MetricResult
from zerokara.huggingface import proof, tokenizer_json, tokenizer_proof
from zerokara.model.shapes import ModelShape
from zerokara.publishing import card, checkpoint_source, export, exported_folder
from zerokara.steps import convert_to_hf
from zerokara.tokenizer.encoder import Encoder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def run_dir(tmp_path: Path, tokenizer: Path) -> Path:
    return make_run(tmp_path, tokenizer, "llama", num_kv_heads=2)


def convert(run_dir: Path, *arguments: str, source: Path | None = None) -> int:
    place = run_dir.parent
    config = place / "convert.yaml"
    config.write_text(
        f"input_model_dir: {source or run_dir}\noutput_tokenizer_and_model_dir: {place / 'hf'}\n"
        "test_prompt_text: ['the model', 'a ']\nlanguage: [en, 'no']\n",
        encoding="utf-8",
    )
    return convert_to_hf.main(["--config", str(config), *arguments])


def test_a_run_becomes_a_proved_folder(run_dir: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(run_dir) == 0
    folder = run_dir.parent / "hf"
    said = capsys.readouterr().out
    assert "prompt   the model" in said and "6_upload.py --dry-run" in said
    assert said.index("sampled  the model") < said.index("greedy   the model")
    made = exported_folder.proved(folder)
    assert exported_folder.checked_files(folder, made)
    assert made.facts["seconds"].keys() == {"writing", "proof of token ids", "proof of logits"}
    text = (folder / "manifest.json").read_text(encoding="utf-8")
    assert str(run_dir.parent) not in text and '"/' not in text, "it says nothing of this machine"
    own = (str(run_dir.parent.parent), str(tokenizer.parent), str(Path.home()), sys.prefix, socket.gethostname() + '"')
    for path in folder.iterdir():
        assert not [name for name in own if name.encode() in path.read_bytes()], path
    assert "examples" not in text, "lines of the corpus"
    assert '"source":"corpus.jsonl"' in (folder / "metrics.jsonl").read_text(encoding="utf-8")
    assert made.inputs["input_model_dir (its checkpoint)"][0].path == "global_step10/manifest.json"
    on_disk = {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert "tokenizer.model" in on_disk, "the tokenizer is BPE: llama.cpp gives the same ids"
    assert on_disk == {record.path for record in exported_folder.files(made)}
    logits, ids = made.facts["proof"]["logits"], made.facts["proof"]["token_ids"]
    assert logits["max_difference"] < 1e-4 and logits["logit_std"] > 0.5
    assert logits["greedy_tokens"] >= 20 and ids["equal"] == ids["lines"] > 100
    assert [line["step"] for line in map(json.loads, (folder / "metrics.jsonl").open(encoding="utf-8"))] == [1, 5, 10]
    generation = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (2, 3)
    card = ModelCard.load(folder / "README.md")
    assert card.data.language == ["en", "no"] and card.data.license is None
    assert "2.2500 (step 5)" in card.text and "6.0000 (step 1)" in card.text and "3.0000 (step 10)" in card.text

    # The checkpoint that the run folder means, named outright: the same work.
    assert convert(run_dir, source=run_dir / "global_step10") == 0
    assert "done already" in capsys.readouterr().out
    assert convert(run_dir, "--set", "dtype=fp32") == 2
    assert "dtype = fp32: was bf16" in capsys.readouterr().err
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    (folder / "README.md").write_text("my card", encoding="utf-8")
    assert convert(run_dir) == 0 and "done already" in capsys.readouterr().out
    assert convert(run_dir, "--set", "dtype=fp32", "--redo") == 0
    assert f"README.md, notes.txt; it is kept as {folder}.old-1" in capsys.readouterr().out
    assert (run_dir.parent / "hf.old-1" / "README.md").read_text(encoding="utf-8") == "my card"
    assert (run_dir.parent / "hf.old-1" / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert exported_folder.proved(folder).facts["model"]["dtype"] == "fp32"


def add_checkpoint(run_dir: Path, step: int, **facts: Any) -> Path:
    """Another checkpoint of the run, with random weights of its own."""
    state = checkpoint.read_state(run_dir / "global_step10")
    state = replace(state, step=step, facts={**state.facts, **facts})
    weights = spread_weights(ModelShape.from_json(state.shape), seed=step)
    return store.save(run_dir, state, weights, {"x": torch.zeros(1)})


def test_the_card_says_what_was_trained_and_tested(run_dir: Path, tokenizer: Path) -> None:
    """Not more: the test of one checkpoint is none of another, nor of a mean."""
    add_checkpoint(run_dir, 20, start_id=1)
    tested = MetricResult(1.0, None, None, 20, "global_step20")
    write_json(run_dir / "finetune.json", asdict(FinetuneFacts("text label", {}, "loss", "base", test=tested)))
    source = checkpoint_source.find(ConvertSettings(input_model_dir=str(run_dir / "global_step20")))
    assert source.encoder.start_id == 1
    facts = card.gather(source, source.encoder, "bf16", converses=False)
    assert facts["finetuning"]["test"] and facts["tokenizer"]["start_id"] == 1
    assert facts["training"]["tokens"] == source.state.tokens != source.state.samples
    for other in (replace(source, averaged=(10, 20)), replace(source, folder=run_dir / "global_step10")):
        assert card.gather(other, source.encoder, "bf16", converses=False)["finetuning"]["test"] is None
    assert "auto" not in facts["training"]["settings"].values()


def test_the_mean_of_the_last_checkpoints(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [run_dir / "global_step10", *(add_checkpoint(run_dir, step) for step in (20, 30, 40))]
    broken = add_checkpoint(run_dir, 25)
    flip_last_byte(broken / "weights.safetensors")
    options = ("--set", "average=3", "--set", "dtype=fp32", "--set", "check_lines=300")
    folder = run_dir.parent / "hf"
    found = []
    for redo in ((), ("--redo",)):
        assert convert(run_dir, *options, *redo, source=run_dir / "global_step30") == 0
        said = capsys.readouterr().out
        assert said.count("of 3 checkpoints, steps 10, 20, 30") == 2 and f"skipping {broken}" in said
        found.append(exported_folder.proved(folder))
    (first,), (again,) = (made.outputs["weights"] for made in found)
    assert first.sha256 == again.sha256
    assert found[0].facts["training"]["averaged"] == [10, 20, 30] and found[0].facts["training"]["step"] == 30
    records = found[0].inputs["input_model_dir (its averaged checkpoints)"]
    assert [record.path for record in records] == [f"global_step{step}/manifest.json" for step in (10, 20, 30)]
    assert "| the mean of those at steps 10, 20, 30;" in (folder / "README.md").read_text(encoding="utf-8")

    name = "embedding.word_embeddings.weight"
    members = torch.stack([checkpoint.read_weights(one)[name] for one in folders[:3]])
    exported = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(exported, ((members[0] + members[1] + members[2]) / 3)[: len(exported)])
    torch.testing.assert_close(exported.double(), members.double().mean(0)[: len(exported)], rtol=1e-6, atol=1e-7)

    assert convert(run_dir, *options, source=run_dir / "global_step40") == 2
    assert "its averaged checkpoints" in capsys.readouterr().err, "another mean is another export"


def test_a_mean_of_more_checkpoints_than_there_are_is_refused(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (20, 30):
        add_checkpoint(run_dir, step)
    assert convert(run_dir, "--set", "average=4") == 2
    said = capsys.readouterr().err
    for word in ("average = 4", "3 complete checkpoints", "global_step10", "keep_last: 4 (it was 2)"):
        assert word in said
    assert not (run_dir.parent / "hf").exists()


CHAT = [{"role": "user", "content": "the model\n</s>"}, {"role": "assistant", "content": "reads a corpus"}]


def make_chat(run_dir: Path, tokenizer: Path) -> None:
    """What step 7 leaves in the run folder of a model that converses."""
    encoder = Encoder(tokenizer)
    template = ChatTemplate(auto_source(encoder), "auto", tokenizer_proof.tokenizer_of_exports(encoder, False))
    prompt, answer = (segment.tolist() for segment in template.encode(CHAT))
    line = json.dumps({"messages": CHAT, "prompt_ids": prompt, "answer_ids": answer}) + "\n"
    (run_dir / "chat_template.jinja").write_text(template.source, encoding="utf-8")
    (run_dir / "conversations.jsonl").write_text(line, encoding="utf-8")


def test_a_chat_model_has_its_template(run_dir: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_chat(run_dir, tokenizer)
    assert convert(run_dir, "--set", "check_lines=300") == 0
    assert "chat template" in capsys.readouterr().out
    folder = run_dir.parent / "hf"
    chat = exported_folder.proved(folder).facts["proof"]["chat"]
    assert chat["holds"] and chat["compared"] == 1 and not chat["failures"]
    assert (folder / "sentencepiece.model").read_bytes() == tokenizer.read_bytes(), "to train on from"
    assert not (folder / "conversations.jsonl").exists(), "training data"
    # Another template is another export.
    with (run_dir / "chat_template.jinja").open("a", encoding="utf-8") as file:
        file.write(" ")
    assert convert(run_dir, "--set", "check_lines=300") == 2
    assert "its chat_template" in capsys.readouterr().err


def spelling_the_end(path: Path, content: bytes) -> None:
    """Write a template in which a message may spell the end token."""
    write_file(path, content.replace(b"< /s>", b"</s>") if path.suffix == ".jinja" else content)


CONTENT = tokenizer_json.content
BROKEN: dict[str, tuple[Any, str, Any]] = {
    "logits": (proof, "TOLERANCE", 0.0),
    "token_ids": (tokenizer_json, "content", lambda *given: CONTENT(*given) | {"normalizer": None}),
    "chat": (tokenizer_json, "write_file", spelling_the_end),
}


@pytest.mark.parametrize(
    ("failing", "words"), [("logits", "logit"), ("token_ids", "token ids:"), ("chat", "chat template: ")]
)
def test_a_failed_proof_ends_with_1_and_keeps_the_folder_aside(
    run_dir: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    failing: str, words: str,
) -> None:  # fmt: skip
    make_chat(run_dir, tokenizer)
    monkeypatch.setattr(*BROKEN[failing])
    assert convert(run_dir, "--set", "check_lines=300") == 1
    said = capsys.readouterr().err
    assert words in said and str(run_dir.parent / "hf.failed") in said and not (run_dir.parent / "hf").exists()
    found = json.loads((run_dir.parent / "hf.failed" / "proof.json").read_text(encoding="utf-8"))["proof"]
    assert found["holds"] is False and not found[failing]["holds"]
    assert all(found[other]["holds"] for other in ("logits", "token_ids") if other != failing)
    assert failing == "logits" or found[failing]["examples"]


@pytest.mark.parametrize(
    ("typed", "of_run", "architecture", "expected"),
    [
        (("a b",), ("c",), "llama", ("a b",)),
        ("auto", ("c",), "llama", ("c",)),
        ("auto", (), "llama", ("uno due", "cinque")),
        ("auto", (), "t5", ("uno due <extra_id_0>", "cinque <extra_id_0>")),
    ],
)
def test_prompts_of_auto(typed: Any, of_run: tuple[str, ...], architecture: str, expected: tuple[str, ...]) -> None:
    source: Any = SimpleNamespace(config=config_of(architecture=architecture, sample_prompts=of_run), run_dir=Path())
    settings = ConvertSettings(test_prompt_text=typed)
    assert tuple(export.prompts_for(settings, source, None, ["uno due\ntre", "cinque"])) == expected
    if architecture == "llama":  # the same inputs in a prompt template, between their answers
        tuned = FinetuneFacts("text label", {}, "loss", "base", prompt_template="Say: {input}\nAs:\n")
        asked = ["Say: uno due\nAs:\n", "good", "Say: cinque\nAs:\n", "bad"]
        assert tuple(export.prompts_for(settings, source, tuned, asked)) == expected


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "global_step10" / "optimizer.safetensors").unlink()  # which an export does without
    usage = type(shutil.disk_usage(run_dir))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10**9, 10**9, 5_000_000))
    assert convert(run_dir, "--dry-run") == 2
    said = capsys.readouterr().err
    assert "output_tokenizer_and_model_dir" in said and "5.0 MB free" in said
    # Of a killed run there lies more than is missing, and it is deleted first.
    (run_dir.parent / "hf.partial").mkdir()
    with open(run_dir.parent / "hf.partial" / "model.safetensors", "wb") as file:
        file.truncate(80_000_000)
    for source in (None, run_dir / "global_step10"):
        assert convert(run_dir, "--dry-run", source=source) == 0 and not (run_dir.parent / "hf").exists()


def test_a_second_step_at_the_same_time_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with file_lock.held(run_dir.parent / "hf.lock"):
        assert convert(run_dir) == 2
    assert "is writing here" in capsys.readouterr().err and not (run_dir.parent / "hf").exists()


def test_a_disk_that_fills_up_leaves_nothing_and_it_resumes(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Larger files than a limit are refused by the system, as by a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
    try:
        assert convert(run_dir) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert "model.safetensors" in said
    assert not list(run_dir.parent.glob("hf*"))
    assert convert(run_dir) == 0
    assert exported_folder.proved(run_dir.parent / "hf").facts["proof"]["holds"]


def test_wrong_folders_are_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str, source: Path | None = None, output: Path | None = None) -> None:
        options = [] if output is None else ["--redo", "--set", f"output_tokenizer_and_model_dir={output}"]
        assert convert(run_dir, *options, source=source) == 2
        said = capsys.readouterr().err
        assert all(word in said for word in words), said

    for source in (run_dir / "nowhere", run_dir.parent):
        refused("convert.yaml:1: input_model_dir", source=source)
    other = run_dir.parent / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("years of work", encoding="utf-8")
    for output in (run_dir, run_dir.parent, other):
        refused("output_tokenizer_and_model_dir", output=output)
    assert (other / "chapter.txt").exists()
    corpus, tokenizer = run_dir.parent / "corpus.jsonl", run_dir / "tokenizer.model"
    corpus.rename(run_dir.parent / "elsewhere")
    refused("check_corpus = []")
    tokenizer.write_bytes(tokenizer.read_bytes() + b"\0")
    refused(f"{tokenizer}: ", "sha256")
    tokenizer.unlink()
    refused(f"{tokenizer}: ")
    weights = run_dir / "global_step10" / "weights.safetensors"
    flip_last_byte(weights)
    refused(f"{weights}: ", source=run_dir / "global_step10")
    (run_dir / "global_step10" / "manifest.json").unlink()
    refused(str(run_dir / "global_step10"), source=run_dir / "global_step10")
    refused("convert.yaml:1: input_model_dir")
