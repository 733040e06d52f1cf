"""Collectives stay on this machine: the network interface that gloo and NCCL may listen on. Needs no torch.

Left to itself gloo listens on the address of the host's name and NCCL on the first interface that is not the loopback
one: on the local network, where every machine can connect. The processes of one node need neither.
"""

from __future__ import annotations

import os

import psutil


def environment(address: str = "127.0.0.1") -> dict[str, str]:
    """Environment variables that bind gloo and NCCL to the interface of an address; what the user has set stays.

    Empty where no interface has it. NCCL needs sockets for its bootstrap only; on one node the data goes through
    NVLink, PCIe or shared memory all the same (NCCL's guide, NCCL_SOCKET_IFNAME). Its RAS service, which reports a
    job's health on further ports, is off.
    """
    interfaces = psutil.net_if_addrs().items()
    names = [name for name, has in interfaces if address in [each.address.partition("%")[0] for each in has]]
    if not names:
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": names[0], "NCCL_SOCKET_IFNAME": f"={names[0]}", "NCCL_RAS_ENABLE": "0"}
    return {variable: os.environ.get(variable) or value for variable, value in wanted.items()}
