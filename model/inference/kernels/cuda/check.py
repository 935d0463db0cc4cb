"""Self-check: compares a decoder with plain torch on the same device, before the decoder serves
requests.

Both decode the same tokens after a few prompts. The check covers logits for several row counts and
key lengths, tokens from every kind of sampling, steps launched ahead and, if requested, batch
invariance: the bits of one row alone, in a small step and in a prompt, which use different kernels.
It does not cover every number of rows and keys that requests reach later.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from logitd.model.inference.kernels.base import Decoder, PrefillInput
from logitd.model.inference.kernels.eager.decoder import PlainDecoder
from logitd.model.inference.kv_cache import KVCache
from logitd.model.inference.sampling.sample import SamplingRow, SamplingRows, sampling_rows
from logitd.model.transformer.gpt import GPT

PROMPTS = (5, 32, 77, 126)
"""Lengths of the prompts. The last one has more keys than the smallest recording allows."""
STEPS = 3
POSITIONS = 160
"""Length of a slot. It is short, so that the check needs little memory even if the context is
long."""
GREEDY, RANDOM, FILTERED = (0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 20, 0.9, 0.01)
"""The sampling parameters that are checked, each a tuple of temperature, top_k, top_p and min_p."""


class CheckFailed(Exception):
    """Raised if a decoder computes wrong results; the message has the numbers."""


def find_fault(
    gpt: GPT, make: Callable[[GPT, KVCache], Decoder], *, batch_invariant: bool
) -> str | None:
    """The reason why decoders created by `make` cannot serve this model on its device; None if they
    can."""
    weight = gpt.token_embedding.weight
    config = replace(gpt.config, context_length=min(gpt.config.context_length, POSITIONS))
    longest = config.context_length - 2 * STEPS
    try:
        if longest < 1:
            raise CheckFailed(f"the check needs a context_length of at least {2 * STEPS + 1}")
        prompts = [
            [(7 * place + slot) % config.vocab_size for place in range(min(length, longest))]
            for slot, length in enumerate(PROMPTS)
        ]
        cache = partial(KVCache, config, len(prompts), device=weight.device, dtype=weight.dtype)
        fast, plain = make(gpt, cache()), PlainDecoder(gpt, cache())
        try:
            allowed = tolerance(weight.dtype)
            compare(fast, plain, prompts, allowed, batch_invariant=batch_invariant)
        finally:
            fast.close()
    except Exception as error:  # any failure: plain torch can serve
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


def tolerance(dtype: torch.dtype) -> float:
    """Largest root mean square error of a row's logits, in standard deviations of that row. A
    different order of additions causes about 0.01 in bfloat16 and 1e-6 in float32; a different
    token causes about 1."""
    return 2 * math.sqrt(torch.finfo(dtype).eps)


@torch.inference_mode()
def compare(
    fast: Decoder,
    plain: Decoder,
    prompts: list[list[int]],
    allowed: float,
    *,
    batch_invariant: bool,
) -> None:
    """Raise CheckFailed unless two decoders compute the same results within `allowed`. Each decoder
    has an empty slot for each prompt, with room for 2 * STEPS more tokens."""
    slots, positions = list(range(len(prompts))), [len(prompt) for prompt in prompts]
    pieces = [PrefillInput(prompt, slot, 0) for slot, prompt in enumerate(prompts)]
    expected, found = (
        decoder.head(torch.cat([done.hidden[-1:] for done in decoder.prefill(pieces)]))
        for decoder in (plain, fast)
    )  # (B, V)
    _hold("prompts", found, expected, allowed)
    if fast.prefill_matches_decode:
        for slot, prompt in enumerate(prompts):
            alone = fast.decode(prompt[-1:], [slot], [len(prompt) - 1])
            if not torch.equal(alone, found[slot : slot + 1]):
                raise CheckFailed(
                    f"prompt {slot}: the logits of prefill and of a decode step are not "
                    "bit-identical after the last token"
                )
    for step in range(STEPS):
        token_ids = expected.argmax(-1).tolist()
        expected = plain.decode(token_ids, slots, positions).clone()
        found = fast.decode(token_ids, slots, positions)
        _hold(f"step {step}", found, expected, allowed)
        for way in (GREEDY, RANDOM, FILTERED):
            rows = _rows(way, positions)
            given, wanted = (each.sample(found, found, rows) for each in (fast, plain))
            if given != wanted:
                raise CheckFailed(
                    f"step {step}: sampling with (temperature, top_k, top_p, min_p) = {way} "
                    f"returned {given}, not {wanted}"
                )
        found, row = found.clone(), slice(step, step + 1)
        alone = fast.decode(token_ids[row], slots[row], positions[row])
        _hold(f"step {step}, batch of 1", alone, expected[row], allowed)
        if batch_invariant and not torch.equal(alone, found[row]):
            raise CheckFailed(
                f"step {step}: the logits of a sequence in a batch of {len(slots)} and in a batch "
                "of 1 are not bit-identical"
            )
        positions = [position + 1 for position in positions]
    if (launcher := fast.launcher) is not None:
        token_ids = expected.argmax(-1).tolist()
        steps = min(STEPS - 1, launcher.most_steps(len(slots)))
        at = [[position + step for position in positions] for step in range(steps + 1)]
        ways = _rows(GREEDY, [position for step in at[:steps] for position in step])
        first = launcher.launch(token_ids, slots, positions, ways)
        second = launcher.launch_next(slots, slots, at[steps], _rows(GREEDY, at[steps]))
        for given, places in zip([*first(), *second()], at, strict=True):
            token_ids = fast.decode(token_ids, slots, places).argmax(-1).tolist()
            if given != token_ids:
                raise CheckFailed(f"a step launched ahead sampled {given}, not {token_ids}")


def _hold(name: str, found: Tensor, expected: Tensor, allowed: float) -> None:
    """Raise CheckFailed unless rows of logits (R, V) equal the expected ones within `allowed`. In
    each row, the likeliest token must be the expected one or nearly as likely."""
    spread = expected.std(-1).clamp(min=1e-6)
    off = (found - expected).square().mean(-1).sqrt() / spread
    likeliest = expected.gather(-1, found.argmax(-1, keepdim=True))[:, 0]
    behind = (expected.amax(-1) - likeliest) / spread
    for what, by, most in (
        ("the logits differ by", off, allowed),
        ("the logit of a greedy token is below the maximum by", behind, 4 * allowed),
    ):
        if not float(by.max()) <= most:  # NaN fails too
            far = f"{float(by.max()):.2g} standard deviations"
            raise CheckFailed(f"{name}: {what} {far}; the limit is {most:.2g}")


def _rows(way: tuple[float, int, float, float], positions: list[int]) -> SamplingRows:
    """Sampling rows with the same parameters for the tokens after these positions."""
    return sampling_rows(SamplingRow(*way, seed=1, position=at + 1, index=0) for at in positions)
