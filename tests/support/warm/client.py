"""Stands in for the Python interpreter, with the same arguments: the program runs in a fork of `server`.

The fixture of this package puts a first line and the name of the server's socket, `PLACE`, before this text.
"""

import json
import os
import signal
import socket
import sys

OWN = ("BASH_ENV", "WARM_PYTHON")


def main() -> int:
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    request = {"arguments": sys.argv[1:], "environment": environment, "folder": os.getcwd()}
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(PLACE)  # type: ignore[name-defined]  # noqa: F821
        socket.send_fds(connection, [b"%08x" % len(text)], [0, 1, 2])
        connection.sendall(text)
        answers = connection.makefile()
        pid = int(answers.readline())
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        return int(answers.readline())


status = main()
if status < 0:  # a signal ended the program
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
