"""Entry point of the program: `python -m logitd.model.owner_code.process FOLDER FD`.

FOLDER contains `request.json` (a `Job`) and, unless the job names another file,
`weights.safetensors`. The program answers on the socket FD, in frames (`wire.py`). The answer to
"compare" has ids and their logits, followed by the logits after the last id was replaced,
and the attempt's own values (`Attempt.kept`); a second frame has a longer sequence of ids and the
logits of its last positions. The answer to "measure" has the facts. `answer.py` describes the
answers to "serve". If the owner's code fails, the answer is {"error": text}.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from logitd.model.owner_code.process.answer import Answerer
from logitd.model.owner_code.process.build import Request, Section, build_model
from logitd.model.owner_code.process.call import Caller, compare, compare_late
from logitd.model.owner_code.process.measure import PACKAGES, measure
from logitd.model.owner_code.process.network import leave_network
from logitd.model.owner_code.process.problem import Problem
from logitd.model.owner_code.process.wire import Wire

REQUEST, WEIGHTS = "request.json", "weights.safetensors"


@dataclass(frozen=True)
class Job:
    """The request to this program.

    kind      "compare" computes logits for random ids, "measure" measures facts, "serve" answers
              requests for logits
    request   members of a `Request`
    options   arguments of this kind of job
    weights   path of the weights, if they are not in the folder
    threads   number of torch's threads; 0 means torch's default
    """

    kind: str
    request: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    weights: str | None = None
    threads: int = 0


def main(folder: Path, wire: Wire) -> int:
    leave_network()
    text = (folder / REQUEST).read_text(encoding="utf-8")
    job = Job(**json.loads(text, object_hook=Section))
    request = Request(**job.request)
    root = Path.cwd()
    if root.name not in PACKAGES:  # a checkout of this project, whose folders have common names
        sys.path[:] = [path for path in sys.path if path and Path(path) != root]
    os.chdir(Path(request.file).parent)
    sys.argv = [request.file]
    if job.threads:
        torch.set_num_threads(job.threads)
    try:
        try:
            _run(job, request, folder, wire)
        except Problem as problem:
            wire.send({"error": str(problem)})
            return 1
    except (EOFError, ConnectionError):
        pass  # the other process has ended
    return 0


def _run(job: Job, request: Request, folder: Path, wire: Wire) -> None:
    built = build_model(request, load_file(job.weights or folder / WEIGHTS))
    caller = Caller(built.model, built.module, request.call)
    options = dict(job.options)
    match job.kind:
        case "compare":
            rows, length = options["rows"], options["length"]
            special = [token_id for token_id in options["special_ids"] if token_id < rows]
            named = [*special, *built.named_ids(rows)]
            token_ids, *logits = compare(caller, rows, length, list(dict.fromkeys(named)))
            header = {"token_ids": token_ids.tolist(), "kept": built.attempt.kept}
            wire.send(header, torch.stack(logits))
            token_ids, late = compare_late(caller, rows, length, options["longest"])
            wire.send({"token_ids": token_ids.tolist()}, late)
        case "measure":
            facts = measure(caller, Path(request.file), **options)
            read = sorted(built.attempt.asked | {name.lower() for name in vars(built.module)})
            wire.send(
                facts | {"chosen": built.attempt.chosen, "kept": built.attempt.kept, "read": read}
            )
        case _:
            context = options.pop("context")
            Answerer(caller, wire, **options).run(context)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(main(Path(sys.argv[1]), Wire(socket.socket(fileno=int(sys.argv[2])))))
