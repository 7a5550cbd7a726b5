"""The schemas of the results that the laboratory's commands write (`kvtier schema`)."""

from __future__ import annotations

from sgl_kvtier.console.schema import Schema

_PARTS = {
    "percentiles": """
p50, p90, p99: number or null; percentiles over the requests that ended without an error, linear
    between the two nearest values
mean: number or null; arithmetic mean
n: integer; number of values
""",
    "ratio": """
median, p25, p75: number or null; of the ratios a/b of paired measurements. Where 1 lies between p25
    and p75, the difference is within the noise
n: integer; number of pairs
a, b: number or null; means of the two sides over these pairs
""",
    "ratios": """
ttft_ms, tpot_ms, e2e_ms: ratio; ratios of a round's medians; below 1 the first configuration is
    faster
ttft_ms_mean, e2e_ms_mean: ratio; ratios of a round's means
ttft_ms_p90: ratio; ratios of a round's 90th percentiles
ttft_later_ms, ttft_later_ms_mean, ttft_later_ms_p99: ratio; the same of follow-up turns: medians,
    means, 99th percentiles
wall_s: ratio; ratios of the time that a round took
throughput_tokens_per_s: ratio; ratios of output tokens per second; above 1 the first is faster
""",
    "tiers": """
device, host, storage: integer or null; prompt tokens from L1, L2 and L3
total: integer; prompt tokens from all of them
""",
    "bytes": "read, written: number or null; bytes read and written",
    "paced": """
profile: string; name of the profile of an accelerator
source.<what>: string; where the profile's numbers come from
kv_cache_dtype: "bfloat16" or "fp8_e4m3"; type of the KV cache
dilation: number; how many times slower than the accelerator the device runs; all times in the
    result are divided by it
bytes_scale: number; bytes of the model for each byte kept here
disk_gbytes_per_s: list of numbers; gigabytes per second that its disk reads and writes
""",
    "pace": """
steps: integer; forward passes
busy_s: number; seconds in forward passes
overrun: number or null; fraction of the passes' time that this machine was late
overrun_p50, overrun_p99: number or null; the same fraction by pass, percentiles
overrun_by.{prefill,decode}: number or null; the same fraction by kind of pass
valid: boolean or null; false where overrun is above 0.1 or a mismatch was found
scheduler_ms_per_step: number or null; processor time of the scheduler's thread
tick_ms_per_step, tick_ms_p99: number or null; processor time of kvtier before a pass: mean, 99th
    percentile
tick_share: number or null; that time as a fraction of the passes' time without dilation
checking_ms_per_step: number or null; processor time for checking keys and values
load_wait_s: number; seconds that passes waited for pages
checked_tokens: integer; tokens whose keys and values were compared
mismatches: integer; wrong keys and values found
first_mismatches: list of strings; the first of them, in words
""",
    "workload": """
source: string; trace file, or how the sessions were generated
description: string; what is replayed, in words, with the scale-down
sessions, requests: integer; sessions and requests of one round of one configuration
token_divisor: integer; by how much token counts were scaled down
prompt_tokens, output_tokens: integer; tokens of all prompts and of all outputs
context_tokens_of_all_sessions: integer; sum of the sessions' longest contexts, in tokens
longest_request_tokens: integer; longest prompt with its output, in tokens
rows: list of objects; a small table for people; its keys are not part of the schema
""",
    "restorations": """
started, met, declined: number; restorations started, ended where both ends met, candidates rejected
computed_tokens, loaded_tokens: number; tokens of restored prefixes that were computed, and loaded
computed_fraction: number or null; computed tokens over both; null when nothing was restored
jumps, parks: number; loaded pages attached to a request; times a request waited for its load
parked_s, meeting_wait_s, restoring_s: number; seconds of these waits, of waits where both ends
    meet, and of restorations
lost_pages, unused_pages: number; pages not found, and pages loaded in vain
loaded_bytes: number; bytes loaded
planner_failures: number; exceptions in the planner
""",
    "lookahead": """
victims: number or null; pages evicted by kvtier's choice
drift: number or null; pages that the map of tiers had in another place
hints: number or null; hints received
overlap: object or null; turns by whether their transfers were predicted to be hidden (held) or not
    (failed), and by whether that was right; null where nothing was predicted
  held, failed, held_right, held_wrong, failed_right, failed_wrong: number
""",
    "usage": """
processes, threads, open_files: integer; of the server's process tree
rss_bytes: integer; resident memory; pages that processes share count once per process
cpu_s: number; processor time since the start, in seconds
""",
    "round": """
round: integer; number of the round, from 1
complete: boolean; whether all requests were sent; an incomplete round makes no pair for ratios
wall_s: number; time that the round took, in seconds
requests: integer; requests sent
ttft_ms_p50: number or null; median TTFT
cpu: object or null; processor use during the round, in cores
  wall_s: number; seconds that were watched
  own_cores, foreign_cores, stolen_cores: number; cores used by the server, by other processes, by
      other machines
server: usage or null; resources of the server at its end
""",
    "figures": """
ttft_ms: percentiles; time to first token
ttft_later_ms: percentiles; time to first token of follow-up turns
tpot_ms: percentiles; time per output token after the first, of requests with two or more
token_gap_ms: percentiles; time from one output token to the next
e2e_ms: percentiles; time from sending a request to its last token
requests, errors: integer; requests sent, and those that failed
error_messages: list of strings; the first different messages
prompt_tokens, output_tokens: integer or null; tokens of all prompts and outputs
throughput_tokens_per_s: number or null; output tokens per second of wall time
goodput_requests_per_s: number or null; requests per second whose first token came within
    settings.ttft_bound_ms (several loads)
equal_tokens_fraction: number or null; fraction of the answers with the tokens of the same request
    under recompute, or of what computing gives on an emulated H100; null without any to compare
compared_requests: integer; requests of that fraction
cached_tokens: tiers; prompt tokens served from each tier, summed over the requests
cached_tokens_check: object; whether the server's own counts agree
  requests_checked, requests_whose_tiers_do_not_sum: integer; requests
  server_counters: tiers; the server's counters
bytes: bytes; bytes that the storage tier moved; on an emulated H100 those moved here, where the
    modelled machine moves bytes_scale times as many
disk_bytes: bytes; bytes that the server's processes moved to and from disks
pace: pace; only on an emulated H100: how well it kept its pace
restore: restorations or null; growth of the server's counters of restorations (one rank); null
    without any
hit_tokens_at_schedule: tiers; prompt tokens by the tier they lay in when the request was scheduled
hit_tokens_counted_by: "server" or "responses"; source of these counts
moved_bytes.<link>: number or null; bytes prefetched, by link
wasted_bytes: number or null; prefetched bytes that left the device unused
lookahead: lookahead; growth of the server's counters of lookahead
evicted_tokens: number or null; tokens that left the device pool
store_pages_read: number or null; pages read from the kvtier store
bytes_per_token: number or null; bytes of KV cache per token
rounds: list of rounds; the rounds one by one
server_start_s: number or null; seconds until the server answered
failure: string or null; why the configuration was given up; exit status 1
skipped: string or null; why it was not tried: something is not installed here
""",
    "reading": """
t_s: number; seconds since the round began
device, host, storage: number; tokens in the tier
read_bytes, written_bytes: number; bytes that storage moved since the round began
to_device_bytes, to_host_bytes: number; bytes copied between host and device since then
""",
    "sample": """
arm: string; configuration
round: integer; round, from 1
session: string or integer; name or number of the session
turn: integer; turn of the session, from 1
concurrency, rate: number; load of its cell
ttft_ms, tpot_ms, e2e_ms: number or null; time to first token, per output token, to the last token
queue_ms: number or null; time in the scheduler's queue
storage_wait_ms: number or null; time that the request waited for a storage read
prompt_tokens, output_tokens: integer or null; as the server counts them
cached: tiers or null; prompt tokens served from each tier; the others were computed
output_ids: list of integers; output tokens
output_text: string or null; output where the server sends no token ids
equal: boolean or null; output equal to that of recompute, or of computing; null without it
error: string or null; what went wrong
""",
}

