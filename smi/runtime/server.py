"""A runtime behind HTTP: OpenAI's chat completions, health and metrics, as an ASGI application.

    app = create_app(runtime, Settings(model="smi"))

Everything that a client sends is bounded before it is held: requests at a time, bytes of a body, seconds of an answer,
tokens of it. A client that goes away frees its slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as AsgiMessage

from smi.protocol.incremental import BlockClosed, BlockOpened, PayloadText
from smi.protocol.json_text import dumps
from smi.protocol.stream import ProtocolError, Stream
from smi.protocol.tokens import BlockType
from smi.runtime.constrained import Constrainer
from smi.runtime.engine import Engine, EngineClosed, Failed, Job, News, Started
from smi.runtime.openai_errors import ApiError, bad_request, protocol_refusal
from smi.runtime.openai_reply import Envelope, Message, Usage
from smi.runtime.openai_request import ChatRequest, read_request
from smi.runtime.session import Runtime
from smi.runtime.turn import BlockCut, Reply, TurnEnded

log = logging.getLogger("smi")

T = TypeVar("T")

PATHS = ("/v1/chat/completions", "/v1/models", "/health", "/metrics")
# what proxies log for a client that went away
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True)
class Settings:
    """What the server allows.

    model: the name that requests have to give. tokens: bearer tokens, any of which opens the door, each to sessions
    of its own; none leaves it open. hosts: values of the Host header that are served, None for all; a local server
    without tokens names its own, so that no web page can reach it under another.
    max_queue: requests that may wait beside those that are answered. max_body: bytes. max_tokens: of an answer.
    timeout: seconds of a request, waiting included; a client that reads its stream slowly has as many beyond.
    receive: seconds in which the body must have come; headers are the server's to wait for, see `bounded_connections`.
    """

    model: str
    tokens: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    max_queue: int = 256
    max_body: int = 4 << 20
    max_tokens: int = 1024
    timeout: float = 300.0
    receive: float = 30.0


def create_app(runtime: Runtime, settings: Settings) -> Starlette:
    """The application; its lifespan starts and ends the engine. Raises ImportError where llguidance is missing."""
    return _Server(runtime, settings).app


class _Metrics:
    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._made(Counter, "smi_requests", "Requests answered", ["path", "status"])
        self.seconds = self._made(Histogram, "smi_request_seconds", "From a request to the end of its answer", ["path"])
        self.first = self._made(Histogram, "smi_first_token_seconds", "From a request to the first of its answer")
        self.tokens = self._made(
            Counter, "smi_tokens", "Tokens read, found read in a kept session, and written", ["kind"]
        )
        self.refused = self._made(Counter, "smi_actions_refused", "Actions written but not handed out", ["reason"])
        for name, what, count in (
            ("smi_active_sessions", "Turns in progress", lambda: engine.active),
            ("smi_kept_sessions", "Sessions kept for their conversation to go on", lambda: engine.kept),
            ("smi_waiting_requests", "Requests without a session", lambda: engine.waiting),
        ):
            self._made(Gauge, name, what).set_function(count)

    def _made(self, kind: type[T], name: str, what: str, labels: Any = ()) -> T:
        return kind(name, what, labels, registry=self.registry)  # type: ignore[call-arg]


Item: TypeAlias = Started | dict[str, Any] | TurnEnded | ApiError
"""What reaches the client's side: the start, deltas of the message, the end, or an error."""


