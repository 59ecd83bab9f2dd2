"""Completions from a server with OpenAI's interface (`/v1/chat/completions`, `/v1/completions`), local or remote.

Several requests run at a time, each in a thread. A failure that may pass (429, 5xx, a broken or silent connection, an
answer that is no answer) is tried again after a wait that doubles; a request that the server refuses is not. Where a
server gives fewer choices than asked, or refuses to give several, the rest is asked for one by one.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import queue
import random
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trimtab.errors import InputError, RunError
from trimtab.policy.completions import Completion, OnDone, Prompt
from trimtab.policy.openai_messages import Api, parse_choices, request_body, request_url, retry_after, what_it_said
from trimtab.policy.sampler import SamplingParams
from trimtab.seeds import derive_seed

logger = logging.getLogger("trimtab")

DEFAULT_KEY_VARIABLE = "OPENAI_API_KEY"
PASSING_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
WIDEST_BACKOFF = 60.0
LONGEST_WAIT = 900.0
"""Seconds; a server that asks for a longer pause is out of order for this run."""


@dataclass(frozen=True)
class Endpoint:
    """A server and how to treat it.

    Attributes:
        url: its address, with or without /v1.
        model: the server's name of the model.
        api: `chat` sends messages, `completions` plain text.
        key_variable: environment variable that holds the key; the default one may be unset, for servers that need none.
        concurrency: requests at a time.
        timeout: seconds without a byte after which a request has failed.
        retries: tries after the first, each for a failure that may pass.
        first_wait: seconds before the second try, doubled before each further one.
        logprobs: ask for the tokens' log-probabilities too.
    """

    url: str
    model: str
    api: Api = "chat"
    key_variable: str = DEFAULT_KEY_VARIABLE
    concurrency: int = 8
    timeout: float = 300.0
    retries: int = 5
    first_wait: float = 2.0
    logprobs: bool = False


class EndpointCompleter:
    """Completes by asking a server. Proxies are those of the environment (HTTPS_PROXY, NO_PROXY)."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Nothing is sent yet.

        Raises:
            InputError: the address is none, or the named key is not set.
        """
        self.endpoint = endpoint
        self.url = request_url(endpoint.url, endpoint.api)
        self._key = _read_key(endpoint.key_variable)
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._refused: set[str] = set()
        self._one_each = False
        self._last_trouble = ""

    def complete(
        self,
        prompts: Sequence[Prompt],
        n: int,
        params: SamplingParams,
        seed: int,
        *,
        first_row: int = 0,
        on_done: OnDone | None = None,
    ) -> list[list[Completion]]:
        """See `Completer`; a request's seed is derived from the seed and its first completion's row.

        Raises:
            InputError: the server refuses a request for good; says what the server said.
            RunError: a failure did not pass; says how many prompts were completed.
        """
        pieces: queue.PriorityQueue[_Piece] = queue.PriorityQueue()
        answers: queue.SimpleQueue[tuple[_Piece, list[Completion] | Exception]] = queue.SimpleQueue()
        stop = threading.Event()

        def work() -> None:
            while (piece := pieces.get()) != _END and not stop.is_set():
                if self._one_each and piece.wanted > 1:
                    pieces.put(piece.after(1))
                    piece = piece._replace(wanted=1)
                row = first_row + piece.prompt * n + piece.sample
                try:
                    given = self._ask(prompts[piece.prompt], piece.wanted, params, derive_seed(seed, row), stop)
                except Exception as error:
                    stop.set()
                    answers.put((piece, error))
                    return
                if len(given) < piece.wanted:
                    self._one_each |= len(given) == 1
                    pieces.put(piece.after(len(given)))
                answers.put((piece, given))

        for place in range(len(prompts)):
            pieces.put(_Piece(place, 0, n))
        # Daemons, because a thread that waits for a server can be told nothing: they must not keep a process alive.
        workers = [
            threading.Thread(target=work, daemon=True) for _ in range(min(self.endpoint.concurrency, n * len(prompts)))
        ]
        for worker in workers:
            worker.start()
        found: list[dict[int, Completion]] = [{} for _ in prompts]
        failure: tuple[_Piece, Exception] | None = None
        done = 0
        try:
            while done < len(prompts) and not (failure and answers.empty()):
                piece, answer = answers.get()
                if isinstance(answer, Exception):
                    failure = failure or (piece, answer)
                    continue
                rows = found[piece.prompt]
                rows.update(enumerate(answer, start=piece.sample))
                if len(rows) == n:
                    done += 1
                    if on_done:
                        on_done(piece.prompt, [rows[sample] for sample in range(n)])
        finally:
            stop.set()
            for _ in workers:
                pieces.put(_END)
        if failure:
            raise self._explained(*failure, done, len(prompts))
        return [[rows[sample] for sample in range(n)] for rows in found]

    def _ask(
        self, prompt: Prompt, count: int, params: SamplingParams, seed: int, stop: threading.Event
    ) -> list[Completion]:
        """At least one and at most `count` completions."""
        failures = 0
        while True:
            body = request_body(
                self.endpoint.model,
                prompt,
                params,
                api=self.endpoint.api,
                n=1 if self._one_each else count,
                seed=seed,
                logprobs=self.endpoint.logprobs,
                without=frozenset(self._refused),
            )
            try:
                return parse_choices(self._post(body), self.endpoint.api)[:count]
            except _Refusal as refusal:
                if refusal.status not in (400, 422) or not self._give_in(body, refusal.said):
                    raise
            except (_Passing, ValueError) as error:
                failure = error if isinstance(error, _Passing) else _Passing(self._without_key(str(error)))
                failures += 1
                wait = waiting_time(failures, failure.asked, self.endpoint.first_wait)
                if failures > self.endpoint.retries or wait > LONGEST_WAIT:
                    asks = f" and asks for a pause of {wait:.0f} s" if wait > LONGEST_WAIT else ""
                    raise _Passing(f"{failure}{asks} (try {failures} of {self.endpoint.retries + 1})") from error
                # Every thread meets the same trouble again and again; a person is told once.
                if str(failure) != self._last_trouble:
                    self._last_trouble = str(failure)
                    logger.warning("%s: %s; trying again in %.1f s", self.url, failure, wait)
                if stop.wait(wait):
                    raise failure from error

    def _post(self, body: dict[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json", "User-Agent": "trimtab"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        try:
            with self._opener.open(request, timeout=self.endpoint.timeout) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            with error:
                said = what_it_said(_rest_of(error)) or error.headers.get("Location") or str(error.reason)
            said = self._without_key(said)
            if error.code in PASSING_STATUSES:
                raise _Passing(f"the server answers {error.code} ({said})", retry_after(error.headers)) from error
            raise _Refusal(error.code, said) from error
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(cause, ssl.SSLCertVerificationError):
                raise _Refusal(0, f"its certificate is not accepted: {cause.verify_message}") from error
            if isinstance(cause, TimeoutError):
                raise _Passing(f"no answer within {self.endpoint.timeout:g} s") from error
            raise _Passing(f"the connection failed ({_plain(cause)})") from error

    def _give_in(self, body: Mapping[str, Any], said: str) -> bool:
        """Leave out what this server does not take, if that is what it says; True when there is something to try."""
        for key, word in (("max_tokens", "max_completion_tokens"), ("seed", "seed"), ("logprobs", "logprobs")):
            if key in body and word in said:
                if key not in self._refused and key != "max_tokens":
                    logger.warning("%s takes no %s; going on without (%s)", self.url, key, said)
                self._refused.add(key)
                return True
        if body.get("n", 1) > 1:
            self._one_each = True
            return True
        return False

    def _explained(self, piece: _Piece, error: Exception, done: int, prompts: int) -> Exception:
        if isinstance(error, _Passing):
            return RunError(f"{self.url}: {error}; {done} of {prompts} prompts were completed")
        if not isinstance(error, _Refusal):
            return error
        hint = ""
        if error.status in (401, 403):
            variable = self.endpoint.key_variable
            hint = f"; check the key in {variable}" if self._key else f"; set the environment variable {variable}"
        elif error.status == 404:
            hint = "; check the address and the model's name"
        status = f"{error.status}: " if error.status else ""
        which = f"the request for prompt {piece.prompt + 1} of {prompts}"
        return InputError(f"{self.url}: {which} is refused ({status}{error.said}){hint}")

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def waiting_time(failures: int, asked: float, first_wait: float) -> float:
    """Seconds to wait after so many failures: twice as long each time, less a random half at most.

    Never shorter than the server asked for (`asked`, its Retry-After); the random part keeps clients apart.
    """
    backoff = min(WIDEST_BACKOFF, first_wait * 2 ** (failures - 1))
    return max(asked, backoff * random.uniform(0.5, 1.0))


class _Piece(NamedTuple):
    """Completions of one prompt that one request asks for; smaller ones go first."""

    prompt: int
    sample: int
    wanted: int

    def after(self, given: int) -> _Piece:
        return _Piece(self.prompt, self.sample + given, self.wanted - given)


_END = _Piece(-1, 0, 0)
"""Goes before everything else and ends a worker."""


class _Passing(Exception):
    """A failure that may pass; `asked` is the pause the server asked for, seconds."""

    def __init__(self, reason: str, asked: float = 0.0) -> None:
        super().__init__(reason)
        self.asked = asked


class _Refusal(Exception):
    """A request that will be refused again."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status
        self.said = said


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirected POST would become a GET, and would carry the key to another place."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _read_key(variable: str) -> str:
    key = os.environ.get(variable, "").strip()
    if not key and variable != DEFAULT_KEY_VARIABLE:
        raise InputError(f"endpoint.key_variable: the environment variable {variable} is not set")
    if not key.isascii() or any(letter.isspace() for letter in key):
        raise InputError(f"endpoint.key_variable: what the environment variable {variable} holds is not a key")
    return key


def _rest_of(error: urllib.error.HTTPError) -> bytes:
    try:
        return error.read(65536)
    except (OSError, http.client.HTTPException):
        return b""


def _plain(cause: object) -> str:
    text = (isinstance(cause, OSError) and cause.strerror) or str(cause) or type(cause).__name__
    return " ".join(text.split())
