"""The page size of a server on a GPU whose command line names none, and the host pool of the
recommended flags, resolved as a launch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from command_lines import KVTIER, launching, mla_model
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import override_platform

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.launch import serve_flags, tier_flags
from sgl_kvtier.runtime.scheduler.setup import own_way

ON_GPU = ("--device", "cuda", "--chunked-prefill-size", "4096", "--attention-backend", "triton")
PLAIN_MODEL = SimpleNamespace(
    disable_radix_cache=False, is_hybrid_swa=False, is_hybrid_ssm=False, is_dsa=False
)
DYNAMIC = (
    "--enable-hierarchical-cache", "--hicache-storage-backend", "dynamic",
    "--hicache-storage-backend-extra-config",
    '{"store": {"path": "unused"}, "backend_name": "kvtier", "class_name": "KVTierStorage",'
    ' "module_path": "sgl_kvtier.runtime.backend.storage"}',
)  # fmt: skip


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """From flags to resolved arguments on a machine with an NVIDIA GPU, as far as resolution asks:
    no platform of ours is active and SGLang's facts are those of an H100.
    """
    cpu = type(current_platform)
    monkeypatch.setattr(cpu, "apply_server_args_defaults", lambda self, args: None)
    monkeypatch.setattr(cpu, "is_out_of_tree", lambda self: False)
    monkeypatch.setattr(cpu, "supports_speculative_algorithm", lambda self, algorithm: True)
    monkeypatch.setattr(
        cpu, "supports_speculative_draft_attention_backend", lambda self, algorithm, backend: True
    )
    with (
        override_platform(is_cuda=True, is_sm90=True, device_sm=90, device_capability=(9, 0)),
        launching() as launched,
    ):
        yield launched


def test_without_a_page_size_storage_has_pages_of_64_tokens_and_restoring_follows(launch):
    args = launch(*KVTIER, *ON_GPU)
    assert args.page_size == 64
    assert own_way(args, PLAIN_MODEL, PolicyConfig(restore="both")) is None


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        pytest.param([*DYNAMIC, *ON_GPU], 64, id="the dynamic form"),
        *((([*KVTIER, *ON_GPU, "--page-size", str(size)]), size) for size in (1, 16, 128)),
        pytest.param(ON_GPU, 1, id="no cache"),
        pytest.param(["--enable-hierarchical-cache", *ON_GPU], 1, id="no storage"),
        pytest.param(
            ["--enable-hierarchical-cache", "--hicache-storage-backend", "file", *ON_GPU], 1, id="another storage"
        ),
        pytest.param(
            [*KVTIER, "--device", "cpu", "--attention-backend", "torch_native"], 1, id="a CPU by SGLang's own engine"
        ),
        pytest.param([*KVTIER, *ON_GPU, "--chunked-prefill-size", "1000"], 1, id="chunks of other sizes"),
        pytest.param([*KVTIER, *ON_GPU, "--disaggregation-mode", "prefill"], 1, id="prefill apart"),
        pytest.param([*KVTIER, *ON_GPU, "--model-path", "MLA", "--speculative-algorithm", "EAGLE"], 1, id="drafts"),
    ],
)  # fmt: skip
def test_pages_of_64_tokens_are_chosen_where_none_was_and_none_could_be_refused(
    launch, flags, size, tmp_path
):
    named = [flag if flag != "MLA" else mla_model(tmp_path / "mla") for flag in flags]
    assert launch(*named).page_size == size


def test_states_of_linear_layers_keep_pages_of_one_token(launch):
    from sgl_kvtier.runtime.settings import wants_larger_pages

    args = launch(*KVTIER, *ON_GPU)
    shown = {
        name: getattr(args, name)
        for name in (
            "device", "enable_hierarchical_cache", "hicache_storage_backend",
            "speculative_algorithm", "disaggregation_mode", "chunked_prefill_size",
        )
    }  # fmt: skip
    assert wants_larger_pages(SimpleNamespace(**shown, uses_mamba_radix_cache=False))
    assert not wants_larger_pages(SimpleNamespace(**shown, uses_mamba_radix_cache=True))


def test_one_token_pages_asked_for_are_refused_with_the_flag_that_mends_it(launch):
    args = launch(*KVTIER, *ON_GPU, "--page-size", "1")
    line = str(own_way(args, PLAIN_MODEL, PolicyConfig(restore="both")))
    assert "pages of one token" in line and "--page-size 64" in line


@pytest.mark.parametrize(("device", "size"), [("cuda", "64"), ("cpu", "16")])
def test_the_recommended_flags_name_a_page_size(device, size):
    flags = serve_flags("model", device, "@kvtier.json")
    assert flags[flags.index("--page-size") + 1] == size


def test_the_recommended_flags_let_sglang_fit_the_host_pool_to_memory(launch):
    args = launch(*tier_flags('{"store": {"path": "unused"}}'), *ON_GPU)
    assert args.hicache_host_memory_fraction is not None
    assert args.hicache_ratio == 2
