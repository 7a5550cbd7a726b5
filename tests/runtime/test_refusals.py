"""Every reason why a server goes SGLang's own way, asked for by a real command line, and what its
line says.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_lines import KVTIER, PLAIN, launching, mla_model, window_model
from pools import host_pool, unequal_pool
from sglang.srt.arg_groups.model_override_base import model_config_of
from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import PoolName, SidecarPoolSpec
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.platforms import current_platform
from sglang.srt.server_args import ServerArgs

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.runtime import settings
from sgl_kvtier.runtime.scheduler import refusals
from sgl_kvtier.runtime.scheduler import setup as restore_setup
from sgl_kvtier.runtime.scheduler.refusals import (
    OF_ARGUMENTS,
    OF_MODEL,
    OF_STATES,
    SIDE_PAGES,
    STAGES,
    UNPROVEN,
    WIDTHS,
)
from sgl_kvtier.runtime.settings import looks_ahead

BOTH = PolicyConfig(restore="both", prefetch="off", eviction="lru")
AUTO = PolicyConfig(restore="auto", prefetch="off", eviction="lru")
AHEAD = PolicyConfig(restore="both", prefetch="on", eviction="next-use")
ONLY_AHEAD = PolicyConfig(restore="off", prefetch="on", eviction="next-use")

CHAIN = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
TREE = "--speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 6 --device cuda --attention-backend flashinfer"

BY_FLAGS = [
    ("chunked prefill", "--chunked-prefill-size", "--chunked-prefill-size -1"),
    ("pages of one token", "--page-size 64", "--page-size 1"),
    ("host pages in pieces", "--hicache-mem-layout page_first_direct", "--hicache-mem-layout layer_first"),
    ("buffer only", "--hicache-host-memory-mode cache", "--hicache-host-memory-mode buffer_only"),
    ("speculative decoding in another way", "--speculative-algorithm EAGLE", "--model-path MLA --speculative-algorithm DFLASH --speculative-draft-model-path MLA --speculative-dflash-block-size 4"),
    ("multi-layer EAGLE", "--enable-multi-layer-eagle", "--model-path MLA --speculative-algorithm EAGLE --enable-multi-layer-eagle"),
    ("several branches", "--speculative-eagle-topk 1", f"--model-path MLA --speculative-algorithm EAGLE {TREE}"),
    ("deterministic inference", "--prefill-attention-backend triton", "--device cuda --enable-deterministic-inference --attention-backend triton --prefill-attention-backend flashinfer"),
    ("experts whose weights move", "--dwdp-size", "--dwdp-size 2 --tp 2"),
    ("experts whose weights move", "--elastic-ep-join-mode", "--elastic-ep-backend mooncake --elastic-ep-join-mode scale --elastic-ep-join-rank-offset 1 --nnodes 2 --node-rank 1 --max-ep-size 2 --tp 2"),
    ("apart", "--disaggregation-mode", "--disaggregation-mode prefill"),
    ("several machines", "--nnodes 1", "--pp-size 2 --nnodes 2"),
    ("parallelism of attention", "--attn-cp-size 1", "--attn-cp-size 2 --tp 2"),
    ("parallelism of decoding", "--dcp-size 1", "--model-path MLA --dcp-size 2 --tp 2"),
]  # fmt: skip
"""What the line names, the flag that mends it, and the flags of a server that is refused."""

BY_MODEL = [
    ("radix cache is off", "--model-impl sglang", {"disable_radix_cache": True}),
    (
        "states and window pages",
        'policy.restore = "off"',
        {"is_hybrid_ssm": True, "is_hybrid_swa": True},
    ),
]
"""What the line names, what mends it, and what SGLang has found out about the model when it builds
its cache.
"""

BY_STATES = [
    ("an accelerator that is not NVIDIA's", "SGLANG_ENABLE_WAR_BARRIER=1", "--device cuda, AMD")
]
"""The same of models with linear layers, by flags."""

BY_PROOF = [
    ("more than one rank", 'policy.restore = "fastest"', "--tp 2"),
    ("more than one rank", 'policy.restore = "fastest"', "--pp-size 2"),
    ("more than one rank", 'policy.restore = "fastest"', "--device cuda --tp 2"),
    ("neither a CPU nor an NVIDIA GPU", 'policy.restore = "fastest"', "--device cuda, AMD"),
]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    folder = tmp_path_factory.mktemp("models")
    mla = mla_model(folder / "mla")
    with launching() as launched:
        yield lambda flags: launched(*KVTIER, *PLAIN, *flags.replace("MLA", mla).split())


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU platform refuses drafts by itself, before anybody could ask what restoring makes of
    them.
    """
    monkeypatch.setattr(
        type(current_platform), "supports_speculative_algorithm", lambda self, algorithm: True
    )
    monkeypatch.setattr(
        type(current_platform),
        "supports_speculative_draft_attention_backend",
        lambda self, algorithm, backend: True,
    )


