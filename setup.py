"""What setup.cfg cannot say: the README as a package index shows it, and extension modules, left
out where they cannot be built.

The store's I/O threads are C, and so are the copies of a load onto a card. The deciding half is
Python. In an editable install it stays Python, so that an edit is what runs. A wheel also holds it
compiled by mypyc, from the same source, one and a half to four times as fast. KVTIER_COMPILE=0
leaves that out.
"""

import configparser
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

NATIVE = "sgl_kvtier/store/native"
THREADS = sorted(map(str, Path(NATIVE).glob("*.[ch]")))
TO_CARD = "sgl_kvtier/runtime/cuda/native/pages.c"
SOURCE_ONLY = ("__init__.py", "messages.py", "decision_log.py", "rules.py")
"""Messages stay Python: any executor of plans may make them, and the decision log reads their
annotations. So do rules, since users write subclasses of them.
"""


class Build(build_ext):
    """The I/O threads first, then the deciding half where the package is built apart from its
    source.
    """

    def run(self) -> None:
        super().run()
        beside_source = self.inplace or getattr(self, "editable_mode", False)
        if not beside_source and os.environ.get("KVTIER_COMPILE") != "0":
            compile_policy(Path(self.build_lib))


def compile_policy(target: Path) -> None:
    """Puts the compiled modules beside the sources in a build's folder: all of them or none."""
    try:
        from mypyc.build import mypycify
    except ImportError:
        print("policy/ is not compiled: no mypy here", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as scratch:
        try:
            policy = sorted(
                str(path)
                for path in Path("sgl_kvtier/policy").rglob("*.py")
                if path.name not in SOURCE_ONLY
            )
            modules = mypycify(
                # Rooms that are not compiled may import what a build environment does not have.
                ["--follow-imports=silent", *policy, "sgl_kvtier/types.py"],
                opt_level="2",
                debug_level="0",
                target_dir=f"{scratch}/c",
            )
            for module in modules:
                module.extra_compile_args = [
                    flag for flag in module.extra_compile_args if flag != "-Werror"
                ]
            command = Distribution({"name": "policy", "ext_modules": modules}).get_command_obj(
                "build_ext"
            )
            command.build_lib, command.build_temp = f"{scratch}/lib", f"{scratch}/o"
            command.ensure_finalized()
            command.run()
        except (Exception, SystemExit) as error:
            print(f"policy/ is not compiled: {error!r}", file=sys.stderr)
            return
        shutil.copytree(f"{scratch}/lib", target, dirs_exist_ok=True)


def index_page(readme: str, version: str, url: str) -> str:
    """README.md for the page of a package index, which has none of the files that it links to:
    links lead to the tagged files of the repository at `url` (in GitHub's paths). Without a `url`
    they become their text and the file's name, which the source archive has.
    """

    def elsewhere(link: re.Match[str]) -> str:
        text, target = link.groups()
        if "://" in target or target.startswith("#"):
            return link[0]
        if url:
            return f"[{text}]({url.rstrip('/')}/blob/v{version}/{target})"
        return f"{text} (`{target.partition('#')[0]}`)"

    return re.sub(r"\[([^\]\n]+)\]\(([^)\s]+)\)", elsewhere, readme)


def long_description() -> str:
    """README.md with the links of this release. `url` in setup.cfg is the repository."""
    about = configparser.ConfigParser()
    about.read("setup.cfg", encoding="utf-8")
    source = Path("sgl_kvtier/__init__.py").read_text("utf-8")
    version = re.findall(r'^__version__ = "(.+)"$', source, re.M)[0]
    return index_page(
        Path("README.md").read_text("utf-8"), version, about.get("metadata", "url", fallback="")
    )


setup(
    long_description=long_description(),
    cmdclass={"build_ext": Build},
    ext_modules=[
        Extension(
            "sgl_kvtier.store._native",
            sources=[f"{NATIVE}/module.c"],
            depends=THREADS,
            extra_compile_args=["-O3", "-std=gnu11", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        ),
        Extension(
            "sgl_kvtier.lab.stress.store._native_faults",
            sources=["sgl_kvtier/lab/stress/store/native/faulty.c"],
            depends=THREADS,
            extra_compile_args=["-O3", "-std=gnu11", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        ),
        Extension(
            "sgl_kvtier.remote._native",
            sources=["sgl_kvtier/remote/native/landing.c"],
            depends=[f"{NATIVE}/xxh3.h"],
            extra_compile_args=["-O3", "-std=gnu11", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        ),
        Extension(
            "sgl_kvtier.runtime.cuda._native",
            sources=[TO_CARD],
            extra_compile_args=["-O3", "-std=gnu11"],
            optional=True,
        ),
    ],
)
