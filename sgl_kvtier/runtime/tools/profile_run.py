"""Prompts for a running server to learn from, for `kvtier profile --measure URL`. HTTP only.

The server learns from the chunks and loads that these cause, exactly as from any others, and keeps
the learned costs beside its store. For each length a new prompt is computed, alone. Then the caches
are emptied and it is sent again, so that its prefix comes back from storage.
"""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.outside import is_number, is_whole, parse_json, refusal, shown

_TOKENS = range(5, 250)
"""Ids that every vocabulary has."""
_MOST_ANSWER_BYTES = 64 << 20
_LONGEST_S = 600.0
_STORED_S = 120.0


@dataclass(frozen=True)
class Answered:
    """The server's answer on a prompt: its tokens that came from storage or host memory."""

    tokens: int
    cached: int


class LearningRun:
    """Sends the prompts. `advance` is called after each with what comes next."""

    def __init__(
        self, url: str, admin_key: str | None, advance: Callable[[str], None], seed: int = 0
    ) -> None:
        self._url = url.rstrip("/")
        self._admin = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self._advance = advance
        self._random = random.Random(seed)

    def run(self, lengths: Sequence[int], repeats: int) -> list[Answered]:
        """Sends prompts of all lengths, each twice; returns the answers of the second time. Raises
        KVTierError, which says what to do.
        """
        found = []
        for tokens in [length for _ in range(repeats) for length in lengths]:
            ids = self._random.choices(_TOKENS, k=tokens)
            self._generate(ids)
            self._wait_stored()
            self._advance(f"{tokens} tokens from storage")
            self._call("POST", "/flush_cache", {}, self._admin)
            found.append(Answered(tokens, self._generate(ids)))
            self._advance("computing")
        return found

    def one_more(self, tokens: int) -> None:
        """A prompt after which a server that has learned something writes it down."""
        self._generate(self._random.choices(_TOKENS, k=tokens))

    def _generate(self, ids: Sequence[int]) -> int:
        """Cached tokens of this prompt."""
        body = {"input_ids": list(ids), "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        answer = self._call("POST", "/generate", body)
        try:
            cached = parse_json(answer)["meta_info"].get("cached_tokens", 0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KVTierError(
                f"{self._url}/generate answered {shown(answer)}, which no SGLang server does"
            ) from error
        if not is_whole(cached, 0):
            raise KVTierError(
                refusal(
                    f"cached_tokens of {self._url}/generate", cached, "a whole number of at least 0"
                )
            )
        return cached

    def _wait_stored(self) -> None:
        """Pages are written behind the answer: until the store has not grown for a second."""
        end, before, still = time.monotonic() + _STORED_S, -1.0, 0
        while still < 4 and time.monotonic() < end:
            pages = self._stored_pages()
            still = still + 1 if pages == before else 0
            before = pages
            time.sleep(0.25)

    def _stored_pages(self) -> float:
        text = self._call("GET", "/metrics")
        lines = [
            line.rsplit(" ", 1)[-1]
            for line in text.splitlines()
            if line.startswith("kvtier:store_pages")
        ]
        try:
            values = [float(value) for value in lines]
        except ValueError:
            values = []
        if not values or not all(map(is_number, values)):
            raise KVTierError(
                f"{self._url}/metrics has no kvtier:store_pages: start the server with "
                "--hicache-storage-backend kvtier and --enable-metrics"
            )
        return sum(values)

    def _call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path,
            data=data,
            method=method,
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=_LONGEST_S) as response:
                return str(response.read(_MOST_ANSWER_BYTES).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            said = shown(error.read(1000).decode(errors="replace"))
            hint = (
                "give --admin-api-key" if error.code in (401, 403) else "the server's log says more"
            )
            raise KVTierError(f"{method} {path}: {error.code} {said}. {hint}") from error
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
            raise KVTierError(f"no server answers at {self._url}: {str(error)[:200]}") from error