class _Answer:
    """One answer: put together on the engine's thread, handed to the client's piece by piece."""

    def __init__(self, request: ChatRequest, metrics: _Metrics) -> None:
        self.message = Message(request)
        self.items: asyncio.Queue[Item] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._metrics = metrics
        self._began = time.perf_counter()
        self._kind: BlockType | None = None
        self._reply: Reply | None = None
        self._said = False

    def tell(self, news: list[News]) -> None:
        """On the engine's thread."""
        made = [item for item in map(self._translated, news) if item is not None]
        # a loop that is gone has nobody left to tell
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(lambda: [self.items.put_nowait(item) for item in made])

    def answered(self) -> Stream | None:
        """On the engine's thread. A client that was not shown all that the state has read cannot continue it."""
        assert self._reply is not None
        if self._reply.reason == "stop" or self.message.refused:
            return None
        return self.message.history()

    def _translated(self, event: News) -> Item | None:
        message = self.message
        match event:
            case Started():
                self._metrics.tokens.labels("reused").inc(event.cached)
                self._metrics.tokens.labels("read").inc(event.prompt - event.cached)
                return event
            case BlockOpened():
                if not self._said:
                    self._said = True
                    self._metrics.first.observe(time.perf_counter() - self._began)
                self._kind = event.type
            case PayloadText() if self._kind is not None:
                return message.say(self._kind, event.text)
            case BlockClosed() if event.block.type is BlockType.ACT:
                return message.act(event.block.payload)
            case BlockCut() if event.block.type is BlockType.ACT:
                message.cut()
            case TurnEnded():
                self._reply = event.reply
                self._metrics.tokens.labels("written").inc(len(event.reply.ids))
                for refused in message.refused:
                    self._metrics.refused.labels(refused.type).inc()
                return event
            case Failed():
                return _failure(event.error)
        return None


def _failure(error: BaseException) -> ApiError:
    match error:
        case ProtocolError():
            return protocol_refusal(error)
        case ValueError():
            return bad_request(str(error), None)
        case TimeoutError():
            return ApiError(504, str(error), code="timeout")
        case EngineClosed():
            return ApiError(503, str(error), code="shutting_down")
    # what went wrong inside is for the log
    return ApiError(500, "the model failed; the log says how", code="internal_error")


class _Server:
    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        self._settings = settings
        self._engine = Engine(runtime)
        self._metrics = _Metrics(self._engine)
        self._constrainer = Constrainer(runtime.grammar)
        self._created = int(time.time())
        self._inside = 0
        self._most_inside = runtime.pool.capacity + settings.max_queue
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/health", self._health),
                Route("/metrics", self._show_metrics),
            ],
            exception_handlers=dict.fromkeys((ApiError, HTTPException, ClientDisconnect, Exception), _refusal),
            lifespan=self._lifespan,
        )
        self.app.add_middleware(_Observed, metrics=self._metrics)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        with self._engine:
            yield

    # --- the door

    def _admit(self, http: Request) -> str:
        """Who asks. ApiError for a stranger."""
        settings = self._settings
        try:
            name = http.url.hostname
        except ValueError:
            name = None
        if settings.hosts is not None and name not in settings.hosts:
            raise ApiError(403, f"this server does not go by the name {name!r}", code="unknown_host")
        if not settings.tokens:
            return ""
        scheme, _, given = http.headers.get("authorization", "").partition(" ")
        # every token is compared, in constant time
        same = [hmac.compare_digest(given.strip().encode(), token.encode()) for token in settings.tokens]
        if scheme.lower() != "bearer" or not any(same):
            message = "the bearer token is wrong" if given else "a bearer token is needed: Authorization: Bearer ..."
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return hashlib.sha256(settings.tokens[same.index(True)].encode()).hexdigest()

    @contextlib.contextmanager
    def _place(self):
        """Room among the requests that are held at a time."""
        if self._inside >= self._most_inside:
            message = f"{self._inside} requests are being answered or wait: try again soon"
            raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": "1"})
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    async def _body(self, http: Request) -> bytes:
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"the body must be application/json, not {kind or 'untyped'}", code="content_type")
        most = self._settings.max_body
        too_large = ApiError(413, f"the body is larger than {most:,} bytes", code="body_too_large")
        length = http.headers.get("content-length", "")
        if length.isascii() and length.isdecimal() and int(length) > most:
            raise too_large
        data = bytearray()
        try:
            async with asyncio.timeout(self._settings.receive):
                async for piece in http.stream():
                    data += piece
                    if len(data) > most:
                        raise too_large
        except TimeoutError:
            close = {"Connection": "close"}
            raise ApiError(408, "the body did not arrive in time", code="timeout", headers=close) from None
        return bytes(data)

    # --- the routes

    async def _chat(self, http: Request) -> Response:
        owner = self._admit(http)
        with contextlib.ExitStack() as held:
            held.enter_context(self._place())
            body = await self._body(http)
            # on a thread of its own, for what is declared is checked and compiled there; no thread can be stopped, so
            # what it may meet is bounded beforehand
            request = await asyncio.to_thread(
                read_request, body, most_tokens=self._settings.max_tokens, constrainer=self._constrainer
            )
            if request.model != self._settings.model:
                message = f"there is no model {request.model!r} here; there is {self._settings.model!r}"
                raise ApiError(404, message, code="model_not_found", param="model")
            answer = _Answer(request, self._metrics)
            job = Job(
                prompt=request.prompt,
                owner=owner,
                limits=request.limits,
                sampling=request.sampling,
                stops=request.stops,
                constrain=request.constrain,
                seconds=self._settings.timeout,
                tell=answer.tell,
                answered=answer.answered,
            )
            try:
                self._engine.submit(job)
            except EngineClosed as error:
                raise _failure(error) from None
            held.callback(self._engine.cancel, job)
            # errors that show before the model has the floor are told by the status
            started = await _unless_gone(http, answer.items.get())
            if isinstance(started, ApiError):
                raise started
            assert isinstance(started, Started)
            if request.stream:
                return _Events(_events(request, answer, started), self._settings.timeout * 2, held.pop_all().close)
            reply = await _unless_gone(http, _last(answer))
            made = Envelope(request).whole(answer.message, answer.message.finish_reason(reply), _usage(started, reply))
            return _json(made)

    async def _models(self, http: Request) -> Response:
        self._admit(http)
        model = {"id": self._settings.model, "object": "model", "created": self._created, "owned_by": "smi"}
        return _json({"object": "list", "data": [model]})

    async def _health(self, http: Request) -> Response:
        return _json({"status": "ok"}) if self._engine.alive else _json({"status": "stopped"}, 503)

    async def _show_metrics(self, http: Request) -> Response:
        self._admit(http)
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _last(answer: _Answer) -> Reply:
    """The end of an answer that nobody watches come."""
    while True:
        item = await answer.items.get()
        if isinstance(item, ApiError):
            raise item
        if isinstance(item, TurnEnded):
            return item.reply