_ENDING = """
interrupted: boolean; stopped with Ctrl-C: the figures are of the requests that had ended
notes: list of strings; what a reader has to know to judge the figures
"""

_PACED = """
device.paced: paced; only on an emulated H100 (--device paced:PROFILE), where nothing is computed
"""

_COMPARED = f"""
workload: workload; what was replayed
settings: object; model, page size, pools and the rest, as used
  concurrency: integer or list of integers or null; sessions at a time (closed loop), or null
  rate: number or list of numbers or null; sessions that arrive per second on average (open loop),
      or null; arrivals follow from seed
  route: "generate" or "openai"; SGLang's own route, or /v1/completions
  commands.<name>: list of strings; command line of a configuration's server
  <setting>: any; other settings
rounds: integer; rounds per configuration, and per cell where there are cells
samples: list of samples; every request
{_PACED}{_ENDING}"""

COMPARE = Schema(
    "kvtier.compare/1",
    "kvtier compare",
    "sessions replayed against SGLang with several KV cache configurations, side by side",
    f"""{_COMPARED}
summary: string; the result in one sentence, as on the page
compared_with: string; configuration whose tokens all are compared with
arms.<name>: figures; figures of a configuration over all its rounds
ratios.<a>/<b>: ratios; ratios of two configurations, round by round
harness: object; only with --harness: the other client that the figures are of, beside our own,
    which sent the same load to the same servers before
  name, version: string; the client and its release
  agreement: list of objects; both, a figure of a configuration each
    arm, figure: string; configuration, and name of the figure
    harness, own: number or null; by that client, and by our own
    ratio: number or null; the first over the second
timeline: list of objects; the first complete round of each configuration over time; seconds since
    the round began
  arm: string; configuration
  round: integer; round, from 1
  requests: list of objects; its requests
    session: string or integer; name or number of the session
    turn: integer; turn of the session, from 1
    begin_s: number; when it was sent
    first_s: number or null; when its first token came
    end_s: number; when its last token came
    computing_s: list of lists of numbers; spans [from, to] in which its prompt was computed
    loading_s: list of lists of numbers or null; spans in which its pages were read or copied; null
        where the server does not say
  tiers: list of readings; readings of the server's counters, one a second
""",
    _PARTS,
)

