"""Two machines train what one trains; nothing is left of a lost one, and the run goes on from its newest checkpoint."""

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import rounding
import torch
from cluster.hosts import OWN, Host, Training, cluster
from tiny import Trained

LONG = {"train_tokens": 500 * 8 * 32, "max_epochs_per_source": 100, "save_interval": 50}
"""A run of 500 steps, of which a machine does some thirty in a second."""
ENDLESS = {**LONG, "train_tokens": 10**6}
GONE_SECONDS = 30.0
"""From the loss of a machine or a link to the end of the last process."""


def left_by(host: Host, folder: Path, to: Path) -> Trained:
    shutil.copytree(host.seen(folder), to)
    return Trained(to)


@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": "1"},
        {"zero_stage": "2"},
        {"zero_stage": "3"},
        {"zero_stage": "1", "optimizer": "muon", "muon_momentum": "0.95"},
        {"zero_stage": "3", "optimizer": "muon"},
        {"zero_stage": "1", "num_processes": "2", "micro_batch_size": "1"},
        {"zero_stage": "3", "num_processes": "2", "micro_batch_size": "1"},
    ],
    ids=["zero 1", "zero 2", "zero 3", "muon", "muon at 3", "zero 1 by two", "zero 3 by two"],
)
@pytest.mark.parametrize("shared", [False, True], ids=["own folders", "shared folder"])
def test_two_machines_train_what_one_process_trains(
    hosts: list[Host], train: Callable[..., Training], tmp_path: Path, settings: dict[str, str], shared: bool
) -> None:
    """`by two`: two processes on each machine, where ZeRO 3 is hierarchical; and two on one machine."""
    by_two = "num_processes" in settings
    if shared and (settings["zero_stage"] == "2" or by_two):
        pytest.skip("as with the others")
    single = train(hosts[:1], name="alone", **{**settings, "num_processes": "1"})
    assert single.wait() == [0], single.log(0)
    alone = left_by(hosts[0], OWN / "alone", tmp_path / "alone")
    run = train(hosts, shared=shared, **settings)
    assert run.wait() == [0, 0], run.log(0) + run.log(1)
    if shared:
        found = [Trained(tmp_path / "run")]
    else:
        found = [left_by(host, OWN / "run", tmp_path / host.name) for host in hosts]
    assert found[0].losses == pytest.approx(alone.losses, rel=1e-5)
    for each in found:
        rounding.assert_same_weights(each.weights, alone.weights, at_step=len(alone.losses))
    assert ("is shared with machine 0" in run.log(1)) == shared
    assert ("hierarchical: every 2 ranks" in run.log(0)) == (by_two and settings["zero_stage"] == "3")
    if by_two:
        one = train(hosts[:1], name="by two", **settings)
        assert one.wait() == [0], one.log(0)
        assert left_by(hosts[0], OWN / "by two", tmp_path / "by two").losses == pytest.approx(alone.losses, rel=1e-5)


@pytest.mark.parametrize("loss", ["killed machine", "cut link", "cut link and a killed process"])
def test_what_is_lost_ends_the_others(hosts: list[Host], train: Callable[..., Training], loss: str) -> None:
    run = train(hosts, max_restarts=0, **ENDLESS)
    run.wait_for("step 60/")
    started, is_cut = time.monotonic(), loss.startswith("cut link")
    (hosts[1].unplug if is_cut else hosts[1].crash)()
    if "process" in loss:  # its agent would tell the others
        hosts[1].run("pkill", "-KILL", "-f", "zerokara.training.worker")
    assert [run.started[number].wait(60) for number in range(1 + is_cut)] == [1] * (1 + is_cut), run.log(0) + run.log(1)
    seconds = time.monotonic() - started
    assert not any(host.num_processes() for host in hosts[: 1 + is_cut])
    print(f"a {loss}: the last process was gone after {seconds:.1f} s")
    assert seconds < GONE_SECONDS, run.log(0) + run.log(1)
    assert "host-1" in run.log(0) and (not is_cut or "first machine" in run.log(1))


def test_the_machine_that_is_left_goes_on_alone(hosts: list[Host], train: Callable[..., Training]) -> None:
    run = train(hosts, min_nodes=1, **LONG)
    run.wait_for("step 60/")
    hosts[1].crash()
    assert run.started[0].wait(180) == 0, run.log(0)
    assert "resuming from" in run.log(0) and "step 500/" in run.log(0)


