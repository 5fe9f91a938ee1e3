"""Serves a checkpoint over HTTP, as OpenAI's chat completions.

python -m smi.serve runs/quickstart/2026-01-31_12-00-00
python -m smi.serve CHECKPOINT --host 0.0.0.0 --token-env SMI_TOKEN

    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    client.chat.completions.create(model=client.models.list().data[0].id, messages=[...], tools=[...])

A conversation that goes on continues from its state. Beside the API: /health, and /metrics for Prometheus.
"""

import argparse
import contextlib
import ipaddress
import os
import sys
from pathlib import Path

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    it = argparse.ArgumentParser(
        prog="python -m smi.serve",
        description="Serves a checkpoint over HTTP, as OpenAI's chat completions.",
        epilog="What is past a bound is told by its status: 408 for a request that did not arrive in time, 413 for one "
        "that is too large, 429 where too many wait, 503 where too many connections are open, 504 for an answer that "
        "took too long. Connections: --sessions, --max-queue and 256 more.",
    )
    it.add_argument("checkpoint", help="a run directory, an export, or a checkpoint in any layout")
    it.add_argument("--tokenizer", help="where it is not beside the model")
    it.add_argument("--model-name", metavar="NAME", help="that requests give (the checkpoint's own)")
    it.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    it.add_argument("--port", type=int, default=8000, help="(8000)")
    door = it.add_mutually_exclusive_group()
    door.add_argument("--token-env", metavar="NAME", help="environment variable that holds a bearer token")
    door.add_argument("--token-file", type=Path, metavar="FILE", help="file with bearer tokens, one a line")
    door.add_argument("--insecure", action="store_true", help="no token, although others can reach the address")
    it.add_argument("--sessions", type=int, default=16, metavar="N", help="states in memory: turns and kept ones (16)")
    it.add_argument("--max-queue", type=int, default=256, metavar="N", help="requests that may wait (256)")
    it.add_argument("--max-body", type=int, default=4 << 20, metavar="BYTES", help="of a request (4 MiB)")
    it.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="of an answer (1024)")
    it.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds of a request, with waiting (300)"
    )
    it.add_argument(
        "--receive-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds in which the headers of a request must arrive, and again its body (30)",
    )
    it.add_argument("--grace", type=int, default=10, metavar="S", help="seconds for requests to end on shutdown (10)")
    return it


def read_tokens(env: str | None, file: Path | None) -> tuple[str, ...]:
    """Bearer tokens. Raises ValueError where a place is named that holds none, OSError for a file that is not there."""
    if env is not None:
        text, place = os.environ.get(env, ""), f"the environment variable {env}"
    elif file is not None:
        text, place = file.read_text(encoding="utf-8"), str(file)
    else:
        return ()
    tokens = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not tokens:
        raise ValueError(f"{place} holds no token")
    return tokens


def is_local(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host in LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        counts = (("sessions", 1), ("max_queue", 0), ("max_body", 1), ("max_tokens", 1))
        for name, least in (*counts, ("timeout", 0), ("receive_timeout", 0)):
            if getattr(arguments, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} must be {least} or more")
        tokens = read_tokens(arguments.token_env, arguments.token_file)
        local = is_local(arguments.host)
        if not (local or tokens or arguments.insecure):
            raise ValueError(
                f"others can reach {arguments.host}: give --token-env or --token-file, or --insecure to serve anyone"
            )
        import uvicorn

        from smi.runtime.connections import bounded_connections
        from smi.runtime.loading import load_runtime
        from smi.runtime.server import Settings, create_app

        runtime = load_runtime(arguments.checkpoint, arguments.tokenizer, arguments.sessions)
        settings = Settings(
            model=arguments.model_name or Path(arguments.checkpoint).resolve().name,
            tokens=tokens,
            hosts=(*LOCAL_NAMES, arguments.host) if local and not tokens else None,
            max_queue=arguments.max_queue,
            max_body=arguments.max_body,
            max_tokens=arguments.max_tokens,
            timeout=arguments.timeout,
            receive=arguments.receive_timeout,
        )
        app = create_app(runtime, settings)
    except ImportError as error:
        print(f"error: {error}; the server needs pip install 'smi[runtime]'", file=sys.stderr)
        return 2
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    config = uvicorn.Config(
        app,
        host=arguments.host,
        port=arguments.port,
        log_level="warning",
        timeout_graceful_shutdown=arguments.grace,
        # connections, idle ones too; requests are bounded inside, with an answer that says so
        limit_concurrency=arguments.sessions + arguments.max_queue + 256,
        http=bounded_connections(arguments.receive_timeout),
        ws="none",
        server_header=False,
    )
    # bound here, so that port 0 can be told
    listener = config.bind_socket()
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    print(f"serving {settings.model} at http://{host}:{listener.getsockname()[1]}/v1", flush=True)
    # Ctrl-C has ended it in order by then
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run([listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