def context(**changes: bool) -> Any:
    """What SGLang knows of a model with KV pages alone."""
    return SimpleNamespace(
        **{"disable_radix_cache": False, "is_hybrid_swa": False, "is_hybrid_ssm": False, **changes}
    )


def tree(*kinds: ComponentType, side_pools: tuple[PoolName, ...] = ()) -> Any:
    """As built for a model: with side pools whose pages lie at the slots of KV pages, as far as
    SGLang says, and in host pools that nobody knows.
    """
    specs = [SidecarPoolSpec(name, PoolName.KV) for name in side_pools]
    group = SimpleNamespace(entry_map={name: SimpleNamespace(host_pool=0) for name in side_pools})
    return SimpleNamespace(
        tree_components=(ComponentType.FULL, *kinds),
        page_size=64,
        sidecar_pool_specs=specs,
        token_to_kv_pool_allocator=None,
        cache_controller=SimpleNamespace(mem_pool_host=group),
    )


WINDOWS, LINEAR = {"is_hybrid_swa": True}, {"is_hybrid_ssm": True}
FOLLOWED = [
    ("", {}, AUTO),
    *((flags, model, BOTH) for model in (WINDOWS, LINEAR) for flags in ("", "--device cuda")),
    *(("", model, ahead) for model in (WINDOWS, LINEAR) for ahead in (AHEAD, ONLY_AHEAD)),
    (f"--model-path MLA --speculative-algorithm EAGLE {CHAIN}", WINDOWS, BOTH),
    ("--model-path MLA --tp 2", {}, AHEAD),
    (f"--model-path MLA --speculative-algorithm EAGLE {CHAIN}", {}, AHEAD),
    (f"--model-path MLA --speculative-algorithm NEXTN {CHAIN}", {}, AHEAD),
    (f"--model-path MLA --speculative-algorithm EAGLE3 --speculative-draft-model-path MLA {CHAIN}", {}, AHEAD),
    (f"--model-path MLA --speculative-algorithm STANDALONE --speculative-draft-model-path MLA {CHAIN}", {}, AHEAD),
    ("--model-path MLA --speculative-algorithm NGRAM --device cuda --attention-backend flashinfer", {}, AHEAD),
]  # fmt: skip
"""Flags, what SGLang has found out about the model, and settings that are followed."""


def named(flags, model, asked):
    said = (flags, *model, f"restore {asked.restore}", f"prefetch {asked.prefetch}")
    return ", ".join(filter(None, said))


@pytest.mark.parametrize(
    ("flags", "model", "asked"), FOLLOWED, ids=[named(*case) for case in FOLLOWED]
)
def test_what_is_known_is_refused_nothing(launch, drafts, flags, model, asked):
    args = launch(flags)
    assert restore_setup.own_way(args, context(**model), asked) is None
    assert restore_setup.not_followed(args, asked) == []


