"""python 0_plan.py on a machine whose speed is known: what it advises is what its next command trains."""

import shlex
from pathlib import Path

import pytest

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.forecast.speed import Planner, Speed
from zerokara.steps import plan
from zerokara.steps.command import COMMAND_NAME
from zerokara.training.planning.run_plan import make_plan

COMMENT = "# chosen by nobody yet"
PLAN = ("--tokens", "20000", "--set", "lr=0.5", "--set", "seed=7")


@pytest.fixture
def config(tiny_data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Planner, "measure_speed", lambda self: Speed(1e-5, 1e-11))
    monkeypatch.setenv(COMMAND_NAME, "0_plan.py")
    keys = ("input_jsonl", "input_tokenizer_file", "output_prefix", "seq_len")
    lines = [f"{key}: {tiny_data[key]}" for key in keys]
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join([*lines, f"hidden_size: 48  {COMMENT}", "precision: fp32"]) + "\n", encoding="utf-8")
    return path


def advice(config: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, PretrainConfig]:
    """What was printed, and what step 3 loads when the printed command is pasted."""
    assert plan.main(["--config", str(config), *argv]) == 0
    said = capsys.readouterr().out
    words = shlex.split(said.partition("next: ")[2])
    return said, load(PretrainConfig, config, [word for word in words if "=" in word])


def test_the_next_command_trains_what_is_advised(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = config.read_text(encoding="utf-8")
    said, pasted = advice(config, capsys, *PLAN, "--write", "--dry-run")
    assert "--set model_size=1M" in said and config.read_text(encoding="utf-8") == before
    advised = (pasted.model_size, pasted.hidden_size, pasted.train_tokens, pasted.lr, pasted.seed)
    assert advised == ("1M", "auto", 20000, "auto", 7)
    said, pasted = advice(config, capsys, *PLAN, "--write")
    assert "model_size=" not in said and COMMENT in config.read_text(encoding="utf-8")
    assert (pasted.model_size, pasted.hidden_size, pasted.train_tokens, pasted.lr, pasted.seed) == advised
    assert make_plan(pasted).schedule.num_tokens == pytest.approx(20000, rel=0.01)


def test_a_fit_is_offered(config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "204,800 training tokens" in advice(config, capsys, *PLAN)[0]
    monkeypatch.setattr(plan.fit, "MIN_STEPS", 4)
    offer = advice(config, capsys, *PLAN, "--write", "--dry-run")[0].partition(" 10 minutes ")[2].partition("\n")[0]
    assert shlex.split(offer)[-1] == "--fit" and "--write" not in offer


@pytest.mark.parametrize(
    ("argv", "said"), [((), "--hours"), (("--hours", "0.1", "--set", "init_from=somewhere"), "init_from")]
)
def test_what_is_refused(config: Path, argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--config", str(config), *argv]) == 2
    assert said in capsys.readouterr().err
