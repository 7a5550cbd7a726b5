"""Every argument and variable of the installed SGLang is in the fingerprint, or has a reason."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import fingerprint_table as table
import pytest
import sglang
from pools import server_args
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.environ import Envs, envs
from sglang.srt.server_args import ServerArgs

from sgl_kvtier.runtime.backend import fingerprint_fields, identity
from sgl_kvtier.runtime.backend.page_shape import PageShape, RankShare

READS = re.compile(
    r"(?:os\.environ(?:\.get\(|\[|\.setdefault\(|\.pop\()|os\.getenv\(|get_\w+_env_var\()"
    r"\s*[\"']([A-Z][A-Z0-9_]+)[\"']"
)
"""How SGLang's source reads a variable that is not among its `envs`."""
PARTS = ("srt", "kernels")
"""What of SGLang runs in a server of language models."""
ON_ITS_OWN = "SGLANG_PP_LAYER_PARTITION"

PLACE = (
    "Decide whether {} changes what the bytes of a page mean. If it does, or if that is not "
    "certain, add it to sgl_kvtier/runtime/backend/fingerprint_fields.py; otherwise add it to "
    "tests/runtime/fingerprint_table.py below its reason."
)


def below(reasons):
    return [name for names in reasons.values() for name in names.split()]


def arguments_by_place():
    return {
        "fingerprint": [*fingerprint_fields.ARGUMENTS, *fingerprint_fields.PATHS],
        "digest": table.DIGESTED.split(),
        "seed": table.SEED.split(),
        "ranks": table.OF_RANKS.split(),
        "pools": table.OF_POOLS.split(),
        "name": table.ARGUMENTS_OF_NAMES.split(),
        "nothing": below(table.ARGUMENTS_WITHOUT_EFFECT),
    }


def variables_by_place():
    return {
        "fingerprint": [
            *fingerprint_fields.VARIABLES, *fingerprint_fields.PATH_VARIABLES, ON_ITS_OWN,
        ],
        "nothing": below(table.VARIABLES_WITHOUT_EFFECT),
    }  # fmt: skip


def variables_of_sglang():
    found = {name for name in vars(Envs) if name.isupper()}
    root = Path(sglang.__file__).parent
    for part in PARTS:
        for path in (root / part).rglob("*.py"):
            found.update(READS.findall(path.read_text(errors="replace")))
    return found


@pytest.mark.parametrize(
    ("known", "by_place"),
    [
        (lambda: {field.name for field in record_fields(ServerArgs)}, arguments_by_place),
        (variables_of_sglang, variables_by_place),
    ],
    ids=["arguments", "variables"],
)
def test_everything_that_sglang_reads_has_exactly_one_place(known, by_place):
    known, places = known(), by_place()
    counted = Counter(name for names in places.values() for name in names)
    new = sorted(known - set(counted))
    assert not new, PLACE.format(", ".join(new))
    gone = sorted(set(counted) - known)
    assert not gone, f"SGLang has these no longer: remove {', '.join(gone)}"
    twice = sorted(name for name, count in counted.items() if count > 1)
    assert not twice, f"these stand in two places: {', '.join(twice)}"
    print({place: len(names) for place, names in places.items()}, len(known))


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(64))
    return folder


POOLS = {"kv": PageShape(layout="page_first_direct", page_size=16, dtype="torch.bfloat16")}


def fingerprint(model, ranks=None, pools=None, **args):
    args = server_args(str(model), **args)
    return identity.identity_of(args, ranks or RankShare(), pools or POOLS).fingerprint


DEFAULTS = {field.name: field.default for field in record_fields(ServerArgs)}


def test_an_argument_with_another_value_is_another_fingerprint(model):
    def alike(name):
        given = DEFAULTS[name]
        other = (not given) if isinstance(given, bool) else "other"
        return fingerprint(model, **{name: other}) == fingerprint(model, **{name: given})

    assert [name for name in fingerprint_fields.ARGUMENTS if alike(name)] == []


@pytest.mark.parametrize("name", [*fingerprint_fields.PATHS, *table.DIGESTED.split()])
def test_what_a_file_holds_that_an_argument_names_is_in_the_fingerprint(model, tmp_path, name):
    folder = tmp_path / "named"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "adapter_config.json").write_text("{}")
    weights = folder / "weights.safetensors"
    given = {name: [str(folder)] if name == "lora_paths" else str(folder)}
    seen = set() if name == "model_path" else {fingerprint(model)}
    for content in (b"1", b"2"):
        weights.write_bytes(content)
        seen.add(fingerprint(folder) if name == "model_path" else fingerprint(model, **given))
    assert len(seen) == (2 if name == "model_path" else 3)


@pytest.mark.parametrize("name", table.OF_RANKS.split())
def test_another_number_of_ranks_that_hold_a_page_is_another_fingerprint(model, name):
    assert fingerprint(model, RankShare(**{name: 2})) != fingerprint(model)


@pytest.mark.parametrize(
    "pools",
    [
        {"kv": PageShape(layout="page_first_direct", page_size=32, dtype="torch.bfloat16")},
        {"kv": PageShape(layout="page_first", page_size=16, dtype="torch.bfloat16")},
        {**POOLS, "swa": POOLS["kv"]},
    ],
    ids=table.OF_POOLS.split(),
)
def test_another_shape_of_pages_is_another_fingerprint(model, pools):
    assert fingerprint(model, pools=pools) != fingerprint(model)


def other_value(name):
    """A text that gives a variable another value than SGLang does by itself."""
    known = vars(Envs).get(name)
    if known is None:
        return "1"
    default = known.default() if callable(known.default) else known.default
    for text in ("1", "0", "7", "other", '{"a": 1}'):
        if known.parse(text) != default:
            return text
    raise AssertionError(f"no value of {name} differs from its default")


def test_a_variable_with_another_value_is_another_fingerprint(model, monkeypatch):
    names = [*fingerprint_fields.VARIABLES, ON_ITS_OWN]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    before = fingerprint(model)

    def alike(name):
        with monkeypatch.context() as patch:
            patch.setenv(name, other_value(name))
            return fingerprint(model) == before

    assert [name for name in names if alike(name)] == []


@pytest.mark.parametrize("name", fingerprint_fields.PATH_VARIABLES)
def test_what_a_file_holds_that_a_variable_names_is_in_the_fingerprint(
    model, tmp_path, monkeypatch, name
):
    seen = {fingerprint(model)}
    file = tmp_path / "named.bin"
    monkeypatch.setenv(name, str(file))
    for content in (b"1", b"2"):
        file.write_bytes(content)
        seen.add(fingerprint(model))
    assert len(seen) == 3


def test_a_variable_set_to_what_sglang_does_by_itself_is_the_same_fingerprint(model, monkeypatch):
    before = fingerprint(model)
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "false")
    assert not envs.SGLANG_USE_HND_KVCACHE.get() and "SGLANG_USE_HND_KVCACHE" in os.environ
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    "args", [{"max_running_requests": 8}, {"tokenizer_path": "x"}, {"attention_backend": "triton"}]
)
def test_what_changes_no_byte_leaves_the_fingerprint_as_it_was(model, args):
    assert fingerprint(model, **args) == fingerprint(model)
