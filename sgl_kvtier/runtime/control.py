"""Settings that experiments change in a running server, through SGLang's own admin route. Operators
use POST /kvtier/settings instead, which takes names (hints/settings.py).

    POST /set_internal_state
    {"server_args": {"kvtier.throttle.read_gbps": 2.5, "kvtier.policy.restore": 3}}

SGLang passes such a message to every scheduler process between two steps, and accepts only numbers.
A choice is given by its index in the list that `kvtier doctor --settings` prints, from 0. The
laboratory uses this to run all configurations of a comparison in one process. An unknown name is
refused, as SGLang refuses unknown names of its own.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from sgl_kvtier.config import PolicyConfig, parse_setting
from sgl_kvtier.outside import is_number, refusal, shown
from sgl_kvtier.runtime.settings import FIXED
from sgl_kvtier.runtime.sglang.attached import backend_of

PREFIX = "kvtier."
RULES = "rules."
"""Prefix, after `kvtier.`, of numbers of the class in policy.rules."""


logger = logging.getLogger(__name__)

Handler = Callable[[Any, float], None]
"""Called on the scheduler's thread with the scheduler and the value; ValueError refuses it."""


def change_policy(config: PolicyConfig, name: str, value: float) -> PolicyConfig:
    """`config` with one setting changed. Raises ValueError on an unknown name or wrong value."""
    default, choices = known_settings().get(name, (None, ()))
    given: object = value
    if choices:
        if not is_number(value, 0, len(choices) - 1) or value != int(value):
            raise ValueError(
                refusal(f"policy.{name}", value, f"0 to {len(choices) - 1}: {', '.join(choices)}")
            )
        given = choices[int(value)]
    elif isinstance(default, bool):
        if not is_number(value, 0, 1) or value != int(value):
            raise ValueError(refusal(f"policy.{name}", value, "0 or 1"))
        given = bool(value)
    elif isinstance(default, int) and is_number(value) and value == int(value):
        given = int(value)  # SGLang's messages may have turned 4 into 4.0
    return dataclasses.replace(config, **{name: parse_setting("policy", name, given)})


def known_settings() -> dict[str, tuple[object, tuple[str, ...]]]:
    """Defaults and choices of the policy section's settings."""
    return {f.name: (f.default, f.metadata["choices"]) for f in dataclasses.fields(PolicyConfig)}


def change_throttle(scheduler: Any, value: float) -> None:
    """Sets the read bandwidth of a throttled store, in gigabits per second."""
    throttle = getattr(
        backend_of(getattr(scheduler.tree_cache, "cache_controller", None)), "throttle", None
    )
    if throttle is None:
        raise ValueError("no kvtier storage backend is attached")
    throttle(parse_setting("lab.throttle", "read_gbps", value))
    notes = _notes(scheduler)
    if notes is not None:
        notes.forget_links()


def policy_handler(name: str) -> Handler:
    """Returns the handler of one policy setting, which takes effect from the next request on."""

    def change(scheduler: Any, value: float) -> None:
        if name in FIXED:
            raise ValueError(f"policy.{name} is fixed when the server starts")
        notes = _notes(scheduler)
        if notes is not None:
            changed = change_policy(notes.config, name, value)
            if name == "restore" and changed.restore != "off" and notes.stays_off:
                raise ValueError(notes.stays_off)
            notes.configure(changed)
        elif change_policy(PolicyConfig(), name, value).restore != "off" or name != "restore":
            raise ValueError(
                "this server restores SGLang's own way since it started: policy.restore was off, "
                "or its log says what it lacks"
            )

    return change


def rules_handler(name: str) -> Handler:
    """Returns the handler of a number of the class in policy.rules."""

    def change(scheduler: Any, value: float) -> None:
        notes = _notes(scheduler)
        if notes is None:
            raise ValueError("this server restores SGLang's own way since it started")
        notes.tune(name, value)

    return change


def _notes(scheduler: Any) -> Any | None:
    """The notes of a server that restores or looks ahead, else None."""
    return getattr(getattr(scheduler.tree_cache, "kvtier", None), "notes", None)


def check_map(scheduler: Any, value: float) -> None:
    """Compares the map of pages with tree, host pool and store; counts differences as drift."""
    del value
    parts = getattr(scheduler.tree_cache, "kvtier", None)
    if parts is None or parts.ahead is None:
        raise ValueError("this server does not look ahead")
    if not scheduler.is_fully_idle():
        raise ValueError("the map is compared while nothing runs")
    parts.tick.compare_map(scheduler)


HANDLERS: dict[str, Handler] = {
    "lookahead.check": check_map,
    "throttle.read_gbps": change_throttle,
    **{f"policy.{f.name}": policy_handler(f.name) for f in dataclasses.fields(PolicyConfig)},
}
"""Handlers by name without the prefix, in addition to `rules.NAME` for the names that the class in
policy.rules lists (`Rules.tuned`).
"""


def handler(name: str) -> Handler | None:
    """The handler of this name, without the prefix; None if it is unknown."""
    if name.startswith(RULES):
        return rules_handler(name[len(RULES) :])
    return HANDLERS.get(name)


def set_internal_state(
    original: Callable[..., Any], controller: Any, message: Any, *args: Any, **kwargs: Any
) -> Any:
    """Hook around SGLang's own: applies settings with our prefix, and never raises for those."""
    ours = {
        name: value for name, value in message.server_args.items() if str(name).startswith(PREFIX)
    }
    if not ours:
        return original(controller, message, *args, **kwargs)
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    if len(ours) < len(message.server_args):
        logger.warning(
            "kvtier: settings of SGLang and of kvtier cannot be changed in one message; nothing "
            "was changed"
        )
        return SetInternalStateReqOutput(updated=False)
    return SetInternalStateReqOutput(updated=_apply(controller.scheduler, ours))


def _apply(scheduler: Any, values: Mapping[str, float]) -> bool:
    changes = {name: handler(name[len(PREFIX) :]) for name in values}
    unknown = [name for name, change in changes.items() if change is None]
    if unknown:
        logger.warning("kvtier: cannot change %s in a running server", shown(unknown))
        return False
    for name, value in values.items():
        try:
            if not is_number(value):
                raise ValueError(refusal(name, value, "a finite number"))
            changes[name](scheduler, value)  # type: ignore[misc]
        except ValueError as error:
            logger.warning("kvtier: %s = %s was refused: %s", name, shown(value), error)
            return False
        except Exception:
            # An exception in SGLang's loop would end the server. Settings changed before it stay
            # changed.
            logger.exception("kvtier: %s = %s was refused: changing it failed", name, shown(value))
            return False
        logger.info("kvtier: %s is now %s", name, value)
    return True
