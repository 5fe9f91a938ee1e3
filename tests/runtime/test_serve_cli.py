import os
import signal
import subprocess
import sys

import httpx2 as httpx
import pytest
from scripted import tiny

from smi import serve
from smi.tokenizer import load_tokenizer


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["./nowhere"], "no checkpoint at ./nowhere"),
        (["x", "--host", "0.0.0.0"], "others can reach 0.0.0.0"),
        (["x", "--host", "example.org"], "others can reach example.org"),
        (["x", "--token-env", "SMI_TEST_NO_SUCH"], "SMI_TEST_NO_SUCH holds no token"),
        (["x", "--token-file", "./nowhere"], "nowhere"),
        (["x", "--sessions", "0"], "--sessions must be 1 or more"),
    ],
)
def test_mistakes(capsys, arguments, says):
    assert serve.main(arguments) == 2
    assert says in capsys.readouterr().err


def test_addresses():
    assert all(map(serve.is_local, ("localhost", "127.0.0.1", "127.1.2.3", "::1")))
    assert not any(map(serve.is_local, ("0.0.0.0", "::", "10.0.0.1", "example.org")))


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_a_checkpoint_is_served_until_it_is_told_to_stop(tmp_path, told):
    tokenizer = load_tokenizer("compact")
    tiny(tokenizer.vocab_size).save_pretrained(tmp_path / "export")
    tokenizer.save_pretrained(tmp_path / "export")
    (tmp_path / "tokens").write_text("one\ntwo\n")
    command = [sys.executable, "-m", "smi.serve", str(tmp_path), "--port", "0", "--sessions", "2"]
    command += ["--token-file", str(tmp_path / "tokens"), "--model-name", "it"]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("serving it at http://127.0.0.1:"), line
        address = line.split()[-1]
        headers = {"Authorization": "Bearer two"}
        assert httpx.get(f"{address}/models").status_code == 401
        body = {"model": "it", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        reply = httpx.post(f"{address}/chat/completions", json=body, headers=headers, timeout=60)
        assert reply.status_code == 200, reply.text
        process.send_signal(told)
        _, errors = process.communicate(timeout=30)
        assert process.returncode in (0, -signal.SIGTERM)
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.wait()
