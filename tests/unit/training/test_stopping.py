"""Requests to stop: who may ask, and when it takes effect."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerokara.training.loop import StopRequest


@pytest.fixture
def listening() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield StopRequest()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_later_it_waits_for_the_edge_and_a_second_ctrl_c_does_not(listening: StopRequest) -> None:
    listening.at_once = False
    assert not listening.poll()
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)  # schedulers ask more than once
    assert listening.poll() and listening.reason == "SIGTERM"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_file_and_other_reasons(listening: StopRequest, tmp_path: Path) -> None:
    stop, file = listening, tmp_path / "STOP"
    stop.watch_file(file)
    file.touch()
    stop.reasons.append(lambda: "max_hours")
    assert stop.poll() and stop.reason == f"the file {file}"  # the first reason stays
