"""Messages to token ids: a deterministic scaled-down encoding for small models, and a real
tokenizer's.

Scale-down. About four characters a token are assumed, as with cl100k. `ByteEncoder` with `divisor`
d turns every window of 4*d UTF-8 bytes into one token, a hash of the window. One token for the role
stands before them. So equal texts give equal ids, and two texts with a common beginning give a
common beginning of ids. A differing window gives a differing id, but for a 1-in-vocabulary chance.
Each message has at least one token. Blocks become `block_tokens / d` tokens each, at least one. The
structure of prompts (who shares what with whom) is kept, and all lengths are divided by about d.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.workload.session import Blocks, Call, Message, Prompt

CHARS_PER_TOKEN = 4
"""The ratio that cl100k-like tokenizers reach on agent prompts. The trace sets' prompts have 3.0 to
4.1 characters a token.
"""

Ids = NDArray[np.int32]
_FIRST_ID = 16
"""The least id of `ByteEncoder`."""

# SplitMix64's constants (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
# 2014).
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


class Encoder(ABC):
    """Turns one message into token ids in [first_id, vocab_size), always the same ones. Prompts are
    the concatenation of their messages' ids.
    """

    divisor = 1
    """Factor by which token counts are scaled down; 1 = not at all."""

    def __init__(self, vocab_size: int, first_id: int) -> None:
        self.vocab_size = vocab_size
        self._first_id = first_id

    def encode(self, message: Message) -> Ids:
        """The message's token ids: at least one, all in the model's vocabulary."""
        if message.token_ids is not None:
            return np.asarray(message.token_ids, np.int32)
        if message.blocks is None:
            return self._text_ids(message.role, message.text or "")
        return block_token_ids(message.blocks, self._first_id, self.vocab_size, self.divisor)

    @abstractmethod
    def _text_ids(self, role: str, text: str) -> Ids:
        """The ids of a message that is text."""


class ByteEncoder(Encoder):
    """The encoder for small models without a real tokenizer: ids are hashes in [16, vocab_size), at
    a reduced scale.
    """

    def __init__(self, vocab_size: int, divisor: int = 1) -> None:
        if divisor < 1:
            raise ConfigError(f"divisor = {divisor}: must be a whole number of at least 1")
        if vocab_size < _FIRST_ID + 64:
            raise ConfigError(f"vocab_size = {vocab_size}: must be at least {_FIRST_ID + 64}")
        super().__init__(vocab_size, _FIRST_ID)
        self.divisor = divisor
        self._window = CHARS_PER_TOKEN * divisor
        self._text_seed = np.uint64(_digest("kvtier text 0"))
        steps = np.arange(1, self._window + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._weights = _mix(steps) | np.uint64(1)

    def _text_ids(self, role: str, text: str) -> Ids:
        # Logs hold lone surrogates now and then; they must not stop a replay.
        raw = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        whole = raw[: len(raw) // self._window * self._window].reshape(-1, self._window)
        hashes = np.empty(len(whole) + 1, np.uint64)
        hashes[0] = _digest(f"kvtier role {role}")
        hashes[1:] = (whole.astype(np.uint64) + np.uint64(1)) @ self._weights + self._text_seed
        return _into_range(_mix(hashes), self._first_id, self.vocab_size)


def wide_encoder(divisor: int = 1) -> ByteEncoder:
    """An encoder to tokens of four characters, times `divisor`. Ids are hashes, and it has enough
    of them that different texts do not look alike by chance.
    """
    return ByteEncoder((1 << 31) - 1, divisor)


class TokenizerEncoder(Encoder):
    """A real model's tokenizer.json. Each message is encoded on its own, so prompts that share
    messages share ids.

    A message stands as its role, a line break, its text and a line break. There is no chat
    template, since templates rewrite earlier messages. Blocks become ids drawn from the vocabulary.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            # Heavy door: a compiled package that only replays with a real model need.
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                "replaying with a real tokenizer needs a package: pip install tokenizers"
            ) from error
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(
                f"{file} does not exist: give a tokenizer.json or the model's folder that has one"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises bare Exception on a file it cannot read
            raise ConfigError(f"{file} is not a tokenizer.json: {error}") from error
        size = int(self._tokenizer.get_vocab_size())
        super().__init__(size, min(256, size // 2))

    def _text_ids(self, role: str, text: str) -> Ids:
        text = text.encode("utf-8", "replace").decode()
        encoding = self._tokenizer.encode(f"{role}\n{text}\n", add_special_tokens=False)
        return np.asarray(encoding.ids, np.int32)


class PromptTokens:
    """The token ids of one session's prompts, call after call: only what changed is encoded
    again.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self._buffer = np.empty(1024, np.int32)
        self._messages: list[Message] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def ids(self) -> Ids:
        """The present prompt's ids, read-only; they change with the next `show` or `append`."""
        view = self._buffer[: len(self)]
        view.flags.writeable = False
        return view

    def show(self, prompt: Prompt) -> int:
        """Makes `prompt` the present one and returns how many of its leading ids the one before had
        too.
        """
        same = 0
        for mine, theirs in zip(self._messages, prompt, strict=False):
            if mine is not theirs:
                break
            same += 1
        start = self._ends[same - 1] if same else 0
        before = self._buffer[start : len(self)].copy()
        del self._messages[same:], self._ends[same:]
        self._extend(prompt[same:])
        after = self._buffer[start : len(self)]
        most = min(len(before), len(after))
        differing = np.flatnonzero(before[:most] != after[:most])
        return start + (int(differing[0]) if len(differing) else most)

    def append(self, message: Message) -> None:
        """Puts one message behind the present prompt, such as the output of its call."""
        self._extend([message])

    def _extend(self, messages: Iterable[Message]) -> None:
        for message in messages:
            ids = self._encoder.encode(message)
            start, stop = len(self), len(self) + len(ids)
            if stop > len(self._buffer):
                grown = np.empty(2 * stop, np.int32)
                grown[:start] = self._buffer[:start]
                self._buffer = grown
            self._buffer[start:stop] = ids
            self._messages.append(message)
            self._ends.append(stop)


def output_tokens(call: Call, encoder: Encoder, most: int | None = None) -> int:
    """The tokens to ask of the server for this call: the recorded count at the encoder's scale.

    It is at least 1 and at most `most`. Where no count was recorded it is the output message's own
    length.
    """
    if call.output_tokens is not None:
        wanted = round(call.output_tokens / encoder.divisor)
    elif call.output is not None:
        wanted = len(encoder.encode(call.output))
    else:
        wanted = 1
    return max(1, wanted if most is None else min(wanted, most))


def block_token_ids(blocks: Blocks, first_id: int, vocab_size: int, divisor: int) -> Ids:
    """Made-up ids for blocks: a hash of (scope, block id, place in the block), in [first_id,
    vocab_size).

    A cut last block has the beginning of its whole self. At least one token in all.
    """
    per_block = max(1, round(blocks.block_tokens / divisor))
    cut = len(blocks) * blocks.block_tokens - blocks.tokens
    last = max(1, round((blocks.block_tokens - cut) * per_block / blocks.block_tokens))
    scope = np.uint64(_digest(f"kvtier blocks 0 {blocks.scope}"))
    keys = _mix(blocks.ids().astype(np.uint64) * np.uint64(_GOLDEN) + scope)
    places = np.arange(1, per_block + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    hashes = _mix((keys[:, None] + places[None, :]).reshape(-1))
    if not len(hashes):
        hashes = np.array([_digest("kvtier empty")], np.uint64)
        return _into_range(hashes, first_id, vocab_size)
    return _into_range(hashes[: len(hashes) - per_block + last], first_id, vocab_size)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _MIX1
    values = (values ^ (values >> np.uint64(27))) * _MIX2
    return values ^ (values >> np.uint64(31))


def _into_range(hashes: NDArray[np.uint64], first_id: int, vocab_size: int) -> Ids:
    return (hashes % np.uint64(vocab_size - first_id)).astype(np.int32) + np.int32(first_id)


def _digest(text: str) -> int:
    # Not hash(): that differs from process to process.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
