"""Starts and kills the child process that runs the engine. A new child gets a new `Agent`."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from dataclasses import asdict

from sgl_kvtier.remote.channel import open_channel
from sgl_kvtier.remote.child.settings import RemoteSettings
from sgl_kvtier.remote.ring import Ring

logger = logging.getLogger(__name__)

_SOCKET_BYTES = 1 << 20


class Agent:
    """A child process and the socket to it. Raises OSError if none can be started.

    The child has its own session, so that a Ctrl-C for the server does not reach it. It dies with
    the thread that created this object, or when the socket closes.
    """

    def __init__(self, settings: RemoteSettings, prefix: str, ring: Ring, wake_fd: int) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for one in (self._socket, theirs):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        given = {
            "settings": asdict(settings),
            "prefix": prefix,
            "parent": os.getpid(),
            "socket": theirs.fileno(),
            "ring": ring.fd,
            "ring_bytes": ring.nbytes,
        }
        # The child can import what this process can, in the same order, and nothing from its
        # working directory.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        output = None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sgl_kvtier.remote.child.main", json.dumps(given)],
                pass_fds=(theirs.fileno(), ring.fd),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            )
            self.channel = open_channel(self._socket, wake_fd, ring)
        except BaseException:
            self._socket.close()  # a child that was started ends when its socket closes
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def kill(self) -> None:
        """Kills the child at once, whatever it is doing. Its socket closes when it is dead."""
        self._process.kill()

    def gone(self, timeout_s: float) -> bool:
        """Waits for the child's death. Returns whether it is dead, and so writes no more."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def leave(self) -> None:
        """Closes the socket in this process."""
        self._socket.close()
