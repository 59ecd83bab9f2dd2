"""Asking servers that answer, that answer less than they were asked, that fail for a while, and that fail for good."""

import os
import signal
import threading
from collections.abc import Iterator
from email.message import Message
from typing import Any

import pytest
from completion_server import Answer, CompletionServer, refusal

from trimtab.errors import InputError, RunError
from trimtab.policy.completions import Completion, Prompt
from trimtab.policy.openai import Endpoint, EndpointCompleter, waiting_time
from trimtab.policy.openai_messages import parse_choices, request_url, retry_after, share_out
from trimtab.policy.sampler import SamplingParams
from trimtab.seeds import derive_seed

PROMPTS = [Prompt("one"), Prompt("two"), Prompt("three long")]
PARAMS = SamplingParams(temperature=0.7, max_tokens=50)
KEY = "sk-very-secret-key"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No key and no proxy of whoever runs the tests."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name == "OPENAI_API_KEY":
            monkeypatch.delenv(name)
    yield


def completer(server: CompletionServer, **changes: Any) -> EndpointCompleter:
    settings: dict[str, Any] = {"retries": 3, "first_wait": 0.001, "timeout": 20, **changes}
    return EndpointCompleter(Endpoint(server.url, "tiny", **settings))


def texts(completions: list[list[Completion]]) -> list[list[str]]:
    return [[completion.text for completion in group] for group in completions]


def seed_of(row: int, seed: int = 5) -> int:
    return derive_seed(seed, row) % 2**31


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_every_prompt_gets_its_completions_in_order_from_either_interface(api: str) -> None:
    with CompletionServer() as server:
        found = completer(server, api=api, concurrency=3).complete(PROMPTS, 2, PARAMS, 5, first_row=10)
    assert texts(found) == [
        [f"{prompt.content}|{seed_of(10 + 2 * place)}|{sample}" for sample in range(2)]
        for place, prompt in enumerate(PROMPTS)
    ]
    assert [[c.truncated for c in group] for group in found] == [[False] * 2, [False] * 2, [True] * 2]
    assert all(c.token_ids is c.logps is c.entropy is None for group in found for c in group)
    bodies = {str(seen.body.get("prompt") or seen.body["messages"]): seen.body for seen in server.seen}
    message = "one" if api == "completions" else str([{"role": "user", "content": "one"}])
    path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
    assert {seen.path for seen in server.seen} == {path} and len(server.seen) == 3
    assert {k: v for k, v in bodies[message].items() if k not in ("prompt", "messages")} == {
        "model": "tiny",
        "temperature": 0.7,
        "max_tokens": 50,
        "n": 2,
        "seed": seed_of(10),
    }


def test_messages_go_as_they_are_to_the_chat_and_are_refused_by_the_plain_interface() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}]
    with CompletionServer() as server:
        completer(server).complete([Prompt(messages)], 1, PARAMS, 5)
        with pytest.raises(InputError, match="use `chat`"):
            completer(server, api="completions").complete([Prompt(messages)], 1, PARAMS, 5)
    assert [seen.body["messages"] for seen in server.seen] == [messages]


def test_settings_at_their_neutral_value_are_not_sent_and_others_are() -> None:
    params = SamplingParams(temperature=0, top_p=0.9, top_k=20, max_tokens=8, min_tokens=2)
    with CompletionServer() as server:
        completer(server).complete(PROMPTS[:1], 1, params, 5)
        completer(server).complete(PROMPTS[:1], 1, SamplingParams(), 5)
    full, plain = (seen.body for seen in server.seen)
    assert (full["temperature"], full["top_p"], full["top_k"], full["min_tokens"]) == (0, 0.9, 20, 2)
    assert not {"n", "top_p", "top_k", "min_tokens", "logprobs"} & set(plain)


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_log_probabilities_come_when_asked_for_and_count_the_tokens(api: str) -> None:
    with CompletionServer(usage=False) as server:
        found = completer(server, api=api, logprobs=True).complete([Prompt("a")], 2, PARAMS, 5)
    for completion in found[0]:
        assert completion.tokens == len(completion.text)
        assert completion.logps == [-0.5 * (i + 1) for i in range(len(completion.text))]


def test_the_tokens_of_one_choice_are_those_of_the_usage_and_none_are_made_up_without_it() -> None:
    for usage in (True, False):
        with CompletionServer(usage=usage) as server:
            (group,) = completer(server).complete([Prompt("abc")], 1, PARAMS, 5)
        assert [c.tokens for c in group] == ([len(group[0].text)] if usage else [None])


