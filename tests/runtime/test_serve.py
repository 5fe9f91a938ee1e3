"""The HTTP server, through a real socket and OpenAI's own client."""

import asyncio
import contextlib
import json
import re
import socket
import threading
import time

import httpx2 as httpx
import openai
import pytest
import uvicorn
from scripted import ScriptedRuntime, tiny

from smi.protocol.payloads import act_payload, loads
from smi.protocol.stream import Block
from smi.protocol.tokens import BlockType
from smi.runtime.connections import SPARE_CONNECTIONS, bounded_connections
from smi.runtime.openai_reply import Message
from smi.runtime.server import Settings, create_app
from smi.runtime.session import Runtime
from smi.tokenizer import load_tokenizer

THINK, OUT, ACT = BlockType.THINK, BlockType.OUT, BlockType.ACT
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "strict": True}}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("compact")


@contextlib.contextmanager
def serving(runtime, send_buffer=None, connections=None, **settings):
    """The address of a server in a thread."""
    app = create_app(runtime, Settings(**{"model": "tiny", "max_tokens": 400, **settings}))
    http = bounded_connections(settings.get("receive", 30.0))
    server = uvicorn.Server(
        uvicorn.Config(
            app, port=0, log_level="warning", timeout_graceful_shutdown=2, limit_concurrency=connections, http=http
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        listener = server.servers[0].sockets[0]
        if send_buffer is not None:
            # its connections inherit it
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        port = listener.getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
    assert runtime.pool.free_slots == runtime.pool.capacity
    assert all(runtime.pool.is_clear(slot) for slot in range(runtime.pool.capacity))


def said(session):
    """What the session was told last."""
    return session.transmissions[-1].blocks[-1].text


def answer(session):
    """A model that does what it is told: `think ...`, `call {name arguments}...`, anything else is repeated."""
    blocks = []
    for line in said(session).split("\n"):
        word, _, rest = line.partition(" ")
        if word == "think":
            blocks.append(Block(THINK, rest))
        elif word == "call":
            id, name, arguments = rest.split(" ", 2)
            blocks.append(Block(ACT, act_payload(id, name, arguments)))
        elif word == "raw":
            blocks.append(Block(ACT, rest))
        else:
            blocks.append(Block(OUT, line))
    return blocks


@pytest.fixture(scope="module")
def server(tokenizer):
    with serving(ScriptedRuntime(tokenizer, answer, capacity=8)) as address:
        yield address


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, *messages, **settings):
    messages = [m if isinstance(m, dict) else {"role": "user", "content": m} for m in messages]
    return client.chat.completions.create(model="tiny", messages=messages, **{"temperature": 0, **settings})


def metric(server, name):
    text = httpx.get(f"{server}/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def test_an_answer_with_its_reasoning_and_usage(client):
    reply = ask(client, {"role": "system", "content": "Be brief."}, "think hm\nHej, 世界!")
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content, message.tool_calls) == ("Hej, 世界!", "hm", None)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens_details.reasoning_tokens == 4
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_parallel_calls_and_their_results(client):
    first = ask(
        client,
        'think two\nI look.\ncall c1 weather {"city":"Oslo"}\ncall c2 clock {}',
        tools=[WEATHER, CLOCK],
    ).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "I look."
    calls = first.message.tool_calls
    assert [(c.id, c.type, c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("c1", "function", "weather", {"city": "Oslo"}),
        ("c2", "function", "clock", {}),
    ]
    results = [{"role": "tool", "tool_call_id": c.id, "content": "4"} for c in calls]
    second = ask(
        client,
        'think two\nI look.\ncall c1 weather {"city":"Oslo"}\ncall c2 clock {}',
        first.message.model_dump(exclude_none=True),
        *results,
        "Well?",
        tools=[WEATHER, CLOCK],
    )
    assert second.choices[0].message.content == "Well?"
    assert second.usage.prompt_tokens_details.cached_tokens > 100


def test_deltas_join_to_the_whole(client):
    asked = 'think zwei — 世\nI look.\ncall c1 weather {"city":"Åre"}\ncall c2 clock {}'
    whole = ask(client, asked, tools=[WEATHER, CLOCK])
    chunks = list(ask(client, asked, tools=[WEATHER, CLOCK], stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    message = whole.choices[0].message
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == message.content
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == message.reasoning_content
    assert len([d for d in deltas if getattr(d, "reasoning_content", None)]) > 3
    calls = [call for d in deltas for call in d.tool_calls or ()]
    assert [call.index for call in calls] == [0, 1]
    assert [(c.id, c.function.name, c.function.arguments) for c in calls] == [
        (c.id, c.function.name, c.function.arguments) for c in message.tool_calls
    ]
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["tool_calls"]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("thoughts", [True, False])
def test_a_conversation_continues_from_its_state(server, client, tokenizer, thoughts):
    """Whether the client sends the reasoning back or not."""
    secret = f"think deep\nthe word is {'plum' if thoughts else 'pear'}"
    first = ask(client, secret)
    message = first.choices[0].message.model_dump(exclude_none=True)
    if not thoughts:
        del message["reasoning_content"]
    read = metric(server, 'smi_tokens_total{kind="read"}')
    second = ask(client, secret, message, "and now?")
    assert second.choices[0].message.content == "and now?"
    usage = second.usage
    # all but the hand-over, which the state reads with what comes next
    assert usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    new = len(tokenizer.encode("\nand now?\n")) + 1 + 2 * len([tokenizer.structural.eot, *tokenizer.encode("\n")])
    assert metric(server, 'smi_tokens_total{kind="read"}') - read == new
    # and on
    third = ask(client, secret, message, "and now?", second.choices[0].message.model_dump(exclude_none=True), "more")
    assert third.usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens


def test_another_history_starts_fresh(client):
    first = ask(client, "think one\nfresh start")
    message = first.choices[0].message.model_dump(exclude_none=True)
    for history, settings in (
        (("fresh start, changed", message), {}),
        (("think one\nfresh start", {**message, "content": "other"}), {}),
        (("think one\nfresh start", {**message, "reasoning_content": "other"}), {}),
        (("think one\nfresh start", message), {"reasoning_effort": "low"}),
        (("think one\nfresh start", message), {"tools": [CLOCK]}),
    ):
        assert ask(client, *history, "on", **settings).usage.prompt_tokens_details.cached_tokens == 0
    assert ask(client, "think one\nfresh start", message, "on").usage.prompt_tokens_details.cached_tokens > 0


def test_what_must_not_be_run_is_not_handed_out(server, client):
    before = metric(server, "smi_actions_refused_total")
    asked = 'raw {"id":"r1"\nraw {"id":"r2","type":"tool","name":"weather","arguments":{"city":"Rom"}}'
    # held to the schema, the first cannot be written: so the schema is one that decoding cannot be held to
    loose = {"type": "function", "function": {"name": "weather", "parameters": {"not": {"type": "string"}}}}
    choice = ask(client, asked, tools=[loose]).choices[0]
    assert [call.id for call in choice.message.tool_calls] == ["r2"]
    assert [refused["type"] for refused in choice.message.smi_refused_actions] == ["json"]
    assert metric(server, "smi_actions_refused_total") == before + 1
    # a pattern that an engine which backtracks would try for longer than anyone waits
    slow = {**loose["function"]["parameters"], "properties": {"city": {"pattern": "^([a-z]+)+$"}}}
    call = 'call r4 weather {"city":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"}'
    choice = ask(
        client, call, tools=[{"type": "function", "function": {"name": "weather", "parameters": slow}}]
    ).choices[0]
    assert [refused["type"] for refused in choice.message.smi_refused_actions] == ["arguments"]
    # cut by the limit
    cut = ask(client, 'call r3 weather {"city":"Rom"}', tools=[WEATHER], max_tokens=12).choices[0]
    assert cut.finish_reason == "length"
    assert cut.message.tool_calls is None
    assert [refused["type"] for refused in cut.message.smi_refused_actions] == ["unfinished"]


def test_tool_choice_and_formats_are_kept_by_decoding(client):
    call = "call c1 clock {}"
    assert ask(client, call, tools=[WEATHER, CLOCK], tool_choice="none").choices[0].message.tool_calls is None
    # the model wants to talk; the values that it has no wish for are cut short by the limit
    required = ask(client, "talk", tools=[CLOCK], tool_choice="required", max_tokens=60).choices[0].message
    assert required.content is None
    named = {"type": "function", "function": {"name": "weather"}}
    message = ask(client, call, tools=[WEATHER, CLOCK], tool_choice=named, max_tokens=300).choices[0].message
    assert not message.tool_calls or message.tool_calls[0].function.name == "weather"
    one = f"{call}\ncall c2 clock {{}}"
    assert len(ask(client, one, tools=[CLOCK], parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
        "required": ["n", "ok"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    message = ask(client, '{"n":12,"ok":true}', response_format=shape).choices[0].message
    assert loads(message.content) == {"n": 12, "ok": True}
    assert ask(client, "{}", response_format={"type": "json_object"}).choices[0].message.content == "{}"


def test_stops_efforts_and_limits(client):
    assert ask(client, "one two three", stop=[" th", "x"]).choices[0].message.content == "one two"
    assert ask(client, "one two three", max_tokens=6).choices[0].finish_reason == "length"
    quiet = ask(client, "think hard\nsay", reasoning_effort="none")
    assert quiet.usage.completion_tokens_details.reasoning_tokens == 0
    budget = {"smi_ctrl": {"reasoning": {"max_tokens": 5}}}
    assert (
        ask(client, "think hard and long\nx", extra_body=budget).usage.completion_tokens_details.reasoning_tokens <= 5
    )


BASE = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("change", "status", "param", "says"),
    [
        ({"messages": None}, 400, "messages", "missing"),
        ({"messages": "hi"}, 400, "messages", "must be a list"),
        ({"messages": []}, 400, "messages", "no messages"),
        ({"messages": ["hi"]}, 400, "messages[0]", "message object"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0]", "unknown role 'robot'"),
        ({"messages": [{"role": "user", "content": 3}]}, 400, "messages[0]", "text or a list"),
        ({"messages": [{"role": "user", "content": "x", "name": "Bo"}]}, 400, "messages[0].name", "no name"),
        ({"messages": [{"role": "tool", "tool_call_id": "q", "content": "x"}]}, 400, "messages[0]", "no call before"),
        (
            {"messages": [*BASE["messages"], {"role": "assistant", "content": "x"}]},
            400,
            "messages",
            "nothing to answer",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0]", "image"),
        ({"model": "gpt-9"}, 404, "model", "no model 'gpt-9'"),
        ({"n": 2}, 400, "n", "can only be 1"),
        ({"n": True}, 400, "n", "can only be 1"),
        ({"logprobs": True}, 400, "logprobs", "can only be false"),
        ({"frobnicate": 1}, 400, "frobnicate", "not supported"),
        ({"functions": []}, 400, "functions", "not supported"),
        ({"temperature": "hot"}, 400, "temperature", "must be a number"),
        ({"temperature": -1}, 400, "temperature", "from 0 up"),
        ({"temperature": True}, 400, "temperature", "must be a number"),
        ({"top_p": 0}, 400, "top_p", "above 0"),
        ({"max_tokens": 10**6}, 400, "max_tokens", "at most 400"),
        ({"max_tokens": 0}, 400, "max_tokens", "1 or more"),
        ({"max_tokens": 1}, 400, None, "an empty block takes"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens", "differ"),
        ({"stop": ["a", ""]}, 400, "stop", "none of them empty"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options", "stream: true"),
        ({"stream": 1}, 400, "stream", "true or false"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type", "only be 'function'"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": 3}}}]}, 400, None, "Schema"),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"pattern": "^(?!a)"}}}]},
            400,
            "tools.x.parameters",
            "pattern: '^(?!a)'",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"allOf": [{}] * 20_000}}}]},
            400,
            "tools",
            "at most 20,000",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": list(range(20_000))}}}},
            400,
            "response_format",
            "at most 20,000",
        ),
        ({"tool_choice": "required"}, 400, "tool_choice", "no tools"),
        ({"tools": [CLOCK], "tool_choice": "maybe"}, 400, "tool_choice", "must be none"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "z"}}}, 400, "tool_choice", "'z'"),
        ({"response_format": {"type": "xml"}}, 400, "response_format", "json_schema"),
        ({"reasoning_effort": "huge"}, 400, "reasoning_effort", "one of"),
        ({"smi_ctrl": {"reasoning": {"mode": "x"}}}, 400, "ctrl.reasoning.mode", "none of"),
        ({"logit_bias": {"1": 2}}, 400, "logit_bias", "can only be {}"),
    ],
)
def test_bad_requests_name_what_is_wrong(server, change, status, param, says):
    reply = httpx.post(f"{server}/v1/chat/completions", json=BASE | change)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (status, "invalid_request_error")
    assert says in error["message"]
    if param is not None:
        assert error["param"] == param
    assert error["code"]


