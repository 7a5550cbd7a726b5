"""Tenants: whose a page is, on disk too; what a tenant is sure of under load; and its deletion."""

from __future__ import annotations

import random
import subprocess
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from patience import all_of, beside, until
from remote_double import RemoteDouble, Shared
from store_pages import aligned, found, killed, named, put, read
from store_pages import open_at as opened_at

from sgl_kvtier.config import parse_config
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.store.base import KV, PageRead, PageWrite, PutOutcome, ReadOutcome
from sgl_kvtier.store.disk.format import slot_bytes
from sgl_kvtier.store.engine import DiskStore
from sgl_kvtier.store.index.shares import Holding
from sgl_kvtier.store.tiered.store import TieredStore
from sgl_kvtier.tenants import digest_of, parse_tenants, parted, pool_of
from sgl_kvtier.types import Lookup, PageKey

SIZE = 12_000
SLOT = slot_bytes(SIZE)
ACME, BETA, NOISY = (digest_of(salt) for salt in ("salt of acme", "salt of beta", "noise"))
ALIKE = r"tp0"


def open_at(path: Path, **settings: Any) -> closing[DiskStore]:
    return closing(opened_at(path, **settings))


def pages(whose: str, count: int, first: int = 0, size: int = SIZE) -> dict[PageKey, bytes]:
    return named(((whose, n) for n in range(first, first + count)), size)


def noise(store: DiskStore) -> None:
    """Many times as many pages as the store has room for, of a tenant without a share."""
    for first in range(0, 3000, 50):
        put(store, pages("noisy", 50, first), of(NOISY))


def of(digest: str, pool: str = KV) -> str:
    return pool_of(pool, digest)


def share_of(store: DiskStore, name: str) -> Holding:
    (one,) = [one for one in store.tenants() if one.name == name]
    return one


def held(store: DiskStore, name: str) -> int:
    return share_of(store, name).nbytes


def promised(store: DiskStore, name: str) -> int:
    return share_of(store, name).promised


# ---- whose a page is ----


def test_a_page_of_a_tenant_is_found_by_its_key_alone(tmp_path: Path):
    mine = pages("acme", 5)
    with open_at(tmp_path) as store:
        assert put(store, mine, of(ACME)) == [PutOutcome.STORED] * 5
        assert store.lookup(list(mine)) == [Lookup.HIT] * 5
        assert found(store, mine) == 5
        assert put(store, mine) == [PutOutcome.KEPT] * 5
    with open_at(tmp_path) as store:
        assert found(store, mine) == 5


def test_pages_of_several_tenants_and_pools_are_put_and_read_in_one_batch(tmp_path: Path):
    every = {**pages("acme", 4), **pages("beta", 4), **pages("nobody", 4)}
    whose = [ACME] * 4 + [BETA] * 4 + [""] * 4
    pool = ["kv", "side"] * 6
    with open_at(tmp_path) as store:
        batch = [
            PageWrite(name, [memoryview(data)], of(digest, p))
            for (name, data), digest, p in zip(every.items(), whose, pool, strict=True)
        ]
        assert store.put(batch) == [PutOutcome.STORED] * 12
        into = [aligned(SIZE) for _ in every]
        reads = [PageRead(n, [b], p) for n, b, p in zip(every, into, pool, strict=True)]
        job = store.read(reads)
        assert job.wait(60) and job.outcomes == [ReadOutcome.OK] * 12
        assert [bytes(b) for b in into] == list(every.values())
        assert store.delete_tenant(BETA) == 4
        store._core.table.check()


def test_neither_salt_nor_name_is_in_any_file(tmp_path: Path):
    salt = "salt of acme"
    named = f"acme={ACME}:20%"
    with open_at(tmp_path, tenants=named, alike=ALIKE) as store:
        put(store, pages("x", 5), of(ACME))
        store.delete_tenant(ACME)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert salt.encode() not in path.read_bytes()
            assert b"acme" not in path.read_bytes()


