"""The schemas of the results of `kvtier stat`, `fsck` and `purge`."""

from sgl_kvtier.console.schema import Schema

_NAMESPACE = """
name: string; folder of the model fingerprint
identity: object; all fields of the model fingerprint
pages: integer; pages stored
nbytes: integer; bytes on disk
ranks: integer; folders of ranks
opened: string or null; last time that a server opened it
in_use: "yes" or "no" or "unknown"; whether a process has it open; unknown where its lock may not be
    read
"""

STAT = Schema(
    "kvtier.stat/1",
    "kvtier stat",
    "what is in a page store",
    """
path: string; folder of the store
disk_free_bytes: integer; bytes that its filesystem has free for this user
namespaces: list of namespaces; one per model fingerprint
  tenants: list of objects; what each tenant has, the largest first
    digest: string; of the cache salt; empty for pages that name no tenant
    pages, nbytes: integer; pages, and bytes of their slots
  learned: object or null; what servers learned of prefill and links; null before they have
    conditions: object; what it was measured with: device, threads, chunk_tokens, page_tokens,
        page_bytes, throttle and more
    prefill: object; a chunk of n tokens after s others takes fixed + a n + b n (s + n/2) seconds
      fixed_s, per_token_s, per_token_position_s: number; fixed, a and b
    links_bytes_per_s.<link>: number; bandwidth
    restore: object; empty in a profile of an earlier version
      own_s: number; fixed overhead of a restoration, seconds
    chunks: integer; chunks that it was learned from
    transfers.<link>: integer; transfers that it was learned from
    written_s: number; when it was written, seconds since 1970, UTC
""",
    {"namespace": _NAMESPACE},
)

STAT_REMOTE = Schema(
    "kvtier.stat.remote/1",
    "kvtier stat --remote",
    "what the master of a remote store says, of all servers and models",
    """
master: string; address that was asked
keys: integer; objects stored
nbytes, capacity_bytes: integer; bytes in use, bytes in all
evicted_keys: integer; objects evicted since the master was started
clients: integer; clients that the master knows
segments: list of strings; addresses of the owners' memory
""",
)

FSCK = Schema(
    "kvtier.fsck/1",
    "kvtier fsck",
    "a check of every page of a store",
    """
path: string; folder of the store
ranks: list of objects; one per folder of a rank
  rank: string; folder, relative to path
  pages: integer; slots with a page of this model fingerprint
  good, corrupt, unreadable: integer; of these, pages whose checksum fits, does not fit, and pages
      that the device failed to read
  not_indexed: integer; whole pages that the index does not name
  stale: integer; index entries whose slot holds something else
  erased: integer; damaged pages erased by --repair
  index_whole: boolean; whether the index log could be read to its end
damaged: integer; damaged or unreadable pages that were not erased
""",
)

PURGE = Schema(
    "kvtier.purge/1",
    "kvtier purge",
    "what was removed from a page store",
    """
path: string; folder of the store
namespaces: list of namespaces; one per folder of a model fingerprint, or named like one; with
    --salt `pages` are those of the tenant
  removed: string; yes, would be (--dry-run), or no: and the reason
""",
    {"namespace": _NAMESPACE},
)
