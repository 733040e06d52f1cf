"""Step 3 as a person runs it: through the shell script and real processes, killed, resumed, refused."""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import rounding
from configs import typed
from faults.running import wait_for

from zerokara import checkpoint
from zerokara.base import manifest
from zerokara.training.monitoring import step_metrics
from zerokara.training.planning import run_folder

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("warm_python")


def command(config: str, settings: tuple[str, ...], options: tuple[str, ...]) -> list[str]:
    return ["bash", str(ROOT / "3_train_node1.sh"), "--config", config, *options, *typed(*settings)]


def start_step_3(config: str, *settings: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command(config, settings, options), text=True, start_new_session=True, **streams)


def step_3(config: str, *settings: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(config, settings, options), capture_output=True, text=True, check=False, timeout=300)


def recorded_steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in step_metrics.read(run_dir) if "loss" in line]


def everything(run_dir: Path) -> dict[str, bytes]:
    """Each file of a run and what is in it, but for the name of who has last held it."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.name != run_folder.LOCK_NAME)
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in files}


WATCHED = (
    "num_processes=2", "zero_stage=2", "train_tokens=auto", "eval_interval=10", "plots=true", "tensorboard=true",
    "wandb=offline", "sample_prompts=[abc, de fg]", "sample_tokens=4",
)  # fmt: skip
LONGER = (*WATCHED, "max_steps=25", "lr=1", "min_lr=1")
"""So fast that it unlearns: the best checkpoint is another than the newest."""


@pytest.fixture(scope="module")
def finished(tiny_data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two processes that is watched in every way and ended by `max_steps`; to be copied, not changed."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    done = step_3(tiny_data["config"], f"output_model_dir={run_dir}", *WATCHED, "max_steps=20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"--set input_model_dir={run_dir} --set output_tokenizer_and_model_dir={run_dir}_hf" in done.stdout
    assert "compiling" not in (done.stdout + done.stderr).lower()
    assert "continues without" not in done.stdout + done.stderr  # logged when a watcher that fails is dropped
    return run_dir


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))


@pytest.fixture(scope="module")
def longer(tiny_data: dict[str, str], finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = Path(shutil.copytree(finished, tmp_path_factory.mktemp("longer") / "run", symlinks=True))
    done = step_3(tiny_data["config"], f"output_model_dir={run_dir}", *LONGER)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "lr: 0.01 → 1.0" in done.stdout and f"{run_dir}/global_step20" in done.stdout
    assert f"step 4 exports {run_dir}/global_step20" in done.stdout
    return run_dir


def test_a_finished_run_is_complete_until_made_longer(tiny_data: dict[str, str], finished: Path, longer: Path) -> None:
    lines, facts = step_metrics.read(finished), manifest.read(finished / "manifest.json").facts
    assert recorded_steps(finished) == list(range(1, 21)) and facts["steps"] == 20 and facts["parameters"] > 0
    assert lines[-1]["step"] == 20 and lines[-1]["valid_bits_per_byte"] < lines[0]["valid_bits_per_byte"]
    same = (f"output_model_dir={finished}", *WATCHED, "max_steps=20")
    again = step_3(tiny_data["config"], *same)
    assert again.returncode == 0 and "is complete already" in again.stdout
    other = step_3(tiny_data["config"], *same, "max_steps=10", "lr=0.02")
    assert other.returncode == 2 and "max_steps: 20 → 10" in other.stderr and "--redo" in other.stderr
    assert "lr: 0.01 → 0.02" in other.stderr
    assert manifest.read(longer / "manifest.json").facts["steps"] == 25


def test_whoever_watches_sees_each_step_once_also_after_a_resume(longer: Path) -> None:
    assert recorded_steps(longer) == list(range(1, 26))
    assert list(longer.glob("tensorboard/events.*"))  # tests/unit reads them
    assert len({path.name for path in longer.glob("wandb/offline-run-*/*.wandb")}) == 1  # one run, in two starts
    written = (longer / "samples.md").read_text(encoding="utf-8")
    assert re.findall(r"^## step (\d+)$", written, re.MULTILINE) == ["10", "20", "25"]
    assert written.count("**prompt:**\n\n    abc\n") == written.count("**prompt:**\n\n    de fg\n") == 3
    names = ("overview", "loss", "bits_per_byte", "learning_rate", "grad_norm", "throughput")
    assert {path.name for path in (longer / "plots").iterdir()} == {f"{name}.png" for name in names}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (longer / "plots").iterdir())


def test_an_evaluated_checkpoint_gives_what_the_log_has(tiny_data: dict[str, str], longer: Path) -> None:
    before = everything(longer)
    settings = (f"output_model_dir={longer}", *LONGER)
    found = {line["step"]: line["valid_loss"] for line in step_metrics.read(longer) if "valid_loss" in line}
    assert found[20] < found[25] - 0.1
    asked = {25: ((), "num_processes=2"), 20: (("best",), "num_processes=1")}
    started = {
        step: start_step_3(tiny_data["config"], *settings, processes, options=("--evaluate", *options))
        for step, (options, processes) in asked.items()
    }
    for step, process in started.items():
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        path = longer / f"evaluation_step{step}.json"
        told = json.loads(path.read_text(encoding="utf-8"))
        rounding.assert_same_loss(told["valid_loss"], found[step])
        before[path.name] = path.read_bytes()
    assert everything(longer) == before
    none = step_3(tiny_data["config"], *settings, options=("--evaluate", "7"))
    assert none.returncode == 2
    assert str(longer) in none.stderr and "20, 25" in none.stderr


@pytest.mark.slow
def test_however_a_run_is_stopped_it_goes_on_and_reads_its_epoch(tiny_data: dict[str, str], tmp_path: Path) -> None:
    """Stopped by a limit of time, by Ctrl-C, and by a kill of the command alone (tests/faults has the rest)."""
    run_dir = tmp_path / "run"
    whole = (f"output_model_dir={run_dir}", "train_tokens=auto", "epochs=1", "global_batch_size=8", "save_interval=10")
    limited = step_3(tiny_data["config"], *whole, "max_hours=1e-9")
    assert limited.returncode == 130, limited.stdout + limited.stderr
    assert re.search(r"max_hours = 1e-09.* after step 1\b", limited.stdout) and "max_hours" in limited.stderr
    assert recorded_steps(run_dir) == checkpoint.all_steps(run_dir) == [1] and not (run_dir / "manifest.json").exists()
    again = step_3(tiny_data["config"], *whole, "max_hours=1e-9")
    assert again.returncode == 2 and "max_hours = 1e-09: " in again.stderr

    asked = start_step_3(tiny_data["config"], *whole, "max_hours=1")
    wait_for(lambda: checkpoint.all_steps(run_dir)[-1] > 1)
    os.killpg(asked.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
    output, _ = asked.communicate()
    assert asked.returncode == 130
    assert f"{run_dir}/global_step1" in output and "SIGTERM" in output  # which the agent passes on
    assert not (run_dir / "manifest.json").exists()

    orphaned = start_step_3(tiny_data["config"], *whole, "max_hours=1")
    before = checkpoint.all_steps(run_dir)[-1]
    wait_for(lambda: checkpoint.all_steps(run_dir)[-1] > before)
    orphaned.kill()  # its processes save, and the next start waits for them
    ended = step_3(tiny_data["config"], *whole, "max_hours=1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    facts = manifest.read(run_dir / "manifest.json").facts
    assert recorded_steps(run_dir) == list(range(1, facts["steps"] + 1)) and facts["steps"] > 100
    last = next(line for line in reversed(step_metrics.read(run_dir)) if "loss" in line)
    assert last["epoch"] == facts["epochs"] == pytest.approx(1, abs=1 / facts["steps"])
    assert re.search(r"trained +2[78]\.?\d?k tokens, (0\.99|1\.00)\d epochs", ended.stdout)


def test_a_folder_of_another_run_or_files_is_left(tiny_data: dict[str, str], copied: Path, tmp_path: Path) -> None:
    settings = (f"output_model_dir={copied}", *WATCHED, "max_steps=20")
    (copied / "manifest.json").unlink()
    before = everything(copied)
    other = step_3(tiny_data["config"], *settings, "hidden_size=64")
    assert other.returncode == 2
    assert all(word in other.stderr for word in ("hidden_size", "48", "64"))
    # With --redo too, what is refused costs nothing: the run that it would replace is still there.
    endless = ("max_steps=auto", "train_tokens=1000000000000", "save_interval=1", "keep_last=1000000000")
    refused = step_3(tiny_data["config"], *settings, *endless, options=("--redo",))
    assert refused.returncode == 2 and "checkpoints" in refused.stderr
    assert everything(copied) == before
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
    assert " total " in words and " 5,120 " in words
    assert "step 1 stage 1 of 2 begins: first, shuffle" in words
    assert "step 7 stage 2 of 2 begins: shuffle" in words  # 50 sequences are 6 steps of 8, and 2
    lines = [line for line in step_metrics.read(tmp_path / "run") if "loss" in line]
    assert lines[-1]["source_tokens"] == [5120] and lines[5]["source_tokens"] == [6 * 8 * 32]
    made = manifest.read(tmp_path / "run" / "manifest.json")
    assert [use["used_tokens"] for use in made.facts["sources"]] == [5120]


def test_dry_run_tries_and_leaves_everything_as_it_was(tiny_data: dict[str, str], copied: Path, tmp_path: Path) -> None:
    """With --redo too: the run that it would replace is still there. Also a run of fewer steps than are tried."""
    before = everything(tmp_path)
    closed = "stages=[{tokens: 128}, {tokens: 128, order: sequential}]"  # one step, and nothing after it
    of_one_step = (f"output_model_dir={tmp_path / 'short'}", "train_tokens=auto", "warmup_steps=auto", closed)
    short = start_step_3(tiny_data["config"], *of_one_step, options=("--dry-run",))
    settings = (f"output_model_dir={copied}", "micro_batch_size=auto", "num_processes=2")
    done = step_3(tiny_data["config"], *settings, options=("--redo", "--dry-run", "--verbose"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 steps × 8 sequences" in done.stdout and "micro batch 4" in done.stdout  # 8 sequences for 2 processes
    assert re.search(r"data begins +\d+ .* = '[a-p ]+", done.stdout)
    assert re.search(r"checkpoint +[\d.]+ kB; ", done.stdout)
    assert re.search(r"memory +about [\d.]+ MB needed by 2 processes, [\d.]+ GB there\n", done.stdout)
    assert re.search(r"kernels: .*blocked_attention", done.stdout)
    assert (
        re.search(r"trial of (3|\d\d) steps: loss [2-7]\.\d+, .* tok/s", done.stdout)
        and "all 20 steps would take" in done.stdout
    )
    assert re.search(r"held [\d.]+ MB", done.stdout)
    assert re.search(r"tokens +tokens used +epochs", done.stdout) and " 5,120 " in done.stdout
    assert "nothing was written" in done.stdout
    output, _ = short.communicate(timeout=240)
    assert short.returncode == 0 and "all 1 steps would take" in output, output
    assert everything(tmp_path) == before


@pytest.mark.slow
def test_resume_is_proved_on_the_users_own_configuration(
    tiny_data: dict[str, str], span_data: dict[str, str], finished: Path, tmp_path: Path
) -> None:
    """With one process, gaps and experts, which must give equal bits, and with two processes; both at a time, for
    starting is what takes long."""
    one = ("num_processes=1", "zero_stage=1", "optimizer=muon", "eval_interval=1", "save_interval=1")
    one += ("architecture=t5_moe", "num_kv_heads=auto", "moe_layers=[1]", "sample_prompts=[abc <extra_id_0>]")
    settings = {"one": (span_data["config"], *WATCHED, *one), "two": (tiny_data["config"], *WATCHED)}
    started, before = {}, everything(finished)
    for name, (config, *words) in settings.items():
        run_dir = shutil.copytree(finished, tmp_path / name, symlinks=True)
        started[name] = start_step_3(config, f"output_model_dir={run_dir}", *words, options=("--verify-resume", "3"))
    for name, process in started.items():
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 0, output
        assert ("proved: equal bit for bit" if name == "one" else "proved: equal") in output
        assert "resuming from" in output and "valid_loss" not in output and "wandb" not in output
        assert "losses differ by at most" in output
        assert everything(tmp_path / name) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
