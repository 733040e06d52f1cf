"""What a start takes over from the one before, and what it asks about."""

from pathlib import Path

import orjson
import pytest
from configs import fault_of
from made_checkpoints import saved

from zerokara import checkpoint
from zerokara.base import manifest
from zerokara.base.errors import refuse
from zerokara.config.loading import load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.training.planning import earlier_run, run_folder
from zerokara.training.planning.earlier_run import Resumption
from zerokara.training.planning.run_plan import RunPlan, make_plan


class Starts:
    """Starts of one run, each of which trains a step."""

    def __init__(self, path: Path, settings: dict[str, object]):
        self.path, self.settings, self.resumption = path, settings, Resumption([])

    def plan(self, *typed: str, config: str = "config.yaml") -> RunPlan:
        """Plan a start with its file and `--set typed`, and check it as step 3 does."""
        path = self.path / config
        path.write_text("".join(f"{key}: {value}\n" for key, value in self.settings.items()), encoding="utf-8")
        requested = load(PretrainConfig, path, typed)
        earlier = run_folder.read_earlier(requested)
        plan = make_plan(requested, initial_settings=earlier.initial_settings if earlier else None)
        if earlier:
            self.resumption = earlier_run.resumption(plan, earlier, "bash 3.sh")
            refuse(self.resumption.faults)
        return plan

    def start(self, *typed: str) -> RunPlan:
        plan = self.plan(*typed)
        run_folder.claim(plan)
        checkpoint.folder_of(plan.run_dir, 1).mkdir(exist_ok=True)
        return plan

    def refused(self, *typed: str, config: str = "config.yaml") -> tuple[str, list[str]]:
        """Return the rule and the two commands of a start that is refused."""
        fault = fault_of(lambda: self.plan(*typed, config=config))
        return fault.rule, [line.strip() for line in fault.remedy.splitlines() if line.startswith("  ")]


@pytest.fixture
def run(tiny_data: dict[str, str], tmp_path: Path) -> Starts:
    file = load(PretrainConfig, tiny_data["config"]).model_dump(mode="json")
    shape = ("input_jsonl", "input_tokenizer_file", "output_prefix", "hidden_size", "num_attn_heads", "num_layers")
    settings = {key: file[key] for key in (*shape, "seq_len", "ffn_hidden_size", "num_kv_heads")}
    return Starts(tmp_path, {**settings, "output_model_dir": tmp_path / "run", "precision": "fp32"})


def test_a_run_that_a_forgotten_flag_would_make_longer_is_refused(run: Starts) -> None:
    first = run.start("max_steps=40")
    assert run.start("max_steps=40").schedule == first.schedule, "the same command goes on"
    rule, commands = run.refused()
    whole = run.plan("max_steps=auto")
    assert "had --set max_steps=40, this one does not" in rule
    assert commands == ["bash 3.sh --set max_steps=40", "bash 3.sh --set max_steps=auto"]
    run.settings["max_steps"] = 5000
    assert run.plan().schedule.num_steps == whole.schedule.num_steps, "the file has changed since"
    del run.settings["max_steps"]
    assert whole.requested.lr == first.requested.lr, "made longer, it goes on with the same numbers"
    run.start("max_steps=auto")
    run.start()  # and is asked no more


def test_steps_of_another_size_or_more_than_are_planned_are_refused(run: Starts) -> None:
    """The run would have another length than its plan says, or be called trained with its rate still high."""
    batch = run.start("max_steps=40").resolved.global_batch
    rule, _ = run.refused("max_steps=40", f"global_batch_size={2 * batch}")
    assert f"was {batch} in this run" in rule
    saved(run.plan("max_steps=40").run_dir, 30)
    assert run.plan("max_steps=30")
    rule, _ = run.refused("max_steps=29")
    assert "at step 30 already" in rule and "ends at step 29" in rule


def test_teachers_are_asked_about_too(run: Starts) -> None:
    run.start("teacher_weight=0.4")
    assert run.refused()[1] == ["bash 3.sh --set teacher_weight=0.4", "bash 3.sh --set teacher_weight=0.7"]


@pytest.mark.parametrize("typed", ["train_tokens=4000", "max_hours=0.5", "lr=0.0001", "warmup_steps=60"])
def test_each_setting_of_length_and_rate_is_asked_about(run: Starts, typed: str) -> None:
    run.start()
    run.start(typed)
    key = typed.partition("=")[0]
    rule, commands = run.refused()
    assert typed in rule and commands == [f"bash 3.sh --set {typed}", f"bash 3.sh --set {key}=auto"]
    assert key in " ".join(run.refused("weight_decay=0.5")[1]), "another flag does not answer"
    run.start(f"{key}=auto")
    run.start()


def test_what_was_tried_is_not_kept_and_the_first_start_is(run: Starts) -> None:
    first = run.start("weight_decay=0.25")
    assert run.plan().requested.weight_decay == 0.25, "auto is what the run began with"
    tried = run.start("weight_decay=0.5", "lr=0.0001")
    assert (tried.requested.weight_decay, tried.requested.lr) == (0.5, 0.0001)
    commands = run.refused()[1]
    assert sorted(commands[0].split(" --set ")) == ["bash 3.sh", "lr=0.0001", "weight_decay=0.5"], "all, as before"
    assert commands[1] == "bash 3.sh --set lr=auto"
    back = run.plan("lr=auto")
    assert (back.requested.weight_decay, back.requested.lr) == (0.25, first.requested.lr)
    assert back.reasons["lr"] == back.reasons["weight_decay"].partition(";")[0] == "as the run began"
    assert run.resumption.changed["weight_decay"] == (0.5, 0.25)
    run.start(f"lr={0.00011}")
    assert run.plan("lr=auto").requested.lr == first.requested.lr


def test_what_changes_neither_length_nor_rate_is_not_asked_about(run: Starts) -> None:
    run.start("weight_decay=0.3", "save_interval=7")
    assert run.plan()


def test_a_forgotten_config_is_asked_about(run: Starts) -> None:
    run.settings["max_steps"] = 40
    run.start()
    del run.settings["max_steps"]
    assert run.plan(), "the file has changed"
    _, commands = run.refused(config="other.yaml")
    assert commands[0] == "bash 3.sh --set max_steps=40"


def test_a_finished_run_stays_finished_where_its_last_start_tried_something(run: Starts) -> None:
    run.start("max_steps=40")
    plan = run.start("max_steps=40", "weight_decay=0.5")
    facts = {"step": "3_train", "settings": {}, "inputs": {}, "outputs": {}, "facts": {"steps": 1}, "seconds": 1.0}
    made = {**facts, "facts": {"steps": 40}, "created": "", "versions": {}}
    (plan.run_dir / manifest.NAME).write_bytes(orjson.dumps(made))
    last = saved(plan.run_dir, 40, shape=plan.shape.as_json())

    def complete(*typed: str) -> bool:
        run.plan(*typed)
        return run.resumption.is_finished

    assert complete("max_steps=40") and not complete("max_steps=80")
    assert "weight_decay" in fault_of(complete, "max_steps=40", "weight_decay=0.7").rule
    for file in last.glob("optimizer*"):
        file.unlink()
    assert complete("max_steps=40"), "no more is needed of it"
    next(last.glob("weights*")).unlink()
    assert not complete("max_steps=40"), "the model is not there"
