"""Pages out of the ring: compiled and in Python they land in the same way."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from patience import until
from remote_pages import NAMESPACE
from store_pages import content, key

from sgl_kvtier.remote import channel as channels
from sgl_kvtier.remote.channel import Channel, Placed, bytes_in_ring, pack_pages, place
from sgl_kvtier.remote.child.engine import Code
from sgl_kvtier.remote.child.messages import Op, Reply
from sgl_kvtier.remote.page import HEAD_BYTES
from sgl_kvtier.remote.ring import Ring

LENGTHS = [1, 100, 4096, 70_001]
RIGHT = [Code.OK] * 4


class Side(SimpleNamespace):
    """A channel, the child's end of its socket, and a ring with packed pages."""

    channel: Channel
    child: socket.socket
    ring: Ring
    pages: Placed
    into: list[list[bytearray]]

    def reply(self, number: int, *codes: Code) -> None:
        self.child.send(Reply(number, Op.GET, 0, bytes(codes)).pack())

    def answered(self, *codes: Code) -> list[Reply] | None:
        """What is received when the call that is expected is answered."""
        self.channel.expect(7, self.pages)
        self.reply(7, *codes)
        return self.channel.receive(10.0)

    def landed(self) -> list[bytes]:
        return [b"".join(parts) for parts in self.into]