def test_a_tree_of_kv_pages_lacks_nothing():
    assert refusals.lacking(tree()) is None


def test_every_refusal_has_a_case():
    cases = [what for what, _, _ in (*BY_FLAGS, *BY_MODEL, *BY_STATES)]
    assert [
        refusal.what
        for refusal in (*OF_MODEL, *OF_STATES, *OF_ARGUMENTS)
        if not any(what in refusal.what for what in cases)
    ] == []
    assert [
        refusal.what
        for refusal in UNPROVEN
        if not any(what in refusal.what for what, _, _ in BY_PROOF)
    ] == []


@pytest.mark.parametrize(
    ("what", "mend", "flags"), BY_FLAGS, ids=[flags for _, _, flags in BY_FLAGS]
)
def test_flags_that_restoring_cannot_follow_are_refused_by_name_with_what_mends_it(
    launch, drafts, what, mend, flags
):
    line = restore_setup.own_way(launch(flags), context(), BOTH)
    assert line is not None and "SGLang's own way" in line
    assert what in line and mend in line.partition("(")[2]
    assert line.count("(omit ") + line.count("(--") == 1, "what is not refused is not named"


@pytest.mark.parametrize(("what", "mend", "found"), BY_MODEL, ids=[what for what, _, _ in BY_MODEL])
def test_models_that_restoring_does_not_know_are_refused_each_by_its_own_reason(
    launch, what, mend, found
):
    line = str(restore_setup.own_way(launch(""), context(**found), BOTH))
    assert what in line and mend in line
    assert [other for other, _, _ in BY_MODEL if other in line] == [what]


@pytest.mark.parametrize(("what", "mend", "flags"), BY_STATES)
def test_states_are_restored_where_writes_wait_for_reads(launch, monkeypatch, what, mend, flags):
    flags, _, _ = flags.partition(", ")
    linear, args = context(is_hybrid_ssm=True), launch(flags)
    assert restore_setup.own_way(args, linear, BOTH) is None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    line = str(restore_setup.own_way(args, linear, BOTH))
    assert what in line and mend in line
    assert restore_setup.own_way(args, context(), BOTH) is None
    assert restore_setup.own_way(launch(""), linear, BOTH) is None
    with envs.SGLANG_ENABLE_WAR_BARRIER.override(True):
        assert restore_setup.own_way(args, linear, BOTH) is None


@pytest.mark.parametrize(
    ("what", "mend", "flags"), BY_PROOF, ids=[flags for _, _, flags in BY_PROOF]
)
def test_what_nobody_has_run_yet_has_to_be_asked_for_by_name(
    launch, monkeypatch, what, mend, flags
):
    flags, _, amd = flags.partition(", ")
    monkeypatch.setattr(torch.version, "hip", "7.0" if amd else None)
    args = launch(flags)
    line = str(restore_setup.own_way(args, context(), AUTO))
    assert what in line and mend in line
    for named in (BOTH, PolicyConfig(restore="fastest")):
        assert restore_setup.own_way(args, context(), named) is None
        assert restore_setup.not_followed(args, named) == []
        assert not looks_ahead(restore_setup.in_force(args, named)), "only auto's own ground"


def test_one_nvidia_gpu_restores_and_looks_ahead_by_default(launch):
    args = launch("--device cuda")
    assert restore_setup.own_way(args, context(), PolicyConfig()) is None
    assert restore_setup.not_followed(args, PolicyConfig()) == []
    followed = restore_setup.in_force(args, PolicyConfig())
    assert (followed.restore, followed.prefetch, followed.eviction) == ("auto", "on", "next-use")
    off = restore_setup.in_force(args, PolicyConfig(restore="off"))
    assert (off.prefetch, off.eviction) == ("off", "lru")
    some = restore_setup.in_force(args, PolicyConfig(prefetch="off"))
    assert (some.prefetch, some.eviction) == ("off", "next-use"), "each setting for itself"