def test_arguments_are_bounded_like_the_body(server):
    many = f'{{"a":[{"[]," * 200_000}[]]}}'
    calls = [{"id": "c", "type": "function", "function": {"name": "clock", "arguments": many}}]
    messages = [*BASE["messages"], {"role": "assistant", "tool_calls": calls}, *BASE["messages"]]
    reply = httpx.post(f"{server}/v1/chat/completions", json={**BASE, "messages": messages, "tools": [CLOCK]})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (413, "body_too_large", "messages")


def test_fields_that_change_nothing_pass(server):
    extra = {"n": 1, "user": "me", "metadata": {"a": "b"}, "store": False, "logit_bias": {}, "seed": None}
    assert httpx.post(f"{server}/v1/chat/completions", json=BASE | extra).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"\xff{}", 400, "invalid_json"),
        (b'{"model": "tiny", "model": "x"}', 400, "invalid_json"),
        (b'{"temperature": NaN}', 400, "invalid_json"),
        (b"[" * 99_000, 400, "invalid_json"),
        # some seconds to read, if it were
        (b"[" + b"[]," * 1_000_000 + b"[]]", 413, "body_too_large"),
        (b"[]", 400, "invalid_type"),
        (b"null", 400, "invalid_type"),
    ],
)
def test_bodies_that_are_no_request(server, body, status, code):
    reply = httpx.post(f"{server}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)


def test_paths_methods_and_content_types(server):
    assert httpx.get(f"{server}/v1/nope").json()["error"]["code"] == "not_found"
    assert httpx.get(f"{server}/v1/chat/completions").status_code == 405
    assert httpx.post(f"{server}/v1/chat/completions", content=b"{}").status_code == 415
    assert httpx.get(f"{server}/health").json() == {"status": "ok"}
    assert 'smi_requests_total{path="other",status="404"}' in httpx.get(f"{server}/metrics").text


def test_strangers_and_oversized_bodies(tokenizer):
    runtime = ScriptedRuntime(tokenizer, answer, capacity=2)
    with serving(runtime, tokens=("alpha", "beta"), max_body=2000, hosts=("127.0.0.1",)) as address:
        url = f"{address}/v1/chat/completions"
        for headers in ({}, {"Authorization": "Bearer nope"}, {"Authorization": "Basic alpha"}):
            reply = httpx.post(url, json=BASE, headers=headers)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert httpx.get(f"{address}/metrics", headers=headers).status_code == 401
        assert httpx.get(f"{address}/health").status_code == 200
        alpha = {"Authorization": "Bearer alpha"}
        assert httpx.post(url, json=BASE, headers=alpha | {"Host": "evil.example"}).status_code == 403
        large = {**BASE, "user": "x" * 3000}
        assert httpx.post(url, json=large, headers=alpha).json()["error"]["code"] == "body_too_large"

        def pieces():
            yield from (b"x" * 500 for _ in range(20))

        chunked = httpx.post(url, content=pieces(), headers=alpha | {"Content-Type": "application/json"})
        assert chunked.status_code == 413
        # the same conversation under another token is another's
        first = httpx.post(url, json=BASE, headers=alpha).json()
        talk = {**BASE, "messages": [*BASE["messages"], first["choices"][0]["message"], *BASE["messages"]]}
        cached = [
            httpx.post(url, json=talk, headers={"Authorization": f"Bearer {token}"}).json()["usage"]
            for token in ("beta", "alpha")
        ]
        assert [usage["prompt_tokens_details"]["cached_tokens"] > 0 for usage in cached] == [False, True]


async def _crowd(address, texts, **settings):
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0, timeout=120) as client:

        async def one(number, text):
            messages = [{"role": "user", "content": text}]
            if number % 4:
                reply = await client.chat.completions.create(model="tiny", messages=messages, **settings)
                return reply.choices[0].message.content
            parts = await client.chat.completions.create(model="tiny", messages=messages, stream=True, **settings)
            return "".join([part.choices[0].delta.content or "" async for part in parts])

        return await asyncio.gather(*(one(i, text) for i, text in enumerate(texts)), return_exceptions=True)


