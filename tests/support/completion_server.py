"""A real HTTP server on this machine with OpenAI's interface, which can misbehave in every way a server does."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Answer:
    """What one request gets instead of completions: a status with a body, no word at all, or a closed connection."""

    status: int = 200
    body: bytes | dict[str, Any] = b""
    headers: dict[str, str] = field(default_factory=dict)
    hangs: bool = False
    closes: bool = False


@dataclass(frozen=True)
class Seen:
    """One request that came in."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class CompletionServer:
    """Serves while its `with` block runs.

    Choice j of a request says `PROMPT|SEED|j`, ends for `length` where the prompt ends in `long`, and has as many
    tokens as its text has characters.

    Args:
        script: answers of the first requests, in order; None is a proper one.
        key: the one that requests must bring.
        most_choices: never more than these in an answer, whatever `n` says.
        refuses: keys of a request's body that get a 400.
        dies_after: stops listening, and breaks every connection, after so many proper answers.
        usage: whether answers count their tokens.
    """

    def __init__(
        self,
        script: Sequence[Answer | None] = (),
        *,
        key: str | None = None,
        most_choices: int | None = None,
        refuses: Sequence[str] = (),
        dies_after: int | None = None,
        usage: bool = True,
    ) -> None:
        self.script = list(script)
        self.key, self.most_choices, self.refuses = key, most_choices, refuses
        self.dies_after, self.usage = dies_after, usage
        self.seen: list[Seen] = []
        self.hanging, self.released = threading.Event(), threading.Event()
        self.answered = self.running = self.most_running = 0
        self.lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.handle(self)

            def log_message(self, *args: Any) -> None:
                """Nothing on the terminal."""

        self.server = _Server(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.released.set()
        self.stop()

    def stop(self) -> None:
        """Refuse every further connection."""
        self.server.shutdown()
        self.server.server_close()

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        """One request."""
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.lock:
            self.seen.append(Seen(handler.path, dict(handler.headers), body))
            scripted = self.script.pop(0) if self.script else None
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            answer = scripted or self.answer(handler, body)
        finally:
            with self.lock:
                self.running -= 1
        if answer.hangs:
            self.hanging.set()
            self.released.wait(60)
        if answer.hangs or answer.closes:
            handler.close_connection = True
            return
        raw = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        with suppress(OSError):
            handler.send_response(answer.status)
            for name, value in {"Content-Length": str(len(raw)), **answer.headers}.items():
                handler.send_header(name, value)
            handler.end_headers()
            handler.wfile.write(raw)

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> Answer:
        """Completions, or why there are none."""
        given = handler.headers.get("Authorization", "")
        if self.key is not None and given != f"Bearer {self.key}":
            return refusal(401, f"Incorrect API key provided: {given.removeprefix('Bearer ')}")
        for name in self.refuses:
            if name in body:
                instead = "; use 'max_completion_tokens'" if name == "max_tokens" else ""
                return refusal(400, f"Unsupported parameter: {name!r}{instead}.")
        with self.lock:
            self.answered += 1
            dead = self.dies_after is not None and self.answered > self.dies_after
            first_of_the_dead = dead and self.answered == (self.dies_after or 0) + 1
        if first_of_the_dead:
            self.stop()
        return Answer(closes=True) if dead else Answer(body=self.completions(body))

    def completions(self, body: dict[str, Any]) -> dict[str, Any]:
        """A proper answer."""
        chat = "messages" in body
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        count = min(body.get("n", 1), self.most_choices or 1000)
        choices, total = [], 0
        for place in range(count):
            text = f"{prompt}|{body.get('seed')}|{place}"
            total += len(text)
            logps = [-0.5 * (i + 1) for i in range(len(text))]
            choice: dict[str, Any] = {
                "index": place,
                "finish_reason": "length" if prompt.endswith("long") else "stop",
                **({"message": {"role": "assistant", "content": text}} if chat else {"text": text}),
            }
            if body.get("logprobs"):
                content = [{"token": letter, "logprob": logp} for letter, logp in zip(text, logps, strict=True)]
                choice["logprobs"] = {"content": content} if chat else {"token_logprobs": logps}
            choices.append(choice)
        return {"choices": choices, **({"usage": {"completion_tokens": total}} if self.usage else {})}


class _Server(ThreadingHTTPServer):
    block_on_close = False
    # With the usual five, a sixth connection at a time waits a second for its next try.
    request_queue_size = 64


def refusal(status: int, message: str) -> Answer:
    """An error as OpenAI words it."""
    return Answer(status, {"error": {"message": message, "type": "invalid_request_error"}})
