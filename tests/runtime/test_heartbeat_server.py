"""The port of rank 0: ranks are heard while strangers connect, send anything, or nothing."""

import contextlib
import errno
import os
import random
import resource
import socket
import time

import pytest

from llm.runtime import heartbeat_server
from llm.runtime.heartbeat_server import HeartbeatServer, LineChannel, connect_to_server

KEY_SECONDS = 0.3


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(heartbeat_server, "_KEY_TIMEOUT_SECONDS", KEY_SECONDS)
    return HeartbeatServer(host=None, num_ranks=2)


def connect_rank(server, *lines):
    channel = connect_to_server([server.host], server.port)
    for line in (server.key.encode(), *lines):
        channel.send(line)
    return channel


def connect_stranger(server, sent=b""):
    stranger = socket.create_connection((server.host, server.port))
    stranger.sendall(sent)
    stranger.settimeout(5)
    return stranger


def is_closed(stranger):
    stranger.setblocking(False)
    try:
        return stranger.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def receive(server, *, until=1, seconds=10.0):
    """What the server hears until it has so many lines, as rank 0's watchdog asks for it."""
    heard = []
    end = time.monotonic() + seconds
    while len(heard) < until and time.monotonic() < end:
        heard += [line for _, line in server.receive()]
        time.sleep(0.01)
    return heard


def wait_until_closed(server, strangers):
    """Returns the seconds that it took, and what was heard meanwhile."""
    heard, began = [], time.monotonic()
    for stranger in strangers:
        while not is_closed(stranger):
            assert time.monotonic() - began < 10
            heard += [line for _, line in server.receive()]
    return time.monotonic() - began, heard


def test_lines_of_ranks_arrive_in_order_and_then_their_end(server):
    rank = connect_rank(server, b"1", b"2")
    heard = receive(server, until=2)
    rank.send(b"3")
    rank.close()

    assert heard == [b"1", b"2"]
    assert receive(server, until=2) == [b"3", None]
    assert receive(server, seconds=0.1) == []


def test_the_port_is_closed_after_the_last_rank_has_connected(server):
    channels = [connect_rank(server), connect_rank(server, b"1")]

    assert receive(server) == [b"1"]
    assert connect_to_server([server.host], server.port) is None
    for channel in channels:
        channel.send(b"2")
    assert receive(server, until=2) == [b"2", b"2"]


@pytest.mark.parametrize(
    "sent",
    [
        b"not the key\n",
        b"\n",
        b"\xff\xfe\0\n",
        b"[" * 4096 + b"\n",
        b"endless" * 1000,
    ],
    ids=["another key", "an empty line", "no text", "deep JSON", "an endless line"],
)
def test_a_stranger_is_disconnected_after_its_first_line(server, sent, monkeypatch):
    monkeypatch.setattr(heartbeat_server, "_KEY_TIMEOUT_SECONDS", 1e9)

    assert wait_until_closed(server, [connect_stranger(server, sent)])[1] == []


def test_a_key_that_arrives_byte_by_byte_has_one_deadline(server):
    rank = connect_rank(server)
    stranger = connect_stranger(server)
    began = time.monotonic()
    heard = []
    with contextlib.suppress(ConnectionError):
        for byte in server.key.encode() * 1000:
            stranger.sendall(bytes([byte]))
            rank.send(b"alive")
            heard += [line for _, line in server.receive()]
            time.sleep(0.01)

    assert KEY_SECONDS <= time.monotonic() - began < 10
    assert len(heard) >= 2


def test_64_silent_connections_are_open_at_most_and_closed_in_time(server):
    strangers = [connect_stranger(server) for _ in range(100)]
    rank = connect_rank(server, b"behind the strangers")

    server.receive()
    assert len(server._key_deadlines) == 64
    seconds, heard = wait_until_closed(server, strangers)
    assert seconds >= KEY_SECONDS
    assert heard == [b"behind the strangers"]
    rank.close()
    assert receive(server) == [None]