def test_two_hundred_at_once_lose_nothing(tokenizer):
    texts = [f"number {i}" for i in range(200)]
    with serving(ScriptedRuntime(tokenizer, answer, capacity=8), max_queue=200) as address:
        assert asyncio.run(_crowd(address, texts, temperature=0)) == texts
        assert metric(address, 'smi_requests_total{path="/v1/chat/completions",status="200"}') == 200


def test_a_full_queue_says_so(tokenizer):
    with serving(ScriptedRuntime(tokenizer, answer, capacity=1), max_queue=1) as address:
        found = asyncio.run(_crowd(address, [f"a longer answer {i}" for i in range(12)], temperature=0))
        refused = [reply for reply in found if isinstance(reply, openai.RateLimitError)]
        assert 0 < len(refused) < 12
        assert {reply.response.headers["retry-after"] for reply in refused} == {"1"}
        assert all(isinstance(r, str | openai.RateLimitError) for r in found)


class Paced(ScriptedRuntime):
    """Writes slowly."""

    def _step(self, sessions):
        time.sleep(0.02)
        return super()._step(sessions)


def _waits_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(tokenizer, stream):
    runtime = Paced(tokenizer, answer, capacity=1)
    with serving(runtime) as address:
        body = {**BASE, "messages": [{"role": "user", "content": "word " * 100}], "stream": stream}
        if stream:
            with httpx.stream("POST", f"{address}/v1/chat/completions", json=body) as reply:
                next(reply.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{address}/v1/chat/completions", json=body, timeout=0.5)
        _waits_until(lambda: runtime.pool.free_slots == 1)
        assert runtime.pool.is_clear(0)
        assert httpx.post(f"{address}/v1/chat/completions", json=BASE).status_code == 200


def test_a_client_that_does_not_read_loses_its_place(tokenizer):
    runtime = ScriptedRuntime(tokenizer, answer, capacity=1)
    body = {**BASE, "messages": [{"role": "user", "content": "word " * 300}], "stream": True, "max_tokens": 400}
    data = json.dumps(body).encode()
    with serving(runtime, timeout=2.0, max_queue=0, send_buffer=4096) as address:
        host, port = address.removeprefix("http://").split(":")
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with deaf:
            deaf.connect((host, int(port)))
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            deaf.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
            _waits_until(lambda: httpx.post(f"{address}/v1/chat/completions", json=BASE).status_code == 429)
            _waits_until(lambda: httpx.post(f"{address}/v1/chat/completions", json=BASE).status_code == 200)


def _connected(address, *sent):
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    for data in sent:
        connection.sendall(data)
    return connection


def _dripped(connection, data=b"x", seconds=0.05):
    """All that the server says while bytes come one by one, until it closes the connection."""
    said = b""
    connection.settimeout(seconds)
    deadline = time.monotonic() + 10
    with connection:
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                try:
                    piece = connection.recv(1 << 16)
                except ConnectionResetError:
                    piece = b""
                if not piece:
                    return said
                said += piece
            with contextlib.suppress(OSError):
                connection.sendall(data)
    raise AssertionError("the connection is still held")


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
BODY = HEAD + b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture(scope="module")
def impatient(tokenizer):
    with serving(ScriptedRuntime(tokenizer, answer, capacity=1), receive=0.4, max_queue=0) as address:
        yield address


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        ((b"P",), [408]),
        ((HEAD,), [408]),
        ((BODY,), [408]),
        ((HEALTH + b"\r\n", HEALTH), [200, 408]),
        # answered at once; what still comes is not waited for
        ((HEALTH + b"Content-Length: 1000\r\n\r\n",), [200]),
        ((HEAD + b"Content-Length: 1000\r\n\r\n",), [415]),
    ],
)
def test_a_request_that_drips_in_is_ended(impatient, sent, statuses):
    said = _dripped(_connected(impatient, *sent))
    assert list(map(int, re.findall(rb"HTTP/1\.1 (\d+)", said))) == statuses
    if statuses[-1] == 408:
        assert json.loads(said.split(b"\r\n\r\n")[-1])["error"]["code"] == "timeout"
    # its place is free
    assert httpx.post(f"{impatient}/v1/chat/completions", json=BASE).status_code == 200


