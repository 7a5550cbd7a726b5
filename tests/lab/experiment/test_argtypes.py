"""Options that commands share: the defaults that help names, and what each device refuses."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from commands import parsed

from sgl_kvtier import cli
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import Options, load_options, replay_options
from sgl_kvtier.lab.experiment.frame import check
from sgl_kvtier.lab.experiment.scenarios import compare, replay
from sgl_kvtier.lab.experiment.scenarios.compare import CompareOptions
from sgl_kvtier.lab.outside.replay import ReplayOptions

PACED = ("--device", "paced:h100-llama8b")


def served(words: list[str]) -> CompareOptions:
    """The options of a comparison."""
    return CompareOptions.of(parsed(compare, *words))


def helped(words: str, option: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the help says of an option after these words of a command line, in one line."""
    with pytest.raises(SystemExit):
        cli.main([*words.split(), "--help"])
    options = re.split(r"\n  (?=-)", capsys.readouterr().out)
    (said,) = [one for one in options if one.startswith(f"--{option} ")]
    return " ".join(said.split())


EMULATED = "--device paced:h100-llama8b"


@pytest.mark.parametrize(
    ("words", "option", "default"),
    [
        ("compare --device cpu", "arms", "recompute, hicache, hicache-file, kvtier"),
        ("compare --device cpu --quick", "arms", "recompute, hicache-file, kvtier"),
        ("compare --device cpu --arms kvtier", "arms", "recompute, hicache, hicache-file, kvtier"),
        (f"compare {EMULATED}", "arms", "recompute, hicache, hicache-file, kvtier, oracle"),
        (f"compare {EMULATED} --quick", "arms", "hicache-file, kvtier"),
        ("compare --device cpu --quick", "sessions", "6"),
        (f"compare {EMULATED} --quick", "sessions", "5"),
        ("compare --device cuda", "max-output-tokens", "recorded"),
        ("compare --device cpu --quick", "max-output-tokens", "12"),
        (f"compare {EMULATED}", "rounds", "4"),
        (f"compare {EMULATED}", "concurrency", "all"),
        ("compare --device cuda", "chunk", "4096"),
        (f"compare {EMULATED}", "model", "the device's own"),
        (f"compare {EMULATED}", "dilation", "2"),
        (f"compare {EMULATED} --quick", "dilation", "1"),
        ("compare restore --device cpu --quick", "lengths", "2k"),
        (f"compare restore {EMULATED}", "lengths", "8k,16k,32k,64k"),
        ("compare restore --device cpu --at-once 2", "lengths", "1k,2k,3k,4k"),
        ("compare restore --device cpu --at-once 2", "load-over-compute", "1"),
        ("compare restore --device cuda", "models", "lab-gpu-1b"),
        (f"compare remote {EMULATED}", "tokens", "16384"),
        ("compare remote --quick", "sessions", "2"),
        (f"bench restore-fuzz {EMULATED}", "chunk", "2048"),
        ("bench restore-fuzz --device cuda", "model", "lab-gpu-tiny"),
        ("replay http://127.0.0.1:1", "turns", "all"),
    ],
)
def test_the_help_of_a_command_has_the_defaults_of_the_options_before_it(
    words, option, default, capsys
):
    assert f"(default {default})" in helped(words, option, capsys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dtype", "bfloat16"), "--dtype bfloat16: paced:h100-llama8b has float32"),
        (("--page-size", "16"), "--page-size 16: paced:h100-llama8b has 64"),
        (("--threads", "2"), "--threads 2: paced:h100-llama8b has 1"),
        (("--server-arg=--tp-size", "--server-arg=2"), "--tp-size 2: paced:h100-llama8b has 1"),
    ],
)
def test_a_comparison_on_a_paced_device_refuses_what_another_device_has(words, said):
    args = served([*PACED, *words])
    with pytest.raises(BenchError, match=f"^{said}"):
        check(args, starts_servers=False)


def test_a_comparison_on_a_paced_device_takes_what_it_has():
    words = ("--dtype", "float32", "--tp", "1", "--page-size", "64", "--threads", "1")
    check(served([*PACED, *words]), starts_servers=False)


def test_only_a_comparison_on_a_paced_device_has_a_dilation():
    args = served(["--device", "cpu", "--dilation", "2"])
    with pytest.raises(BenchError, match="--dilation: only a paced device has it"):
        check(args, starts_servers=False)


@pytest.mark.parametrize("command", [compare, replay])
def test_sessions_come_so_many_at_a_time_or_at_a_rate_but_not_both(command, capsys):
    needed = [] if command is compare else ["http://server"]
    with pytest.raises(SystemExit):
        parsed(command, *needed, "--rate", "0.5", "--concurrency", "4")
    said = capsys.readouterr().err
    assert "--concurrency: not allowed with argument --rate" in said


def test_the_settings_of_a_replay_name_its_rate_or_its_concurrency():
    by_rate, by_number, usual = (
        replay_options(
            Options.of(parsed(replay, "http://server", *words)), ReplayOptions(concurrency=8)
        )
        for words in (["--rate", "0.5", "--seed", "7"], ["--concurrency", "3"], [])
    )
    assert (by_rate.rate, by_rate.concurrency, by_rate.seed) == (0.5, None, 7)
    assert (by_number.rate, by_number.concurrency) == (None, 3)
    assert (usual.rate, usual.concurrency) == (None, 8)


@pytest.mark.parametrize(
    ("words", "waits_s"),
    [
        ([], [0.0, 2.0]),
        (["--pause", "5"], [0.0, 5.0]),
        (["--gap-scale", "10"], [1.0, 1.0]),
        (["--gap-cap", "0.05"], [0.05, 0.05]),
    ],
)
def test_gaps_of_a_quick_paced_load_are_pauses_unless_recorded_ones_are_asked_for(words, waits_s):
    args = served([*PACED, "--quick", *words])
    usual = compare.replay_defaults(args, args.device, SimpleNamespace(sessions=[0] * 5))
    options = replay_options(args, usual)
    assert options.concurrency == 5
    assert [options.wait_s(turn, 0.1) for turn in (1, 2)] == waits_s


def test_recorded_gaps_and_pauses_of_one_length_exclude_each_other():
    args = served([*PACED, "--pause", "5", "--gap-cap", "1"])
    with pytest.raises(BenchError, match="--pause is instead of the recorded gaps"):
        replay_options(args, compare.REPLAY)


@pytest.mark.parametrize(
    ("words", "most"), [((), 16), (("0",), None), (("recorded",), None), (("5",), 5)]
)
def test_outputs_may_be_as_long_as_recorded_where_the_default_is_a_limit(words, most):
    given = ["--max-output-tokens", *words] if words else []
    args = served([*PACED, *given])
    wanted = load_options(args, compare.load_defaults(args, args.device))
    assert wanted.most_output_tokens == most
    options = replay_options(args, compare.REPLAY, wanted.most_output_tokens)
    assert options.most_output_tokens == most


@pytest.mark.parametrize(("words", "least"), [((), 36_000), (("0",), 0), (("5",), 5)])
def test_sessions_may_be_as_short_as_they_are_where_the_default_passes_over_short_ones(
    words, least
):
    given = ["--min-prompt-tokens", *words] if words else []
    args = served([*PACED, *given])
    wanted = load_options(args, compare.load_defaults(args, args.device))
    assert wanted.least_prompt_tokens == least


def test_another_word_for_as_recorded_is_refused(capsys):
    with pytest.raises(SystemExit):
        parsed(compare, "--max-output-tokens", "all")
    assert "must be a whole number of at least 0, or recorded" in capsys.readouterr().err
