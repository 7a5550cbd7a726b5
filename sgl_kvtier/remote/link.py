"""Calls to the engine, each of which ends in time: the child's life, the breaker, and the ring.

One thread receives the child's replies, gives up calls that take too long, kills a child that
hangs, and starts the next one. A call that was given up keeps its extent of the ring until the
child has answered or is dead.
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
"""Seconds a child may take to start: Python, the engine's library, and one connection."""
CLOSE_S = 2.0
_CANARY = PageKey(bytes(32))


class Answer(NamedTuple):
    """How a call ended: one code per key, or one for CLEAR, and for REMOVE and CLEAR how many
    objects went.
    """

    codes: Sequence[int]
    removed: int = 0


@dataclass(eq=False)
class Call:
    """One call. `ended` is called once, from the link's thread, without the link's lock."""

    op: Op
    pool: str
    keys: Sequence[PageKey]
    ended: Callable[[Answer], None]
    limit: float
    """The moment (time.monotonic) when it is given up."""
    extent: int | None = None
    """Its part of the ring, which is the link's from `begin` on."""
    pages: Placed | None = None
    fair: bool = False
    """Nothing but the engine makes it late: `limit` is no deadline of its caller's."""
    begun: float = 0.0

    @property
    def answers(self) -> int:
        """How many codes its answer has."""
        return answers(self.op, self.keys)


Ended = list[tuple[Callable[[Answer], None], Answer]]


