"""Step 7 as a person runs it: a small model learns small tasks, is stopped and resumed, tested, and exported."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import made_tasks
import pytest
from configs import typed
from foreign_models import QWEN_3, byte_level

from zerokara.config.pretrain_config import PretrainConfig
from zerokara.examples import facts
from zerokara.examples.chat_template import auto_source
from zerokara.publishing import exported_folder
from zerokara.steps import convert_to_hf, evaluate, finetune
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokenizer.hugging_face import open_encoder
from zerokara.training.monitoring import step_metrics

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("warm_python")
QUICK = (
    "lr=3e-3", "min_lr=3e-4", "global_batch_size=4", "micro_batch_size=4", "packed_length=64", "precision=fp32",
    "plots=false", "tensorboard=false", "log_interval=1", "eval_interval=20", "save_interval=100", "keep_last=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return made_tasks.make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def command(config: Path, *settings: str, script: str = "7_finetune.sh") -> list[str]:
    return ["bash", str(ROOT / script), "--config", str(config), *typed(*settings)]


def run(*arguments: Any, **named: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments, **named), capture_output=True, text=True, check=False, timeout=300)


def make(folder: Path, encoder: Encoder, architecture: str = "llama", **settings: object) -> Path:
    """Make a model and a configuration for it in a folder; gives the configuration."""
    made_tasks.make_folder(folder / "model", encoder, PretrainConfig(architecture=architecture, **made_tasks.SIZES))
    names = {"init_from": "model", "output_prefix": "examples", "output_model_dir": "run"}
    settings |= {key: str(folder / name) for key, name in names.items()}
    lines = [f"{key}: {json.dumps(value)}\n" for key, value in settings.items()]
    config = folder / "finetune_config.yaml"
    config.write_text("".join(lines), encoding="utf-8")
    return config


@pytest.fixture(scope="module")
def labels(encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("labels")
    for name, count, seed in (("train", 400, 1), ("test", 60, 2)):
        (folder / f"{name}.tsv").write_text(made_tasks.label_lines(count, seed), encoding="utf-8")
    return make(
        folder,
        encoder,
        train_data=[str(folder / "train.tsv")],
        test_data=[str(folder / "test.tsv")],
        valid_fraction=0.1,
        label_words=made_tasks.LABELS,
        prompt_template="Review: {input}\nVerdict:\n",
        metric="accuracy",
        epochs=4,
    )


@pytest.mark.slow
def test_a_task_of_labels_is_learned_tested_once_and_exported(labels: Path) -> None:
    run_dir = labels.parent / "run"
    asked = (*QUICK, "micro_batch_size=2", "num_processes=2")  # each of the two answers every second example
    done = run(labels, *asked)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = step_metrics.read(run_dir)
    measured = {line["step"]: line["valid_accuracy"] for line in lines if "valid_accuracy" in line}
    assert measured[0] < 0.2 and max(measured.values()) > 0.8  # an untrained model answers nothing
    named = (run_dir / "best").read_text(encoding="utf-8").strip()
    assert measured[int(named.removeprefix("global_step"))] == max(measured.values())
    result = json.loads((run_dir / "test_result.json").read_bytes())
    assert result["checkpoint"] == named and result["test_accuracy"] > 0.7 and result["test_examples"] == 60
    assert result["test_learned_tokens"] > max(line.get("valid_tokens", 0) for line in lines), "of 60 examples, not 40"
    answers = [json.loads(line) for line in (run_dir / "test_answers.jsonl").read_bytes().splitlines()]
    assert sum(one["answer"] == one["reference"] for one in answers) == round(60 * result["test_accuracy"])
    record = facts.read(run_dir)
    assert record is not None and record.test is not None and record.test.low < record.test.value <= record.test.high
    assert record.baselines == {"majority": 0.5} and record.data["train"].kept + record.data["valid"].kept == 400

    again = run(labels, *asked)
    assert again.returncode == 0 and "complete already" in again.stdout
    assert json.loads((run_dir / "test_result.json").read_bytes()) == result
    (labels.parent / "other.tsv").write_text(made_tasks.label_lines(9, 3), encoding="utf-8")
    other = [f"test_data=[{labels.parent / 'other.tsv'}]", f"output_prefix={labels.parent / 'other'}"]
    assert "was not tested on these examples" in run(labels, *asked, *other).stdout
    assert "was not tested on these examples" not in again.stdout

    # The newest, had the metric become worse; step 4 takes the one that was tested.
    shutil.copytree(run_dir / named, run_dir / "global_step999")
    export = [f"input_model_dir={run_dir}", f"output_tokenizer_and_model_dir={run_dir}_hf", "test_prompt_text=[sun]"]
    converted = run(Path("/dev/null"), *export, script="4_convert_to_HF.sh")
    assert converted.returncode == 0, converted.stderr
    assert f"{run_dir}/{named} " in converted.stdout and f"{named} is exported" in converted.stdout
    shutil.rmtree(run_dir / "global_step999")
    card = Path(f"{run_dir}_hf", "README.md").read_text(encoding="utf-8")
    assert "do_sample=False)" in card, "it answers as it was scored"
    assert "model-index" in card and f"{record.test.value:.2%}" in card
    assert 'tokenizer("Review: sun\\nVerdict:\\n", return_tensors="pt")' in card and "0: bad, 1: good" in card
    assert exported_folder.proved(Path(f"{run_dir}_hf")).facts["finetuning"]["label_words"] == made_tasks.LABELS

    # Step 8 asks as step 7 did, wherever the folder lies, and by nothing but its files.
    moved = shutil.copytree(f"{run_dir}_hf", labels.parent / "moved", ignore=shutil.ignore_patterns("manifest.json"))
    task = f"tasks=[{{name: t, test_data: {labels.parent / 'test.tsv'}}}]"
    assert evaluate.main(typed(task, f"models=[{moved}]", f"output_dir={labels.parent / 'results'}")) == 0
    results = json.loads((labels.parent / "results" / "results.json").read_bytes())
    assert results["sections"][0]["rows"][0]["value"] == pytest.approx(100 * result["test_accuracy"])


@pytest.mark.slow
def test_what_is_auto_is_resolved_in_the_plan_and_a_run_that_learned_nothing_says_so_last(labels: Path) -> None:
    run_dir, rules = labels.parent / "short", ("epochs", "global_batch_size", "lr", "min_lr")
    others = [each for each in QUICK if each.partition("=")[0] not in (*rules, "micro_batch_size")]
    auto = [f"{key}=auto" for key in rules]
    done = run(labels, *others, *auto, f"output_model_dir={run_dir}", "max_steps=1", "warmup_steps=0")
    assert done.returncode == 0, done.stderr + done.stdout
    last = done.stdout.rstrip().rpartition("\n")[2]
    assert last.startswith("warning: accuracy") and "by majority" in last
    plan = json.loads((run_dir / "plan.json").read_bytes())
    assert all(isinstance(plan["resolved"][key], int | float) and key in plan["recipe"] for key in rules)
    again = run(labels, *others, *auto, f"output_model_dir={run_dir}", "max_steps=2", "warmup_steps=0", "seed=1234")
    assert again.returncode == 0, again.stderr
    resumed = json.loads((run_dir / "plan.json").read_bytes())
    assert {key: resumed["resolved"][key] for key in rules} == {key: plan["resolved"][key] for key in rules}


@pytest.mark.parametrize("architecture", ["t5", "qwen3"])
def test_conversations_are_learned(architecture: str, encoder: Encoder, tmp_path: Path) -> None:
    """By an encoder-decoder, and by a decoder with a tokenizer.json, in its own turns."""
    lines = made_tasks.conversation_lines(200, 1)
    (tmp_path / "train.jsonl").write_text(lines, encoding="utf-8")
    if architecture == "qwen3":
        named = {"eos_token": "<|endoftext|>"}
        encoder = open_encoder(byte_level(tmp_path / "own", QWEN_3, lines.splitlines(), tokenizer_config=named))
    config = make(
        tmp_path, encoder, architecture, train_data=[str(tmp_path / "train.jsonl")], epochs=1, metric="exact_match"
    )
    own = tmp_path / "model" / facts.CHAT_TEMPLATE_NAME
    if architecture == "t5":
        own.write_text(auto_source(encoder, True).replace("message['content']", "'- ' + message['content']"))
    (tmp_path / "model" / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6}')
    several = ("num_processes=2", "micro_batch_size=2", "zero_stage=2")
    done = run(config, *QUICK, *several, "max_steps=6", "eval_examples=8")
    assert done.returncode == 0, done.stderr + done.stdout
    run_dir = tmp_path / "run"
    losses = [line["loss"] for line in step_metrics.read(run_dir) if "loss" in line]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert len(facts.conversations(run_dir)) == 190, "those that are not drawn for validation"
    template = (run_dir / facts.CHAT_TEMPLATE_NAME).read_text(encoding="utf-8")
    assert template.count("endgeneration") == 1 and ("<|im_start|>user" in template) == (architecture == "qwen3")
    if architecture == "t5":
        assert template == own.read_text()
        own.write_text(template.replace("- ", "= "))
        again = run(config, *QUICK, *several, "max_steps=6")
        assert again.returncode == 2 and "chat_template" in again.stderr and "has changed since" in again.stderr
    assert {"valid_exact_match", "valid_stopped"} <= {key for line in step_metrics.read(run_dir) for key in line}
    if architecture == "qwen3":
        exported = tmp_path / "hf"
        assert convert_to_hf.main(typed(input_model_dir=run_dir, output_tokenizer_and_model_dir=exported)) == 0
        proof = exported_folder.proved(exported).facts["proof"]
        assert proof["chat"]["compared"] == 190 and proof["token_ids"]["holds"]
        generation = json.loads((exported / "generation_config.json").read_text(encoding="utf-8"))
        assert generation["temperature"] == 0.6, "of the model that was fine-tuned"
        assert [encoder.pieces[end] for end in generation["eos_token_id"]] == ["<|endoftext|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("init_from=nowhere", "init_from"),
        ("packed_length=128", "packed_length"),
        ("train_data=[gone.jsonl]", "gone.jsonl"),
        ("input_tokenizer_file=gone.model", "gone.model"),
        ("global_batch_size=400 micro_batch_size=8 epochs=1", "global_batch_size"),
    ],
)
def test_faults_name_the_setting(labels: Path, setting: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (*setting.split(), f"output_model_dir={labels.parent / 'faulty'}")
    code, said = finetune.main(command(labels, *settings)[2:]), capsys.readouterr().err
    assert code == 2 and key in said and said.count("error:") == 1, said
    assert not (labels.parent / "faulty").exists()


@pytest.mark.parametrize("name", ["x_train_examples.jsonl", "x_test_examples.jsonl"])
def test_the_files_of_others_stay(labels: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The training data itself, by a name that the step writes; and a file that no setting names."""
    records = [json.dumps({"text": f"text {n}", "label": n % 2}) for n in range(40)]
    (tmp_path / name).write_text("\n".join(records), encoding="utf-8")
    settings = [f"output_prefix={tmp_path / 'x'}", f"output_model_dir={tmp_path / 'run'}", "test_data=[]"]
    if name == "x_train_examples.jsonl":
        settings.append(f"train_data=[{tmp_path / name}]")
    before = (tmp_path / name).read_bytes()
    for options in ([], ["--redo"]):
        code, said = finetune.main([*command(labels, *settings)[2:], "--dry-run", *options]), capsys.readouterr().err
        assert code == 2 and name in said and said.count("error:") == 1, said
        assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_bytes() == before
