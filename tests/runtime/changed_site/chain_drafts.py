"""Speculative decoding with real computing on a CPU: chains of drafted tokens (topk 1), verified
greedily. Torch in the place of the kernels that SGLang's workers have for a GPU alone; the workers
themselves, and everything around them, are SGLang's own.

Each function changes one module of SGLang's, or of ours, right after its import.
"""

import copy

import torch


def allow(module):
    """On the CPU platform: drafts, with its own attention."""
    platform = module.CpuPlatform
    platform.supports_speculative_algorithm = lambda self, algorithm: True
    platform.supports_speculative_draft_attention_backend = lambda self, algorithm, name: True
    platform.get_default_speculative_draft_attention_backend = lambda self, algorithm: "kvtier_cpu"
    platform.get_speculative_cache_locs_fn = lambda self: _slots_to_verify


def rows(module):
    """Slots of new tokens into the requests' rows."""

    def assign(requests, table, starts, ends, slots, batch_size):
        used = 0
        for row, start, end in _each(requests, starts, ends):
            table[row, start:end] = slots[used : used + end - start].to(table.dtype)
            used += end - start

    module.assign_req_to_token_pool_func = assign


def pools(module):
    """A chain's accepted tokens lie where they were written: nothing is moved."""
    module.copy_all_layer_kv_cache_func = lambda *args, **named: None


def workers(module):
    """Slots for the drafted tokens, and the last accepted token of each request."""

    def draft_slots(requests, table, lengths, out, topk, steps, **prepared):
        assert not any(value is not None for value in prepared.values()), "only on a GPU"
        out.copy_(_behind(requests, table, lengths, topk * steps))

    def last_accepted(tokens, lengths, out, stride, batch_size):
        places = torch.arange(batch_size) * stride + lengths.long() - 1
        out.copy_(tokens.flatten()[places])

    module.assign_draft_cache_locs_contiguous_func = draft_slots
    module.fill_bonus_tokens_func = last_accepted


def trees(module):
    """A tree that is a chain, and its greedy verification."""
    module.build_tree_kernel_efficient_func = _chain
    module.verify_tree_greedy_func = _accept


def attention(module):
    """The target sees a chain as a chunk behind the sequence, the draft token by token."""
    backend = module.ChunkAttentionBackend
    extend = backend.forward_extend

    def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True):
        if batch.forward_mode.is_target_verify():
            chain, lengths = batch.spec_info.draft_token_num, batch.seq_lens
            batch = copy.copy(batch)
            batch.extend_prefix_lens, batch.seq_lens = lengths, lengths + chain
            batch.extend_seq_lens = torch.full_like(lengths, chain)
        return extend(self, q, k, v, layer, batch, save_kv_cache)

    backend.forward_extend = forward_extend


def draft_attention(module):
    """One backend for each step of the draft."""

    def init_attention_backend(worker):
        runner = worker.draft_runner
        worker.draft_extend_attn_backend = None
        worker.draft_attn_backend = _Steps(runner, worker.speculative_num_steps - 1)
        runner.draft_attn_backend = worker.draft_attn_backend
        worker.tree_mask_mode = module.default_tree_mask_mode()

    module.EagleDraftWorker.init_attention_backend = init_attention_backend


class _Steps:
    """The attention of a draft's steps."""

    needs_cpu_seq_lens = True
    verify_mask = None

    def __init__(self, runner, count):
        from sgl_kvtier.runtime.cpu.attention import ChunkAttentionBackend

        class Step(ChunkAttentionBackend):
            """The tokens drafted before are behind the sequence, and the one at hand."""

            ahead = 0

            def forward_decode(self, q, k, v, layer, batch, save_kv_cache=True):
                batch = copy.copy(batch)
                batch.seq_lens = batch.seq_lens + self.ahead
                return super().forward_decode(q, k, v, layer, batch, save_kv_cache)

        self.attn_backends = [Step(runner) for _ in range(count)]
        for number, step in enumerate(self.attn_backends):
            step.ahead = number + 1

    def init_forward_metadata(self, batch):
        for step in self.attn_backends:
            step.init_forward_metadata(batch)


def _each(*columns):
    return zip(*(column.tolist() for column in columns), strict=True)


def _behind(requests, table, lengths, tokens):
    """The slots of so many tokens behind each sequence."""
    return torch.cat([table[row, n : n + tokens] for row, n in _each(requests, lengths)]).long()


def _slots_to_verify(*, req_pool_indices, req_to_token, start_offset, draft_token_num, **_):
    return _behind(req_pool_indices, req_to_token, start_offset, draft_token_num)


def _chain(
    parents, scores, lengths, mask, positions, index, next_token, next_sibling, topk, steps, tokens, mode
):  # fmt: skip
    places = torch.arange(tokens)
    positions.copy_((lengths.long()[:, None] + places).flatten())
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.copy_(torch.where(places + 1 < tokens, places + 1, -1).expand_as(next_token))
    next_sibling.fill_(-1)


def _accept(*, predicts, accept_index, accept_token_num, candidates, target_predict, **_):
    tokens = candidates.shape[1]
    depth = min(tokens, accept_index.shape[1])
    for request, (drafted, wanted) in enumerate(_each(candidates, target_predict)):
        right = 0
        while right + 1 < depth and drafted[right + 1] == wanted[right]:
            right += 1
        first = request * tokens
        taken = torch.arange(right + 1)
        predicts[first + taken] = torch.tensor(wanted[: right + 1], dtype=predicts.dtype)
        accept_index[request, : right + 1] = (first + taken).to(accept_index.dtype)
        accept_token_num[request] = right
    return predicts, accept_index, accept_token_num
