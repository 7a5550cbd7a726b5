"""How many examples a property test tries: more of them where KVTIER_EXPLORE asks for it
(tests/conftest.py).
"""

from __future__ import annotations

import os


def examples(count: int) -> int:
    return count * max(1, int(os.environ.get("KVTIER_EXPLORE", "1")))
