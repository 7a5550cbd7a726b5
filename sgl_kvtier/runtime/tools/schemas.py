"""The schemas of the results of `kvtier doctor`, `explain` and `schema`."""

from sgl_kvtier.console.schema import Schema

DOCTOR = Schema(
    "kvtier.doctor/1",
    "kvtier doctor",
    "whether a server can run on this machine",
    """
findings: list of objects; what was checked
  check, found: string; what was checked, what was found
  state: "ok" or "warn" or "fail"; a server cannot run with fail
  advice: string; what to do; empty where nothing has to be done
seams: list of objects; SGLang symbols that kvtier relies on
  feature, symbol, why: string; feature that needs it, its name, what it is used for
  how: "calls" or "data" or "replaces" or "pages"; what is checked: parameters, attributes, source
  names: list of string; the parameters or attributes that are used
  port: string; part of SGLang that it belongs to
  problem: string; how the installed SGLang differs; empty where it does not
fits: list of objects; with MODEL: one per length of a prompt, estimated for a lone prompt
  tokens: integer; its length
  read_gb_per_s: number; gigabytes per second that the disk reads, measured or given with --read
  compute_s, load_s, both_s: number; seconds to compute it, to load it, from both ends
  saved_fraction: number; share of the better of the two alone that both ends save
  break_even_tokens: integer or null; shortest prompt that the disk loads as fast as it is computed,
      null where the model takes none so long
""",
)

SETTINGS = Schema(
    "kvtier.settings/1",
    "kvtier doctor --settings",
    "the settings of kvtier.json",
    """
settings: list of objects; one per setting
  key, default, allowed, meaning: string; name, default, allowed values, what it does
""",
)

_REASON = """
reason, meaning, helps: string; reason as in /metrics, what it means, what an operator can do about
    it; helps is empty where nothing can or has to be done
"""

EXPLAIN = Schema(
    "kvtier.explain/1",
    "kvtier explain URL",
    "where the prompt tokens of a server came from, and why others were computed",
    """
url: string; address of the server
seconds: number; time that was looked at; since the store was opened without --seconds
server: object; what the server was started with, as far as it says so
  model, hicache_write_policy: string or null; --model-path, --hicache-write-policy
  page_tokens: integer or null; --page-size
  prefetch_threshold_tokens: integer; least tokens for which SGLang asks storage; 256, SGLang's
      default, where the server's settings cannot be read from here
  has_kvtier: boolean; whether it publishes figures of a kvtier store
prompts: object; of requests that ended in this time
  requests: integer; how many ended
  prompt: integer; tokens of their prompts
  device, host, storage: integer; of these, tokens that were found there
  remote: integer; of those from storage, at most so many came from the remote store
  computed: integer; tokens that were computed
  hit_fraction: number or null; device, host and storage of all; null without prompts
restorations: object; what the planner decided and did
  started.<mode>: integer; restore candidates answered, by mode
  ended.<how>: integer; restorations by how they ended
  loaded_tokens.<tier>: integer; tokens of restored prefixes that were loaded
  computed_tokens: integer; tokens of restored prefixes that were computed
  proof: string or null; of restored pages, now: proving, proven, or ended by a difference; null
      where nothing is compared
declined: list of declined; restore candidates that were rejected, the most frequent reason first
unfulfilled: list of unfulfilled; stored tokens that SGLang did not use, the same way
store: object; stores of the first rank of each data-parallel replica, added up
  pages, bytes_on_disk: integer; present values
  capacity_bytes: integer; their present part of store.capacity_bytes
  opened_s: number; seconds since they were opened
  pages_at_opening, pages_before: integer; at most so many pages were there then, and when the time
      looked at began
  pages_read, pages_written, pages_kept: integer; pages read; written; written again and kept
  pages_not_admitted, pages_refused: integer; first offers that store.admission did not let in;
      pages that could not be stored
  pages_evicted, pages_corrupt, reads_failed, reads_late: integer; pages evicted; damaged; that the
      device failed to read; read too late
  bytes_read: integer; payload bytes of pages read
  read_bytes_per_s: number or null; while a read was in flight; null where nothing was read
  break_even_bytes_per_s: number or null; bandwidth from which on loading the first chunk of a
      prompt is faster than computing it, as learned; null until chunks were timed
  bytes_written: integer; with headers and padding
  writes_waiting: integer; prefixes in host memory, now, whose write has not ended
  written_bytes_per_prompt_token, written_bytes_per_day: number or null; bytes_written by prompt
      tokens, and by the time looked at; null without prompts or time
remote: object or null; remote store; null without one
  up: boolean; whether calls go through now
  pages_read, pages_missed, pages_corrupt, reads_failed, reads_late, pages_sent: integer; pages
advice: object; what to do
  cause: string; one of the causes in docs/manual/operate.md
  text: string; a sentence
""",
    {
        "declined": _REASON + "requests: integer; requests with this reason\n",
        "unfulfilled": _REASON + "tokens: integer; tokens with this reason\n",
    },
)

