"""Public launch lines of agent models, each started on the emulated device with a small stand-in
of its model, stored, restored and looked ahead: `scripts/recipes`.

`recipes.json` has the lines as they were published, and why some of their flags are left away here.
Each server is asked the same prompts with empty memory, with the KV cache on the device, and after
flushes, when it comes from storage. Answers, numbers of verifications and the signatures of all
rows that a forward reads must be right each time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import shapes
from forking import Forked, Importer

from sgl_kvtier.arguments import positive
from sgl_kvtier.errors import BenchError
from sgl_kvtier.lab import profile
from sgl_kvtier.lab.outside.server import Launch, Server, end_on_signals

HERE = Path(__file__).resolve().parent
PAGE, CHUNK, PROMPT, TURN, ANSWER = 64, 2048, 5000, 300, 16
DEVICE_TOKENS, RUNNING = 24576, 8
PROFILE, ADMIN_KEY = "h100-llama8b", "recipes"
DILATION = 4.0
"""Steps take as many times an H100's, so that this machine's own work is small beside them."""
POLICY: dict[str, Any] = {
    "restore": "both",
    "prefetch": "on",
    "eviction": "next-use",
    "min_restore_tokens": 256,
}
"""Of every server's kvtier.json."""
RETURN_S = 5.0
"""In which a session is said to return."""
START_S = 900.0
"""How long a server may take to start."""


@dataclass(frozen=True)
class Recipe:
    """A launch line as published, its source, and what stands for its model."""

    name: str
    shape: str
    command: str
    source: str
    choices: str = ""
    """Of a page that makes a line from choices: which they were."""
    draft: str = ""
    """What stands for the draft, where it is another model's folder."""

    @property
    def variables(self) -> dict[str, str]:
        """What the line sets before its command."""
        words = shlex.split(self.command)
        return dict(w.split("=", 1) for w in words if re.fullmatch(r"[A-Z_0-9]+=.*", w))

    @property
    def flags(self) -> list[list[str]]:
        """Its flags, each with its values."""
        found: list[list[str]] = []
        for word in shlex.split(self.command):
            if word.startswith("--"):
                found.append(word.split("=", 1))
            elif found:
                found[-1].append(word)
        return found


def load(file: Path = HERE / "recipes.json") -> tuple[list[Recipe], dict[str, str]]:
    """All recipes, and the flags that are left away with their reasons."""
    found = json.loads(file.read_text(encoding="utf-8"))
    return [Recipe(**one) for one in found["recipes"]], found["dropped"]


def arguments(recipe: Recipe, dropped: dict[str, str], folder: Path) -> list[str]:
    """What the server is started with: the recipe's flags but for those that are left away, then
    what the emulated device and storage need.
    """
    kept = [flag for flag in recipe.flags if flag[0] not in dropped]
    own: dict[str, Any] = {
        "--model-path": shapes.write(recipe.shape, folder / "model"),
        "--load-format": "dummy",
        "--skip-server-warmup": None,
        "--max-total-tokens": DEVICE_TOKENS,
        "--mem-fraction-static": 0.98,
        "--max-running-requests": RUNNING,
        "--chunked-prefill-size": CHUNK,
        "--page-size": PAGE,
        "--enable-hierarchical-cache": None,
        "--hicache-ratio": 2,
        "--hicache-storage-backend": "kvtier",
        "--hicache-storage-backend-extra-config": f"@{folder / 'kvtier.json'}",
        "--enable-metrics": None,
        "--enable-cache-report": None,
        "--admin-api-key": ADMIN_KEY,
    }
    if recipe.draft:
        own["--speculative-draft-model-path"] = shapes.write(recipe.draft, folder / "draft")
    own |= shapes.ADDED.get(recipe.shape, {})
    said = {flag[0] for flag in kept}
    words = [word for flag in kept for word in flag]
    for flag, value in own.items():
        if flag not in said:
            words += [flag] if value is None else [flag, str(value)]
    return words


