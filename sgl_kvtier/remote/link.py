"""Calls to the engine, each of which ends in bounded time. Owns the child process, the circuit
breaker, and the ring.

One thread receives the child's replies, abandons calls that take too long, kills a child that
hangs, and starts the next one. An abandoned call keeps its extent of the ring until the child has
replied or is dead.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sgl_kvtier.remote.agent import Agent
from sgl_kvtier.remote.breaker import Breaker
from sgl_kvtier.remote.channel import Placed, wake
from sgl_kvtier.remote.child.engine import Code
from sgl_kvtier.remote.child.messages import Op, Reply, Request, answers
from sgl_kvtier.remote.child.settings import RemoteSettings
from sgl_kvtier.remote.ring import Ring
from sgl_kvtier.types import PageKey

logger = logging.getLogger(__name__)

START_S = 15.0
"""Seconds that a child may take to start: Python, the engine's library, and one connection."""
CLOSE_S = 2.0
_CANARY = PageKey(bytes(32))


class Answer(NamedTuple):
    """The result of a call: one code per key (one for CLEAR) and the number of objects removed."""

    codes: Sequence[int]
    removed: int = 0


@dataclass(eq=False)
class Call:
    """One call. `ended` is called once, on the link's thread, without the link's lock."""

    op: Op
    pool: str
    keys: Sequence[PageKey]
    ended: Callable[[Answer], None]
    limit: float
    """The time (time.monotonic) when it is abandoned."""
    extent: int | None = None
    """Its extent of the ring, which the link owns from `begin` on."""
    pages: Placed | None = None
    fair: bool = False
    """Whether only the engine can make it late: `limit` is not the caller's own deadline."""
    begun: float = 0.0

    @property
    def answers(self) -> int:
        """Number of codes in its answer."""
        return answers(self.op, self.keys)


Ended = list[tuple[Callable[[Answer], None], Answer]]


