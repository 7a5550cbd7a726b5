"""Signatures of keys and values: what follows from tokens alone, and that every wrong byte shows."""

from __future__ import annotations

import pytest
import torch

from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab.paced.copies import Pages
from sgl_kvtier.lab.paced.signatures import Decode, Extend, Signer, answer_of, chain_of

PAGE = 16
SLOTS = 128 * PAGE


def buffers(kind: str) -> dict[str, torch.Tensor]:
    """Three layers of a pool, as each kind of pool has them."""
    shape, dtype = {
        "mha": ((SLOTS, 1, 8), torch.float32),
        "mla": ((SLOTS, 1, 16), torch.float32),
        "fp8": ((SLOTS, 1, 8), torch.uint8),
    }[kind]
    rows = {f"layer {n}, keys": torch.zeros(shape, dtype=dtype) for n in range(3)}
    if kind == "mla":
        return rows
    return rows | {f"layer {n}, values": torch.zeros(shape, dtype=dtype) for n in range(3)}


class Server:
    """A pool, its signer, and requests whose pages lie anywhere in it."""

    def __init__(self, kind: str = "mha") -> None:
        self.buffers = buffers(kind)
        self.pages = Pages(PAGE)
        self.signer = Signer(self.buffers, PAGE, self.pages)

    def prefill(self, tokens: torch.Tensor, slots: torch.Tensor, *cuts: int) -> int:
        """A prompt in chunks that end at `cuts`; its next token."""
        known, at, last = chain_of(tokens), 0, torch.zeros(1)
        for end in (*cuts, tokens.numel()):
            chunk = Extend("r", slots[:at], slots[at:end], tokens[at:end], known)
            last, at = self.signer.extend([chunk]), end
        return int(last)


def prompt(tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(16, 256, (tokens,), generator=torch.Generator().manual_seed(seed))


def places(tokens: int, seed: int = 2) -> torch.Tensor:
    """Slots of so many tokens in pages anywhere."""
    pages = torch.randperm(SLOTS // PAGE, generator=torch.Generator().manual_seed(seed))
    return (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:tokens]


@pytest.mark.parametrize("kind", ["mha", "mla", "fp8"])
def test_the_next_token_depends_neither_on_chunks_nor_on_where_pages_lie(kind):
    tokens, server = prompt(500), Server(kind)
    whole = server.prefill(tokens, places(500))
    assert Server(kind).prefill(tokens, places(500, seed=9), 16, 160, 490) == whole
    assert server.signer.mismatches == []


@pytest.mark.parametrize("kind", ["mha", "mla", "fp8"])
def test_a_right_answer_is_known_without_a_server(kind):
    tokens, slots, server = prompt(200), places(204), Server(kind)
    answer = [server.prefill(tokens, slots[:200], 64)]
    for place in range(200, 204):
        one = Decode("r", slots, place, chain_of(tokens))
        own = slots[place : place + 1]
        answer.append(int(server.signer.decode([one], torch.tensor(answer[-1:]), own)))
    assert answer_of(tokens.numpy(), 5) == tuple(answer)


def test_another_order_of_the_same_tokens_is_another_answer():
    tokens = prompt(300)
    turned = tokens.clone()
    turned[[10, 11]] = turned[[11, 10]]
    assert tokens[10] != tokens[11]
    assert chain_of(tokens)[-1] != chain_of(turned)[-1]


@pytest.mark.parametrize("kind", ["mha", "mla", "fp8"])
def test_one_changed_bit_in_any_byte_of_any_buffer_is_found_and_changes_what_follows(kind):
    tokens, slots = prompt(320), places(320)
    server = Server(kind)
    right = server.prefill(tokens, slots, 256)
    last = Extend("r", slots[:256], slots[256:], tokens[256:], chain_of(tokens))
    chain = server.buffers["layer 0, keys"][slots[300]].clone()
    for name, rows in server.buffers.items():
        flat = rows.view(SLOTS, -1).view(torch.uint8)
        for byte in range(flat.shape[1]):
            flat[slots[77], byte] ^= 1
            server.signer.extend([last])
            (found,) = server.signer.mismatches
            assert (found.first, found.tokens, found.buffers) == (77, 1, (name,))
            assert not torch.equal(server.buffers["layer 0, keys"][slots[300]], chain)
            server.signer.mismatches.clear()
            flat[slots[77], byte] ^= 1
    assert int(server.signer.extend([last])) == right


def test_a_page_of_another_prompt_is_found_with_all_its_tokens():
    tokens, slots, server = prompt(320), places(640), Server()
    server.prefill(tokens, slots[:320], 256)
    server.prefill(prompt(320, seed=8), slots[320:], 256)
    mixed = torch.cat(
        [slots[: 4 * PAGE], slots[320 + 4 * PAGE : 320 + 5 * PAGE], slots[5 * PAGE : 256]]
    )
    server.signer.extend([Extend("r", mixed, slots[256:320], tokens[256:], chain_of(tokens))])
    (found,) = server.signer.mismatches
    assert (found.first, found.tokens) == (4 * PAGE, PAGE)
    assert found.page == int(slots[320 + 4 * PAGE]) // PAGE


def test_a_page_at_another_position_is_found():
    tokens = torch.full((320,), 65)
    slots, server = places(320), Server()
    server.prefill(tokens, slots, 256)
    turned = slots.clone()
    turned[:PAGE], turned[PAGE : 2 * PAGE] = slots[PAGE : 2 * PAGE], slots[:PAGE]
    server.signer.extend([Extend("r", turned[:256], slots[256:], tokens[256:], chain_of(tokens))])
    assert server.signer.mismatches[0].tokens == 2 * PAGE


def test_a_prefix_that_is_not_made_of_pages_is_checked_as_well():
    tokens, server = prompt(100), Server()
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3))[:100]
    server.prefill(tokens, slots, 50)
    assert server.signer.mismatches == []
    server.buffers["layer 1, values"].view(SLOTS, -1)[slots[20]] += 1.0
    server.signer.extend([Extend("r", slots[:50], slots[50:], tokens[50:], chain_of(tokens))])
    assert server.signer.mismatches[0].first == 20