SWEEP = Schema(
    "kvtier.sweep/1",
    "kvtier compare --rate R,R",
    "one comparison for each value of --concurrency or --rate, on the same servers",
    f"""{_COMPARED}
settings.ttft_bound_ms: number; TTFT within which a request counts for goodput
arms.<name>: figures; over all cells: requests, errors, equality, pace, and how the server started
  sustained: list of objects; load that the configuration sustains
    ttft_p95_ms: number; bound of the 95th percentile of the TTFT
    load: number or null; the largest load within it, no request failed there or at a smaller load
cells: list of objects; one for each value, in rising order
  concurrency: integer; sessions at a time
  rate: number; sessions that arrive per second on average
  arms.<name>: figures; figures of a configuration in this cell
  ratios.<a>/<b>: ratios; ratios of two configurations, round by round
""",
    _PARTS,
)

ABLATION = Schema(
    "kvtier.ablation/1",
    "kvtier compare --ablation",
    "what each mechanism is worth: SGLang's best flags, then one mechanism after the other",
    f"""{_COMPARED}
compared_with: string; configuration whose tokens all are compared with
loads: list of objects; one for each value of --concurrency or --rate
  name: string; the load
  concurrency: integer; sessions at a time
  rate: number; sessions that arrive per second on average
  tried: list of objects; SGLang's flags that were tried, a round each
    arguments: list of strings; flags and their values
    ttft_ms: percentiles; time to first token of all turns
    tokens_per_s: number or null; output tokens per second of wall time
    failure: string or null; why it could not be measured
    best: boolean; whether sglang-best has them
  arms.<name>: shown; figures of a configuration
  share.<mechanism>: object; what it takes off the mean time to first token of all turns
    ms: interval; in milliseconds
    share: interval; as a fraction of what all mechanisms take off, where that is above 0
  without.<mechanism>: interval; that mean without it, over kvtier's; all: SGLang's best
  without_e2e.<mechanism>: interval; the same of e2e_ms
""",
    {
        **_PARTS,
        "interval": """
value: number or null; as measured
low, high: number or null; 95 % of the means of rounds drawn again lie between
""",
        "shown": """
ttft_ms, ttft_first_ms, ttft_later_ms: percentiles; time to first token of all turns, of each
    session's first, and of the others
e2e_ms: percentiles; time from sending a request to its last token
gap_ms: percentiles; time from one output token to the next
longest_wait_ms: number or null; longest time to first token
requests, errors: integer; requests sent, and those that failed
equal_tokens_fraction: number or null; fraction of the answers with the right tokens
compared_requests: integer; requests of that fraction
prompt_tokens: integer; tokens of all prompts
computed_fraction: number or null; fraction of them that no cache served
tokens_per_s: number or null; output tokens per second of wall time
ssd_read_gb_per_mtok, ssd_written_gb_per_mtok: number or null; gigabytes read from and written to
    storage per million prompt tokens; with another store than kvtier's SGLang's count of tokens,
    which has as written also those that storage had already
restorations: number or null; restorations started
pace: pace; how well the device kept pace
rounds: list of rounds; the rounds one by one
server_start_s: number or null; seconds until the server answered
failure: string or null; why the configuration was given up
skipped: string or null; why it was not tried
""",
    },
)

