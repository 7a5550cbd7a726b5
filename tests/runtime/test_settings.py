"""What a server is told about wrong settings, before any model is loaded."""

from __future__ import annotations

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
        args(hicache_storage_backend_extra_config='{"store": {"path": "p"}, "prefetch_threshold": 64, "interface_v1": 1}')
    )


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ('{"store": {"path": "p", "io_threads": 0}}', r"store\.io_threads = 0: must be a whole number from 1 to 256"),
        ('{"stroe": {}}', r"unknown setting stroe\. Did you mean store\?"),
        ("{}", r"store\.path is not set"),
        (None, r"store\.path is not set"),
        ("{", "Give JSON text"),
        ("@no-such-file.json", "no-such-file.json"),
        ("@kvtier.ini", "kvtier.ini"),
        ('{"prefetch_threshold": "many"}', "prefetch_threshold must be int"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(extra, message):
    with pytest.raises(ConfigError, match=message):
        settings.check_server(args(hicache_storage_backend_extra_config=extra))


def test_the_backend_needs_the_hierarchical_cache():
    with pytest.raises(ConfigError, match="--enable-hierarchical-cache"):
        settings.check_server(args(enable_hierarchical_cache=False))


def test_both_forms_are_recognised_and_other_backends_left_alone():
    dynamic = '{"backend_name": "kvtier", "module_path": "sgl_kvtier.runtime.storage", "class_name": "KVTierStorage"}'
    assert settings.uses_backend(args())
    assert settings.uses_backend(args(hicache_storage_backend="dynamic", hicache_storage_backend_extra_config=dynamic))
    assert not settings.uses_backend(args(hicache_storage_backend="file"))
    assert not settings.uses_backend(args(hicache_storage_backend=None, hicache_storage_backend_extra_config=None))
    assert not settings.uses_backend(args(hicache_storage_backend="dynamic", hicache_storage_backend_extra_config="{}"))


def test_the_dynamic_form_is_recognised_in_a_settings_file(tmp_path):
    file = tmp_path / "kvtier.json"
    file.write_text('{"module_path": "sgl_kvtier.runtime.storage", "class_name": "KVTierStorage", "backend_name": "kvtier"}')
    dynamic = {"hicache_storage_backend": "dynamic"}
    assert settings.uses_backend(args(**dynamic, hicache_storage_backend_extra_config=f"@{file}"))
    file.write_text('{"module_path": "another.backend"}')
    assert not settings.uses_backend(args(**dynamic, hicache_storage_backend_extra_config=f"@{file}"))
    assert not settings.uses_backend(args(**dynamic, hicache_storage_backend_extra_config="@no-such-file.json"))
