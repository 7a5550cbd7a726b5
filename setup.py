"""The one thing setup.cfg cannot say: an extension module that is left out where there is no C compiler."""

from setuptools import Extension, setup

NATIVE = "sgl_kvtier/store/native"

setup(
    ext_modules=[
        Extension(
            "sgl_kvtier.store._native",
            sources=[f"{NATIVE}/lanes.c"],
            depends=[f"{NATIVE}/{name}.h" for name in ("find", "pool", "rings", "runs", "uring", "xxh3")],
            extra_compile_args=["-O3", "-std=gnu11", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
