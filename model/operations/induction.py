"""Induction scores: how strongly each head attends to the token that followed an earlier occurrence
of the current token.

Olsson et al. (2022), In-context Learning and Induction Heads, https://arxiv.org/abs/2209.11895,
define the score as a mean over many sequences; here it is the score of one sequence.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from logitd.model.inference.engine.requests import AttentionWeights, OutputsRequest
from logitd.model.inference.errors import InvalidRequest
from logitd.model.inference.interventions import PARAM
from logitd.model.inference.selection import gpt_only
from logitd.model.operations.body import Examples, PromptBody, PromptReply, Reply
from logitd.model.operations.interventions import Interventions, resolve_interventions
from logitd.model.operations.operation import Operation, Planning, Record, Subject, new_id
from logitd.model.operations.prompts import encode_all


class InductionRequest(PromptBody):
    """Induction scores of all heads, computed on prompts that are each repeated once."""

    examples: ClassVar[Examples] = {
        "Scores for unrelated tokens": {"prompt": [17, 203, 94, 41, 160, 8, 77, 129]},
        "Scores without the first layer's attention": {
            "prompt": [17, 203, 94, 41, 160, 8, 77, 129],
            "interventions": [{"stage": "blocks.0.attention.heads", "operation": "zero"}],
        },
    }

    interventions: Interventions = Field(
        default_factory=list,
        description="Interventions; their positions count in the doubled sequence.",
    )


class PromptInduction(PromptReply):
    scores: list[list[float]] = Field(
        description="Score of each head, by layer, from 0 to 1: the mean attention weight from "
        "each token of the second copy to the token after the same place in the first."
    )


class InductionReply(Reply):
    prompts: list[PromptInduction]


def induction_scores(weights: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """The scores (layers, heads) from attention weights (T, layers, heads, 2T). The prompt is two
    copies of T tokens, and the rows are the positions of the second copy. The score of row j is its
    attention weight on token j + 1 of the prompt."""
    rows = np.arange(len(weights))
    found: npt.NDArray[np.float64] = weights[rows, ..., rows + 1].mean(0, dtype=np.float64)
    return found


def plan(body: InductionRequest, subject: Subject) -> Planning:
    config = gpt_only(subject.config, "attention weights")
    prompts = encode_all(body.prompts, "prompt", subject)
    _check_lengths(prompts, subject)
    twice = [prompt * 2 for prompt in prompts]
    changes = yield from resolve_interventions(body.interventions, twice, subject)
    weights = AttentionWeights(
        layers=tuple(range(config.n_layer)), heads=tuple(range(config.n_head))
    )
    requests = [
        OutputsRequest(
            request_id=new_id("outputs"),
            token_ids=token_ids,
            positions=tuple(range(len(token_ids) // 2, len(token_ids))),
            output=weights,
            interventions=interventions,
        )
        for token_ids, interventions in zip(twice, changes, strict=True)
    ]
    changed = bool(body.interventions)
    held = sum(config.n_layer * config.n_head * 2 * len(prompt) ** 2 for prompt in prompts)
    if subject.max_elements is not None and held > subject.max_elements:
        raise InvalidRequest(
            f"the scores need {held} attention weights, but the limit is {subject.max_elements}. "
            "Give shorter or fewer prompts, or raise --max-reply-elements",
            "prompt",
        )

    def reply(computed: Any) -> dict[str, Any]:
        scores = [induction_scores(np.stack(computed.rows[each.request_id])) for each in requests]
        if changed and not all(np.isfinite(of_heads).all() for of_heads in scores):
            message = f"{PARAM}: the attention weights are not finite"
            raise InvalidRequest(message, PARAM, "intervention_failed")
        return {
            "prompts": [
                {"index": index, "token_ids": prompt, "scores": of_heads.tolist()}
                for index, (prompt, of_heads) in enumerate(zip(prompts, scores, strict=True))
            ]
        }

    return Record(requests, reply, held)


def _check_lengths(prompts: Sequence[Sequence[int]], subject: Subject) -> None:
    most = subject.context_length // 2
    for prompt in prompts:
        if len(prompt) > most:
            raise InvalidRequest(
                f"the prompt has {len(prompt)} tokens; the model sees it twice, and the context of "
                f"{subject.context_length} has room for {most}. Shorten it",
                "prompt",
            )


INDUCTION = Operation(
    name="induction",
    body=InductionRequest,
    reply=InductionReply,
    plan=plan,
    form="record",
    summary="Induction scores of all heads",
    description="""\
The prompt is given to the model twice in a row. The score of a head is the mean attention weight
from each token of the second copy to the token after the same place in the first. An induction
head, which copies what followed earlier, has a score near 1; a head that attends to all earlier
tokens alike has about ln(2) / T for T tokens. Random token ids measure copying alone; in ordinary
text, a head may also attend to that token for other reasons.""",
)
