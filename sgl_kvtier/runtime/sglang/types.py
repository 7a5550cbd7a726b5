"""SGLang's objects as far as the runtime uses them: names and types for the type checker, nothing
at run time.

SGLang's own classes are not imported for it: most are private, and only the scheduler's process has
them. The manifest (`seams.json`) records what their methods are expected to be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Allocator(Protocol):
    """The allocator of device slots, one per token."""

    size: int

    def available_size(self) -> int:
        """Number of free slots."""

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """Slots of whole pages; None when there are too few."""

    def free_segment(self, free_index: torch.Tensor, *, start_pos: int) -> None:
        """Frees slots of whole pages."""


class HostPool(Protocol):
    """The host memory of all KV pools of a model, allocated together."""

    size: int
    anchor_entry: Any
    entries: Sequence[Any]

    def available_size(self) -> int:
        """Number of free slots."""

    def alloc(self, need_size: int, *, reclaim: Callable[[int], int]) -> torch.Tensor | None:
        """Slots of whole pages, after `reclaim` made room; None when there are too few."""

    def free(self, indices: torch.Tensor) -> None:
        """Frees slots."""


class Controller(Protocol):
    """HiCache's controller: copies between device and host, storage operations."""

    device: str
    mem_pool_host: HostPool
    write_policy: str
    storage_backend: Any
    ack_load_queue: Sequence[Any]
    transfer_layer_id_max: int
    write_storage: Callable[..., Any]

    def start_loading(self) -> int:
        """Starts the queued copies; returns the number of their layer counter, or -1."""

    def prefetch_rate_limited(self) -> bool:
        """Whether as many tokens as allowed are being read from storage."""

    def terminate_prefetch(self, operation: Operation) -> Any:
        """Ends a read from storage after the batch that is being read."""


class TreeCore(Protocol):
    """The radix tree itself. Nodes are numbers; unknown ones raise KeyError."""

    commit_backup: Callable[..., Any]
    commit_load_back: Callable[..., Any]
    insert_host: Callable[..., Any]
    is_eagle: bool

    def collect_path_info(self, node_ids: list[int]) -> list[list[Any]]:
        """The nodes from the root to each of these nodes."""

    def get_hash_values(self, node_id: int) -> list[str]:
        """Names of a node's pages."""

    def get_last_hash_value(self, node_id: int) -> str | None:
        """The name of its last page."""

    def is_backuped(self, node_id: int) -> bool:
        """Whether a node has a copy in host memory."""

    def is_root(self, node_id: int) -> bool:
        """Whether a node is a root."""

    def build_load_back_spec(self, node_id: int, req: Any) -> tuple[Any, ...]:
        """Describes the copies that bring a path back to the device."""

    def evict_device_start(self, component: Any, tokens: int) -> None:
        """Starts a walk over leaves that may be evicted from the device."""

    def evict_device_next_node(self, component: Any, tracker: dict[Any, int]) -> Any:
        """Offers the next leaf."""

    def evict_device_end(self, component: Any) -> None:
        """Ends the walk."""

    def all_values_flatten(self) -> torch.Tensor:
        """Device slots of the whole tree."""


class Tree(Protocol):
    """The radix cache: the tree with its pools and its controller."""

    page_size: int
    pp_rank: int
    pp_size: int
    tp_group: Any
    pp_group: Any
    tp_world_size: int
    prefetch_threshold: int
    prefetch_stop_policy: str
    ongoing_prefetch: dict[Any, Any]
    ongoing_backup: Any
    token_to_kv_pool_allocator: Allocator
    req_to_token_pool: Any
    cache_controller: Controller
    tree_core: TreeCore

    def evictable_size(self) -> int:
        """Number of evictable device tokens."""

    def evict_host(self, num_tokens: int) -> int:
        """Evicts from host memory; returns the tokens freed."""

    def inc_host_lock_ref(self, node_id: int) -> Any:
        """Locks the host pages of a path."""

    def dec_host_lock_ref(self, node_id: int, params: Any) -> Any:
        """Unlocks them."""

    def lock(self, node_id: int) -> Any:
        """Locks the device pages of a path."""

    def discard_storage_prefetch_accounting(self, request: Handle) -> None:
        """Removes a request's prefetch from the statistics of unfulfilled ones."""

    def unlock(self, lock: Any) -> None:
        """Unlocks them."""

    def match_prefix(self, params: Any) -> Any:
        """Matches a key against the tree."""

    def load_back(self, node_id: int) -> Any:
        """Queues copies of a path to the device."""

    def has_free_load_back_slot(self) -> bool:
        """Whether copies may be queued."""

    def loading_check(self, finish_count: int | None = None) -> None:
        """Unlocks what the first so many copies to the device have brought; waits for them."""

    def check_hicache_events(self) -> None:
        """Processes transfers that have ended."""

    def _apply_cache_actions(self, actions: Any) -> None: ...

    def _evict_device_leaf(self, node_id: int, tracker: dict[Any, int]) -> Any: ...

    def _all_reduce(self, data: torch.Tensor, tp_reduce_op: Any) -> None: ...

    def _all_reduce_attn_groups(self, data: torch.Tensor, tp_reduce_op: Any) -> None: ...

    def _pp_sync(self, data: torch.Tensor) -> None: ...


class Req(Protocol):
    """A request in the scheduler."""

    rid: str
    cache_request_handle: Any
    origin_input_ids: Sequence[int]
    full_untruncated_fill_ids: Any
    output_ids: Sequence[int]
    prefix_len: int
    host_hit_length: int
    storage_hit_length: int
    storage_hit_start: int | None
    extend_end: int
    last_node: int
    best_match_node: int
    extra_key: str | None
    cache_salt: str | None
    sampling_params: Any
    session: Any
    kv: Any
    finished_reason: Any
    cached_tokens_device: int
    cached_tokens_host: int
    cached_tokens_storage: int
    _cache_breakdown_computed: bool
    retracted_stain: bool
    inflight_middle_chunks: int
    return_logprob: bool
    logprob_start_len: int
    return_hidden_states: bool
    input_embeds: Any
    positional_embed_overrides: Any
    multimodal_inputs: Any
    token_indices_to_pool: Any
    is_prefill_only: bool
    beam_group: Any

    def init_next_round_input(self, tree_cache: Any, cow_mamba: bool | None = None) -> None:
        """Matches its prefix again."""

    def finished(self) -> bool:
        """Whether it has ended."""


class Scheduler(Protocol):
    """SGLang's scheduler, one per process."""

    tree_cache: Any
    waiting_queue: list[Req]
    running_batch: Any
    is_mixed_chunk: bool
    last_batch: Any
    chunked_req: Req | None
    weight_updater: Any
    device: str
    enable_overlap: bool
    forward_stream: Any
    schedule_stream: Any
    _engine_paused: bool

    def _prefetch_kvcache(self, req: Req) -> None: ...

    def is_fully_idle(self) -> bool:
        """Whether nothing runs, waits or moves."""


class Operation(Protocol):
    """A storage query and read for one request's prefix."""

    handle: Any
    hash_value: Sequence[str]
    all_hash_values: Sequence[str] | None
    storage_start: int
    storage_hit_count: int
    completed_tokens: int
    host_indices: torch.Tensor | None

    def is_terminated(self) -> bool:
        """Whether it was terminated."""


class Handle(Protocol):
    """Names a request in the cache."""

    rid: str
