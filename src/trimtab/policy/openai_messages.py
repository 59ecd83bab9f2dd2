"""Addresses, requests and answers of OpenAI's interface as plain data: no connection is opened here."""

from __future__ import annotations

import json
import time
import urllib.parse
from collections.abc import Sequence
from email.message import Message
from email.utils import parsedate_to_datetime
from itertools import pairwise
from typing import Any, Literal

from trimtab.errors import InputError
from trimtab.policy.completions import Completion, Prompt
from trimtab.policy.sampler import SamplingParams

Api = Literal["chat", "completions"]

LARGEST_SEED = (1 << 31) - 1
"""Some servers keep the seed in 32 bits."""


def request_url(url: str, api: Api) -> str:
    """Where requests go, from an address with or without /v1 (or any /v2beta, /v1/account/...) at its end.

    Raises:
        InputError: it is no http address, or holds a user name or password.
    """
    try:
        parts = urllib.parse.urlsplit(url.strip())
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        if not usable or parts.query or parts.fragment:
            raise ValueError
    except ValueError as error:
        raise InputError(
            f"endpoint.url: {url!r} is not the address of a server; write it like http://localhost:8000/v1"
        ) from error
    if parts.username or parts.password:
        raise InputError("endpoint.url: the address holds a password; put the key into an environment variable instead")
    path = parts.path.rstrip("/")
    for ending in ("/chat/completions", "/completions"):
        path = path.removesuffix(ending)
    if not any(step[:1] == "v" and step[1:2].isdigit() for step in path.split("/")):
        path += "/v1"
    return parts._replace(path=path + ("/chat/completions" if api == "chat" else "/completions")).geturl()


def request_body(
    model: str,
    prompt: Prompt,
    params: SamplingParams,
    *,
    api: Api,
    n: int,
    seed: int,
    logprobs: bool,
    without: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """The JSON of a request; settings at their neutral value stay out, since not every server knows them all.

    Args:
        model: the server's name of it.
        prompt: a string becomes one user message in `chat`.
        params: top_k and min_tokens are not OpenAI's own; vLLM, SGLang and llama.cpp take them.
        api: which of the two interfaces.
        n: choices to ask for.
        seed: any non-negative number; its lowest 31 bits are sent.
        logprobs: of the sampled tokens.
        without: keys that the server has refused.

    Raises:
        InputError: messages for the plain interface.
    """
    body: dict[str, Any] = {"model": model, "temperature": params.temperature}
    if api == "chat":
        content = prompt.content
        body["messages"] = [{"role": "user", "content": content}] if isinstance(content, str) else content
    elif isinstance(prompt.content, str):
        body["prompt"] = prompt.content
    else:
        raise InputError("endpoint.api: the prompts are messages, and `completions` takes plain text; use `chat`")
    body["max_completion_tokens" if "max_tokens" in without else "max_tokens"] = params.max_tokens
    neutral = {"n": 1, "top_p": 1.0, "top_k": 0, "min_tokens": 0}
    given = {"n": n, "top_p": params.top_p, "top_k": params.top_k, "min_tokens": params.min_tokens}
    body.update({key: value for key, value in given.items() if value != neutral[key]})
    optional: dict[str, Any] = {"seed": seed & LARGEST_SEED}
    if logprobs:
        optional["logprobs"] = True if api == "chat" else 1
    body.update({key: value for key, value in optional.items() if key not in without})
    return body


def parse_choices(raw: bytes, api: Api) -> list[Completion]:
    """The completions in an answer, at least one.

    Tokens are counted by the log-probabilities when they are there; else by `usage`, which is a total over the choices
    and is shared out by length of text where there are several, so that their sum is right.

    Raises:
        ValueError: it is not an answer of this interface; says what it is.
    """
    try:
        answer = json.loads(raw)
        choices = [_choice(choice, api) for choice in answer["choices"]]
        if not choices:
            raise ValueError
        usage = answer.get("usage") or {}
        total = usage.get("completion_tokens")
        shares: Sequence[int | None] = [None] * len(choices)
        if isinstance(total, int):
            shares = share_out(total, [len(text) for text, _, _ in choices])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the answer holds no completion ({what_it_said(raw)})") from error
    return [
        Completion(text, truncated, share if logps is None else len(logps), logps=logps)
        for (text, truncated, logps), share in zip(choices, shares, strict=True)
    ]


def share_out(total: int, weights: Sequence[int]) -> list[int]:
    """Whole numbers that add up to the total, as near to proportional to the weights as that allows."""
    weights = [weight + 1 for weight in weights]  # an empty text has an end token too
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + weight)
    edges = [(total * bound) // bounds[-1] for bound in bounds]
    return [end - start for start, end in pairwise(edges)]


def retry_after(headers: Message) -> float:
    """Seconds that an answer's Retry-After asks for, in numbers or as a date; 0 without one."""
    value = headers.get("Retry-After", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


def what_it_said(raw: bytes, limit: int = 300) -> str:
    """The message in an answer, on one line: an error's own words when it is JSON, else its beginning."""
    text = raw.decode("utf-8", errors="replace")
    try:
        said = json.loads(text)
        for key in ("error", "message", "detail"):
            if isinstance(said, dict) and said.get(key):
                said = said[key]
        text = said if isinstance(said, str) else json.dumps(said)
    except ValueError:
        pass
    text = " ".join(text.split())
    return text if len(text) <= limit else text[:limit] + "..."


def _choice(choice: dict[str, Any], api: Api) -> tuple[str, bool, list[float] | None]:
    """(text, truncated, log-probabilities) of one choice."""
    text = choice["message"]["content"] if api == "chat" else choice["text"]
    if not isinstance(text, str | None):
        raise TypeError
    told = choice.get("logprobs") or {}
    logps: list[float] | None = told.get("token_logprobs")
    if logps is not None and None in logps:  # Some servers have none for the first token.
        logps = None
    if told.get("content"):
        logps = [float(token["logprob"]) for token in told["content"]]
    return text or "", choice.get("finish_reason") == "length", logps
