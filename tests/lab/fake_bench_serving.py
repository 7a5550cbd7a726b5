"""A program that stands for SGLang's benchmark client: it sends the conversations of its data set, and
writes what that of SGLang 0.5.23 writes of them. FAKE_SGLANG_CLIENT: fail (ends with status 3),
forget (no figures of the last request).
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


def ask(messages: list[dict]) -> dict:
    place = urlsplit(option("--base-url"))
    link = http.client.HTTPConnection(place.hostname or "", place.port)
    body = {
        "model": option("--served-model-name"),
        "messages": messages,
        "max_completion_tokens": int(option("--sharegpt-output-len")),
        "stream": True,
    }
    begin_s = last_s = time.perf_counter()
    link.request("POST", "/v1/chat/completions", json.dumps(body))
    found: dict = {"ttft": 0.0, "itl": [], "text": "", "usage": {}}
    for line in link.getresponse():
        if not line.startswith(b"data: {"):
            continue
        event, now_s = json.loads(line[6:]), time.perf_counter()
        found["usage"] = event.get("usage") or found["usage"]
        for choice in event["choices"]:
            if found["text"]:
                found["itl"].append(now_s - last_s)
            else:
                found["ttft"] = now_s - begin_s
            found["text"] += choice["delta"]["content"]
            last_s = now_s
    link.close()
    return found


def main() -> None:
    task = os.environ.get("FAKE_SGLANG_CLIENT", "")
    if task == "fail":
        print("serving.py: error: no such data set")
        sys.exit(3)
    began_s, outputs = time.perf_counter(), []
    for turns in json.loads(Path(option("--dataset-path")).read_text())["conversations"]:
        history: list[dict] = []
        for turn in turns:
            history += turn["messages"]
            outputs.append(ask(history))
            history.append({"role": "assistant", "content": outputs[-1]["text"]})
    if task == "forget":
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
    main()
