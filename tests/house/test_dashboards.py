"""examples/monitoring is what scripts/make-dashboards writes, and asks for metrics that there are."""

import re
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def made():
    loader = SourceFileLoader("make_dashboards", str(ROOT / "scripts" / "make-dashboards"))
    spec = spec_from_loader("make_dashboards", loader)
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_files_are_those_of_the_tables(made):
    assert [path.name for path, text in made.files().items() if path.read_text() != text] == []


def test_every_expression_is_of_metrics_and_labels_that_are_published(made):
    assert len(list(made.expressions())) > 30
    assert made.unknown() == []


def test_a_hit_rate_is_0_while_sglang_publishes_no_cached_tokens(made):
    rates = [text for text in made.expressions() if re.search("/ .*prompt_tokens_total", text)]
    assert len(rates) == 2
    assert [text for text in rates if " or 0 * " not in text.rpartition(" / ")[0]] == []


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("rate(kvtier:pages_lost_total[1m])", "kvtier:pages_lost_total"),
        ("sum(kvtier:pages_read)", "kvtier:pages_read"),
        ('kvtier:store_pages{tier="host"}', "kvtier:store_pages has no tier"),
    ],
)
def test_a_metric_or_label_that_is_not_published_is_found(made, monkeypatch, expression, said):
    monkeypatch.setattr(made, "expressions", lambda: iter([expression]))
    assert made.unknown() == [said]
