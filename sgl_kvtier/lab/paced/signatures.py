"""Keys and values that can be checked: every row says which tokens stand before it.

The row of a token holds C + a constant of the buffer and column in every 8 bytes. C is the chain of
the tokens up to it and of their positions. A forward reads the chain of a new token from the row
before it. Every extend compares all rows of its prefix, in all buffers, with the chain of the
request's own tokens, and every decode step compares a sample. A difference goes into the chain of
the tokens that follow, and so into the next token. So a wrong byte changes the answer, and all that
is computed behind it. With nothing wrong the next token depends on the tokens alone, so neither
chunks nor batches change it.

Any pool fits whose rows are token slots of whole 8 bytes: keys and values, latents, FP8. Tensors
are on the host; the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.workload.encoder import Ids

SAMPLES = 32
"""Rows that a decode step compares, per request."""
_FIRST_TOKEN, _TOKENS = 16, 240
"""Next tokens are among these: bytes, no special token of a lab model."""

# SplitMix64's constants (Steele, Lea, Flood 2014) as signed integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def mix(values: torch.Tensor) -> torch.Tensor:
    """Each int64 as another one, the way SplitMix64 ends; shifts keep the sign."""
    values = (values ^ (values >> 30)) * _MIX1
    values = (values ^ (values >> 27)) * _MIX2
    return values ^ (values >> 31)


def chain_of(tokens: torch.Tensor, first: int = 0, before: torch.Tensor | int = 0) -> torch.Tensor:
    """The chain, int64 [n], of tokens at positions from `first` on, behind the chain `before`."""
    places = torch.arange(first, first + tokens.numel()) * _GOLDEN
    return torch.cumsum(mix(mix(tokens.to(torch.int64)) + places), 0) + before


def answer_of(prompt: Ids, count: int) -> tuple[int, ...]:
    """The first `count` tokens that every paced device answers to a prompt of at least one token,
    where nothing is wrong with its pages.
    """
    found: list[int] = []
    chain = chain_of(torch.tensor(prompt))[-1:]
    for place in range(len(prompt), len(prompt) + count):
        token = _tokens_of(chain)
        found.append(int(token))
        chain = chain_of(token, place, chain)
    return tuple(found)


@dataclass(frozen=True)
class Mismatch:
    """Rows that are not those of the request's tokens. `first` is the first such token's position,
    `slot` its slot. `tier` is where its page came from, `tokens` the number of such tokens.
    """

    rid: str
    first: int
    slot: int
    page: int
    tier: str
    tokens: int
    checked: int
    buffers: tuple[str, ...]

    def __str__(self) -> str:
        where = f"page {self.page} (slot {self.slot}), which came from {self.tier}"
        return (
            f"{self.tokens} of {self.checked} tokens checked of request {self.rid} are wrong: "
            f"the first at position {self.first}, in {where}, in {', '.join(self.buffers)}"
        )


class Tiers(Protocol):
    """Where the page of a device slot came from."""

    def tier(self, slot: int) -> str: ...


@dataclass(frozen=True)
class Extend:
    """One request of a prefill batch. `prefix` and `own` are device slots, int64. `tokens` stand at
    the positions behind the prefix. `known` is the chain of at least the prefix, None where the
    request's tokens are not known.
    """

    rid: str
    prefix: torch.Tensor
    own: torch.Tensor
    tokens: torch.Tensor
    known: torch.Tensor | None


@dataclass(frozen=True)
class Decode:
    """One request of a decode step. `slots` are the device slots of its tokens, of which `length`
    stand before the new one. `known` is the chain of its first tokens.
    """

    rid: str
    slots: torch.Tensor
    length: int
    known: torch.Tensor | None


class _Buffer:
    """One layer's buffer as int64, [slots, 8-byte columns]."""

    def __init__(self, name: str, rows: torch.Tensor, number: int, page_size: int) -> None:
        flat = rows.view(rows.shape[0], -1).view(torch.uint8)
        if flat.shape[1] % 8:
            raise BenchError(
                f"a row of {name} has {flat.shape[1]} bytes: a paced device needs a multiple of 8"
            )
        self.name = name
        self.lanes = flat.view(torch.int64)
        count = self.lanes.shape[1]
        self._page_size = page_size
        self._pages = self.lanes[: rows.shape[0] // page_size * page_size].view(
            -1, page_size * count
        )
        first = 1 + number * 4096
        self.constants = mix(torch.arange(first, first + count) * _GOLDEN)
        self.weight = int(mix(torch.tensor([-1 - number]))) | 1

    def signed(self, chain: torch.Tensor) -> torch.Tensor:
        """The rows of tokens with these chains."""
        return chain[:, None] + self.constants

    def read(self, slots: torch.Tensor, pages: torch.Tensor | None) -> torch.Tensor:
        """Rows of slots; `pages` are those of all slots but the last page's, if they are whole."""
        if pages is None:
            return self.lanes.index_select(0, slots)
        whole = pages.numel() * self._page_size
        out = self.lanes.new_empty((slots.numel(), self.lanes.shape[1]))
        torch.index_select(self._pages, 0, pages, out=out[:whole].view(pages.numel(), -1))
        if whole < slots.numel():
            out[whole:] = self.lanes.index_select(0, slots[whole:])
        return out


