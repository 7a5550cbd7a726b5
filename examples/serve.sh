#!/usr/bin/env bash
# An SGLang server with the kvtier storage tier, in SGLang's own words. `kvtier serve MODEL --store FOLDER --print` shows the
# command with all of our recommended flags for this machine.
#   examples/serve.sh MODEL [kvtier.json [more SGLang options]]
set -euo pipefail
model=${1:?usage: examples/serve.sh MODEL [kvtier.json [more SGLang options]]}
config=${2:-$(dirname "$0")/kvtier.json}
shift $(( $# > 1 ? 2 : 1 ))
exec python -m sglang.launch_server \
  --model-path "$model" \
  --page-size 64 \
  --enable-hierarchical-cache \
  --hicache-ratio 2 \
  --hicache-storage-backend kvtier \
  --hicache-storage-backend-extra-config "@$config" \
  --hicache-storage-prefetch-policy timeout \
  --enable-cache-report \
  --enable-metrics \
  "$@"
