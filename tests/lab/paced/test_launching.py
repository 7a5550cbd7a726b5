"""What a server on a paced device is started with."""

from __future__ import annotations

import json
import shlex

import pytest
from commands import parsed

from sgl_kvtier.config import parse_config
from sgl_kvtier.errors import BenchError, ConfigError
from sgl_kvtier.lab import profile
from sgl_kvtier.lab.experiment.arms import Setup, prepare
from sgl_kvtier.lab.paced import launching
from sgl_kvtier.lab.paced.device import Settings
from sgl_kvtier.runtime.tools import serve_command

FP8 = ("--kv-cache-dtype", "fp8_e4m3")


@pytest.fixture(autouse=True)
def _models(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", profile.names())
def test_the_device_in_the_server_reads_what_it_is_told(name, tmp_path):
    env = launching.parse(f"paced:{name}", 2.0).env(tmp_path / "log")
    told = Settings(**json.loads(env["KVTIER_PACED"]))
    assert (told.profile, told.dilation, told.log) == (name, 2.0, str(tmp_path / "log"))


@pytest.mark.parametrize("name", profile.names())
@pytest.mark.parametrize(("words", "number"), [((), 4), (FP8, 1)])
def test_bytes_are_scaled_to_the_models_own_pool(name, words, number):
    paced = launching.parse(f"paced:{name}", words=words)
    config = json.loads((paced.model() / "config.json").read_text())
    if paced.profile.kind == "mla":
        row = (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * number
    else:
        row = 2 * config["num_key_value_heads"] * config["head_dim"] * number
    kept = row * config["num_hidden_layers"]
    assert kept * paced.bytes_scale == paced.profile.kv_bytes_per_token


@pytest.mark.parametrize(("words", "scale"), [((), 512), (FP8, 1024)])
def test_the_disk_is_as_much_slower_as_bytes_are_fewer_and_times_longer(words, scale):
    throttle = launching.parse("paced:h100-llama8b", 2.0, words).sections()["lab"]["throttle"]
    assert throttle["read_gbps"] == pytest.approx(6.4 * 8 / scale / 2)


@pytest.mark.parametrize(
    ("words", "kv_dtype"),
    [
        ((), "bfloat16"),
        (FP8, "fp8_e4m3"),
        (("--kv-cache-dtype=fp8_e4m3",), "fp8_e4m3"),
        ((*FP8, "--kv-cache-d", "auto"), "bfloat16"),
    ],
)
def test_the_last_number_type_that_was_asked_for_is_that_of_the_device_and_its_results(
    words, kv_dtype, tmp_path
):
    paced = launching.parse("paced:h100-llama8b", words=words)
    told = json.loads(paced.env(tmp_path / "log")["KVTIER_PACED"])
    assert paced.document()["kv_cache_dtype"] == told["kv_dtype"] == kv_dtype
    assert kv_dtype in paced.modelled


def test_a_server_says_its_number_type_to_clients_that_did_not_start_it():
    labels = {"profile": "h100-llama8b@1.6", "kv_dtype": "fp8_e4m3"}
    assert launching.of_server([(launching.METRIC, labels, 2.0)]) == launching.parse(
        "paced:h100-llama8b@1.6", 2.0, FP8
    )


def test_a_slower_disk_is_named_behind_the_profile():
    paced = launching.parse("paced:h100-llama8b@1.6")
    assert paced.profile.name == "h100-llama8b"
    assert paced.document()["disk_gbytes_per_s"] == [1.6, 1.0]


@pytest.mark.parametrize("disk", ["", "fast", "nan", "0", "-1"])
def test_a_disk_that_is_no_rate_is_refused(disk):
    with pytest.raises(BenchError, match="no GB/s of a disk"):
        launching.parse(f"paced:h100-llama8b@{disk}")


def setup_of(dilation):
    return Setup(
        *("/m", "m", "paced:h100-llama8b", 64, 8192), device_tokens=40960, dilation=dilation
    )


def test_every_arm_of_a_comparison_runs_on_the_same_paced_device(tmp_path):
    setup = setup_of(2.0)
    launches = {arm: prepare(arm, setup, tmp_path / arm) for arm in ("hicache-file", "kvtier")}
    told = [json.loads(one.env["KVTIER_PACED"]) for one in launches.values()]
    assert {**told[0], "log": ""} == {**told[1], "log": ""}
    for one in launches.values():
        assert one.arguments[one.arguments.index("--device") + 1] == "cpu"
        assert one.env["SGLANG_EXTERNAL_MODEL_PACKAGE"] == "sgl_kvtier.lab.paced.stub"


def test_the_stock_arms_time_outs_are_dilated_too(tmp_path):
    prepare("hicache-file", setup_of(3.0), tmp_path)
    settings = json.loads((tmp_path / "storage.json").read_text())
    assert settings["prefetch_timeout_base"] == 3.0


PACED = ("--device", "paced:h100-llama8b")


def serve(*words, extra=()):
    """`kvtier serve --print` with these words, and `extra` behind --."""
    args = parsed(serve_command, *words, "--print")
    args.extra = list(extra)
    return serve_command.run(args)


def given_in(command):
    """The settings that a launch line gives to the storage backend."""
    words = shlex.split(command)
    return json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])


