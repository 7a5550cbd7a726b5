"""`kvtier explain`: a server's figures, the cause that they point to, and what the command prints."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from explained import PAGE, as_json, page_of, prompt_files, serving

from sgl_kvtier.cli import main
from sgl_kvtier.errors import KVTierError
from sgl_kvtier.lab.outside.lab_model import write_model
from sgl_kvtier.policy.restore import offers as policy_offers
from sgl_kvtier.policy.rules import Rules
from sgl_kvtier.runtime.restore import offers
from sgl_kvtier.runtime.scheduler import parts
from sgl_kvtier.runtime.sglang import requests
from sgl_kvtier.runtime.sglang.states import States
from sgl_kvtier.runtime.sglang.windows import Windows
from sgl_kvtier.runtime.tools.miss_advice import Advice, advise
from sgl_kvtier.runtime.tools.miss_reasons import DECLINED, UNFULFILLED
from sgl_kvtier.runtime.tools.server_figures import Figures, figures_of, read, server_of

ROOT = Path(__file__).parents[2]
MODEL = ("--model-path", str(write_model("tiny-qwen3")))


def figures(before: str | None, now: str, **info: Any) -> Figures:
    with serving([now] if before is None else [before, now], info) as url:
        first = None if before is None else read(url)
        return figures_of(read(url), first, 10.0)


def advice(before: str | None, now: str, **info: Any) -> Advice:
    with serving([now] if before is None else [before, now], info) as url:
        first = None if before is None else read(url)
        last = read(url)
        return advise(server_of(last), figures_of(last, first, 10.0))


# --- figures ----------------------------------------------------------------------------------------------------------


def test_prompt_tokens_are_split_by_where_they_came_from():
    now = page_of(prompt=1000, requests=2, cached={"device": 100, "host": 200, "storage": 300})
    found = figures(None, now)
    assert (found.requests, found.device, found.host, found.storage) == (2, 100, 200, 300)
    assert (found.cached, found.computed, found.hit_fraction) == (600, 400, 0.6)


def test_figures_are_those_between_two_readings():
    before = page_of(prompt=1000, cached={"device": 900}, declined={"short": 3}, store_pages=5)
    now = page_of(
        prompt=1500, cached={"device": 1000}, declined={"short": 3, "gap": 2}, store_pages=9
    )
    found = figures(before, now)
    assert (found.prompt, found.device, found.declined) == (500, 100, {"gap": 2})
    assert found.store.pages == 9


@pytest.mark.parametrize(("value", "proof"), [(1, "proving"), (2, "proven")])
def test_replicas_add_up_but_for_times_proofs_and_bandwidths(value, proof, capsys):
    of_both = {
        "open_seconds_total": 3600.0, "pages_read_total": 7, "remote_up": 1,
        "restore_break_even_bytes_per_second": 2e9,
    }  # fmt: skip
    one, other = (some(restore_proof=proven, **of_both) for proven in (2, value))
    with serving([one + other.replace('dp_rank="0"', 'dp_rank="1"')]) as url:
        found = as_json(capsys, url)
    assert (found["restorations"]["proof"], found["seconds"]) == (proof, 3600)
    assert (found["store"]["opened_s"], found["store"]["break_even_bytes_per_s"]) == (3600, 2e9)
    assert (found["store"]["pages_read"], found["remote"]["up"]) == (14, True)


def test_a_server_that_was_started_anew_counts_from_nought():
    assert figures(page_of(prompt=1000), page_of(prompt=300)).prompt == 0


def test_the_rate_of_reading_is_that_while_a_read_was_in_flight():
    before = page_of(read_bytes_total=1e6, read_busy_seconds_total=1.0)
    now = page_of(read_bytes_total=9e6, read_busy_seconds_total=3.0)
    assert figures(before, now).store.read_bytes_per_s == 4e6
    assert figures(now, now).store.read_bytes_per_s is None


def test_pages_that_were_there_at_opening_are_those_not_written_since():
    now = page_of(store_pages=10, pages_written_total=8, pages_evicted_total=3)
    assert figures(None, now).store.pages_at_opening == 5


def test_at_most_what_the_remote_store_sent_came_from_it():
    now = page_of(cached={"storage": 640}, prompt=1000, remote_up=1, remote_pages_read_total=4)
    found = figures(None, now)
    assert found.remote_store is not None
    assert (found.remote_store.pages_read, found.remote) == (4, 4 * PAGE)
    assert figures(None, page_of()).remote_store is None


def test_a_server_that_tells_nothing_of_itself_without_its_key_still_has_figures():
    with serving([page_of(prompt=100)], key="secret") as url:
        there, refused = server_of(read(url, "secret")), server_of(read(url))
    assert (there.page_tokens, there.model) == (PAGE, "m")
    assert there.hicache_write_policy == "write_through"
    assert (refused.page_tokens, refused.model, refused.has_kvtier) == (None, None, True)


def test_without_the_page_size_no_cause_is_named():
    with serving([some(pages_written_total=60)], key="secret") as url:
        refused = read(url)
    assert advise(server_of(refused), figures_of(refused, None, 1.0)).cause == "no arguments"


def test_the_threshold_of_prefetching_is_read_from_the_settings_where_they_are(tmp_path):
    file = tmp_path / "kvtier.json"
    file.write_text('{"prefetch_threshold": 64}')

    def threshold(extra: object) -> int:
        with serving([page_of()], {"hicache_storage_backend_extra_config": extra}) as url:
            return server_of(read(url)).prefetch_threshold_tokens

    assert threshold(f"@{file}") == 64
    assert threshold('{"prefetch_threshold": 128}') == 128
    other = (None, f"@{tmp_path}/none.json", "[]", "{", 5, '{"prefetch_threshold": "many"}')
    assert [threshold(extra) for extra in other] == [256] * len(other)


@pytest.mark.parametrize(
    ("value", "proof", "says"),
    [
        (0, "ended", "a page differed: nothing is restored"),
        (1, "proving", "not complete: all pages that are loaded are compared"),
        (2, "proven", None),
    ],
)
def test_a_proof_that_is_not_complete_is_shown(value, proof, says, capsys):
    with serving([some(restore_proof=value)] * 2) as url:
        assert as_json(capsys, url)["restorations"]["proof"] == proof
        assert main(["explain", url]) == 0
    said = capsys.readouterr().out
    assert says in said if says else "proof of restored pages" not in said


def test_a_server_without_metrics_is_told_apart_from_one_that_is_not_there():
    with serving([None]) as url, pytest.raises(KVTierError, match="--enable-metrics"):
        read(url)
    with pytest.raises(KVTierError, match="no answer"):
        read(url)


# --- advice -----------------------------------------------------------------------------------------------------------


def some(**more: Any) -> str:
    """A page after four prompts of 1,000 tokens."""
    return page_of(**{"prompt": 4000, "requests": 4, **more})


def test_of_a_server_without_kvtier_nothing_is_said_of_its_store(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving([page_of(kvtier=False, prompt=4000, requests=4)]) as url:
        assert main(["explain", url]) == 0
    said = capsys.readouterr().out
    assert "4 requests\n" in said and "Storage (" not in said and " in 0 s" not in said
    assert "start it with --hicache-storage-backend kvtier" in said


@pytest.mark.parametrize(
    ("now", "cause"),
    [
        (page_of(kvtier=False, prompt=4000, requests=4), "no kvtier"),
        (page_of(), "no prompts"),
        (some(pages_corrupt_total=1), "corrupt"),
        (page_of(prompt=200, requests=4), "short prompts"),
        (some(cached={"device": 3800}), "hits"),
        (some(cached={"storage": 3800}, declined={"short": 3}), "rejected"),
        (some(cached={"storage": 3800}, declined={"loading is faster": 3}), "hits"),
        (some(cached={"storage": 3800}, read_bytes_total=1e6, read_busy_seconds_total=1.0,
              restore_break_even_bytes_per_second=2e6), "slow storage"),
        (some(cached={"storage": 3800}, read_bytes_total=3e6, read_busy_seconds_total=1.0,
              restore_break_even_bytes_per_second=2e6), "hits"),
        (some(unfulfilled={"deadline": 3000, "dropped": 4000}), "deadline"),
        (some(unfulfilled={"host_capacity": 3000}), "host capacity"),
        (some(unfulfilled={"below_threshold": 3000}, pages_written_total=20), "below threshold"),
        (some(pages_refused_total=60), "refused"),
        (some(pages_not_admitted_total=20, pages_written_total=40), "second-hit"),
        (some(pages_not_admitted_total=60, store_pages=9, cached={"device": 900}), "new prompts"),
        (some(pages_kept_total=60), "too early"),
        (page_of(prompt=800, requests=4, pages_kept_total=12), "prefetch threshold"),
        (some(pages_written_total=60, store_pages=60, pages_evicted_total=1), "evicted"),
        (some(pages_written_total=60, store_pages=60), "new prompts"),
        (some(pages_written_total=40, store_pages=40, cached={"device": 900}), "empty store"),
        (page_of(prompt=1000, requests=1, pages_written_total=15, store_pages=15), "empty store"),
        (some(pages_written_total=60, store_pages=99, cached={"device": 900}), "new prompts"),
        (some(restore_writes_waiting=2), "write pending"),
        (some(), "not stored"),
        (some(cached={"storage": 2000}, restore_computed_tokens_total=1800), "hits"),
        (some(cached={"host": 3500}, unfulfilled={"deadline": 300}), "hits"),
        # Pages of a restoration that are written again were not asked for too late.
        (some(cached={"storage": 2000}, restored={"storage": 2000}, pages_kept_total=50,
              restore_computed_tokens_total=1200, pages_written_total=27, store_pages=99), "new prompts"),
    ],
)  # fmt: skip
def test_the_cause_that_explains_most_computed_tokens_is_named(now, cause):
    assert advice(None, now).cause == cause


@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_pages_that_a_write_policy_does_not_store_are_put_down_to_it(policy):
    assert advice(None, some(), hicache_write_policy=policy).cause == policy
    written = some(pages_written_total=60, store_pages=99)
    assert advice(None, written, hicache_write_policy=policy).cause == "new prompts"


def test_a_store_that_this_server_filled_is_not_an_empty_one():
    before = page_of(prompt=4000, requests=4, pages_written_total=60, store_pages=60)
    now = page_of(prompt=5000, requests=5, pages_written_total=75, store_pages=75)
    assert advice(before, now).cause == "new prompts"
    assert advice(page_of(store_pages=2, pages_written_total=2), before).cause == "new prompts"
    cold = page_of(store_pages=2, pages_written_total=2)
    first = page_of(prompt=1000, requests=1, store_pages=17, pages_written_total=17)
    assert advice(cold, first).cause == "empty store"


def test_a_ranks_part_of_the_capacity_is_not_called_the_setting():
    now = some(
        pages_written_total=60, store_pages=60, pages_evicted_total=1, store_capacity_bytes=16 << 30
    )
    said = advice(None, now).text
    assert "store.capacity_bytes (the first rank's part of it is now 16.0 GiB)" in said


# --- reasons ----------------------------------------------------------------------------------------------------------


def returned(*functions: Any) -> set[str]:
    """The texts that functions return, also by a condition."""
    found = set()
    for function in functions:
        tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(function)))
        for node in ast.walk(tree):
            if isinstance(node, ast.Return) and node.value is not None:
                values: list[ast.expr] = [node.value]
                while values:
                    value = values.pop()
                    if isinstance(value, ast.IfExp):
                        values += [value.body, value.orelse]
                    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
                        found.add(value.value)
    return found


def test_every_reason_that_is_counted_is_explained():
    counted = returned(
        offers.find,
        requests.left_to_sglang,
        Rules.why_declined,
        policy_offers.Offers.left_to_engine,
        parts.Parts,
    )
    texts = set(re.findall(r'"([a-z][a-z ]+)"', inspect.getsource(offers.Offers._offer)))
    hit = set(re.findall(r'_fall_back\("([a-z ]+)"', inspect.getsource(offers)))
    assert {"short", "again", "paused", "switched off"} <= texts and hit == {"another backend"}
    source = inspect.getsource(offers)
    anchored = {"not stored", "in host memory"}
    assert all(f".one}} {what}" in source for what in anchored)
    of_anchors = {f"{kind.one} {what}" for kind in (Windows, States) for what in anchored}
    assert counted | texts | hit | of_anchors == set(DECLINED)


def test_every_reason_of_sglangs_is_explained():
    pytest.importorskip("sglang")
    from sglang.srt.mem_cache import unified_radix_cache
    from sglang.srt.observability import metrics_collector

    metric = inspect.getsource(metrics_collector.StorageMetricsCollector.__init__)
    named = re.search(r"for reason in \(([^)]*)\):\s+self.storage_prefetch_unfulfilled", metric)
    assert named is not None
    used = re.findall(
        r'reason = "(\w+)"|, reason="(\w+)"\s*\)', inspect.getsource(unified_radix_cache)
    )
    theirs = set(re.findall(r'"(\w+)"', named[1]))
    assert theirs | {"unservable_prefix"} == set(UNFULFILLED)
    assert {"unservable_prefix", "deadline"} <= {one or other for one, other in used}


def section(page: str, heading: str) -> str:
    """What stands under a heading of the manual, up to the next one."""
    text = (ROOT / "docs" / "manual" / page).read_text("utf-8").split(f"# {heading}\n")[1]
    return text.partition("\n#")[0]


@pytest.mark.parametrize(
    ("page", "heading", "table"),
    [
        ("restore.md", "When a request falls back", DECLINED),
        ("operate.md", "Stored tokens that SGLang did not use", UNFULFILLED),
    ],
)
def test_the_manual_has_the_reasons_of_the_code(page, heading, table):
    """The manual as it has to be; reasons against which nothing helps are named below the table."""
    wanted = [
        f"| `{n}` | {said.meaning} | {said.helps} |" for n, said in table.items() if said.helps
    ]
    text = section(page, heading)
    assert [line for line in text.splitlines() if line.startswith("| `")] == wanted
    others = [name for name, said in table.items() if not said.helps]
    assert [name for name in others if f"`{name}`" not in text] == []


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_where_tokens_came_from_and_one_sentence(capsys):
    now = some(
        cached={"storage": 2000}, declined={"short": 3}, unfulfilled={"deadline": 1500},
        remote_up=1, remote_pages_read_total=2, pages_read_total=30,
    )  # fmt: skip
    with serving([now]) as url:
        assert main(["explain", url]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "4 requests in" in said and "storage 2,000 50.0 %" in said
    assert "of these remote 128" in said and "computed 2,000 50.0 %" in said
    assert "lower policy.min_restore_tokens" in said and "2 pages read" in said
    assert "SGLang did not use 1,500 stored tokens: SGLang's prefetch policy ended" in said


def test_the_json_has_figures_reasons_and_advice(tmp_path, capsys):
    now = some(cached={"storage": 3800}, declined={"gap": 1, "short": 3}, remote_up=1)
    with serving([now]) as url:
        assert main(["explain", url, "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["schema"] == "kvtier.explain/1" and found["prompts"]["hit_fraction"] == 0.95
    assert [(row["reason"], row["requests"]) for row in found["declined"]] == [
        ("short", 3), ("gap", 1),
    ]  # fmt: skip
    assert found["advice"]["cause"] == "rejected"
    assert found["advice"]["text"] in capsys.readouterr().out


def test_a_while_is_looked_at_from_two_readings(capsys):
    with serving([some(), some(prompt=4100, requests=5)]) as url:
        found = as_json(capsys, url, "--seconds", "0.01")
    assert (found["prompts"]["prompt"], found["prompts"]["requests"]) == (100, 1)


def test_the_wear_of_the_disk_is_told_by_prompt_tokens_and_by_day(capsys):
    """A page says that the store was open for 100 s."""
    with serving([page_of(prompt=4000, requests=4, device_written_bytes_total=20e6)]) as url:
        assert main(["explain", url]) == 0
        said = " ".join(capsys.readouterr().out.split())
        store = as_json(capsys, url)["store"]
    assert "wear of the disk 5.00 GB per million prompt tokens, 17.3 GB a day at this rate" in said
    assert store["written_bytes_per_prompt_token"] == 5000
    assert store["written_bytes_per_day"] == 864 * 20e6
    assert figures(None, page_of()).written_bytes_per_prompt_token is None


def test_two_files_are_compared_without_a_tokenizer(tmp_path, capsys):
    named = prompt_files(tmp_path, "Today is 2026-11-27.", "Today is 2026-11-28.")
    assert main(["explain", *named]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "text, character 18" in said and "timestamp: a date or time differs." in said
    assert "--model-path tells tokens and pages" in said


def test_a_tokenizer_tells_the_page_in_which_two_chats_part(tmp_path, capsys):
    system = "You repair programs. Answer shortly. It is 10:1"
    chats = [
        {"messages": [{"role": "system", "content": f"{system}{minute}."}]} for minute in (2, 5)
    ]
    words = [*prompt_files(tmp_path, *chats), *MODEL, "--page-size", "16"]
    found = as_json(capsys, *words)
    # A token is a byte here, and a mark of the template one token.
    first = 1 + len("system\n") + len(system)
    assert (found["token"], found["page"]) == (first, first // 16)
    assert (found["kind"], found["message"]) == ("timestamp", 0)
    assert found["hit_tokens"] == first // 16 * 16
    assert main(["explain", *words]) == 0
    assert f"{found['page']} (of 16 tokens)" in capsys.readouterr().out


def test_token_ids_are_read_back_to_say_what_differs(tmp_path, capsys):
    ids = [list(f"It is 10:1{minute} now".encode()) for minute in (2, 5)]
    found = as_json(capsys, *prompt_files(tmp_path, *ids), *MODEL)
    assert (found["kind"], found["token"], found["character"]) == ("timestamp", 10, 10)


def log(folder: Path, *requests: Any) -> str:
    """A log of requests, one a line; texts are lines as they are."""
    path = folder / "log.jsonl"
    lines = [one if isinstance(one, str) else json.dumps(one) for one in requests]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_each_request_of_a_log_is_compared_with_the_one_before_it_in_its_session(tmp_path, capsys):
    name = log(
        tmp_path,
        {"session_id": "a", "prompt": "It is 10:12. Repair the parser."},
        {"session_id": "b", "prompt": "Write a poem."},
        {"session_id": "a", "prompt": "It is 10:15. Repair the parser. And the tests."},
        {"session_id": "b", "prompt": "Write a poem. A short one."},
        {"session_id": "a", "prompt": "It is 10:19. Repair the parser. And the tests."},
    )
    words = ["--prompts", name, "--page-size", "4"]
    found = as_json(capsys, *words, *MODEL)
    assert [(p["session"], p["earlier_line"], p["line"], p["kind"]) for p in found["pairs"]] == [
        ("a", 1, 3, "timestamp"), ("b", 2, 4, "extended"), ("a", 3, 5, "timestamp"),
    ]  # fmt: skip
    # A token is a byte here: "It is 10:1" are ten, and the earlier prompts have 31 and 46.
    first, _, last = found["pairs"]
    assert (first["token"], first["hit_tokens"], first["lost_tokens"]) == (10, 8, 28 - 8)
    assert (last["lost_tokens"], last["lost_fraction"]) == (44 - 8, 36 / 44)
    assert [(c["kind"], c["pairs"], c["lost_tokens"]) for c in found["causes"]] == [
        ("timestamp", 2, 20 + 36)
    ]
    assert main(["explain", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 of 3 later prompts do not go on" in said and "cause is timestamp" in said
    assert "3 1 a text, character 10" in said and "--model-path tells" in said


def test_one_session_of_a_log_is_compared_alone(tmp_path, capsys):
    requests = [
        {"session_id": "a", "input_ids": [1, 2, 3, 4, 5]},
        {"session_id": "b", "input_ids": [1, 2, 3, 4, 5]},
        {"session_id": "a", "input_ids": [1, 2, 3, 4, 5, 6]},
        {"session_id": "b", "input_ids": [9, 2, 3, 4, 5, 6]},
    ]
    name = log(tmp_path, *requests)
    assert main(["explain", "--prompts", name, "a"]) == 0
    said = "All of 1 later prompts go on where the ones before them ended."
    assert capsys.readouterr().out.strip() == said, "and no table"
    (pair,) = as_json(capsys, "--prompts", name, "b")["pairs"]
    assert (pair["session"], pair["earlier_line"], pair["line"]) == ("b", 2, 4)
    assert main(["explain", "--prompts", name, "c"]) == 1
    assert f"c: no such file, nor a session of a log. {name} has sessions a, b" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{ no json", "line 2: no JSON (Expecting property name"),
        ("[1, 2]", "line 2: [1, 2] is no request"),
        ('{"model": "m"}', "line 2: a request has to have messages"),
    ],
)
def test_a_bad_line_of_a_log_is_named(line, said, tmp_path, capsys):
    name = log(tmp_path, {"prompt": "Go on."}, line)
    assert main(["explain", "--prompts", name]) == 1
    assert f"{name}, {said}" in capsys.readouterr().err


def test_a_session_instead_of_a_log_is_told_that_no_server_keeps_prompts(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", "--prompts", "agent-7"]) == 1
    said = capsys.readouterr().err
    assert "the server keeps no prompts" in said and "--log-requests-level 3" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompts", "a", "b", "c"], "two files, or the lines of one"),
        ([], "name a server's URL, or two files"),
        (["http://127.0.0.1:1", "--prompts", "a", "b"], "name a server's URL, or two files"),
        (["http://127.0.0.1:1"], "http://127.0.0.1:1/metrics ([Errno 111] Connection refused)"),
        (["--prompts", "/none/a", "/none/b"], "/none/a: No such file"),
    ],
)
def test_a_mistake_is_one_line(words, said, capsys):
    assert main(["explain", *words]) == 1
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1