def environment(recipe: Recipe, folder: Path) -> dict[str, str]:
    """Variables of the server: the recipe's, and those of the device."""
    latent = "kv_lora_rank" in shapes.SHAPES[recipe.shape]
    name = "h100x8-deepseek-v3" if latent else PROFILE
    known, own_bytes = profile.read(name), shapes.bytes_per_token(recipe.shape)
    told = {
        "profile": name,
        "dilation": DILATION,
        "bytes_scale": known.kv_bytes_per_token / own_bytes,
        "page_size": PAGE,
        "disk_read_gbytes_per_s": 0.0,
        "disk_write_gbytes_per_s": 0.0,
        "log": str(folder / "pace.jsonl"),
    }
    # Loading takes as long as computing, so that a restoration has both ends.
    seconds = known.prefill_seconds([(PROMPT, 0)]) / PROMPT * DILATION
    config = {
        "store": {
            "path": str(folder / "store"), "capacity_bytes": "1GiB", "min_free_bytes": 0,
            "segment_bytes": "64MiB",
        },
        "prefetch_threshold": 256,
        "policy": POLICY,
        "lab": {"throttle": {"read_gbps": own_bytes * 8 / seconds / 1e9}},
    }  # fmt: skip
    (folder / "kvtier.json").write_text(json.dumps(config))
    (folder / "counts").mkdir()
    changed = HERE.parent / "runtime" / "changed_site"
    paths = [str(HERE / "stand_in"), str(changed), os.environ.get("PYTHONPATH", "")]
    return {
        **recipe.variables,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "DRAFTS": str(folder / "no such file"),
        "TORCHDYNAMO_DISABLE": "1",
        "KVTIER_PACED": json.dumps(told),
        "KVTIER_RECIPE_COUNTS": str(folder / "counts"),
        "KVTIER_CPU_DEVICE": "recipe_device.device:install",
        "SGLANG_PLATFORM": "kvtier_cpu",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "recipe_device.models",
        "SGLANG_ENABLE_WAR_BARRIER": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "1",
    }


class Asked:
    """A running server, and what it answered."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.storage = 0
        """Tokens that SGLang's own report says came from storage."""

    def call(self, method: str, path: str, body: Any = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN_KEY}"}
        request = urllib.request.Request(self.server.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read().decode())

    def ask(self, ids: list[int], session: str | None = None) -> tuple[list[int], int]:
        """The tokens of an answer, and how many verifications it took (0 without a draft)."""
        tokens, meta = self.answer(ids, ANSWER, session)
        self.storage += int((meta.get("cached_tokens_details") or {}).get("storage") or 0)
        return tokens, int(meta.get("spec_verify_ct") or 0)

    def answer(
        self, ids: list[int], tokens: int, session: str | None = None
    ) -> tuple[list[int], dict[str, Any]]:
        """So many tokens behind these, and what SGLang reports of them."""
        sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "session_id": session}
        answer = json.loads(self.call("POST", "/generate", body))
        return answer["output_ids"], answer["meta_info"]

    def metric(self, name: str, label: str = "") -> int:
        lines = self.call("GET", "/metrics").splitlines()
        found = [line for line in lines if line.startswith(name + "{") and label in line]
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in found))

    def moved(self, link: str) -> int:
        """Bytes that were moved ahead of a request."""
        return self.metric("kvtier:lookahead_moved_bytes_total", f'link="{link}"')

    def expect(self, session: str) -> bool:
        """Tells the server that a session returns soon, and waits until its pages are on the
        device; whether they came there, from storage.
        """
        links = ("storage-host", "host-device")
        before = [self.moved(link) for link in links]
        for _ in range(3):  # a hint is for one return
            hint = {"session": session, "expected_delay_s": RETURN_S}
            if json.loads(self.call("POST", "/kvtier/hint", hint))["result"] == "refused":
                return False
            end = time.monotonic() + RETURN_S
            while time.monotonic() < end:
                time.sleep(0.5)
                if all(self.moved(link) > had for link, had in zip(links, before, strict=True)):
                    return True
        return False

    def flush(self) -> None:
        """Empties device and host memory, once the store does not grow any more."""
        seen = [-1, self.metric("kvtier:store_pages")]
        while seen[-1] != seen[-2] and len(seen) < 30:
            time.sleep(1.2)
            seen.append(self.metric("kvtier:store_pages"))
        self.call("POST", "/flush_cache?timeout=60", {})