def test_a_connection_that_says_nothing_is_closed(impatient):
    with _connected(impatient) as silent:
        assert silent.recv(100) == b""


def test_an_answer_that_takes_longer_than_a_request_may_is_not_ended(tokenizer):
    with serving(Paced(tokenizer, answer, capacity=1), receive=0.2) as address:
        body = {**BASE, "messages": [{"role": "user", "content": "word " * 6}]}
        reply = httpx.post(f"{address}/v1/chat/completions", json=body)
        assert (reply.status_code, reply.elapsed.total_seconds() > 0.4) == (200, True)


def test_connections_are_bounded(tokenizer):
    with (
        serving(ScriptedRuntime(tokenizer, answer, capacity=1), connections=4) as address,
        contextlib.ExitStack() as held,
    ):
        for _ in range(4):
            held.enter_context(_connected(address))
        _waits_until(lambda: httpx.get(f"{address}/health").status_code == 503)
        many = [held.enter_context(_connected(address)) for _ in range(SPARE_CONNECTIONS + 10)]
        many[-1].settimeout(5)
        assert many[-1].recv(100) == b""
        held.close()
        _waits_until(lambda: httpx.get(f"{address}/health").status_code == 200)


def test_an_answer_that_cannot_be_told_ends_no_other(tokenizer, monkeypatch):
    """Whatever goes wrong while an answer is put together: its request fails, and the engine lives."""

    def act(message, payload, old=Message.act):
        if "fail" in payload:
            raise ZeroDivisionError("planted")
        return old(message, payload)

    monkeypatch.setattr(Message, "act", act)
    with serving(ScriptedRuntime(tokenizer, answer, capacity=2)) as address:
        texts = ["hello", "call fail clock {}", "hello again"]
        found = asyncio.run(_crowd(address, texts, temperature=0, tools=[CLOCK]))
        assert found[::2] == texts[::2]
        assert isinstance(found[1], openai.InternalServerError)
        assert httpx.get(f"{address}/health").status_code == 200


