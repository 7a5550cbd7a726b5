"""Why a prefix that is in storage or host memory was not restored, or not read: for each reason in
/metrics its meaning and the setting or flag that helps. docs/manual/restore.md and operate.md have
the same rows where something helps, and a test compares them.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Reason(NamedTuple):
    """What is said of a reason, in markdown, without full stops."""

    meaning: str
    helps: str
    """What an operator can do; empty where nothing has to be done, or nothing can be."""


DECLINED: Final = {
    "short": Reason(
        "fewer than `policy.min_restore_tokens` tokens to restore",
        "lower `policy.min_restore_tokens`",
    ),
    "input log-probs": Reason(
        "only computing the prompt gives its log-probabilities",
        "`logprob_start_len` = -1 where they are not needed",
    ),
    "hidden states": Reason("only computing the prefix gives them", "omit `return_hidden_states`"),
    "routed experts": Reason(
        "only computing the prefix gives them",
        "omit `return_routed_experts` and `return_indexer_topk`",
    ),
    "input embeddings": Reason("tokens alone do not name its pages", "send text or token ids"),
    "multimodal": Reason("tokens alone do not name its pages", ""),
    "no generation": Reason("it only scores or embeds: SGLang schedules it in another way", ""),
    "beam search": Reason("SGLang schedules it in another way", ""),
    "streaming session": Reason("SGLang schedules it in another way", ""),
    "unaligned": Reason("what is on the device does not end with a whole page", ""),
    "gap": Reason("between the pages in memory and those in storage some are missing", ""),
    "host pages in use": Reason(
        "host memory does not have exactly the pages that the match found", ""
    ),
    "write-back": Reason(
        "SGLang may free the host pages meanwhile", "`--hicache-write-policy write_through`"
    ),
    "window not stored": Reason(
        "the prefix is shorter than the model's window, or storage has no window at its end", ""
    ),
    "window in host memory": Reason(
        "SGLang copies the window at the end of the prefix from host memory", ""
    ),
    "state not stored": Reason(
        "storage was asked for no state of the linear layers at the end of the prefix", ""
    ),
    "state in host memory": Reason(
        "SGLang copies the state at the end of the prefix from host memory", ""
    ),
    "host memory": Reason("it is in host memory, and computing part of it saves no time", ""),
    "loading is faster": Reason(
        "all of it would be loaded, which takes least time or stops no request that generates "
        "tokens: SGLang prefetches it into host memory",
        "",
    ),
    "computing is faster": Reason(
        "its first pages are not stored, and loading the later ones saves no time", ""
    ),
    "not measured yet": Reason(
        "storage or prefill was not measured yet: SGLang's own read measures it", ""
    ),
    "no room": Reason(
        "device memory is short for it and the requests before it, or holds pages that are needed "
        "sooner: SGLang prefetches into host memory until there is room",
        "a larger `--mem-fraction-static`, or a smaller `--max-running-requests`",
    ),
    "again": Reason("it is being restored already", ""),
    "another backend": Reason(
        "kvtier was detached and another storage backend attached",
        "`PUT /hicache/storage-backend` with `kvtier`",
    ),
    "paused": Reason(
        "decode steps were slower while it loaded: restoration pauses for a minute",
        "`policy.restore` = `off` if it goes on",
    ),
    "switched off": Reason(
        "`policy.restore` was set to `off`, or a page differed from its proof",
        "set `policy.restore` again; the log says whether a page differed",
    ),
    "planner failed": Reason("a defect; the log has the error", "please report it"),
}
"""Of `kvtier:restore_declined_total`: restore candidates that were rejected."""

UNFULFILLED: Final = {
    "below_threshold": Reason(
        "storage had fewer tokens of the prompt than SGLang reads at least",
        "lower `prefetch_threshold` in kvtier.json (256 tokens by default)",
    ),
    "deadline": Reason(
        "SGLang's prefetch policy ended the read before it was done",
        "`--hicache-storage-prefetch-policy wait_complete`, or a longer `prefetch_timeout_base`",
    ),
    "host_capacity": Reason(
        "host memory had no room to read into", "a larger `--hicache-ratio` or `--hicache-size`"
    ),
    "device_capacity": Reason(
        "device memory had no room to read into", "a larger `--mem-fraction-static`"
    ),
    "storage_transfer": Reason(
        "pages were lost, damaged or late when they were read",
        "look at `kvtier:pages_corrupt_total`, `reads_failed_total` and `reads_late_total`",
    ),
    "cache_admission_shortfall": Reason(
        "pages that were read left host memory before the request ran",
        "a larger `--hicache-ratio` or `--hicache-size`",
    ),
    "device_covered": Reason("the device had them when they came", ""),
    "device_overlap": Reason("the device's prefix had changed when they came", ""),
    "anchor_lost": Reason("the prefix before them left the device meanwhile", ""),
    "aux_window_trim": Reason("their window pages could not be cut to fit", ""),
    "unservable_prefix": Reason("pages of another kind before them were missing", ""),
    "dropped": Reason("the request was aborted, or given up", ""),
}
"""Of `sglang:storage_prefetch_unfulfilled_tokens_total`: stored tokens that SGLang did not use."""


def said_of(table: dict[str, Reason], reason: str) -> Reason:
    """What the table has of a reason, as plain text; of one that it does not know, as of a class of
    rules of the operator's own, that it is not explained.
    """
    said = table.get(reason, Reason("not explained here", ""))
    return Reason(*(text.replace("`", "") for text in said))
