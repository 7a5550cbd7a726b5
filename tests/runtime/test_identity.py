"""Whose pages are whose: what must and what must not make a new identity."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pools import (
    PAGE,
    Ranks,
    host_pool,
    index_key_pool,
    latent_host_pool,
    latent_pool,
    server_args,
    state_pool,
    storage_config,
)
from safetensors.numpy import save_file
from sglang.srt.distributed import parallel_state

from sgl_kvtier.runtime.backend import file_digests, identity
from sgl_kvtier.runtime.backend.host_pages import shape_of, share_of
from sgl_kvtier.runtime.backend.page_shape import PageShape, RankShare
from sgl_kvtier.runtime.sglang import page_hash, seams

HEADS = {"head_num": 2, "head_dim": 32, "v_head_dim": 32}
TINY_QWEN3 = PageShape(layout="page_first_direct", page_size=PAGE, dtype="torch.float32", **HEADS)
"""A page of the lab's tiny-qwen3 on one rank, said without a host pool."""


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8}')
    save_file({"a": np.arange(5000.0), "b": np.zeros(3000)}, folder / "model.safetensors")
    return folder


def fingerprint(model, *, pools=None, config=None, **args):
    return described(model, pools or {"kv": host_pool()}, config, **args).fingerprint


def described(model, pools, config=None, **args):
    return identity.identity_of(
        server_args(str(model), **args),
        share_of(storage_config(**(config or {}))),
        {name: shape_of(pool) for name, pool in pools.items()},
    )


def not_shareable(model, **args):
    return identity.not_shareable(server_args(str(model), **args))


def count_reads(monkeypatch):
    """The name of a file for each part of it that is read from now on."""
    names = []
    part = file_digests._part

    def counted(path, start, progress):
        names.append(path.name)
        return part(path, start, progress)

    monkeypatch.setattr(file_digests, "_part", counted)
    return names


@pytest.fixture
def written_model(tmp_path):
    """A model folder of which every byte is known, so that its identity is."""
    folder = tmp_path / "tiny-qwen3"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 128}')
    (folder / "model.bin").write_bytes(bytes(range(256)) * 64)
    return folder


@pytest.mark.parametrize(
    ("config", "folder"),
    [
        ({}, "tiny-qwen3-88e44dd0c5671d89"),
        ({"tp_size": 2, "tp_rank": 1, "tp_lcm_size": 2}, "tiny-qwen3-589045a0bdd69b6b"),
    ],
    ids=["one-rank", "two-ranks"],
)
def test_folders_written_so_far_keep_their_names(written_model, config, folder):
    assert described(written_model, {"kv": host_pool()}, config).directory_name == folder


def test_an_identity_needs_no_host_pool(written_model):
    who = identity.identity_of(server_args(str(written_model)), RankShare(), {"kv": TINY_QWEN3})
    assert who == described(written_model, {"kv": host_pool()})


@pytest.mark.parametrize(
    ("pool", "says"),
    [
        (lambda: host_pool("layer_first", torch.bfloat16), {**HEADS, "layout": "layer_first", "page_size": 16, "dtype": "torch.bfloat16"}),
        (lambda: latent_host_pool(latent_pool(2)), {"kv_cache_dim": 40, "layout": "page_first_direct", "page_size": 16, "dtype": "torch.float32"}),
        (index_key_pool, {"layout": "page_first_direct", "page_size": 64, "dtype": "torch.bfloat16"}),
        (state_pool, {"layout": "page_first_direct", "page_size": 1, "dtype": "torch.float32", "state_dtype": "torch.float32"}),
    ],
    ids=["heads", "latents", "index-keys", "states"],
)  # fmt: skip
def test_every_kind_of_host_pool_is_described_as_before(pool, says):
    assert shape_of(pool()).fields() == {**says, "format": "None"}


def test_a_release_that_names_and_lays_out_pages_alike_has_the_same_identity(model, monkeypatch):
    here = fingerprint(model)
    monkeypatch.setattr(seams, "installed_version", lambda: "0.6.0")
    assert fingerprint(model) == here
    monkeypatch.setattr(seams, "page_format", lambda: "code-0123")
    other = fingerprint(model)
    assert other != here
    monkeypatch.setattr(page_hash, "names_digest", lambda: "0123")
    assert fingerprint(model) not in (here, other)


def test_an_argument_that_is_off_is_as_one_that_an_older_release_does_not_have(model):
    assert fingerprint(model, enable_hisparse=False) == fingerprint(model)
    assert fingerprint(model, enable_hisparse=True) != fingerprint(model)