def test_the_usage_of_several_choices_is_a_total_and_is_shared_out() -> None:
    with CompletionServer() as server:
        (group,) = completer(server).complete([Prompt("abc")], 3, PARAMS, 5)
    assert sum(c.tokens or 0 for c in group) == sum(len(c.text) for c in group)
    assert max(c.tokens or 0 for c in group) < sum(len(c.text) for c in group)
    assert share_out(100, [99, 299]) == share_out(100, [0, 2]) == [25, 75]
    for total, weights in [(7, [0, 0, 0]), (0, [5, 5]), (1000, [1, 998, 3, 0]), (5, [1])]:
        shares = share_out(total, weights)
        assert sum(shares) == total and len(shares) == len(weights) and min(shares) >= 0


@pytest.mark.parametrize("most", [1, 2])
def test_choices_that_an_answer_lacks_are_asked_for_again_each_with_the_seed_of_its_row(most: int) -> None:
    with CompletionServer(most_choices=most) as server:
        saved: dict[int, list[Completion]] = {}
        found = completer(server).complete(PROMPTS, 5, PARAMS, 5, on_done=saved.__setitem__)
    rows = range(0, 5, most)
    expected = [f"one|{seed_of(row)}|{place}" for row in rows for place in range(min(most, 5 - row))]
    assert texts(found)[0] == expected
    assert [saved[place] for place in range(3)] == found
    if most == 1:
        asked = sorted(seen.body.get("n", 1) for seen in server.seen)
        assert asked.count(1) >= len(PROMPTS) * 5 - completer(server).endpoint.concurrency, (
            "it learns that n is ignored"
        )


def test_a_server_that_refuses_several_choices_is_asked_for_one_at_a_time() -> None:
    with CompletionServer(refuses=["n"]) as server:
        found = completer(server, concurrency=1).complete(PROMPTS, 3, PARAMS, 5)
    assert texts(found)[1] == [f"two|{seed_of(row)}|0" for row in (3, 4, 5)]
    assert len(server.seen) == 1 + 9