def test_a_users_server_gets_settings_that_the_product_accepts(tmp_path, capsys):
    """The seed of dummy weights is part of the fingerprint: with one that SGLang draws, pages would
    not be found again after a restart.
    """
    assert serve(*PACED, "--store", str(tmp_path / "store")) == 0
    command = capsys.readouterr().out
    assert parse_config(given_in(command)).lab.throttle.read_gbps == pytest.approx(0.1)
    assert " --load-format dummy --random-seed 0 " in command


def test_the_log_of_a_users_server_is_bounded_and_in_the_folder_of_its_store(tmp_path, capsys):
    store, own = tmp_path / "pages", tmp_path / "own"
    assert serve(*PACED, "--store", str(store)) == 0
    words = shlex.split(capsys.readouterr().out)
    (said,) = [word for word in words if word.startswith("KVTIER_PACED=")]
    told = json.loads(said.partition("=")[2])
    assert told["log"] == str(store / "pace.jsonl") and told["most_log_bytes"] > 0
    assert not store.exists()
    whole = launching.parse("paced:h100-llama8b").env(own)
    assert json.loads(whole["KVTIER_PACED"])["most_log_bytes"] == 0


def test_a_paced_server_takes_no_other_model(tmp_path):
    with pytest.raises(ConfigError, match="model of its own"):
        serve("some/model", *PACED, "--store", str(tmp_path))


def test_an_own_file_without_the_modelled_disk_is_refused_with_what_it_lacks(tmp_path, capsys):
    config = tmp_path / "own.json"
    own = {"store": {"path": "/s"}, "policy": {"rules": ""}, "prefetch_timeout_base": 1.0}
    config.write_text(json.dumps(own))
    with pytest.raises(ConfigError, match=r"own\.json: .* must also say \{") as found:
        serve(*PACED, "--config", str(config))
    assert "\n" not in str(found.value)
    lacking = json.loads(str(found.value).split(" must also say ")[1])
    assert sorted(lacking) == ["lab", "policy", "prefetch_timeout_per_ki_token"]
    lacking["policy"] |= own["policy"]
    config.write_text(json.dumps({**own, **lacking}))
    assert serve(*PACED, "--config", str(config)) == 0


def test_a_file_for_another_dilation_is_refused(tmp_path, capsys):
    config = tmp_path / "own.json"
    paced = launching.parse("paced:h100-llama8b")
    config.write_text(json.dumps({"store": {"path": "/s"}, **paced.settings(), **paced.sections()}))
    assert serve(*PACED, "--config", str(config)) == 0
    with pytest.raises(ConfigError, match=r'"prefetch_timeout_base": 2\.0'):
        serve(*PACED, "--config", str(config), "--dilation", "2")


def test_only_a_paced_server_has_a_dilation(tmp_path):
    with pytest.raises(BenchError, match="--dilation: only a paced device has it"):
        serve("m", "--device", "cpu", "--store", str(tmp_path / "s"), "--dilation", "2")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dtype", "bfloat16"), "--dtype bfloat16: paced:h100-llama8b has float32"),
        (("--tp", "2"), "--tp 2: paced:h100-llama8b has 1"),
        (("--tensor-parallel-size=2",), "--tensor-parallel-size 2: paced:h100-llama8b has 1"),
        (("--page-size", "16"), "--page-size 16: paced:h100-llama8b has 64"),
        (
            ("--kv-cache-dtype", "mxfp8"),
            "--kv-cache-dtype mxfp8: paced:h100-llama8b has auto or fp8_e4m3",
        ),
    ],
)
def test_a_paced_server_refuses_arguments_of_another_device(words, said, tmp_path):
    with pytest.raises(BenchError, match=f"^{said}\\. A server that computes"):
        serve(*PACED, "--store", str(tmp_path / "s"), extra=("--log-level", "info", *words))


def test_a_paced_server_takes_its_own_and_all_other_arguments(tmp_path, capsys):
    extra = ("--dtype", "float32", "--page-size=64", "--tp", "1", "--disable-overlap-schedule")
    assert serve(*PACED, "--store", str(tmp_path / "s"), extra=extra) == 0


def test_a_users_server_in_fp8_has_room_for_twice_the_tokens(tmp_path, capsys):
    assert serve(*PACED, "--store", str(tmp_path / "s"), extra=FP8) == 0
    command = capsys.readouterr().out.strip()
    assert f"--max-total-tokens {2 * launching.DEVICE_TOKENS} " in command
    assert command.endswith(f"{' '.join(FP8)} --port 30000")
    assert given_in(command)["lab"]["throttle"]["read_gbps"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("device", "dilation"), [("paced:nothing", 1.0), ("cpu", 1.0), ("paced:h100-llama8b", 0.0)]
)
def test_what_is_no_paced_device_is_refused(device, dilation):
    with pytest.raises(BenchError):
        launching.parse(device, dilation)
