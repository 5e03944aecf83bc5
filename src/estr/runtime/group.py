"""The process group of a learner's ranks: gloo on CPUs, NCCL on GPUs.

Through it go tensors and nothing else: whoever got into a connection could spoil numbers, but have nothing executed.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from estr.errors import RunError
from estr.runtime.handles import environment

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of a group find each other: a file, where all are on this machine and talk through its loopback
    device; or an address of rank 0's machine, at which it listens and which the others can reach.

    ``gpus``: each rank has a GPU of its own as the only one it sees, as ranks of a cluster have.
    """

    file: str = ""
    host: str = ""
    port: int = 0
    gpus: bool = False

    def store(self, ranks: int, timeout: datetime.timedelta, listener: socket.socket | None) -> dist.Store:
        if self.file:
            return dist.FileStore(self.file, ranks)
        return dist.TCPStore(
            self.host,
            self.port,
            ranks,
            is_master=listener is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )

    def interface(self) -> str:
        """The network device through which the others are reached."""
        if self.file:
            return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.host, self.port))  # sends nothing
            own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            if _address(name) == own:
                return name
        raise RunError(f"no network device has {own} as its first address, from which {self.host} would be reached")

    def device(self, rank: int, ranks: int) -> torch.device:
        """Where a rank computes: a GPU of its own where there are as many as ranks, else the CPU."""
        if self.host:
            return torch.device("cuda", 0) if self.gpus else torch.device("cpu")
        gpus = torch.cuda.is_available() and dist.is_nccl_available() and torch.cuda.device_count() >= ranks
        return torch.device("cuda", rank) if gpus else torch.device("cpu")


@contextlib.contextmanager
def joined_group(
    meeting: Meeting, rank: int, ranks: int, timeout: float, listener: socket.socket | None = None
) -> Iterator[torch.device]:
    """Be rank ``rank`` of a group of ``ranks`` processes; gives the device of this rank.

    ``listener``: rank 0's socket at the meeting's port, which is taken over; PyTorch's own listens at every address.
    """
    device, limit = meeting.device(rank, ranks), datetime.timedelta(seconds=timeout)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    interface = meeting.interface()
    with environment(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=meeting.store(ranks, limit, listener),
            rank=rank,
            world_size=ranks,
            timeout=limit,
        )
    try:
        yield device
    finally:
        dist.destroy_process_group()


def listen(host: str) -> socket.socket:
    """A socket at some free port of one of this machine's addresses, for a meeting there."""
    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen(128)
    return listener


def _address(interface: str) -> str:
    """The IPv4 address of a network device, empty where it has none."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])
