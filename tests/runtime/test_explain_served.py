"""`kvtier explain` on the real SGLang server: each cause of a miss is brought about, and named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from explained import CauseOf, as_json, prompt_files
from serving import ADMIN, STORAGE, TOKENS, Served, config_file, flags, prompts, serving

from sgl_kvtier.cli import main
from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.runtime.tools.miss_advice import COMPARE

pytestmark = pytest.mark.server
PAGE = 16


@pytest.fixture(scope="module")
def served(servers: Any) -> Served:
    return servers.get(flags())


def stored(server: Served, seed: int, tokens: int = TOKENS) -> list[int]:
    """A prompt that the store has, and no other cache."""
    (ids,) = prompts(1, tokens, seed=seed)
    server.ask(ids)
    server.flush()
    return ids


def test_a_timestamp_makes_a_new_prompt_and_the_two_prompts_show_it(
    cause_of: CauseOf, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"It is 09:3{minute}. " + "Repair the parser, please. " * 20 for minute in (1, 2)]
    served.ask(list(texts[0].encode()))
    served.flush()
    found = cause_of(served, lambda: served.ask(list(texts[1].encode())), "new prompts", COMPARE)
    assert found["prompts"]["computed"] == len(texts[1]) and not found["store"]["pages_kept"]
    words = ["--model-path", found["server"]["model"], "--page-size", str(PAGE)]
    parting = as_json(capsys, *prompt_files(tmp_path, *texts), *words)
    assert (parting["kind"], parting["token"], parting["page"]) == ("timestamp", 10, 0)


@pytest.mark.parametrize(("key", "seed"), [("cache_salt", 401), ("extra_key", 407)])
def test_another_namespace_makes_new_pages_of_an_old_prompt(
    cause_of: CauseOf,
    served: Served,
    key: str,
    seed: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A salt, and the extra key, to which SGLang adds an adapter's id (`test_lora_served.py`)."""
    ids = stored(served, seed)
    ask = lambda: served.ask(ids, **{key: "other"})  # noqa: E731
    cause_of(served, ask, "new prompts", "another cache salt or LoRA adapter")
    requests = [{"input_ids": ids, **more} for more in ({}, {key: "other"})]
    parting = as_json(capsys, *prompt_files(tmp_path, *requests))
    assert (parting["kind"], parting["part"], parting["hit_tokens"]) == ("namespace", key, 0)


