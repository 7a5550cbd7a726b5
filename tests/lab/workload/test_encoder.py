"""Messages to token ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier.errors import ConfigError
from sgl_kvtier.lab.workload.encoder import (
    ByteEncoder,
    PromptTokens,
    TokenizerEncoder,
    output_tokens,
)
from sgl_kvtier.lab.workload.session import Append, Blocks, Call, Context, Message, Session

VOCABULARY = 512
divisors = st.sampled_from([1, 2, 8, 16])
# Includes lone surrogates, which real logs have.
texts = st.text(st.characters(), max_size=300)


def encoded(text: str, divisor: int = 1, role: str = "user") -> list[int]:
    return ByteEncoder(VOCABULARY, divisor).encode(Message(role, text)).tolist()


@given(texts, divisors)
def test_ids_are_in_range_and_there_is_always_one(text: str, divisor: int) -> None:
    ids = encoded(text, divisor)
    assert len(ids) == 1 + len(text.encode("utf-8", "surrogatepass")) // (4 * divisor)
    assert all(16 <= i < VOCABULARY for i in ids)


@given(st.text(max_size=200), st.text(max_size=100), st.text(max_size=100), divisors)
def test_a_common_beginning_of_text_is_a_common_beginning_of_ids(
    head: str, a: str, b: str, divisor: int
) -> None:
    common = 1 + len(head.encode("utf-8", "surrogatepass")) // (4 * divisor)
    assert (
        encoded(head + a, divisor)[:common]
        == encoded(head + b, divisor)[:common]
        == encoded(head, divisor)
    )


def test_a_changed_character_changes_the_id_of_its_window_alone() -> None:
    before = "abcd" * 64
    after = before[:100] + "X" + before[101:]
    wide = ByteEncoder(1 << 30)
    a, b = (wide.encode(Message("user", text)) for text in (before, after))
    assert np.flatnonzero(a != b).tolist() == [1 + 100 // 4]


def test_different_windows_seldom_look_alike_even_in_a_small_vocabulary() -> None:
    numbers = "".join(f"{i:08d}" for i in range(4000))
    ids = encoded(numbers, 2)[1:]
    # 4,000 windows over 496 ids: about 8 of each if they are spread evenly.
    assert len(set(ids)) == VOCABULARY - 16
    assert max(np.bincount(ids)) < 30


@given(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(0, 63),
    divisors,
)
def test_equal_blocks_have_equal_ids_and_lengths_are_divided(
    runs: list[tuple[int, int]], cut: int, divisor: int
) -> None:
    count = sum(n for _, n in runs)
    encoder = ByteEncoder(1 << 30, divisor)
    whole = encoder.encode(Message("input", blocks=Blocks("s", 64, tuple(runs), 64 * count)))
    part = encoder.encode(Message("input", blocks=Blocks("s", 64, tuple(runs), 64 * count - cut)))
    assert len(whole) == count * 64 // divisor
    assert part.tolist() == whole[: len(part)].tolist()
    assert abs(len(part) - (64 * count - cut) / divisor) <= 1


def test_blocks_differ_by_id_and_by_scope() -> None:
    encoder = ByteEncoder(1 << 30, 8)

    def ids(scope: str, first: int) -> list[int]:
        return encoder.encode(
            Message("input", blocks=Blocks(scope, 64, ((first, 1),), 64))
        ).tolist()

    assert ids("a", 1) == ids("a", 1)
    assert not set(ids("a", 1)) & set(ids("a", 2))
    assert not set(ids("a", 1)) & set(ids("b", 1))


def test_ids_are_the_same_in_another_process_with_another_hash_seed() -> None:
    program = (
        "from sgl_kvtier.lab.workload.encoder import ByteEncoder\n"
        "from sgl_kvtier.lab.workload.session import Blocks, Message\n"
        "e = ByteEncoder(512, 2)\n"
        "print(e.encode(Message('tool', 'some text ' * 9)).tolist())\n"
        "print(e.encode(Message('input', blocks=Blocks('s', 64, ((3, 2),), 100))).tolist())\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().decode().splitlines()[0] == str(encoded("some text " * 9, 2, "tool"))


@pytest.mark.parametrize(
    ("vocab_size", "divisor", "named"), [(70, 1, "vocab_size = 70"), (512, 0, "divisor = 0")]
)
def test_impossible_settings_are_named(vocab_size: int, divisor: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ByteEncoder(vocab_size, divisor)


def test_outputs_are_scaled_and_bounded() -> None:
    eighth = ByteEncoder(VOCABULARY, 8)
    out = Message("assistant", "x" * 64)
    assert output_tokens(Call(out, output_tokens=100), eighth) == 12
    assert output_tokens(Call(out, output_tokens=100), eighth, most=5) == 5
    assert output_tokens(Call(out, output_tokens=0), eighth) == 1
    assert output_tokens(Call(out), eighth) == 3  # its own length: 64 / 32 and one for the role
    assert output_tokens(Call(), eighth) == 1


@given(
    st.lists(
        st.lists(st.sampled_from(["", "abcd", "abcdefgh", "abcdabcd", "xyz" * 5]), max_size=6),
        min_size=1,
        max_size=6,
    )
)
def test_shown_prompts_are_the_plain_concatenation_and_the_kept_count_is_exact(
    prompts: list[list[str]],
) -> None:
    encoder = ByteEncoder(VOCABULARY)
    pool = {text: Message("user", text) for prompt in prompts for text in prompt}
    tokens = PromptTokens(encoder)
    before: list[int] = []
    for prompt in prompts:
        # Every other message is an equal but new object: sameness must not matter for what comes
        # out.
        messages = [pool[text] if i % 2 else Message("user", text) for i, text in enumerate(prompt)]
        events = tuple(Append(m) for m in messages)
        context = Context(Session("s", "t", (*events, Call())))
        context.next_call()
        kept = tokens.show(context.prompt)
        plain = [i for text in prompt for i in encoded(text)]
        assert tokens.ids.tolist() == plain
        assert kept == next(
            (i for i, (x, y) in enumerate(zip(before, plain, strict=False)) if x != y),
            min(len(before), len(plain)),
        )
        before = plain


def test_a_tokenizer_is_asked_for_by_name_when_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match="pip install tokenizers"):
        TokenizerEncoder(tmp_path)


def word_tokenizer(folder: Path) -> Path:
    vocabulary = {
        "[UNK]": 0,
        **{word: i for i, word in enumerate(["user", "tool", "hello", "world", "[EOS]"], 1)},
    }
    file = folder / "tokenizer.json"
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    file.write_text(
        json.dumps({"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}})
    )
    return file


def test_a_real_tokenizer_encodes_each_message_on_its_own(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    word_tokenizer(tmp_path)
    encoder = TokenizerEncoder(tmp_path)
    assert encoder.encode(Message("user", "hello world")).tolist() == [1, 3, 4]
    assert encoder.encode(Message("tool", "")).tolist() == [2]
    assert encoder.encode(Message("tool", "hello \ud800")).tolist() == [2, 3, 0]
    blocks = encoder.encode(Message("input", blocks=Blocks("s", 64, ((0, 2),), 100)))
    assert len(blocks) == 100
    assert set(blocks.tolist()) <= set(range(6))


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    with pytest.raises(ConfigError, match=r"does not exist: give a tokenizer\.json"):
        TokenizerEncoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        TokenizerEncoder(tmp_path)
