"""python 0_plan.py: real steps measured, real small runs, and a configuration that step 3 takes."""

from __future__ import annotations

import json
import shlex
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import warm
from PIL import Image
from tiny import ROOT, make_data

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.durable import make_folders, write_json
from zerokara.forecast.fit import SHAPES, MeasuredRun, SmallRuns, effective_parameters, plan_runs
from zerokara.forecast.speed import Planner, Speed, size_settings
from zerokara.model.shapes import ModelShape
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.indexed import count

pytestmark = pytest.mark.usefixtures("warm_python")

COMMENT = "# chosen by nobody yet"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration file with a comment, whose corpus is long enough for small runs."""
    folder = tmp_path_factory.mktemp("plan")
    keys = ("input_jsonl", "input_tokenizer_file", "output_prefix", "seq_len")
    settings = make_data(folder, num_documents=1200)
    lines = [f"{key}: {settings[key]}" for key in keys]
    path = folder / "mine.yaml"
    lines += [f"hidden_size: 48  {COMMENT}", f"output_model_dir: {folder / 'run'}", "precision: fp32"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def plan(config: Path, *options: str, code: int = 0) -> str:
    command = [warm.python(), str(ROOT / "0_plan.py"), "--config", str(config), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_choice_is_written_and_trains(config: Path) -> None:
    before = config.read_text(encoding="utf-8")
    said = plan(config, "--tokens", "20000", "--write", "--dry-run", "--set", "lr=0.5", "--set", "seed=7")
    command = shlex.split(said.partition("next: ")[2])
    typed = [word for word in command if "=" in word]
    pasted, planned = load(PretrainConfig, config, typed), Planner(config, ()).config(**size_settings("1M"))
    assert pasted.resolved_sizes() == planned.resolved_sizes() and "model_size=1M" in typed
    assert (pasted.train_tokens, pasted.lr, pasted.seed) == (20000, "auto", 7) and "--fit" in said
    assert config.read_text(encoding="utf-8") == before
    plan(config, "--tokens", "20000", "--write")
    written = load(PretrainConfig, config, [])
    assert (written.model_size, written.hidden_size, written.lr, written.train_tokens) == ("1M", "auto", "auto", 20000)
    assert COMMENT in config.read_text(encoding="utf-8")
    step_3 = ["bash", str(ROOT / "3_train_node1.sh"), "--config", str(config), "--dry-run"]
    done = subprocess.run(step_3, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "lr" in done.stdout, done.stdout + done.stderr
    config.write_text(before, encoding="utf-8")


def test_a_law_is_fitted_on_small_runs_and_kept(config: Path) -> None:
    planner = Planner(config, ())
    settings = planner.config()
    small, encoder = SmallRuns(planner, Path(f"{settings.output_prefix}_plan")), Encoder(settings.input_tokenizer_file)
    shapes = [ModelShape.from_config(planner.config(**each), encoder.vocab_size) for each in SHAPES]
    counts = count(settings.output_prefix)
    assert counts.valid
    # So small a corpus limits the runs, however fast the machine is: so these are those of the plan.
    runs = plan_runs(shapes, Speed(0, 1e-12), 30, 1, counts.train.tokens, counts.valid.tokens)
    make_folders(small.folder)
    for run in runs[:-1]:  # as if an earlier plan had trained them and was killed
        value = 1 + (run.shape.num_parameters() / 1e6) ** -0.3 + (run.tokens / 1e5) ** -0.4
        write_json(small.result_path(run), asdict(MeasuredRun(effective_parameters(run.shape), run.tokens, value)))

    said = plan(config, "--tokens", "60000", "--fit", "1000")
    found = small.results()
    assert len(found) == 9 and len({run.parameters for run in found}) == 3
    last = MeasuredRun(**json.loads(small.result_path(runs[-1]).read_bytes()))
    assert last.tokens == pytest.approx(runs[-1].tokens, rel=0.01) and 0.5 < last.bits_per_byte < 8
    assert not [path for path in small.folder.iterdir() if path.is_dir()]
    assert Image.open(small.plan_folder / "plan.png").format == "PNG"
    (expected,) = [line for line in said.splitlines() if line.strip().startswith("expect")]
    assert expected in plan(config, "--tokens", "60000")  # the same law, and no run


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "--hours"),
        (("--hours", "0.1", "--fit", "0.01"), "--fit"),
        (("--hours", "0.1", "--set", "init_from=somewhere"), "init_from"),
    ],
)
def test_what_cannot_be_planned(config: Path, options: tuple[str, ...], said: str) -> None:
    assert said in plan(config, *options, code=2)
