"""Logits of chosen positions: row i predicts the token after position i."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from logitd.model.inference.engine.requests import OutputsRequest
from logitd.model.inference.engine.validation import check_count
from logitd.model.inference.sampling.distribution import largest
from logitd.model.operations.body import ChosenIds, Examples, HalfOrFull, PromptReply, Reply, Stage
from logitd.model.operations.operation import (
    Listing,
    NamedArray,
    Operation,
    Outputs,
    Planning,
    Subject,
)
from logitd.model.operations.outputs import ArraysBody, outputs_requests
from logitd.model.operations.processing import StageBody, logits_output
from logitd.model.operations.tokens import NamedToken, token_json
from logitd.model.text.tokenizer import Tokenizer


class LogitsRequest(StageBody, ArraysBody):
    """Logits of one or many prompts."""

    examples: ClassVar[Examples] = {
        "The five largest after the last token": {"prompt": "def main():", "top_k": 5},
        "Every row of a prompt given as token ids": {"prompt": [1, 2, 3], "positions": "all"},
        "Three columns of the first and the last row": {
            "prompt": "The answer is",
            "positions": [0, -1],
            "token_ids": [10, 11, 12],
        },
        "The logits that the sampler keeps": {
            "prompt": "import",
            "top_k": 8,
            "stage": "processed",
            "processing": {"temperature": 0.7, "top_p": 0.9},
        },
    }

    alternatives: ClassVar[Sequence[Sequence[str]]] = (("token_ids", "top_k"),)

    token_ids: ChosenIds | None = Field(None, description="Columns. Absent: the whole vocabulary.")
    top_k: int | None = Field(
        None, ge=1, lt=2**31, description="Return only the k largest of each row; not with npy."
    )


class TopLogit(NamedToken):
    logit: float


class PromptLogits(PromptReply):
    positions: list[int] = Field(description="Row i predicts the token after this position.")
    columns: list[int] | None = Field(description="Ids of the columns. null: 0, 1, 2, ...")
    logits: list[list[float | None]] | None = Field(
        description="null for a token that processing removed."
    )
    top: list[list[TopLogit]] | None = Field(description="With top_k, instead of logits.")


class LogitsReply(Reply):
    stage: Stage
    dtype: HalfOrFull
    prompts: list[PromptLogits]


def plan(body: LogitsRequest, subject: Subject) -> Planning:
    columns = None if body.token_ids is None else tuple(body.token_ids)
    output = logits_output(body, columns)
    requests = yield from outputs_requests(body, output, subject)
    check_count("top_k", body.top_k, subject.config.vocab_size)
    members = {"stage": body.stage}
    if body.top_k is None:
        width = subject.tokenizer.vocab_size if columns is None else len(columns)
        arrays = [NamedArray("logits", _shapes(requests, width))]
        facts = {"columns": body.token_ids, "top": None}
        return Outputs(requests, arrays, body.dtype, members=members, facts=facts)
    rows = sum(len(request.positions) for request in requests)
    subject.check_listed(body.top_k * rows, "logprobs", "top_k")
    shapes = _shapes(requests, body.top_k)
    return Outputs(
        requests,
        [NamedArray("top_ids", shapes, dtype="int64"), NamedArray("top_logits", shapes)],
        body.dtype,
        split=partial(_top_arrays, count=body.top_k),
        listing=Listing("top", partial(_top_row, count=body.top_k, tokenizer=subject.tokenizer)),
        members=members,
        facts={"columns": body.token_ids, "logits": None},
        not_npy=(
            "npy cannot be used with top_k; accept JSON or application/vnd.safetensors, or set "
            "token_ids instead",
            "top_k",
        ),
    )


def _shapes(requests: Sequence[OutputsRequest], width: int) -> list[tuple[int, ...]]:
    return [(len(request.positions), width) for request in requests]


def _top_row(
    row: npt.NDArray[Any], *, count: int, tokenizer: Tokenizer
) -> Iterator[dict[str, Any]]:
    """The TopLogit of each of the largest logits."""
    for i in _kept(row, count):
        yield {**token_json(tokenizer, int(i)), "logit": float(row[i])}


def _top_arrays(
    rows: npt.NDArray[Any], *, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """The ids and values of the largest logits of each row, padded with -1 and -inf."""
    ids = np.full((len(rows), count), -1, dtype=np.int64)
    values = np.full((len(rows), count), -np.inf, dtype=np.float32)
    for index, row in enumerate(rows):
        best = _kept(row, count)
        ids[index, : len(best)] = best
        values[index, : len(best)] = row[best]
    return ids, values


def _kept(row: npt.NDArray[Any], count: int) -> npt.NDArray[np.intp]:
    """The indices of the `count` largest logits of a row, except logits that processing has
    removed."""
    best = largest(row, count)
    return best[row[best] > -np.inf]


LOGITS = Operation(
    name="logits",
    body=LogitsRequest,
    reply=LogitsReply,
    plan=plan,
    form="outputs",
    summary="Logits at chosen positions",
    description="""\
Logits of the chosen positions: row i predicts the token after position i.

`Accept: application/x-npy` returns one prompt's rows as an array (positions, columns) for
`numpy.load`, `application/vnd.safetensors` the rows of all prompts; otherwise JSON.""",
)