def test_pages_written_before_tenants_were_known_are_still_found(tmp_path: Path):
    old = pages("acme", 5)
    with open_at(tmp_path) as store:
        put(store, old)
    with open_at(tmp_path, tenants=f"acme={ACME}:20%") as store:
        assert found(store, old) == 5
        put(store, pages("acme", 5, 5), of(ACME))
        assert (held(store, "acme"), held(store, "other")) == (5 * SLOT, 5 * SLOT)
        # They name nobody: a delete by salt cannot know them.
        assert store.delete_tenant(ACME) == 5
        assert found(store, old) == 5


def test_an_index_made_anew_from_slots_knows_whose_pages_are(tmp_path: Path):
    with open_at(tmp_path) as store:
        put(store, pages("acme", 5), of(ACME))
        put(store, pages("beta", 3), of(BETA))
        folder = Path(store.folder)
    (folder / "index.log").unlink()
    with open_at(tmp_path, tenants=f"acme={ACME}:20%,beta={BETA}:20%") as store:
        assert (held(store, "acme"), held(store, "beta")) == (5 * SLOT, 3 * SLOT)
        assert store.delete_tenant(ACME) == 5
        assert found(store, pages("beta", 3)) == 3


def test_a_pool_name_too_long_for_a_tenant_stays_without():
    long = "deepseek_v4_c1_indexer_scale"
    assert pool_of(long, ACME) == long
    assert parted(pool_of("auxiliary_swa", ACME)) == ("auxiliary_swa", ACME)
    assert len(pool_of("a" * 23, ACME)) == 32


# ---- what a tenant is sure of ----


@pytest.mark.parametrize(("tenants", "left"), [(f"acme={ACME}:25%", 100), ("", 0)])
def test_a_noisy_tenant_takes_no_page_of_one_within_its_share(
    tmp_path: Path, tenants: str, left: int
):
    with open_at(tmp_path, tenants=tenants) as store:
        mine = pages("acme", 100)
        put(store, mine, of(ACME))
        assert not tenants or held(store, "acme") < promised(store, "acme")
        noise(store)
        assert store.stats().pages_evicted > 2000
        assert found(store, mine) == left


def test_a_tenant_takes_free_room_above_its_share_and_gives_it_up_first(tmp_path: Path):
    named = f"acme={ACME}:50%,beta={BETA}:30%"
    with open_at(tmp_path, tenants=named) as store:
        for first in range(0, 1000, 50):
            put(store, pages("beta", 50, first), of(BETA))
        everything = held(store, "beta")
        assert everything > 2 * promised(store, "beta")
        last = pages("beta", 50, 950)
        for first in range(0, 1000, 10):
            put(store, pages("acme", 10, first), of(ACME))
        assert promised(store, "acme") - SLOT < held(store, "acme") <= promised(store, "acme")
        assert held(store, "beta") >= promised(store, "beta")
        assert found(store, last) == 50, "the pages used longest ago go first"


def test_a_share_in_bytes_is_over_all_ranks(tmp_path: Path):
    with open_at(tmp_path, ranks=2, tenants=f"acme={ACME}:1MiB") as store:
        put(store, pages("acme", 1), of(ACME))
        assert promised(store, "acme") == 512 << 10


def test_promises_above_what_there_is_are_all_cut_alike(tmp_path: Path):
    named = f"acme={ACME}:30MiB,beta={BETA}:10MiB"
    with open_at(tmp_path, tenants=named) as store:
        for first in range(0, 1000, 50):
            put(store, pages("acme", 50, first), of(ACME))
            put(store, pages("beta", 50, first), of(BETA))
        total = held(store, "acme") + held(store, "beta")
        assert held(store, "acme") == pytest.approx(0.75 * total, abs=2 * SLOT)


