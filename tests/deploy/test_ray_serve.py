"""Ray Serve on this machine with two replicas of a real checkpoint: streams are not buffered, a
session stays on its replica, and invalid settings are refused. After a replica is killed under
load, its streams are cut off and new requests are answered."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve", reason="the extra `ray`, which `make test-slow` installs")

from deploy.ray_serve import RaySettings, application, main
from logitd.model.inference.engine.config import EngineConfig
from logitd.service.settings.serve import ServeSettings
from tests.service.serving import eventually
from tests.service.spelling import save_spelling_checkpoint, spelled

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MARK = "MARK_OF_A_TEST"
TOKENS = 2500
LONG = {"prompt": "a", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
START_SECONDS = 120.0
"""Time limit for startup. Startup is slow, because Ray's processes import their modules one after
another."""


class OnRay:
    """`python -m deploy.ray_serve` in a separate process."""

    def __init__(self, folder: Path, port: int, *flags: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.said = tempfile.NamedTemporaryFile("w+", suffix=".log")  # noqa: SIM115
        self._mark = str(folder)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "deploy.ray_serve", "--port", str(port), *flags],
            cwd=folder,
            env={
                "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder),
                MARK: self._mark,
            },
            stdout=self.said, stderr=self.said, start_new_session=True,
        )  # fmt: skip

    def output(self) -> str:
        return Path(self.said.name).read_text(encoding="utf-8")

    def wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS
        while "ready at" not in self.output():
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)

    def processes(self) -> dict[int, bytes]:
        """Running processes of this test, with their command lines."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # the process has ended, or belongs to another user
                if f"{MARK}={self._mark}".encode() in path.read_bytes().split(b"\0"):
                    found[int(path.parent.name)] = path.with_name("cmdline").read_bytes()
        return found

    def replicas(self) -> list[int]:
        return [pid for pid, name in self.processes().items() if b"ServeReplica:" in name]

    def end(self) -> None:
        """End the command, so that Ray can remove its files, then kill all processes that are
        left."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.said.close()


@pytest.fixture(scope="module")
def on_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRay]:
    """Two replicas of the spelling checkpoint. The test that kills a replica runs last."""
    folder = tmp_path_factory.mktemp("ray")
    checkpoint = save_spelling_checkpoint(folder / "speller").path
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = OnRay(
        folder, port, str(checkpoint), "--threads", "1", "--slots", "4", "--kernels", "torch",
        "--min-replicas", "2", "--max-replicas", "2", "--served-model-name", "abc",
    )  # fmt: skip
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.end()


@pytest.fixture
def client(on_ray: OnRay) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=on_ray.url, timeout=60, trust_env=False) as client:
        yield client


def test_settings_reach_the_replicas(on_ray: OnRay, client: httpx.Client) -> None:
    assert len(on_ray.replicas()) == 2
    info = client.get("/info").json()
    assert (info["model"], info["slots"], info["threads"]) == ("abc", 4, 1), info
    refused = client.post("/generate", json={"prompt": "a", "temprature": 0})
    assert refused.status_code == 400
    assert "did you mean 'temperature'" in refused.json()["error"]["message"]


def test_stream_passes_as_it_is_written(client: httpx.Client) -> None:
    """The first events arrive long before the last. The request's id is passed on."""
    begun, first, events = time.monotonic(), 0.0, []
    named = {"X-Request-ID": "abc"}
    with client.stream("POST", "/generate", json=LONG, headers=named) as reply:
        assert reply.headers["x-request-id"] == "abc"
        assert reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic() - begun
                events.append(json.loads(line[6:]))
    assert line == "" or line == "data: [DONE]"
    assert first < (time.monotonic() - begun) / 4
    assert len(events) > 20
    tokens = [i for event in events for choice in event["choices"] for i in choice["token_ids"]]
    assert tokens == spelled("a", TOKENS)


def test_disconnected_client_ends_its_request(client: httpx.Client) -> None:
    """More clients disconnect than there are slots, so a slot that is never freed is noticed."""
    for _ in range(12):
        with client.stream("POST", "/generate", json=LONG) as reply:
            next(reply.iter_lines())
    begun = time.monotonic()
    assert client.post("/generate", json={"prompt": "a", "max_tokens": 3}).status_code == 200
    assert time.monotonic() - begun < 10


def cached(client: httpx.Client, prompt: str, **headers: str) -> int:
    reply = client.post("/generate", json={"prompt": prompt, "max_tokens": 1}, headers=headers)
    tokens: int = reply.json()["usage"]["cached_tokens"]
    return tokens


