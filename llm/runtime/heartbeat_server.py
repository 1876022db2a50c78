"""Connections between rank 0 and the other ranks, for their heartbeats.

Rank 0 listens until all other ranks have connected. Anybody who reaches its port can connect as
well: reads and sends never wait, and a connection must send the key of the run within 2 seconds.
Nothing else that it sends is interpreted before. The key is not encrypted.
"""

import contextlib
import hmac
import ipaddress
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Sequence

_MAX_LINE_BYTES = 4096
_MAX_QUEUED_BYTES = 4096  # beyond the system's buffer
_READ_BYTES = 65536
_KEY_SECONDS = 2.0  # from the connection to the complete key
_MAX_WITHOUT_KEY = 64  # connections; others wait in the queue of the system
_RECEIVE_SECONDS = 0.1  # for one round of reads, which may repeat while strangers send
_CONNECT_SECONDS = 20.0

logger = logging.getLogger("llm")


class LineChannel:
    """A connection that carries lines; neither a read nor a send waits for the other end.

    Args:
        connection: A connected socket, which the channel closes.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._received, self._queued = bytearray(), bytearray()

    def fileno(self) -> int:
        """Return the descriptor of the socket, for a selector."""
        return self._socket.fileno()

    def send(self, line: bytes) -> None:
        """Send a line without a line feed.

        A line is lost if the other end is gone, which the next read shows, or does not read and all
        buffers are full.
        """
        self._send_queue()
        if len(self._queued) + len(line) < _MAX_QUEUED_BYTES:
            self._queued += line + b"\n"
            self._send_queue()

    def _send_queue(self) -> None:
        with contextlib.suppress(OSError):
            while self._queued:
                del self._queued[: self._socket.send(self._queued)]

    def receive(self) -> list[bytes]:
        """Return the complete lines that have arrived.

        Raises:
            ConnectionError: The other end is gone, or sends a line that is too long.
        """
        try:
            content = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionError(error.strerror) from error
        if not content:
            raise ConnectionError("The other end has closed the connection.")
        *lines, partial_line = (self._received + content).split(b"\n")
        self._received = partial_line
        if any(len(line) > _MAX_LINE_BYTES for line in (*lines, partial_line)):
            raise ConnectionError(f"The other end sends more than {_MAX_LINE_BYTES} bytes a line.")
        return [bytes(line) for line in lines]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class HeartbeatServer:
    """The port of rank 0, and the connections of the other ranks.

    Args:
        host: Name or address on which it listens; None if all ranks run on this host. If this host
            does not have the address, it listens on all interfaces.
        num_ranks: Ranks that connect; it stops listening after the last one.

    Attributes:
        key: The first line that each rank sends.
        host: The address on which it listens; "" for all interfaces.
        port: The port.
    """

    def __init__(self, *, host: str | None, num_ranks: int) -> None:
        self._num_missing = num_ranks
        # A rank that starts later than the others waits here until they are accepted.
        self._listener: socket.socket | None = _open_listener(host, backlog=max(num_ranks, 128))
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._deadlines: dict[LineChannel, float] = {}  # of connections that have not sent the key
        self._is_warned = False
        self.key = secrets.token_hex(16)
        address, self.port = self._listener.getsockname()[:2]
        self.host = "" if ipaddress.ip_address(address).is_unspecified else address

    def receive(self) -> list[tuple[LineChannel, bytes | None]]:
        """Return the lines of ranks that have arrived, in their order; None for a lost rank."""
        lines: list[tuple[LineChannel, bytes | None]] = []
        end = time.monotonic() + _RECEIVE_SECONDS
        while True:
            self._accept_connections()
            ready = self._selector.select(0)
            for channel in (key.fileobj for key, _ in ready):
                assert isinstance(channel, LineChannel)
                lines += [(channel, line) for line in self._read_channel(channel)]
            if not ready or time.monotonic() > end:
                break
        for channel, deadline in [*self._deadlines.items()]:
            if time.monotonic() > deadline:
                self._drop_channel(channel)
        if self._num_missing == 0 and self._listener is not None:
            self._listener.close()
            self._listener = None
        return lines

    def _accept_connections(self) -> None:
        while self._listener is not None and len(self._deadlines) < _MAX_WITHOUT_KEY:
            try:
                channel = LineChannel(self._listener.accept()[0])
                self._selector.register(channel, selectors.EVENT_READ)
            except BlockingIOError:
                return
            except OSError as error:  # too many open files, or the other end has left already
                if not self._is_warned:
                    logger.warning(
                        f"Rank 0 cannot accept a connection ({error.strerror}) and tries again: "
                        "until a rank is connected, no rank reports its death."
                    )
                self._is_warned = True
                return
            self._deadlines[channel] = time.monotonic() + _KEY_SECONDS

    def _read_channel(self, channel: LineChannel) -> list[bytes | None]:
        """Return the lines of a rank, and None at their end; nothing from a stranger."""
        try:
            lines: list[bytes | None] = [*channel.receive()]
        except ConnectionError:
            is_rank = channel not in self._deadlines
            self._drop_channel(channel)
            return [None] if is_rank else []
        if channel in self._deadlines and lines:
            key = lines.pop(0)
            if not hmac.compare_digest(key or b"", self.key.encode()):
                self._drop_channel(channel)
                return []
            del self._deadlines[channel]
            self._num_missing -= 1
        return lines

    def _drop_channel(self, channel: LineChannel) -> None:
        self._deadlines.pop(channel, None)
        self._selector.unregister(channel)
        channel.close()


def _open_listener(host: str | None, *, backlog: int) -> socket.socket:
    """Listen on one address of this host, or on all interfaces if that is not possible."""
    if host is None:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    try:
        addresses = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        # IPv4 first: the hosts of some clusters have IPv6 addresses without a route between them.
        for family, *_, address in sorted(addresses, key=lambda entry: entry[0] != socket.AF_INET):
            if not ipaddress.ip_address(address[0]).is_loopback:
                return socket.create_server(address, family=family, backlog=backlog)
        reason = "other hosts cannot reach this loopback address"  # 127.0.1.1, for example
    except OSError as error:
        reason = error.strerror or str(error)
    logger.warning(
        f"Rank 0 cannot listen for heartbeats on MASTER_ADDR {host} ({reason}): until all ranks "
        "have connected, it listens on all interfaces of its host."
    )
    has_both_families = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both_families else socket.AF_INET
    return socket.create_server(
        ("", 0), family=family, backlog=backlog, dualstack_ipv6=has_both_families
    )


def connect_to_server(hosts: Sequence[str], port: int) -> LineChannel | None:
    """Connect to rank 0 under the first of its names that works; None if none works."""
    for host in hosts:
        with contextlib.suppress(OSError):
            return LineChannel(socket.create_connection((host, port), timeout=_CONNECT_SECONDS))
    return None
