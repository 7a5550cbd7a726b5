"""What must be equal for a page to mean the same, and its fingerprint."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_kvtier.errors import StoreError
from sgl_kvtier.store.disk.format import VERSION

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class Identity:
    """What a store's pages were computed with: model, weights digest, dtype, page size, layout,
    ranks, rope, ...

    `fields` is plain data (text, numbers, booleans, None, and lists and objects of them). Two
    servers share pages if and only if all fields are equal. Raises StoreError for data that JSON
    cannot represent exactly.
    """

    fields: Mapping[str, Any]
    name: str = "pages"
    """The readable part of the folder's name. It is not compared."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", dict(self.fields))
        try:
            if json.loads(self.canonical())["fields"] != self.fields:
                raise ValueError("it changes on its way through JSON")
        except (TypeError, ValueError, RecursionError) as error:
            raise StoreError(
                f"a store's identity must be plain JSON data with text keys: {error}"
            ) from error
        if not isinstance(self.name, str):
            raise TypeError(f"the name of an identity is a text, not {type(self.name).__name__}")

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def canonical(self) -> str:
        """The fields and the format version as JSON with sorted keys."""
        data = {"fields": dict(self.fields), "store_format": VERSION}
        return _canonical(data)

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the canonical text: 32 bytes, in every slot header."""
        return fingerprint_of(json.loads(self.canonical()))

    @property
    def directory_name(self) -> str:
        """A folder name that shows the model, without "/" or a leading dot."""
        readable = _UNSAFE.sub("-", self.name).strip("-.")[-64:].strip("-.") or "pages"
        return f"{readable}-{self.fingerprint.hex()[:16]}"


def fingerprint_of(data: Any) -> bytes:
    """The fingerprint of the `identity` object in a folder's config.json."""
    return hashlib.sha256(_canonical(data).encode()).digest()


def _canonical(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
