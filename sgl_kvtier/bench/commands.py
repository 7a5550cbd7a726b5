"""The bench's commands for the `kvtier` command line: each name has `add_arguments(parser)` and `run(args)`."""

from sgl_kvtier.bench import compare_command as compare
from sgl_kvtier.bench import lookahead_command as lookahead
from sgl_kvtier.bench import model_command as model
from sgl_kvtier.bench import replay_command as replay
from sgl_kvtier.bench import restore_command as restore
from sgl_kvtier.bench import serve_command as serve

__all__ = ["compare", "lookahead", "model", "replay", "restore", "serve"]
