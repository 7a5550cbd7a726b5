"""Decides whether a server can restore, and constructs the parts when SGLang builds its cache."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sgl_kvtier.config import KVTierConfig, PolicyConfig
from sgl_kvtier.policy import shape as shapes
from sgl_kvtier.policy.decision_log import Header
from sgl_kvtier.policy.planner import Planner, make_planner
from sgl_kvtier.policy.shape import EngineShape
from sgl_kvtier.runtime import settings
from sgl_kvtier.runtime.ahead.engine import LookaheadEngine
from sgl_kvtier.runtime.cpu.platform import works_at_once
from sgl_kvtier.runtime.proof import attach, memory
from sgl_kvtier.runtime.proof.decoding import DecodeGuard
from sgl_kvtier.runtime.proof.pages import PageCheck, SecondLook, checks_of
from sgl_kvtier.runtime.proof.record import Difference, Proof, State
from sgl_kvtier.runtime.ranks.agreement import Agreement
from sgl_kvtier.runtime.ranks.stage_reports import StageReports
from sgl_kvtier.runtime.records import cost_profile
from sgl_kvtier.runtime.records.cost_profile import Learning, Profile, ProfileKeeper
from sgl_kvtier.runtime.records.decision_file import DecisionFile, Recorded
from sgl_kvtier.runtime.restore import copy_device
from sgl_kvtier.runtime.restore.engine import RestoreEngine
from sgl_kvtier.runtime.restore.kept_pages import KeptPages
from sgl_kvtier.runtime.restore.page_mover import PageMover
from sgl_kvtier.runtime.scheduler.parts import Parts
from sgl_kvtier.runtime.scheduler.refusals import (
    STAGES,
    UNEVEN,
    UNREADABLE,
    WRITE_BACK,
    anchors_of,
    lacking,
    looks_ahead_by_default,
    not_mixed,
    unproven,
    unsupported,
)
from sgl_kvtier.runtime.settings import looks_ahead
from sgl_kvtier.runtime.sglang import features, slot_pools, states, tree_ranks
from sgl_kvtier.runtime.sglang.attached import backend_of
from sgl_kvtier.runtime.sglang.types import Tree
from sgl_kvtier.runtime.step.context import StepContext

logger = logging.getLogger(__name__)


def wanted(args: Any) -> KVTierConfig | None:
    """The settings, by resolved arguments, of a server that is to restore or look ahead; else
    None.
    """
    if not settings.uses_backend(args):
        return None
    config = settings.of_server(args)
    return config if config.policy.restore != "off" or looks_ahead(config.policy) else None


def own_way(args: Any, ctx: Any, policy: PolicyConfig) -> str | None:
    """The log line of a server that cannot restore or look ahead as its settings ask, or None."""
    line = features.line("restore")
    kind = anchors_of(ctx)
    if line is None and kind is not None:
        line = features.line(kind)
    if line is not None:
        return f"kvtier: {line}"
    reason = unsupported(args, ctx) or nothing_to_do(args, policy)
    return None if reason is None else _told(policy, reason)


def lacks(tree: Tree, server_args: Any) -> str | None:
    """The same, judged by the pools that were built for the model."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    reason = lacking(tree) or copy_device.lacking(tree.cache_controller)
    return (
        None
        if reason is None
        else _told(settings.of_server(resolving_view(server_args)).policy, reason)
    )


def not_followed(args: Any, policy: PolicyConfig) -> list[str]:
    """A log line for each setting that this server cannot follow and leaves to SGLang."""
    followed, lines = in_force(args, policy), []
    if looks_ahead(policy) and not looks_ahead(followed):
        lines.append(f"kvtier: {STAGES}. Prefetching and eviction are SGLang's own")
    elif _may_look_ahead(args, policy) and features.moved("lookahead"):
        lines.append(f"kvtier: {features.line('lookahead')}")
    if policy.restore != followed.restore:
        lines.append(f"kvtier: prefixes are restored SGLang's own way: {unproven(args, policy)}")
    return lines


