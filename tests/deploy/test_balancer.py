"""nginx with the shipped configuration in front of two real servers: streams are not buffered, and
new requests are answered after a replica is killed under load."""

import json
import shutil
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import ServedProcess
from tests.model.factories import save_tiny_checkpoint
from tests.service.serving import eventually
from tests.service.spelling import CONTEXT_LENGTH, spelled, spelling_gpt

LONG = {"prompt": "a", "max_tokens": CONTEXT_LENGTH - 1, "ignore_eos": True, "stream": True}
BALANCER = Path(__file__).parents[2] / "deploy" / "balancer"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed"),
]


TLS = ("listen 8443 ssl;", "ssl_certificate ", "ssl_certificate_key ", "ssl_protocols ")


def with_tls(config: str, folder: Path) -> str:
    """Uncomment the lines of the configuration that enable TLS, and make a certificate."""
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -keyout"
    subprocess.run(
        [*command.split(), str(folder / "privkey.pem"), "-out", str(folder / "fullchain.pem"),
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    config = config.replace("        listen 8000;\n", "")
    for line in TLS:
        assert f"# {line}" in config
        config = config.replace(f"# {line}", line)
    return config.replace("/etc/nginx/tls", str(folder)).replace("8443", "8000")


@contextmanager
def balancer(replicas: list[str], folder: Path, port: int, *, tls: bool = False) -> Iterator[str]:
    """Run nginx as a load balancer for the servers at these addresses. Yields its URL."""
    config = (BALANCER / "nginx.conf").read_text(encoding="utf-8")
    if tls:
        config = with_tls(config, folder)
    servers = (BALANCER / "replicas.conf").read_text(encoding="utf-8").splitlines()
    for number, (address, line) in enumerate(zip(replicas, servers, strict=True), start=1):
        servers[number - 1] = line.replace(f"replica-{number}:8000", address)
    (folder / "replicas.conf").write_text("\n".join(servers))
    for old, new in {
        "listen 8000": f"listen 127.0.0.1:{port}",
        "/etc/nginx/replicas.conf": str(folder / "replicas.conf"),
        "/tmp/nginx": str(folder / "nginx"),
        "error_log /dev/stderr": f"error_log {folder}/errors",
    }.items():
        assert old in config
        config = config.replace(old, new)
    (folder / "nginx.conf").write_text(config)
    command = ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]
    check = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr
    process = subprocess.Popen([*command, "-g", "daemon off;"])
    url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"

    def ready() -> bool:
        with suppress(httpx.ConnectError):
            return httpx.get(f"{url}/health", verify=False).status_code == 200
        return False

    try:
        eventually(ready)
        yield url
    finally:
        process.send_signal(signal.SIGQUIT)
        process.wait(30)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[ServedProcess]]:
    checkpoint = save_tiny_checkpoint(tmp_path / "speller", spelling_gpt()).path
    with ExitStack() as stack:
        yield [
            stack.enter_context(ServedProcess(str(checkpoint), "--threads", "1", "--slots", "4"))
            for _ in range(2)
        ]


def addresses(replicas: list[ServedProcess]) -> list[str]:
    return [replica.url.removeprefix("http://") for replica in replicas]


@pytest.fixture
def client(replicas: list[ServedProcess], tmp_path: Path, free_port: int) -> Iterator[httpx.Client]:
    with (
        balancer(addresses(replicas), tmp_path, free_port) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def test_stream_passes_as_it_is_written(
    replicas: list[ServedProcess], client: httpx.Client
) -> None:
    """The first events arrive while the server is still writing. The request's id is passed on."""
    named = {"X-Request-ID": "abc"}
    with client.stream("POST", "/generate", json=LONG, headers=named) as reply:
        assert reply.headers["x-request-id"] == "abc"
        lines = (line for line in reply.iter_lines() if line.startswith("data: {"))
        events = [json.loads(next(lines)[6:])]
        running = [replica.sample("logitd_num_sequences_running") for replica in replicas]
        assert sorted(running) == [0, 1], "one of the two servers still generates it"
        events += [json.loads(line[6:]) for line in lines]
        tokens = [i for event in events for choice in event["choices"] for i in choice["token_ids"]]
        assert tokens == spelled("a", CONTEXT_LENGTH - 1)


def test_client_cannot_choose_the_address_by_which_it_is_counted(
    tmp_path: Path, free_port: int
) -> None:
    """logitd on the same machine believes the address that nginx forwards."""
    seen: list[str | None] = []

    class Replica(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["X-Forwarded-For"])
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Replica) as server:
        threading.Thread(target=server.serve_forever).start()
        replicas = [f"127.0.0.1:{server.server_port}"] * 2
        try:
            with balancer(replicas, tmp_path, free_port) as url:
                httpx.get(url, headers={"X-Forwarded-For": "203.0.113.7"})
        finally:
            server.shutdown()
    assert set(seen) == {"127.0.0.1"}


