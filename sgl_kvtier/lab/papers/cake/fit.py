"""The coefficients behind Cake's tables, fitted to the ratio of the two baselines in a few printed
pairs.

Compute-only time of n tokens in chunks of c is chunks·fixed + a n + b n²/2. I/O-only time is
bytes/bandwidth + loads·f. A printed pair gives only their ratio. Bandwidth and bytes are known, so
each pair is one linear equation in (fixed, a, b, f). Cake's own times are used nowhere: every
speedup is a prediction. Of the fitted pairs only the ratio is not.

Fitted (19 of the 172 pairs), in this order:

1. Table 5, rows at 100 %, columns 8k and 16k: cost per chunk and growth on A100 and 2xA100, f of
   LongAlpaca-13B.
2. Table 6, rows at 100 %, the three other models: cost per chunk and f. Their growth is
   LongAlpaca-13B's times the ratio of attention to matrix work (4·dim·layers over 2·parameters).
3. Table 3, H100 at 100 %, 32 Gbps: cost per chunk; growth as on A100.
4. Table 4, chunk sizes 128 and 1024: how much of a chunk's cost does not depend on its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sgl_kvtier.lab.papers.cake.grid import Pair, printed
from sgl_kvtier.lab.sim.hardware import ModelShape, load_model
from sgl_kvtier.policy.learned.cost import PrefillCost

COEFFICIENTS = Path(__file__).with_name("coefficients.json")

LOAD_TOKENS = 128
"""Tokens per load, section 5.1."""

_REFERENCE = "LongAlpaca-13B"
_OTHERS = ("LongAlpaca-7B", "Llama3.1-8B", "Llama3.1-70B")
_CHUNK = 512
_PROFILE_NAMES = {"Llama3.1-8B": "Llama-3.1-8B", "Llama3.1-70B": "Llama-3.1-70B-FP8"}


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Everything a set-up needs. `load_fixed_s` is the part of one load that bandwidth does not
    explain.
    """

    load_fixed_s: dict[str, float]
    prefill: dict[str, dict[str, PrefillCost]]

    def cost(self, hardware: str, model: str) -> PrefillCost:
        """The cost of a chunk there; KeyError for a pairing the paper does not print."""
        return self.prefill[hardware][model]


@dataclass(frozen=True, slots=True)
class _Chunks:
    """One hardware and model at chunks of 512: seconds of a chunk at position 0, and b."""

    chunk_s: float
    growth_s: float


def coefficients() -> Coefficients:
    """The fitted values as they lie in coefficients.json."""
    data = json.loads(COEFFICIENTS.read_text(encoding="utf-8"))
    return Coefficients(
        load_fixed_s=data["fitted"]["load_fixed_s"],
        prefill={
            hardware: {name: PrefillCost(**cost) for name, cost in models.items()}
            for hardware, models in data["fitted"]["prefill"].items()
        },
    )


def shape(model: str) -> ModelShape:
    """The simulator's profile of a model under the paper's name."""
    return load_model(_PROFILE_NAMES.get(model, model))


def is_fitted(pair: Pair) -> bool:
    """Whether the ratio of this pair, or of the same set-up in another table, was fitted."""
    setup = pair.setup
    return any(setup == other.setup for other in fitted_pairs())


def fitted_pairs() -> list[Pair]:
    """The pairs whose ratio is used."""
    return [*_lengths("A100"), *_lengths("2xA100"), *_models(), *_h100(), *_chunk_sizes()]


def fit() -> dict[str, object]:
    """The "fitted" part of the json, from the csv files alone."""
    a100, two_a100, load_s = _fit_reference()
    load_fixed_s = {_REFERENCE: load_s}
    chunks: dict[str, dict[str, _Chunks]] = {
        "A100": {_REFERENCE: a100},
        "2xA100": {_REFERENCE: two_a100},
        "H100": {},
    }
    for name in _OTHERS:
        growth = _growth(two_a100, name)
        pairs = [pair for pair in _models() if pair.setup.model == name]
        chunk_s, load_fixed_s[name] = _least_squares(
            [
                _weighted([_baseline(pair, growth), -_loads(pair)], _bytes_seconds(pair))
                for pair in pairs
            ]
        )
        chunks["2xA100"][name] = _Chunks(chunk_s, chunk_s * growth)
    growth = a100.growth_s / a100.chunk_s
    (chunk_s,) = _least_squares([_known_load(pair, growth, load_s) for pair in _h100()])
    chunks["H100"][_REFERENCE] = _Chunks(chunk_s, chunk_s * growth)
    fixed = _fit_fixed(a100, load_fixed_s, chunks)
    return {
        "load_fixed_s": {name: _rounded(value) for name, value in load_fixed_s.items()},
        "prefill": {
            hardware: {
                name: asdict(_cost(one, fixed.get(name, fixed[_REFERENCE])))
                for name, one in models.items()
            }
            for hardware, models in chunks.items()
        },
    }