async def _events(request: ChatRequest, answer: _Answer, started: Started) -> AsyncIterator[str]:
    """The answer as server-sent events."""
    envelope = Envelope(request)
    yield _event(envelope.chunk({"role": "assistant", "content": ""}))
    while True:
        item = await answer.items.get()
        if isinstance(item, ApiError):
            yield _event(item.body)
            return
        if isinstance(item, TurnEnded):
            break
        if isinstance(item, dict):
            yield _event(envelope.chunk(item))
    refused = [refused.to_dict() for refused in answer.message.refused]
    last = {"smi_refused_actions": refused} if refused else {}
    yield _event(envelope.chunk(last, answer.message.finish_reason(item.reply)))
    if request.include_usage:
        yield _event(envelope.usage_chunk(_usage(started, item.reply)))
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {dumps(value)}\n\n"


def _usage(started: Started, reply: Reply) -> Usage:
    return Usage(started.prompt, started.cached, len(reply.ids), reply.think_tokens)


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, "application/json")


class _Events(StreamingResponse):
    """A stream that lets go of what it holds however it ends, and after some seconds in any case."""

    def __init__(self, events: AsyncIterator[str], seconds: float, done: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._seconds, self._done = seconds, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # the engine ends an answer in time; what takes longer is a client that does not read
            async with asyncio.timeout(self._seconds):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            log.warning("a client did not read its stream within %g s; the connection is closed", self._seconds)
        finally:
            self._done()


async def _unless_gone(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` comes to; ClientDisconnect if the client goes away first."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def _refusal(http: Request, error: Exception) -> Response:
    """Any error in OpenAI's form."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), code="not_found", headers=error.headers)
    if not isinstance(error, ApiError):
        error = ApiError(500, "the server failed; the log says how", code="internal_error")
    return _json(error.body, error.status, error.headers)


class _Observed:
    """Counts and times requests. Paths that are none of ours share a name: clients could make up any number."""

    def __init__(self, app: ASGIApp, metrics: _Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in PATHS else "other"
        status = 500
        began = time.perf_counter()

        async def noted(message: AsgiMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._metrics.requests.labels(path, str(status)).inc()
            self._metrics.seconds.labels(path).observe(time.perf_counter() - began)
