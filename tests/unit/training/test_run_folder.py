"""The identity of a run folder, --redo, and its locks."""

import fcntl
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from configs import fault_of
from made_checkpoints import saved
from programs import run_program

from zerokara import checkpoint
from zerokara.base.errors import RunError, UserError, refuse
from zerokara.config.loading import RESOLVED_NAME, load
from zerokara.config.pretrain_config import PretrainConfig
from zerokara.steps import command, train
from zerokara.tokenizer import MODEL_NAME
from zerokara.training import launching
from zerokara.training.planning import earlier_run, plan_table, run_folder, run_plan
from zerokara.training.planning.run_plan import RunPlan

Plan = Callable[..., RunPlan]


def begin(plan: RunPlan) -> Path:
    """A run folder as a run leaves it that was stopped after its first step."""
    run_folder.claim(plan)
    checkpoint.folder_of(plan.run_dir, 1).mkdir()
    return plan.run_dir


def changes(plan: RunPlan) -> Mapping[str, tuple[Any, Any]]:
    """Check that a plan goes on with the run in its folder, and return the settings that have changed."""
    earlier = run_folder.read_earlier(plan.requested)
    if earlier is None:
        return {}
    resumption = earlier_run.resumption(plan, earlier, "bash 3.sh")
    refuse(resumption.faults)
    return resumption.changed


def assert_another_run(plan: RunPlan, *facts: str) -> None:
    """See that `output_model_dir` is refused for another run's facts."""
    fault = fault_of(changes, plan)
    assert fault.key == "output_model_dir" and all(fact in fault.rule for fact in facts) and "--redo" in fault.remedy


def redo(plan: RunPlan) -> list[str]:
    """Check that the run in a plan's folder may be set aside, and return what is told of it."""
    earlier = run_folder.read_earlier(plan.requested)
    refuse(earlier_run.redo_faults(plan) if earlier else [])
    return launching.redo_notes(plan, earlier) if earlier else []


@pytest.mark.parametrize("name", ["run.json", "plan.json"])
@pytest.mark.parametrize("content", [b"\0" * 100, b"null", b"[]"])
def test_a_damaged_record_is_named(plan_of: Plan, name: str, content: bytes) -> None:
    (begin(plan_of()) / name).write_bytes(content)
    fault = fault_of(changes, plan_of())
    assert fault.where.endswith(name) and "is damaged" in fault.rule and "copy" in fault.remedy


def test_a_changed_setting_is_announced_and_another_shape_refused(plan_of: Plan) -> None:
    begin(plan_of())
    assert changes(plan_of()) == {}
    assert changes(plan_of("lr=0.02", "num_workers=1")) == {"lr": (0.01, 0.02)}
    assert_another_run(plan_of("num_layers=3"), "num_layers", "2", "3")


@pytest.mark.parametrize(
    ("settings", "goes_further"),
    [
        (("seq_len=64", "rope_theta=50000"), True),
        (("seq_len=16",), False),
        (("seq_len=64", "architecture=gpt2", "num_kv_heads=auto"), False),
    ],
)
def test_longer_sequences_are_another_run_that_starts_from_the_export(
    plan_of: Plan, settings: tuple[str, ...], goes_further: bool
) -> None:
    """Of rotary positions; learned ones end where the first run's sequences do."""
    begin(plan_of(*settings, "seq_len=32", "rope_theta=10000"))
    assert_another_run(longer := plan_of(*settings), "seq_len was 32, is now ")
    assert ("init_from" in fault_of(changes, longer).remedy) == goes_further


def test_another_curriculum_is_refused_and_a_longer_one_goes_on(plan_of: Plan) -> None:
    def staged(stages: str, *others: str) -> RunPlan:
        return plan_of("train_tokens=auto", f"stages={stages}", *others)

    begin(plan_of())
    assert_another_run(staged("[{tokens: rest}]"), "stages", "source_weights")
    assert_another_run(plan_of("intra_document_masking=true"), "intra_document_masking", "False", "True")
    begun = "[{tokens: 640, source_weights: [2]}, {tokens: 640, order: shuffle}]"
    two_passes = begun.replace("640, order", "12800, order")
    shutil.rmtree(plan_of().run_dir)
    begin(staged(begun))
    # What was done stays what it was: a name, a limit, weights in the same proportion, a stage behind the last.
    renamed = begun.replace("{tokens: 640, s", "{name: first, tokens: 640, s")
    assert [*changes(staged(renamed))] == ["stages"]
    assert changes(staged(begun.replace("[2]", "[4]"), "max_epochs_per_source=3"))
    assert changes(staged(begun.replace("}]", "}, {tokens: rest}]")))
    assert changes(staged(begun.replace("}]", "}, {tokens: rest, order: sequential}]")))
    # The rest is another order.
    for other in (two_passes, begun.replace("640, s", "960, s"), begun[:-1].rpartition(", {")[0] + "]"):
        assert_another_run(staged(other), "stages", "source_weights")