def test_answer_503_for_one_model_leaves_the_others_reachable(
    tmp_path: Path, free_port: int
) -> None:
    """nginx took each such answer for a failure of the replica, and then all of them were gone."""

    class Replica(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200)

        def do_POST(self) -> None:  # as for a model that could not be loaded
            self._answer(503)

        def _answer(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Replica) as server:
        threading.Thread(target=server.serve_forever).start()
        replicas = [f"127.0.0.1:{server.server_port}", f"localhost:{server.server_port}"]
        try:
            with balancer(replicas, tmp_path, free_port) as url:
                for _ in range(4):
                    assert httpx.post(url).status_code == 503
                    assert httpx.get(url).status_code == 200
        finally:
            server.shutdown()


def test_requests_go_to_the_replica_with_fewer(
    replicas: list[ServedProcess], client: httpx.Client
) -> None:
    with ExitStack() as stack:
        for _ in range(4):
            reply = stack.enter_context(client.stream("POST", "/generate", json=LONG | {"n": 2}))
            assert reply.status_code == 200
        shares = [
            replica.sample("logitd_num_sequences_running")
            + replica.sample("logitd_num_sequences_waiting")
            for replica in replicas
        ]
        assert shares == [4, 4]


def test_killed_replica_fails_no_later_request(
    replicas: list[ServedProcess], tmp_path: Path, free_port: int
) -> None:
    """Only requests that are in progress may fail, at most one per client. Every later request is
    answered."""
    lost, _ = replicas
    begun, answers, broken = [], [], []
    stop, killed = threading.Event(), threading.Event()

    def ask(url: str) -> None:
        with httpx.Client(base_url=url, timeout=60) as client:
            while not stop.is_set():
                after = killed.is_set()
                begun.append(after)
                try:
                    body = {"prompt": "a", "max_tokens": 50, "ignore_eos": True}
                    reply = client.post("/generate", json=body)
                except httpx.HTTPError:
                    broken.append(after)
                else:
                    answers.append((after, reply.status_code))

    with balancer(addresses(replicas), tmp_path, free_port) as url:
        clients = [threading.Thread(target=ask, args=(url,)) for _ in range(4)]
        for thread in clients:
            thread.start()
        try:
            eventually(lambda: len(answers) > 40)
            lost.signal(signal.SIGKILL)
            time.sleep(0.05)
            killed.set()
            before = len(answers)
            eventually(lambda: len(answers) > before + 100)
        finally:
            stop.set()
            for thread in clients:
                thread.join()
    assert len(answers) + len(broken) == len(begun)
    assert [status for after, status in answers if after and status != 200] == []
    assert True not in broken
    assert sum(status != 200 for _, status in answers) + len(broken) <= 4, "one a client"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_replies_are_the_same_over_tls(
    replicas: list[ServedProcess], tmp_path: Path, free_port: int
) -> None:
    with balancer(addresses(replicas), tmp_path, free_port, tls=True) as url:
        trusted = ssl.create_default_context(cafile=str(tmp_path / "fullchain.pem"))
        with httpx.Client(base_url=url, verify=trusted) as client:
            body = {"prompt": "a", "max_tokens": 5, "temperature": 0}
            reply = client.post("/generate", json=body).json()
        assert reply["choices"][0]["token_ids"] == spelled("a", 5)
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{url}/health")