_RESTORED = f"""{_PACED}
settings: object; rounds, seeds, server commands
arms.<name>: string; what a configuration is
pace.<name>: pace; only on an emulated H100: its pace up to the first tokens
counters.<model>: object; growth of the server's counters of restorations (docs/manual/restore.md),
    warm-ups included
{_ENDING}"""

_DISTURBED = """
  foreign_cores: number or null; most cores that others used in a trial that counts
  slowness: number or null; what a fixed computation took around it, over the fastest of the run
  repeated: integer; trials made again for either
"""

RESTORE = Schema(
    "kvtier.restore/1",
    "kvtier compare restore",
    "stored prompts restored at many storage bandwidths. Exit status 1: an answer differs from the "
    "computed one, a request failed, or an emulated H100 lost its pace",
    f"""{_RESTORED}
cells: list of objects; one per model, length and bandwidth. Times are medians over rounds, ratios
    are of these medians, above 1 where kvtier is faster
  model: string; name of the model
  length: integer; tokens that can be restored; the prompt is one page longer
  load_over_compute: number; loading time over computing time that the bandwidth was set for
  measured_load_over_compute: number or null; ratio of the measured times
  read_gbps: number; bandwidth of the throttled store, gigabits per second
  ttft_ms.<name>, ttft_ms_low.<name>, ttft_ms_high.<name>: number or null; TTFT of a configuration:
      median, lowest, highest
  first_ttft_ms.<name>: number or null; TTFT right after the bandwidth changed
  rounds.<name>: integer; measured rounds
  speedup_vs_load, speedup_vs_compute: number or null; of kvtier
  speedup_vs_best_single: number or null; of kvtier against the faster of computing and loading
  bound_ms, bound_fraction: number or null; T_opt, and T_opt over kvtier's time
  best_computed_tokens: integer or null; tokens computed in T_opt
  loaded_tokens.<name>: number or null; prompt tokens that came from a tier
  equal_tokens_fraction, equal_logprobs_fraction: number or null; answers equal to computing the
      whole prompt; a failed request is not equal
  logprob_difference: number or null; largest difference
  compared: integer; answers compared
  errors.<name>: integer; requests that failed
{_DISTURBED}
summary: object; all cells together
  cells: integer; number of cells
  worst_speedup_vs_best_single: number or null
  median_bound_fraction, worst_bound_fraction: number or null; of ratios from 1/4 to 4
  errors: integer; requests that failed, those of curves too
  equal_tokens, equal_logprobs: boolean or null; whether all answers are equal
curves: list of objects; one per model and length
  model: string; name of the model
  length: integer; tokens of the prefix
  prefix_bytes: integer; bytes of the prefix
  balanced_gbps: number or null; bandwidth at which loading takes as long as computing
  request_ms: number or null; a request without computing
  resident_ms: number or null; with the prefix in device memory
  errors: integer; requests that failed
  points: list of objects; measured compute curve
    tokens: integer; length of a prompt
    ttft_ms: number; its TTFT
trials: list of objects; every request
  model, arm: string; model, configuration
  kind: string; what the request was for; discarded: disturbed and made again
  length, round: integer; tokens of the prefix, round
  gbps: number; bandwidth of the store
  load_over_compute: number or null; as in cells
  foreign_cores, stolen_cores, slowness: number or null; disturbance
  repeats: integer; times made again
  error: string or null; what went wrong
  sent_s, ttft_s, tpot_s: number or null; clock at sending, time to first token, per output token
  lost_s: number or null; seconds until the first token that an emulated H100 was late
  prompt_tokens: integer or null; tokens of the prompt
  cached: tiers or null; prompt tokens from each tier
  output_ids: list of integers; output tokens
  logprobs: list of any; their log-probs
""",
    _PARTS,
)