def test_all_reasons_are_said_at_once(launch):
    line = str(
        restore_setup.own_way(
            launch("--page-size 1 --disaggregation-mode prefill"),
            context(disable_radix_cache=True),
            BOTH,
        )
    )
    assert all(what in line for what in ("radix cache is off", "--page-size 64", "are apart"))


@pytest.mark.parametrize(
    ("flags", "anchored", "apart"),
    [
        ("", True, None),
        ("--enable-mixed-chunk", False, None),
        ("--enable-mixed-chunk --tp 2", False, None),
        ("--enable-mixed-chunk", True, "windows or states"),
        ("--enable-mixed-chunk --pp-size 2", False, "pipeline stages"),
        ("--enable-mixed-chunk --tp 2 --attn-dp-size 2", False, "data-parallel attention"),
        (f"--enable-mixed-chunk --model-path MLA --speculative-algorithm EAGLE {CHAIN}", False,
         "speculative decoding"),
    ],
)  # fmt: skip
def test_chunks_are_mixed_with_decoding_only_where_somebody_has_run_it(
    launch, drafts, flags, anchored, apart
):
    args = launch(flags)
    assert restore_setup.own_way(args, context(), BOTH) is None
    assert refusals.not_mixed(args, anchored) == apart


@pytest.mark.parametrize(
    "flags",
    ["--disaggregation-mode prefill", f"--model-path MLA --speculative-algorithm EAGLE {TREE}"],
)
def test_a_server_that_was_to_look_ahead_says_that_it_does_not(launch, drafts, flags):
    args = launch(flags)
    assert "pages are prefetched and evicted SGLang's own way" in str(
        restore_setup.own_way(args, context(), AHEAD)
    )
    line = str(restore_setup.own_way(args, context(), ONLY_AHEAD))
    assert line.startswith("kvtier: pages are prefetched and evicted SGLang's own way: ")


def test_with_stages_looking_ahead_is_refused_and_restoring_goes_on(launch):
    args = launch("--pp-size 2")
    assert restore_setup.own_way(args, context(), AHEAD) is None
    (line,) = restore_setup.not_followed(args, AHEAD)
    assert "more than one pipeline stage" in line and "--pp-size 1" in line
    assert str(STAGES) in str(restore_setup.own_way(args, context(), ONLY_AHEAD))


def test_a_server_that_looks_ahead_says_when_it_does_not_restore_besides(launch):
    ahead = PolicyConfig(restore="auto", prefetch="on", eviction="next-use")
    args = launch("--tp 2")
    assert restore_setup.own_way(args, context(), ahead) is None
    (line,) = restore_setup.not_followed(args, ahead)
    assert "more than one rank" in line and 'policy.restore = "fastest"' in line


def test_what_else_was_built_beside_kv_pages_is_refused_by_its_name():
    assert str(refusals.lacking(tree(side_pools=(PoolName.INDEXER,)))) == f"indexer: {SIDE_PAGES}"
    assert (
        str(refusals.lacking(tree(ComponentType.SWA, ComponentType.MAMBA)))
        == f"swa, mamba: {SIDE_PAGES}"
    )


@pytest.mark.parametrize("unequal", [PoolName.KV, PoolName.SWA])
def test_keys_and_values_of_different_widths_are_refused_in_either_pool(unequal):
    equal = tree()
    pools = {name: host_pool() for name in (PoolName.KV, PoolName.SWA)}
    group = equal.cache_controller.mem_pool_host
    group.entries = [SimpleNamespace(name=name, host_pool=pool) for name, pool in pools.items()]
    assert refusals.lacking(equal) is None
    group.entries[list(pools).index(unequal)].host_pool = unequal_pool()
    assert refusals.lacking(equal) == str(WIDTHS)


