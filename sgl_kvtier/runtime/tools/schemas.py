"""The schemas of the results of `kvtier doctor` and `schema`."""

from sgl_kvtier.console.schema import Schema

DOCTOR = Schema(
    "kvtier.doctor/1",
    "kvtier doctor",
    "whether a server can run on this machine",
    """
findings: list of objects; what was checked
  check, found: string; what was checked, what was found
  state: "ok" or "warn" or "fail"; a server cannot run with fail
  advice: string; what to do; empty where nothing has to be done
seams: list of objects; SGLang symbols that kvtier relies on
  feature, symbol, why: string; feature that needs it, its name, what it is used for
  how: "calls" or "data" or "replaces" or "pages"; what is checked: parameters, attributes, source
  names: list of string; the parameters or attributes that are used
  port: string; part of SGLang that it belongs to
  problem: string; how the installed SGLang differs; empty where it does not
""",
)

SETTINGS = Schema(
    "kvtier.settings/1",
    "kvtier doctor --settings",
    "the settings of kvtier.json",
    """
settings: list of objects; one per setting
  key, default, allowed, meaning: string; name, default, allowed values, what it does
""",
)

SCHEMAS = Schema(
    "kvtier.schemas/1",
    "kvtier schema",
    "the schemas there are",
    """
schemas: list of objects; one per kind of result
  name, command, about: string; name and version, command that writes it, what the result is
""",
)