BATCHES = Schema(
    "kvtier.restore.batches/1",
    "kvtier compare restore --at-once",
    "stored prompts that arrive together. Exit status as of kvtier.restore/1",
    f"""{_RESTORED}
cells: list of objects; one per size of a batch, load and ratio
  model: string; name of the model
  at_once: integer; prompts that arrive together
  load_over_compute: number; loading over computing of the prefixes
  read_gbps: number; bandwidth that follows, gigabits per second
  lengths: list of integers; tokens of the prompts
  arms.<name>: object; figures of a configuration
    ttft_ms: percentiles; of all requests, each from its own sending
    makespan_s: number or null; first sending to last first token, median over rounds
    prompt_tokens, computed_tokens: number or null; of a batch, mean over rounds
    link_busy_fraction: number or null; bytes read over what the bandwidth allows in the makespans
    compute_busy_fraction: number or null; makespans spent in prefill; null where not recorded
    token_gap_ms.{{p50,p99,max,n}}: number or null; time between two tokens of decoding requests
    equal_tokens_fraction, equal_logprobs_fraction: number or null; answers equal to those of the
        prompt computed alone
    beside_equal_fraction: number or null; decoding requests with the tokens of the first batch
    answers.<answer>: integer; what the planner decided, and how often
    rounds, errors: integer; batches that count, batches that failed
    error_messages: list of strings; why
  ratios.<a>/<b>.<metric>: ratio; ttft_ms_mean and makespan_s of two configurations
{_DISTURBED}
summary: object; all cells together
  cells, errors: integer; number of cells, failed batches
  equal_tokens, equal_logprobs: boolean or null; whether all answers are equal
scales: list of objects; one per length
  model: string; name of the model
  length: integer; tokens of the prefix
  prefix_bytes: integer; bytes of the prefix
  compute_ms: number or null; its TTFT, computed alone
trials: list of objects; every batch
  kind, arm: string; grid, or discarded and made again; configuration
  round, at_once: integer; round, prompts that arrive together
  load_over_compute, gbps: number; as in cells
  makespan_s, computing_s, lost_s: number or null; seconds
  read_bytes: number; bytes read from the store
  answers.<answer>: integer; as in cells
  foreign_cores, slowness: number or null; disturbance
  repeats: integer; times made again
  error: string or null; what went wrong
  requests: list of objects; its requests in the order drawn
    prompt_tokens, cached_tokens: integer or null; tokens of the prompt, and of these from a tier
    ttft_ms: number or null; its TTFT
    equal: boolean or null; whether its answer is equal
""",
    _PARTS,
)

REMOTE = Schema(
    "kvtier.compare.remote/1",
    "kvtier compare remote",
    "sessions that go on at another server, over one Mooncake store at several network speeds",
    f"""{_PACED}
settings: object; model, prompt tokens, turns, rounds, sizes
arms.<name>: string; what a configuration is
scale: list of objects; what derived bandwidths follow from
  length, bytes: integer; tokens of a prompt, bytes of its prefix
  compute_ms: number or null; its TTFT
cells: list of objects; one for each network speed. Figures are of moved turns
  gbps: number; gigabits per second between servers and store, each way; 0: unlimited
  load_over_compute: number or null; ratio that gbps was derived from
  arms.<name>: object; figures of a configuration
    ttft_ms: percentiles; time to first token
    equal_tokens_fraction: number or null; answers of all turns with the tokens of recompute
    compared: integer; answers of that fraction
    prompt_tokens: integer; tokens of the prompts
    cached_tokens: tiers; tokens that were not computed, by tier
    remote_bytes: number; bytes that kvtier read from the store
    lost_fraction: number or null; fraction of the TTFT that an emulated H100 was late, median
    foreign_cores: number or null; cores that others used, median
    errors: integer; requests that failed
    error_messages: list of strings; why
  ratios.<arm>/kvtier-remote: ratio; TTFT over that of kvtier-remote, turn by turn; above 1 kvtier
      is faster
  vs_better: number or null; better median of recompute and hicache-mooncake over kvtier-remote's
summary: object; all cells together
  equal_tokens_fraction: number or null; lowest
  errors: integer; requests that failed
turns: list of objects; every turn
  arm, cell: string; configuration, cell
  round, session, number, server: integer; round, session, turn from 0, server (0 is A)
  moved, counts: boolean; whether another server had the turn before; whether it counts
  gbps: number; network speed
  ttft_ms: number or null; time to first token
  prompt_tokens, cached_tokens: integer or null; tokens of the prompt, and of these not computed
  remote_bytes: number or null; bytes read from the store
  lost_s, foreign_cores: number or null; seconds that an emulated H100 was late; cores that others
      used
  equal: boolean or null; tokens equal to those of recompute
  error: string or null; what went wrong
{_ENDING}""",
    _PARTS,
)