def run(
    recipe: Recipe, dropped: dict[str, str], folder: Path, fork: bool = False
) -> dict[str, Any]:
    """One recipe's row of results. The server is stopped whatever happens."""
    began = time.monotonic()
    row: dict[str, Any] = {
        "name": recipe.name, "source": recipe.source, "shape": recipe.shape, "starts": False,
        "stores": False, "restores": False, "looks_ahead": False, "equal": None, "reason": "",
        "commit": commit(),
        "dropped": [flag[0] for flag in recipe.flags if flag[0] in dropped],
    }  # fmt: skip
    folder.mkdir(parents=True)
    words = arguments(recipe, dropped, folder)
    server = (Forked if fork else Server)(
        recipe.name, Launch(tuple(words), environment(recipe, folder)), folder
    )
    log = folder / "server.log"
    try:
        with server:
            server.wait_until_healthy(START_S)
            row["starts"] = True
            row |= _asked(Asked(server), writes_late(recipe))
            server.raise_if_ended("while it was asked")
    except (BenchError, OSError, ValueError) as error:
        row["reason"] = failure(log) or str(error).splitlines()[0]
    row["rows"] = rows_checked(folder)
    if not row["reason"]:
        row["reason"] = refusal(log)
    row["seconds"] = round(time.monotonic() - began, 1)
    return row


def rows_checked(folder: Path) -> dict[str, dict[str, int]]:
    """Rows that all ranks of a server have checked, and those that were wrong, by kind."""
    found: dict[str, dict[str, int]] = {}
    for file in (folder / "counts").glob("*.json"):
        for kind, counts in json.loads(file.read_text()).items():
            known = found.setdefault(kind, dict.fromkeys(counts, 0))
            for name, count in counts.items():
                known[name] += count
    return found


def writes_late(recipe: Recipe) -> bool:
    """Whether SGLang copies pages to host memory only when they are evicted, or used twice."""
    policy = [flag[1] for flag in recipe.flags if flag[0] == "--hicache-write-policy"]
    return bool(policy) and policy != ["write_through"]


def _asked(asked: Asked, writes_late: bool) -> dict[str, Any]:
    def ids(seed: int, count: int) -> list[int]:
        return random.Random(seed).choices(range(16, 250), k=count)

    first, other = ids(1, PROMPT), ids(2, PROMPT)
    cold = asked.ask(first)
    turn = first + cold[0] + ids(3, TURN)
    cold_turn, cold_other = asked.ask(turn), asked.ask(other)
    if writes_late:
        for ids_again in (turn, other) * 2:
            asked.ask(ids_again)
        for seed in range(4, 10):  # more than the device holds
            asked.ask(ids(seed, PROMPT))
    asked.flush()
    pages = asked.metric("kvtier:store_pages")
    again = [asked.ask(first), asked.ask(turn)]
    asked.flush()
    again += [asked.ask(turn, "agent"), asked.ask(other)]
    asked.flush()
    ahead = asked.expect("agent")
    again.append(asked.ask(turn, "agent"))
    computed = [cold, cold_turn, cold_turn, cold_other, cold_turn]
    time.sleep(1.2)  # counters are published twice a second
    met = asked.metric("kvtier:restore_ended_total", 'how="met"')
    loaded = asked.metric("kvtier:restore_loaded_tokens_total", 'tier="storage"')
    failed = asked.metric("kvtier:lookahead_failures_total")
    verified = [sum(count for _, count in answers) for answers in (computed, again)]
    return {
        "stores": bool(asked.storage or loaded),
        "stored_pages": pages,
        "restores": met > 0 and loaded > 0,
        "looks_ahead": ahead and not failed,
        "equal": computed == again,
        "restored": met,
        "loaded_tokens": loaded,
        "computed_tokens": asked.metric("kvtier:restore_computed_tokens_total"),
        "storage_hit_tokens": asked.storage,
        "accept_length": [round(len(again) * ANSWER / n, 2) for n in verified if n],
    }