def test_session_stays_on_its_replica(client: httpx.Client) -> None:
    """Each of eight sessions finds its earlier prompt in the cache."""
    found = Counter[int]()
    for number in range(8):
        prompt = f"{number}" * 320
        session = {"X-Session-Id": f"somebody-{number}"}
        cached(client, prompt, **session)
        found.update(cached(client, prompt, **session) for _ in range(3))
    assert set(found) == {288}, found


def two_sessions(client: httpx.Client) -> tuple[str, str]:
    """Names of two sessions on different replicas."""
    prompt = "x" * 320
    cached(client, prompt, **{"X-Session-Id": "first"})
    for number in range(64):
        if cached(client, prompt, **{"X-Session-Id": f"{number}"}) == 0:
            return "first", f"{number}"
    raise AssertionError("64 sessions are on one replica")


def test_killed_replica_breaks_only_its_requests(on_ray: OnRay, client: httpx.Client) -> None:
    """All requests of the killed replica are cut off, and all of the other replica are answered.
    New requests are answered as soon as Ray has noticed the failure, and another replica replaces
    the killed one."""
    long = LONG | {"max_tokens": 2 * TOKENS}  # long enough to be running when it is killed
    sessions = two_sessions(client)
    streamed: dict[str, list[bool]] = {name: [] for name in sessions}
    plain: dict[str, list[bool]] = {name: [] for name in sessions}
    flowing = threading.Barrier(7)

    def stream(session: str) -> None:
        whole = False
        with (
            suppress(httpx.HTTPError),
            httpx.Client(base_url=on_ray.url, timeout=300, trust_env=False) as mine,
            mine.stream("POST", "/generate", json=long, headers={"X-Session-Id": session}) as reply,
        ):
            lines = reply.iter_lines()
            next(lines)
            flowing.wait(60)
            whole = "data: [DONE]" in list(lines)
        streamed[session].append(whole)

    def whole_reply(session: str) -> None:
        answered = False
        with suppress(httpx.HTTPError):
            reply = httpx.post(
                f"{on_ray.url}/generate", json=long | {"stream": False}, timeout=300,
                headers={"X-Session-Id": session}, trust_env=False,
            )  # fmt: skip
            answered = reply.status_code == 200
        plain[session].append(answered)

    before = on_ray.replicas()
    streams, others = (
        [threading.Thread(target=request, args=(name,)) for name in sessions for _ in range(3)]
        for request in (stream, whole_reply)
    )
    for thread in streams:
        thread.start()
    flowing.wait(60)
    for thread in others:
        thread.start()
    time.sleep(0.5)  # the replicas have received them
    os.kill(before[0], signal.SIGKILL)
    statuses: Counter[Any] = Counter()
    for _ in range(40):
        try:
            body = {"prompt": "a", "max_tokens": 3}
            statuses[client.post("/generate", json=body).status_code] += 1
        except httpx.HTTPError as error:
            statuses[type(error).__name__] += 1
    for thread in [*streams, *others]:
        thread.join(300)
    assert sorted(streamed.values()) == [[False] * 3, [True] * 3], streamed
    survivor = next(name for name in sessions if all(streamed[name]))
    assert plain[survivor] == [True] * 3, plain
    assert statuses[200] >= 38, statuses
    eventually(lambda: len(set(on_ray.replicas()) - set(before)) == 1)
    assert client.post("/generate", json={"prompt": "a", "max_tokens": 3}).status_code == 200


def test_sigterm_ends_all_processes(on_ray: OnRay) -> None:
    on_ray.process.send_signal(signal.SIGTERM)
    assert on_ray.process.wait(60) == 0
    eventually(lambda: not on_ray.replicas())
    assert "Traceback" not in on_ray.output()


# Settings


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--max-connections", "5"], "HAProxy manages the clients' connections"),
        (["--drain-grace", "5"], "HAProxy manages the clients' connections"),
        (["--import-model"], "run `logitd import` first"),
        (["--port", "0"], "choose a port"),
        (
            ["--min-replicas", "2", "--max-replicas", "1"],
            "--max-replicas: must be at least --min-replicas, which is 2",
        ),
        (["checkpoints/none"], "does not exist"),
        (["--no-such-flag"], "--no-such-flag"),
    ],
)
def test_invalid_ray_settings_are_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert said in capsys.readouterr().err


def test_every_flag_of_the_server_is_accepted() -> None:
    assert set(ServeSettings.model_fields) < set(RaySettings.model_fields)


@pytest.mark.parametrize(
    ("settings", "slots"),
    [({}, EngineConfig().slots), ({"slots": 5}, 5), ({"kv_cache_memory": "1GiB"}, None)],
)
def test_replicas_divide_free_memory(settings: dict[str, Any], slots: int | None) -> None:
    """The replicas start at the same time on one machine."""
    deployed = application(RaySettings(_env_file=None, **settings))._bound_deployment
    assert deployed.init_args[0]["slots"] == slots