def test_a_template_that_drops_reasoning_renders_the_same_turns_anew(
    cause_of: CauseOf, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two turns of one conversation: the second one leaves out how the first answer was found."""
    told = {"role": "user", "content": "Repair the parser, please. " * 4}
    more = {"role": "user", "content": "And now its tests, please. " * 20}
    answers = ["<think>It has a loop.</think>Done.", "Done."]
    turns = [[told, {"role": "assistant", "content": text}, more] for text in answers]

    def chat(messages: list[dict[str, str]]) -> None:
        served.call("POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 2})

    chat(turns[0])
    served.flush()
    found = cause_of(served, lambda: chat(turns[1]), "new prompts", "a template")
    assert found["prompts"]["computed"] > 500 and not found["store"]["pages_kept"]
    files = prompt_files(tmp_path, *({"messages": messages} for messages in turns))
    words = ["--model-path", found["server"]["model"], "--page-size", str(PAGE)]
    parting = as_json(capsys, *files, *words)
    assert (parting["kind"], parting["message"]) == ("template", 1)
    assert parting["hit_tokens"] == found["prompts"]["storage"]


def test_prompts_that_are_shorter_than_a_page_are_no_miss_of_the_store(
    cause_of: CauseOf, served: Served
) -> None:
    short = prompts(3, PAGE - 4, seed=402)
    act = lambda: [served.ask(ids, 2) for ids in short]  # noqa: E731
    found = cause_of(served, act, "short prompts", "a smaller --page-size")
    assert found["prompts"]["requests"] == 3 and not found["prompts"]["storage"]


def test_two_prompts_that_part_inside_a_page_share_the_whole_pages_before_it(
    cause_of: CauseOf, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, (rest,) = stored(served, 416), prompts(1, seed=417)
    parting = 24 * PAGE + PAGE // 2
    other = [*ids[:parting], ids[parting] + 1, *rest[: TOKENS - parting - 1]]
    found = cause_of(served, lambda: served.ask(other), "new prompts", COMPARE)
    assert found["prompts"]["storage"] == 24 * PAGE
    files = prompt_files(tmp_path, ids, other)
    assert main(["explain", *files, "--page-size", str(PAGE)]) == 0
    said = capsys.readouterr().out
    assert f"token {parting}" in said and f"24 (of {PAGE} tokens)" in said
    assert f"{24 * PAGE} of {TOKENS} tokens, 64" in said
    assert "other: the token ids differ." in said


def test_a_stored_prompt_below_the_threshold_was_not_asked_for(
    cause_of: CauseOf, served: Served
) -> None:
    ids = stored(served, 403, 62)
    says = "at least 64 tokens: lower prefetch_threshold"
    found = cause_of(served, lambda: served.ask(ids), "prefetch threshold", says)
    assert found["server"]["prefetch_threshold_tokens"] == 64 and found["store"]["pages_kept"] >= 3


def test_a_rejected_candidate_is_a_hit_that_a_setting_would_restore(
    cause_of: CauseOf, served: Served
) -> None:
    ids = stored(served, 404)

    def least(tokens: int) -> None:
        told = {"server_args": {"kvtier.policy.min_restore_tokens": tokens}}
        served.call("POST", "/set_internal_state", told, ADMIN)

    least(10_000)
    try:
        says = "lower policy.min_restore_tokens"
        found = cause_of(served, lambda: served.ask(ids), "rejected", says)
    finally:
        least(PolicyConfig().min_restore_tokens)
    assert [row["reason"] for row in found["declined"]] == ["short"]
    assert found["prompts"]["storage"] == (TOKENS - 1) // PAGE * PAGE


def test_a_prompt_that_the_device_has_hits(cause_of: CauseOf, served: Served) -> None:
    (ids,) = prompts(1, seed=405)
    served.ask(ids)
    found = cause_of(served, lambda: served.ask(ids), "hits", "no cache could have had")
    assert found["prompts"]["device"] == (TOKENS - 1) // PAGE * PAGE


def test_the_command_explains_a_servers_life(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.ask(stored(served, 406))
    served.settle()
    found = as_json(capsys, served.server.url)
    assert found["prompts"]["storage"] and found["prompts"]["computed"]
    assert found["store"]["read_bytes_per_s"] > 0 and found["store"]["break_even_bytes_per_s"] > 0
    assert found["restorations"]["ended"]["met"]
    assert main(["explain", served.server.url]) == 0
    assert "Prompt tokens of" in capsys.readouterr().out


@pytest.fixture(scope="module")
def attached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of its own, to which other stores are attached."""
    folder = tmp_path_factory.mktemp("explained")
    with serving(folder, flags(), config_file(folder)) as server:
        yield server


def attach(server: Served, write_policy: str = "write_through", **sections: Any) -> None:
    """Another store, for a server that has come to rest."""
    server.flush()
    server.call("DELETE", STORAGE, None, ADMIN)
    # Its folder is the section's, or the one that it had at first.
    config = config_file(server.server.folder / sections.pop("folder", "first"), **sections)
    server.attach(config, hicache_write_policy=write_policy)


@pytest.mark.slow
def test_causes_that_lie_in_the_store(cause_of: CauseOf, attached: Served) -> None:
    """A write policy, an eviction, another fingerprint, and writes that still wait at the end."""
    attach(attached, "write_through_selective")
    (ids,) = prompts(1, seed=411)
    attached.ask(ids)
    attached.flush()
    says = "write_through stores it the first time"
    cause_of(attached, lambda: attached.ask(ids), "write_through_selective", says)

    tiny = {"capacity_bytes": "2MiB", "segment_bytes": "512KiB"}
    attach(attached, folder="tiny", store=tiny)
    asked = prompts(6, seed=412)
    for one in asked:
        attached.ask(one)
    attached.flush()
    says = "to make room: raise store.capacity_bytes (the first rank's part "
    found = cause_of(attached, lambda: attached.ask(asked[0]), "evicted", says)
    assert found["store"]["pages_evicted"]

    attach(attached)
    ids = stored(attached, 413)
    model = attached.call("GET", "/server_info")["model_path"]
    attached.call("POST", "/update_weights_from_disk", {"model_path": model}, ADMIN)
    attach(attached)
    says = "made another fingerprint, and kvtier stat FOLDER says"
    found = cause_of(attached, lambda: attached.ask(ids), "empty store", says)
    assert found["store"]["pages"] >= TOKENS // PAGE and not found["prompts"]["storage"]

    attach(attached, folder="slow", throttle={"write_gbps": 0.0003})
    for one in prompts(25, seed=414):  # more than device and host memory hold
        attached.ask(one, 1)
    last = prompts(25, seed=414)[16:19]
    act = lambda: [attached.ask(ids, 1) for ids in last]  # noqa: E731
    found = cause_of(attached, act, "write pending", "still wait to be written")
    assert found["store"]["writes_waiting"] > 0


@pytest.mark.slow
def test_a_read_that_sglang_ended_at_its_deadline(cause_of: CauseOf, tmp_path: Path) -> None:
    """Slow storage, a policy that waits a hundredth of a second, and no restoration."""
    config = config_file(
        tmp_path,
        policy={"restore": "off"},
        throttle={"read_gbps": 0.0003},
        prefetch_timeout_base=0.01,
        prefetch_timeout_per_ki_token=0.01,
    )
    with serving(tmp_path, flags(hicache_storage_prefetch_policy="timeout"), config) as server:
        ids = stored(server, 415)
        says = "ended the read before it was done; what helps: --hicache-storage-prefetch-policy"
        found = cause_of(server, lambda: server.ask(ids), "deadline", says)
        assert found["prompts"]["computed"] > TOKENS // 2