def _told(policy: PolicyConfig, reason: str) -> str:
    asked = ["prefixes are restored"] * (policy.restore != "off") + [
        "pages are prefetched and evicted"
    ] * looks_ahead(policy)
    return f"kvtier: {' and '.join(asked)} SGLang's own way: {reason}"


def nothing_to_do(args: Any, policy: PolicyConfig) -> str | None:
    """Why this server neither restores nor looks ahead although it could, or None."""
    followed = in_force(args, policy)
    if looks_ahead(followed):
        return None
    reason = unproven(args, followed)
    if looks_ahead(policy) and (reason is not None or followed.restore == "off"):
        return str(STAGES) if reason is None else f"{reason}; {STAGES}"
    return reason


def in_force(args: Any, policy: PolicyConfig) -> PolicyConfig:
    """The settings that this server can follow. Prefetch and eviction are no longer auto."""
    ahead = _may_look_ahead(args, policy) and not features.moved("lookahead")
    if policy.prefetch == "auto":
        policy = replace(policy, prefetch="on" if ahead else "off")
    if policy.eviction == "auto":
        policy = replace(policy, eviction="next-use" if ahead else "lru")
    if looks_ahead(policy) and args.pp_size > 1:
        policy = replace(policy, prefetch="off", eviction="lru")
    if looks_ahead(policy) and unproven(args, policy) is not None:
        policy = replace(policy, restore="off")
    return policy


def _may_look_ahead(args: Any, policy: PolicyConfig) -> bool:
    """Whether auto means looking ahead on this server's device and with its settings."""
    left = "auto" in (policy.prefetch, policy.eviction)
    return left and policy.restore != "off" and looks_ahead_by_default(args)


