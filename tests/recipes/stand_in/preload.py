"""What every server imports and compiles, for the process that they are forked from."""

import sglang.launch_server
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
import sglang.srt.speculative.eagle_worker_v2  # noqa: F401

from sgl_kvtier.runtime.sglang import page_hash

page_hash.load()