def test_a_rank_connects_once_the_process_has_files_again(server, caplog):
    rank = connect_rank(server, b"late")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    next_file = os.dup(0)
    os.close(next_file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_file, hard))
    try:
        without_files = [server.receive() for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert without_files == [[], [], []]
    assert [record.getMessage() for record in caplog.records] == [
        "Rank 0 cannot accept a connection (Too many open files) and tries again: until a rank is "
        "connected, no rank reports its death."
    ]
    assert receive(server) == [b"late"]
    rank.close()


@pytest.mark.parametrize("code", ["ENFILE", "ENOBUFS", "ENOMEM", "ECONNABORTED", "EPERM"])
def test_an_error_of_accept_is_survived(server, code):
    class FailingListener:
        def accept(self):
            server._listener = listener
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    listener, server._listener = server._listener, FailingListener()
    rank = connect_rank(server, b"1")

    assert server.receive() == []
    assert receive(server) == [b"1"]
    rank.close()


def test_a_send_to_a_stopped_process_neither_waits_nor_cuts_a_line():
    ours, theirs = socket.socketpair()
    channel = LineChannel(ours)
    line = b"a heartbeat of the usual length" * 5
    began = time.monotonic()

    for _ in range(10_000):
        channel.send(line)

    assert time.monotonic() - began < 5
    reader = LineChannel(theirs)
    lines = []
    while arrived := reader.receive():
        lines += arrived
    channel.send(b"the last one")
    lines += reader.receive()
    assert 1 < len(lines) < 10_000
    assert {*lines} == {line, b"the last one"}
    assert lines[-1] == b"the last one"


def test_rank_0_listens_for_its_own_host_alone_if_all_ranks_run_there(server):
    assert server.host == "127.0.0.1"


@pytest.mark.parametrize("host", ["203.0.113.7", "rank0.invalid", "localhost", "127.0.1.1"])
def test_rank_0_listens_on_all_interfaces_if_it_cannot_have_the_address(host, caplog):
    server = HeartbeatServer(host=host, num_ranks=1)

    assert server.host == ""
    assert f"cannot listen for heartbeats on MASTER_ADDR {host} (" in caplog.text
    rank = connect_to_server(["rank0.invalid", "127.0.0.1"], server.port)
    rank.send(server.key.encode())
    rank.send(b"1")
    assert receive(server) == [b"1"]


def address_of_this_host():
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect(("203.0.113.7", 9))  # sends nothing
        return probe.getsockname()[0]


def test_rank_0_listens_on_the_address_of_the_master_alone():
    try:
        address = address_of_this_host()
    except OSError:
        pytest.skip("this host has no network")
    server = HeartbeatServer(host=address, num_ranks=1)

    assert server.host == address
    assert connect_to_server(["127.0.0.1"], server.port) is None
    rank = connect_to_server([address], server.port)
    rank.send(server.key.encode())
    rank.send(b"1")
    assert receive(server) == [b"1"]


def test_ranks_are_heard_whatever_strangers_send(server):
    """Connections at random, with a fixed seed; a rank sends a heartbeat in every round."""
    draw = random.Random(45)
    key = server.key.encode()
    rank = connect_rank(server)
    strangers, heard, longest = [], [], 0.0
    for number in range(300):
        with contextlib.suppress(OSError):
            kind = draw.randrange(6)
            if kind == 0 or not strangers:
                strangers.append(connect_stranger(server))
            elif kind == 1:
                strangers.append(connect_stranger(server, draw.randbytes(draw.randrange(9000))))
            elif kind == 2:
                strangers.append(connect_stranger(server, key[: draw.randrange(len(key))]))
            elif kind == 3:
                draw.choice(strangers).sendall(draw.randbytes(1))
            elif kind == 4:
                draw.choice(strangers).sendall(b"\x7f\xff\xff\xff" + draw.randbytes(8) + b"\n")
            else:
                strangers.pop(draw.randrange(len(strangers))).close()
        rank.send(b"%d" % number)
        began = time.monotonic()
        heard += [line for _, line in server.receive()]
        longest = max(longest, time.monotonic() - began)

    heard += wait_until_closed(server, strangers)[1]
    assert [*map(int, heard)] == [*range(300)]
    assert longest < 2
    second = connect_rank(server, b"the second rank")
    assert receive(server) == [b"the second rank"]
    second.close()
