"""`lockstep serve`: what it refuses, and how a process of it ends."""

from __future__ import annotations

import re
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from processes import running_lockstep, wait_for

from lockstep.cli.main import main
from lockstep.errors import LockstepError, Terminated
from lockstep.serve import server as server_module
from lockstep.serve.batcher import MAX_FAILURES
from lockstep.serve.settings import Settings
from lockstep.session.generate import LLM


def test_a_process_ends_in_order_when_it_is_told_to(model: Path) -> None:
    command = ["serve", "--model", str(model), "--device", "cpu", "--port", "0", "--max-model-len", "256"]
    with running_lockstep(command, LOCKSTEP_API_KEY="of the environment") as process:
        wait_for(lambda: re.search("serving .*\n", process.stderr.read()) is not None, process)
        said = next(line for line in process.stderr if "serving" in line)
        url = said.split(" at ")[1].strip()
        assert said == f"serving {model} at {url}\n" and url.startswith("http://127.0.0.1:")
        body = {"prompt": "x", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
        headers = {"authorization": "Bearer of the environment"}
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
        process.send_signal(signal.SIGTERM)
        process.communicate(60)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port", "70000"], "--port is 70000; it must be between 0 and 65535"),
        (["--max-model-len", "5000"], "--max-model-len is 5000; the model's context has 2048 tokens"),
        (["--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["--max-model-len", "300", "--kv-cache-tokens", "303"], "303 in pages of 16, and a request may have 300"),
        (["--kv-cache-tokens", "100"], "a request may have 2048 tokens; raise it, or lower --max-model-len"),
        (["--api-key", ""], "the API key is empty"),
        (["--served-model-name", ""], "--served-model-name is empty"),
        (["--host", "no such host"], "cannot listen on no such host"),
        (["--host", "a..b"], "cannot listen on a..b"),
        (["--chat-template-kwargs", "x"], "--chat-template-kwargs"),
    ],
)
def test_what_cannot_be_served(model: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", str(model), "--device", "cpu", *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", str(model), "--device", "cpu", "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1, port {port}" in capsys.readouterr().err


def test_an_engine_that_fails_again_and_again_ends_the_server(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(served_model_name="tiny", port=0, max_model_len=128, max_num_seqs=2)
    with LLM(model, device="cpu", config=settings.generator) as llm:
        server = server_module.Server(llm, settings)
        statuses: list[int] = []

        def failing() -> None:
            raise RuntimeError("of the device")

        monkeypatch.setattr(server.service.batcher.engine, "advance", failing)

        def ask() -> None:
            for _ in range(MAX_FAILURES):
                statuses.append(httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"}).status_code)

        client = threading.Thread(target=ask)
        client.start()
        with pytest.raises(LockstepError, match=f"the engine failed {MAX_FAILURES} times in a row"):
            server.run()
        client.join(30)
        assert statuses == [500] * MAX_FAILURES


def test_a_server_whose_http_ends_does_not_wait_on(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(served_model_name="tiny", port=0, max_model_len=128, max_num_seqs=2)
    with LLM(model, device="cpu", config=settings.generator) as llm:
        server = server_module.Server(llm, settings)
        monkeypatch.setattr(server._http, "run", lambda **_: None)
        with pytest.raises(LockstepError, match="the HTTP server ended by itself"):
            server.run()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_stops_and_the_second_ends(number: signal.Signals) -> None:
    service = SimpleNamespace(stopping=False)
    server: Any = SimpleNamespace(service=service, stop=lambda: setattr(service, "stopping", True))
    before = signal.getsignal(number)
    with server_module._stop_on_signals(server):
        signal.raise_signal(number)
        assert service.stopping
        with pytest.raises(KeyboardInterrupt) as found:
            signal.raise_signal(number)
    assert signal.getsignal(number) is before
    assert found.type is (Terminated if number == signal.SIGTERM else KeyboardInterrupt)


def test_only_strangers_without_a_key_are_warned_of() -> None:
    assert Settings().warning == Settings(host="localhost").warning == ""
    assert Settings(host="0.0.0.0", api_key="k").warning == "" != Settings(host="0.0.0.0").warning
