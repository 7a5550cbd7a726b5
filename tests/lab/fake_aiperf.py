"""A program that stands for aiperf: it sends the rows of its input file, and writes what aiperf 0.13.0
writes of them. FAKE_AIPERF: fail (ends with status 3), forget (no record of the last request).
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def ask(url: str, body: dict) -> tuple[int, list[tuple[int, str]]]:
    """When it was sent, and the events with their times, in ns."""
    place = urlsplit(url)
    link = http.client.HTTPConnection(place.hostname or "", place.port)
    start = time.perf_counter_ns()
    link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer, events = link.getresponse(), []
    for line in answer:
        if line.startswith(b"data: "):
            events.append((time.perf_counter_ns(), line[6:].decode().strip()))
    link.close()
    return start, events


def main() -> None:
    task = os.environ.get("FAKE_AIPERF", "")
    if task == "fail":
        print("no server is there")
        sys.exit(3)
    folder = Path(option("--artifact-dir"))
    turns: dict[str, int] = {}
    records, raw = [], []
    for line in Path(option("--input-file")).read_text().splitlines():
        row = json.loads(line)
        name = row["session_id"]
        time.sleep(row.get("delay", 0) / 1000)
        about = {
            "conversation_id": name,
            "turn_index": turns.setdefault(name, 0),
            "benchmark_phase": "profiling",
            "request_start_ns": time.time_ns(),
        }
        turns[name] += 1
        start, events = ask(option("--url"), row["payload"])
        first, last = events[0][0], events[-1][0]
        metrics = {
            "time_to_first_token": {"value": (first - start) / 1e6, "unit": "ms"},
            "request_latency": {"value": (last - start) / 1e6, "unit": "ms"},
        }
        records.append({"metadata": about, "metrics": metrics, "error": None})
        responses = [
            {"perf_ns": at, "packets": [{"name": "data", "value": said}]} for at, said in events
        ]
        one = {"metadata": about, "start_perf_ns": start, "payload": row["payload"]}
        raw.append({**one, "responses": responses, "error": None})
    if task == "forget":
        del records[-1], raw[-1]
    for file, rows in (("profile_export.jsonl", records), ("profile_export_raw.jsonl", raw)):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "profile_export_aiperf.json").write_text("{}")


if __name__ == "__main__":
    main()
