"""python plan.py: real steps measured, and real small runs."""

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import warm
from PIL import Image
from tiny import ROOT, make_data

from zerokara.base.durable import make_folders, write_json
from zerokara.forecast.fit import SHAPES, MeasuredRun, SmallRuns, plan_runs
from zerokara.forecast.sizes import Planner, Speed, effective_parameters
from zerokara.model.shapes import ModelShape
from zerokara.steps import plan as step
from zerokara.tokenizer.encoder import Encoder
from zerokara.tokens.indexed import open_splits

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration file whose corpus is long enough for small runs."""
    folder = tmp_path_factory.mktemp("plan")
    keys = ("input_jsonl", "input_tokenizer_file", "output_prefix", "seq_len")
    settings = make_data(folder, num_documents=1200)
    lines = [f"{key}: {settings[key]}" for key in keys]
    path = folder / "mine.yaml"
    lines += ["hidden_size: 48", "num_processes: 1", f"output_model_dir: {folder / 'run'}", "precision: fp32"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_law_is_kept(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    planner = Planner(config, ())
    settings = planner.config()
    small, encoder = SmallRuns(planner, Path(f"{settings.output_prefix}_plan")), Encoder(settings.input_tokenizer_file)
    shapes = [ModelShape.from_config(planner.config(**each), encoder.vocab_size) for each in SHAPES]
    (_, valid), unique = open_splits(settings.output_prefix), planner.local_plan().data.training.tokens_of(1)
    assert valid is not None
    # So small a corpus limits the runs, however fast the machine is: so these are those of the plan.
    runs = plan_runs(shapes, Speed(0, 1e-12), 30, 1, unique, len(valid.tokens))
    make_folders(small.folder)
    for run in runs[:-1]:  # as if an earlier plan had trained them and was killed
        value = 1 + (run.shape.num_parameters() / 1e6) ** -0.3 + (run.tokens / 1e5) ** -0.4
        write_json(small.result_path(run), asdict(MeasuredRun(effective_parameters(run.shape), run.tokens, value)))

    command = [warm.python(), str(ROOT / "plan.py"), "--config", str(config), "--tokens", "60000", "--fit", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    found = small.results(runs[-1].eval_tokens)
    assert len(found) == 9 and len({run.parameters for run in found}) == 3
    last = MeasuredRun(**json.loads(small.result_path(runs[-1]).read_bytes()))
    assert last.tokens == pytest.approx(runs[-1].tokens, rel=0.01) and 0.5 < last.bits_per_byte < 8
    assert not [path for path in small.folder.iterdir() if path.is_dir()]
    assert Image.open(small.plan_folder / "plan.png").format == "PNG"
    (expected,) = [line for line in said.splitlines() if line.strip().startswith("expect")]
    monkeypatch.setattr(Planner, "measure_speed", lambda self: Speed(1e-5, 1e-11))
    assert step.main(["--config", str(config), "--tokens", "60000"]) == 0
    said = capsys.readouterr().out
    assert expected in said  # the same law, and no run
