"""kvtier.json: what is read, and what is said about mistakes."""

from __future__ import annotations

import dataclasses
import json
import operator
import os

import pytest
from hostile import HOSTILE, SETTINGS, allowed, file_with
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier import config
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.runtime.settings import from_extra_config


def test_an_empty_file_gives_the_defaults():
    assert config.parse_config({}) == config.KVTierConfig()


def test_settings_survive_being_written_and_read_again(tmp_path):
    changed = config.parse_config(
        {"store": {"path": "/p", "capacity_bytes": "3GiB"}, "lab": {"throttle": {"read_gbps": 2}}}
    )
    file = tmp_path / "kvtier.json"
    file.write_text(json.dumps(dataclasses.asdict(changed)))
    assert config.load_config(file) == changed
    assert changed.store.capacity_bytes == 3 << 30
    assert changed.lab.throttle.read_gbps == 2.0


def test_sglangs_own_keys_are_passed_over():
    assert (
        config.parse_config({"prefetch_threshold": 1, "interface_v1": 1}) == config.KVTierConfig()
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "must be an object"),
        ({"store": []}, r"store = \[\]: must be an object"),
        ({"stores": {}}, r"unknown setting stores\. Did you mean store\?"),
        ({"store": {"pathh": ""}}, r"unknown setting store\.pathh\. Did you mean store\.path\?"),
        ({"store": {"path": 3}}, r"store\.path = 3: must be a text"),
        ({"store": {"io_threads": True}}, r"store\.io_threads = true: must be a whole number"),
        ({"store": {"io_threads": 257}}, "from 1 to 256"),
        ({"store": {"direct_io": "maybe"}}, "must be one of auto, on, off"),
        ({"store": {"capacity_bytes": "many"}}, "a size such as"),
        ({"store": {"path": "/p", "capacity_bytes": "101%"}}, "from 0 to 100%"),
        ({"store": {"capacity_bytes": "50%"}}, r"is of the disk of store\.path"),
        ({"store": {"capacity_bytes": "1KiB"}}, r"from 1\.0 MiB to 1,024\.0 TiB"),
        ({"lab": {"faults": {"corrupt_rate": 1.5}}}, "from 0 to 1"),
        ({"lab": {"throttle": {"read_gbps": float("nan")}}}, "must be a number"),
        ({"store": {"verify_reads": 1}}, "true or false"),
    ],
)
def test_a_mistake_is_named_with_key_value_and_range(data, message):
    with pytest.raises(ConfigError, match=message):
        config.parse_config(data)


@pytest.mark.parametrize("key", SETTINGS)
def test_no_setting_takes_a_hostile_value(key):
    for kind, value in HOSTILE.items():
        given = file_with(key, value)
        if allowed(SETTINGS[key], value):
            read = operator.attrgetter(key)(config.parse_config(given))
            assert read == {None: "", True: read}.get(value, value), kind
            continue
        with pytest.raises(ConfigError) as found:
            config.parse_config(given)
        text = str(found.value)
        assert text.startswith(f"{key} = ") and "must be " in text, kind
        assert len(text) < 600, kind


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("place", ["file", "section"])
def test_sections_take_objects_only(place, value):
    if value == {} or (value is None and place == "section"):
        return
    with pytest.raises(ConfigError, match="must be an object") as found:
        config.parse_config(value if place == "file" else {"policy": value})
    assert len(str(found.value)) < 600


SWITCHES = [
    key for key, setting in SETTINGS.items() if {"on", "off"} & set(setting.metadata["choices"])
]


@pytest.mark.parametrize("key", SWITCHES)
def test_on_and_off_are_read_as_yaml_reads_them(key):
    choices = SETTINGS[key].metadata["choices"]
    for word, read in (("on", True), ("off", False)):
        if word in choices:
            found = config.parse_config(file_with(key, read))
            assert operator.attrgetter(key)(found) == word
            assert found == config.parse_config(file_with(key, word))
        else:
            with pytest.raises(ConfigError, match=f"{key} = .* must be one of"):
                config.parse_config(file_with(key, read))


def test_a_yaml_file_as_documented_is_read_like_the_same_settings_in_json():
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load(
        """
store:
  path: /var/lib/kvtier
  direct_io: off
  capacity_bytes: 64e9
  min_free_bytes: 20GiB
remote:
  engine: off
policy:
  prefetch: on
  restore: off
  rules:
lab:
"""
    )
    assert config.parse_config(found) == config.parse_config(
        {
            "store": {
                "path": "/var/lib/kvtier",
                "direct_io": "off",
                "capacity_bytes": 64_000_000_000,
                "min_free_bytes": "20GiB",
            },
            "remote": {"engine": "off"},
            "policy": {"prefetch": "on", "restore": "off", "rules": ""},
        }
    )


