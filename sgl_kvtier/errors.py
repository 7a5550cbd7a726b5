"""The errors that this package raises.

    KVTierError
    ├── ConfigError         a setting has a wrong name, type or range
    ├── SeamError           SGLang is missing, has another version, or a used symbol has changed
    ├── StoreError          the page store cannot be opened or used
    │   ├── StoreBusyError      another process owns this directory
    │   └── StoreFormatError    something else, or a newer version, wrote the directory
    ├── TraceError          a trace file is missing or is not in the format named
    └── BenchError          a benchmark failed (server did not start, port taken, no model)

None of these reaches SGLang's scheduler in a running server: a failed read counts as a miss, and in
a metric.
"""

from __future__ import annotations


class KVTierError(Exception):
    """Base of all errors of this package. The message says what happened and what to do."""


class ConfigError(KVTierError, ValueError):
    """A setting has a wrong name, type or range."""


class SeamError(KVTierError):
    """SGLang is missing, has another version, or a symbol that kvtier uses has changed."""


class StoreError(KVTierError):
    """The page store cannot be opened or used."""


class StoreBusyError(StoreError):
    """Another process owns this store directory."""


class StoreFormatError(StoreError):
    """The directory holds data that this version cannot read."""


class TraceError(KVTierError):
    """A trace file is missing or is not in the format named."""


class BenchError(KVTierError):
    """A benchmark failed."""