class Signer:
    """Writes and checks the rows of one pool.

    All buffers are compared at once, as their sum with odd weights. A change of one buffer changes
    the sum, but for chances of 1 in 2^60. Each is looked at only where the sum differs.
    """

    def __init__(self, buffers: Mapping[str, torch.Tensor], page_size: int, tiers: Tiers) -> None:
        """`buffers` are all layers' rows by name. Raises BenchError where they do not fit."""
        self._buffers = [
            _Buffer(name, rows, number, page_size)
            for number, (name, rows) in enumerate(buffers.items())
        ]
        self._page_size = page_size
        self._tiers = tiers
        self._weights = int(torch.tensor([one.weight for one in self._buffers]).sum())
        self._constants = torch.stack([one.constants * one.weight for one in self._buffers]).sum(0)
        self.checked_tokens = 0
        self.mismatches: list[Mismatch] = []
        """Found since they were last taken."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in all buffers."""
        return sum(buffer.lanes.shape[1] * 8 for buffer in self._buffers)

    def extend(self, batch: Sequence[Extend]) -> torch.Tensor:
        """Checks every prefix, signs what is new, and returns the next tokens, int64 [requests]."""
        return _tokens_of(torch.stack([self._extend(one) for one in batch]))

    def decode(
        self, batch: Sequence[Decode], tokens: torch.Tensor, own: torch.Tensor
    ) -> torch.Tensor:
        """Checks samples, signs the new `tokens` into the slots `own`, both int64 [requests], and
        returns the next ones.
        """
        lengths = torch.tensor([one.length for one in batch])
        last = torch.stack([one.slots[one.length - 1] for one in batch])
        before = self._read(last) + self._sample(batch)
        chain = mix(mix(tokens.to(torch.int64)) + lengths * _GOLDEN) + before
        self._write(own, chain)
        return _tokens_of(chain)

    def blank(self, slots: torch.Tensor) -> None:
        """The rows of these slots say nothing any more."""
        for buffer in self._buffers:
            buffer.lanes.index_fill_(0, slots, 0)

    def sign_layers(self, rid: str, slots: torch.Tensor, chain: torch.Tensor, layers: int) -> None:
        """Signs the rows of the lowest `layers`, and checks those of all."""
        low = tuple(f"layer {layer}," for layer in range(layers))
        for buffer in self._buffers:
            if buffer.name.startswith(low):
                buffer.lanes.index_copy_(0, slots, buffer.signed(chain))
        self._check(rid, slots, chain)

    def _extend(self, one: Extend) -> torch.Tensor:
        length, before = one.prefix.numel(), torch.zeros(1, dtype=torch.int64)
        if length:
            before = self._read(one.prefix[-1:])
            if one.known is not None:
                pages = self._whole_pages(one.prefix)
                before = before + self._check(one.rid, one.prefix, one.known[:length], pages=pages)
        chain = chain_of(one.tokens, length, before)
        self._write(one.own, chain)
        return chain[-1]

    def _sample(self, batch: Sequence[Decode]) -> torch.Tensor:
        """For each request 0, or a number made of what is wrong in its sample."""
        damage = torch.zeros(len(batch), dtype=torch.int64)
        asked, slots, chains, places = [], [], [], []
        for number, one in enumerate(batch):
            among = 0 if one.known is None else min(one.length, one.known.numel())
            if not among or one.known is None:
                continue
            draw = torch.arange(SAMPLES) + one.length * SAMPLES
            place = (mix(draw) & 0x7FFFFFFF) % among
            asked.append(number)
            slots.append(one.slots[place])
            chains.append(one.known[place])
            places.append(place)
        if not asked or self._same(torch.cat(slots), torch.cat(chains), None):
            self.checked_tokens += SAMPLES * len(asked)
            return damage
        for number, slot, chain, place in zip(asked, slots, chains, places, strict=True):
            damage[number] = self._check(batch[number].rid, slot, chain, places=place)
        return damage

    def _write(self, slots: torch.Tensor, chain: torch.Tensor) -> None:
        for buffer in self._buffers:
            buffer.lanes.index_copy_(0, slots, buffer.signed(chain))

    def _read(self, slots: torch.Tensor) -> torch.Tensor:
        """The chains that the rows of these slots say."""
        first = self._buffers[0]
        return first.lanes[slots, 0] - first.constants[0]

    def _whole_pages(self, slots: torch.Tensor) -> torch.Tensor | None:
        """The pages that a prefix is made of, without one that is not full. None where its slots do
        not lie in pages.
        """
        size = self._page_size
        whole = slots[: slots.numel() // size * size].view(-1, size)
        if not torch.equal(whole[:, 0] % size, torch.zeros_like(whole[:, 0])):
            return None
        if not torch.equal(
            whole[:, 1:] - whole[:, :1], torch.arange(1, size).expand(len(whole), -1)
        ):
            return None
        return whole[:, 0] // size

    def _same(self, slots: torch.Tensor, known: torch.Tensor, pages: torch.Tensor | None) -> bool:
        total: torch.Tensor | None = None
        for buffer in self._buffers:
            found = buffer.read(slots, pages)
            if total is None:
                total = found.mul_(buffer.weight)
            else:
                total.add_(found, alpha=buffer.weight)
        assert total is not None
        return torch.equal(total, (known * self._weights)[:, None] + self._constants)

    def _check(
        self,
        rid: str,
        slots: torch.Tensor,
        known: torch.Tensor,
        *,
        pages: torch.Tensor | None = None,
        places: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compares rows with their chain: 0, or a number made of what is wrong. `places` are their
        positions, from 0 on where they are left away.
        """
        self.checked_tokens += slots.numel()
        damage = torch.zeros((), dtype=torch.int64)
        if self._same(slots, known, pages):
            return damage
        wrong, names = torch.zeros(slots.numel(), dtype=torch.bool), []
        for buffer in self._buffers:
            off = buffer.read(slots, pages) - buffer.signed(known)
            if bool(off.any()):
                wrong |= off.any(1)
                names.append(buffer.name)
                damage += (mix(off + buffer.constants) - mix(buffer.constants)).sum()
        self.mismatches.append(self._mismatch(rid, slots, wrong, tuple(names), places))
        return damage

    def _mismatch(
        self,
        rid: str,
        slots: torch.Tensor,
        wrong: torch.Tensor,
        names: tuple[str, ...],
        places: torch.Tensor | None,
    ) -> Mismatch:
        first = int(wrong.nonzero()[0])
        slot = int(slots[first])
        return Mismatch(
            rid=rid,
            first=first if places is None else int(places[first]),
            slot=slot,
            page=slot // self._page_size,
            tier=self._tiers.tier(slot),
            tokens=int(wrong.sum()),
            checked=slots.numel(),
            buffers=names,
        )


def _tokens_of(chains: torch.Tensor) -> torch.Tensor:
    return (mix(chains) & 0x7FFFFFFF) % _TOKENS + _FIRST_TOKEN