def test_time_runs_out(tokenizer):
    runtime = Paced(tokenizer, answer, capacity=1)
    body = {**BASE, "messages": [{"role": "user", "content": "word " * 100}]}
    with serving(runtime, timeout=0.5) as address:
        reply = httpx.post(f"{address}/v1/chat/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")
        with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
            parts = client.chat.completions.create(stream=True, **body)
            with pytest.raises(openai.APIError, match="no answer within"):
                list(parts)


def test_a_model_that_fails_ends_its_turns_and_no_others(tokenizer):
    def script(session):
        if "fail" in said(session):
            raise RuntimeError("planted")
        return answer(session)

    with serving(ScriptedRuntime(tokenizer, script, capacity=2)) as address:
        url = f"{address}/v1/chat/completions"
        reply = httpx.post(url, json={**BASE, "messages": [{"role": "user", "content": "fail"}]})
        assert reply.status_code == 500
        assert "planted" not in reply.text
        assert httpx.post(url, json=BASE).status_code == 200


def test_shutting_down_ends_what_is_in_progress(tokenizer):
    runtime = Paced(tokenizer, answer, capacity=1)
    body = {**BASE, "messages": [{"role": "user", "content": "word " * 300}], "max_tokens": 400}
    found = []

    def talk(address):
        with contextlib.suppress(httpx.HTTPError):
            found.append(httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60))

    with serving(runtime) as address:
        talking = threading.Thread(target=talk, args=(address,))
        talking.start()
        _waits_until(lambda: runtime.pool.free_slots == 0)
        began = time.monotonic()
    talking.join()
    assert time.monotonic() - began < 8
    assert not found or found[0].status_code >= 500


def test_a_secret_never_crosses(tokenizer):
    """A model of random weights answers in company, behind a secret, as it answers alone."""

    def talk(address, secrets):
        texts = ["who are you?", *(f"the password is {secret}" for secret in secrets), "who are you?"]
        found = asyncio.run(_crowd(address, texts, temperature=0, max_tokens=16, reasoning_effort="none"))
        assert all(found), found
        return found[0], found[-1]

    model = tiny(tokenizer.vocab_size).double()
    with serving(Runtime(model, tokenizer, capacity=1)) as address:
        alone = talk(address, [])
    with serving(Runtime(model, tokenizer, capacity=2)) as address:
        assert talk(address, ["plum", "pear", "quince"]) == alone
