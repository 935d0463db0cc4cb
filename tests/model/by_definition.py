"""A GPT's logits by the definitions of `GPTConfig` alone: one sequence, float64, a head at a time.

The oracle of every combination of what a shape can be put together from, which no other program
computes all of. Reads `to_dict` and the weights by their names, and shares no code with `model`.

Shapes: T positions, C = d_model, D = head_dim, V = vocab_size.
"""

import cmath
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Config = Mapping[str, Any]


def logits(config: Config, weights: Mapping[str, Tensor], token_ids: Sequence[int]) -> Tensor:
    """Logits (T, V) of a text."""
    weights = {name: tensor.double() for name, tensor in weights.items()}
    x = weights["token_embedding.weight"][list(token_ids)]  # (T, C)
    if config["positions"] == "learned":
        x = x + weights["position_embedding.weight"][: len(x)]
    if config["positions"] == "sinusoidal":
        x = x + torch.tensor(
            [[sinusoid(t, c, config["d_model"]) for c in range(config["d_model"])]
             for t in range(len(x))]
        )  # fmt: skip
    for layer in range(config["n_layer"]):
        prefix = f"blocks.{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in weights.items()
               if name.startswith(prefix)}  # fmt: skip
        x = block(config, own, x, token_ids)
    if config["final_norm"]:
        x = norm(config, weights, "final_norm", x)
    matrix = weights["token_embedding.weight" if config["tied_head"] else "head.weight"]
    rows = x @ matrix.T
    if config["head_bias"]:
        rows = rows + weights["head.bias"]
    return rows[:, : config["vocab_size"]]


def block(config: Config, own: Mapping[str, Tensor], x: Tensor, ids: Sequence[int]) -> Tensor:
    if config["norm_position"] == "post":
        x = norm(config, own, "attention_norm", x + attention(config, own, x, ids))
        return norm(config, own, "mlp_norm", x + feed_forward(config, own, x))
    attended = attention(config, own, norm(config, own, "attention_norm", x), ids)
    read = x if config["residual"] == "parallel" else x + attended
    return x + attended + feed_forward(config, own, norm(config, own, "mlp_norm", read))


def attention(config: Config, own: Mapping[str, Tensor], x: Tensor, ids: Sequence[int]) -> Tensor:
    heads, kv_heads, width = config["n_head"], config["n_kv_head"], config["head_dim"]
    parts = linear(own, "qkv", x).split(width, dim=1)  # (T, D) for each head
    keys, values = parts[heads : heads + kv_heads], parts[heads + kv_heads :]
    mixed = []
    for head in range(heads):
        shared = head // (heads // kv_heads)
        q = positioned(config, own, "query_norm", parts[head])
        k = positioned(config, own, "key_norm", keys[shared])
        v = values[shared]
        if "value_gate.weight" in own:
            gate = 2 * torch.sigmoid(x[:, :32] @ own["value_gate.weight"][shared])  # (T,)
            rows = own["value_embedding.weight"][list(ids)]
            v = v + gate[:, None] * rows[:, shared * width : (shared + 1) * width]
        scores = (q @ k.T / math.sqrt(width)).masked_fill(
            torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -math.inf
        )
        mixed.append(scores.softmax(dim=1) @ v)
    return linear(own, "attention_out", torch.cat(mixed, dim=1))


def positioned(config: Config, own: Mapping[str, Tensor], normed: str, head: Tensor) -> Tensor:
    """Queries or keys (T, D) of a head, normalised and turned as far as the shape asks for."""
    if config["qk_norm"]:
        square = head.square().mean(dim=1, keepdim=True)
        head = head / (square + config["norm_eps"]).sqrt() * own[f"{normed}.weight"]
    if config["positions"] != "rotary":
        return head
    half = config["head_dim"] // 2
    numbers = torch.complex(head[:, :half], head[:, half:])
    turns = torch.tensor(
        [[turn(config, pair, t) for pair in range(half)] for t in range(len(head))],
        dtype=torch.complex128,
    )
    turned = numbers * turns
    return torch.cat((turned.real, turned.imag), dim=1)


def turn(config: Config, pair: int, position: int) -> complex:
    """What a pair of channels at a position is multiplied by, as a complex number."""
    turning, scaling = config["rotary_dim"], config["rope_scaling"]
    if pair >= turning // 2:
        return 1
    angle = config["rope_theta"] ** (-2 * pair / turning)
    if scaling is None:
        return cmath.rect(1, position * angle)
    slow = angle / scaling["factor"]
    if scaling["kind"] == "linear":
        return cmath.rect(1, position * slow)
    if scaling["kind"] == "llama3":
        wavelength = 2 * math.pi / angle
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if wavelength > scaling["original_context_length"] / low:
            return cmath.rect(1, position * slow)
        if wavelength < scaling["original_context_length"] / high:
            return cmath.rect(1, position * angle)
        smooth = (scaling["original_context_length"] / wavelength - low) / (high - low)
        return cmath.rect(1, position * ((1 - smooth) * slow + smooth * angle))
    ends = [
        turning * math.log(scaling["original_context_length"] / (beta * 2 * math.pi))
        / (2 * math.log(config["rope_theta"]))
        for beta in (scaling["beta_fast"], scaling["beta_slow"])
    ]  # fmt: skip
    if scaling["truncate"]:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], turning - 1)
    if first == last:
        last += 0.001
    ramp = min(max((pair - first) / (last - first), 0), 1)
    return cmath.rect(scaling["attention_factor"], position * (ramp * slow + (1 - ramp) * angle))


def feed_forward(config: Config, own: Mapping[str, Tensor], x: Tensor) -> Tensor:
    h = linear(own, "mlp_up", x)
    match config["activation"]:
        case "relu":
            h = h * (h > 0)
        case "relu2":
            h = h * h * (h > 0)
        case "gelu":
            h = h * (1 + torch.erf(h / math.sqrt(2))) / 2
        case "gelu_tanh":
            h = h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))) / 2
        case "swiglu":
            gate, gated = h.chunk(2, dim=1)
            h = gate * torch.sigmoid(gate) * gated
    return linear(own, "mlp_down", h)


def norm(config: Config, own: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    centre = x.mean(dim=1, keepdim=True) if config["norm"] == "layernorm" else 0
    spread = ((x - centre).square().mean(dim=1, keepdim=True) + config["norm_eps"]).sqrt()
    return (x - centre) / spread * own[f"{name}.weight"] + own.get(f"{name}.bias", 0)


def linear(own: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ own[f"{name}.weight"].T + own.get(f"{name}.bias", 0)


def sinusoid(position: int, channel: int, width: int) -> float:
    angle = position / 10_000 ** ((channel - channel % 2) / width)
    return math.cos(angle) if channel % 2 else math.sin(angle)
