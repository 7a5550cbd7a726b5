"""A server with an SGLang that lacks a symbol goes on without the feature, or refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from command_lines import KVTIER, PLAIN, launching

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import SeamError
from sgl_kvtier.runtime import metrics, plugin, settings
from sgl_kvtier.runtime.scheduler import setup as restore_setup
from sgl_kvtier.runtime.settings import looks_ahead
from sgl_kvtier.runtime.sglang import features, page_hash, seams
from sgl_kvtier.runtime.sglang.features import FEATURES
from sgl_kvtier.runtime.sglang.hooks import HOOKS
from sgl_kvtier.runtime.sglang.seams import Seam, SeamStatus

AUTO = PolicyConfig()


@pytest.fixture(autouse=True)
def found() -> Iterator[None]:
    """Nothing that a test found of an SGLang that it made up is kept."""
    yield
    features._group.cache_clear()
    features.moved.cache_clear()


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Symbols of these groups are gone."""

    def lacking(*groups: str) -> None:
        monkeypatch.setattr(seams, "check", lambda asked: [
            SeamStatus(Seam(group, "server", f"sglang.srt.{group}.Thing.gone", "we call it"), "missing" if group in groups else "")
            for group in asked
        ])  # fmt: skip
        features._group.cache_clear()
        features.moved.cache_clear()

    return lacking


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[[str], Any]]:
    with launching() as launched:
        yield lambda flags: launched(*KVTIER, *PLAIN, *flags.split())


def off() -> set[str]:
    return {feature.name for feature in FEATURES if features.moved(feature.name)}


def test_every_feature_is_there():
    assert off() == set()
    assert features.untried() is None


def test_every_group_of_symbols_is_of_a_feature_and_every_hook_too():
    groups = {group for feature in FEATURES for group in feature.groups}
    assert {seam.feature for seam in seams.load_manifest()} == groups
    assert {hook.feature for hook in HOOKS} <= {feature.name for feature in FEATURES}


@pytest.mark.parametrize(
    ("group", "lost"),
    [
        ("lookahead", {"lookahead"}),
        ("restore", {"restore", "windows", "states", "lookahead"}),
        ("windows", {"windows"}),
        ("states", {"states"}),
        ("zero-copy", {"zero-copy"}),
        ("hints", {"hints"}),
        ("weights", {"weights"}),
        ("cpu", {"cpu"}),
    ],
)
def test_a_symbol_that_is_gone_costs_what_needs_it(without, group, lost):
    without(group)
    assert off() == lost
    for name in lost:
        line = features.line(name)
        assert line is not None and "Thing.gone: missing" in line and "\n" not in line
    features.require("storage")


def test_without_the_symbols_of_storage_a_server_is_refused_with_what_to_do(without):
    without("storage")
    with pytest.raises(
        SeamError, match=r"storage cannot be had.*Thing\.gone.*pip install 'sglang=="
    ):
        features.require("storage")


def test_no_sglang_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr(seams, "installed_version", lambda: None)
    with pytest.raises(SeamError, match="not installed"):
        features.require("storage")


def test_a_release_that_nobody_has_tried_serves_and_says_so(monkeypatch):
    monkeypatch.setattr(seams, "installed_version", lambda: "0.6.0")
    features.require("storage", "restore", "lookahead")
    line = features.untried()
    assert line is not None and "0.6.0 was not tried" in line and "0.5.23" in line


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (AUTO, ()),
        (PolicyConfig(restore="off"), ()),
        (PolicyConfig(restore="both"), ("restore",)),
        (PolicyConfig(restore="load"), ("restore",)),
        (PolicyConfig(prefetch="on"), ("lookahead",)),
        (PolicyConfig(eviction="next-use"), ("lookahead",)),
        (PolicyConfig(eviction="lru", prefetch="off"), ()),
    ],
)
def test_a_feature_is_asked_for_by_name_or_left_at_auto(policy, named):
    assert settings.named_features(policy) == named


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, PolicyConfig], None]:
    """The launcher's check of a server with this policy."""

    def check(args: Any, policy: PolicyConfig) -> None:
        monkeypatch.setattr(settings, "check_server", lambda args: SimpleNamespace(policy=policy))
        monkeypatch.setattr(page_hash, "load", lambda: None)
        plugin.check_arguments(None, args)

    return check


@pytest.mark.parametrize("policy", [PolicyConfig(restore="both"), PolicyConfig(prefetch="on")])
def test_what_is_asked_for_by_name_is_refused_at_the_launch(launch, without, checked, policy):
    args = launch("")
    without("restore")
    with pytest.raises(SeamError, match=r"Thing\.gone: missing.*leave that setting at auto"):
        checked(args, policy)


def test_what_is_left_at_auto_is_left_to_sglang(launch, without, checked, caplog):
    args = launch("")
    without("restore", "hints", "control")
    with caplog.at_level(logging.WARNING):
        checked(args, AUTO)
    said = [record.getMessage() for record in caplog.records if "is off" in record.getMessage()]
    assert [line.split()[1] for line in said] == ["hints", "control"]
    line = restore_setup.own_way(
        args, SimpleNamespace(is_hybrid_swa=False, is_hybrid_ssm=False), AUTO
    )
    assert line is not None and "restore is off" in line and "Thing.gone: missing" in line


def test_nothing_is_said_where_nothing_is_off(launch, checked, caplog):
    with caplog.at_level(logging.WARNING):
        checked(launch(""), AUTO)
    assert [
        record.getMessage() for record in caplog.records if "kvtier: " in record.getMessage()
    ] == []


def test_one_gpu_that_cannot_look_ahead_restores_all_the_same(launch, without):
    args = launch("--device cuda")
    assert looks_ahead(restore_setup.in_force(args, AUTO))
    assert restore_setup.not_followed(args, AUTO) == []
    without("lookahead")
    followed = restore_setup.in_force(args, AUTO)
    assert followed.restore == AUTO.restore and not looks_ahead(followed)
    assert restore_setup.nothing_to_do(args, AUTO) is None
    (line,) = restore_setup.not_followed(args, AUTO)
    assert "lookahead is off" in line and "Thing.gone: missing" in line


def test_a_cpu_that_would_not_look_ahead_says_nothing_of_it(launch, without):
    without("lookahead")
    assert restore_setup.not_followed(launch(""), AUTO) == []


def test_metrics_tell_which_features_there_are(without):
    without("hints")
    samples = {labels["feature"]: value for _, labels, value in metrics.feature_samples()}
    assert samples == {feature.name: feature.name != "hints" for feature in FEATURES}
    assert metrics.METRICS["feature"].labels == ("feature",)