def build(tree: Tree, server_args: Any) -> Parts | str:
    """Constructs the parts for a tree whose host pools and storage backend exist. If no copy can be
    checked on this device, restoration and lookahead stay off, and the log line that says so is
    returned. Raises SeamError, and ConfigError when the decision log cannot be written, or pages
    cannot be audited or restored by layers.
    """
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.runtime_context import get_parallel

    args = resolving_view(server_args)
    config = settings.of_server(args)
    policy = in_force(args, config.policy)
    if looks_ahead(policy):
        features.require("lookahead")
    controller = tree.cache_controller
    first = tree_ranks.is_first(tree)
    reports = StageReports(tree) if tree_ranks.stages(tree) > 1 else None
    agreement = Agreement(tree, tree_ranks.count(tree), first, reports)
    context = StepContext(tree, agreement.alone)
    context.agreed_page_bytes = int(agreement.first_says([context.page_bytes])[0])
    at_once = works_at_once(controller.device)
    apart = not_mixed(args, context.anchors is not None)
    if config.lab.layer_parts and args.enable_mixed_chunk:
        apart = "lab.layer_parts"
    shape = EngineShape(
        page_tokens=context.page,
        page_bytes=context.agreed_page_bytes,
        chunk_tokens=args.chunked_prefill_size,
        layers=controller.transfer_layer_id_max,
        staged=True,
        whole_load_pages=1
        if at_once
        else max(1, shapes.WHOLE_LOAD_BYTES // context.agreed_page_bytes),
        accelerator=not at_once,
    )
    same = agreement.same(context.host.tokens)
    unlike = looks_ahead(policy) and not same
    if unlike:
        policy = replace(policy, prefetch="off", eviction="lru")
    chosen = copy_device.chosen_for(controller, policy)
    unreadable = None if at_once else unreadable_at_start(chosen.unreadable, agreement)
    if unreadable is not None:
        agreement.close()
        return _told(config.policy, unreadable)
    proof = memory.begin(
        controller, copy_device.way_of(chosen.copies), _path(controller, memory.NAME), agreement,
        policy, args, writes=first,
    )  # fmt: skip
    if not at_once:
        refute_at_start(proof, chosen.wrong, agreement)
    if proof.state is State.REFUTED:
        policy = replace(policy, restore="off", prefetch="off", eviction="lru")
    replica = get_parallel().dp_rank or 0
    path = _path(controller, cost_profile.NAME)
    here = conditions(args, config, shape)
    if args.enable_mixed_chunk and apart is None:
        here["mixed"] = True  # decoding's time is in that of chunks
    known = cost_profile.fitting(cost_profile.read(path), here) if path is not None else None
    # Ranks that plan with different costs would diverge: all start with the first rank's.
    profile = cost_profile.taken(agreement.first_says(cost_profile.as_numbers(known)))
    planner = make_planner(policy, shape, profile)
    log = _decision_file(policy, shape, profile, replica) if first and policy.decision_log else None
    asked = planner if log is None else Recorded(planner, log.write)
    keeper = ProfileKeeper(path) if first and path is not None and not replica else None
    learning = Learning(
        asked, planner.profile, keeper, known or Profile(here, {}, {}, 0, {}), shape
    )
    look = partial(_look_ahead, planner, policy, agreement.alone) if looks_ahead(policy) else None
    checks = _checks(tree, proof, policy) if policy.restore != "off" else None
    parts = Parts(
        context,
        PageMover(chosen.copies, tree.page_size, None if checks is None else checks[0]),
        learning,
        agreement,
        policy,
        chunk_tokens=args.chunked_prefill_size,
        log=log,
        look_ahead=look,
    )
    parts.planned = planner.known
    if apart is not None:
        parts.keeps_chunks_apart = True
        logger.warning(
            "kvtier: chunks are not mixed with decoding, for nobody has run --enable-mixed-chunk "
            "with restored prefixes and %s",
            apart,
        )
    parts.notes.is_unproven = policy.restore == "off" and policy.proof != "off" and not at_once
    parts.engine.proof = proof
    if checks is not None:
        parts.engine.second_look = checks[1]
    # Ranks with unequal host pools would keep different pages and acknowledge different backups.
    if context.host.write_through and same:
        parts.engine.kept = KeptPages(context.host, context.page)
    # Pipeline stages would not compute the page in the same step.
    if reports is None and policy.restore != "off":
        _watch(parts.engine, controller, policy, at_once)
    if config.lab.audit:
        audit = settings.of_lab("audit", "lab.audit")
        parts.engine.audit = audit.Audit(controller, context.page, parts.engine.counters)
        logger.warning(
            "kvtier: restored pages are read back and compared (lab.audit); this is slow"
        )
    if config.lab.layer_parts:
        by_layers = settings.of_lab("layers.restore", "lab.layer_parts")
        parts.engine.layers = by_layers.Layers(
            context, server_args, config.lab.layer_parts, parts.engine.counters
        )
    if slot_pools.has_states(controller):
        line = features.line("checkpoints") or states.kept_at(context.page)
        logger.info("kvtier: %s", line)
    if args.enable_metrics:
        parts.publish(replica)
    if unlike:
        logger.warning("kvtier: %s. Prefetching and eviction are SGLang's own", UNEVEN)
    for line in not_followed(args, config.policy):
        logger.warning("%s", line)
    logger.info(
        "kvtier: restoring prefixes, policy %s, %s", policy.restore,
        "costs as learned earlier" if profile else "costs are learned from the first requests on",
    )  # fmt: skip
    return parts


def unreadable_at_start(unreadable: str, agreement: Agreement) -> str | None:
    """Why the check at start cannot compare anything, on this rank (`unreadable` says why) or on
    another; or None. This refutes nothing. A collective.
    """
    if agreement.least(int(not unreadable)):
        return None
    return f"{unreadable or 'pages of another rank'}: {UNREADABLE}"


def refute_at_start(proof: Proof, wrong: str, agreement: Agreement) -> None:
    """Turns restoration off where the check at start found no correct way of copying, on this rank
    (`wrong` says why) or on another. Not remembered, since every start checks again. A collective.
    """
    if agreement.least(int(not wrong)):
        return
    proof.changed = None
    proof.differs(Difference("start", wrong or "on another rank no way of copying is right"))
    proof.refute()


def _watch(engine: RestoreEngine, controller: Any, policy: PolicyConfig, at_once: bool) -> None:
    """Sets up checks during operation. KV computed after attached pages: with `policy.proof` auto,
    some on an accelerator and none on a CPU; with all, each. Gaps between output tokens: on an
    accelerator, unless proof is off. Not on a CPU, where copies and forwards share the cores, so
    that loads always lengthen the gaps.
    """
    proof = policy.proof
    if proof == "off" or (proof == "auto" and at_once):
        return
    if not at_once:
        engine.guard = DecodeGuard(engine.context.next_number(), lambda: bool(engine.loads))
    pools = attach.comparable(controller, engine.context.page)
    if (anchored := engine.context.anchors) is not None:
        pools = f"a prefix with {anchored.what} is restored up to its end only"
    if isinstance(pools, str):
        logger.warning("kvtier: KV computed after restored pages is not compared: %s", pools)
        return
    every = 1 if proof == "all" else attach.EVERY
    engine.attach = attach.AttachProof(engine.context, engine.proof, pools, every)
    engine.proof.looks_at_attaches = True
    engine.offers.shorten = engine.attach.leave_out


def _look_ahead(
    planner: Planner, policy: PolicyConfig, alone: bool, context: StepContext
) -> LookaheadEngine:
    write_back = context.host.write_back
    if write_back and policy.eviction != "lru":
        logger.warning("kvtier: %s", WRITE_BACK)
    logger.info(
        "kvtier: looking ahead, prefetch %s, eviction %s, sessions %s",
        policy.prefetch,
        policy.eviction,
        policy.sessions,
    )
    return LookaheadEngine(
        context,
        planner,
        policy,
        orders_evictions=policy.eviction != "lru" and not write_back,
        alone=alone,
    )


def conditions(args: Any, config: KVTierConfig, shape: EngineShape) -> dict[str, Any]:
    """The conditions that a learned profile depends on in addition to the model fingerprint. Under
    other conditions it is ignored.
    """
    cuda = args.device == "cuda" and torch.cuda.is_available()
    network = asdict(config.lab.remote_throttle)
    return {
        "device": torch.cuda.get_device_name() if cuda else str(args.device),
        "threads": None if cuda else torch.get_num_threads(),
        "attention": str(args.attention_backend),
        "chunk_tokens": shape.chunk_tokens,
        "page_tokens": shape.page_tokens,
        "page_bytes": shape.page_bytes,
        "throttle": asdict(config.lab.throttle),
        "io_threads": config.store.io_threads,
        **({"remote_throttle": network} if any(network.values()) else {}),
    }


def _path(controller: Any, name: str) -> Path | None:
    """The path of a file in the folder of this model's pages."""
    folder = getattr(backend_of(controller), "folder", None)
    return None if folder is None else Path(folder) / name


def _checks(tree: Tree, proof: Proof, policy: PolicyConfig) -> tuple[PageCheck, SecondLook] | None:
    """The checks that compare loaded pages; None where no pages are compared."""
    controller = tree.cache_controller
    every_page = policy.proof == "all"
    if policy.proof == "off" or (works_at_once(controller.device) and not every_page):
        return None
    rows, card = tree.req_to_token_pool.req_to_token, copy_device.memory_of(controller)
    return checks_of(controller, rows, tree.page_size, proof, card, every_page=every_page)


def _decision_file(
    policy: PolicyConfig, shape: EngineShape, profile: dict[str, Any] | None, replica: int
) -> DecisionFile:
    path = Path(policy.decision_log)
    if replica:
        path = path.with_name(f"{path.stem}-dp{replica}{path.suffix}")
    # A replay does not need the path.
    return DecisionFile(path, Header(replace(policy, decision_log=""), shape, profile))
