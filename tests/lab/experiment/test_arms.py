"""The arms differ in their cache tiers and in nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sgl_kvtier.config import load_config
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.arms import ARMS, STORAGE_ARMS, Arm, Setup, prepare, storage_folder
from sgl_kvtier.lab.experiment.remote.run import REMOTE_ARMS
from sgl_kvtier.lab.outside import peers
from sgl_kvtier.lab.paced.launching import MOONCAKE_WAITS
from sgl_kvtier.launch import serve_flags

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


def as_options(arguments: tuple[str, ...]) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in arguments:
        if word.startswith("--"):
            options[word] = ""
        else:
            options[list(options)[-1]] = word
    return options


@pytest.fixture(autouse=True)
def one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of all arms is true of one that only differs by a flag, too."""
    monkeypatch.setitem(ARMS, "flagged", OF_SGLANG)


def test_all_arms_have_the_same_model_pools_and_chunks(tmp_path: Path) -> None:
    for setup in (CPU, GPU):
        common = []
        for arm in ARMS:
            options = as_options(prepare(arm, setup, tmp_path / arm).arguments)
            common.append(
                {
                    name: value
                    for name, value in options.items()
                    if name not in CACHE_FLAGS and name not in ARMS[arm].arguments
                }
            )
        assert all(options == common[0] for options in common)


def test_arms_with_a_host_pool_have_the_same_one(tmp_path: Path) -> None:
    seen = {}
    for arm in ARMS:
        options = as_options(prepare(arm, CPU, tmp_path / arm).arguments)
        seen[arm] = {name: options.get(name) for name in CACHE_FLAGS if "storage" not in name}
    assert set(seen.pop("recompute").values()) == {None}
    assert all(options == seen["hicache"] for options in seen.values())


def test_storage_arms_have_folders_of_their_own_and_the_same_limits(tmp_path: Path) -> None:
    settings, folders = {}, set()
    for arm in (*STORAGE_ARMS, "flagged"):
        launch = prepare(arm, CPU, tmp_path / arm)
        path = as_options(launch.arguments)["--hicache-storage-backend-extra-config"]
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


def test_a_flag_of_sglang_reaches_the_server_of_its_arm_alone(tmp_path: Path) -> None:
    for arm in ("hicache-file", "flagged"):
        options = as_options(prepare(arm, CPU, tmp_path / arm).arguments)
        wanted = "slru" if arm == "flagged" else None
        assert options.get("--radix-eviction-policy") == wanted


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
    assert as_options(launch.arguments)["--hicache-storage-backend"] == "nixl"
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
    gpu = as_options(prepare("kvtier", GPU, tmp_path / "g").arguments)
    assert (
        gpu["--attention-backend"],
        gpu["--hicache-io-backend"],
        gpu["--hicache-mem-layout"],
    ) == ("flashinfer", "kernel", "page_first")
    cpu = as_options(prepare("kvtier", CPU, tmp_path / "c").arguments)
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


def test_an_unknown_arm_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        BenchError, match=f"no configuration named lmcache. There are: {', '.join(ARMS)}"
    ):
        prepare("lmcache", CPU, tmp_path)


def test_stock_alone_has_the_policy_of_reading_ahead_that_is_said(tmp_path: Path) -> None:
    flag = "--hicache-storage-prefetch-policy"
    said = replace(CPU, stock_reads="best_effort")
    for arm in STORAGE_ARMS:
        options = as_options(prepare(arm, said, tmp_path / arm).arguments)
        assert options.get(flag) == (None if arm.startswith("kvtier") else "best_effort")
        assert flag not in as_options(prepare(arm, CPU, tmp_path / "default" / arm).arguments)
    asked = replace(said, extra=(flag, "wait_complete"))
    assert as_options(prepare("hicache-file", asked, tmp_path).arguments)[flag] == "wait_complete"
