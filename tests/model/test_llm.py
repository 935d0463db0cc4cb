"""LLM: what it gives is what the reference and the plain forward give. That a server gives the same
bits is tested in `tests/service/test_llm_beside_a_server.py`."""

import codecs
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from logitd.model import llm as llm_module
from logitd.model.checkpoint.checkpoint import load_checkpoint
from logitd.model.inference import reference
from logitd.model.llm import (
    LLM,
    Completion,
    GenerationError,
    Intervention,
    InvalidRequest,
    LoadError,
    SamplingParams,
)
from logitd.model.transformer.gpt import GPT
from tests.model.factories import random_ids, save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.model.inference.served import forward_as_served
from tests.model.plain_stages import plain_stages

ROOT = Path(__file__).parents[2]
PROMPT = "A prompt of more than thirty-two tokens, to have two blocks"
IDS = list(PROMPT.encode())
END_OF_TEXT = 256


@pytest.fixture(scope="module")
def llm(checkpoint_path: Path) -> Iterator[LLM]:
    with LLM(checkpoint_path, device="cpu", threads=1, slots=4) as opened:
        yield opened


@pytest.fixture(scope="module")
def gpt(checkpoint_path: Path) -> GPT:
    return load_checkpoint(checkpoint_path, device=torch.device("cpu"), dtype=torch.float32)[1]


def joined(parts: list[Completion]) -> tuple[str, tuple[int, ...]]:
    return "".join(p.text for p in parts), tuple(i for p in parts for i in p.token_ids)


# Generation


SAMPLING: dict[str, dict[str, Any]] = {
    "defaults": {},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.2},
    "all filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.7},
    "repetition": {"repetition_penalty": 1.8, "temperature": 0.0},
    "presence": {"presence_penalty": 3.0, "temperature": 0.0},
    "frequency": {"frequency_penalty": 2.0, "temperature": 0.0},
    "bias": {"logit_bias": {65: 4.0, 66: -50.0, 256: 2.5}},
    "allowed": {"allowed_token_ids": (65, 66, 67, 256)},
    "seed": {"seed": 2**64 - 1},
    "least": {"min_tokens": 9, "logit_bias": {256: 30.0}, "stop_token_ids": frozenset({65})},
}


def by_reference(gpt: GPT, prompt: Sequence[int], index: int = 0, **fields: Any) -> list[int]:
    """What the reference generates; the end of text ends it."""
    values = {"max_tokens": 24, "seed": 3, **fields}
    ends = {END_OF_TEXT, *values.pop("stop_token_ids", ())}
    params = SamplingParams(**values, stop_token_ids=frozenset(ends))
    return reference.generate(gpt, prompt, params, index)


@pytest.mark.parametrize("name", SAMPLING)
def test_tokens_are_those_of_the_reference(llm: LLM, gpt: GPT, name: str) -> None:
    prompts: list[str | list[int]] = [PROMPT, [7, 8, 9], "other"]
    params = SamplingParams(**{"max_tokens": 24, "seed": 3, **SAMPLING[name]})
    found = llm.generate(prompts, params, n=2)
    assert [(one.prompt_index, one.index) for one in found] == [
        (prompt, index) for prompt in range(3) for index in range(2)
    ]
    for one in found:
        prompt = llm.encode(prompts[one.prompt_index])
        expected = by_reference(gpt, prompt, one.index, **SAMPLING[name])
        assert list(one.token_ids) == expected
        ends = {END_OF_TEXT, *params.stop_token_ids}
        stopped = expected[-1] in ends
        raw = llm.tokenizer.decode_bytes(expected[:-1] if stopped else expected)
        # Bytes of a character that max_tokens cuts are held back.
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        assert one.text == decoder.decode(raw, final=stopped)
    if name != "defaults":
        plain = [by_reference(gpt, llm.encode(PROMPT), index) for index in range(2)]
        assert [list(one.token_ids) for one in found[:2]] != plain, "the field makes a difference"


def test_keys_and_values_can_be_kept_in_int8(checkpoint_path: Path, gpt: GPT) -> None:
    with LLM(checkpoint_path, dtype="float32", kv_cache_dtype="int8") as rounded:
        rows = rounded.logits(PROMPT)
    exact = gpt(torch.tensor([IDS])).logits[0].numpy()
    assert 1e-4 < np.abs(rows - exact).mean() / exact.std() < 0.1


def test_stream_gives_the_same_piece_by_piece(llm: LLM) -> None:
    params = SamplingParams(max_tokens=25, seed=1, logprobs=2)
    whole = llm.generate([PROMPT, "b"], params, n=2)
    parts = list(llm.stream([PROMPT, "b"], params, n=2))
    for one in whole:
        own = [p for p in parts if (p.prompt_index, p.index) == (one.prompt_index, one.index)]
        assert len(own) == 26, "a part for each token, and the end"
        assert joined(own) == (one.text, one.token_ids)
        assert [p.finish_reason for p in own] == [None] * 25 + [one.finish_reason]
        assert one.finish_reason == "length"
        assert one.logprobs is not None
        assert one.logprobs.shape == (25,)
        assert [len(top) for top in one.top_logprobs] == [2] * 25


