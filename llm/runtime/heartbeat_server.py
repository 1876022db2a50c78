"""Connections between rank 0 and the other ranks, for their heartbeats.

Rank 0 listens until all other ranks have connected. Anybody who reaches its port can connect as
well, so reads and sends never wait, and each connection must first send the key of the run, within
2 seconds. Rank 0 interprets nothing before the key. The key is not encrypted.
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
_MAX_SEND_BUFFER_BYTES = 4096  # beyond the system's buffer
_READ_BYTES = 65536
_KEY_TIMEOUT_SECONDS = 2.0  # from accepting a connection to its complete key
_MAX_PENDING_CONNECTIONS = 64  # that have not sent the key; others wait in the backlog
_MAX_RECEIVE_SECONDS = 0.1  # of one call of `receive`, even if connections send without end
_CONNECT_TIMEOUT_SECONDS = 20.0

logger = logging.getLogger("llm")


class LineChannel:
    """A connection that carries lines; neither `receive` nor `send` waits for the peer.

    Args:
        connection: A connected socket, which the channel closes.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._receive_buffer, self._send_buffer = bytearray(), bytearray()

    def fileno(self) -> int:
        """Return the descriptor of the socket, for a selector."""
        return self._socket.fileno()

    def send(self, line: bytes) -> None:
        """Send a line, or drop it if the peer has disconnected or all buffers are full.

        The next `receive` raises the error of a lost connection.

        Args:
            line: The content without a line feed.
        """
        self._flush_send_buffer()
        if len(self._send_buffer) + len(line) < _MAX_SEND_BUFFER_BYTES:
            self._send_buffer += line + b"\n"
            self._flush_send_buffer()

    def _flush_send_buffer(self) -> None:
        """Send as much of the buffer as the system takes now."""
        with contextlib.suppress(OSError):
            while self._send_buffer:
                del self._send_buffer[: self._socket.send(self._send_buffer)]

    def receive(self) -> list[bytes]:
        """Return the complete lines that have arrived.

        Raises:
            ConnectionError: The peer has disconnected, or sends a line that is too long.
        """
        try:
            chunk = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ConnectionError(error.strerror) from error
        if not chunk:
            raise ConnectionError("The other end has closed the connection.")
        *lines, partial_line = (self._receive_buffer + chunk).split(b"\n")
        self._receive_buffer = partial_line
        if any(len(line) > _MAX_LINE_BYTES for line in (*lines, partial_line)):
            raise ConnectionError(f"The other end sends more than {_MAX_LINE_BYTES} bytes a line.")
        return [bytes(line) for line in lines]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class HeartbeatServer:
    """Listens on a port of rank 0, and receives lines from the other ranks.

    Args:
        host: Name or address to listen on; None if all ranks run on this host. If this host
            does not have the address, it listens on all interfaces.
        num_ranks: Number of ranks that connect; it stops listening after the last one.

    Attributes:
        key: The first line that each rank sends.
        host: The address that it listens on; "" for all interfaces.
        port: The port.
    """

    def __init__(self, *, host: str | None, num_ranks: int) -> None:
        self._num_missing_ranks = num_ranks
        # Ranks wait in the backlog until they are accepted.
        self._listener: socket.socket | None = _open_listener(host, backlog=max(num_ranks, 128))
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._key_deadlines: dict[LineChannel, float] = {}  # of channels without a key
        self._has_warned = False
        self.key = secrets.token_hex(16)
        address, self.port = self._listener.getsockname()[:2]
        self.host = "" if ipaddress.ip_address(address).is_unspecified else address

    def receive(self) -> list[tuple[LineChannel, bytes | None]]:
        """Return the lines that have arrived from ranks, in their order; None for a lost rank."""
        lines: list[tuple[LineChannel, bytes | None]] = []
        receive_deadline = time.monotonic() + _MAX_RECEIVE_SECONDS
        while True:
            self._accept_connections()
            selector_events = self._selector.select(0)
            for selector_key, _ in selector_events:
                channel = selector_key.fileobj
                assert isinstance(channel, LineChannel)
                lines += [(channel, line) for line in self._receive_lines(channel)]
            if not selector_events or time.monotonic() > receive_deadline:
                break
        self._drop_late_channels()
        if self._num_missing_ranks == 0 and self._listener is not None:
            self._listener.close()
            self._listener = None
        return lines

    def _accept_connections(self) -> None:
        """Accept the connections that wait, while few of them have no key."""
        while self._listener is not None and len(self._key_deadlines) < _MAX_PENDING_CONNECTIONS:
            try:
                channel = LineChannel(self._listener.accept()[0])
                self._selector.register(channel, selectors.EVENT_READ)
            except BlockingIOError:
                return
            except OSError as error:  # too many open files, or the peer has disconnected
                if not self._has_warned:
                    logger.warning(
                        f"Rank 0 cannot accept a connection ({error.strerror}) and tries again: "
                        "until a rank is connected, no rank reports its death."
                    )
                self._has_warned = True
                return
            self._key_deadlines[channel] = time.monotonic() + _KEY_TIMEOUT_SECONDS

    def _receive_lines(self, channel: LineChannel) -> list[bytes | None]:
        """Return the lines of a rank, and None once it has disconnected.

        The first line of a connection must be the key; otherwise it is closed.
        """
        try:
            lines: list[bytes | None] = [*channel.receive()]
        except ConnectionError:
            is_rank = channel not in self._key_deadlines
            self._drop_channel(channel)
            return [None] if is_rank else []
        if channel in self._key_deadlines and lines:
            first_line = lines.pop(0)
            if not hmac.compare_digest(first_line or b"", self.key.encode()):
                self._drop_channel(channel)
                return []
            del self._key_deadlines[channel]
            self._num_missing_ranks -= 1
        return lines

    def _drop_late_channels(self) -> None:
        """Close the connections that have not sent the key in time."""
        for channel, key_deadline in [*self._key_deadlines.items()]:
            if time.monotonic() > key_deadline:
                self._drop_channel(channel)

    def _drop_channel(self, channel: LineChannel) -> None:
        self._key_deadlines.pop(channel, None)
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
    is_dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual_stack else socket.AF_INET
    return socket.create_server(
        ("", 0), family=family, backlog=backlog, dualstack_ipv6=is_dual_stack
    )


def connect_to_server(hosts: Sequence[str], port: int) -> LineChannel | None:
    """Connect to rank 0 by the first host name that works; return None if none does."""
    for host in hosts:
        with contextlib.suppress(OSError):
            return LineChannel(
                socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_SECONDS)
            )
    return None
