"""What a server is told about wrong settings, before any model is loaded."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.runtime import settings


def args(**changes):
    values = {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "kvtier",
        "hicache_storage_backend_extra_config": '{"store": {"path": "p"}}',
    }
    return SimpleNamespace(**{**values, **changes})


def test_good_settings_pass_with_sglangs_own_keys_among_them():
    settings.check_server(
        args(
            hicache_storage_backend_extra_config='{"store": {"path": "p"}, "prefetch_threshold": 64, "interface_v1": 1}'
        )
    )


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            '{"store": {"path": "p", "io_threads": 0}}',
            r"store\.io_threads = 0: must be a whole number from 1 to 256",
        ),
        ('{"stroe": {}}', r"unknown setting stroe\. Did you mean store\?"),
        ("{", "Give JSON text"),
        ("[1]", "Give JSON text of an object"),
        ("7", "Give JSON text of an object"),
        ("[" * 100_000, "Give JSON text of an object"),
        ('{"throttle":' * 100_000, "Give JSON text of an object"),
        (" " * 100_000_000 + "{}", "at most 1048576 are read"),
        (
            '{"store": {"path": "p"}, "lab": {"throttle": {"read_gbps": NaN}}}',
            r"lab\.throttle\.read_gbps = NaN",
        ),
        ('{"store": {"path": "p"}, "policy": 1}', "policy = 1: must be an object"),
        ("@no-such-file.json", "no-such-file.json"),
        ("@kvtier.ini", "kvtier.ini"),
        ('{"prefetch_threshold": "many"}', "prefetch_threshold must be int"),
    ],
    ids=lambda text: str(text)[:30],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(extra, message):
    with pytest.raises(ConfigError, match=message) as found:
        settings.check_server(args(hicache_storage_backend_extra_config=extra))
    assert len(str(found.value)) < 800


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b"[" * 200_000),
        ("a.json", b"\xff\xfe"),
        ("a.json", b" " * 2_000_000 + b"{}"),
        ("a.yaml", b"a: [" * 200),
        ("a.yaml", b"\x00"),
        ("a.toml", b"= 3"),
    ],
    ids=range(6),
)
def test_a_settings_file_that_cannot_be_read_is_one_short_error(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match="--hicache-storage-backend-extra-config") as found:
        settings.check_server(args(hicache_storage_backend_extra_config=f"@{tmp_path / name}"))
    assert len(str(found.value)) < 800


@pytest.mark.parametrize("extra", [None, "{}", '{"store": {}}', '{"store": {"path": ""}}'])
def test_without_a_path_pages_go_where_the_environment_says(extra, monkeypatch):
    monkeypatch.setenv(settings.PATH_VARIABLE, "/mnt/kv")
    found = settings.check_server(args(hicache_storage_backend_extra_config=extra))
    assert found.store.path == "/mnt/kv"


def test_the_backend_needs_the_hierarchical_cache():
    with pytest.raises(ConfigError, match="--enable-hierarchical-cache"):
        settings.check_server(args(enable_hierarchical_cache=False))


OURS = {
    "backend_name": "kvtier",
    "module_path": "sgl_kvtier.runtime.backend.storage",
    "class_name": "KVTierStorage",
}


@pytest.mark.parametrize(
    ("backend", "extra", "used"),
    [
        ("kvtier", '{"store": {"path": "p"}}', True),
        ("dynamic", json.dumps(OURS), True),
        ("dynamic", f"@{json.dumps(OURS)}", True),
        ("file", '{"store": {"path": "p"}}', False),
        (None, None, False),
        ("dynamic", "{}", False),
        ("dynamic", '@{"module_path": "another.backend"}', False),
        ("dynamic", "@no-such-file.json", False),
    ],
)
def test_both_forms_are_recognised_and_other_backends_left_alone(tmp_path, backend, extra, used):
    """Also in a settings file, whose contents stand behind an @ here."""
    if extra and extra.startswith("@{"):
        (tmp_path / "kvtier.json").write_text(extra[1:])
        extra = f"@{tmp_path / 'kvtier.json'}"
    given = {"hicache_storage_backend": backend, "hicache_storage_backend_extra_config": extra}
    assert settings.uses_backend(args(**given)) is used
