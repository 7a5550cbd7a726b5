"""The arms differ in their cache tiers and in nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import options_of, parsed

from sgl_kvtier.config import load_config
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment import arms
from sgl_kvtier.lab.experiment.argtypes import shape_of
from sgl_kvtier.lab.experiment.arms import (
    ARMS,
    OURS,
    STORAGE_ARMS,
    Arm,
    Setup,
    Variant,
    prepare,
    storage_folder,
)
from sgl_kvtier.lab.experiment.remote.run import REMOTE_ARMS
from sgl_kvtier.lab.experiment.restore.plan import RestoreOptions
from sgl_kvtier.lab.experiment.restore.server import setup_for, storage_bytes
from sgl_kvtier.lab.experiment.scenarios import restore
from sgl_kvtier.lab.outside import peers
from sgl_kvtier.lab.paced.launching import MOONCAKE_WAITS
from sgl_kvtier.lab.stress.server import command as fuzz
from sgl_kvtier.launch import MIXED, serve_flags

CPU = Setup(
    model_path="/m",
    served_name="m",
    device="cpu",
    page_size=16,
    chunk_tokens=512,
    device_tokens=4096,
    storage_bytes=1 << 30,
)
GPU = replace(CPU, device="cuda", page_size=64)

CACHE_FLAGS = {
    "--enable-hierarchical-cache",
    "--hicache-ratio",
    "--hicache-io-backend",
    "--hicache-mem-layout",
    "--hicache-storage-backend",
    "--hicache-storage-backend-extra-config",
}


OF_SGLANG = Arm("of SGLang", "file", arguments=("--radix-eviction-policy", "slru"))
"""A configuration that differs from another one by a flag of SGLang."""


@pytest.fixture(autouse=True)
def one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of all arms is true of one that only differs by a flag, too."""
    monkeypatch.setitem(ARMS, "flagged", OF_SGLANG)


def test_all_arms_have_the_same_model_pools_and_chunks(tmp_path: Path) -> None:
    for setup in (CPU, GPU):
        common = []
        for arm in ARMS:
            options = options_of(prepare(arm, setup, tmp_path / arm).arguments)
            common.append(
                {
                    name: value
                    for name, value in options.items()
                    if name not in {*CACHE_FLAGS, MIXED, *ARMS[arm].arguments}
                }
            )
        assert all(options == common[0] for options in common)


def test_arms_with_a_host_pool_have_the_same_one(tmp_path: Path) -> None:
    seen = {}
    for arm in ARMS:
        options = options_of(prepare(arm, CPU, tmp_path / arm).arguments)
        seen[arm] = {name: options.get(name) for name in CACHE_FLAGS if "storage" not in name}
    assert set(seen.pop("recompute").values()) == {None}
    assert all(options == seen["hicache"] for options in seen.values())


def test_storage_arms_have_folders_of_their_own_and_the_same_limits(tmp_path: Path) -> None:
    settings, folders = {}, set()
    for arm in (*STORAGE_ARMS, "flagged"):
        launch = prepare(arm, CPU, tmp_path / arm)
        path = options_of(launch.arguments)["--hicache-storage-backend-extra-config"]
        assert path.startswith("@")
        settings[arm] = json.loads(Path(path[1:]).read_text())
        folders.add(storage_folder(tmp_path / arm))
        if ARMS[arm].storage == "file":
            assert launch.env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] == str(
                storage_folder(tmp_path / arm)
            )
            assert launch.env["SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE"] == str(1 << 30)
    assert len(folders) == len(STORAGE_ARMS) + 1
    assert len({one["prefetch_threshold"] for one in settings.values()}) == 1


def test_of_the_arms_that_restore_one_looks_ahead(tmp_path: Path) -> None:
    ahead = {"prefetch": "on", "eviction": "next-use"}
    setup = replace(CPU, sections={"policy": {"restore": "both", **ahead}})
    arms = ("kvtier", "kvtier-off", "kvtier-restore")
    for arm in arms:
        prepare(arm, setup, tmp_path / arm)
    policy, off, alone = (load_config(tmp_path / arm / "storage.json").policy for arm in arms)
    assert (policy.prefetch, policy.eviction) == ("on", "next-use")
    assert {(one.prefetch, one.eviction) for one in (off, alone)} == {("off", "lru")}
    assert alone.restore == "both" and off.restore == "off"
    assert policy.restore == "both"


def test_nixl_is_told_of_its_plugin_and_of_the_arms_own_folder(tmp_path: Path) -> None:
    launch = prepare("hicache-nixl", CPU, tmp_path)
    assert options_of(launch.arguments)["--hicache-storage-backend"] == "nixl"
    assert launch.env[peers.NIXL_FOLDER] == str(storage_folder(tmp_path))
    settings = json.loads((tmp_path / "storage.json").read_text())
    assert settings["plugin"] == {"posix": {"active": True}}
    assert settings["l3_cleaner_enabled"] is False