def _cost(chunks: _Chunks, fixed_share: float) -> PrefillCost:
    fixed_s = fixed_share * chunks.chunk_s
    return PrefillCost(
        _rounded(fixed_s), _rounded((chunks.chunk_s - fixed_s) / _CHUNK), _rounded(chunks.growth_s)
    )


def _fit_reference() -> tuple[_Chunks, _Chunks, float]:
    """LongAlpaca-13B on one and two A100: five unknowns, eight pairs."""
    equations = []
    for place, hardware in enumerate(("A100", "2xA100")):
        for pair in _lengths(hardware):
            ratio, tokens = pair.io_over_compute, pair.setup.tokens
            terms = [0.0] * 5
            terms[2 * place] = ratio * tokens / _CHUNK
            terms[2 * place + 1] = ratio * tokens * tokens / 2
            terms[4] = -_loads(pair)
            equations.append(_weighted(terms, _bytes_seconds(pair)))
    one_s, one_growth, two_s, two_growth, load_s = _least_squares(equations)
    return _Chunks(one_s, one_growth), _Chunks(two_s, two_growth), load_s


def _fit_fixed(
    a100: _Chunks, load_fixed_s: dict[str, float], chunks: dict[str, dict[str, _Chunks]]
) -> dict[str, float]:
    """The share of a chunk of 512 that every chunk pays, per model; adds LongAlpaca-7B on A100 to
    `chunks`.
    """
    shares = {}
    for name in dict.fromkeys(pair.setup.model for pair in _chunk_sizes()):
        growth = _growth(a100, name)
        equations = []
        for pair in (one for one in _chunk_sizes() if one.setup.model == name):
            ratio, tokens = pair.io_over_compute, pair.setup.tokens
            known_s = _bytes_seconds(pair) + _loads(pair) * load_fixed_s[name]
            # Unknown: fixed seconds per chunk, and the rest of a 512-token chunk; growth is a share
            # of their sum.
            bend = growth * tokens * tokens / 2
            terms = [ratio * (tokens / pair.setup.budget + bend), ratio * (tokens / _CHUNK + bend)]
            equations.append(_weighted(terms, known_s))
        fixed_s, rest_s = _least_squares(equations)
        shares[name] = fixed_s / (fixed_s + rest_s)
        if name not in chunks["A100"]:
            chunks["A100"][name] = _Chunks(fixed_s + rest_s, growth * (fixed_s + rest_s))
    return shares


def _growth(reference: _Chunks, name: str) -> float:
    """b over the seconds of a chunk, for another model on the same hardware."""
    return (
        reference.growth_s
        / reference.chunk_s
        * _attention_share(name)
        / _attention_share(_REFERENCE)
    )


def _attention_share(name: str) -> float:
    """Attention work per token and position over matrix work per token."""
    model = shape(name)
    return 4 * model.heads * model.head_dim * model.layers / (2 * model.params)


def _baseline(pair: Pair, growth: float) -> float:
    """The factor of the seconds of a chunk in (I/O-only) = ratio x (compute-only)."""
    tokens = pair.setup.tokens
    return pair.io_over_compute * (tokens / _CHUNK + growth * tokens * tokens / 2)


def _known_load(pair: Pair, growth: float, load_s: float) -> tuple[list[float], float]:
    return _weighted([_baseline(pair, growth)], _bytes_seconds(pair) + _loads(pair) * load_s)


def _bytes_seconds(pair: Pair) -> float:
    setup = pair.setup
    return (
        setup.tokens
        * shape(setup.model).kv_bytes_per_token
        * setup.kv_scale
        * 8
        / (setup.gbps * 1e9)
    )


def _loads(pair: Pair) -> float:
    return pair.setup.tokens / LOAD_TOKENS


def _lengths(hardware: str) -> list[Pair]:
    wanted = ("8k Tokens", "16k Tokens")
    return [
        p
        for p in printed("5")
        if p.setup.hardware == hardware and p.setup.share == 1 and p.column in wanted
    ]


def _models() -> list[Pair]:
    return [
        pair for pair in printed("6") if pair.setup.share == 1 and pair.setup.model != _REFERENCE
    ]


def _h100() -> list[Pair]:
    return [
        p
        for p in printed("3")
        if p.setup.hardware == "H100" and p.setup.share == 1 and p.setup.gbps == 32
    ]


def _chunk_sizes() -> list[Pair]:
    return [pair for pair in printed("4") if pair.setup.budget in (128, 1024)]


def _weighted(terms: Sequence[float], right: float) -> tuple[list[float], float]:
    """Relative error: pairs are printed with the same relative precision whatever their seconds."""
    return [term / right for term in terms], 1.0


def _least_squares(equations: Iterable[tuple[Sequence[float], float]]) -> list[float]:
    """Normal equations by elimination; the systems here have at most five unknowns."""
    rows = list(equations)
    size = len(rows[0][0])
    matrix = [
        [sum(t[i] * t[j] for t, _ in rows) for j in range(size)] + [sum(t[i] * r for t, r in rows)]
        for i in range(size)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [
                    value - factor * top
                    for value, top in zip(matrix[row], matrix[column], strict=True)
                ]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