FUZZ = Schema(
    "kvtier.restore-fuzz/1",
    "kvtier bench restore-fuzz",
    "sessions against a server in trouble",
    f"""{_PACED}
workload: workload; what was replayed
settings: object; model, pools, load; chaos is what went wrong and how often
floor: object or null; with --floor: differences between SGLang's own answers with two chunk sizes
  logprob: number; largest difference of a log-prob
  answers, forked: integer; answers, and those with other tokens from some place on
  allowed: number; most that a log-prob may differ by
counts: object; requests by what became of them
  requests, completed, aborted, disconnected: integer; requests sent, and how they ended
  under_a_kill: integer; requests in flight while a server was killed
  restored, restored_from_storage: integer; requests with a prefix from host or storage, from
      storage
  restored_by_mode.<mode>: integer; restored requests by policy.restore
  restorations.<end>: number; restorations by how they ended, from the servers' counters
  ahead.<counter>: number; counters of lookahead
  events.<kind>: integer; what was done to the server
  compared: integer; answers compared
  checked_tokens: integer; tokens whose keys and values an emulated H100 compared in place
  audited_pages.<outcome>: integer; loaded pages that were compared with the store's; with --floor:
      equal, differs, not read, skipped
  hangs, crashes, leaks, scenes, failed: integer; must be 0: requests without an end, exceptions,
      lost memory, faults of scenes, failed requests
  drifts: integer; must be 0: faults of the map of tiers at the end
  mismatches: integer; must be 0: wrong keys and values
  unequal_tokens, unequal_logprobs: integer; must be 0: answers that differ
  error_messages: list of strings; up to 10
  unequal: list of objects; up to 20 answers
    run, prompt, mode: string; run of the clients, digest of the prompt, policy.restore
    number: integer; number of the request in the run
must_be_zero: list of strings; counts that fail the run
findings: list of strings; what the servers' logs and pools showed
scenes: list of objects; with --scene
  scene, amount: string; which, and how much of it
  seconds: number; duration
  requests, given_up, under_a_kill, restored: integer; requests during the scene
  ends.<end>: number; restorations by how they ended
  asked_after, restored_after: integer; requests after the scene, and those restored
  met_after.{{auto,both}}: number; how often both ends of a restoration met, by policy.restore
  usage.{{before,after}}: usage; before the first scene, and after this one
  findings: list of strings; findings of this scene
  store: object or null; kvtier.fsck/1 of the stopped server's store; with its last scene
remote.<counter>: number; with --remote: the servers' counters of the shared store
{_ENDING}""",
    _PARTS,
)

REPLAY = Schema(
    "kvtier.replay/1",
    "kvtier replay",
    "sessions replayed against a running server",
    f"""{_PACED}
workload: workload; what was replayed
settings: object; url, and how it was replayed
figures: figures; as of one configuration of kvtier.compare/1
samples: list of samples; every request
{_ENDING}""",
    _PARTS,
)

MODEL = Schema(
    "kvtier.model/1",
    "kvtier model",
    "the small models that CPU runs use",
    """
models: list of objects; without a name: the models there are
  name, family, heads: string; name, architecture, attention heads/KV heads
  layers, hidden, context: integer; dimensions
  kv_bytes_per_token: integer; bytes of KV cache per token
path: string; with a name: folder that the model was written to
model: object; with a name: its dimensions, seed and number of parameters
""",
)

COPY_TABLE = Schema(
    "kvtier.copy-table/1",
    "kvtier bench copy-table",
    "every way to copy host pages to the device",
    """
settings: object; device, torch, rounds, layers, heads, head_dim
missing: integer; rows not measured before --seconds were over; exit status 1
rows: list of objects; one per way, page and size
  way: string; how pages are copied
  page: integer; tokens of a page
  mib: number; MiB of one load
  gbps: number or null; bandwidth, median
  begin_us: number or null; microseconds until the copy begins, median
  gemm_slower: number or null; fraction by which matrix products in parallel take longer; null on a
      CPU
  small_copy_us: number or null; microseconds of a copy of 4 KiB on another stream in parallel with
      loads; null for ways that do not use the copy engine
  note: string; wrong, or the error; empty where it was measured
  device, torch: string; what the row was measured on
  layers, heads, head_dim: integer; shape of the KV cache
""",
)

