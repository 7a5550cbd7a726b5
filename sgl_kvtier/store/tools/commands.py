"""`kvtier stat`, `fsck` and `purge`: show, verify and remove the content of a store. The command
`stat` is created in `runtime/tools/stat_command.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from sgl_kvtier.console import (
    Column,
    Table,
    check_target,
    envelope,
    format_bytes,
    print_table,
    progress,
    write_json,
)
from sgl_kvtier.errors import StoreBusyError, StoreError
from sgl_kvtier.outside import shown
from sgl_kvtier.store.disk.env import Env
from sgl_kvtier.store.disk.namespace import PATIENT, is_open
from sgl_kvtier.store.disk.removal import look_through, remove_namespace
from sgl_kvtier.store.tools import master
from sgl_kvtier.store.tools.offline import (
    Namespace,
    check_rank,
    count_by_tenant,
    count_pages,
    namespaces,
)
from sgl_kvtier.store.tools.tenant import pages_of, purge_tenant
from sgl_kvtier.tenants import digest_of

SCHEMA_STAT = "kvtier.stat/1"
SCHEMA_STAT_REMOTE = "kvtier.stat.remote/1"
SCHEMA_FSCK = "kvtier.fsck/1"
SCHEMA_PURGE = "kvtier.purge/1"
_MOST_FIELDS = 4
"""Most fields of a difference between two fingerprints that are listed in words."""


class Learned(NamedTuple):
    """What servers learned about prefill and links: for JSON, and in words."""

    found: dict[str, Any]
    said: str


class Stat:
    """`kvtier stat`: the model fingerprints in a store, their sizes, whether processes have them
    open, and what `learned` returns for a fingerprint's folder. Safe while a server runs.
    """

    def __init__(self, learned: Callable[[str], Learned | None]) -> None:
        self._learned = learned

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_common(parser, needs_path=False)
        parser.add_argument(
            "--remote",
            metavar="HOST:PORT",
            help="instead: what the master of a remote store says, at its --metrics_port (9003)",
        )
        _add_salt(parser, "say the digest of this cache salt, for store.tenants and the table")

    def run(self, args: argparse.Namespace) -> int:
        """Prints one row per fingerprint. Raises KVTierError."""
        if args.remote is not None:
            return _stat_remote(args)
        digest = None if args.salt is None else digest_of(_salt(args.salt))
        if args.path is None and digest is not None:
            print(digest)
            return 0
        if args.path is None:
            raise StoreError("name the store's folder, or --remote HOST:PORT, or --salt")
        env, found = _find(args)
        rows: list[dict[str, Any]] = []
        tenants: list[dict[str, Any]] = []
        notes = [] if digest is None else [f"the digest of that salt is {digest}"]
        for namespace in found:
            if not namespace.problem:
                row, learned = _row(env, namespace), self._learned(namespace.path)
                held = [one._asdict() for one in count_by_tenant(env, namespace)]
                extra = {"tenants": held, "learned": learned.found if learned else None}
                rows.append({**row, **extra})
                tenants += [{"name": row["name"], **one} for one in held]
                notes += [f"{row['name']}: {learned.said}"] if learned else []
        columns = [
            Column("name", "model"),
            Column("pages", "pages", decimals=0),
            Column("nbytes", "on disk", format=_size),
            Column("ranks", "ranks", decimals=0),
            Column("opened", "last opened"),
            Column("in_use", "in use"),
        ]
        total, free = sum(row["nbytes"] for row in rows), env.free_bytes(args.path)
        table = Table(
            f"Page store {args.path}",
            columns,
            rows,
            notes=[
                f"{format_bytes(total)} in all, and {format_bytes(free)} free on the disk. The "
                "capacity is a setting of the servers, store.capacity_bytes, which no folder keeps",
                *notes,
                *_differences(found),
                *_left_out(found),
            ],
        )
        results = {"path": args.path, "disk_free_bytes": free, "namespaces": rows}
        _show(args, table, SCHEMA_STAT, results)
        if args.json != "-" and any(one["digest"] for one in tenants):
            print_table(_by_tenant(tenants, digest))
        return 0


class Fsck:
    """`kvtier fsck`: reads every page of a store that is not in use and verifies its checksum."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_common(parser)
        parser.add_argument(
            "--repair",
            action="store_true",
            help="erase damaged pages and segments that hold none (default: only report)",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Prints one row per rank. Returns 1 if damage was left unrepaired. Raises KVTierError."""
        env, found = _find(args)
        ranks = [(namespace, rank) for namespace in found for rank in namespace.ranks]
        for namespace, rank in ranks:
            if is_open(env, rank):
                raise StoreBusyError(
                    f"{rank} is in use: its pages change while they are read. Stop that server "
                    "first, or name other "
                    "fingerprints with --match"
                )
            if namespace.problem:
                raise StoreError(namespace.problem)
        problem = next((namespace.problem for namespace in found if namespace.problem), "")
        if problem and not ranks:
            raise StoreError(problem)
        rows: list[dict[str, Any]] = []
        pages = sum(count_pages(env, namespace, rank) for namespace, rank in ranks)
        with progress("checking", float(pages) or None, "pages") as bar:
            for namespace, rank in ranks:
                bar.describe(os.path.relpath(rank, args.path))
                check = check_rank(
                    env, namespace, rank, repair=args.repair, step=lambda _: bar.advance()
                )
                rows.append({"rank": os.path.relpath(rank, args.path), **dataclasses.asdict(check)})
        names = ("pages", "good", "corrupt", "unreadable", "not_indexed", "stale", "erased")
        columns = [
            Column("rank", "rank"),
            *(Column(n, n.replace("_", " "), decimals=0) for n in names),
        ]
        bad = sum(row["corrupt"] + row["unreadable"] - row["erased"] for row in rows)
        if bad:
            damaged = "1 page is damaged" if bad == 1 else f"{bad} pages are damaged"
            print(
                f"{damaged}. kvtier never serves damaged pages; --repair gives their room back",
                file=sys.stderr,
            )
        table = Table(f"Page store {args.path}", columns, rows, notes=_left_out(found))
        _show(args, table, SCHEMA_FSCK, {"path": args.path, "ranks": rows, "damaged": bad})
        return 1 if bad else 0


class Purge:
    """`kvtier purge`: removes whole fingerprints that are not in use, or one tenant's pages."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        _add_common(parser)
        parser.add_argument("--all", action="store_true", help="every fingerprint in the store")
        _add_salt(
            parser,
            "only the pages of requests with this cache salt (or extra key, where they have no "
            "salt), of every fingerprint unless --match names some; also beside running servers",
        )
        parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")

    def run(self, args: argparse.Namespace) -> int:
        """Prints what was removed; returns 1 if a fingerprint was not. Raises KVTierError."""
        if not args.match and not args.all and args.salt is None:
            raise StoreError(
                "say which pages: --match NAME=VALUE (see kvtier stat --json -), --salt -, or --all"
            )
        digest = None if args.salt is None else digest_of(_salt(args.salt))
        env, found = _find(args)
        rows = []
        for namespace in found:
            row = _row(env, namespace)
            if digest is None:
                row["removed"] = _removed(env, namespace, dry_run=args.dry_run)
            elif namespace.problem:
                row["removed"] = f"no: {namespace.problem}"
            else:
                row["pages"] = pages_of(env, namespace, digest)
                row["removed"] = (
                    "would be" if args.dry_run else purge_tenant(env, namespace, digest)
                )
            rows.append(row)
        columns = [
            Column("name", "model"),
            Column("nbytes", "on disk", format=_size),
            Column("removed", "removed"),
        ]
        if digest is not None:
            columns[1] = Column("pages", "pages", decimals=0)
        where = "" if digest is None else f", tenant {digest}"
        notes = []
        if digest is not None and not any(
            row["pages"] or row["removed"].startswith("no") for row in rows
        ):
            notes.append("no page of this tenant is here: kvtier stat FOLDER has all digests")
        table = Table(f"Page store {args.path}{where}", columns, rows, notes=notes)
        _show(args, table, SCHEMA_PURGE, {"path": args.path, "namespaces": rows})
        return 1 if any(row["removed"].startswith("no") for row in rows) else 0


fsck = Fsck()
purge = Purge()


def _add_salt(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--salt",
        metavar="SALT",
        help=f"{what}; - reads it from standard input, where no other user sees it "
        "(printf %%s SALT | kvtier ...)",
    )


def _salt(given: str) -> str:
    """The salt of the command line, or of standard input without its newline. Raises StoreError."""
    salt = sys.stdin.read().removesuffix("\n") if given == "-" else given
    if not salt:
        raise StoreError("--salt: give the salt itself, or - and the salt on standard input")
    return salt


def _by_tenant(rows: list[dict[str, Any]], digest: str | None) -> Table:
    """What each tenant has, or only the one with this digest."""
    columns = [
        Column("name", "model"),
        Column("tenant", "tenant"),
        Column("pages", "pages", decimals=0),
        Column("nbytes", "on disk", format=_size),
    ]
    chosen = [
        {**row, "tenant": row["digest"] or "(none named)"}
        for row in rows
        if digest in (None, row["digest"])
    ]
    return Table("By tenant", columns, chosen)


def _stat_remote(args: argparse.Namespace) -> int:
    if args.json is not None:
        check_target(args.json)
    status = dataclasses.asdict(master.look(args.remote))
    columns = [
        Column("keys", "objects", decimals=0),
        Column("nbytes", "in use", format=_size),
        Column("capacity_bytes", "of", format=_size),
        Column("evicted_keys", "evicted", decimals=0),
        Column("clients", "clients", decimals=0),
        Column("owners", "owners of memory"),
    ]
    row = {**status, "owners": ", ".join(status["segments"]) or "none"}
    table = Table(f"Remote store {args.remote}", columns, [row])
    _show(args, table, SCHEMA_STAT_REMOTE, {"master": args.remote, **status})
    return 0


def _add_common(parser: argparse.ArgumentParser, *, needs_path: bool = True) -> None:
    parser.add_argument(
        "path",
        nargs=None if needs_path else "?",
        help="the store's folder (store.path in kvtier.json)",
    )
    parser.add_argument(
        "--match",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="only fingerprints with this field, as kvtier stat --json - shows it, dots for "
        "nesting (model.dtype=bfloat16), or with this model's name (name=Qwen3-8B); repeatable",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the result as JSON; - for standard output"
    )


def _find(args: argparse.Namespace) -> tuple[Env, list[Namespace]]:
    if args.json is not None:
        check_target(args.json)
    wanted = []
    for text in args.match:
        name, equals, value = text.partition("=")
        if not equals:
            raise StoreError(f"--match {text}: give NAME=VALUE, for example --match name=Qwen3-8B")
        wanted.append((name, value))
    env = Env()
    found = namespaces(env, args.path)
    if not found:
        raise StoreError(f"no store in {args.path}: give the folder that store.path names")
    described = [_flat(n) for n in found]
    matching = [
        n
        for n, flat in zip(found, described, strict=True)
        if all(flat.get(k) == v for k, v in wanted)
    ]
    if wanted and found and not matching:
        # The values of the fields that were named, and of those in them; else all fields' names.
        named = tuple(f"{name}." for name, _ in wanted)
        fields = [(name, value) for flat in described for name, value in flat.items()]
        known = {f"{name}={value}" for name, value in fields if f"{name}.".startswith(named)}
        known = known or {name for name, _ in fields}
        raise StoreError(
            f"no fingerprint has {' and '.join(args.match)}. There are: {', '.join(sorted(known))}"
        )
    return env, matching


def _flat(namespace: Namespace) -> dict[str, str]:
    """A fingerprint's fields as texts, nested ones under dotted names; `name` is the readable part
    of its folder's name.
    """
    flat = {"name": os.path.basename(namespace.path).rsplit("-", 1)[0]}
    todo: list[tuple[str, Any]] = list(namespace.fields.items())
    while todo:
        name, value = todo.pop()
        if isinstance(value, dict):
            todo += [(f"{name}.{inner}", item) for inner, item in value.items()]
        else:
            flat[name] = str(value)
    return flat


def _row(env: Env, namespace: Namespace) -> dict[str, Any]:
    opened = datetime.datetime.fromtimestamp(namespace.opened_ns / 1e9, datetime.timezone.utc)
    return {
        "name": os.path.basename(namespace.path),
        "identity": namespace.fields,
        "pages": sum(count_pages(env, namespace, rank) for rank in namespace.ranks),
        "nbytes": namespace.nbytes,
        "ranks": len(namespace.ranks),
        "opened": opened.strftime("%Y-%m-%d %H:%M UTC") if namespace.opened_ns else None,
        "in_use": _in_use(env, namespace),
    }


def _differences(found: list[Namespace]) -> list[str]:
    """For each model with several fingerprints, how each differs from the one opened last."""
    lines = []
    whole = sorted((n for n in found if not n.problem), key=lambda n: n.opened_ns, reverse=True)
    latest: dict[str, tuple[str, dict[str, str]]] = {}
    for namespace in whole:
        (folder, flat) = (os.path.basename(namespace.path), _flat(namespace))
        (last, other) = latest.setdefault(flat["name"], (folder, flat))
        fields = [f for f in sorted({*flat, *other}) if flat.get(f) != other.get(f)]
        if not fields:
            continue
        said = [f"{f} = {shown(flat.get(f))}, not {shown(other.get(f))}" for f in fields]
        if len(said) > _MOST_FIELDS:
            said[_MOST_FIELDS:] = [f"{len(said) - _MOST_FIELDS} more (--json - has them all)"]
        lines.append(f"{folder} differs from {last}, opened last: {'; '.join(said)}")
    return lines


def _in_use(env: Env, namespace: Namespace) -> str:
    try:
        return "yes" if any(is_open(env, rank) for rank in namespace.ranks) else "no"
    except PermissionError:
        return "unknown"


def _left_out(found: list[Namespace]) -> list[str]:
    return [f"left out: {namespace.problem}" for namespace in found if namespace.problem]


def _removed(env: Env, namespace: Namespace, *, dry_run: bool) -> str:
    in_use = "no: in use. Stop that server first"
    try:
        if dry_run:
            look_through(env, namespace.path)
            return in_use if _in_use(env, namespace) == "yes" else "would be"
        freed = remove_namespace(env, namespace.path, PATIENT)
    except (StoreError, OSError) as error:
        return f"no: {error}"
    return "yes" if freed or not env.exists(namespace.path) else in_use


def _size(value: object) -> str:
    return format_bytes(float(str(value)))


def _show(args: argparse.Namespace, table: Table, schema: str, results: dict[str, Any]) -> None:
    """Prints the table, unless standard output is for the JSON; writes the JSON if requested."""
    if args.json != "-":
        print_table(table)
    if args.json is not None:
        write_json(envelope(schema, ["kvtier", *_without_salt(sys.argv[1:])], results), args.json)


def _without_salt(arguments: list[str]) -> list[str]:
    """The command line as recorded in results: without salts, which are secret."""
    said = list(arguments)
    for i, argument in enumerate(arguments):
        if _is_salt(argument.partition("=")[0]) and "=" in argument:
            said[i] = argument.partition("=")[0] + "=..."
        elif i and _is_salt(arguments[i - 1]):
            said[i] = "..."
    return said


def _is_salt(option: str) -> bool:
    """Whether this is the option --salt, or an abbreviation that argparse accepts."""
    return len(option) > 2 and "--salt".startswith(option)