def test_a_decode_step_finds_a_wrong_page_in_its_sample_and_answers_otherwise():
    tokens, slots, server = prompt(320), places(400), Server()
    first = server.prefill(tokens, slots[:320])
    one = Decode("r", slots, 320, chain_of(tokens))
    right = server.signer.decode([one], torch.tensor([first]), slots[320:321])
    server.buffers["layer 2, keys"][slots[:320]] += 1.0
    wrong = server.signer.decode([one], torch.tensor([first]), slots[320:321])
    assert server.signer.mismatches[0].rid == "r"
    assert int(right) != int(wrong)


def test_in_a_batch_the_request_with_the_wrong_page_is_named():
    server, slots = Server(), places(640)
    first, second = prompt(300), prompt(300, seed=8)
    server.prefill(first, slots[:300])
    server.prefill(second, slots[320:620])
    server.buffers["layer 0, values"][slots[320:620]] += 1.0
    batch = [
        Decode("first", slots[:320], 300, chain_of(first)),
        Decode("second", slots[320:], 300, chain_of(second)),
    ]
    server.signer.decode(batch, torch.tensor([65, 65]), slots[[300, 620]])
    assert [one.rid for one in server.signer.mismatches] == ["second"]


def test_a_mismatch_says_request_position_page_and_tier():
    tokens, slots, server = prompt(320), places(320), Server()
    server.prefill(tokens, slots, 256)
    page = slots[5 * PAGE : 6 * PAGE]
    server.pages.allocated(torch.arange(PAGE))
    server.pages.loaded(torch.arange(PAGE), page)
    server.buffers["layer 2, values"][page[3]] += 1.0
    server.signer.extend([Extend("r", slots[:256], slots[256:], tokens[256:], chain_of(tokens))])
    said = str(server.signer.mismatches[0])
    assert "1 of 256 tokens checked of request r" in said
    assert f"position {5 * PAGE + 3}" in said
    assert f"page {int(page[0]) // PAGE}" in said
    assert "came from storage" in said
    assert "layer 2, values" in said


def test_rows_that_are_not_whole_words_are_refused():
    with pytest.raises(BenchError, match="multiple of 8"):
        Signer({"layer 0": torch.zeros((SLOTS, 1, 3))}, PAGE, Pages(PAGE))