@pytest.mark.parametrize("params", [None, SamplingParams(max_tokens=12)], ids=["fields", "params"])
def test_each_prompt_draws_a_seed_that_gives_the_same_again(
    llm: LLM, params: SamplingParams | None
) -> None:
    fields = {"max_tokens": 12, "seed": -1} if params is None else {}
    found = llm.generate(["import"] * 2, params, n=2, **fields)
    assert len({one.token_ids for one in found}) == 4
    for one in found:
        again = llm.generate("import", max_tokens=12, seed=one.seed, n=2)
        assert again[one.index].token_ids == one.token_ids


def test_stop_string_ends_a_completion_and_is_not_in_it(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, seed=2, allowed_token_ids=tuple(b"abc"))
    (free,) = llm.generate(PROMPT, params)
    stop = free.text[20:23]
    end = free.text.index(stop)
    whole, other = llm.generate([PROMPT, "other"], params, stop=[stop, "never"])
    assert whole.text == free.text[:end]
    assert whole.token_ids == free.token_ids[: end + 3]
    assert (whole.finish_reason, whole.stop_reason) == ("stop", stop)
    assert stop not in other.text
    parts = list(llm.stream(PROMPT, params, stop=[stop]))
    assert joined(parts) == (whole.text, whole.token_ids)
    assert parts[-1].stop_reason == stop
    llm._engine.check_integrity()
    assert not llm._engine.has_work()


def test_end_of_text_ends_a_completion_unless_it_is_ignored(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, seed=0, allowed_token_ids=(END_OF_TEXT,))
    (one,) = llm.generate("a", params)
    assert (one.text, one.token_ids) == ("", (END_OF_TEXT,))
    assert (one.finish_reason, one.stop_reason) == ("stop", END_OF_TEXT)
    (ignored,) = llm.generate("a", params, ignore_eos=True)
    assert ignored.token_ids == (END_OF_TEXT,) * 5
    assert ignored.text == "<|endoftext|>" * 5
    assert (ignored.finish_reason, ignored.stop_reason) == ("length", None)


def test_streams_can_be_read_in_turns(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=12, seed=seed) for seed in (1, 2)]
    expected = [llm.generate(PROMPT, one)[0] for one in params]
    streams = [llm.stream(PROMPT, one) for one in params]
    parts: list[list[Completion]] = [[], []]
    for both in zip(*streams, strict=True):
        for own, part in zip(parts, both, strict=True):
            own.append(part)
    assert [joined(own) for own in parts] == [(one.text, one.token_ids) for one in expected]
    llm.logits("a")  # nothing is left over for others


def test_stream_that_is_closed_ends_its_requests(llm: LLM) -> None:
    stream = llm.stream([PROMPT] * 9, SamplingParams(max_tokens=50, seed=1))
    next(stream)
    assert llm._engine.has_work()
    stream.close()
    assert not llm._engine.has_work()
    assert llm._mailboxes == {}


# Numbers


def test_logits_hidden_states_and_attention_are_the_models_own_to_the_bit(
    llm: LLM, gpt: GPT
) -> None:
    own = forward_as_served(gpt, torch.tensor(IDS), hidden_states=True, attentions=True)
    assert own.hidden_states is not None
    assert own.attentions is not None
    assert np.array_equal(llm.logits(PROMPT), own.logits[0].numpy())
    assert np.array_equal(llm.logits(np.array(IDS)), own.logits[0].numpy())
    assert np.array_equal(llm.hidden_states(PROMPT), own.hidden_states[:, 0].numpy())
    assert np.array_equal(llm.attention(PROMPT), own.attentions[:, 0].numpy())


def test_stages_and_interventions_are_those_of_the_definition(llm: LLM, gpt: GPT) -> None:
    name = "blocks.1.attention.heads"
    zero = Intervention(stage=name, operation="zero", heads=(2,))

    def without_head(stage: str, value: torch.Tensor) -> torch.Tensor:
        if stage != name:
            return value
        value = value.clone()
        value[:, 2] = 0
        return value

    ids = list(llm.encode("a prompt"))
    expected = plain_stages(gpt, ids, without_head)
    values = llm.activations(
        "a prompt", ["blocks.*.attention.probs", name], heads=[2], interventions=[zero]
    )
    assert next(iter(values)) == "blocks.0.attention.probs"
    for stage, value in values.items():
        np.testing.assert_allclose(value, expected[stage][:, [2]].detach(), atol=1e-4)
    assert not values[name].any()
    changed = llm.logits("a prompt", interventions=[zero])
    np.testing.assert_allclose(changed, expected["logits"].detach(), atol=1e-3)
    assert llm.probs("a prompt", interventions=[zero]).argmax() == changed[-1].argmax()
    greedy = SamplingParams(max_tokens=1, seed=0, temperature=0)
    (completion,) = llm.generate("a prompt", greedy, interventions=[zero])
    assert completion.token_ids == (changed[-1].argmax(),)
    assert (
        llm.score("a prompt", interventions=[zero])[0].logprob != llm.score("a prompt")[0].logprob
    )


