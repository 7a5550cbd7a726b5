"""Requests to the simulated server, and the result of each."""

from __future__ import annotations

from dataclasses import dataclass, field

from sgl_kvtier.types import Link, PageKey, Span, Tier


@dataclass(frozen=True, slots=True)
class ByLayers:
    """A stored prefix that is restored by layers (CacheFlow 3.1): some layers are computed for all
    its tokens, the others loaded.
    """

    tokens: int
    layers: int


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. Its reusable prefix is given either by `keys`, which are looked up in the
    simulated tiers, or by `cached`.

    `keys` name its full prompt pages in order, `final_keys` those of prompt and output together
    (empty: the output is not kept). `cached` are disjoint ascending page spans from page 0 on with
    the tier each lies in; they are always found. `arrival_s` counts from the start, or from the end
    of request `after` (a client that waits for its answer). With `by_layers` each page of `cached`
    is a layer of all tokens of the prefix, and `prompt_tokens` counts one page's tokens for each.
    """

    rid: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int = 1
    keys: tuple[PageKey, ...] = ()
    final_keys: tuple[PageKey, ...] = ()
    cached: tuple[tuple[Span, Tier], ...] = ()
    session: str | None = None
    after: str | None = None
    by_layers: ByLayers | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"{self.rid}: a prompt and an output have at least one token each")
        if self.keys and self.cached:
            raise ValueError(f"{self.rid}: give keys or cached spans, not both")
        if self.keys and self.final_keys[: len(self.keys)] not in ((), self.keys):
            raise ValueError(f"{self.rid}: final_keys must begin with keys")


@dataclass(slots=True)
class RequestResult:
    """One request's fate. Seconds since the start of the run; tokens of its prompt unless said
    otherwise.

    `hit_tokens`: what lay in each tier when it arrived. `computed` + `spliced` + `resident_tokens`
    = prompt. `restore_mode` is what the planner answered ("" = nothing to restore), `left` whether
    the engine loaded it by itself.
    """

    rid: str
    session: str | None
    arrived_s: float
    prompt_tokens: int
    hit_tokens: dict[Tier, int] = field(default_factory=dict)
    first_chunk_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    resident_tokens: int = 0
    computed_tokens: int = 0
    spliced_tokens: int = 0
    lost_tokens: int = 0
    restore_mode: str = ""
    left: bool = False
    chunks: int = 0
    retracted: int = 0

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token. Raises ValueError when there was none."""
        if self.first_token_s is None:
            raise ValueError(f"{self.rid} never got its first token")
        return self.first_token_s - self.arrived_s


@dataclass(slots=True)
class LinkResult:
    """Transfers over one link. `wasted_bytes`: loads never spliced, and prefetched copies dropped
    or left without a hit.
    """

    nbytes: int = 0
    transfers: int = 0
    busy_s: float = 0.0
    wasted_bytes: int = 0


@dataclass(slots=True)
class SimResult:
    """All of a run. `events` are those of the event kernel, `steps` those of the engine."""

    requests: list[RequestResult]
    links: dict[Link, LinkResult]
    pipes: dict[str, tuple[float, float]]
    """Bytes moved and busy seconds of each pipe."""
    finished_s: float
    compute_busy_s: float
    steps: int
    events: int
    gaps_s: list[float] = field(default_factory=list)
    """Times between two output tokens of a request, of all requests as they came."""

    def ttfts(self) -> list[float]:
        """Seconds to the first token, in the order of arrival."""
        return [request.ttft_s for request in self.requests]
