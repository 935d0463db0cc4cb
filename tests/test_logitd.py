"""`import logitd`: the names of the client, and nothing of the server."""

import subprocess
import sys
from pathlib import Path

import logitd
from service import client

ROOT = Path(__file__).parent.parent

IMPORTED = """
import sys
import httpx, numpy
others = set(sys.modules)
import logitd
print(*(set(sys.modules) - others))
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


def test_it_imports_little_and_nothing_of_the_server() -> None:
    """A script or a notebook starts at once: httpx, numpy, the standard library, the client.

    Which modules are loaded is what decides how long that takes, and is the same on a busy
    machine; a limit in seconds was not, and failed there.
    """
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], cwd=ROOT, check=True, capture_output=True, text=True
    )
    names = set(done.stdout.split())
    assert "service.client" in names
    ours = {"logitd", "service", "numpy"}  # numpy loads parts of itself at their first use
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names | ours
    assert all(name.startswith("service.client") for name in names if name.startswith("service."))
