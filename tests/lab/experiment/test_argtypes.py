"""Options that commands share: which devices each offers, and the defaults that its help names."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.experiment.argtypes import load_options, replay_options
from sgl_kvtier.lab.experiment.frame import check
from sgl_kvtier.lab.experiment.options import Options
from sgl_kvtier.lab.experiment.scenarios import compare, replay, restore
from sgl_kvtier.lab.experiment.scenarios.compare import CompareOptions
from sgl_kvtier.lab.outside.replay import ReplayOptions
from sgl_kvtier.lab.stress.server import command as fuzz

PACED = ("--device", "paced:h100-llama8b")


def parser_of(command) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser


def served(words: list[str]) -> CompareOptions:
    """The options of a comparison."""
    return CompareOptions.of(parser_of(compare).parse_args(words))


def helped(command, option: str) -> str:
    """The help of one option."""
    return parser_of(command)._option_string_actions[f"--{option}"].help or ""


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            "arms",
            "(default: all but hicache-nixl,hicache-mooncake,kvtier-off,kvtier-restore,kvtier-unproven, and oracle",
        ),
        ("device-tokens", "a third on a paced device"),
        ("chunk", "512 on a CPU, 4096 on a GPU, 8192 on a paced device"),
        (
            "sessions",
            "(default 8; 6 with --quick; 12 on a paced device; 5 on a paced device with --quick)",
        ),
        ("divisor", "(default 4; 1 on a GPU, on a paced device, on a paced device with --quick)"),
        ("max-output-tokens", "(default 16; recorded on a GPU; 12 with --quick)"),
        (
            "rounds",
            "(default 4 on a paced device, where recompute has one; else 3, or 2 with --quick)",
        ),
    ],
)
def test_the_help_of_compare_names_the_defaults_of_every_device(option, said):
    assert said in helped(compare, option)


@pytest.mark.parametrize(
    ("command", "option", "said"),
    [
        (restore, "lengths", "8k,16k,32k,64k on a paced device"),
        (restore, "models", "a paced device brings its own"),
        (restore, "foreign", "(default 0.1; 0.5 on a paced device"),
        (restore, "chunk", "8192 on a paced device"),
        (fuzz, "chunk", "(default 256, 2048 on a paced device)"),
        (fuzz, "divisor", "(default 4; 1 on a paced device)"),
        (fuzz, "lab-model", "a paced device brings its own"),
    ],
)
def test_the_help_of_a_command_names_the_defaults_of_a_paced_device(command, option, said):
    assert said in helped(command, option)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--dtype", "bfloat16"), "--dtype bfloat16: paced:h100-llama8b has float32"),
        (("--tp", "2"), "--tp 2: paced:h100-llama8b has 1"),
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
        parser_of(command).parse_args([*needed, "--rate", "0.5", "--concurrency", "4"])
    said = capsys.readouterr().err
    assert "--concurrency: not allowed with argument --rate" in said


def test_the_settings_of_a_replay_name_its_rate_or_its_concurrency():
    parser = parser_of(replay)
    by_rate, by_number, usual = (
        replay_options(
            Options.of(parser.parse_args(["http://server", *words])), ReplayOptions(concurrency=8)
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
        parser_of(compare).parse_args(["--max-output-tokens", "all"])
    assert "must be a whole number of at least 0, or recorded" in capsys.readouterr().err