@pytest.mark.parametrize("key", [k for k, f in SETTINGS.items() if f.metadata["is_path"]])
class TestPaths:
    def read(self, key, path):
        return operator.attrgetter(key)(config.parse_config(file_with(key, path)))

    def test_a_tilde_is_the_home_of_this_user(self, key, monkeypatch, tmp_path):
        monkeypatch.setenv("HOME", str(tmp_path))
        assert self.read(key, "~/kvtier") == str(tmp_path / "kvtier")

    def test_a_home_that_nobody_knows_is_refused(self, key):
        with pytest.raises(ConfigError, match="home it begins with is not known"):
            self.read(key, "~no-such-user/kvtier")

    @pytest.mark.parametrize("path", ["$HOME/kvtier", "/data/${USER}", "/data/$(POD_NAME)/kv"])
    def test_a_variable_is_refused_because_nothing_expands_it(self, key, path):
        with pytest.raises(ConfigError, match="variables are not expanded"):
            self.read(key, path)

    def test_a_relative_path_is_made_absolute_at_once(self, key, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        assert self.read(key, "kv/./x") == str(tmp_path / "kv" / "x")

    def test_an_empty_path_stays_empty(self, key):
        assert self.read(key, "") == ""


def test_a_relative_store_path_of_a_server_is_said_once(caplog, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        from_extra_config({"store": {"path": "kv-said-once"}})
    (line,) = [r.getMessage() for r in caplog.records]
    assert str(tmp_path / "kv-said-once") in line


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ({"admission": "recompute-cost"}, r"choose all \(the default\) or second-hit"),
        ({"admission_cost_s": 0.002}, r"admission_cost_s is no setting any more.*remove it"),
    ],
)
def test_settings_that_are_gone_are_refused_with_what_to_do(store, message):
    with pytest.raises(ConfigError, match=message):
        config.parse_config({"store": store})


def test_every_number_among_the_settings_has_a_range():
    numbers = [f for f in SETTINGS.values() if type(f.default) in (int, float)]
    assert numbers
    assert all(f.metadata["low"] <= f.default <= f.metadata["high"] for f in numbers)


@pytest.mark.parametrize(
    "number",
    ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, "9" * 5000],
    ids=lambda text: text[:9],
)
def test_numbers_beyond_json_are_refused_in_a_file(tmp_path, number):
    file = tmp_path / "kvtier.json"
    file.write_text('{"lab": {"throttle": {"read_gbps": ' + number + "}}}")
    with pytest.raises(ConfigError) as found:
        config.load_config(file)
    assert len(str(found.value)) < 600


@pytest.mark.parametrize("key", ["x" * 1_000_000, "\ud800", 7])
def test_an_unknown_key_is_shown_short(key):
    with pytest.raises(ConfigError, match="unknown setting") as found:
        config.parse_config({"store": {key: 1}})
    assert len(str(found.value).encode()) < 900


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 200_000, "nested too deeply"),
        (b'{"store":' * 100_000, "nested too deeply"),
        (b"\xff\xfe", "byte 0 of it is not UTF-8 text"),
        (b" " * 2_000_000 + b"{}", "more than 1048576 bytes"),
    ],
    ids=len,
)
def test_a_file_that_is_no_settings_file_is_one_short_error(tmp_path, content, message):
    file = tmp_path / "kvtier.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        config.load_config(file)


def test_a_missing_file_and_broken_json_say_where(tmp_path):
    with pytest.raises(ConfigError, match=r"examples/kvtier\.json"):
        config.load_config(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text('{\n"store": }')
    with pytest.raises(ConfigError, match=r"broken\.json:2: not JSON"):
        config.load_config(broken)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        (4096, 4096),
        ("64KiB", 65536),
        ("1.5 GB", 1_500_000_000),
        ("2g", 2_000_000_000),
        ("3 TiB", 3 << 40),
        ("7b", 7),
        (64e9, 64_000_000_000),
        ("64e9", 64_000_000_000),
        ("6.4e+10", 64_000_000_000),
    ],
)
def test_sizes_are_read_in_both_units(text, nbytes):
    assert config.parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1",
        "1 parsec",
        "0x10",
        True,
        "9" * 39,
        "9" * 5000,
        10**400,
        "1" + " " * 10_000_000 + "x",
    ],
    ids=lambda text: str(text)[:8],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="not a size"):
        config.parse_bytes(text)


@given(st.integers(0, 1 << 49))
def test_a_size_for_people_is_close_to_the_size(nbytes):
    shown = config.parse_bytes(config.format_bytes(nbytes))
    assert abs(shown - nbytes) <= 0.06 * max(nbytes, 1)


def test_every_setting_has_one_default():
    rows = config.describe_config()
    assert len({row["key"] for row in rows}) == len(rows)
    assert {key for key in SETTINGS if not key.startswith("lab.")} == {row["key"] for row in rows}
    server = from_extra_config({"store": {"path": "p"}})
    for row in rows:
        if row["key"] == "store.path":
            continue
        in_server = operator.attrgetter(row["key"])(server)
        if SETTINGS[row["key"]].metadata["is_bytes"]:
            assert row["default"] == config.format_bytes(in_server)
        else:
            assert json.loads(row["default"]) == in_server
    assert server.policy == config.KVTierConfig().policy


@pytest.mark.parametrize(
    "name", [":C", "a:", "a.b", "a:b:c", "a b:C", "a..b:C", "é:C", "a:C\n", "1a:C"]
)
@pytest.mark.parametrize("key", ["rules", "eviction"])
def test_what_names_no_class_is_refused(key, name):
    with pytest.raises(ConfigError, match=f"policy.{key} = .*a class as package.module:Class"):
        config.parse_config({"policy": {key: name}})


def test_the_example_is_valid():
    from pathlib import Path

    example = Path(__file__).parents[2] / "examples" / "kvtier.json"
    assert config.load_config(example).store.path


def test_a_capacity_may_be_a_share_of_the_disk(tmp_path):
    disk = os.statvfs(tmp_path)
    path = str(tmp_path / "not" / "there")
    store = config.parse_config({"store": {"path": path, "capacity_bytes": "12.5%"}}).store
    assert store.capacity_bytes == disk.f_blocks * disk.f_frsize // 8
    assert list(tmp_path.iterdir()) == []


def test_a_share_of_a_disk_that_cannot_be_looked_at_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "store")
    with pytest.raises(ConfigError, match="cannot be looked at"):
        config.parse_config({"store": {"path": path, "capacity_bytes": "80%"}})