TRACE_DESCRIBE = Schema(
    "kvtier.trace.describe/1",
    "kvtier trace describe",
    "the size and reuse of a workload",
    """
source, description: string; trace as named, and what was loaded from where
totals: object; single numbers
  sessions, sub_agents, calls, edits: integer; sub-agents do not count as sessions
  clipped_messages: integer; results that the agent cut before sending
  truncated_sessions: integer; logs that stop before the session's end
  divisor: integer; by how much token counts were scaled down
  page_tokens: integer; page of the infinite cache
  prompt_tokens_total: integer; tokens of all prompts, at that scale
  session_reuse_fraction: number or null; prompt tokens that were in the session's last prompt and
      output
  infinite_cache_fraction: number or null; prompt tokens that any session had before, in whole pages
distributions: list of objects; one per quantity
  quantity, unit: string; name, unit
  min, p10, p50, p90, p99, max, mean: number; statistics
  n: integer; number of values
bad_lines: list of strings; lines that were skipped, as FILE:LINE: reason
left_out.<what>: integer; what the file has and the sessions do not, or what it lacks
sessions_cut, sessions_dropped, calls_cut: integer; left out by --turns and --max-prompt-tokens
""",
)

TRACE_LIST = Schema(
    "kvtier.trace.list/1",
    "kvtier trace list",
    "the traces found, and the generated ones",
    """
traces: list of objects; files found; null where the trace is not a known one
  name, path: string; name, file
  bytes: integer; size of the file
  licence, source, about: string or null; licence, origin, description
presets: list of objects; what generated: can make
  name, source, licence: string; name, origin of the statistics, licence
""",
)

SIM_RUN = Schema(
    "kvtier.sim.run/1",
    "kvtier sim run",
    "policies simulated on a workload, in virtual seconds and bytes of KV cache",
    """
setup: object; what was simulated
  workload, steps: string; description; measured profile of the steps' times, or assumed
  machine, load, policy: object; settings
policies: list of objects; one per policy, in the order given, draw by draw
  policy: string; name
  seed: integer; seed of the draw
  requests: integer; requests served
  ttft_s: percentiles; time to first token
    most: number or null; largest
  finished_s: number; when the last token came
  compute_busy_s: number; seconds in a step
  prompt_tokens: integer; all prompts: the sum of the next three
  computed_tokens, loaded_tokens, resident_tokens: integer; prefilled; loaded into a prefix; found
      on the device
  lost_tokens: integer; of loads that were cancelled, late or found nothing
  hit_tokens.<tier>: integer; tokens by tier when prefixes were looked up; absent means none
  moved_bytes.<link>, wasted_bytes.<link>: number; bytes by link
  moved_up_bytes, wasted_up_bytes: number; storage-host, host-device and storage-device together
  restored: integer; requests whose prefix the planner restored
  retracted: integer; waiting requests that had to give up their pages
  steps, events: integer; engine steps; events of the simulation
draws: list of objects; one per policy over all draws
  policy: string; name
  n: integer; draws
  <figure>: object; a figure of policies, such as ttft_s.mean
    median, least, most: number or null; over the draws
""",
    _PARTS,
)

_AGREEMENT = {
    "agreement": """
predicted: integer; cells with a published number that was not fitted to
median_abs_deviation: number or null; fraction
within_15_percent: number or null; fraction of these cells
"""
}

SIM_PAPER = Schema(
    "kvtier.sim.paper/1",
    "kvtier sim paper",
    "a paper's tables, and what the simulator gives",
    """
paper: "cake" or "cacheflow" or "tierkv"; name of the paper
cells: list of objects; one per number
  table, row, column, unit: string; place in the paper, unit
  published: number or null; printed number; null where only a curve is shown
  ours: number or null; simulated number
  deviation: number or null; fraction
  fitted: boolean; whether parameters were fitted to it
  reading: string; how the paper was read
  spread: list of numbers or null; lowest and highest of single draws; null with one draw
agreement: agreement; all cells
agreement_by_reading.<reading>: agreement; cells of a reading
null_model.<table>: agreement; the same for Eq. 1 on the ratio of two baselines, without a planner:
    recorded, by table, and all
fitted: object; parameters solved from printed numbers
  parameters, numbers: integer; how many
""",
    _AGREEMENT,
)