def test_mooncake_waits_for_a_paced_devices_disk_unless_a_link_has_its_speed(
    tmp_path: Path,
) -> None:
    setup = replace(CPU, device="paced:h100-llama8b", page_size=64)
    assert MOONCAKE_WAITS in prepare("hicache-mooncake", setup, tmp_path).env
    linked = REMOTE_ARMS["hicache-mooncake"].setup(setup, "127.0.0.1:1")
    assert MOONCAKE_WAITS not in prepare("hicache-mooncake", linked, tmp_path).env
    assert MOONCAKE_WAITS not in prepare("hicache-mooncake", CPU, tmp_path).env


def test_our_settings_file_is_one_the_server_accepts(tmp_path: Path) -> None:
    prepare("kvtier", CPU, tmp_path)
    config = load_config(tmp_path / "storage.json")
    assert config.store.path == str(storage_folder(tmp_path))
    assert config.store.capacity_bytes == 1 << 30


def test_a_gpu_uses_flashinfer_and_kernels_and_a_cpu_names_no_attention(tmp_path: Path) -> None:
    gpu = options_of(prepare("kvtier", GPU, tmp_path / "g").arguments)
    assert (
        gpu["--attention-backend"],
        gpu["--hicache-io-backend"],
        gpu["--hicache-mem-layout"],
    ) == ("flashinfer", "kernel", "page_first")
    cpu = options_of(prepare("kvtier", CPU, tmp_path / "c").arguments)
    assert "--attention-backend" not in cpu
    assert (cpu["--hicache-io-backend"], cpu["--hicache-mem-layout"]) == (
        "direct",
        "page_first_direct",
    )


def test_waiting_threads_do_not_spin_on_a_cpu(tmp_path: Path) -> None:
    env = prepare("recompute", CPU, tmp_path).env
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"
    assert env["OMP_NUM_THREADS"] == "1"
    assert "OMP_WAIT_POLICY" not in prepare("recompute", GPU, tmp_path).env


def test_added_arguments_come_last_so_that_they_win(tmp_path: Path) -> None:
    launch = prepare("recompute", replace(CPU, extra=("--pp-size", "2")), tmp_path)
    assert launch.arguments[-2:] == ("--pp-size", "2")
    assert serve_flags("m", "cpu", "@k.json", ["--page-size", "32"])[-2:] == ["--page-size", "32"]


def test_a_server_for_an_accelerator_mixes_chunks_with_decoding_as_a_users_does(
    tmp_path: Path,
) -> None:
    apart = Variant(OURS, "with chunks and decoding apart", mixes=False)
    gpu = replace(GPU, device="paced:h100-llama8b", variants={"apart": apart})
    found = {
        (setup.device, arm)
        for setup in (replace(CPU, variants=gpu.variants), gpu)
        for arm in ("hicache-file", "kvtier-off", "kvtier-restore", "kvtier", "apart")
        if MIXED in prepare(arm, setup, tmp_path / setup.device / arm).arguments
    }
    assert found == {(gpu.device, "kvtier-restore"), (gpu.device, "kvtier")}
    assert MIXED in serve_flags("m", "cuda", "@k.json") and MIXED not in serve_flags("m", "cpu", "")
    refused = ["--dsa-prefill-backend=flashmla_sparse_q8"]
    assert MIXED not in serve_flags("m", "cuda", "@k.json", refused)


def test_an_unknown_arm_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        BenchError, match=f"no configuration named lmcache. There are: {', '.join(ARMS)}"
    ):
        prepare("lmcache", CPU, tmp_path)


def test_stock_alone_has_the_policy_of_reading_ahead_that_is_said(tmp_path: Path) -> None:
    flag = "--hicache-storage-prefetch-policy"
    said = replace(CPU, stock_reads="best_effort")
    for arm in STORAGE_ARMS:
        options = options_of(prepare(arm, said, tmp_path / arm).arguments)
        assert options.get(flag) == (None if arm.startswith("kvtier") else "best_effort")
        assert flag not in options_of(prepare(arm, CPU, tmp_path / "default" / arm).arguments)
    asked = replace(said, extra=(flag, "wait_complete"))
    assert options_of(prepare("hicache-file", asked, tmp_path).arguments)[flag] == "wait_complete"


# What servers on a card are asked for.

CARD = Setup("/m", "m", device="cuda", page_size=64, chunk_tokens=4096, dtype="bfloat16")
LENGTHS = [8 << 10, 16 << 10, 32 << 10, 64 << 10]


