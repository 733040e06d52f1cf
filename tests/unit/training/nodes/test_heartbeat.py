"""A machine that falls silent, and a store that does not answer, are lost after a while and not before."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from zerokara.training.nodes import agent
from zerokara.training.nodes.agent import Heartbeat
from zerokara.training.nodes.meeting import LostFirstMachine

NOTHING = lambda: None  # noqa: E731


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(agent, "LOST_SECONDS", 0.5)


def test_the_living_are_not_lost_and_one_that_falls_silent_or_never_came_is_named() -> None:
    store = HashStore()
    one, other = Heartbeat(store, 0, {1: "beta"}, NOTHING), Heartbeat(store, 1, {0: "alpha"}, NOTHING)
    alone = Heartbeat(HashStore(), 0, {1: "gamma"}, NOTHING)
    for _ in range(10):
        time.sleep(0.1)
        assert not one.lost() and not other.lost()
    assert "gamma" in str(alone.lost())
    other.stop()
    time.sleep(0.8)
    assert "beta" in str(one.lost()) and not isinstance(one.lost(), LostFirstMachine)
    one.stop()
    alone.stop()


def test_a_request_that_hangs_is_a_lost_first_machine() -> None:
    hangs, calls = threading.Event(), []

    def on_beat() -> None:
        calls.append(1)
        if len(calls) > 3:
            hangs.wait(10)

    store = HashStore()
    one, other = Heartbeat(store, 1, {0: "alpha"}, on_beat), Heartbeat(store, 0, {1: "beta"}, NOTHING)
    time.sleep(1.0)
    assert isinstance(one.lost(), LostFirstMachine)
    hangs.set()
    one.stop()
    other.stop()