@pytest.fixture(params=["native", "python"])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Side]:
    if request.param == "python":
        monkeypatch.setattr(channels, "_native", None)
    elif channels._native is None:
        pytest.skip("the extension module is not built here (no C compiler at install)")
    ring = Ring(1 << 20)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
    extent = ring.take(bytes_in_ring(LENGTHS))
    assert extent is not None
    keys = [key(i) for i in range(len(LENGTHS))]
    heads = NAMESPACE.heads("kv", keys, LENGTHS)
    data = [
        [memoryview(content(i, n))[: n // 3], memoryview(content(i, n))[n // 3 :]]
        for i, n in enumerate(LENGTHS)
    ]
    pack_pages(ring, place(extent, heads, LENGTHS, data))
    into = [[bytearray(n // 2), bytearray(n - n // 2)] for n in LENGTHS]
    pages = place(extent, heads, LENGTHS, [[memoryview(part) for part in parts] for parts in into])
    yield Side(
        channel=channels.open_channel(ours, wake_fd, ring),
        child=theirs, ring=ring, pages=pages, into=into, wake_fd=wake_fd,
    )  # fmt: skip
    ours.close()
    theirs.close()
    os.close(wake_fd)
    ring.close()


def test_pages_land_in_their_buffers(side: Side) -> None:
    assert side.answered(*RIGHT) == [Reply(7, Op.GET, 0, bytes(4))]
    assert side.landed() == [content(i, n) for i, n in enumerate(LENGTHS)]


def test_what_the_child_does_not_call_right_is_not_copied(side: Side) -> None:
    codes = [Code.MISS, Code.OK, Code.FAILED, Code.CORRUPT]
    assert side.answered(*codes) == [Reply(7, Op.GET, 0, bytes(codes))]
    assert side.landed() == [bytes(1), content(1, 100), bytes(4096), bytes(70_001)]


@pytest.mark.parametrize("at", [0, 8, 20, 60, 200, 255, HEAD_BYTES, HEAD_BYTES + 99])
def test_a_page_that_is_not_the_expected_one_is_noticed(side: Side, at: int) -> None:
    side.ring.memory[side.pages.offsets[1] + at] ^= 1
    (reply,) = side.answered(*RIGHT) or []
    assert reply.codes == bytes([Code.OK, Code.CORRUPT, Code.OK, Code.OK])


def test_what_is_checked_are_the_bytes_where_they_landed(side: Side) -> None:
    """Both halves of a page go to one place, as if bytes came late: there it is not the page."""
    half = bytearray(50)
    buffers = [*side.pages.buffers]
    buffers[1] = [memoryview(half), memoryview(half)]
    side.pages = side.pages._replace(buffers=buffers)
    (reply,) = side.answered(*RIGHT) or []
    assert reply.codes == bytes([Code.OK, Code.CORRUPT, Code.OK, Code.OK])


def test_a_forgotten_call_writes_nothing(side: Side) -> None:
    side.channel.expect(7, side.pages)
    assert side.channel.forget(7)
    assert not side.channel.forget(7)
    side.reply(7, *RIGHT)
    side.channel.receive(1.0)
    assert side.landed() == [bytes(n) for n in LENGTHS]


@pytest.mark.parametrize("other", [6, 8, 7 + (1 << 32), 0])
def test_an_answer_to_another_call_lands_nothing(side: Side, other: int) -> None:
    side.channel.expect(7, side.pages)
    side.reply(other, *RIGHT)
    side.channel.receive(1.0)
    assert side.landed() == [bytes(n) for n in LENGTHS]
    assert side.channel.forget(7)


def test_a_call_that_has_landed_cannot_be_forgotten(side: Side) -> None:
    side.answered(*RIGHT)
    assert not side.channel.forget(7)


def test_bytes_that_come_late_reach_the_ring_only(side: Side) -> None:
    side.answered(*RIGHT)
    side.ring.memory[:] = b"\7" * side.ring.nbytes
    assert side.landed() == [content(i, n) for i, n in enumerate(LENGTHS)]


def test_fewer_codes_than_pages_land_fewer_pages(side: Side) -> None:
    side.answered(Code.OK, Code.OK)
    assert side.landed()[2:] == [bytes(4096), bytes(70_001)]


def test_a_child_that_is_gone_is_noticed(side: Side) -> None:
    side.child.close()
    assert side.channel.receive(1.0) is None


def test_replies_of_a_child_that_is_gone_come_first(side: Side) -> None:
    side.channel.expect(7, side.pages)
    side.reply(7, *RIGHT)
    side.child.close()
    came: list[Reply] = []
    while (replies := side.channel.receive(1.0)) is not None:
        came += replies
    assert came == [Reply(7, Op.GET, 0, bytes(4))]
    assert side.landed() == [content(i, n) for i, n in enumerate(LENGTHS)]
    assert side.channel.receive(60.0) is None


def test_a_wake_ends_the_wait(side: Side) -> None:
    os.eventfd_write(side.wake_fd, 1)
    begun = time.monotonic()
    assert side.channel.receive(60.0) == []
    assert time.monotonic() - begun < 30


def compiled(side: Side) -> None:
    if isinstance(side.channel, channels.PythonChannel):
        pytest.skip("of the compiled channel only")


def test_pages_land_while_nothing_waits_for_them(side: Side) -> None:
    compiled(side)
    side.channel.expect(7, side.pages)
    side.reply(7, *RIGHT)
    until(lambda: side.landed()[-1] == content(3, LENGTHS[3]))
    assert side.channel.receive(1.0) == [Reply(7, Op.GET, 0, bytes(4))]
    assert not side.channel.forget(7)


def test_a_channel_leaves_no_thread_and_no_file_behind(side: Side) -> None:
    compiled(side)

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = held()
    for number in range(20):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = channels.open_channel(ours, side.wake_fd, side.ring)
        channel.expect(number, side.pages)
        if number % 2:
            theirs.send(Reply(number, Op.GET, 0, bytes(4)).pack())
        del channel
        ours.close()
        theirs.close()
    assert held() == before


def test_a_forked_process_can_let_a_channel_go(side: Side) -> None:
    compiled(side)
    pid = os.fork()
    if not pid:
        del side.channel
        os._exit(0)
    until = time.monotonic() + 30
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    assert ended[1] == 0
    assert side.answered(*RIGHT) == [Reply(7, Op.GET, 0, bytes(4))]


def test_a_page_outside_the_ring_is_refused_by_the_compiled_channel(side: Side) -> None:
    compiled(side)  # Python checks every access itself
    end = side.ring.nbytes
    last = end - LENGTHS[3] - HEAD_BYTES
    first = side.pages.offsets[:3]
    wrong = [side.pages._replace(offsets=[*first, at]) for at in (last + 1, end, (1 << 64) - 1)]
    for pages in (*wrong, side.pages._replace(heads=side.pages.heads[:3])):
        with pytest.raises(ValueError, match="do not fit the ring"):
            side.channel.expect(7, pages)
    side.channel.expect(8, side.pages._replace(offsets=[*first, last]))