@pytest.mark.parametrize("key", ["seed", "logprobs", "max_tokens"])
def test_a_key_that_the_server_does_not_take_is_left_out_from_then_on(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with CompletionServer(refuses=[key]) as server:
        found = completer(server, concurrency=1, logprobs=True).complete(PROMPTS, 1, PARAMS, 5)
    assert [len(group) for group in found] == [1, 1, 1]
    assert [key in seen.body for seen in server.seen] == [True, False, False, False]
    assert ("max_completion_tokens" in server.seen[-1].body) == (key == "max_tokens")
    assert len([record for record in caplog.records if f"takes no {key}" in record.message]) == (key != "max_tokens")


TROUBLES = {
    "429": [Answer(429, b"slow down", {"Retry-After": "0"})],
    "500 twice": [Answer(500), Answer(500)],
    "503 with a page": [Answer(503, b"<html>busy</html>")],
    "closed": [Answer(closes=True)],
    "malformed": [Answer(body=b'{"choices": [{"text"')],
    "a page": [Answer(body=b"<html>hello</html>")],
    "no choices": [Answer(body={"choices": []})],
    "an error that calls itself fine": [Answer(body={"error": {"message": "upstream is busy"}})],
    "not an object": [Answer(body=b"[1]")],
    "torn": [Answer(body=b"{}", headers={"Content-Length": "100"})],
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_trouble_that_passes_costs_nothing_but_one_warning(trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    with CompletionServer(TROUBLES[trouble]) as server:
        found = completer(server, concurrency=1).complete(PROMPTS, 1, PARAMS, 5)
    assert texts(found) == [[f"{p.content}|{seed_of(row)}|0"] for row, p in enumerate(PROMPTS)]
    assert len(server.seen) == len(PROMPTS) + len(TROUBLES[trouble])
    assert ["trying again" in record.message for record in caplog.records] == [True], "told once"


def test_a_server_without_a_word_is_asked_again_after_the_time_out() -> None:
    with CompletionServer([Answer(hangs=True)]) as server:
        found = completer(server, timeout=0.2).complete(PROMPTS[:1], 1, PARAMS, 5)
        assert server.hanging.is_set() and not server.released.is_set()
        assert texts(found) == [[f"one|{seed_of(0)}|0"]]
        server.script = [Answer(hangs=True)] * 2
        with pytest.raises(RunError, match=r"no answer within 0.2 s \(try 2 of 2\); 0 of 1 prompts"):
            completer(server, timeout=0.2, retries=1).complete(PROMPTS[:1], 1, PARAMS, 5)


def test_a_trouble_that_stays_ends_with_the_address_and_what_was_done() -> None:
    with CompletionServer([None, *[Answer(500, b'{"error": "out of\\n memory"}')] * 4]) as server:
        saved: dict[int, list[Completion]] = {}
        with pytest.raises(RunError) as caught:
            completer(server, concurrency=1).complete(PROMPTS, 1, PARAMS, 5, on_done=saved.__setitem__)
    assert str(caught.value) == (
        f"{server.url}/v1/chat/completions: the server answers 500 (out of memory) (try 4 of 4); "
        "1 of 3 prompts were completed"
    )
    assert list(saved) == [0]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_what_a_server_completed_before_it_died_is_kept(concurrency: int) -> None:
    prompts = [Prompt(str(number)) for number in range(12)]
    with CompletionServer(dies_after=5) as server:
        saved: dict[int, list[Completion]] = {}
        with pytest.raises(RunError, match=rf"{server.url}/.*; 5 of 12 prompts were completed"):
            completer(server, concurrency=concurrency).complete(prompts, 2, PARAMS, 5, on_done=saved.__setitem__)
    assert len(saved) == 5
    for place, group in saved.items():
        assert [c.text for c in group] == [f"{place}|{seed_of(2 * place)}|{sample}" for sample in range(2)]


def test_a_server_that_is_not_there_is_named() -> None:
    with CompletionServer() as server:
        pass
    with pytest.raises(RunError, match=r"the connection failed \(Connection refused\) \(try 4 of 4\); 0 of 3"):
        completer(server).complete(PROMPTS, 1, PARAMS, 5)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 501])
def test_a_refusal_is_told_at_once_in_the_servers_words(status: int) -> None:
    with CompletionServer([None, refusal(status, "no,\nnot this")]) as server:
        saved: dict[int, list[Completion]] = {}
        with pytest.raises(InputError) as caught:
            completer(server, concurrency=1).complete(PROMPTS, 1, PARAMS, 5, on_done=saved.__setitem__)
    assert len(server.seen) == 2 and list(saved) == [0]
    start = f"{server.url}/v1/chat/completions: the request for prompt 2 of 3 is refused ({status}: no, not this)"
    assert str(caught.value).startswith(start)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed_and_its_target_is_told(status: int) -> None:
    with CompletionServer() as server:
        server.script = [Answer(status, headers={"Location": f"{server.url}/elsewhere"})]
        with pytest.raises(InputError, match=rf"\({status}: {server.url}/elsewhere\)"):
            completer(server).complete(PROMPTS[:1], 1, PARAMS, 5)
    assert len(server.seen) == 1


@pytest.mark.parametrize("header", ["100000", "Fri, 31 Dec 2999 23:59:59 GMT"])
def test_a_pause_longer_than_a_run_should_wait_is_a_failure(header: str) -> None:
    full = Answer(429, b"quota used up", {"Retry-After": header})
    told = pytest.raises(RunError, match=r"429 \(quota used up\) and asks for a pause of \d+ s")
    with CompletionServer([full]) as server, told:
        completer(server).complete(PROMPTS[:1], 1, PARAMS, 5)
    assert len(server.seen) == 1


def test_the_wait_doubles_has_a_limit_and_is_never_shorter_than_the_server_asks() -> None:
    for failures, longest in [(1, 2.0), (2, 4.0), (4, 16.0), (30, 60.0)]:
        waits = {waiting_time(failures, 0.0, 2.0) for _ in range(50)}
        assert longest / 2 <= min(waits) < max(waits) <= longest
    assert waiting_time(1, 7.5, 2.0) == 7.5
    for value, asked in [("3", 3.0), ("0.5", 0.5), ("-1", 0.0), ("soon", 0.0), ("Mon, 01 Jan 2001 00:00:00 GMT", 0.0)]:
        headers = Message()
        headers["retry-after"] = value
        assert retry_after(headers) == asked
    assert retry_after(Message()) == 0.0


def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with CompletionServer(key=KEY) as server:
        with pytest.raises(InputError, match="set the environment variable OPENAI_API_KEY"):
            completer(server).complete(PROMPTS, 1, PARAMS, 5)
        monkeypatch.setenv("MY_KEY", KEY + "\n")
        assert len(completer(server, key_variable="MY_KEY").complete(PROMPTS, 1, PARAMS, 5)) == 3
        monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong-key")
        with pytest.raises(InputError, match="check the key in OPENAI_API_KEY") as refused:
            completer(server, concurrency=1).complete(PROMPTS, 1, PARAMS, 5)
        assert "provided: ***" in str(refused.value) and "wrong-key" not in str(refused.value)
        server.script = [Answer(500, f"you sent {KEY}".encode()), Answer(body=f"<p>{KEY}</p>".encode())] * 2
        with pytest.raises(RunError) as failed:
            completer(server, key_variable="MY_KEY").complete(PROMPTS[:1], 1, PARAMS, 5)
        assert "***" in str(failed.value) and KEY not in str(failed.value)
    assert len(caplog.records) >= 3 and KEY not in caplog.text
    assert not server.seen[0].headers.get("Authorization")


def test_a_key_that_is_named_must_be_set_and_look_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with CompletionServer() as server:
        with pytest.raises(InputError, match="MY_KEY is not set"):
            completer(server, key_variable="MY_KEY")
        for value in ("two words", "schlüssel"):
            monkeypatch.setenv("MY_KEY", value)
            with pytest.raises(InputError, match="MY_KEY holds is not a key") as caught:
                completer(server, key_variable="MY_KEY")
            assert value not in str(caught.value)


def test_the_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with CompletionServer() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        endpoint = Endpoint("http://model.example:8000", "tiny", retries=0)
        assert len(EndpointCompleter(endpoint).complete(PROMPTS, 1, PARAMS, 5)) == 3
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with CompletionServer() as server:
            completer(server).complete(PROMPTS[:1], 1, PARAMS, 5)
    assert {seen.path for seen in proxy.seen} == {"http://model.example:8000/v1/chat/completions"}
    assert len(proxy.seen) == 3 and len(server.seen) == 1


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1/chat/completions"),
        ("http://localhost:8000/", "http://localhost:8000/v1/chat/completions"),
        (" https://api.example/v1/ ", "https://api.example/v1/chat/completions"),
        ("https://api.example/openai", "https://api.example/openai/v1/chat/completions"),
        ("https://api.example/v1/chat/completions", "https://api.example/v1/chat/completions"),
        ("https://api.example/v1/completions", "https://api.example/v1/chat/completions"),
        ("https://api.example/v1beta/openai/", "https://api.example/v1beta/openai/chat/completions"),
        ("http://[::1]:8000", "http://[::1]:8000/v1/chat/completions"),
    ],
)
def test_an_address_may_come_with_or_without_its_version(url: str, expected: str) -> None:
    assert request_url(url, "chat") == expected
    assert request_url(url, "completions") == expected.replace("/chat", "")


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host/v1", "http://", "http://host:port/v1", "http://[::1", "h"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InputError, match=r"endpoint.url: .* is not the address of a server"):
        request_url(url, "chat")


