#!/usr/bin/env bash
# An SGLang server on a GPU with the kvtier storage tier, in SGLang's own words: the flags of `kvtier serve MODEL --config FILE
# --device cuda --print`. SGLang chooses the attention backend by the model and the GPU.
#   examples/serve.sh MODEL [kvtier.json [more SGLang options]]
set -euo pipefail
model=${1:?usage: examples/serve.sh MODEL [kvtier.json [more SGLang options]]}
config=${2:-$(dirname "$0")/kvtier.json}
shift $(( $# > 1 ? 2 : 1 ))
exec python -m sglang.launch_server \
  --model-path "$model" \
  --page-size 64 \
  --enable-mixed-chunk \
  --enable-hierarchical-cache \
  --hicache-storage-backend kvtier \
  --hicache-storage-backend-extra-config "@$config" \
  --enable-metrics \
  --enable-cache-report \
  "$@"