_FRAME = re.compile(
    r'File "[^"]*?((?:sglang|sgl_kvtier|recipe_device)/[^"]+)", line (\d+), in (\w+)'
)
_ERROR = re.compile(r"(?:\[[^]]*\] )?((?:\w+\.)*\w*(?:Error|Exception)\b.*)|.*(error: argument.*)")


def failure(log: Path) -> str:
    """Why a server ended: the first error of its scheduler, or else of its launcher, and the symbol
    that raised it.
    """
    text = log.read_text(errors="replace") if log.exists() else ""
    before, said, after = text.partition("Scheduler hit an exception")
    place = ""
    for line in (after if said else before).splitlines():
        if frame := _FRAME.search(line):
            place = f" ({frame[1]}:{frame[2]} {frame[3]})"
        if error := _ERROR.match(line):
            return (error[1] or error[2])[:300] + place
    return ""


_GOES_WITHOUT = re.compile(
    r"kvtier: (.*SGLang's own.*|not .*|SGLang chooses .*|restoration ends.*)"
)


def refusal(log: Path) -> str:
    """What kvtier does not do in this server, in the words of its log."""
    told = _GOES_WITHOUT.findall(log.read_text(errors="replace"))
    return "; ".join(dict.fromkeys(told))[:600]


COLUMNS = ("starts", "stores", "restores", "looks_ahead", "equal")


def table(rows: list[dict[str, Any]]) -> str:
    """Results as a table in markdown, and the reasons that its last column has numbers of."""
    reasons = list(dict.fromkeys(row["reason"] for row in rows if row["reason"]))
    heads = (
        "Recipe",
        *(name.replace("_", " ") for name in COLUMNS),
        "accept length",
        "rows wrong of checked",
        "reason",
    )
    lines = ["| " + " | ".join(heads) + " |", "| :--- " * len(heads) + "|"]
    for row in rows:
        checked = sum(kind["checked"] for kind in row["rows"].values())
        wrong = sum(kind["wrong"] for kind in row["rows"].values())
        words = (
            row["name"],
            *({None: "-", True: "yes", False: "no"}[row[name]] for name in COLUMNS),
            ", ".join(f"{one:.2f}" for one in row.get("accept_length", [])) or "-",
            f"{wrong} of {checked:,}",
            str(reasons.index(row["reason"]) + 1) if row["reason"] else "-",
        )
        lines.append("| " + " | ".join(words) + " |")
    told = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, "", *told]).rstrip()


