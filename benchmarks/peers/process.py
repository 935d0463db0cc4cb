"""Runs a peer in a separate process: starts it, sends it requests, and ends it."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.contract import Run

ROOT = Path(__file__).parent.parent.parent


class PeerMissing(Exception):
    """Raised if the interpreter lacks the peer's package, or the peer does not support the dtype or
    shape."""


class PeerFailed(Exception):
    """Raised if the peer's process has ended; the message has the last lines of its log."""


class PeerProcess:
    """A process that has loaded a peer. `about` has the peer's version and settings."""

    def __init__(self, python: str, module: str, *, folder: Path, dtype: str, threads: int) -> None:
        self._log = folder / f"{module}-{dtype}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", "benchmarks.peers.worker", module, str(folder), dtype, str(threads)],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            first = self._read()
        except PeerFailed:
            self.close()
            raise
        if "missing" in first:
            self.close()
            raise PeerMissing(f"{first['missing']}, in {python}")
        if "unsupported" in first:
            self.close()
            raise PeerMissing(str(first["unsupported"]))
        self.about = str(first["about"])

    def logprobs(self, ids: list[int]) -> NDArray[np.float64]:
        """Log-probabilities (V,) of the token after `ids`. Raises PeerFailed."""
        return np.array(self._ask({"do": "logprobs", "ids": ids})["logprobs"])

    def run(self, prompts: list[list[int]], steps: int) -> Run:
        """Call `Peer.run` in the process. Raises PeerFailed."""
        return Run(**self._ask({"do": "run", "prompts": prompts, "steps": steps}))

    def close(self) -> None:
        """End the process, and free its memory."""
        self._process.communicate()

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerFailed(self._last_words()) from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(self._last_words())
        return json.loads(line)

    def _last_words(self) -> str:
        code = self._process.wait()
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join([f"exit code {code}", *lines[-5:]])
