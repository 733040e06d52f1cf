"""The measurement of links, between two ends on this machine."""

from __future__ import annotations

import itertools
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from zerokara.training.nodes import links


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_each_pair_meets_once_and_nobody_twice_in_a_round(count: int) -> None:
    rounds = links.rounds(count)
    met = [pair for pairs in rounds for pair in pairs]
    assert sorted(met) == list(itertools.combinations(range(count), 2))
    for pairs in rounds:
        taking_part = [index for pair in pairs for index in pair]
        assert len(taking_part) == len(set(taking_part))
    for index in range(count):
        assert sorted(other for _, other in links.pairs_of(index, count)) == [i for i in range(count) if i != index]
        assert all(
            (min(index, other), max(index, other)) in rounds[number] for number, other in links.pairs_of(index, count)
        )


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SECONDS", 0.1)
    monkeypatch.setattr(links, "TIMEOUT_SECONDS", 0.5)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("ahead", [0.0, 100.0])
def test_both_ends_find_speed_and_clocks(monkeypatch: pytest.MonkeyPatch, ahead: float) -> None:
    server_thread = threading.local()
    real = links.time.time
    monkeypatch.setattr(
        links.time, "time", lambda: real() + (ahead if getattr(server_thread, "is_server", False) else 0)
    )

    def serve(server: socket.socket) -> links.Link:
        server_thread.is_server = True
        return links.measure_as_server(server)

    with links.listen("127.0.0.1") as server, ThreadPoolExecutor(1) as thread:
        theirs = thread.submit(serve, server)
        ours = links.measure_as_client(*server.getsockname())
        other = theirs.result(10)
    assert not ours.fault and not other.fault
    assert min(ours.bytes_a_second, other.bytes_a_second) > 1e6
    assert ours.clock_seconds == pytest.approx(ahead, abs=0.1)
    assert other.clock_seconds == pytest.approx(-ahead, abs=0.1)


@pytest.mark.usefixtures("quick")
def test_who_does_not_answer_is_told() -> None:
    with links.listen("127.0.0.1") as server:
        assert links.measure_as_server(server).fault == "no answer"
        port = server.getsockname()[1]
    assert links.measure_as_client("127.0.0.1", port).fault == "Connection refused"


@pytest.mark.usefixtures("quick")
def test_one_that_falls_silent_is_told() -> None:
    with links.listen("127.0.0.1") as server, ThreadPoolExecutor(1) as thread:
        found = thread.submit(links.measure_as_client, *server.getsockname())
        connection, _ = server.accept()
        with connection:
            assert found.result(10).fault == "no answer"
