"""A stand-in for an NVIDIA GPU: CUDA's runtime and driver over host memory. README.md says what it is.

`environment()` is what a child process needs to run on it.
"""

from stand_in.build import environment, unavailable

__all__ = ["environment", "unavailable"]
