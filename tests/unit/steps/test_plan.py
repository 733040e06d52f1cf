"""python plan.py on a machine whose speed is known: what it advises is what its next command trains."""

import json
import shlex
from pathlib import Path

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.forecast import sizes
from zerokara.forecast.sizes import LEFT_TO_RECIPE, Planner, Speed
from zerokara.steps import plan
from zerokara.steps.command import COMMAND_NAME
from zerokara.training.planning.memory import TrialResult
from zerokara.training.planning.run_plan import make_plan

COMMENT = "# chosen by nobody yet"
PLAN = ("--tokens", "20000", "--set", "lr=0.5", "--set", "seed=7")


@pytest.fixture
def config(tiny_data: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Planner, "measure_speed", lambda self: Speed(1e-5, 1e-11))
    monkeypatch.setenv(COMMAND_NAME, "plan.py")
    keys = ("input_jsonl", "input_tokenizer_file", "output_prefix", "seq_len")
    lines = [f"{key}: {tiny_data[key]}" for key in keys]
    path = tmp_path / "mine.yaml"
    path.write_text(
        "\n".join([*lines, f"hidden_size: 48  {COMMENT}", "precision: fp32", "max_steps: 3"]) + "\n", encoding="utf-8"
    )
    return path


def advice(config: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, list[str]]:
    """What was printed, and the words of the next command."""
    assert plan.main(["--config", str(config), *argv]) == 0
    said = capsys.readouterr().out
    return said, shlex.split(said.partition("next: ")[2])


