"""A machine that falls silent, and a store that does not answer, are lost after a while and not before."""

from __future__ import annotations

import threading
import time

import pytest
from torch.distributed import HashStore

from zerokara.training.nodes import agent
from zerokara.training.nodes.agent import Heartbeat


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(agent, "LOST_SECONDS", 0.5)


def of_two(store: HashStore, also: object = None) -> tuple[Heartbeat, Heartbeat]:
    nothing = lambda: None  # noqa: E731
    return Heartbeat(store, 0, {1: "beta"}, also or nothing), Heartbeat(store, 1, {0: "alpha"}, nothing)  # type: ignore[arg-type]


def test_the_living_are_not_lost() -> None:
    one, other = of_two(HashStore())
    with one, other:
        for _ in range(20):
            time.sleep(0.05)
            assert not one.lost() and not other.lost()
        assert one.reaches_store


def test_one_that_falls_silent_is_named() -> None:
    one, other = of_two(HashStore())
    with one:
        with other:
            time.sleep(0.2)
            assert not one.lost()
        time.sleep(0.8)
        assert "beta" in one.lost() and one.reaches_store


def test_one_that_never_came_is_named() -> None:
    one, _ = of_two(HashStore())
    with one:
        time.sleep(0.8)
        assert "beta" in one.lost()


def test_a_request_that_hangs_is_a_lost_first_machine() -> None:
    hangs = threading.Event()
    calls = []

    def also() -> None:
        calls.append(1)
        if len(calls) > 3:
            hangs.wait(10)

    one, other = of_two(HashStore(), also)
    with one, other:
        time.sleep(1.0)
        assert not one.reaches_store and "first machine" in one.lost()
        hangs.set()