def test_attributions_are_by_default_of_the_likeliest_token(llm: LLM) -> None:
    assert llm.attributions("a prompt").token_id == llm.probs("a prompt").argmax()
    with pytest.raises(InvalidRequest, match=r"position.*8.*8"):
        llm.attributions("a prompt", position=8)
    with pytest.raises(InvalidRequest, match=r"prompt.*empty"):
        llm.attributions("")


def test_lens_ends_in_the_models_own_answer(llm: LLM) -> None:
    readings = llm.lens("a prompt", top_k=2, token_ids=[97])
    assert (len(readings), len(readings[0])) == (8, 4)
    last = readings[-1][-1]
    probs = llm.probs("a prompt")
    assert last.top_ids[0] == probs.argmax()
    assert np.exp(last.logprobs[0]) == pytest.approx(probs[97], rel=1e-5)
    assert last.divergence == 0


def test_sweeps_are_interventions_in_one_place_after_another(llm: LLM) -> None:
    ablate = Intervention(stage="blocks.*.attention.heads", operation="zero")
    grid = llm.sweep("a prompt", ablate, ["layers", "heads"], token=97, minus=98)
    assert grid.shape == (3, 4)
    zero = Intervention(stage="blocks.1.attention.heads", operation="zero", heads=(2,))
    row = llm.logits("a prompt", interventions=[zero])[-1].astype(np.float64)
    assert grid[1, 2] == row[97] - row[98]
    patched = llm.patch("a prompt", "b prompt", token=97)
    assert patched.shape == (3, 8)
    assert len(set(patched[-1, :-1])) == 1, "no later block carries another position to the last"
    value = llm.activations("b prompt", "blocks.0.output")["blocks.0.output"][:1]
    first = Intervention(stage="blocks.0.output", operation="set", positions=(0,), values=value)
    assert patched[0, 0] == llm.logits("a prompt", interventions=[first])[-1, 97]
    with pytest.raises(InvalidRequest, match="layers"):
        llm.sweep("a", Intervention(stage="embedding", operation="zero"), ["layers"], 97)
    with pytest.raises(InvalidRequest, match=r"vary.*\[8, 32\]"):
        llm.sweep("a", replace(first, values=llm.hidden_states("a prompt")[0]), ["layers"], 97)
    with pytest.raises(InvalidRequest, match=r"^vary: .* 8 positions.* 3 tokens"):
        llm.patch("abc", "b prompt", token=97)


def test_long_prompt_comes_in_several_pieces(tmp_path: Path) -> None:
    gpt = tiny_gpt(tiny_config(context_length=1024))
    save_tiny_checkpoint(tmp_path / "long", gpt=gpt)
    ids = random_ids(1000)
    with LLM(tmp_path / "long", device="cpu", dtype="float32", threads=1) as long:
        assert np.array_equal(
            long.logits(ids.tolist()), forward_as_served(gpt, ids).logits[0].numpy()
        )


# What cannot be done


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt.*empty"),
        ([], "prompt.*empty"),
        (["a", ""], "prompt.*empty"),
        ("x" * 128, "prompt.*128.*128"),
        ([1, 257], "257.*prompt"),
        ("\udcff", "prompt.*UTF-8"),
    ],
)
def test_prompt_that_cannot_be_continued_is_rejected(
    llm: LLM, prompt: str | list[int], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompt, SamplingParams(max_tokens=1, seed=0))
    assert not llm._engine.has_work(), "the others of the call are not computed either"
    assert llm._mailboxes == {}


def test_failed_step_is_an_error_of_its_requests(
    checkpoint_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(checkpoint_path, device="cpu", threads=1) as broken:

        def fail(plan: object) -> None:
            raise RuntimeError("out of luck")

        with monkeypatch.context() as patch:
            patch.setattr(broken._engine._runner, "run", fail)
            with pytest.raises(GenerationError, match="RuntimeError: out of luck"):
                broken.generate("a", SamplingParams(max_tokens=3, seed=0))
        assert broken.logits("a").shape == (1, 257), "the next request is computed"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"checkpoint": "nowhere"}, "nowhere"),
        ({"device": "abacus"}, "'abacus'"),
        ({"kernels": "native"}, "kernels.*native"),
        ({"slots": 0}, "slots.*0"),
    ],
)
def test_llm_refuses_what_it_cannot_open(
    checkpoint_path: Path, fields: dict[str, str], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        LLM(**{"checkpoint": checkpoint_path, **fields})  # type: ignore[arg-type]


def test_example_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the module's docstring, as it stands there."""
    monkeypatch.chdir(ROOT)
    text = inspect.getdoc(llm_module)
    assert text is not None
    lines = text.splitlines()[1:]
    example = [line for line in lines if not line or line.startswith("    ")]
    exec(compile(textwrap.dedent("\n".join(example)), "example", "exec"), {})
    assert len(capsys.readouterr().out) > 50
