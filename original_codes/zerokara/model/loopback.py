"""Collectives stay on this machine: the network interface that gloo and NCCL may listen on. Needs no torch.

Left to itself gloo listens on the address of the host's name and NCCL on the first interface that is not the loopback
one: on the local network, where every machine can connect. The processes of one node need neither.
"""

from __future__ import annotations

import os
import socket

import psutil


def environment() -> dict[str, str]:
    """Environment variables that bind gloo and NCCL to the loopback interface; a value that the user has set stays.

    Empty where there is no such interface. NCCL needs sockets for its bootstrap only; on one node the data goes through
    NVLink, PCIe or shared memory all the same (NCCL's guide, NCCL_SOCKET_IFNAME). Its RAS service, which reports a
    job's health on further ports, is off.
    """
    interfaces, loopback = psutil.net_if_addrs(), (socket.AF_INET, "127.0.0.1")
    names = [name for name, has in interfaces.items() if loopback in [(each.family, each.address) for each in has]]
    if not names:
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": f"={names[0]}", "NCCL_RAS_ENABLE": "0"}
    return {variable: os.environ.get(variable) or value for variable, value in wanted.items()}
