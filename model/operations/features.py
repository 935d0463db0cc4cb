"""Features: facts about the features of a served autoencoder, and the tokens that a feature
promotes.

The direction of a feature, its row of the decoder, takes the place of the last residual stream. The
engine's final norm and head then turn it into logits, like any stream. The logits of a zero stream
are subtracted, so that biases do not count.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from logitd.model.inference.engine.requests import Logits, OutputsRequest
from logitd.model.inference.interventions import Intervention
from logitd.model.operations.computed import Computed
from logitd.model.operations.operation import Subject, new_id
from logitd.model.sae.files import StoredAutoencoder
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.config import GPTConfig
from logitd.model.transformer.features import Features

PROMOTED = 12
"""Number of tokens in each of a feature's two lists: the tokens whose logits it raises most, and
the tokens whose logits it lowers most."""

MOST_OF_CAP = 1 - 1e-7
"""Largest share of `logit_softcap` for which the logit before the cap is computed. In float32,
larger logits are the cap itself."""


def summary(
    autoencoders: Mapping[Features, StoredAutoencoder],
    features: Features | None,
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """The autoencoders of a model. If `features` is one of them, the result also has statistics of
    each of its features."""
    facts = None if features is None else autoencoders[features].facts
    figures: dict[str, Any] = {"density": None, "strongest": None, "tokens": None}
    if facts is not None:
        ids, strengths = facts.ids[:, 0], facts.activations[:, 0]  # (F, W)
        at = np.take_along_axis(ids, strengths.argmax(axis=1)[:, None], axis=1)[:, 0]
        figures = {
            "density": facts.density.tolist(),
            "strongest": strengths.max(axis=1).tolist(),
            "tokens": [_text(tokenizer, int(token_id)) for token_id in at],
        }
    return {
        "saes": [_described(each, stored) for each, stored in autoencoders.items()],
        "sae": None if features is None else features.name,
        **figures,
    }


def _described(features: Features, stored: StoredAutoencoder) -> dict[str, Any]:
    return {
        "name": features.name,
        "stage": features.stage_name,
        "architecture": stored.architecture,
        "features": features.count,
        "k": stored.autoencoder.k,
        "training": dict(stored.record),
    }


def promotion_request(
    stored: StoredAutoencoder, index: int, config: GPTConfig
) -> OutputsRequest | None:
    """The request for the logits of a feature's direction and of a zero vector. None if the
    direction is zero or is not as wide as the residual stream."""
    direction = stored.direction(index)
    if len(direction) != config.d_model or not direction.any():
        return None
    unit = direction * (len(direction) ** 0.5 / np.linalg.norm(direction))
    last = "backout" if config.backout else f"blocks.{config.n_layer - 1}.output"
    return OutputsRequest(
        request_id=new_id("feature"),
        token_ids=(0, 0),
        positions=(0, 1),
        output=Logits(),
        interventions=(
            Intervention(
                stage=last,
                operation="set",
                positions=(0, 1),
                values=np.stack([unit, np.zeros_like(unit)]).astype(np.float32),
            ),
        ),
    )


def described_feature(
    features: Features,
    stored: StoredAutoencoder,
    index: int,
    request: OutputsRequest | None,
    computed: Computed,
    subject: Subject,
) -> dict[str, Any]:
    """The facts about a feature. `computed` has the logits of `request`."""
    tokenizer, cap = subject.tokenizer, subject.checkpoint.config.logit_softcap
    facts, promoted, suppressed = stored.facts, None, None
    if request is not None:
        direction = stored.direction(index)
        rows = np.array(computed.rows[request.request_id], dtype=np.float64)
        if cap is not None:  # logits before the cap
            rows = cap * np.arctanh(np.clip(rows / cap, -MOST_OF_CAP, MOST_OF_CAP))
        raised, neutral = rows
        logits = (raised - neutral) * (np.linalg.norm(direction) / len(direction) ** 0.5)
        order = np.argsort(-logits, kind="stable")
        promoted = [_logit(tokenizer, int(token_id), logits) for token_id in order[:PROMOTED]]
        suppressed = [
            _logit(tokenizer, int(token_id), logits) for token_id in order[: -PROMOTED - 1 : -1]
        ]
    return {
        "sae": features.name,
        "stage": features.stage_name,
        "index": index,
        "density": None if facts is None else float(facts.density[index]),
        "examples": (
            []
            if facts is None
            else _examples(facts.ids[index], facts.activations[index], tokenizer)
        ),
        "promoted": promoted,
        "suppressed": suppressed,
    }


def _logit(tokenizer: Tokenizer, token_id: int, logits: Any) -> dict[str, Any]:
    return {**_token(tokenizer, token_id), "logit": float(logits[token_id])}


def _token(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    return {"id": token_id, "text": _text(tokenizer, token_id)}


def _text(tokenizer: Tokenizer, token_id: int) -> str | None:
    """The text of an id; None if there is no such id."""
    return tokenizer.token_text(token_id) if 0 <= token_id < tokenizer.vocab_size else None


def _examples(ids: Any, activations: Any, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The examples of a feature, from the ids and activations (E, W) of E windows of W tokens."""
    return [
        {
            "strongest": float(row.max()),
            "tokens": [
                {**_token(tokenizer, int(token_id)), "activation": float(activation)}
                for token_id, activation in zip(of_row, row, strict=True)
                if 0 <= token_id < tokenizer.vocab_size
            ],
        }
        for of_row, row in zip(ids, activations, strict=True)
        if row.max() > 0
    ]