def test_a_batch_that_the_ones_left_cannot_share_ends_the_run_with_its_reason(train: Callable[..., Training]) -> None:
    """Three machines lose one: two can share 24 sequences, and cannot share 9."""
    for batch, code in ((24, 0), (9, 1)):
        with cluster(3) as three:
            run = train(three, name=f"batch {batch}", min_nodes=2, global_batch_size=batch, micro_batch_size=1, **LONG)
            run.wait_for("step 60/")
            three[2].crash()
            ends = [run.started[number].wait(120) for number in (0, 1)]
            if code:
                assert all(ends) and "global_batch_size" in run.log(0), run.log(0)
                assert [host.num_processes() for host in three[:2]] == [0, 0]
            else:
                assert ends == [0, 0] and "resuming from" in run.log(0), run.log(0)


def test_a_request_to_stop_either_saves_and_stops_both(hosts: list[Host], train: Callable[..., Training]) -> None:
    for number in (0, 1):
        run = train(hosts, name=f"stopped-{number}", **ENDLESS)
        run.wait_for("step 7/")
        hosts[number].run("pkill", "-INT", "-f", "^[^ ]*python3? -m zerokara.steps train")
        assert run.wait(60) == [130, 130], run.log(0) + run.log(1)
        assert "saved" in run.log(0)
        assert [host.num_processes() for host in hosts] == [0, 0]


def test_ctrl_c_on_a_first_machine_that_waits_ends_the_other_with_one_message(train: Callable[..., Training]) -> None:
    with cluster(3) as three:
        run = train(three, start=(0, 1), global_batch_size=24)
        run.wait_for("looking for", 1)
        time.sleep(2)  # until it has found it
        three[0].run("pkill", "-INT", "-f", "^[^ ]*python3? -m zerokara.steps train")
        stopped = time.monotonic()
        assert run.wait(60) == [130, 1] and time.monotonic() - stopped < GONE_SECONDS / 3
        assert "Traceback" not in run.log(0) + run.log(1) and run.log(1).count("failed: ") == 1, run.log(1)


def test_what_is_lost_is_made_again_alike(hosts: list[Host], train: Callable[..., Training], tmp_path: Path) -> None:
    """A killed process is started again; a machine that lost its disk gets the checkpoint from the other."""
    unbroken = train(hosts, name="unbroken", **LONG)
    assert unbroken.wait() == [0, 0], unbroken.log(0)
    killed = train(hosts, name="killed", max_restarts=1, **LONG)
    killed.wait_for("step 60/")
    hosts[1].run("pkill", "-KILL", "-f", "zerokara.training.worker")
    assert killed.wait() == [0, 0], killed.log(0) + killed.log(1)
    assert "resuming from" in killed.log(0)
    broken = train(hosts, name="broken", **LONG)
    broken.wait_for("step 120/")
    broken.started[0].send_signal(signal.SIGKILL)
    hosts[0].run("pkill", "-KILL", "-f", "zerokara.(steps.train|training.worker)")
    broken.wait(60)
    shutil.rmtree(hosts[0].seen(OWN / "broken"))
    again = train(hosts, name="broken", **LONG)
    assert again.wait() == [0, 0], again.log(0) + again.log(1)
    assert "sends the checkpoint" in again.log(0)
    for host, name in ((hosts[0], "killed"), (hosts[1], "broken")):
        one, other = (left_by(host, OWN / each, tmp_path / f"{host.name}-{each}") for each in ("unbroken", name))
        assert all(torch.equal(other.weights[each], whole) for each, whole in one.weights.items())
        assert name == "broken" or one.losses == other.losses


def test_what_a_killed_command_leaves_behind_saves_and_ends(hosts: list[Host], train: Callable[..., Training]) -> None:
    run = train(hosts, **ENDLESS)
    run.wait_for("step 60/")
    started = time.monotonic()
    hosts[1].run("pkill", "-KILL", "-f", "^[^ ]*python3? -m zerokara.steps train")
    assert run.wait(60)[0] in (1, 130), run.log(0)
    assert "saved" in run.log(0) and time.monotonic() - started < GONE_SECONDS
    assert [host.num_processes() for host in hosts] == [0, 0]
