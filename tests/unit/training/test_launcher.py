"""The training processes of a node find each other, whatever other programs do."""

from __future__ import annotations

import datetime
import errno
import socket

import pytest
from torch.distributed import TCPStore

from zerokara.training.processes.launcher import MeetingPlace


def test_nobody_else_gets_the_port_of_the_meeting_place() -> None:
    meeting = MeetingPlace()
    for address in ("127.0.0.1", ""):
        with socket.socket() as other, pytest.raises(OSError) as refused:
            other.bind((address, meeting.port))
        assert refused.value.errno == errno.EADDRINUSE
    with meeting.opened():
        assert meeting.environment["MASTER_PORT"] == str(meeting.port)
        soon = datetime.timedelta(seconds=10)
        one, other_one = (TCPStore("127.0.0.1", meeting.port, is_master=False, timeout=soon) for _ in range(2))
        one.set("word", "said")
        assert other_one.get("word") == b"said"


def test_it_is_open_to_this_machine_alone() -> None:
    meeting = MeetingPlace()
    with meeting.opened(), open("/proc/net/tcp", encoding="ascii") as table:
        listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
    assert [address for address in listening if address.endswith(f":{meeting.port:04X}")] == [
        f"0100007F:{meeting.port:04X}"
    ]
