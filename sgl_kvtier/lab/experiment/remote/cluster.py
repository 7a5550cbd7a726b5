"""Mooncake's master and an owner of memory for one comparison, behind a link of a set speed."""

from __future__ import annotations

import time

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.remote.far import Far
from sgl_kvtier.remote.servers import START_S, Servers, missing_engine

LEASE_MS = 10_000


class Cluster:
    """A master, and an owner that every arm reaches through the same relay. Use it in a `with`
    block: all processes end with it. Raises BenchError or StoreError where they do not start.

    Where `throttled` is False there is no relay: speeds cannot be set, and no namespace is needed.
    """

    def __init__(self, segment_bytes: int, throttled: bool = True) -> None:
        reason = missing_engine()
        if reason:
            raise BenchError(reason)
        self.servers = Servers(segment_bytes, lease_ms=LEASE_MS)
        self._throttled = throttled
        self._far: Far | None = None

    @property
    def master(self) -> str:
        """Where the master listens, as host:port."""
        return self.servers.master

    def speed(self, gbps: float) -> None:
        """Gigabits per second between servers and owner, each way; 0: as fast as it goes."""
        if self._far is not None:
            self._far.speed(gbps)

    def __enter__(self) -> Cluster:
        try:
            self.servers.start_master()
            if not self._throttled:
                self.servers.start_owner()
                return self
            self._far = Far(self.servers.commands[1], self.master)
            until = time.monotonic() + START_S
            while not self.servers.segments():
                if time.monotonic() > until:
                    raise BenchError("Mooncake's owner gives no memory through the relay")
                time.sleep(0.05)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends owner, relay and master."""
        if self._far is not None:
            self._far.stop()
        self.servers.stop()
