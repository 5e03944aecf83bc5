"""The process group of a learner's ranks: gloo on CPUs, NCCL on GPUs.

Through it go tensors and nothing else: whoever got into a connection could spoil numbers, but have nothing executed.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from estr.runtime.handles import environment


def rank_device(rank: int, ranks: int) -> torch.device:
    """Where a rank of this machine computes: a GPU of its own where there are as many as ranks, else the CPU."""
    gpus = torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= ranks
    return torch.device("cuda", rank) if gpus else torch.device("cpu")


@contextlib.contextmanager
def joined_group(store: Path, rank: int, ranks: int, timeout: float) -> Iterator[torch.device]:
    """Be rank ``rank`` of the group of ``ranks`` processes of this machine that find each other by the file ``store``.

    Gives the device of this rank. gloo listens on the loopback device alone; no port is known beforehand.
    """
    device = rank_device(rank, ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    with environment(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(str(store), ranks),
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=timeout),
        )
    try:
        yield device
    finally:
        dist.destroy_process_group()