def test_a_password_in_the_address_is_refused_and_not_shown() -> None:
    with pytest.raises(InputError, match="environment variable") as caught:
        request_url("https://me:hunter2@api.example/v1", "chat")
    assert "hunter2" not in str(caught.value)


def test_no_more_requests_run_at_a_time_than_allowed() -> None:
    prompts = [Prompt(str(number)) for number in range(40)]
    with CompletionServer() as server:
        assert len(completer(server, concurrency=3).complete(prompts, 1, PARAMS, 5)) == 40
    assert server.most_running <= 3 and len(server.seen) == 40


def test_no_prompts_are_no_requests() -> None:
    with CompletionServer() as server:
        assert completer(server).complete([], 4, PARAMS, 5) == []
    assert not server.seen


def test_an_interrupt_does_not_wait_for_the_server_and_keeps_what_is_done() -> None:
    before = set(threading.enumerate())
    with CompletionServer([None, Answer(hangs=True)]) as server:

        def interrupt() -> None:
            server.hanging.wait(20)
            os.kill(os.getpid(), signal.SIGINT)

        saved: dict[int, list[Completion]] = {}
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            completer(server, concurrency=1, timeout=600).complete(PROMPTS, 1, PARAMS, 5, on_done=saved.__setitem__)
        assert not server.released.is_set(), "the server still hangs"
        assert list(saved) == [0]
        assert all(thread.daemon for thread in set(threading.enumerate()) - before), "nothing keeps the process alive"


def test_an_error_of_the_caller_comes_through_and_ends_the_work() -> None:
    def fails(place: int, completions: list[Completion]) -> None:
        raise OSError("the disk is full")

    with CompletionServer() as server, pytest.raises(OSError, match="disk is full"):
        completer(server).complete(PROMPTS, 1, PARAMS, 5, on_done=fails)


def test_an_empty_content_is_an_empty_completion() -> None:
    raw = b'{"choices": [{"message": {"content": null}, "finish_reason": "length"}], "usage": {"completion_tokens": 9}}'
    assert parse_choices(raw, "chat") == [Completion("", True, 9)]


def test_log_probabilities_with_a_gap_are_none_and_the_tokens_come_from_the_count() -> None:
    raw = (
        b'{"choices": [{"text": "4", "finish_reason": "stop", "logprobs": {"token_logprobs": [null, -1.0]}}],'
        b' "usage": {"completion_tokens": 3}}'
    )
    assert parse_choices(raw, "completions") == [Completion("4", False, 3)]