def test_the_flag_named_for_window_pages_keeps_whole_sequences(launch, tmp_path):
    flags = f"--model-path {window_model(tmp_path)} --attention-backend triton"
    windows, whole = (
        model_config_of(launch(flags + more)) for more in ("", " --disable-hybrid-swa-memory")
    )
    assert (windows.is_hybrid_swa, whole.is_hybrid_swa) == (True, False)


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        (("--hicache-storage-backend", "kvtier"), {}),
        ((), {"KVTIER": "1"}),
        ((), {"KVTIER": "1", "KVTIER_STORE_PATH": "/mnt/kv", "KVTIER_CAPACITY": "3GiB"}),
    ],
    ids=["one flag", "one variable", "variables"],
)
def test_one_line_turns_the_tier_on_and_the_log_says_where_pages_go(
    flags, variables, monkeypatch, caplog, tmp_path
):
    for name, value in {"XDG_CACHE_HOME": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    with launching() as launched, caplog.at_level(logging.INFO):
        args = launched(*flags)
    assert settings.uses_backend(args) and args.enable_hierarchical_cache
    store = settings.of_server(args).store
    wanted = ("/mnt/kv", 3 << 30) if len(variables) > 1 else (f"{tmp_path}/kvtier/pages", 64 << 30)
    assert (store.path, store.capacity_bytes) == wanted
    flags_in_force = "--enable-hierarchical-cache and --hicache-storage-backend kvtier are in force"
    said = f"kvtier: {flags_in_force}; pages of {args.page_size} tokens are stored in {wanted[0]}, "
    assert f"{said}at most" in caplog.text


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        ("", ""),
        ("0", ""),
        ("off", ""),
        ("1", "--hicache-storage-backend file"),
        ("1", "--disable-radix-cache"),
        ("1", "--disaggregation-mode prefill"),
    ],
)
def test_without_it_or_beside_another_choice_a_server_is_sglangs_own(value, flags, monkeypatch):
    monkeypatch.setenv("KVTIER", value)
    parser = argparse.ArgumentParser()
    with launching():
        ServerArgs.add_cli_args(parser)
        args = parser.parse_args(["--model-path", "m", *flags.split()])
    assert args.hicache_storage_backend == ("file" if "file" in flags else None)
    assert not args.enable_hierarchical_cache


def test_a_value_that_is_neither_on_nor_off_is_refused(monkeypatch):
    monkeypatch.setenv("KVTIER", "maybe")
    with pytest.raises(ConfigError, match='KVTIER = "maybe"'):
        settings.wanted_by_environment()


def test_a_relative_cache_folder_of_the_environment_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert settings.store_of_environment()["path"] == "~/.cache/kvtier/pages"


def test_settings_go_before_variables(monkeypatch):
    monkeypatch.setenv("KVTIER_STORE_PATH", "/of/the/environment")
    monkeypatch.setenv("KVTIER_CAPACITY", "1GiB")
    store = settings.from_extra_config({"store": {"path": "/of/the/file"}}).store
    assert (store.path, store.capacity_bytes) == ("/of/the/file", 1 << 30)
    monkeypatch.setenv("KVTIER_CAPACITY", "much")
    with pytest.raises(ConfigError, match="much"):
        settings.from_extra_config(None)


@pytest.mark.parametrize(
    ("flags", "error", "says"),
    [
        ((*KVTIER[:4], "{"), ConfigError, "--hicache-storage-backend-extra-config"),
        ((*KVTIER[:4], '{"store": {"path": "p", "io_threads": 0}}'), ConfigError, "store.io_threads"),
        ((*KVTIER, "--attention-backend", "intel_amx"), ValueError, "SGLANG_USE_CPU_ENGINE"),
        ((*KVTIER, "--hicache-mem-layout", "page_head"), ValueError, "page_first_direct"),
    ],
    ids=lambda case: " ".join(case[-2:]) if isinstance(case, tuple) else "",
)  # fmt: skip
def test_what_cannot_work_at_all_ends_the_launch_with_what_to_do(flags, error, says):
    with launching() as launched, pytest.raises(error, match=says):
        launched(*flags)