def test_the_next_command_writes_what_is_advised(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a command line the numbers would soon be forgotten, and the run be another."""
    before = config.read_text(encoding="utf-8")
    _, words = advice(config, capsys, *PLAN)
    assert words[1].endswith("plan.py") and words[-1] == "--write" and config.read_text(encoding="utf-8") == before
    _, words = advice(config, capsys, *words[2:])
    assert COMMENT in config.read_text(encoding="utf-8") and "3_train_node1.sh" in words[1]
    assert [word for word in words if "=" in word] == ["seed=7"]
    pasted = load(PretrainConfig, config, ["seed=7"])
    assert pasted.max_steps == "auto", "the tokens that are advised are trained on"
    advised = (pasted.model_size, pasted.hidden_size, pasted.train_tokens, pasted.lr, pasted.seed)
    assert advised == ("1M", "auto", 20000, "auto", 7)
    assert make_plan(pasted).schedule.num_tokens == pytest.approx(20000, rel=0.01)
    assert "3_train_node1.sh" in advice(config, capsys, "--tokens", "20000")[1][1], "all of it stands there"


def test_what_stands_on_the_command_line_alone_is_repeated(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file has another length, which the next command would train without it."""
    path = config.with_name("other.yaml")
    text = config.read_text(encoding="utf-8").replace("max_steps: 3\n", "").replace(f"hidden_size: 48  {COMMENT}\n", "")
    path.write_text(text, encoding="utf-8")
    said, _ = advice(path, capsys, "--tokens", "20000")
    assert "take  " in said
    values = {**LEFT_TO_RECIPE, **sizes.size_settings("1M"), "train_tokens": 20000}
    given = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    words = advice(path, capsys, "--tokens", "20000", *given)[1]
    assert "3_train_node1.sh" in words[1] and "train_tokens=20000" in words and "model_size=1M" in words


def test_what_the_plan_does_not_count_is_told(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = ("--tokens", "20000", "--set", "max_hours=1e-9")
    assert "max_hours = 1e-09 stops this run before its end" in advice(config, capsys, *slow)[0]
    assert "this is the time of one machine" in advice(config, capsys, *PLAN, "--set", "nodes=2")[0]
    assert "this is the time of one machine" not in advice(config, capsys, *PLAN)[0]


def test_sizes_of_which_none_can_have_the_settings(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--config", str(config), *PLAN, "--set", "num_processes=3", "--set", "micro_batch_size=1")
    assert plan.main(argv) == 2
    told = capsys.readouterr().err
    assert "must be a multiple of micro_batch_size × processes" in told and "memory of this machine" not in told


def test_a_dry_run_measures_nothing(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = config.read_text(encoding="utf-8")
    monkeypatch.setattr(Planner, "measure_speed", lambda self: 1 / 0)
    monkeypatch.setattr(plan.fit, "MIN_STEPS", 4)
    said, _ = advice(config, capsys, *PLAN, "--write", "--dry-run", "--fit", "10")
    assert "1M and 10M" in said and "9 small models in 10 minutes" in said and "nothing was measured" in said
    assert config.read_text(encoding="utf-8") == before


def test_a_fit_is_offered_where_it_can_work(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "204,800 training tokens" in advice(config, capsys, *PLAN)[0]
    monkeypatch.setattr(plan.fit, "MIN_STEPS", 4)
    offer = advice(config, capsys, *PLAN)[0].partition(" 10 minutes ")[2].partition("\n")[0]
    assert shlex.split(offer)[-1] == "--fit" and "--write" not in offer
    monkeypatch.setattr(Planner, "measure_speed", lambda self: Speed(1, 0))
    said = advice(config, capsys, *PLAN)[0]
    assert "minutes are too short for nine small runs" in said and "; give " in said


@pytest.mark.parametrize(("minutes", "rule"), [("10", "204,800 training tokens"), ("0.1", "minutes are too short")])
def test_a_fit_that_cannot_work_is_refused_before_anything_is_measured(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, minutes: str, rule: str
) -> None:
    monkeypatch.setattr(Planner, "measure_speed", lambda self: 1 / 0)
    if minutes == "0.1":
        monkeypatch.setattr(plan.fit, "MIN_STEPS", 4)
    assert plan.main(["--config", str(config), *PLAN, "--fit", minutes]) == 2
    assert rule in capsys.readouterr().err


def test_the_sizes_of_the_model_to_start_from_are_written(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    theirs = Qwen3Config(
        **sizes, head_dim=32, intermediate_size=160, max_position_embeddings=4096, rms_norm_eps=1e-6, vocab_size=600
    )
    Qwen3ForCausalLM(theirs).save_pretrained(tmp_path / "hf")
    path = tmp_path / "continued.yaml"
    path.write_text(config.read_text(encoding="utf-8") + f"init_from: {tmp_path / 'hf'}\n", encoding="utf-8")
    before = path.read_bytes()
    assert plan.main(["--config", str(path)]) == 0 and path.read_bytes() == before
    shown = capsys.readouterr().out
    assert "at most 4,096 tokens" in shown and shown.rstrip().endswith("--write")
    assert plan.main(["--config", str(path), "--write"]) == 0 and "2_tokenize.sh" in capsys.readouterr().out
    made, old = load(PretrainConfig, path), load(PretrainConfig, config)
    assert (made.architecture, made.num_layers, made.num_kv_heads, made.head_dim) == ("qwen3", 3, 2, 32)
    assert (made.hidden_size, made.ffn_hidden_size, made.norm_epsilon) == (96, 160, 1e-6)
    assert (made.seq_len, made.input_tokenizer_file) == (old.seq_len, old.input_tokenizer_file)
    hf_config, written = tmp_path / "hf" / "config.json", path.read_bytes()
    values = json.loads(hf_config.read_bytes()) | {"quantization_config": {"quant_method": "gptq"}}
    hf_config.write_text(json.dumps(values), encoding="utf-8")
    assert plan.main(["--config", str(path), "--write"]) == 2 and "gptq" in capsys.readouterr().err
    assert path.read_bytes() == written


def test_hours_that_one_model_cannot_use_are_offered_to_several(
    config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config.write_text(config.read_text(encoding="utf-8") + f"output_model_dir: {tmp_path / 'run'}\n", encoding="utf-8")
    least = ("--set", "max_epochs_per_source=5")
    said, words = advice(config, capsys, *least, "--hours", "100")
    offer = said.partition("several-models): ")[2].partition("\n")[0]
    assert "--models 8" in offer and words[-1] == "--write"
    assert "\n  or  " not in advice(config, capsys, "--set", "max_epochs_per_source=4", "--hours", "100")[0]
    said, words = advice(config, capsys, *shlex.split(offer)[2:], "--models", "3", "--write", "--set", "seed=7")
    folder = tmp_path / "run_learns_from_3"
    assert str(folder) in said and "\n  note " not in said and words == ["bash", str(folder / "run.sh")]
    commands = [shlex.split(line) for line in (folder / "run.sh").read_text(encoding="utf-8").splitlines()[5:-1]]
    trained = [load(PretrainConfig, Path(words[words.index("--config") + 1])) for words in commands[::2]]
    exports = [words[-1].partition("=")[2] for words in commands[1::2]]
    assert [each.seed for each in trained] == [8, 9, 10, 7] and len({each.train_tokens for each in trained}) == 1
    assert [each.teachers for each in trained] == [(), (), (), tuple(exports[:3])]
    assert exports == [f"{each.output_model_dir}_hf" for each in trained]
    assert len({each.output_model_dir for each in trained} | {str(tmp_path / "run")}) == 5
    assert (
        " read"
        in advice(config, capsys, "--set", "max_epochs_per_source=3", "--hours", "9", "--models", "1")[0].partition(
            "\n  note "
        )[2]
    )
    again = advice(config, capsys, *shlex.split(offer)[2:], "--models", "3")[1]
    assert again[-1] == "--write", "the sizes stand in the file, the files of the models are not offered as written"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ((), "--hours"), (("--hours", "0.1", "--set", "init_from=somewhere"), "init_from"),
        (("--hours", "1", "--set", "stages=[{tokens: 9}]"), "stages"),
        (("--hours", "1", "--models", "9"), "--models: 9: must be 1 to 8"),
        (("--hours", "1", "--models", "2", "--set", "init_from=somewhere"), "--models: 2: needs a decoder from"),
        (("--hours", "1", "--models", "2", "--write", "--set", "architecture=t5"), "--models: 2: needs a decoder"),
    ],
)  # fmt: skip
def test_what_is_refused(config: Path, argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--config", str(config), *argv]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        ("tensor_parallel_size=2", "num_processes=2", "num_attn_heads=2"),  # which the heads of some sizes are not
        ("architecture=qwen3_moe", "num_layers=4", "moe_layers=[3]", "hidden_size=64"),
    ],
)
def test_a_size_that_the_settings_do_not_fit_is_left_out(
    config: Path, given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    said, words = advice(config, capsys, *PLAN, *(word for each in given for word in ("--set", each)))
    assert "take  " in said and words[-1] == "--write"


def test_what_is_measured_has_no_length_of_the_users(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(sizes, "try_steps", lambda plan: tried.append(plan) or (plan, TrialResult(0, 1.0)))
    given = ("warmup_steps=100", "global_batch_size=4", "stages=[{tokens: 640}, {tokens: 640, order: sequential}]")
    Planner(config, given).measure({**sizes.size_settings("1M"), "global_batch_size": 16})
    settings = tried[0].resolved
    assert (settings.warmup_steps, settings.warmup_fraction, settings.stages, settings.max_steps) == (
        "auto",
        0,
        (),
        "auto",
    )


def test_each_of_several_models_is_converted_as_the_users_file_says(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its licence and language are those of the model that is published."""
    (own := tmp_path / "ja_config.yaml").write_text(config.read_text(encoding="utf-8"), encoding="utf-8")
    (convert := tmp_path / "ja_convert_config.yaml").write_text("license: cc-by-sa-4.0\n", encoding="utf-8")
    typed = ("--set", f"output_model_dir={tmp_path / 'run'}", "--models", "1", "--write")
    (_, script) = advice(own, capsys, "--tokens", "20000", *typed)[1]
    exports = [line for line in Path(script).read_text(encoding="utf-8").splitlines() if "4_convert" in line]
    assert len(exports) == 2 and all(f"--config {convert}" in line for line in exports)
