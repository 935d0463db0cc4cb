"""The GPT with every part of nanochat's shape, against a textbook of nanochat in its own terms.

The textbook reads one token at a time and keeps keys and values in lists, in float64. It has
nanochat's conventions: norms without weights, rotation by the negative angle, queries and keys
times 1.2, gates from 0 to 3 over 12 channels, and windows counted without the position itself.
`folded` states them in terms of ours.
"""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from logitd.model.transformer.config import MODERN, gpt2_shape
from logitd.model.transformer.gpt import GPT
from tests.model.factories import random_ids

LAYERS, HEADS, KEY_HEADS, WIDTH, D, VOCABULARY = 4, 4, 2, 40, 10, 50
BEHIND = (6, 6, 0, None)
"""For each layer, the number of earlier positions that a position sees; None: all."""
EPS = 1.1920929e-07
CAP = 15.0


@dataclass
class Textbook:
    """nanochat's weights by name, and what is kept of the tokens before the next one."""

    weights: dict[str, Tensor]

    def __post_init__(self) -> None:
        self.keys: list[list[Tensor]] = [[] for _ in range(LAYERS)]
        self.values: list[list[Tensor]] = [[] for _ in range(LAYERS)]
        self.before: Tensor | None = None

    def read(self, token: int) -> Tensor:
        """The logits (V,) after one more token."""
        w = self.weights
        vector = unit(w["embedding"][token])
        first = vector
        if self.before is not None:
            share = w["smear_scale"] / (1 + math.exp(-float(w["smear_gate"] @ vector[:24])))
            first = vector + share * self.before
        self.before = vector
        stream, middle = first, first
        for layer in range(LAYERS):
            stream = w["stream_scales"][layer] * stream + w["first_scales"][layer] * first
            stream = stream + self.attended(layer, unit(stream), token)
            units = (w[f"up.{layer}"] @ unit(stream)).clamp(min=0)
            stream = stream + w[f"down.{layer}"] @ (units * units)
            if layer == LAYERS // 2:
                middle = stream
        logits = w["head"] @ unit(stream - w["backout_scale"] * middle)
        return CAP * torch.tanh(logits / CAP)

    def attended(self, layer: int, x: Tensor, token: int) -> Tensor:
        w, position = self.weights, len(self.keys[layer])
        queries, keys, values = (
            (w[f"{name}.{layer}"] @ x).view(-1, D) for name in ("query", "key", "value")
        )
        if f"value_embedding.{layer}" in w:
            gates = 3 / (1 + (-w[f"value_gate.{layer}"] @ x[:12]).exp())
            values = values + gates[:, None] * w[f"value_embedding.{layer}"][token].view(-1, D)
        self.keys[layer].append(1.2 * unit(turned(keys, position)))
        self.values[layer].append(values)
        queries = 1.2 * unit(turned(queries, position))
        behind = BEHIND[layer]
        seen = slice(0 if behind is None else max(0, position - behind), None)
        results = []
        for head, query in enumerate(queries):
            shared = head * KEY_HEADS // HEADS
            scores = [float(query @ key[shared]) / D**0.5 for key in self.keys[layer][seen]]
            powers = [math.exp(score - max(scores)) for score in scores]
            weighed = zip(powers, self.values[layer][seen], strict=True)
            results.append(sum(power / sum(powers) * value[shared] for power, value in weighed))
        return w[f"out.{layer}"] @ torch.cat([torch.as_tensor(result) for result in results])


def unit(x: Tensor) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt()