@pytest.mark.parametrize("seed", range(2))
def test_under_mixed_load_no_tenant_falls_below_its_share(tmp_path: Path, seed: int):
    """Tenants of random shares put, read and return at random, in two sizes, beside others without
    a share: whatever one holds up to its share is still there after every step of another.
    """
    chance = random.Random(seed)
    salts = [f"salt {n}" for n in range(5)]
    digests = [digest_of(salt) for salt in salts]
    shares = [35, 20, 10]
    named = ",".join(f"t{n}={digests[n]}:{share}%" for n, share in enumerate(shares))
    with open_at(tmp_path, tenants=named, capacity_bytes=6 << 20) as store:
        counts = [0] * len(salts)
        for _ in range(120):
            who = chance.choices(range(5), [1, 1, 1, 4, 4])[0]
            before = [held(store, f"t{n}") for n in range(3)]
            least = [promised(store, f"t{n}") for n in range(3)]
            count = chance.randint(1, 30)
            for pool, size in ((KV, SIZE), ("side", 3_000)):
                some = pages(salts[who], count, counts[who], size)
                store.lookup(list(pages(salts[who], 20, max(0, counts[who] - 60))))
                put(store, some, of(digests[who], pool))
            counts[who] += count
            for n in range(3):
                if n != who:
                    kept = min(before[n], promised(store, f"t{n}"), least[n])
                    assert held(store, f"t{n}") >= kept, f"t{n} lost pages to {salts[who]}"
            store._core.table.check()
        for n, share in enumerate(shares):
            # Now it asks for its share, while others go on.
            for step in range(60):
                put(store, pages(salts[n], 10, counts[n]), of(digests[n]))
                put(store, pages("noise", 20, 20 * step + 9999 * n), of(digests[4]))
                counts[n] += 10
            assert held(store, f"t{n}") >= promised(store, f"t{n}") - 3 * SLOT, share


def test_what_a_sibling_holds_counts_towards_the_share(tmp_path: Path):
    named = {"tenants": f"acme={ACME}:50%", "capacity_bytes": 8 << 20}
    with (
        open_at(tmp_path, alike=ALIKE, **named) as one,
        open_at(tmp_path, alike=ALIKE, **named) as two,
    ):
        put(two, pages("x", 1), of(BETA))
        put(one, pages("acme", 50), of(ACME))
        two.follow()
        put(two, pages("y", 1), of(BETA))
        assert two._core.table.held[1][1] == 50 * SLOT
        assert two._room.shares is not None
        whole = two._room.whole
        (_, left) = two._room.shares.promised(whole, 1 << 40)
        assert left == whole // 2 - 50 * SLOT


# ---- deleting a tenant ----


def test_a_deleted_tenant_stays_deleted_however_the_store_is_opened(tmp_path: Path):
    mine, others = pages("acme", 40), pages("beta", 40)
    store = opened_at(tmp_path / "a")
    put(store, mine, of(ACME))
    put(store, pages("acme", 10), of(ACME, "side"))
    put(store, others, of(BETA))
    before = (Path(store.folder) / "index.log").read_bytes()
    assert store.delete_tenant(ACME) == 50
    assert found(store, mine) == 0
    # As a kill at this moment leaves it, also with a lost or an older log.
    for n, log in enumerate((None, b"", before)):
        copy = killed(store, tmp_path / f"copy{n}")
        if log is not None:
            next(copy.rglob("index.log")).write_bytes(log)
        again = opened_at(copy)
        outcomes = {outcome for outcome, _ in read(again, dict.fromkeys(mine, SIZE))}
        assert ReadOutcome.OK not in outcomes
        assert found(again, others) == 40


def test_a_tenant_may_store_again_after_its_deletion(tmp_path: Path):
    mine = pages("acme", 10)
    with open_at(tmp_path, alike=ALIKE) as store:
        put(store, mine, of(ACME))
        store.delete_tenant(ACME)
        assert put(store, mine, of(ACME)) == [PutOutcome.STORED] * 10
        assert found(store, mine) == 10
    with open_at(tmp_path, alike=ALIKE) as store:
        assert found(store, mine) == 10


def test_a_sibling_deletes_the_tenants_pages_too(tmp_path: Path):
    mine, others = pages("acme", 20), pages("beta", 20)
    with open_at(tmp_path, alike=ALIKE) as one, open_at(tmp_path, alike=ALIKE) as two:
        put(one, mine, of(ACME))
        put(one, others, of(BETA))
        two.follow()
        assert found(two, mine) == 20
        assert two.delete_tenant(ACME) == 20
        assert found(two, mine) == 0
        one.follow()
        assert found(one, mine) == 0
        assert found(one, others) == 20
    for _ in range(2):
        with open_at(tmp_path, alike=ALIKE) as again:
            assert found(again, mine) == 0
            assert found(again, others) == 20