TORTURE = Schema(
    "kvtier.torture/1",
    "kvtier bench torture",
    "crashes, faults and damage against a page store. Counts are 0 for parts left out with --only",
    """
seed: integer; what made the accidents
must_be_zero: list of strings; counts that fail the run
findings: list of strings; the first of them, in words
wrong_pages, resurrected, undetected: integer; must be 0: pages with other bytes, deleted pages
    returned, damaged pages returned
failed_opens, false_alarms, exceptions: integer; must be 0: opens refused after a crash, sound pages
    not returned, exceptions
over_cap_bytes: integer; must be 0: bytes above the cap and one segment of each owner
canary_touched: integer; must be 0: writes after the deadline
lost_pages: integer; must be 0: synced pages not found after a power loss, stored pages not found in
    a shared folder
stats_raised, followers_stopped: integer; must be 0, of a shared folder: calls of stats that raised,
    processes that saw no change for 10 seconds
kills: integer; processes killed
points.<call>: integer; kills at a system call
deletes: integer; deletes answered before a kill, or in question after a fault
pages_checked: integer; pages read back and compared
recent, recent_found: integer; pages looked for that had to be there, where there is room for all,
    and those found
recovered_share: number or null; their fraction
io_faults, io_calls: integer; failures injected; system calls in the life that was swept
io_faults_by_kind.<kind>: integer; failures injected, by errno, once or from then on; with `sweep`
io_faults_by_engine.<engine>.<call>: integer; the same by the store's I/O threads (`io_uring`,
    `threads`: compiled; `python`) and by the call that failed; with `sweep`
engine.<part>: list of strings; the I/O threads that the stores of a part had
power_loss_states: integer; folders opened as a power loss could have left them
synced, synced_found: integer; pages that had been synced, and those found
synced_recovered_share: number or null; their fraction
corruptions, clean_reads: integer; damaged pages; reads of sound pages
damage_by_kind.<kind>: integer; damaged pages
crowd_pages: integer; pages that many threads read while the store is filled, emptied and closed
stall: object; a device that hangs
  deadline_s, free_after_s: number; deadline of the caller; when it was free, at the latest
  late_pages, in_flight_while_stalled, canary_touched: integer; pages; writes after the deadline
together: object; processes that share one folder
  <count>: integer; how often a trouble was made (kill, stop, suspend, a step of the clock, no
      descriptor, no space, the folder taken away, a log that ends in the middle of a frame), and
      pages, deletes, clears and opens by what became of them
  wrong, resurrected, lost, failed_open, exception, stats_raised, follower_stopped: integer; must be
      0, as above
  over_cap_bytes: integer; must be 0, as above
  seconds: number; duration
  histories: list of lists of strings; what was done to the first faulty pages before
""",
)

BENCH_STORE = Schema(
    "kvtier.bench.store/1",
    "kvtier bench store",
    "the page store against fio and other backends on this disk",
    """
reference: string; what measured the disk: fio, or built-in threads where fio is not installed
fixed.<what>: any; single figures, the unit in the name
cells: list of objects; one per page size and number of I/O threads. A ratio is the median of
    pairs; above 1 the store is faster
  page_bytes, in_flight, pairs: integer; page size, I/O threads, pairs
  read_vs_fio, prefix_vs_fio, write_vs_fio: number or null; against fio: random reads, pages of one
      prefix, writes with a sync
  busy_vs_idle: number or null; random reads beside a busy Python thread, against those without
  verified_vs_not: number or null; with checksums compared, against without
  read_vs_own_threads: number or null; I/O as store.io chooses, against I/O threads
  read_vs_hicache_file, read_vs_hicache_file_warm, write_vs_hicache_file: number or null; against
      SGLang's file backend, without and with its files in the page cache
  read_vs_nixl, prefix_vs_nixl, write_vs_nixl: number or null; against NIXL's POSIX backend
  mb_per_s.<what>: number or null; median, 10^6 bytes per second
  samples_mb_per_s.<what>: list of numbers; every sample
  <ratio>_{pairs,iqr}: list of numbers; all ratios; first and third quartile with 4 pairs or
      more
""",
)
