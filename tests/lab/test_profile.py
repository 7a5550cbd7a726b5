"""Profiles: each file, and the times between its points."""

from __future__ import annotations

import itertools

import pytest

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab import profile
from sgl_kvtier.lab.profile import Table

NAMES = profile.names()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kv_dtype", [profile.BF16, profile.FP8])
def test_times_between_the_points_are_those_of_the_database(name, kv_dtype):
    read, found = profile.read(name, kv_dtype), profile.document(name)
    between = found.get(kv_dtype, found)["between"]
    off = [read.prefill.at(n, p) / seconds - 1 for n, p, seconds in between["prefill"]]
    off += [read.decode.at(b, c) / seconds - 1 for b, c, seconds in between["decode"]]
    assert len(off) == 16
    assert max(abs(one) for one in off) < 0.06


@pytest.mark.parametrize("name", NAMES)
def test_a_profile_says_where_its_times_come_from_and_how_to_make_it_again(name):
    source = profile.read(name).source
    assert "aiconfigurator 0.12.0" in source["database"]
    assert source["command"] == f"scripts/make-profiles {name}"
    assert "bilinear" in source["interpolation"]


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_in_fp8_have_half_the_bytes_and_times_of_their_own(name):
    usual, fp8 = profile.read(name), profile.read(name, profile.FP8)
    assert fp8.kv_bytes_per_token * 2 == usual.kv_bytes_per_token
    assert fp8.source == usual.source | {"model": fp8.source["model"]}
    assert "KV cache bf16" in usual.source["model"]
    assert "KV cache fp8_e4m3" in fp8.source["model"]
    assert fp8.decode.at(32, 32768) != usual.decode.at(32, 32768)


@pytest.mark.parametrize("name", NAMES)
def test_more_tokens_and_longer_prefixes_never_take_less_by_more_than_the_databases_noise(name):
    table = profile.read(name).prefill
    for row in table.seconds:
        assert all(b > a * 0.9 for a, b in itertools.pairwise(row))
    for upper, lower in itertools.pairwise(table.seconds):
        assert all(b > a * 0.9 for a, b in zip(upper, lower, strict=True))


@pytest.mark.parametrize(
    ("row", "column", "seconds"),
    [
        (2, 10, 4.0),  # a point of the table
        (3, 5, 5.0),  # between points
        (4, 20, 11.0),  # beyond the last point it goes on as before it
        (0.5, 0, 1.0),  # before the first point it is as there
    ],
)
def test_times_between_and_beyond_the_points_of_a_table(row, column, seconds):
    table = Table((1, 2, 4), (0, 10), ((1.0, 2.0), (3.0, 4.0), (5.0, 8.0)))
    assert table.at(row, column) == pytest.approx(seconds)


def test_one_request_takes_what_the_table_says():
    read = profile.read("h100-llama8b")
    assert read.prefill_seconds([(8192, 32768)]) == pytest.approx(read.prefill.at(8192, 32768))


def test_requests_of_one_batch_attend_to_their_own_prefix_alone():
    read = profile.read("h100-llama8b")
    apart = read.prefill_seconds([(2048, 0)] * 4)
    joined = read.prefill_seconds([(8192, 0)])
    assert apart < joined
    assert read.prefill_seconds([(2048, 65536), (2048, 0)]) > read.prefill_seconds([(4096, 0)])


def test_a_batch_never_takes_less_than_its_longest_request():
    read = profile.read("h100-llama8b")
    assert read.prefill_seconds([(1, 0), (4096, 0)]) >= read.prefill.at(4096, 0)


def test_an_unknown_profile_is_refused_with_the_names_there_are():
    with pytest.raises(BenchError, match="h100-llama8b"):
        profile.read("b300-gpt")