def test_a_folder_nobody_had_open_is_told_when_it_is_opened(tmp_path: Path):
    mine = pages("acme", 20)
    one, two = opened_at(tmp_path, alike=ALIKE), opened_at(tmp_path, alike=ALIKE)
    put(one, mine, of(ACME))
    one.close()
    two.follow()
    two.delete_tenant(ACME)
    two.close()
    with open_at(tmp_path, alike=ALIKE) as again:
        assert again.folder == one.folder
        assert found(again, mine) == 0
        again.follow()
        assert found(again, mine) == 0

        def empty() -> bool:
            again.follow()
            return not len(again._core.table)

        until(empty)


def test_the_list_of_deletes_forgets_a_tenant_once_no_page_is_left(tmp_path: Path):
    with open_at(tmp_path, alike=ALIKE) as one, open_at(tmp_path, alike=ALIKE) as two:
        put(one, pages("acme", 5), of(ACME))
        two.follow()
        two.delete_tenant(ACME)
        one.follow()
        assert (Path(two.folder) / "gone").exists()
        gone = Path(two.folder) / "gone"
    with open_at(tmp_path, alike=ALIKE), open_at(tmp_path, alike=ALIKE):
        pass
    assert not gone.exists()


# ---- many tenants ----


def test_tenants_without_pages_give_their_numbers_back(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("sgl_kvtier.store.index.slots.FEW_TENANTS", 8)
    with open_at(tmp_path, tenants=f"acme={ACME}:10%") as store:
        for n in range(100):
            digest = digest_of(f"tenant {n}")
            assert put(store, pages(f"t{n}", 1), of(digest)) == [PutOutcome.STORED]
            if n % 2:
                assert store.delete_tenant(digest) == 1
                assert store.delete_tenant(digest_of(f"tenant {n - 1}")) == 1
        assert len(store._core.table.tenants) <= 8
        # However many have pages, none is refused.
        for n in range(50):
            put(store, pages(f"u{n}", 1), of(digest_of(f"last {n}")))
        assert sum(found(store, pages(f"u{n}", 1)) for n in range(50)) == 50
        assert put(store, pages("acme", 1), of(ACME)) == [PutOutcome.STORED]
        assert held(store, "acme") == SLOT
        store._core.table.check()


def test_new_tenants_of_a_sibling_get_a_number_each(tmp_path: Path, monkeypatch):
    """Also those of one look, while no page has their numbers yet."""
    monkeypatch.setattr("sgl_kvtier.store.index.slots.FEW_TENANTS", 8)
    with open_at(tmp_path, alike=ALIKE) as one, open_at(tmp_path, alike=ALIKE) as two:
        two._sharing._stop.set()
        for n in range(10):
            put(one, pages(f"old {n}", 1), of(digest_of(f"old {n}")))
            two.follow()
            one.delete(list(pages(f"old {n}", 1)))
            two.follow()
        for n in range(5):
            put(one, pages(f"new {n}", 1), of(digest_of(f"new {n}")))
        two.follow()
        assert [found(two, pages(f"new {n}", 1)) for n in range(5)] == [1] * 5


# ---- beside earlier versions ----


def earlier_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """To it a pool's name on disk is one name."""
    monkeypatch.setattr("sgl_kvtier.store.recovery.parted", lambda pool: (pool, ""))


@pytest.mark.parametrize("lost", [False, True], ids=["log", "no log"])
def test_a_page_that_an_earlier_version_wrote_again_is_deleted_with_its_older_copy(
    tmp_path: Path, monkeypatch, lost: bool
):
    mine = pages("acme", 10)
    with open_at(tmp_path) as store:
        put(store, mine, of(ACME))
    with monkeypatch.context() as patched:
        earlier_version(patched)
        with open_at(tmp_path) as store:
            assert put(store, mine) == [PutOutcome.STORED] * 10
    with open_at(tmp_path) as store:
        assert found(store, mine) == 10
        assert store.delete(list(mine)) == 10
        log = Path(store.folder) / "index.log"
    if lost:
        log.unlink()
    with open_at(tmp_path) as store:
        assert found(store, mine) == 0


def test_a_pool_whose_own_name_begins_with_a_mark_is_no_tenant(tmp_path: Path):
    with open_at(tmp_path, alike=ALIKE) as one, open_at(tmp_path, alike=ALIKE) as two:
        for pool in ("\x1fodd", "\x1fAAAAAAAA", KV):
            put(one, pages(pool, 2), pool)
        put(one, pages("of", 2), of("000000000000"))
        two.follow()
        odd = list(pages("\x1fodd", 2))
        assert two.delete(odd[:1], "\x1fodd") == 1
        two.delete(list(pages("\x1fAAAAAAAA", 1)), "\x1fAAAAAAAA")
        one.follow()
        assert one.lookup(odd, "\x1fodd") == [Lookup.MISS, Lookup.HIT]
        assert found(one, pages(KV, 2)) == 2
        assert found(one, pages("of", 2)) == 2


# ---- the setting ----


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("acme", "not NAME=DIGEST:SHARE"),
        ("acme=123:20%", "not NAME=DIGEST:SHARE"),
        (f"acme={ACME}:0%", "more than nothing"),
        (f"acme={ACME}:101%", "at most 100%"),
        (f"acme={ACME}:60%,beta={BETA}:50%", "more than 100% together"),
        (f"acme={ACME}:10%,beta={ACME}:10%", "the same digest"),
        (f"acme={ACME}:10%,acme={BETA}:10%", "the same name"),
        (f"other={ACME}:10%", "all other tenants"),
        (f"acme={ACME}:much", "not a size"),
    ],
)
def test_wrong_tenants_are_refused_with_the_reason(text: str, wrong: str):
    with pytest.raises(ConfigError, match=wrong):
        parse_config({"store": {"tenants": text}})