class Link:
    """The connection to the engine. `lock` guards the ring and the calls, for microseconds."""

    def __init__(self, settings: RemoteSettings, prefix: str) -> None:
        self.lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not earlier: another thread may be about to write to it.
        weakref.finalize(self, os.close, self._wake_fd)
        self.ring = Ring(settings.ring_bytes)
        self.restarts = 0
        self.trouble = "not started yet"
        """Why the engine is not usable; empty if it is."""
        self._settings = settings
        self._prefix = prefix
        self._tend: Callable[[float], float] = lambda _: math.inf
        self._breaker = Breaker()
        self._agent: Agent | None = None
        self._ready_by = 0.0
        """When a starting child must be ready; 0 once it is."""
        self._dying = False
        self._calls: dict[int, Call] = {}
        self._given_up: dict[int, Call] = {}
        self._resting: deque[tuple[float, int]] = deque()
        """Extents into which a failed transfer may still write, with the time when they are freed.
        """
        self._numbers = itertools.count(1)
        self._wakes_at = math.inf
        self._open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvtier-remote", daemon=True)
        _links.add(self)

    def start(self, tend: Callable[[float], float]) -> None:
        """Starts the link's thread. It calls `tend(now)` after every event, and again at the time
        that `tend` returns.
        """
        self._tend = tend
        self._thread.start()

    @property
    def open(self) -> bool:
        """Whether this process created the link and has not closed it."""
        return self._open

    @property
    def usable(self) -> bool:
        """Whether the breaker lets calls through."""
        return self._open and self._breaker.closed

    @property
    def child(self) -> int:
        """The child's process id; 0 while there is none."""
        agent = self._agent
        return agent.pid if agent is not None else 0

    def wait_usable(self, timeout_s: float) -> bool:
        """Blocks until `usable`, at most `timeout_s` seconds. Returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.usable, timeout_s)

    def begin(self, call: Call) -> bool:
        """Locked. Sends a call to the child. False if that is impossible now; then nothing was
        begun, and the caller keeps the extent. Does not block.
        """
        if not self.usable or not self._send(call):
            return False
        self.wake_before(call.limit)
        return True

    def writing(self, pool: str, keys: Sequence[PageKey] | None) -> set[int]:
        """Locked. Numbers of calls, abandoned ones too, that write these pages; None: any page."""
        named = None if keys is None else set(keys)
        both = itertools.chain(self._calls.items(), self._given_up.items())
        return {
            number
            for number, call in both
            if call.op is Op.PUT
            and (named is None or (call.pool == pool and not named.isdisjoint(call.keys)))
        }

    def ended(self, numbers: Iterable[int]) -> bool:
        """Locked. Whether the child has replied to all of these calls, or is dead."""
        return not any(n in self._calls or n in self._given_up for n in numbers)

    def wake_before(self, moment: float) -> None:
        """Makes the link's thread run at this time at the latest."""
        if moment < self._wakes_at and threading.current_thread() is not self._thread:
            wake(self._wake_fd)

    def close(self) -> None:
        """Kills the child and ends all calls. Takes at most `CLOSE_S`. Idempotent."""
        if not self._open:
            return
        self._open = False
        wake(self._wake_fd)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while self._open:
            try:
                self._turn()
            except Exception:
                # A bug, or out of memory: the thread goes on, with a new child.
                logger.exception("the remote store's thread failed")
                if self._agent is not None:
                    self._agent.kill()
                    self._dying = True
                self._fail_all("an error in the store, see above")
                time.sleep(0.1)
        self._stop()

    def _turn(self) -> None:
        self._wakes_at = math.inf
        self._supervise(time.monotonic())
        now = time.monotonic()
        # First, because it may begin calls, whose limits count below.
        wanted = self._tend(now)
        moment = min(wanted, self._next_event(now))
        self._wakes_at = moment
        replies = self._receive(max(0.0, moment - time.monotonic()))
        ended: Ended = []
        with self.lock:
            now = time.monotonic()
            if replies is None:
                self._dying = True
            for reply in replies or ():
                self._take(reply, now, ended)
            self._give_up_late(now, ended)
            self._free_rested(now)
        _end(ended)

    def _receive(self, seconds: float) -> list[Reply] | None:
        if self._agent is not None and not self._dying:
            return self._agent.channel.receive(seconds)
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        if poll.poll(min(seconds, 60.0) * 1000):
            os.eventfd_read(self._wake_fd)
        return []

    def _next_event(self, now: float) -> float:
        if self._dying:
            return now + 0.01
        with self.lock:
            moments = [call.limit for call in self._calls.values()]
            both = itertools.chain(self._calls.values(), self._given_up.values())
            moments += [call.begun + self._settings.hang_s for call in both]
            moments += [until for until, _ in itertools.islice(self._resting, 1)]
        if self._ready_by:
            moments.append(self._ready_by)
        elif self._agent is None or self._may_probe:
            moments.append(self._breaker.due)
        return min(moments, default=math.inf)

    def _supervise(self, now: float) -> None:
        """Kills a child that hangs, cleans up after a dead one, starts a child, and probes."""
        agent = self._agent
        if agent is not None:
            if self._dying:
                self._fail_all("its process ended")
                self._clean_up(agent)
            elif self._hangs(now):
                self._set_trouble("it does not answer: its process was killed")
                agent.kill()
                self._dying = True
            elif self._may_probe and now >= self._breaker.due:
                self._probe(now)
        elif now >= self._breaker.due:
            self._start(now)

    @property
    def _may_probe(self) -> bool:
        """Whether to probe. Not while the child has an abandoned call: it replies, or is killed."""
        return not (self._breaker.closed or self._ready_by or self._given_up)

    def _start(self, now: float) -> None:
        self._breaker.trip(now)
        try:
            # On this thread, which lives as long as the link, because the child dies with the
            # thread that started it.
            self._agent = Agent(self._settings, self._prefix, self.ring, self._wake_fd)
        except OSError as error:
            self._set_trouble(f"no process can be started for it: {error}")
            return
        self.restarts += 1
        self._ready_by = now + START_S

    def _hangs(self, now: float) -> bool:
        with self.lock:
            both = itertools.chain(self._calls.values(), self._given_up.values())
            begun = min((call.begun for call in both), default=now)
        late = bool(self._ready_by) and now >= self._ready_by
        return late or now - begun >= self._settings.hang_s

    def _probe(self, now: float) -> None:
        """Queries a name that does not exist. A valid reply closes the breaker."""
        self._breaker.probing(now)

        def ended(answer: Answer) -> None:
            if answer.codes[0] in (Code.OK, Code.MISS):
                self._breaker.close()
                self.trouble = ""
                logger.info("remote store %s: usable", self._settings.master)
                with self._changed:
                    self._changed.notify_all()
            else:
                self._trip("its master does not answer")

        limit = now + self._settings.deadline_s
        with self.lock:
            sent = self._send(Call(Op.EXISTS, "kv", [_CANARY], ended, limit))
        if not sent:
            self._trip("its process takes no calls")

    def _clean_up(self, agent: Agent) -> None:
        """Cleans up once the child is dead: nothing writes to the ring then; all of it is free."""
        if not agent.gone(0.0):
            agent.kill()
            return
        agent.leave()
        with self.lock:
            extents = [call.extent for call in self._given_up.values() if call.extent is not None]
            for extent in [*extents, *(extent for _, extent in self._resting)]:
                self.ring.give(extent)
            self._given_up.clear()
            self._resting.clear()
            self._agent = None
            self._dying = False
            self._ready_by = 0.0

    def _fail_all(self, why: str) -> None:
        with self.lock:
            if self.usable:
                self._trip(why)
            ended: Ended = []
            for number, call in list(self._calls.items()):
                self._give_up(number, call, Code.FAILED, ended)
        _end(ended)

    def _send(self, call: Call) -> bool:
        """Locked."""
        agent = self._agent
        if agent is None or self._dying:
            return False
        number = next(self._numbers)
        if call.op is Op.GET and call.pages is not None:
            agent.channel.expect(number, call.pages)
        places = call.pages[:2] if call.pages is not None else ((), ())
        request = Request(number, call.op, call.pool, call.keys, *places)
        if not agent.channel.send(request.pack()):
            agent.channel.forget(number)
            return False
        call.begun = time.monotonic()
        self._calls[number] = call
        return True

    def _take(self, reply: Reply, now: float, ended: Ended) -> None:
        """Locked. Processes one message of the child."""
        if reply.op == Op.UP:
            self._ready_by = 0.0
            ended.append((lambda _: self._probe(time.monotonic()), Answer(())))
        elif reply.op == Op.DOWN:
            self._set_trouble(reply.codes.decode(errors="replace"))
        elif (call := self._given_up.pop(reply.id, None)) is not None:
            self._free(call, reply.codes, now)
        elif (call := self._calls.pop(reply.id, None)) is not None:
            codes = reply.codes
            if len(codes) != call.answers or max(codes, default=0) > max(Code):
                codes = bytes([Code.FAILED]) * call.answers  # a bug of the child's
            self._free(call, codes, now)
            if self._breaker.closed and Code.UNREACHABLE in codes:
                self._trip("its master does not answer")
            self._breaker.ended(2 * codes.count(Code.FAILED) <= len(call.keys), now)
            if not self._breaker.closed and not self.trouble:
                self._set_trouble("most of its calls fail")
            ended.append((call.ended, Answer(codes, reply.value)))

    def _give_up_late(self, now: float, ended: Ended) -> None:
        """Locked. Abandons calls past their limit, although the child continues them."""
        for number, call in list(self._calls.items()):
            if now < call.limit:
                continue
            hangs = call.fair or now >= call.begun + self._settings.deadline_s
            given_up = self._give_up(number, call, Code.FAILED if hangs else Code.LATE, ended)
            if given_up and hangs and self._breaker.closed:
                self._trip(f"a call took longer than {self._settings.deadline_s:g} s")

    def _give_up(self, number: int, call: Call, code: Code, ended: Ended) -> bool:
        """Locked. Ends a call before its reply; from then on nothing is written to its
        destinations. False if its pages have been copied already: its reply comes next.
        """
        agent = self._agent
        if call.op is Op.GET and agent is not None:
            landed = not agent.channel.forget(number)
            if landed and not self._dying:
                return False
        del self._calls[number]
        self._given_up[number] = call
        ended.append((call.ended, Answer(bytes([code]) * call.answers)))
        return True

    def _free(self, call: Call, codes: bytes, now: float) -> None:
        """Locked. Frees a call's extent; after a failed get, which may still write, in `hang_s`."""
        if call.extent is None:
            return
        if call.op is Op.GET and Code.FAILED in codes:
            self._resting.append((now + self._settings.hang_s, call.extent))
        else:
            self.ring.give(call.extent)

    def _free_rested(self, now: float) -> None:
        """Locked."""
        while self._resting and self._resting[0][0] <= now:
            self.ring.give(self._resting.popleft()[1])

    def _trip(self, why: str) -> None:
        self._breaker.trip(time.monotonic())
        self._set_trouble(why)

    def _set_trouble(self, why: str) -> None:
        """Sets `trouble`, and logs it once."""
        if why != self.trouble:
            logger.warning("remote store %s is not usable: %s", self._settings.master, why)
        self.trouble = why

    def _stop(self) -> None:
        agent = self._agent
        self._dying = True
        if agent is not None:
            agent.kill()
        self._fail_all("closed")
        self._tend(time.monotonic())
        if agent is not None and agent.gone(CLOSE_S / 2):
            agent.leave()
        self.ring.close()

    def leave_to_parent(self) -> None:
        """In a forked process: closes the link, because the child belongs to the parent."""
        self._open = False
        if self._agent is not None:
            self._agent.leave()


def _end(ended: Ended) -> None:
    for tell, answer in ended:
        try:
            tell(answer)
        except Exception:
            # Code of a caller on the link's thread, which must survive it.
            logger.exception("the end of a remote call failed")


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for link in list(_links):
        link.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
