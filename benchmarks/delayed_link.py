"""A network of namespaces whose packets take their time: what netem does, for a kernel without it.

Every rank runs in a network namespace of its own, with a TUN device for its only way out. A thread
here takes each packet from the device of its sender and hands it to that of its addressee when the
delay has passed. TCP, and what is built on it, is the real one. Linux, as root.
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
_MTU = 60_000  # few large packets: each costs a turn of the thread
_DEVICE = "link0"
_SEND_BUFFER = "net.ipv4.tcp_wmem=4096 1048576 33554432"


def why_not() -> str | None:
    """Why there can be no such network here; None where there can."""
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
        delay: Seconds that a packet takes from one to another; may change at any time.
        carried: Bytes by the numbers of the sender and of the addressee, headers included.

    Args:
        size: How many namespaces.
    """

    def __init__(self, size: int) -> None:
        self.delay = 0.0
        self.carried: Counter[tuple[int, int]] = Counter()
        self._names = [f"llm-{os.getpid()}-{number}" for number in range(size)]
        self._devices: list[int] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="link", daemon=True)

    def address(self, number: int) -> str:
        """The address of a namespace."""
        return f"10.99.0.{number + 1}"

    def environment(self) -> dict[str, str]:
        """What lets gloo find its way out of a namespace."""
        return {"GLOO_SOCKET_IFNAME": _DEVICE, "MASTER_ADDR": self.address(0)}

    def inside(self, number: int, command: Sequence[str]) -> list[str]:
        """A command that runs another one in a namespace."""
        return ["ip", "netns", "exec", self._names[number], *command]

    @contextlib.contextmanager
    def up(self) -> Iterator["DelayedNetwork"]:
        """The network is there meanwhile."""
        try:
            for number, name in enumerate(self._names):
                _run("ip", "netns", "add", name)
                self._devices.append(_open_device(name))
                for command in (
                    "ip link set lo up",
                    f"ip addr add {self.address(number)}/24 dev {_DEVICE}",
                    f"ip link set {_DEVICE} mtu {_MTU} up",
                    # A connection that was quiet for a moment shall not begin slowly again.
                    "sysctl -q -w net.ipv4.tcp_slow_start_after_idle=0",
                ):
                    _run(*self.inside(number, command.split()))
                # Room for what is under way on a long link.
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
        """Reads what is sent, and delivers it in turn: the delay is the same for all."""
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
                if packet[0] >> 4 != 4:  # IPv6 looks for neighbours
                    continue
                target = packet[19] - 1
                if 0 <= target < len(self._devices):
                    waiting.append((now + self.delay, self._devices.index(device), target, packet))


def _open_device(namespace: str) -> int:
    """A TUN device in a namespace; its file descriptor."""
    opened: list[int] = []

    def work() -> None:  # in a thread: it alone moves to the namespace
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
