"""A network of namespaces with delayed packets, for kernels without netem.

Every rank runs in a network namespace of its own, whose only link is a TUN device. A thread in this
process reads each packet from the sender's device and writes it to the receiver's after the delay.
TCP and everything above it is real. Linux, as root.
"""

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_HEADER = 0x0001 | 0x1000
_MTU = 60_000  # few large packets, since the thread handles each of them
_DEVICE = "link0"
_SEND_BUFFER = "net.ipv4.tcp_wmem=4096 1048576 33554432"


def why_not() -> str | None:
    """Return why no such network can be made here, or None if it can."""
    if os.geteuid() != 0:
        return "it takes root to make network namespaces"
    if shutil.which("ip") is None:
        return "it takes the command ip (apt-get install iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    return None


class DelayedNetwork:
    """Namespaces that reach one another through this process.

    Attributes:
        delay: Seconds of a packet between namespaces; may change at any time.
        carried: Bytes by the numbers of sender and receiver, headers included.

    Args:
        size: Number of namespaces.
    """

    def __init__(self, size: int) -> None:
        self.delay = 0.0
        self.carried: Counter[tuple[int, int]] = Counter()
        self._names = [f"llm-{os.getpid()}-{number}" for number in range(size)]
        self._devices: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="link", daemon=True)

    def address(self, number: int) -> str:
        """Return the address of a namespace."""
        return f"10.99.0.{number + 1}"

    def environment(self) -> dict[str, str]:
        """Return the variables by which gloo finds the link of a namespace."""
        return {"GLOO_SOCKET_IFNAME": _DEVICE, "MASTER_ADDR": self.address(0)}

    def inside(self, number: int, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one in a namespace."""
        return ["ip", "netns", "exec", self._names[number], *command]

    @contextlib.contextmanager
    def up(self) -> Iterator["DelayedNetwork"]:
        """Make the network for the time of the context."""
        try:
            for number, name in enumerate(self._names):
                _run("ip", "netns", "add", name)
                self._devices.append(_open_device(name))
                for command in (
                    "ip link set lo up",
                    f"ip addr add {self.address(number)}/24 dev {_DEVICE}",
                    f"ip link set {_DEVICE} mtu {_MTU} up",
                    # Idle connections must not fall back to slow start.
                    "sysctl -q -w net.ipv4.tcp_slow_start_after_idle=0",
                ):
                    _run(*self.inside(number, command.split()))
                # Send buffers for the bandwidth-delay product of a long link.
                _run(*self.inside(number, ["sysctl", "-q", "-w", _SEND_BUFFER]))
            self._thread.start()
            yield self
        finally:
            self._ended.set()
            if self._thread.is_alive():
                self._thread.join()
            for device in self._devices:
                os.close(device)
            for name in self._names:
                subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def _carry(self) -> None:
        """Deliver packets in the order of sending, since the delay is the same for all."""
        waiting: deque[tuple[float, int, int, bytes]] = deque()
        while not self._ended.is_set():
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, source, target, packet = waiting.popleft()
                self.carried[source, target] += len(packet)
                with contextlib.suppress(OSError):  # a device without a reader drops it
                    os.write(self._devices[target], packet)
            until = min(0.05, waiting[0][0] - now) if waiting else 0.05
            readable, _, _ = select.select(self._devices, [], [], max(0.0, until))
            now = time.monotonic()
            for device in readable:
                packet = os.read(device, 65536)
                if packet[0] >> 4 != 4:  # IPv6 neighbour discovery
                    continue
                target = packet[19] - 1
                if 0 <= target < len(self._devices):
                    waiting.append((now + self.delay, self._devices.index(device), target, packet))


def _open_device(namespace: str) -> int:
    """Open a TUN device in a namespace; return its file descriptor."""
    opened: list[int] = []

    def work() -> None:  # setns moves only the calling thread
        place = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(place, _CLONE_NEWNET) == 0:
            device = os.open("/dev/net/tun", os.O_RDWR)
            request = struct.pack("16sH", _DEVICE.encode(), _IFF_TUN_WITHOUT_HEADER)
            fcntl.ioctl(device, _TUNSETIFF, request)
            opened.append(device)
        os.close(place)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if not opened:
        raise OSError(f"no TUN device could be made in the namespace {namespace}")
    return opened[0]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