def grids(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Results as `kvtier report` shows them."""
    columns = ["name", *COLUMNS, "accept_length", "rows", "wrong rows", "reason"]
    values = [
        [
            *(row[name] for name in ("name", *COLUMNS)),
            row.get("accept_length", []),
            sum(kind["checked"] for kind in row["rows"].values()),
            sum(kind["wrong"] for kind in row["rows"].values()),
            row["reason"],
        ]
        for row in rows
    ]
    about = (
        "public launch lines on the emulated device, small stand-ins of their models; "
        "accept_length: computed, then from storage; rows: of all pools, compared in prefills"
    )
    told = {"about": about, "commit": "of each recipe", "command": "scripts/recipes --json FILE"}
    return {"recipes": {**told, "columns": columns, "rows": values}}


def commit() -> str:
    """Of this repository, for results."""
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def document(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Results as JSON."""
    return {"page": "recipes.md", "grids": grids(rows), "recipes": rows}


def merged(file: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These rows, and of a file those of other recipes, in the order of the recipes."""
    kept = json.loads(file.read_text(encoding="utf-8")).get("recipes", []) if file.exists() else []
    found = {row["name"]: row for row in [*kept, *rows]}
    return [found[one.name] for one in load()[0] if one.name in found]


def keep(file: Path | None, parts: dict[str, Any]) -> None:
    """Writes these parts of results into a file, where there is one, beside what it has of other
    parts, and of random requests and times beside those of other recipes.
    """
    if file is None:
        return
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in ("fuzz", "speed"):
        if name in parts:
            mine = {row["name"] for row in parts[name]}
            others = [row for row in known.get(name, []) if row["name"] not in mine]
            parts = {**parts, name: [*others, *parts[name]]}
    file.write_text(json.dumps({**known, **parts}, indent=1) + "\n", encoding="utf-8")


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/recipes", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes (all of them)")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="results as JSON; what it has of other recipes stays",
    )
    parser.add_argument("--list", action="store_true", help="print the recipes and their sources")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep servers' logs there")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print these results as a table")
    parser.add_argument(
        "--fuzz",
        type=positive,
        metavar="N",
        help="send N random requests in trouble to each instead; exit status 1 with a finding",
    )
    parser.add_argument(
        "--speed",
        action="store_true",
        help="time a stored prefix of 16k tokens instead, restored by loading and from both ends, "
        "against the best split",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is random (default 0)")
    args = parser.parse_args(given)
    if args.table:
        print(table(json.loads(args.table.read_text(encoding="utf-8"))["recipes"]))
        return 0
    every, dropped = load()
    known = {one.name: one for one in every}
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"no recipe named {', '.join(unknown)}: scripts/recipes --list")
    chosen = [known[name] for name in args.names] or every
    if args.list:
        for one in chosen:
            print(f"{one.name:26} {one.source}")
        return 0
    rows: list[dict[str, Any]] = []
    scratch = args.keep or Path(tempfile.mkdtemp(prefix="kvtier-recipes-"))
    try:
        with end_on_signals():
            for number, one in enumerate(chosen, 1):
                print(
                    f"{number} of {len(chosen)}: {one.name} ...",
                    file=sys.stderr,
                    end=" ",
                    flush=True,
                )
                shutil.rmtree(scratch / one.name, ignore_errors=True)
                if args.fuzz:
                    import fuzz  # it knows this module

                    rows.append(fuzz.run(one, dropped, scratch / one.name, args.fuzz, args.seed))
                    said = [*rows[-1]["findings"], *map(str, rows[-1]["wrong_answers"])]
                    print("sound" if fuzz.is_sound(rows[-1]) else "; ".join(said), file=sys.stderr)
                    keep(args.json, {"fuzz": rows})
                    continue
                if args.speed:
                    import speed  # it knows this module

                    rows.append(speed.run(one, dropped, scratch / one.name))
                    shares = [f"{cell['share']:.2f}" for cell in rows[-1]["cells"]]
                    print(f"{', '.join(shares)} of the best split", file=sys.stderr)
                    keep(args.json, {"speed": rows})
                    continue
                rows.append(run(one, dropped, scratch / one.name, fork=len(chosen) > 1))
                said = ", ".join(name for name in COLUMNS if rows[-1][name]) or rows[-1]["reason"]
                print(f"{rows[-1]['seconds']:.0f} s: {said}", file=sys.stderr)
                if args.json:
                    keep(args.json, document(merged(args.json, rows)))
    finally:
        Importer.stop_all()
        if not args.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    if args.fuzz:
        import fuzz

        print(fuzz.table(rows))
        return int(not all(map(fuzz.is_sound, rows)))
    if args.speed:
        import speed

        print(speed.table(rows))
        return 0
    print(table(rows))
    return int(any(row["equal"] is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
