"""Tenants of a store: whom a page belongs to, by a digest of a request's `cache_salt` (or of its
`extra_key` where it has no salt), and the share of the store that the settings promise a tenant.

A salt is a secret: only its digest is kept, 48 bits of a SHA-256 in 12 hexadecimal digits. On disk
it stands in the name of a page's pool, behind a mark that no other pool's name has: six bytes in
eight characters. Readers that do not know tenants see another pool there, and find no page.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass

from sgl_kvtier.sizes import parse_bytes

NOBODY = ""
"""The tenant of pages that name none."""
OTHERS = "other"
"""What figures call all tenants that the settings do not name."""
MARK = "\x1f"
_CHARACTERS = 8
_POOL_BYTES = 32
_MOST = 200
_MARKED = re.compile(rf"([^{MARK}]*){MARK}([A-Za-z0-9_-]{{8}})", re.ASCII)
_ONE = re.compile(r"([A-Za-z0-9][\w.-]{0,63})=([0-9a-f]{12}):([^,]+)", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{12}", re.ASCII)
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?%", re.ASCII)
FORM = "NAME=DIGEST:SHARE, by commas, each SHARE a size such as 20GiB or a percentage such as 25%"


@dataclass(frozen=True)
class Tenant:
    """One tenant of the settings. Of its two promises one is 0: a share of the capacity from 0 to
    1, or bytes.
    """

    name: str
    digest: str
    share: float
    nbytes: int


def digest_of(salt: str) -> str:
    """The digest of a salt: `printf kvtier-tenant:SALT | sha256sum | cut -c1-12`."""
    return hashlib.sha256(b"kvtier-tenant:" + salt.encode("utf-8", "surrogatepass")).hexdigest()[
        :12
    ]


def check_digest(digest: str) -> None:
    """Raises TypeError or ValueError for what `digest_of` does not give."""
    if not isinstance(digest, str):
        raise TypeError(f"a tenant's digest is a text, not {type(digest).__name__}")
    if not _DIGEST.fullmatch(digest):
        raise ValueError("a tenant's digest is 12 hexadecimal digits (tenants.digest_of)")


def parse_tenants(text: str) -> tuple[Tenant, ...]:
    """The tenants of the setting `store.tenants`. Raises ValueError, which says what is wrong."""
    if not isinstance(text, str):
        raise TypeError(f"store.tenants is a text, not {type(text).__name__}")
    found: list[Tenant] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        one = _ONE.fullmatch(part)
        if one is None:
            raise ValueError(f"not {FORM}")
        name, digest, promised = one[1], one[2], one[3].strip()
        percent = _SHARE.fullmatch(promised)
        share = float(percent[1]) / 100 if percent else 0.0
        nbytes = 0 if percent else parse_bytes(promised)
        if name == OTHERS:
            raise ValueError(f'"{OTHERS}" is the name of all other tenants together')
        if not (0 < share <= 1 or nbytes > 0):
            raise ValueError(f"the share of {name} must be more than nothing and at most 100%")
        found.append(Tenant(name, digest, share, nbytes))
    for what in ("name", "digest"):
        if len({getattr(tenant, what) for tenant in found}) < len(found):
            raise ValueError(f"two tenants have the same {what}")
    if sum(tenant.share for tenant in found) > 1 + 1e-9:
        raise ValueError("the shares are more than 100% together")
    if len(found) > _MOST:
        raise ValueError(f"at most {_MOST} tenants have a share of their own")
    return tuple(found)


def mark(digest: str) -> str:
    """What a tenant's pools have behind their names."""
    if digest == NOBODY:
        return ""
    return MARK + base64.urlsafe_b64encode(bytes.fromhex(digest)).decode()


def pool_of(pool: str, digest: str) -> str:
    """The name of a pool with its tenant, as a page is put and as it stands on disk. A name too
    long for both stays without (23 characters are room enough).
    """
    if digest == NOBODY or len(pool) > _POOL_BYTES - 1 - _CHARACTERS:
        return pool
    return pool + mark(digest)


def parted(pool: str) -> tuple[str, str]:
    """(the pool's own name, the tenant's digest) of a name on disk, or as a page is put."""
    marked = _MARKED.fullmatch(pool) if MARK in pool else None
    if marked is None:
        return pool, NOBODY
    return marked[1], base64.urlsafe_b64decode(marked[2]).hex()
