"""The process in which one peer is measured. It receives commands as lines of JSON.

python -m benchmarks.peers.worker MODULE WEIGHTS_FOLDER DTYPE THREADS

The first line that it writes describes the peer, or says that a package is missing or that the peer
does not support the dtype or shape. Then it answers each command with a line of JSON. It exits at
the end of its input.
"""

import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from benchmarks.peers.contract import Peer, Unsupported


def load_peer(module: str, folder: Path, dtype: str, threads: int) -> Peer:
    """Load the peer with the adapter `module`. Raises ImportError if the peer's package is
    missing."""
    # By name, because this interpreter can import only one of the adapters.
    adapter = importlib.import_module(f"benchmarks.peers.{module}")
    return adapter.load(folder, dtype, threads)


def answer(peer: Peer, question: dict[str, Any]) -> dict[str, Any]:
    if question["do"] == "logprobs":
        return {"logprobs": peer.logprobs(question["ids"]).tolist()}
    return asdict(peer.run(question["prompts"], question["steps"]))


def serve(peer: Peer, questions: TextIO, answers: TextIO) -> None:
    for line in questions:
        print(json.dumps(answer(peer, json.loads(line))), file=answers, flush=True)


def main() -> None:
    module, folder, dtype, threads = sys.argv[1:]
    # Libraries print freely: the pipe is reserved for answers, and everything else goes to the log.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        try:
            peer = load_peer(module, Path(folder), dtype, int(threads))
        except ImportError as error:
            print(json.dumps({"missing": str(error)}), file=answers, flush=True)
            return
        except Unsupported as error:
            print(json.dumps({"unsupported": str(error)}), file=answers, flush=True)
            return
        print(json.dumps({"about": peer.about}), file=answers, flush=True)
        serve(peer, sys.stdin, answers)


if __name__ == "__main__":
    main()
