"""A program: forwards of a lab model whose requests stop computing at a layer, beside whole ones, in
SGLang's own model runner without a server. Prints what differs, as JSON: for each way to cut.

    python tests/lab/layers/one_forward.py MODEL_FOLDER
"""

from __future__ import annotations

import json
import sys
from array import array
from typing import Any

import sglang.benchmark.one_batch as one_batch
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.plugins import load_plugins
from sglang.srt.sampling.sampling_params import SamplingParams

from sgl_kvtier.lab.layers import forward
from sgl_kvtier.lab.layers.restore import Share

PAGE, LENGTHS, OUTPUT = 16, (300, 517, 160), 4
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "kvtier_cpu"),
    *("--sampling-backend", "pytorch", "--disable-cuda-graph", "--disable-overlap-schedule"),
    *("--page-size", str(PAGE), "--max-total-tokens", "4096", "--context-length", "4096"),
    *("--batch-size", str(len(LENGTHS))),
)


class Run:
    """Cuts each request at a part named beforehand. All else of the pool is 0, so what is neither
    computed nor loaded would be noticed.
    """

    def __init__(self, batch: Any, plan: list[int | None], parts: int, pool: Any, kept: Any):
        self.parts, self._plan, self._batch, self._kept = parts, plan, batch, kept
        self._pool, self._loaded = pool, set[int]()
        lengths = zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True)
        self.shares = [Share(int(tokens), int(prefix)) for tokens, prefix in lengths]
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.zero_()

    def at(self, part: int) -> list[int]:
        cuts, start = [], 0
        for number, (share, first) in enumerate(zip(self.shares, self._plan, strict=True)):
            cut = 0 if first is None or part < first else (share.tokens - 1) // PAGE * PAGE
            if cut and number not in self._loaded:
                self._load(number, part, self._batch.out_cache_loc[start : start + cut].long())
            cuts.append(cut)
            start += share.tokens
        return cuts

    def _load(self, number: int, part: int, slots: torch.Tensor) -> None:
        self._loaded.add(number)
        pool = self._pool
        for buffers, kept in zip((pool.k_buffer, pool.v_buffer), self._kept[number], strict=True):
            for layer in range(part, len(buffers)):  # as many parts as layers
                buffers[layer][slots] = kept[layer][: len(slots)]

    def end(self) -> None:
        assert all(first is None or n in self._loaded for n, first in enumerate(self._plan))


class Layers:
    """In the place of what reads pages."""

    plan: list[int | None] | None = None
    kept: Any = None

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def take(self, batch: Any) -> Run | None:
        plan, self.plan = self.plan, None
        if plan is None:
            return None
        return Run(batch, plan, len(self.pool.k_buffer), self.pool, self.kept)


def answers(runner: Any, prompts: list[list[int]]) -> tuple[list[Any], list[torch.Tensor], Any]:
    """Tokens and logits of a prefill of all prompts and of some steps behind it."""
    made = []
    for number, ids in enumerate(prompts):
        sampling = SamplingParams(temperature=0, max_new_tokens=OUTPUT)
        req = Req(str(number), "", array("q", ids), sampling)
        req.full_untruncated_fill_ids, req.logprob_start_len = req.origin_input_ids, -1
        req.extend_end = len(ids)
        made.append(req)
    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    ids, logits, batch = one_batch.extend(made, runner)
    tokens, steps = [ids.tolist()], [logits.clone()]
    for _ in range(OUTPUT - 1):
        ids, logits = one_batch.decode(ids, batch, runner)
        tokens.append(ids.tolist())
        steps.append(logits.clone())
    return tokens, steps, batch


def compare(server_args: Any, port_args: Any, bench_args: Any, gpu_id: int, tp_rank: int) -> None:
    """In the place of SGLang's own benchmark of one batch."""
    del bench_args
    ranks = one_batch.SpawnRanks(
        world_rank=one_batch.spawn_world_rank(server_args, tp_rank=0, pp_rank=0), gpu_id=gpu_id
    )
    one_batch.publish(server_args, role="scheduler", ranks=ranks)
    one_batch._init_process_global_configs()
    bench, _ = one_batch.load_model(server_args, port_args, gpu_id, tp_rank)
    runner = next(one for one in vars(bench).values() if type(one).__name__ == "ModelRunner")
    pool, rows = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
    seed = torch.Generator().manual_seed(3)
    prompts = [torch.randint(4, 500, (n,), generator=seed).tolist() for n in LENGTHS]
    tokens, steps, batch = answers(runner, prompts)
    layers = Layers(pool)
    layers.kept = []
    for req, ids in zip(batch.reqs, prompts, strict=True):
        slots = rows[req.kv.req_pool_idx, : len(ids)].long()
        layers.kept.append(
            [[one[slots].clone() for one in each] for each in (pool.k_buffer, pool.v_buffer)]
        )
    forward.serve(layers)
    top = len(pool.k_buffer) - 1
    plans = [[0] * 3, [top] * 3, [top, None, 0], [None, 1, None], [1, top, 0], [None] * 3]
    found = []
    for plan in plans:
        layers.plan = plan
        again, more, _ = answers(runner, prompts)
        difference = max((a - b).abs().max().item() for a, b in zip(steps, more, strict=True))
        found.append({"plan": plan, "equal": again == tokens, "difference": difference})
    print(json.dumps(found))


if __name__ == "__main__":
    load_plugins()
    one_batch.latency_test = compare
    sys.argv = ["one_batch", "--model-path", sys.argv[1], *FLAGS]
    one_batch.cli_main()
