"""Connections of the HTTP server: uvicorn's, with bounds on how many there are and how long a request may take to
arrive. uvicorn itself waits for ever for the rest of headers.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from smi.protocol.json_text import dumps
from smi.runtime.openai_errors import ApiError

# connections past uvicorn's limit_concurrency that are still told so; what is past these is closed as it comes
SPARE_CONNECTIONS = 64

_LATE = dumps(ApiError(408, "the request did not arrive in time", code="timeout").body).encode()
_LATE_ANSWER = (
    b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_LATE), _LATE)
)


def bounded_connections(receive_seconds: float) -> type[H11Protocol]:
    """For `uvicorn.Config(http=...)`: connections whose headers must be there in time, each request's anew.

    Late ones get a 408 if they have sent anything, and are closed. The body is the application's to wait for; what a
    client still sends behind an answer has as many seconds.
    """

    class Connection(H11Protocol):
        _clock: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            most = self.limit_concurrency
            if most is not None and len(self.connections) > most + SPARE_CONNECTIONS:
                transport.close()
            else:
                self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _watch(self) -> None:
            """Let the clock run exactly where the client owes something."""
            their = self.conn.their_state
            answered = self.cycle is not None and self.cycle.response_complete
            owed = their is h11.IDLE or (their is h11.SEND_BODY and answered)
            # between requests uvicorn's keep-alive has a clock of its own
            if not owed or self.timeout_keep_alive_task is not None:
                self._stop()
            elif self._clock is None:
                self._clock = self.loop.call_later(receive_seconds, self._late)

        def _stop(self) -> None:
            if self._clock is not None:
                self._clock.cancel()
                self._clock = None

        def _late(self) -> None:
            if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
                self.transport.write(_LATE_ANSWER)
            self.transport.close()

    return Connection
