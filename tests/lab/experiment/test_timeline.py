"""A round over time: readings of tiers and storage, and what each request did when."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fake_sglang import FakeServer

from sgl_kvtier.lab.experiment.measures import Round
from sgl_kvtier.lab.experiment.timeline import moved, occupancy, timelines, watch
from sgl_kvtier.lab.outside.client import Cached, Client, Completion, Metrics
from sgl_kvtier.lab.outside.replay import Sample


def test_tiers_are_read_from_what_a_server_counts() -> None:
    text = (
        'sglang:kv_used_tokens{a="1"} 16\nsglang:kv_evictable_tokens{a="1"} 100\nsglang:hicache_host_used_tokens 64\n'
        'kvtier:store_pages{tp_rank="0"} 5\nkvtier:store_pages{tp_rank="1"} 5\nsglang:backuped_tokens_total 999\n'
    )
    assert occupancy(Metrics.parse(text), Metrics({}), 16) == {
        "device": 116.0,
        "host": 64.0,
        "storage": 80.0,
    }
    file = Metrics.parse("sglang:backuped_tokens_total 999\n")
    assert occupancy(file, Metrics.parse("sglang:backuped_tokens_total 900\n"), 16) == {
        "storage": 99.0
    }
    assert occupancy(Metrics({}), Metrics({}), 16) == {}


def test_storage_bytes_are_the_stores_own_count_and_else_sglangs_tokens() -> None:
    ours = "kvtier:read_bytes_total 300\nkvtier:written_bytes_total 900\n"
    before = Metrics.parse("kvtier:read_bytes_total 100\nkvtier:written_bytes_total 900\n")
    assert moved(Metrics.parse(ours), before) == {"read_bytes": 200.0, "written_bytes": 0.0}
    file = (
        "sglang:prefetched_tokens_total 40\nsglang:backuped_tokens_total 70\n"
        "sglang:hicache_backup_tokens_total 100\nsglang:hicache_backup_bytes_total 1600\n"
    )
    before = Metrics.parse("sglang:backuped_tokens_total 20\n")
    assert moved(Metrics.parse(file), before) == {"read_bytes": 640.0, "written_bytes": 800.0}


def test_bytes_of_a_server_that_does_not_say_how_large_a_token_is_are_left_out() -> None:
    text = "sglang:prefetched_tokens_total 0\nsglang:backuped_tokens_total 70\n"
    assert moved(Metrics.parse(text), Metrics({})) == {"read_bytes": 0.0}
    assert moved(Metrics({}), Metrics({})) == {}


def test_bytes_between_host_and_device_are_sglangs_counts_and_those_restored_from_storage() -> None:
    text = (
        'sglang:hicache_host_used_tokens 64\nsglang:load_back_bytes_total{tp_rank="0"} 700\n'
        'sglang:load_back_bytes_total{tp_rank="1"} 700\n'
        'kvtier:restore_loaded_bytes_total{link="host-device"} 30\n'
        'kvtier:restore_loaded_bytes_total{link="storage-device"} 50\n'
        'kvtier:restore_loaded_bytes_total{link="remote-device"} 7\n'
    )
    before = Metrics.parse('sglang:load_back_bytes_total{tp_rank="0"} 400\n')
    assert moved(Metrics.parse(text), before) == {"to_device_bytes": 1057.0, "to_host_bytes": 0.0}
    backup = "sglang:hicache_host_used_tokens 64\nsglang:hicache_backup_bytes_total 90\n"
    assert moved(Metrics.parse(backup), Metrics({})) == {
        "to_device_bytes": 0.0,
        "to_host_bytes": 90.0,
    }


def test_a_paced_devices_clock_knows_what_its_link_had_copied_at_each_reading() -> None:
    copies = [
        {"copy": "to_device", "at": 101.0, "end": 103.0, "bytes": 100},
        {"copy": "to_device", "at": 103.0, "end": 104.0, "bytes": 60},
        {"copy": "to_host", "at": 106.0, "end": 107.0, "bytes": 10},
    ]
    readings = [{"t_s": 1.0, "to_device_bytes": 7.0}, {"t_s": 4.0, "device": 5.0}]
    done = completion(101.0, 1.0, 2.0)
    one = make_round(done, steps=copies, occupancy=readings, dilation=2.0)
    (found,) = timelines([one])
    assert found["tiers"] == [
        {"t_s": 1.0, "to_device_bytes": 50.0, "to_host_bytes": 0},
        {"t_s": 4.0, "device": 5.0, "to_device_bytes": 160.0, "to_host_bytes": 10.0},
    ]


def test_readings_count_the_seconds_of_a_server_that_is_not_dilated() -> None:
    one = Round("kvtier", 1, dilation=4.0, began_s=time.monotonic() - 40.0)

    async def run() -> None:
        server = FakeServer(metrics_text="sglang:kv_used_tokens 16\n")
        async with server.up(), Client(server.url) as client:
            watching = asyncio.create_task(watch(client, one, 16, period_s=0.001))
            while len(one.occupancy) < 2:
                await asyncio.sleep(0.001)
            watching.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert one.occupancy[0]["device"] == 16.0
    assert 10.0 <= one.occupancy[0]["t_s"] <= one.occupancy[1]["t_s"] < 30.0


def make_round(*done: Completion, steps: list[dict] | None = None, **more: Any) -> Round:
    """A complete round of one session that began at 100 s of the monotonic clock."""
    samples = [Sample("s", turn, one) for turn, one in enumerate(done, 1)]
    return Round(
        **{"arm": "kvtier", "number": 1, "complete": True, "began_s": 100.0, **more},
        samples=samples,
        steps=steps or [],
    )


def completion(sent_s: float, first_s: float | None, e2e_s: float, **more: Any) -> Completion:
    times = () if first_s is None else (first_s,)
    return Completion(sent_s, e2e_s, output_ids=(1,), token_times_s=times, **more)


def requests(one: Round) -> list[dict]:
    (found,) = timelines([one])
    return found["requests"]


def test_a_request_is_computed_from_when_the_scheduler_took_it_where_steps_are_not_known() -> None:
    one = make_round(completion(101.0, 2.0, 3.0, server_queue_s=0.5))
    assert requests(one) == [
        {
            "session": "s",
            "turn": 1,
            "begin_s": 1.0,
            "first_s": 3.0,
            "end_s": 4.0,
            "computing_s": [[1.5, 3.0]],
            "loading_s": None,
        }
    ]


def test_steps_of_a_paced_device_say_when_each_request_was_computed() -> None:
    steps = [
        {"step": "prefill", "rids": ["a"], "begin": 104.0, "seconds": 2.0, "load_wait_s": 1.0},
        {"step": "prefill", "rids": ["a", "b"], "begin": 107.0, "seconds": 1.0},
        {"step": "decode", "seconds": 0.1},
        {"step": "prefill", "rids": ["a"], "begin": 110.0, "seconds": 1.0},
    ]
    one = make_round(completion(102.0, 5.0, 6.0, rid="a"), steps=steps, dilation=2.0)
    (found,) = requests(one)
    # The first step waits a second for pages; the second follows at once.
    assert found["computing_s"] == [[2.5, 4.0], [5.0, 5.5]]
    assert (found["begin_s"], found["first_s"], found["end_s"]) == (1.0, 6.0, 7.0)


def test_a_paced_device_says_when_a_requests_pages_were_loaded() -> None:
    lines = [
        {"load": "storage-host", "rid": "a", "at": 102.0, "end": 103.0},
        {"load": "storage-host", "rid": "b", "at": 103.0, "end": 109.0},
        {"step": "prefill", "rids": ["a", "b"], "begin": 104.0, "seconds": 2.0, "load_wait_s": 1.0},
        {"load": "host-device", "rid": "a", "at": 104.5, "end": 105.5},
        {"copy": "to_device", "at": 104.5, "end": 105.5, "bytes": 8},
        {"step": "decode", "seconds": 0.1, "load_wait_s": 0.0},
    ]
    done = completion(102.0, 5.0, 6.0, rid="a")
    (found,) = requests(make_round(done, steps=lines, dilation=2.0))
    assert found["loading_s"] == [[1.0, 1.5], [2.0, 2.75]]
    (found,) = requests(make_round(completion(102.0, 5.0, 6.0, rid="b"), steps=lines))
    assert found["loading_s"] == [[3.0, 9.0]]


def test_nothing_is_loaded_where_there_is_no_tier_below_and_where_a_server_says_so() -> None:
    def loading(arm: str = "hicache", after: str = "", **more: Any) -> list | None:
        done = completion(101.0, 2.0, 3.0, **more)
        (found,) = requests(make_round(done, arm=arm, after=Metrics.parse(after)))
        return found["loading_s"]

    device, host = Cached(device=16, total=16), Cached(host=16, total=16)
    assert loading("recompute") == loading("oracle") == []
    assert loading(cached=device, storage_wait_s=0.0) == []
    assert loading(cached=host, storage_wait_s=0.0) is None
    assert loading(cached=device, storage_wait_s=0.2) is None
    assert loading(cached=device) is None
    restores = "kvtier:restore_computed_tokens_total 0\n"
    assert loading(after=restores, cached=device, storage_wait_s=0.0) is None


def test_a_request_without_a_token_has_no_first_one() -> None:
    (found,) = requests(make_round(completion(101.0, None, 3.0, error="HTTP 500")))
    assert (found["first_s"], found["end_s"], found["computing_s"]) == (None, 4.0, [])


def test_only_the_first_complete_round_of_each_arm_is_kept() -> None:
    done = completion(101.0, 1.0, 2.0)
    rounds = [
        make_round(done, number=1, complete=False),
        make_round(done, number=2, occupancy=[{"t_s": 0.0, "device": 5.0}]),
        make_round(done, number=3),
        make_round(done, arm="hicache", number=3),
        make_round(arm="recompute", number=3),
    ]
    found = timelines(rounds)
    assert [(one["arm"], one["round"]) for one in found] == [("kvtier", 2), ("hicache", 3)]
    assert found[0]["tiers"] == [{"t_s": 0.0, "device": 5.0}]