def test_float32_is_refused_where_flashinfer_is_the_attention(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="bfloat16"):
        prepare(OURS, replace(CARD, dtype="float32"), tmp_path)
    prepare(OURS, replace(CARD, dtype="float32", device="cpu"), tmp_path / "cpu")
    other = ("--attention-backend", "triton")
    prepare(OURS, replace(CARD, dtype="float32", extra=other), tmp_path / "triton")


def test_torch_samples_on_a_card_whose_sampling_modules_are_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arms, "find_spec", lambda _name: None)
    found = options_of(prepare(OURS, CARD, tmp_path).arguments)
    assert found["--sampling-backend"] == "pytorch"
    assert found["--attention-backend"] == "flashinfer"


def test_flashinfer_samples_where_its_modules_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "flashinfer" / "data" / "aot" / "sampling" / "sampling.so"
    module.parent.mkdir(parents=True)
    module.touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path / "flashinfer")])
    monkeypatch.setattr(arms, "find_spec", lambda name: spec if name == "flashinfer" else None)
    assert "--sampling-backend" not in prepare(OURS, CARD, tmp_path / "arm").arguments


@pytest.mark.parametrize("model", ["shape-8b", "lab-gpu-1b"])
def test_the_store_holds_every_prompt_of_a_model_of_ours(model: str) -> None:
    tokens, per_token = sum(LENGTHS), {"shape-8b": 131072, "lab-gpu-1b": 65536}[model]
    assert storage_bytes(None, model, "bfloat16", tokens) >= tokens * per_token
    with pytest.raises(BenchError, match="--storage-size"):
        storage_bytes(4 << 30, model, "bfloat16", tokens)
    assert storage_bytes(40 << 30, model, "bfloat16", tokens) == 40 << 30


def test_the_size_of_the_store_is_taken_at_its_word_for_a_model_that_is_not_known() -> None:
    assert storage_bytes(1 << 30, "/models/some", "auto", 65536) == 1 << 30
    assert storage_bytes(None, "/models/some", "auto", 65536) == 4 << 30


def test_a_restore_server_on_a_card_serves_bfloat16_from_a_store_of_the_size_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ("--device", "cuda", "--storage-size", "30GiB", "--lengths", "64k")
    args = RestoreOptions.of(parsed(restore, *words))
    planned = restore.options_of(args, "shape-8b", page=64, chunk=4096)
    setup = setup_for(args, shape_of(args, "shape-8b"), planned, "key")
    found = options_of(prepare(OURS, setup, tmp_path / "server").arguments)
    assert (found["--dtype"], found["--load-format"]) == ("bfloat16", "dummy")
    assert "--context-length" not in found  # the model's own, which is long enough
    config = json.loads((Path(found["--model-path"]) / "config.json").read_text())
    assert config["max_position_embeddings"] >= int(found["--max-total-tokens"]) > 65536
    settings = json.loads((tmp_path / "server" / "storage.json").read_text())
    assert settings["store"]["capacity_bytes"] == 30 << 30


def test_a_fuzz_run_on_a_card_has_heads_and_numbers_that_flashinfer_knows() -> None:
    args = parsed(fuzz, "--device", "cuda", "--storage-size", "8GiB")
    chosen = SimpleNamespace(longest_tokens=100, rows=[{"longest_tokens": 100}])
    assert fuzz.fuzzed_model(args) == "lab-gpu-tiny"
    setup = fuzz.make_setup(args, Path("/m"), chosen)  # type: ignore[arg-type]
    assert (setup.device, setup.dtype, setup.storage_bytes) == ("cuda", "bfloat16", 8 << 30)
    with pytest.raises(BenchError, match="heads of 32"):
        fuzz.fuzzed_model(parsed(fuzz, "--device", "cuda", "--model", "tiny-qwen3"))


def test_a_fuzz_run_with_another_attention_has_its_numbers_and_its_answers_too() -> None:
    words = ("--attention-backend", "triton", "--hicache-io-backend", "direct")
    named = [f"--server-arg={word}" for word in (*words, "--sampling-backend=pytorch")]
    args = parsed(
        fuzz, "--device", "cuda", "--dtype", "float32", "--model", "tiny-qwen3", "--tp", "2",
        "--overlap", "off", *named,
    )  # fmt: skip
    assert fuzz.fuzzed_model(args) == "tiny-qwen3"
    chosen = SimpleNamespace(longest_tokens=4096, rows=[{"longest_tokens": 4096}])
    setup = fuzz.make_setup(args, Path("/m"), chosen)  # type: ignore[arg-type]
    computing = fuzz.only_computing(setup)
    assert computing.extra == ("--attention-backend", "triton", "--sampling-backend=pytorch")
    assert (computing.dtype, computing.tp) == ("float32", 1)
