"""Reports from later pipeline stages to the first one: which pages of which polls have ended there.

Agreed values travel down the pipeline, from the first stage to the last, behind the batches.
SGLang's stages run one after the other, so the first cannot wait for the last without stopping the
pipeline. So the states of later stages travel up in messages that no stage waits for. A page's
state changes once, so a late report is never wrong: until it arrives, the first stage counts the
page as open.

The stages of each TP rank share a Unix socket, in a folder that only this user can enter and that
is removed as soon as all have connected. Scheduler's thread.
"""

from __future__ import annotations

import os
import struct
import tempfile
import time
from collections.abc import Sequence

import zmq

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.runtime.sglang import tree_ranks
from sgl_kvtier.runtime.sglang.types import Tree
from sgl_kvtier.runtime.step.polls import Poll

_HEAD = struct.Struct("<IQ")
"""Stage, and number of the poll; the states of its pages follow."""
_ADDRESS = 256
_PREFIX, _NAME = "kvtier-stages-", "reports"
_COME_S = 120.0
"""How long the first stage waits for the later ones at the start, in seconds."""


class StageReports:
    """One end of the socket of this rank's pipeline stages. All stages construct it at the same
    time, since the address is passed down. Raises KVTierError if a stage does not connect.
    """

    def __init__(self, tree: Tree) -> None:
        self._stage, self._stages = tree_ranks.stage(tree), tree_ranks.stages(tree)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH if self._stage else zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        room = [0] * _ADDRESS
        if self._stage:
            address = bytes(tree_ranks.pass_down(tree, room)).rstrip(b"\0").decode()
            self._socket.connect(address)
            self._socket.send(_HEAD.pack(self._stage, 0))
        else:
            with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=_short_folder()) as folder:
                address = f"ipc://{folder}/{_NAME}"
                self._socket.bind(address)
                tree_ranks.pass_down(tree, [*address.encode(), *room[len(address) :]])
                self._meet()
        self._sent: dict[int, bytes] = {}
        self._reports: dict[int, dict[int, bytes]] = {}
        self._came: dict[int, float] = {}

    def exchange(self, polls: Sequence[Poll]) -> None:
        """A later stage sends changes; the first one receives what has arrived. Never waits."""
        if self._stage:
            self._send(polls)
        else:
            self._receive({poll.number for poll in polls})

    def state(self, poll: Poll) -> bytes:
        """On the first stage: the states of a poll's pages over all stages of this TP rank."""
        local = bytes(poll.local)
        reports = self._reports.get(poll.number, {})
        if len(reports) < self._stages - 1:
            return bytes(len(local))
        return bytes(min(states) for states in zip(local, *reports.values(), strict=True))

    def ended_at(self, poll: Poll) -> float:
        """On the first stage: when the last of the ended pages ended, as far as known here."""
        return max(*poll.ended_at, self._came.get(poll.number, 0.0))

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        self._socket.close()
        self._context.term()

    def _meet(self) -> None:
        end = time.monotonic() + _COME_S
        for _ in range(self._stages - 1):
            if not self._socket.poll(int(max(0.0, end - time.monotonic()) * 1e3)):
                raise KVTierError(
                    f"a pipeline stage has not come within {_COME_S:.0f} s; its log says why"
                )
            self._socket.recv()

    def _send(self, polls: Sequence[Poll]) -> None:
        sent: dict[int, bytes] = {}
        for poll in polls:
            states = bytes(poll.local)
            known = self._sent.get(poll.number, bytes(len(states)))
            if states != known:
                try:
                    self._socket.send(_HEAD.pack(self._stage, poll.number) + states, zmq.NOBLOCK)
                    known = states
                except zmq.Again:
                    pass  # it is sent in the next step
            sent[poll.number] = known
        self._sent = sent

    def _receive(self, numbers: set[int]) -> None:
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            stage, number = _HEAD.unpack_from(message)
            self._reports.setdefault(number, {})[stage] = message[_HEAD.size :]
            self._came[number] = time.monotonic()
        # A load begins on the first stage before it does on a later one, so one that is unknown
        # here has ended.
        self._reports = {
            number: reports for number, reports in self._reports.items() if number in numbers
        }
        self._came = {number: at for number, at in self._came.items() if number in numbers}


def _short_folder() -> str:
    """A folder for temporary files whose path is short enough for a socket in it. Raises
    KVTierError.
    """
    longest = zmq.IPC_PATH_MAX_LEN - len(f"/{_PREFIX}12345678/{_NAME}")
    for folder in (tempfile.gettempdir(), "/tmp", "/dev/shm"):
        if len(os.fsencode(folder)) <= longest and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise KVTierError(
        f"the folder for temporary files, {tempfile.gettempdir()}, has too long a path for a "
        f"socket: set TMPDIR to one of at most {longest} characters"
    )
