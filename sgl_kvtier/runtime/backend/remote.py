"""Opens the store that servers share, in addition to a rank's own, if settings ask for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from sgl_kvtier.config import LabConfig, RemoteConfig, ThrottleConfig
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.remote.child.settings import RemoteSettings
from sgl_kvtier.remote.store import open_remote
from sgl_kvtier.runtime import settings
from sgl_kvtier.runtime.backend import identity
from sgl_kvtier.runtime.backend.host_pages import page_bytes
from sgl_kvtier.store.base import PageStore
from sgl_kvtier.store.disk.identity import Identity
from sgl_kvtier.store.tiered.remote import RemoteStore
from sgl_kvtier.store.tiered.store import TieredStore


def beside(
    local: PageStore,
    config: RemoteConfig,
    lab: LabConfig,
    who: Identity,
    rank: str,
    server_args: Any,
    pools: Iterable[Any],
) -> PageStore:
    """Returns the local store combined with the remote one. Ranks of different servers with the
    same name `rank` have the same pages, which are in these host pools. Closes the local store if
    it raises: ConfigError for settings that cannot work, or if another host's pages might be of
    other weights.
    """
    if config.engine == "off":
        return local
    try:
        reason = identity.not_shareable(server_args)
        if reason is not None:
            raise ConfigError(f"remote.engine = {config.engine}: {reason}. Set it to off")
        largest = max(map(page_bytes, pools), default=0)
        remote: RemoteStore = open_remote(RemoteSettings(**asdict(config)), who, rank, largest)
        if lab.remote_throttle != ThrottleConfig():
            front = settings.of_lab("front.wrappers", "lab.remote_throttle")
            remote = front.in_front_of_remote(remote, lab)
    except BaseException:
        local.close()
        raise
    return TieredStore(local, remote, config.write)
