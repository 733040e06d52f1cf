"""The links between machines, measured pair by pair: whether they reach each other, how fast, and how clocks differ.

Each pair speaks for itself, by a TCP connection to a port that one opens for it, and a machine is in one pair at a
time, so that none slows another down. N machines take N - 1 rounds (the round-robin tournament of chess clubs: machine
0 sits still, the others move on by one seat), each of about `SECONDS`. Without torch.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

SECONDS = 0.5
"""For which a pair sends, each way at the same time."""
TIMEOUT_SECONDS = 10.0
"""How long one waits for the other."""
_CHUNK = b"\0" * 2**20
_TIMES = struct.Struct("<dd")


@dataclass(frozen=True)
class Link:
    """What one machine found of its link to another."""

    bytes_a_second: float = 0.0
    """Received, while as much was sent."""
    round_trip_seconds: float = 0.0
    clock_seconds: float = 0.0
    """By how much the other's clock is ahead; uncertain by half of a round trip."""
    fault: str = ""
    """Why the two do not reach each other."""


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Who meets whom, round by round: each pair of `count` once, and nobody twice in a round."""
    seats = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def listen(address: str) -> socket.socket:
    """Open a port for one pair, on one address of this machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.create_server((address, 0), family=family, backlog=1)
    server.settimeout(TIMEOUT_SECONDS)
    return server


def measure_as_server(server: socket.socket) -> Link:
    """Measure the link to whoever connects to `listen`."""
    try:
        connection, _ = server.accept()
        with connection:
            return _measure(connection)
    except OSError as error:
        return Link(fault=_reason(error))


def measure_as_client(host: str, port: int) -> Link:
    """Measure the link to a machine that listens."""
    try:
        with socket.create_connection((host, port), TIMEOUT_SECONDS) as connection:
            return _measure(connection)
    except OSError as error:
        return Link(fault=_reason(error))


def _measure(connection: socket.socket) -> Link:
    """Both sides do the same: exchange times, then send and receive as much as goes in `SECONDS`."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(TIMEOUT_SECONDS)
    round_trip, ahead = min(_clocks(connection) for _ in range(5))
    received, seconds = _flood(connection)
    return Link(received / seconds, round_trip, ahead)


def _clocks(connection: socket.socket) -> tuple[float, float]:
    """A round trip in seconds, and by how much the other's clock is ahead.

    Each sends its time, and gets it back with the other's: NTP's first four stamps, of which two fall together.
    """
    sent = time.time()
    connection.sendall(_TIMES.pack(sent, 0))
    theirs, _ = _TIMES.unpack(_exactly(connection, _TIMES.size))
    connection.sendall(_TIMES.pack(theirs, time.time()))
    _, answered = _TIMES.unpack(_exactly(connection, _TIMES.size))
    round_trip = time.time() - sent
    return round_trip, answered - (sent + round_trip / 2)


def _flood(connection: socket.socket) -> tuple[int, float]:
    """Bytes received, and in how many seconds, while as many as possible are sent."""
    connection.setblocking(False)
    started, received, sending, receiving = time.perf_counter(), 0, True, True
    last = started
    buffer = bytearray(len(_CHUNK))
    while sending or receiving:
        now = time.perf_counter()
        if sending and now - started > SECONDS:
            connection.shutdown(socket.SHUT_WR)
            sending = False
        moved = 0
        if receiving:
            try:
                moved = connection.recv_into(buffer)
                receiving, received = moved > 0, received + moved
                last = now if moved else last
            except BlockingIOError:
                pass
        if sending:
            with contextlib.suppress(BlockingIOError):
                moved += connection.send(_CHUNK)
        if not moved:
            if now - started > SECONDS + TIMEOUT_SECONDS:
                raise TimeoutError("it stopped answering")
            time.sleep(0.0002)
    return received, max(last - started, 1e-6)


def _exactly(connection: socket.socket, number: int) -> bytes:
    content = b""
    while len(content) < number:
        if not (part := connection.recv(number - len(content))):
            raise ConnectionError("the connection was closed")
        content += part
    return content


def _reason(error: OSError) -> str:
    return "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error))


def pairs_of(index: int, count: int) -> Iterator[tuple[int, int]]:
    """The number of each round in which `index` meets another, and that other."""
    for number, pairs in enumerate(rounds(count)):
        for one, other in pairs:
            if index in (one, other):
                yield number, other if index == one else one
