"""Step 3 as a person runs it: through the shell script and the DeepSpeed launcher, killed, resumed, refused."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from zerokara import checkpoint, manifest
from zerokara.training import metrics

ROOT = Path(__file__).resolve().parents[2]


def step_3(config: str, *settings: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "3_train_node1.sh"), "--config", config, *options]
    for setting in settings:
        command += ["--set", setting]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def start_step_3(config: str, *settings: str) -> subprocess.Popen[str]:
    command = ["bash", str(ROOT / "3_train_node1.sh"), "--config", config]
    for setting in settings:
        command += ["--set", setting]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def wait_for(condition, seconds: float = 120) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


def kill_all(process: subprocess.Popen[str]) -> None:
    """kill -9 the step, the launcher and every training process, as a power cut would."""
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(everyone) >= 3
    for one in everyone:
        one.kill()
    psutil.wait_procs(everyone)


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics.read(run_dir) if "loss" in line]


@pytest.fixture(scope="module")
def long_run(tiny_data: dict[str, str]) -> tuple[str, ...]:
    return (f"train_tokens={150 * 8 * 32}", "save_interval=10", "tensorboard=true")


def test_trains_on_two_processes_and_leaves_everything(tiny_data: dict[str, str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = (f"output_model_dir={run_dir}", "num_processes=2", "zero_stage=2", "tensorboard=true")
    done = step_3(tiny_data["config"], *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "next: bash 4_convert_to_HF.sh" in done.stdout
    assert "compiling" not in (done.stdout + done.stderr).lower()
    assert len(losses(run_dir)) == 20
    last = metrics.read(run_dir)[-1]
    assert last["step"] == 20 and last["valid_bits_per_byte"] < metrics.read(run_dir)[0]["valid_bits_per_byte"]
    assert (run_dir / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").glob("events.out.tfevents*"))
    made = manifest.read(run_dir / "manifest.json")
    assert made.facts["steps"] == 20 and made.facts["parameters"] > 0
    again = step_3(tiny_data["config"], *arguments)
    assert again.returncode == 0 and "is complete already" in again.stdout
    other = step_3(tiny_data["config"], *arguments, "lr=0.02")
    assert other.returncode == 2 and "lr was 0.01, is now 0.02" in other.stderr
    longer = step_3(tiny_data["config"], *arguments, f"train_tokens={25 * 8 * 32}")
    assert longer.returncode == 0, longer.stdout + longer.stderr
    assert f"going on from {run_dir}/global_step20" in longer.stdout
    assert len(losses(run_dir)) == 25 and manifest.read(run_dir / "manifest.json").facts["steps"] == 25


def test_killed_by_force_and_by_request_it_goes_on_and_ends_as_if_unbroken(
    tiny_data: dict[str, str], long_run: tuple[str, ...], tmp_path: Path
) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    assert step_3(tiny_data["config"], f"output_model_dir={unbroken}", *long_run).returncode == 0

    killed = start_step_3(tiny_data["config"], f"output_model_dir={broken}", *long_run)
    wait_for(lambda: len(checkpoint.all_steps(broken)) > 0)
    kill_all(killed)
    assert not (broken / "manifest.json").exists()

    asked = start_step_3(tiny_data["config"], f"output_model_dir={broken}", *long_run)
    before = checkpoint.all_steps(broken)[-1]
    wait_for(lambda: checkpoint.all_steps(broken)[-1] > before)
    os.killpg(asked.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
    output, _ = asked.communicate()
    assert asked.returncode == 130
    assert "going on from" in output and "saved; run the same command to go on" in output
    assert not (broken / "manifest.json").exists()

    ended = step_3(tiny_data["config"], f"output_model_dir={broken}", *long_run)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert losses(broken) == losses(unbroken)


def test_when_only_the_step_is_killed_its_processes_save_and_the_next_start_waits(
    tiny_data: dict[str, str], long_run: tuple[str, ...], tmp_path: Path
) -> None:
    arguments = (f"output_model_dir={tmp_path / 'run'}", *long_run)
    orphaned = start_step_3(tiny_data["config"], *arguments)
    wait_for(lambda: len(checkpoint.all_steps(tmp_path / "run")) > 0)
    orphaned.kill()
    again = step_3(tiny_data["config"], *arguments)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [line["step"] for line in metrics.read(tmp_path / "run") if "loss" in line] == list(range(1, 151))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("seq_len=1000000",), "tokens, and one sequence takes"),
        (("input_tokenizer_file=none.model",), "there is no such tokenizer file"),
        (("output_prefix=nowhere/tokens",), "nowhere/tokens_text_document.manifest.json"),
        (("num_processes=3",), "must be a multiple of micro_batch_size × processes = 4 × 3 = 12"),
        (("deepspeed_template=none.json",), "none.json: there is no such file"),
    ],
)
def test_wrong_input_is_one_clear_error(
    tiny_data: dict[str, str], tmp_path: Path, settings: tuple[str, ...], words: str
) -> None:
    done = step_3(tiny_data["config"], f"output_model_dir={tmp_path / 'run'}", *settings)
    assert done.returncode == 2, done.stdout + done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_run_or_of_other_files_is_left_alone(tiny_data: dict[str, str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert step_3(tiny_data["config"], f"output_model_dir={run_dir}").returncode == 0
    weights = (run_dir / "global_step20" / "weights.safetensors").read_bytes()
    (run_dir / "manifest.json").unlink()
    other = step_3(tiny_data["config"], f"output_model_dir={run_dir}", "hidden_size=64")
    assert other.returncode == 2
    assert "belongs to another run: hidden_size was 48, is now 64" in other.stderr
    assert (run_dir / "global_step20" / "weights.safetensors").read_bytes() == weights
    # With --redo too, what is refused costs nothing: the run that it would replace is still there.
    endless = ("train_tokens=1000000000000", "save_interval=1", "keep_last=1000000000")
    refused = step_3(tiny_data["config"], f"output_model_dir={run_dir}", *endless, options=("--redo",))
    assert refused.returncode == 2 and "leaves no room for its checkpoints" in refused.stderr
    tried = step_3(tiny_data["config"], f"output_model_dir={run_dir}", options=("--redo", "--dry-run"))
    assert tried.returncode == 0
    assert (run_dir / "global_step20" / "weights.safetensors").read_bytes() == weights
    stranger = tmp_path / "photos"
    stranger.mkdir()
    (stranger / "one.jpg").write_bytes(b"x")
    for options in ((), ("--redo",)):
        refused = step_3(tiny_data["config"], f"output_model_dir={stranger}", options=options)
        assert refused.returncode == 2 and (stranger / "one.jpg").exists(), refused.stderr


def test_a_curriculum_is_told_before_and_while_it_runs(tiny_data: dict[str, str], tmp_path: Path) -> None:
    stages = "stages=[{name: first, tokens: 1600}, {tokens: rest, source_weights: [2]}]"
    settings = (f"output_model_dir={tmp_path / 'run'}", stages)
    done = step_3(tiny_data["config"], *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    words = " ".join(done.stdout.split())
    assert "stage 1 of 2: first, shuffle" in words and "stage 2 of 2: shuffle" in words
    assert " in all " in words and " 5,120 " in words
    assert "step 1 stage 1 of 2 begins: first, shuffle" in words
    assert "step 7 stage 2 of 2 begins: shuffle" in words  # 50 sequences are 6 steps of 8, and 2
    lines = [line for line in metrics.read(tmp_path / "run") if "loss" in line]
    assert lines[-1]["source_tokens"] == [5120] and lines[5]["source_tokens"] == [6 * 8 * 32]
    made = manifest.read(tmp_path / "run" / "manifest.json")
    assert [use["tokens_taken"] for use in made.facts["sources"]] == [5120]
    again = step_3(tiny_data["config"], *settings, "max_epochs_per_source=0.01")
    assert again.returncode == 0 and "is complete already" in again.stdout
    other = step_3(tiny_data["config"], *settings, stages.replace("1600", "3200"))
    assert other.returncode == 2 and "belongs to another run: curriculum was" in other.stderr
    refused = step_3(tiny_data["config"], f"output_model_dir={tmp_path / 'new'}", stages, "max_epochs_per_source=0.1")
    assert refused.returncode == 2 and "max_epochs_per_source = 0.1: would be exceeded: " in refused.stderr
    assert not (tmp_path / "new").exists()


def test_dry_run_tries_and_leaves_nothing(tiny_data: dict[str, str], tmp_path: Path) -> None:
    settings = (f"output_model_dir={tmp_path / 'run'}", "micro_batch_size=auto", "num_processes=2")
    done = step_3(tiny_data["config"], *settings, options=("--dry-run",))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 steps × 8 sequences" in done.stdout and "micro batch 4" in done.stdout  # 8 sequences for 2 processes
    assert re.search(r"data begins +\d+ .* = '[a-p ]+", done.stdout)
    assert re.search(r"memory +about [\d.]+ MB a process of [\d.]+ GB: framework", done.stdout)
    assert "kernels: attention by torch's flash kernel for CPUs; torch's fused AdamW" in done.stdout
    assert re.search(r"trial of 3 steps: loss [5-7]\.\d+, .* tok/s; all 20 steps would take", done.stdout)
    assert re.search(r"the fullest process held [\d.]+ MB at most", done.stdout)
    assert "tokens there        tokens taken    epochs" in done.stdout and " 5,120 " in done.stdout
    assert not (tmp_path / "run").exists()


def test_resume_is_proved_on_the_users_own_configuration(tiny_data: dict[str, str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "keep").mkdir(parents=True)  # whatever stands there is not touched, and not even looked at
    settings = (
        f"output_model_dir={run_dir}",
        "optimizer=muon",
        "eval_interval=1",
        "save_interval=1",
        "tensorboard=true",
    )
    done = step_3(tiny_data["config"], *settings, options=("--verify-resume", "2"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resume is proved: equal bit for bit" in done.stdout
    assert "going on from" in done.stdout and "validation loss" not in done.stdout
    for step in (3, 4):
        assert f"\n  {step:>9}  " in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    assert [path.name for path in run_dir.iterdir()] == ["keep"]
