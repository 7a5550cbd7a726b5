"""Access to the ranks of one tree: which one this process is, and reductions over them.

Reductions are collectives: every rank makes the same ones in the same order. Scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kvtier.runtime.sglang.types import Tree


def count(tree: Tree) -> int:
    """Processes that share this tree's pages: tensor-parallel ranks of all pipeline stages."""
    return int(tree.tp_world_size * tree.pp_size)


def tensor_rank(tree: Tree) -> int:
    """This process's tensor-parallel rank in its stage."""
    return 0 if tree.tp_group is None else torch.distributed.get_rank(group=tree.tp_group)


def stage(tree: Tree) -> int:
    """This process's pipeline stage."""
    return int(tree.pp_rank)


def stages(tree: Tree) -> int:
    """Number of pipeline stages."""
    return int(tree.pp_size)


def is_first(tree: Tree) -> bool:
    """Whether this is the first rank of the first stage."""
    return stage(tree) == 0 and tensor_rank(tree) == 0


def least(tree: Tree, values: Sequence[int]) -> list[int]:
    """Element-wise minimum over the first stage's ranks; later stages get its result."""
    data = torch.tensor(values, dtype=torch.int64)
    tree._all_reduce(data, torch.distributed.ReduceOp.MIN)
    return [int(value) for value in data.tolist()]


def least_of_all(tree: Tree, value: int, *, staged: bool) -> int:
    """The smallest value of all ranks; with `staged`, of all pipeline stages' ranks."""
    data = torch.tensor([value], dtype=torch.int64)
    tree._all_reduce_attn_groups(data, torch.distributed.ReduceOp.MIN)
    if staged:
        torch.distributed.all_reduce(data, torch.distributed.ReduceOp.MIN, group=tree.pp_group)
    return int(data.item())


def pass_down(tree: Tree, values: Sequence[int]) -> list[int]:
    """The first stage's values, on every stage."""
    data = torch.tensor(values, dtype=torch.int64)
    tree._pp_sync(data)
    return [int(value) for value in data.tolist()]
