"""Entry point of the program: `python -m logitd.model.owner_code.process FOLDER [FD]`.

FOLDER contains `request.json` (a `Job`) and, unless the job names another file,
`weights.safetensors`. The program writes its answer to the folder: `answer.safetensors` (ids, their
logits, and the logits after the last id was replaced), `facts.json`, or `problem.txt`. The job
"serve" answers on the socket FD instead.
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
from safetensors.torch import load_file, save_file

from logitd.model.owner_code.process.answer import Answerer
from logitd.model.owner_code.process.build import Request, build_model
from logitd.model.owner_code.process.call import Caller, compare
from logitd.model.owner_code.process.measure import PACKAGES, measure
from logitd.model.owner_code.process.network import leave_network
from logitd.model.owner_code.process.problem import Problem
from logitd.model.owner_code.process.wire import Wire

REQUEST, WEIGHTS = "request.json", "weights.safetensors"
ANSWER, FACTS, PROBLEM = "answer.safetensors", "facts.json", "problem.txt"


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


def main(folder: Path, end: socket.socket | None) -> int:
    leave_network()
    job = Job(**json.loads((folder / REQUEST).read_text(encoding="utf-8")))
    request = Request(**job.request)
    root = Path.cwd()
    if root.name not in PACKAGES:  # a checkout of this project, whose folders have common names
        sys.path[:] = [path for path in sys.path if path and Path(path) != root]
    os.chdir(Path(request.file).parent)
    if job.threads:
        torch.set_num_threads(job.threads)
    try:
        _run(job, request, folder, None if end is None else Wire(end))
    except Problem as problem:
        (folder / PROBLEM).write_text(str(problem), encoding="utf-8")
        return 1
    except (EOFError, ConnectionError):
        pass  # the other process has ended
    return 0


def _run(job: Job, request: Request, folder: Path, wire: Wire | None) -> None:
    built = build_model(request, load_file(job.weights or folder / WEIGHTS))
    caller = Caller(built.model, built.module, request.call)
    options = dict(job.options)
    match job.kind:
        case "compare":
            names = ("token_ids", "logits", "changed")
            answer = compare(caller, options["rows"], options["length"])
            save_file(dict(zip(names, answer, strict=True)), folder / ANSWER)
        case "measure":
            facts = measure(caller, Path(request.file), **options)
            chosen = {"chosen": built.attempt.chosen}
            (folder / FACTS).write_text(json.dumps(facts | chosen), encoding="utf-8")
        case _:
            assert wire is not None
            context = options.pop("context")
            Answerer(caller, wire, **options).run(context)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    given = socket.socket(fileno=int(sys.argv[2])) if len(sys.argv) > 2 else None
    sys.exit(main(Path(sys.argv[1]), given))