def test_a_start_that_was_aborted_before_its_first_checkpoint_blocks_nothing(plan_of: Plan) -> None:
    first, other = plan_of(), plan_of("num_layers=3", "seed=7")
    run_dir = first.run_dir
    run_dir.mkdir()
    # Killed while it wrote its first file, and while it held the folder.
    for name in ("run.json.123.partial", *run_folder.LOCK_NAMES):
        (run_dir / name).touch()
    assert changes(first) == {}
    run_folder.claim(first)
    (run_dir / "tokenizer.model").write_bytes(b"of the first configuration")
    (run_dir / "metrics.jsonl").write_bytes(b'{"step":1,"loss":6.1}\n')
    assert not changes(other) and not redo(other)
    run_folder.claim(other)
    assert (run_dir / "tokenizer.model").read_bytes() == Path(other.requested.input_tokenizer_file).read_bytes()


def test_differences_are_told_by_the_keys_of_the_yaml(plan_of: Plan) -> None:
    begin(plan := plan_of())
    (earlier,) = filter(None, [run_folder.read_earlier(plan.requested)])
    was = {"curriculum": None, **dict.fromkeys(earlier_run.identity_of(plan), "another"), "seq_len": 1}
    (fault,) = earlier_run.resume_faults(plan, replace(earlier, identity=was))
    keys = [words.split()[0].rstrip(",") for words in fault.rule.partition(": ")[2].split("; ")]
    assert {*keys} <= {*PretrainConfig.model_fields} - {"target_len"} and keys.count("seq_len") == 1


@pytest.mark.parametrize("is_link", [False, True])
def test_redo_sets_a_run_aside_and_says_so(plan_of: Plan, tmp_path: Path, is_link: bool) -> None:
    """Of a linked run, what the link leads to."""
    plan, real = plan_of(), tmp_path / ("there" if is_link else "run")
    if is_link:
        plan.run_dir.symlink_to(real)
        with run_folder.command_lock(plan.requested):  # as after a kill between the two renames
            assert real.is_dir()
        real.mkdir()
    begin(plan)
    (real / "notes.txt").write_text("mine", encoding="utf-8")
    for number in (1, 2):
        old = real.with_name(f"{real.name}.old-{number}")
        lines = " ".join(redo(plan))
        assert str(old) in lines and "of step 1" in lines and "complete" not in lines
        with run_folder.command_lock(plan.requested):
            run_folder.set_aside(plan.run_dir)
            assert [path.name for path in real.iterdir()] == [run_folder.COMMAND_LOCK_NAME]  # still held
            begin(plan)
        assert checkpoint.all_steps(old) == checkpoint.all_steps(real) == [1] and not list(old.glob("*.lock"))
    assert (real.with_name(f"{real.name}.old-1") / "notes.txt").read_text(encoding="utf-8") == "mine"
    aside = [shlex.quote(str(real.with_name(f"{real.name}.old-{number}"))) for number in (1, 2)]
    assert any(text.endswith(f"rm -r {' '.join(aside)}") for _, text in plan_table.rows(plan))
    assert plan.run_dir.is_symlink() == is_link
    facts = {"step": "3_train", "settings": {}, "inputs": {}, "outputs": {}, "facts": {"steps": 1}, "seconds": 1.0}
    (real / "manifest.json").write_bytes(orjson.dumps({**facts, "created": "", "versions": {}}))
    assert "complete" not in redo(plan)[0], "the checkpoint of its end is not there"
    shutil.rmtree(real / "global_step1")
    saved(real, 1, shape=plan.shape.as_json())
    assert "complete" in redo(plan)[0]


