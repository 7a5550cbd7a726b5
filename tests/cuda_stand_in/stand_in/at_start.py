"""Each Python process on the stand-in runs this at its start (as `sitecustomize`, from the folder
that build.py wrote): once torch is imported, aten's CUDA kernels are replaced.
"""

import importlib.abc
import importlib.util
import os
import sys


class _BehindTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch as the others do, and goes on where its import has ended."""

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        from stand_in import kernels

        kernels.install()


if "CUDA_STAND_IN_HOME" in os.environ:
    sys.meta_path.insert(0, _BehindTorch())
