#!/bin/sh
# Replays agent sessions against a server that is already running, and keeps every request.
#
#   kvtier serve "$(kvtier model lab-mha)" --store /var/tmp/kvtier &      # any SGLang server will do
#   examples/replay_trace.sh http://127.0.0.1:30000 generated:swe-mini
#
# The second argument is a trace file, a trace's short name (`kvtier trace list`) or generated:PRESET.
set -eu

url=${1:-http://127.0.0.1:30000}
trace=${2:-generated:swe-mini}
shift $(($# < 2 ? $# : 2))

# Four sessions at a time, each waiting for its tools as recorded, but never longer than five seconds. For a lab model
# token counts are divided by 4 with the structure kept; a model with a tokenizer of its own gets real lengths.
exec kvtier replay "$url" --trace "$trace" --sessions 8 --turns 20 --concurrency 4 --gap-cap 5 --divisor 4 \
    --log requests.jsonl --json replay.json "$@"