class Link:
    """The way to the engine. `lock` guards the ring and the calls, and is held for microseconds."""

    def __init__(self, settings: RemoteSettings, prefix: str) -> None:
        self.lock = threading.Lock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Not before: another thread may be about to write to it.
        weakref.finalize(self, os.close, self._wake_fd)
        self.ring = Ring(settings.ring_bytes)
        self.restarts = 0
        self.trouble = "not started yet"
        """Why the engine is not usable; empty when it is."""
        self._settings = settings
        self._prefix = prefix
        self._tend: Callable[[float], float] = lambda _: math.inf
        self._breaker = Breaker()
        self._agent: Agent | None = None
        self._ready_by = 0.0
        """When a child that starts must be ready; 0 when it is."""
        self._dying = False
        self._calls: dict[int, Call] = {}
        self._given_up: dict[int, Call] = {}
        self._resting: deque[tuple[float, int]] = deque()
        """Extents into which a transfer that failed may still write, and until when they rest."""
        self._numbers = itertools.count(1)
        self._wakes_at = math.inf
        self._open = True
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvtier-remote", daemon=True)
        _links.add(self)

    def start(self, tend: Callable[[float], float]) -> None:
        """Starts the link's thread. It calls `tend(now)` after every event, and again at the moment
        that this returns.
        """
        self._tend = tend
        self._thread.start()

    @property
    def open(self) -> bool:
        """Whether this process has the link and has not closed it."""
        return self._open

    @property
    def usable(self) -> bool:
        """Whether calls go through."""
        return self._open and self._breaker.closed

    @property
    def child(self) -> int:
        """The child's process id; 0 while there is none."""
        agent = self._agent
        return agent.pid if agent is not None else 0

    def wait_usable(self, timeout_s: float) -> bool:
        """Blocks until calls go through, or for `timeout_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.usable, timeout_s)

    def begin(self, call: Call) -> bool:
        """Locked. Gives a call to the child; False when it does not go through now. Then nothing
        of it was begun, and its extent is the caller's. Does not block.
        """
        if not self.usable or not self._send(call):
            return False
        self.wake_before(call.limit)
        return True

    def writing(self, pool: str, keys: Sequence[PageKey] | None) -> set[int]:
        """Locked. The numbers of calls that write these pages, None for any page, and have not
        ended: those that were given up too.
        """
        named = None if keys is None else set(keys)
        both = itertools.chain(self._calls.items(), self._given_up.items())
        return {
            number
            for number, call in both
            if call.op is Op.PUT
            and (named is None or (call.pool == pool and not named.isdisjoint(call.keys)))
        }

    def ended(self, numbers: Iterable[int]) -> bool:
        """Locked. Whether the child has answered all of these calls, or is dead."""
        return not any(n in self._calls or n in self._given_up for n in numbers)

    def wake_before(self, moment: float) -> None:
        """Makes the link's thread look again at this moment."""
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
                # A mistake of ours or no memory: the thread has to go on, with a new child.
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
        # First: it may begin calls, which then have a limit to be waited for.
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
        """Kills, buries, starts and probes."""
        agent = self._agent
        if agent is not None:
            if self._dying:
                self._fail_all("its process ended")
                self._bury(agent)
            elif self._hangs(now):
                self._say("it does not answer: its process was killed")
                agent.kill()
                self._dying = True
            elif self._may_probe and now >= self._breaker.due:
                self._probe(now)
        elif now >= self._breaker.due:
            self._start(now)

    @property
    def _may_probe(self) -> bool:
        """Not while the child has a call that was given up: it answers, or it is killed."""
        return not (self._breaker.closed or self._ready_by or self._given_up)

    def _start(self, now: float) -> None:
        self._breaker.trip(now)
        try:
            # On this thread, which lives as long as the link: the child dies with it.
            self._agent = Agent(self._settings, self._prefix, self.ring, self._wake_fd)
        except OSError as error:
            self._say(f"no process can be started for it: {error}")
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
        """Asks for a name that is not there. A good answer closes the breaker."""
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

    def _bury(self, agent: Agent) -> None:
        """Once the child is dead nothing writes to the ring: all of it is free."""
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
        """Locked. One message of the child."""
        if reply.op == Op.UP:
            self._ready_by = 0.0
            ended.append((lambda _: self._probe(time.monotonic()), Answer(())))
        elif reply.op == Op.DOWN:
            self._say(reply.codes.decode(errors="replace"))
        elif (call := self._given_up.pop(reply.id, None)) is not None:
            self._free(call, reply.codes, now)
        elif (call := self._calls.pop(reply.id, None)) is not None:
            codes = reply.codes
            if len(codes) != call.answers or max(codes, default=0) > max(Code):
                codes = bytes([Code.FAILED]) * call.answers  # a mistake of the child's
            self._free(call, codes, now)
            if self._breaker.closed and Code.UNREACHABLE in codes:
                self._trip("its master does not answer")
            self._breaker.ended(2 * codes.count(Code.FAILED) <= len(call.keys), now)
            if not self._breaker.closed and not self.trouble:
                self._say("most of its calls fail")
            ended.append((call.ended, Answer(codes, reply.value)))

    def _give_up_late(self, now: float, ended: Ended) -> None:
        """Locked. Ends calls whose time has passed, though the child goes on with them."""
        for number, call in list(self._calls.items()):
            if now < call.limit:
                continue
            hangs = call.fair or now >= call.begun + self._settings.deadline_s
            given_up = self._give_up(number, call, Code.FAILED if hangs else Code.LATE, ended)
            if given_up and hangs and self._breaker.closed:
                self._trip(f"a call took longer than {self._settings.deadline_s:g} s")

    def _give_up(self, number: int, call: Call, code: Code, ended: Ended) -> bool:
        """Locked. False when its pages have just landed: its reply comes next. From then on nothing
        is written to its pages.
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
        """Locked. An extent into which a failed transfer may write rests as long as a child may
        hang.
        """
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
        self._say(why)

    def _say(self, why: str) -> None:
        """Notes a trouble, and logs it once."""
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
        """In a forked process: the child is the parent's, so nothing goes through here."""
        self._open = False
        if self._agent is not None:
            self._agent.leave()


def _end(ended: Ended) -> None:
    for tell, answer in ended:
        try:
            tell(answer)
        except Exception:
            # Code of a caller, on the link's thread: the thread has to survive it.
            logger.exception("the end of a remote call failed")


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for link in list(_links):
        link.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
