"""Streams on pipes: what each gets, and when it ends."""

from __future__ import annotations

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier.lab.sim.links import Network, Pipe


def _ends(
    pipes: dict[str, Pipe], streams: list[tuple[float, tuple[str, ...], int]]
) -> tuple[list[float], Network]:
    """Second at which each stream (start, pipes, bytes) ends."""
    env = simpy.Environment()
    network = Network(env, pipes)
    ends = [0.0] * len(streams)

    def begin(place: int) -> None:
        _, over, nbytes = streams[place]

        def done(_: object) -> None:
            ends[place] = env.now

        network.open(over, nbytes, done)

    for place, (start, _, _) in enumerate(streams):
        env.timeout(start).callbacks.append(lambda _, place=place: begin(place))  # type: ignore[union-attr]
    env.run()
    return ends, network


def test_streams_are_retimed_when_another_joins_and_leaves() -> None:
    # Alone for 1 s (100 of 200 bytes), then half each: the second needs 2 s, the first ends with
    # it.
    ends, _ = _ends({"a": Pipe(100)}, [(0, ("a",), 200), (1, ("a",), 50)])
    assert ends == pytest.approx([2.5, 2.0])


def test_what_a_stream_limited_elsewhere_leaves_goes_to_the_others() -> None:
    # The first is held to 10 by the drive; the second gets 90 of the bus.
    ends, _ = _ends(
        {"ssd": Pipe(10), "bus": Pipe(100)}, [(0, ("ssd", "bus"), 10), (0, ("bus",), 90)]
    )
    assert ends == pytest.approx([1.0, 1.0])


def test_latency_comes_before_the_bytes_and_takes_no_bandwidth() -> None:
    env = simpy.Environment()
    network = Network(env, {"a": Pipe(100)})
    ends: list[float] = []
    network.open(("a",), 100, lambda _: ends.append(env.now), latency_s=1.0)
    network.open(("a",), 100, lambda _: ends.append(env.now))
    env.run()
    assert ends == pytest.approx([1.0, 2.0])


@given(
    st.lists(
        st.tuples(
            st.floats(0, 5),
            st.sampled_from([("a",), ("b",), ("a", "b"), ("b", "c"), ("a", "b", "c")]),
            st.integers(1, 10_000),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_honest_pipes_never_move_more_than_they_can_and_every_byte_arrives(
    streams: list[tuple[float, tuple[str, ...], int]],
) -> None:
    pipes = {"a": Pipe(100), "b": Pipe(250), "c": Pipe(40)}
    ends, network = _ends(pipes, streams)
    for name, usage in network.usage().items():
        carried = [
            (start, end, n)
            for (start, over, n), end in zip(streams, ends, strict=True)
            if name in over
        ]
        assert usage.nbytes == pytest.approx(sum(n for _, _, n in carried), rel=1e-6, abs=1e-3)
        assert usage.nbytes <= pipes[name].bytes_per_s * usage.busy_s * (1 + 1e-6) + 1e-3
    for (start, over, nbytes), end in zip(streams, ends, strict=True):
        assert end - start >= nbytes / min(pipes[name].bytes_per_s for name in over) * (1 - 1e-6)
