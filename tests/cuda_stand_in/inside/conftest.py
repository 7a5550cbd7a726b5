"""Tests of this folder run in a process on the stand-in: test_on_the_stand_in.py starts it."""

from __future__ import annotations

import os

from host_pools import host_pools_end

__all__ = ["host_pools_end"]
collect_ignore_glob = [] if "CUDA_STAND_IN_HOME" in os.environ else ["test_*.py"]
