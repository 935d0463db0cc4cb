"""`import logitd`: the client's names, at once, and nothing of the server."""

import subprocess
import sys
from pathlib import Path

import logitd
from service import client

ROOT = Path(__file__).parent.parent

MEASURE = """
import sys, time
started = time.process_time()
import logitd
print(time.process_time() - started)
print(*sys.modules)
"""


def test_its_names_are_those_of_the_client() -> None:
    public = {name for name in vars(logitd) if not name.startswith("_")}
    assert public == set(client.__all__)
    assert all(getattr(logitd, name) is getattr(client, name) for name in public)
    assert len(client.__all__) == len(set(client.__all__))


def test_it_has_types_for_those_who_install_it() -> None:
    """Checkers look for this file in each package that a name comes from."""
    for kind in (logitd.Client, logitd.Generation):
        assert (ROOT / kind.__module__.partition(".")[0] / "py.typed").exists()
    assert (ROOT / "logitd" / "py.typed").exists()


def test_it_is_imported_at_once_and_without_the_server() -> None:
    """Of a few tries the fastest, by the processor's time: machines are busy."""
    seconds = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE], cwd=ROOT, check=True, capture_output=True, text=True
        )
        taken, names = done.stdout.splitlines()
        seconds.append(float(taken))
        roots = {name.partition(".")[0] for name in names.split()}
        assert not roots & {"torch", "model", "fastapi", "starlette", "uvicorn", "pydantic"}
        assert {name for name in names.split() if name.startswith("service.")} == {
            name for name in names.split() if name.startswith("service.client")
        }
    assert min(seconds) < 0.3, seconds