def turned(heads: Tensor, position: int) -> Tensor:
    """Every pair of channels i and i + D/2 as a complex number, turned backwards."""
    angles = position * 100_000.0 ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    pairs = torch.complex(*heads.split(D // 2, dim=-1)) * torch.polar(
        torch.ones_like(angles), -angles
    )
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def drawn() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {
        "embedding": draw(VOCABULARY, WIDTH),
        "head": draw(VOCABULARY, WIDTH),
        "smear_gate": draw(24),
        "smear_scale": torch.tensor([0.7], dtype=torch.float64),
        "stream_scales": 1 + draw(LAYERS, scale=0.2),
        "first_scales": draw(LAYERS, scale=0.3),
        "backout_scale": torch.tensor([0.4], dtype=torch.float64),
    }
    for layer in range(LAYERS):
        weights |= {
            f"query.{layer}": draw(HEADS * D, WIDTH, scale=0.3),
            f"key.{layer}": draw(KEY_HEADS * D, WIDTH, scale=0.3),
            f"value.{layer}": draw(KEY_HEADS * D, WIDTH, scale=0.2),
            f"out.{layer}": draw(WIDTH, HEADS * D, scale=0.2),
            f"up.{layer}": draw(4 * WIDTH, WIDTH, scale=0.15),
            f"down.{layer}": draw(WIDTH, 4 * WIDTH, scale=0.05),
        }
        if layer % 2 == (LAYERS - 1) % 2:
            weights[f"value_embedding.{layer}"] = draw(VOCABULARY, KEY_HEADS * D)
            weights[f"value_gate.{layer}"] = draw(KEY_HEADS, 12)
    return weights


def folded(weights: dict[str, Tensor]) -> GPT:
    """Our GPT with the same function."""
    config = gpt2_shape(
        vocab_size=VOCABULARY,
        context_length=32,
        n_layer=LAYERS,
        n_head=HEADS,
        d_model=WIDTH,
        **{
            **MODERN,
            "n_kv_head": KEY_HEADS,
            "norm_eps": EPS,
            "rope_theta": 100_000.0,
            "activation": "relu2",
            "embedding_norm": True,
            "smear": True,
            "windows": tuple(None if behind is None else behind + 1 for behind in BEHIND),
            "residual_mix": True,
            "backout": True,
            "logit_softcap": CAP,
        },
    )

    def halves_swapped(rows: Tensor) -> Tensor:
        return rows.view(-1, 2, D // 2, WIDTH).flip(1).reshape(-1, WIDTH)

    gpt = GPT(config).double()
    state = {name: torch.ones_like(tensor) for name, tensor in gpt.state_dict().items()}
    state |= {
        "token_embedding.weight": weights["embedding"],
        "head.weight": weights["head"],
        "smear_gate.weight": weights["smear_gate"][None],
        "smear_scale": weights["smear_scale"],
        "residual_scales": weights["stream_scales"],
        "embedding_scales": weights["first_scales"],
        "backout_scale": weights["backout_scale"],
    }
    for layer in range(LAYERS):
        rotated = [halves_swapped(weights[f"{name}.{layer}"]) for name in ("query", "key")]
        state |= {
            f"blocks.{layer}.qkv.weight": torch.cat([*rotated, weights[f"value.{layer}"]]),
            f"blocks.{layer}.query_norm.weight": torch.full((D,), 1.2),
            f"blocks.{layer}.key_norm.weight": torch.full((D,), 1.2),
            f"blocks.{layer}.attention_out.weight": weights[f"out.{layer}"],
            f"blocks.{layer}.mlp_up.weight": weights[f"up.{layer}"],
            f"blocks.{layer}.mlp_down.weight": weights[f"down.{layer}"],
        }
        if config.has_value_embedding(layer):
            gate = torch.nn.functional.pad(weights[f"value_gate.{layer}"], (0, 32 - 12))
            state[f"blocks.{layer}.value_gate.weight"] = gate
            state[f"blocks.{layer}.value_embedding.weight"] = (
                1.5 * weights[f"value_embedding.{layer}"]
            )
    rows = {"token_embedding.weight", "head.weight"}
    rows |= {name for name in state if name.endswith("value_embedding.weight")}
    for name in rows:
        padding = config.padded_vocab_size - VOCABULARY
        state[name] = torch.nn.functional.pad(state[name], (0, 0, 0, padding))
    gpt.load_state_dict(state)
    return gpt.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def expected() -> Tensor:
    """The textbook's logits (T, V)."""
    textbook = Textbook(drawn())
    return torch.stack([textbook.read(token) for token in ids().tolist()])


def ids() -> Tensor:
    return random_ids(25, seed=2, vocab_size=VOCABULARY)


def test_gpt_matches_the_textbook(expected: Tensor) -> None:
    logits = folded(drawn())(ids()[None]).logits[0]
    assert expected.std() > 3
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    "part", ["smear_scale", "first_scales", "backout_scale", "value_embedding.1", "smear_gate"]
)
def test_every_part_matters(expected: Tensor, part: str) -> None:
    weights = drawn()
    changed = folded(weights | {part: 0.9 * weights[part]})(ids()[None]).logits[0]
    assert (changed - expected).abs().max() > 0.01


def test_every_window_matters(expected: Tensor) -> None:
    """One position more changes the logits from the first position that sees it on."""
    gpt = folded(drawn())
    for layer in range(LAYERS - 1):
        windows = list(gpt.config.windows or ())
        windows[layer] = (windows[layer] or 0) + 1
        wider = GPT(replace(gpt.config, windows=tuple(windows))).double()
        wider.load_state_dict(gpt.state_dict())
        off = (wider.eval()(ids()[None]).logits[0] - expected).abs().amax(dim=-1)
        behind = BEHIND[layer]
        assert behind is not None
        assert off[: behind + 1].max() < 1e-4
        assert off[behind + 1 :].max() > 1e-3
