"""A conversation that survives a restart of the server, on a CPU: what is said, how long the first
token took, and how many tokens of the prompt came back from disk.

    kvtier model smollm2                # real weights: a download of 100 MB, 513 MiB on disk
    python examples/chat.py             # [MODEL [STORE]]

The first question carries a document of some thousand tokens, which the server computes. Then the
server is stopped and started anew, as after an update. The next question carries the same document
and the conversation so far: its KV cache comes from the store.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from sgl_kvtier.launch import free_port

DOCUMENT = Path(__file__).resolve().parent.parent / "README.md"
QUESTIONS = (
    "What is sgl_kvtier, and where does it keep the KV cache? Answer in one sentence.",
    "What is it for? Answer in one sentence.",
)


@contextmanager
def served(model: str, store: Path) -> Iterator[str]:
    """The address of a server with the kvtier tier, stopped at the end."""
    port = free_port()
    kvtier = Path(sys.executable).with_name("kvtier")
    command = [str(kvtier), "serve", model, "--store", str(store), "--port", str(port)]
    with (store.parent / f"server-{port}.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        while not answers(url):
            if server.poll() is not None:
                raise SystemExit(f"the server ended: see {log.name}")
            time.sleep(1)
        yield url
    except (OSError, HTTPException) as error:
        raise SystemExit(f"the server does not answer ({error}): see {log.name}") from error
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def answers(url: str) -> bool:
    """Whether the server is ready."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=20):
            return True
    except OSError:
        return False


def ask(url: str, messages: list[dict[str, str]]) -> str:
    """Sends a conversation, prints the answer as it comes, and returns it."""
    body = {
        "model": "default",
        "messages": messages,
        "temperature": 0,
        "frequency_penalty": 0.6,  # a model as small as this repeats itself without
        "max_tokens": 60,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    print(f"\n> {messages[-1]['content'].splitlines()[-1]}\n")
    said, first, usage, began = "", 0.0, {}, time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            part = json.loads(line[6:])
            usage = part.get("usage") or usage
            text = "".join(choice["delta"].get("content") or "" for choice in part["choices"])
            if text and not said:
                first = time.monotonic() - began
            said += text
            print(text, end="", flush=True)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    print(
        f"\n\n[first token after {first:.1f} s; {usage['prompt_tokens']} prompt tokens, "
        f"{cached} of them not computed]"
    )
    return said


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    folder = Path(tempfile.mkdtemp(prefix="kvtier-chat-"))
    store = Path(sys.argv[2]) if len(sys.argv) > 2 else folder / "store"
    if len(sys.argv) > 1:
        model = sys.argv[1]
    else:
        kvtier = Path(sys.executable).with_name("kvtier")
        found = subprocess.run(
            [str(kvtier), "model", "smollm2"], check=True, capture_output=True, text=True
        )
        model = found.stdout.strip()
    text = DOCUMENT.read_text(encoding="utf-8")
    messages = [{"role": "user", "content": f"{text}\n\n{QUESTIONS[0]}"}]
    print("[the server starts, and computes the document: one or two minutes]", flush=True)
    with served(model, store) as url:
        messages.append({"role": "assistant", "content": ask(url, messages)})
        time.sleep(5)  # written to the store meanwhile
    print("\n[the server was stopped, and starts again]", flush=True)
    messages.append({"role": "user", "content": QUESTIONS[1]})
    with served(model, store) as url:
        ask(url, messages)
    print(f"\n[pages are in {store}]")


if __name__ == "__main__":
    main()
