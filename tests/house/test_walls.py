"""The walls between rooms, and that nothing of a workplace stands in the project."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from sgl_kvtier.runtime.proof import memory
from sgl_kvtier.runtime.records import cost_profile
from sgl_kvtier.runtime.tools.schema_command import schemas

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "room",
    [
        "policy",
        "store",
        "remote",
        "runtime",
        "console",
        "lab",
        "lab/sim",
        "lab/workload",
        "lab/experiment",
        "lab/paced",
    ],
)
def test_every_room_has_a_readme(room):
    readme = ROOT / "sgl_kvtier" / room / "README.md"
    assert readme.is_file()
    inside = [
        p
        for p in (ROOT / "sgl_kvtier" / room).iterdir()
        if p.name not in ("__init__.py", "__pycache__")
    ]
    folders = [f"{p.name}/" for p in inside if p.is_dir()]
    modules = folders + [p.name for p in inside if p.suffix == ".py"]
    text = readme.read_text()
    missing = [name for name in modules if name not in text and f"`{name[:-3]}`" not in text]
    assert missing == []


def test_every_part_of_the_product_but_runtime_has_strict_types():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    strict = {
        name.removesuffix(".*")
        for section in config.sections()
        if section.startswith("mypy-") and config[section].get("warn_return_any")
        for name in section.removeprefix("mypy-").split(",")
    }
    package = ROOT / "sgl_kvtier"
    parts = [p for p in package.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    names = {f"sgl_kvtier.{p.stem}" for p in parts if p.stem not in ("__init__", "runtime", "lab")}
    assert strict == {"sgl_kvtier", *names}


def test_every_extra_that_is_named_is_one_that_can_be_installed():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    named = {
        (path.name, extra)
        for path in (ROOT / "sgl_kvtier").rglob("*.py")
        for extra in re.findall(
            r"(?:(?:sgl-kvtier|the extra )\[|how_to_install\(['\"])(\w+)", path.read_text()
        )
    }
    assert len(named) > 5
    known = config["options.extras_require"]
    assert sorted(one for one in named if one[1] not in known) == []


def test_the_manifest_in_patches_is_the_one_the_package_ships():
    link = ROOT / "patches" / "seams.json"
    assert link.resolve() == ROOT / "sgl_kvtier" / "runtime" / "sglang" / "seams.json"


def test_every_json_result_that_is_written_has_a_schema():
    written = set()
    for source in (ROOT / "sgl_kvtier").rglob("*.py"):
        written |= set(re.findall(r'"(kvtier\.[a-z.-]+/\d+)"', source.read_text()))
    own = {cost_profile.SCHEMA, memory.SCHEMA}
    assert sorted(written - {schema.name for schema in schemas()} - own) == []


# Who touches SGLang's device slots, host tier, tree, requests and steps: their ports, and a list
# of others that may only become shorter.


RUNTIME = Path(__file__).parents[2] / "sgl_kvtier" / "runtime"
INSIDE = ("sglang", "backend", "cpu")
"""The ports; classes that SGLang calls with its host slots; HiCache on a CPU."""
BEHIND_PORTS = {
    # device slots
    "ack_load_queue", "evictable_size", "free_segment", "has_free_load_back_slot", "load_back",
    "start_loading", "token_to_kv_pool_allocator", "_l2_load_transfers",
    # host pages
    "anchor_entry", "build_load_back_spec", "commit_backup", "dec_host_lock_ref", "evict_host",
    "host_hit_length", "host_indices", "host_insert_dropped", "host_pool", "host_value",
    "inc_host_lock_ref", "insert_host", "inserted_host_node", "is_backuped", "last_host_node",
    "mem_pool_host", "write_policy", "write_storage", "_drain_host_frees",
    # tree
    "all_values_flatten", "collect_path_info", "commit_load_back", "evict_device_end",
    "evict_device_next_node", "evict_device_start", "get_hash_values", "get_last_hash_value",
    "match_prefix", "tree_core", "_evict_device_leaf",
    # request
    "beam_group", "full_untruncated_fill_ids", "init_next_round_input", "input_embeds",
    "is_prefill_only", "multimodal_inputs", "origin_input_ids", "output_ids",
    "positional_embed_overrides", "return_hidden_states", "return_logprob", "sampling_params",
    "token_indices_to_pool",
    # step
    "batch_is_full", "chunked_req", "decoding_reqs", "is_mixed_chunk", "last_batch",
    "running_batch", "waiting_queue",
    # ranks
    "pp_group", "tp_group", "tp_world_size", "_all_reduce", "_all_reduce_attn_groups", "_pp_sync",
    # offer
    "ongoing_prefetch", "prefetch_rate_limited", "prefetch_threshold", "_prefetch_kvcache",
}  # fmt: skip
OUTSIDE = {
    "cuda/page_shape.py": 2,
    "proof/pages.py": 1,
    "restore/copy_device.py": 2,
    "scheduler/prefill_adder.py": 2,  # another one
    "scheduler/radix_cache.py": 11,  # a class of SGLang's, extended
}


def touches(source: str) -> list[str]:
    """Names behind ports that a module's code reads, writes or calls."""
    attributes = (
        node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)
    )
    return [name for name in attributes if name in BEHIND_PORTS]


def test_names_behind_ports_are_found_where_code_uses_them() -> None:
    source = 'class A:\n    def f(self):\n        """pool.evict_host"""\n        self.pool.evict_host(1)\n'
    assert touches(source) == ["evict_host"]


def test_what_is_behind_ports_is_touched_by_no_one_new() -> None:
    found = Counter[str]()
    for path in sorted(RUNTIME.rglob("*.py")):
        place = path.relative_to(RUNTIME)
        if place.parts[0] not in INSIDE:
            found[str(place)] += len(touches(path.read_text()))
    assert dict(+found) == OUTSIDE, (
        "use the ports in runtime/sglang for what is new; take off the list what has gone"
    )


# `scripts/house`: what it counts, and that the package has no circle of imports.


SCRIPT = Path(__file__).parents[2] / "scripts" / "house"


def loaded():
    loader = SourceFileLoader("house", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("house", loader))
    loader.exec_module(module)
    return module


def test_a_circle_and_an_upward_arrow_are_noticed():
    house = loaded()
    boxes = {"a": {"b"}, "b": {"a"}, "c": set()}
    assert house.circles_in(boxes) == [["a", "b"]]
    assert house.upward_in({"low": {"high"}, "high": set()}, [["high"], ["low"]]) == ["low -> high"]


def test_no_two_test_files_have_one_name() -> None:
    """The folders of tests are no packages: pytest tells files apart by their names alone."""
    tests = Path(__file__).parents[1]
    names = Counter(
        path.name
        for path in tests.rglob("*.py")
        if path.name not in ("conftest.py", "__init__.py", "sitecustomize.py")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_the_package_has_no_circle_and_no_upward_import() -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