def test_tenants_are_read_from_the_settings():
    acme, beta = parse_tenants(f"acme={ACME}:12.5%, beta={BETA}:10GiB")
    assert (acme.name, acme.digest, acme.share, acme.nbytes) == ("acme", ACME, 0.125, 0)
    assert (beta.share, beta.nbytes) == (0.0, 10 << 30)


def test_a_digest_can_be_made_with_the_shell():
    command = "printf kvtier-tenant:%s 'salt of acme' | sha256sum | cut -c1-12"
    made = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert made.stdout.strip() == ACME


# ---- several threads, and a remote store ----


def test_noisy_threads_and_deletes_leave_a_quiet_tenant_alone(tmp_path: Path):
    """Three threads put pages of tenants without a share, one of them deletes its tenant again and
    again, while a tenant within its share is read all the time.
    """
    mine = pages("acme", 60)
    with open_at(tmp_path, tenants=f"acme={ACME}:30%", alike=ALIKE) as store:
        put(store, mine, of(ACME))

        def work(salt: str, deletes: bool) -> None:
            for step in range(40):
                put(store, pages(salt, 40, 40 * step), of(digest_of(salt)))
                if deletes and step % 10 == 9:
                    store.delete_tenant(digest_of(salt))
                    assert not found(store, pages(salt, 200, 40 * step - 160))

        working = [
            beside(partial(work, salt, salt == "deleted")) for salt in ("one", "two", "deleted")
        ]
        while not all(each.done() for each in working):
            assert found(store, mine) == 60
        all_of(working)
        assert store.stats().pages_evicted > 1000


def test_a_remote_store_knows_pages_by_their_pool_alone(tmp_path: Path):
    shared = Shared()
    with closing(TieredStore(opened_at(tmp_path), RemoteDouble(shared), "all")) as store:
        put(store, pages("acme", 5), of(ACME))
        until(lambda: len(shared.pages) == 5)
        assert {pool for pool, _ in shared.pages} == {KV}
