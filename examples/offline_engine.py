"""SGLang's offline engine with the kvtier storage tier: ask twice, drop the caches in between, see
where tokens came from.

    python examples/offline_engine.py [MODEL]

Without MODEL a small random-weight model is written first, so this runs on any machine.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

import sglang

from sgl_kvtier.lab.outside.lab_model import write_model


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    model = sys.argv[1] if len(sys.argv) > 1 else str(write_model("lab-mha"))
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "store": {
                "path": folder,
                "capacity_bytes": "1GiB",
                "min_free_bytes": 0,
                "segment_bytes": "64MiB",
            }
        }
        engine = sglang.Engine(
            model_path=model,
            dtype="float32",
            max_total_tokens=16384,
            context_length=8192,
            enable_hierarchical_cache=True,
            hicache_storage_backend="kvtier",
            hicache_storage_backend_extra_config=json.dumps(config),
            enable_cache_report=True,
            log_level="warning",
        )
        try:
            question = {
                "input_ids": [3 + i % 200 for i in range(4000)],
                "sampling_params": {"max_new_tokens": 4},
            }
            for title in ("first time", "after a flush"):
                answer = engine.generate(**question)
                print(
                    f"{title}: {answer['meta_info'].get('cached_tokens_details') or 'all computed'}"
                )
                time.sleep(2)  # write-back to the store goes on in the background
                engine.flush_cache()
        finally:
            engine.shutdown()


if __name__ == "__main__":
    main()
