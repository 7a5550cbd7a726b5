"""GET and POST /kvtier/settings: settings of a running server, by their names in kvtier.json.

    {"policy": {"restore": "off", "min_restore_tokens": 512}}

A POST changes all settings that it names, on every rank, or nothing. So it goes to the schedulers
twice, as a hint does: first every replica answers whether it would accept the settings, then all
apply them. The ranks of a replica get one message in one step, and have the same settings and the
same state of proof, so they decide alike.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from sgl_kvtier.config import PolicyConfig
from sgl_kvtier.errors import ConfigError
from sgl_kvtier.outside import parse_json, shown
from sgl_kvtier.runtime.settings import FIXED, changed

MARK = "kvtier.settings:"
"""The prefix by which the scheduler recognizes the message among SGLang's control messages."""
ANSWER = "kvtier.settings"
"""The key of a scheduler's answer in the state it returns."""
FALLS_BACK = (
    "this server restores SGLang's own way since it started: policy.restore was off, or its log "
    "says what it lacks"
)
_EXAMPLE = '{"policy": {"restore": "off", "min_restore_tokens": 512}}'
_NOT_ANSWERED = "this server's schedulers have no kvtier plugin: see kvtier doctor"

logger = logging.getLogger(__name__)


def read(body: bytes) -> dict[str, Any]:
    """The settings of the section `policy` in a POST's body, by name. Raises ConfigError."""
    try:
        given = parse_json(body)
    except ValueError as error:
        raise ConfigError(f"the body is no JSON ({error}). Send {_EXAMPLE}") from error
    if not isinstance(given, dict) or list(given) != ["policy"]:
        raise ConfigError(
            f"{shown(given)}: only the section policy can be changed while a server runs. "
            f"Send {_EXAMPLE}"
        )
    values = given["policy"]
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"policy = {shown(values)}: name at least one setting. Send {_EXAMPLE}")
    changed(PolicyConfig(), values)
    return values


def pack(values: Mapping[str, Any], change: bool) -> str:
    """Encodes values for one of SGLang's control messages. Without `change` it asks whether a
    scheduler would accept the values; without values, what is in force.
    """
    return MARK + json.dumps({"policy": values, "change": change})


def answer(scheduler: Any, text: str) -> dict[str, Any]:
    """A scheduler's answer to such a message: `reason` (empty if it accepts the values), `settings`
    in force that can change, and those that are `fixed`. Scheduler's thread. Never raises.
    """
    notes = getattr(getattr(scheduler.tree_cache, "kvtier", None), "notes", None)
    try:
        told = json.loads(text.removeprefix(MARK))
        reason = _take(notes, told["policy"], told["change"])
    except ConfigError as error:
        reason = str(error)
    except Exception:
        # An exception in SGLang's loop would end the server.
        logger.exception("kvtier: changing settings failed")
        reason = "changing them failed: the server's log has the error"
    if notes is None:
        return {"reason": reason, "settings": {}, "fixed": {}}
    found = dataclasses.asdict(notes.config)
    return {
        "reason": reason,
        "settings": {"policy": {name: found[name] for name in found if name not in FIXED}},
        "fixed": {"policy": {name: found[name] for name in found if name in FIXED}},
    }


def _take(notes: Any, values: Mapping[str, Any], change: bool) -> str:
    """Why the values are refused, else empty; with `change` they are then in force."""
    if not values:
        return FALLS_BACK if notes is None else ""
    if notes is None:
        return "" if changed(PolicyConfig(), values) == PolicyConfig(restore="off") else FALLS_BACK
    config = changed(notes.config, values)
    if change:
        # Also if restoration was refuted meanwhile: it stays off.
        notes.configure(config)
        logger.info("kvtier: settings are now %s", shown(dict(values)))
    elif "restore" in values and config.restore != "off":
        return str(notes.stays_off)
    return ""


def together(answers: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Merges the answers of all data-parallel replicas; None: a scheduler without the plugin. They
    have the same settings, so the first one's are shown.
    """
    reasons = [_NOT_ANSWERED if one is None else one["reason"] for one in answers]
    first = answers[0] or {"settings": {}, "fixed": {}}
    return {**first, "reason": "; ".join(dict.fromkeys(filter(None, reasons)))}