def test_a_storage_configuration_of_an_older_release_is_one_rank_of_what_it_does_not_know():
    config = storage_config()
    newer = ("dcp", "dp_")
    fields = [field.name for field in dataclasses.fields(config)]
    known = {name: getattr(config, name) for name in fields if not name.startswith(newer)}
    older = SimpleNamespace(**known)
    assert share_of(older) == share_of(config)
    del older.tp_size
    with pytest.raises(AttributeError):
        share_of(older)


def test_all_ranks_of_a_server_have_one_identity(model):
    first = fingerprint(model, config={"tp_size": 2, "tp_rank": 0})
    assert first == fingerprint(model, config={"tp_size": 2, "tp_rank": 1})


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "params.json", "hf_quant_config.json", "model.safetensors.index.json",
        "kv_cache_scales.json", "preprocessor_config.json", "adapter_config.json",
    ],
)  # fmt: skip
def test_a_changed_configuration_changes_the_weights_digest(model, name):
    before = identity.weights_digest(model)
    (model / name).write_text('{"hidden_size": 8, "rope_theta": 5}')
    assert identity.weights_digest(model) != before


def test_what_changes_no_page_of_the_same_tokens_leaves_the_weights_digest(model):
    before = identity.weights_digest(model)
    names = """
    tokenizer.json tokenizer_config.json vocab.json special_tokens_map.json added_tokens.json
    generation_config.json chat_template.json README.md optimizer.pt modeling_custom.py
    """
    for name in names.split():
        (model / name).write_text("{}")
    assert identity.weights_digest(model) == before


def test_the_models_own_code_is_part_of_it_where_it_is_trusted(model):
    code = model / "modeling_custom.py"
    seen = []
    for text in ("a = 1", "a = 2"):
        code.write_text(text)
        seen.append((fingerprint(model), fingerprint(model, trust_remote_code=True)))
    assert seen[0][0] == seen[1][0] and seen[0][1] != seen[1][1]


def test_random_weights_are_not_read(model, monkeypatch):
    read = count_reads(monkeypatch)
    dummy = fingerprint(model, load_format="dummy")
    (model / "model.safetensors").write_bytes(b"other")
    assert fingerprint(model, load_format="dummy") == dummy
    assert read and set(read) == {"config.json"}


def test_a_draft_is_known_by_its_contents_wherever_it_lies(model, tmp_path):
    drafts = [tmp_path / "one", tmp_path / "two"]
    for draft in drafts:
        draft.mkdir()
        (draft / "config.json").write_text("{}")
        save_file({"a": np.arange(500.0)}, draft / "model.safetensors")
    first, second = [fingerprint(model, speculative_draft_model_path=str(d)) for d in drafts]
    assert first == second != fingerprint(model)
    save_file({"a": np.arange(500.0) + 1}, drafts[1] / "model.safetensors")
    assert fingerprint(model, speculative_draft_model_path=str(drafts[1])) != first
    assert not_shareable(model, speculative_draft_model_path=str(drafts[1])) is None


def test_another_order_of_pages_on_the_device_is_another_identity(model, monkeypatch):
    usual = {"kv": host_pool()}
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    by_heads = {"kv": host_pool()}
    assert fingerprint(model, pools=by_heads) != fingerprint(model, pools=usual), "by what it is"
    monkeypatch.delenv("SGLANG_USE_HND_KVCACHE")
    assert shape_of(by_heads["kv"]).device_layout == "hnd"
    assert fingerprint(model, pools=by_heads) != fingerprint(model, pools=usual)


def test_states_in_another_precision_are_another_identity(model):
    def states(dtype):
        pool = state_pool()
        pool.temporal_dtype = dtype
        return {"kv": host_pool(), "mamba": pool}

    seen = [fingerprint(model, pools=states(d)) for d in (torch.float16, torch.bfloat16)]
    assert seen[0] != seen[1]


def test_a_file_named_by_its_hash_is_taken_at_its_name(model, tmp_path):
    blob = tmp_path / ("ab" * 32)
    (model / "model.safetensors").rename(blob)
    (model / "model.safetensors").symlink_to(blob)
    named = identity.weights_digest(model)
    other = tmp_path / ("cd" * 32)
    blob.rename(other)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(other)
    assert identity.weights_digest(model) != named


def test_a_model_that_is_one_file_is_known_by_its_contents(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(100_000))
    before = identity.weights_digest(identity.model_folder(str(file)))
    file.write_bytes(bytes(99_999) + b"1")
    assert identity.weights_digest(identity.model_folder(str(file))) != before


def test_the_order_of_a_set_of_names_is_no_other_identity(model):
    names = [f"module{n}" for n in range(8)]
    sets = {tuple(set(order)) for order in (names, names[::-1], names[4:] + names[:4])}
    seen = {fingerprint(model, lora_target_modules=set(order)) for order in sets}
    assert seen == {fingerprint(model, lora_target_modules=sorted(names))}