def test_the_command_that_resumes_has_no_redo_once_the_old_run_is_set_aside(
    plan_of: Plan, tiny_data: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pasted with it, it would set aside the run that it was to resume; without it too early, resume the old one."""

    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    run_dir = begin(plan_of())
    typed = ["--config", tiny_data["config"], "--set", f"output_model_dir={run_dir}", "--set", "num_processes=1"]
    monkeypatch.setenv(command.COMMAND_NAME, "bash 3_train_node1.sh")
    monkeypatch.setattr(launching, "spawn", interrupted)

    def printed(code: int) -> list[str]:
        assert train.main(["--redo", *typed]) == code
        return shlex.split(capsys.readouterr().err.rpartition(": ")[2])[2:]

    with monkeypatch.context() as stopped_early:
        stopped_early.setattr(run_folder, "set_aside", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        assert printed(130) == ["--redo", *typed]
    assert not run_dir.with_name("run.old-1").exists()
    assert printed(130) == typed
    assert checkpoint.all_steps(run_dir.with_name("run.old-1")) == [1] and not checkpoint.all_steps(run_dir)
    checkpoint.folder_of(run_dir, 1).mkdir()
    monkeypatch.setattr(launching, "spawn", lambda *_, **__: 1)
    assert printed(1) == typed and run_dir.with_name("run.old-2").exists()


def test_redo_takes_nothing_away_that_the_new_run_reads(plan_of: Plan, tmp_path: Path) -> None:
    begin(plan_of())
    assert redo(plan_of(f"init_from={tmp_path / 'run_hf'}"))
    text = f"input_jsonl=[{tmp_path / 'run' / 'text'}, '@{tmp_path / 'run' / 'list.txt'}']"
    for setting in (f"init_from={tmp_path / 'run' / 'exported'}", text):
        assert fault_of(redo, plan_of(setting)).key == setting.partition("=")[0]
    # The configuration that the run itself has saved is at hand, and would be away when the training processes read it.
    resolved = load(PretrainConfig, tmp_path / "run" / RESOLVED_NAME)
    assert fault_of(redo, run_plan.make_plan(resolved)).where == str(resolved.path)


def test_training_processes_that_a_killed_command_left_are_waited_for(
    plan_of: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of()
    run_folder.claim(plan)
    monkeypatch.setattr(run_folder, "LOCK_SECONDS", 1)
    with run_folder.training_lock(plan.run_dir):
        for again in (run_folder.training_lock(plan.run_dir), run_folder.command_lock(plan.requested)):
            with pytest.raises(RunError, match=str(plan.run_dir)), again:
                raise AssertionError("it must not begin")
            assert str(plan.run_dir) in capsys.readouterr().out
    with run_folder.command_lock(plan.requested), run_folder.training_lock(plan.run_dir):
        pass  # by the training process of this command


def test_a_folder_that_is_refused_or_aborted_is_gone_again(plan_of: Plan, tmp_path: Path) -> None:
    plan = plan_of(f"output_model_dir={tmp_path / 'models' / 'it' / 'run'}")
    deep = plan.requested
    with pytest.raises(KeyboardInterrupt), run_folder.command_lock(deep):
        raise KeyboardInterrupt
    assert not (tmp_path / "models").exists()
    with run_folder.command_lock(deep):
        pass  # a dry run
    assert not (tmp_path / "models").exists()
    plan = replace(plan, data=replace(plan.data, run_files={"chat_template.jinja": "{{ a }}"}))
    with run_folder.command_lock(deep):
        run_folder.claim(plan)
    names = {path.name for path in plan.run_dir.iterdir()} - {"chat_template.jinja"}
    assert names == {run_folder.IDENTITY_NAME, RESOLVED_NAME, run_plan.PLAN_NAME, MODEL_NAME}
    assert (plan.run_dir / "chat_template.jinja").read_text(encoding="utf-8") == "{{ a }}"


def test_a_second_command_is_told_at_once_who_holds_the_folder(plan_of: Plan, tiny_data: dict[str, str]) -> None:
    """With the process id, and before torch is loaded."""
    plan = plan_of()
    begin(plan)
    command = ["--config", tiny_data["config"], "--set", f"output_model_dir={plan.run_dir}"]
    calls = "codes = [train.main([*sys.argv[1:], *more]) for more in ([], ['--redo'], ['--dry-run'])]"
    program = f"import sys; from zerokara.steps import train; {calls}; print(*codes, 'torch' in sys.modules)"
    with run_folder.command_lock(plan.requested):
        before = {path: path.stat().st_mtime_ns for path in plan.run_dir.rglob("*")}
        done = run_program(program, *command)
        assert done.stdout.split() == ["2", "2", "2", "False"], done.stderr
        assert done.stderr.count(f"output_model_dir = {plan.run_dir}: ") == 3
        assert done.stderr.count(f" process {os.getpid()};") == 3
        assert {path: path.stat().st_mtime_ns for path in plan.run_dir.rglob("*")} == before
        with pytest.raises(UserError, match=f"by process {os.getpid()}"), run_folder.command_lock(plan.requested):
            raise AssertionError("it must not begin")
        (plan.run_dir / run_folder.COMMAND_LOCK_NAME).write_bytes(orjson.dumps({"pid": 7, "host": "node7"}))
        with pytest.raises(UserError, match="process 7 on node7") as caught, run_folder.command_lock(plan.requested):
            raise AssertionError("it must not begin")
        assert caught.value.faults[0].key == "output_model_dir" and "kill" not in caught.value.faults[0].remedy
    (plan.run_dir / run_folder.COMMAND_LOCK_NAME).touch()  # of a command that was killed
    with run_folder.command_lock(plan.requested):
        pass


def test_what_the_kernel_has_still_to_clear_up_behind_a_killed_command_is_waited_for(plan_of: Plan) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    config = plan_of().requested
    Path(config.output_model_dir).mkdir()
    path = Path(config.output_model_dir) / run_folder.COMMAND_LOCK_NAME
    path.write_bytes(orjson.dumps({"pid": ended.pid, "host": socket.gethostname()}))
    with open(path, "rb") as still_there:
        fcntl.flock(still_there, fcntl.LOCK_EX)
        cleared = threading.Timer(0.3, lambda: fcntl.flock(still_there, fcntl.LOCK_UN))
        cleared.start()
        with run_folder.command_lock(config):
            cleared.join()


def test_an_evaluation_does_without_the_teachers(plan_of: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned = list[RunPlan]()
    monkeypatch.setattr(launching, "spawn", lambda plan, *_: spawned.append(plan))
    monkeypatch.setattr(run_folder, "find_checkpoint", lambda plan, name: plan.run_dir / name)
    launching.evaluate(plan_of("teachers=[models/gone_hf]"), None, "global_step1")
    assert [plan.resolved.teachers for plan in spawned] == [()]


@pytest.mark.parametrize("name", ["run.json", "global_step1/weights.safetensors"])
def test_a_file_is_no_checkpoint(plan_of: Plan, name: str) -> None:
    run_dir = begin(plan_of())
    (run_dir / "global_step1/weights.safetensors").write_bytes(b"\xff\x00")
    fault = fault_of(run_folder.find_checkpoint, plan_of(), name)
    assert fault.value == name and "which has the steps 1" in fault.rule


def test_what_to_do_without_validation_data(plan_of: Plan) -> None:
    plan = plan_of()
    without = replace(plan, data=replace(plan.data, num_valid_tokens=0))
    fault = fault_of(run_folder.find_checkpoint, without, "")
    assert fault.key == "valid_fraction" and "step 2 with --redo; step 7" in str(fault)


@pytest.mark.parametrize(
    ("key", "setting", "fact", "of_facts"),
    [
        ("init_from", "init_from={}", earlier_run.INIT_FACT, str),
        ("teachers", "teachers=[{}]", earlier_run.TEACHERS_FACT, lambda found: [found]),
    ],
)
def test_other_weights_of_another_model_are_told_and_end_no_run_that_has_begun(
    plan_of: Plan, tmp_path: Path, key: str, setting: str, fact: str, of_facts: Callable[[str], Any]
) -> None:
    """They may be others at the same place."""
    weights = tmp_path / "model" / "model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"first")
    plan = plan_of(setting.format(weights.parent))
    run_folder.claim(plan)
    saved(plan.run_dir, 1, facts={fact: of_facts(earlier_run.weights_id(str(weights.parent)))})
    assert changes(plan) == {}
    weights.write_bytes(b"other")
    assert "weights" in changes(plan)[key][1] and str(weights.parent) in changes(plan)[key][1]
    weights.unlink()
    assert changes(plan) == {}, "they were read long ago, or nobody asks for them any more"


def test_only_a_stop_file_of_an_earlier_start_is_deleted(plan_of: Plan) -> None:
    """One that comes while the processes start is obeyed."""
    config = plan_of().requested
    stop = begin(plan_of()) / "STOP"
    stop.touch()
    with run_folder.command_lock(config):
        assert not stop.exists()


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe", b"global_step9\n"])
def test_a_damaged_name_of_the_best_checkpoint_is_none(tmp_path: Path, content: bytes) -> None:
    saved(tmp_path, 1)
    (tmp_path / "best").write_bytes(content)
    assert run_folder.checkpoint.best(tmp_path) is None
