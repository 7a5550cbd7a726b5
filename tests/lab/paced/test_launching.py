"""What a server on a paced device is started with."""

from __future__ import annotations

import argparse
import json

import pytest

from sgl_kvtier.config import load_config
from sgl_kvtier.errors import BenchError, ConfigError
from sgl_kvtier.lab.experiment.arms import Setup, prepare
from sgl_kvtier.lab.paced import launching, profile
from sgl_kvtier.lab.paced.device import Settings
from sgl_kvtier.runtime.tools import serve_command


@pytest.fixture(autouse=True)
def _models(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", profile.names())
def test_the_device_in_the_server_reads_what_it_is_told(name, tmp_path):
    env = launching.parse(f"paced:{name}", 2.0).env(tmp_path / "log")
    told = Settings(**json.loads(env["KVTIER_PACED"]))
    assert (told.profile, told.dilation, told.log) == (name, 2.0, str(tmp_path / "log"))


@pytest.mark.parametrize("name", profile.names())
def test_bytes_are_scaled_to_the_models_own_pool(name):
    paced = launching.parse(f"paced:{name}")
    config = json.loads((paced.model() / "config.json").read_text())
    if paced.profile.kind == "mla":
        row = (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * 4
    else:
        row = 2 * config["num_key_value_heads"] * config["head_dim"] * 4
    kept = row * config["num_hidden_layers"]
    assert kept * paced.bytes_scale == paced.profile.kv_bytes_per_token


def test_the_disk_is_as_much_slower_as_bytes_are_fewer_and_times_longer():
    throttle = launching.parse("paced:h100-llama8b", 2.0).sections()["lab"]["throttle"]
    assert throttle["read_gbps"] == pytest.approx(6.4 * 8 / 512 / 2)


def test_every_arm_of_a_comparison_runs_on_the_same_paced_device(tmp_path):
    setup = Setup(
        model_path="/m",
        served_name="m",
        device="paced:h100-llama8b",
        page_size=64,
        chunk_tokens=8192,
        device_tokens=40960,
        storage_bytes=1 << 30,
        dilation=2.0,
    )
    launches = {arm: prepare(arm, setup, tmp_path / arm) for arm in ("hicache-file", "kvtier")}
    told = [json.loads(one.env["KVTIER_PACED"]) for one in launches.values()]
    assert {**told[0], "log": ""} == {**told[1], "log": ""}
    for one in launches.values():
        assert one.arguments[one.arguments.index("--device") + 1] == "cpu"
        assert one.env["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "sgl_kvtier.lab.paced.stub"


def test_the_stock_arms_time_outs_are_dilated_too(tmp_path):
    setup = Setup(
        model_path="/m",
        served_name="m",
        device="paced:h100-llama8b",
        page_size=64,
        chunk_tokens=8192,
        device_tokens=40960,
        dilation=3.0,
    )
    prepare("hicache-file", setup, tmp_path)
    settings = json.loads((tmp_path / "storage.json").read_text())
    assert settings["prefetch_timeout_base"] == 3.0


def test_a_users_server_gets_settings_that_the_product_accepts(tmp_path, capsys):
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    store = tmp_path / "store"
    args = parser.parse_args(["--device", "paced:h100-llama8b", "--store", str(store), "--print"])
    assert serve_command.run(args) == 0
    written = capsys.readouterr().out.splitlines()[0].split(" would be written: ")[1]
    (tmp_path / "kvtier.json").write_text(written)
    assert load_config(tmp_path / "kvtier.json").lab.throttle.read_gbps == pytest.approx(0.1)


def test_a_paced_server_takes_no_other_model(tmp_path):
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    words = ["some/model", "--device", "paced:h100-llama8b", "--store", str(tmp_path), "--print"]
    with pytest.raises(ConfigError, match="model of its own"):
        serve_command.run(parser.parse_args(words))


@pytest.mark.parametrize(
    ("device", "dilation"), [("paced:nothing", 1.0), ("cpu", 1.0), ("paced:h100-llama8b", 0.0)]
)
def test_what_is_no_paced_device_is_refused(device, dilation):
    with pytest.raises(BenchError):
        launching.parse(device, dilation)