def test_random_weights_differ_by_their_seed(model):
    dummy = {"load_format": "dummy"}
    assert fingerprint(model, **dummy, random_seed=1) != fingerprint(model, **dummy, random_seed=2)
    assert fingerprint(model, random_seed=1) == fingerprint(model, random_seed=2)


def test_weights_changed_at_run_time_never_match_again(model, monkeypatch):
    monkeypatch.setattr(identity, "_runtime_weights", None)
    before = fingerprint(model)
    identity.weights_changed()
    first = fingerprint(model)
    identity.weights_changed()
    assert len({before, first, fingerprint(model)}) == 3


def test_ranks_of_a_server_agree_on_weights_changed_at_run_time_and_two_servers_do_not(
    model, monkeypatch
):
    def ranks_of_a_server():
        """The fingerprints of two ranks: each has a process of its own."""
        found = []
        ranks = Ranks()
        monkeypatch.setattr(parallel_state, "get_tp_group", lambda: ranks)
        for _ in range(2):
            monkeypatch.setattr(identity, "_runtime_weights", None)
            identity.weights_changed()
            identity.agree_on_weights()
            found.append(fingerprint(model))
        return found

    one, other = ranks_of_a_server(), ranks_of_a_server()
    assert len({*one}) == len({*other}) == 1 and one != other


def test_ranks_say_nothing_of_weights_that_were_not_changed(model, monkeypatch):
    monkeypatch.setattr(identity, "_runtime_weights", None)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: pytest.fail("a collective"))
    before = fingerprint(model)
    identity.agree_on_weights()
    assert fingerprint(model) == before


def test_ranks_with_pages_of_their_own_have_folders_that_no_other_reads():
    shares = [
        share_of(storage_config(tp_rank=t, tp_size=12, pp_rank=p, pp_size=2))
        for t in range(12)
        for p in (0, 1)
    ]
    for share in shares:
        read = [one for one in shares if re.fullmatch(share.alike(), one.folder())]
        assert read == [share]
        assert share.holders() == 24


def test_ranks_with_the_same_pages_have_folders_that_all_of_them_read():
    shares = [
        share_of(storage_config(tp_rank=t, tp_size=2, dp_rank=d)) for t in (0, 1) for d in (0, 1)
    ]
    assert {share.folder(replicated=True) for share in shares} == {"tp0-pp0"}
    assert {share.holders(replicated=True) for share in shares} == {1}
    alike = shares[0].alike(replicated=True)
    assert all(re.fullmatch(alike, name) for name in ("tp0-pp0", "tp1-pp0", "tp0-pp0-dp1-copy1"))
    assert not re.fullmatch(alike, "tp0-pp1")
    assert re.fullmatch(shares[0].alike(), "tp0-pp0-dp1-copy1"), "as it was named once"
    assert not re.fullmatch(shares[0].alike(), "tp1-pp0")


def test_a_model_named_by_its_hub_name_is_its_cached_snapshot(tmp_path, monkeypatch):
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    cached = {"org/model": str(snapshot / "config.json")}
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda name, file, **_: cached.get(name)
    )
    assert identity.model_folder("org/model") == snapshot
    assert identity.model_folder("org/other") == Path("org/other")
    assert identity.model_folder(str(snapshot)) == snapshot


@pytest.mark.parametrize("algorithm", [None, "NEXTN"])
def test_pages_of_weights_that_were_read_can_be_shared(model, algorithm):
    draft = {} if algorithm is None else {"speculative_draft_model_path": str(model)}
    assert not_shareable(model, speculative_algorithm=algorithm, **draft) is None


def test_pages_of_weights_of_which_only_a_path_is_known_cannot_be_shared(model):
    assert "no-such-folder" in not_shareable("no-such-folder")
    (model / "model.safetensors").unlink()
    assert str(model) in not_shareable(model)
    assert not_shareable(model, load_format="dummy") is None


@pytest.mark.parametrize(
    "args",
    [
        {"load_format": "remote"},
        {"speculative_draft_model_path": "/models/draft"},
        {"quantization_param_path": "/models/scales.json"},
        {"lora_paths": [SimpleNamespace(lora_name="a", lora_path="/models/adapter")]},
    ],
    ids=lambda args: next(iter(args)),
)
def test_pages_that_a_file_changes_of_which_only_a_path_is_known_cannot_be_shared(model, args):
    why = not_shareable(model, **args)
    assert "/models/" in why or "--load-format remote" in why


def test_pages_of_weights_changed_at_run_time_cannot_be_shared(model, monkeypatch):
    monkeypatch.setattr(identity, "_runtime_weights", None)
    identity.weights_changed()
    assert "at run time" in not_shareable(model)