EXPLAIN_PROMPTS = Schema(
    "kvtier.explain.prompts/1",
    "kvtier explain --prompts A B",
    "where two prompts part, and how much of the longer one a cache can still have",
    """
prompts: list of strings; the two files
page_tokens: integer; --page-size
kind: string; what differs, one of the kinds in docs/manual/operate.md
text: string; the same in words
token: integer or null; first token that differs; null without tokens, or where none does
character: integer or null; first character that differs, of the part
part: string or null; part of the prompt that differs: tools, a message, text, or a key of the
    request
message: integer or null; place of the message
excerpts: list of strings; what stands there in each prompt
page: integer or null; page in which they part
hit_tokens: integer or null; tokens of the longer prompt that a cache can have from the other
longer_tokens: integer or null; tokens of the longer prompt
hit_fraction: number or null; hit_tokens of longer_tokens
""",
)

EXPLAIN_LOG = Schema(
    "kvtier.explain.log/1",
    "kvtier explain --prompts LOG",
    "where the prompts of each session part, and what that cost",
    """
log: string; the file
page_tokens: integer; --page-size
pairs: list of objects; each request with the one before it in its session
  session: string or null; name of the session; null where the request has none
  earlier_line, line: integer; lines of the two requests
  kind, text, token, character, part, message, page, excerpts: any; as in kvtier.explain.prompts/1
  hit_tokens: integer or null; tokens of the later prompt that a cache can have from the earlier one
  lost_tokens: integer or null; further tokens, had the later prompt begun with the earlier one
  lost_fraction: number or null; lost_tokens of both
causes: list of objects; what differs, the most frequent first; without extended and equal prompts
  kind, text: string; as in pairs
  pairs: integer; how many
  lost_tokens: integer or null; of these pairs; null without tokens
  lost_fraction: number or null; of the hits that these pairs could have had
summary: string; a sentence
""",
)

EXPLAIN_REQUESTS = Schema(
    "kvtier.explain.requests/1",
    "kvtier explain URL --requests",
    "what is known of each request that waits or runs",
    """
url: string; address of the server
requests: list of objects; one per request, in the order in which they were noted
  rid: string; SGLang's id of the request
  runtime: string; its record in the runtime, in words
  planner: object; what the planner's parts know of it, in words: queue, restoration, lookahead
omitted: integer; requests that are not shown
""",
)

TOP = Schema(
    "kvtier.top/1",
    "kvtier top URL",
    "what a server did, a row per few seconds",
    """
url: string; address of the server
every_s: number; --every
rows: list of objects; one per answer of the server
  at: number; Unix time
  seconds: number; since the answer before; rates are of this time
  running, queued: integer; requests now
  requests_per_s, prompt_tokens_per_s: number; of requests that ended
  device_fraction, host_fraction, storage_fraction, computed_fraction: number or null; where prompt
      tokens came from; null without prompts
  restored: integer; restorations that ended
  read_bytes_per_s, written_bytes_per_s: number; stores of the first rank of each replica
  pages_evicted: integer; the same
  bytes_on_disk: integer; the same, now
""",
)

SCHEMAS = Schema(
    "kvtier.schemas/1",
    "kvtier schema",
    "the schemas there are",
    """
schemas: list of objects; one per kind of result
  name, command, about: string; name and version, command that writes it, what the result is
""",
)
