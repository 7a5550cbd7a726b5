"""Programs that stand for other benchmark clients: each sends the load of its input file, and writes
what the real one writes of it. FAKE_CLIENT: fail (ends with status 3), forget (no record of the last
request).

    python fake_clients.py aiperf|sglang OPTIONS
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def events(url: str, path: str, body: dict) -> Iterator[tuple[int, str]]:
    """The events of a stream with their times, in ns; the first is when the request was sent."""
    place = urlsplit(url)
    link = http.client.HTTPConnection(place.hostname or "", place.port)
    yield time.perf_counter_ns(), ""
    link.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    for line in link.getresponse():
        if line.startswith(b"data: "):
            yield time.perf_counter_ns(), line[6:].decode().strip()
    link.close()


def aiperf(forget: bool) -> None:
    """aiperf 0.13.0."""
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
        (start, _), *found = events(option("--url"), "/v1/completions", row["payload"])
        metrics = {
            "time_to_first_token": {"value": (found[0][0] - start) / 1e6, "unit": "ms"},
            "request_latency": {"value": (found[-1][0] - start) / 1e6, "unit": "ms"},
        }
        records.append({"metadata": about, "metrics": metrics, "error": None})
        responses = [
            {"perf_ns": at, "packets": [{"name": "data", "value": said}]} for at, said in found
        ]
        one = {"metadata": about, "start_perf_ns": start, "payload": row["payload"]}
        raw.append({**one, "responses": responses, "error": None})
    if forget:
        del records[-1], raw[-1]
    for file, rows in (("profile_export.jsonl", records), ("profile_export_raw.jsonl", raw)):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "profile_export_aiperf.json").write_text("{}")


def chatted(messages: list[dict]) -> dict:
    body = {
        "model": option("--served-model-name"),
        "messages": messages,
        "max_completion_tokens": int(option("--sharegpt-output-len")),
        "stream": True,
    }
    (begin, _), *found = events(option("--base-url"), "/v1/chat/completions", body)
    done: dict = {"ttft": 0.0, "itl": [], "text": "", "usage": {}}
    last = begin
    for at, said in found:
        event = json.loads(said) if said.startswith("{") else {"choices": []}
        done["usage"] = event.get("usage") or done["usage"]
        for choice in event["choices"]:
            if done["text"]:
                done["itl"].append((at - last) / 1e9)
            else:
                done["ttft"] = (at - begin) / 1e9
            done["text"] += choice["delta"]["content"]
            last = at
    return done


def sglang(forget: bool) -> None:
    """SGLang 0.5.23's client."""
    began_s, outputs = time.perf_counter(), []
    for turns in json.loads(Path(option("--dataset-path")).read_text())["conversations"]:
        history: list[dict] = []
        for turn in turns:
            history += turn["messages"]
            outputs.append(chatted(history))
            history.append({"role": "assistant", "content": outputs[-1]["text"]})
    if forget:
        del outputs[-1]
    result = {
        "duration": time.perf_counter() - began_s,
        "input_lens": [one["usage"]["prompt_tokens"] for one in outputs],
        "output_lens": [one["usage"]["completion_tokens"] for one in outputs],
        "ttfts": [one["ttft"] for one in outputs],
        "itls": [one["itl"] for one in outputs],
        "generated_texts": [one["text"] for one in outputs],
        "errors": ["" for _ in outputs],
        "cached_tokens": [0 for _ in outputs],
        "cached_tokens_details": [None for _ in outputs],
    }
    Path(option("--output-file")).write_text(json.dumps(result) + "\n")
    Path(option("--steady-state-output-file")).write_text("{}\n")


if __name__ == "__main__":
    task = os.environ.get("FAKE_CLIENT", "")
    if task == "fail":
        print("no server is there")
        sys.exit(3)
    {"aiperf": aiperf, "sglang": sglang}[sys.argv[1]](task == "forget")
