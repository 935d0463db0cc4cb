"""Forward passes that the owner's process computes on request. In these tests a thread of this
process answers over a socket."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from logitd.model.owner_code.process.answer import Answerer
from logitd.model.owner_code.process.call import Caller
from logitd.model.owner_code.process.wire import Wire
from tests.model.owner_code.classes import CONTEXT, VOCABULARY, made

SECONDS = 30.0
FIRST, SECOND = [3, 1, 4, 1, 5, 9, 2], [6, 5, 3]
Visit = Callable[[str, Tensor], Tensor]


class Asker:
    """The client that sends requests over the socket."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def ask(self, header: dict[str, Any], array: Tensor, visit: Visit | None = None) -> Any:
        """The logits of a request, or the text of an error."""
        self.wire.send(header, array)
        while True:
            header, value = self.wire.receive(SECONDS)
            if "stage" not in header:
                break
            assert visit is not None
            changed = visit(header["stage"], value)
            self.wire.send({"changed": True}, changed)
        return header.get("error", value)

    def logits(
        self,
        *sequences: Sequence[int],
        firsts: Sequence[int] | None = None,
        slots: Sequence[int] | None = None,
        visit: dict[str, Visit] | None = None,
        ends: Sequence[int] | None = None,
        prompts: Sequence[int | None] | None = None,
    ) -> Any:
        header = {
            "lengths": [len(ids) for ids in sequences],
            "firsts": firsts or [0] * len(sequences),
            "ends": ends or [len(ids) for ids in sequences],
            "slots": slots or list(range(len(sequences))),
            "prompts": prompts or [None] * len(sequences),
            "visit": list(visit or {}),
        }
        ids = torch.tensor([token_id for ids in sequences for token_id in ids])
        return self.ask(header, ids, lambda name, value: (visit or {})[name](name, value))


@contextmanager
def answering(model: nn.Module, **options: Any) -> Iterator[Asker]:
    ours, theirs = socket.socketpair()
    given = {"rows": VOCABULARY, "vocabulary": VOCABULARY, **options}
    answerer = Answerer(Caller(model), Wire(theirs), **given)

    def answer() -> None:
        with pytest.raises(EOFError):
            answerer.run(CONTEXT)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        wire = Wire(ours)
        assert wire.receive(SECONDS)[0]["ready"]["timed_length"] == CONTEXT
        yield Asker(wire)
    finally:
        ours.close()
        thread.join()
        theirs.close()


def of_class(model: nn.Module, ids: Sequence[int]) -> Tensor:
    """The logits (T, V), computed by calling the model directly."""
    with torch.no_grad():
        out = model(torch.tensor([ids]))
    logits: Tensor = out[0] if isinstance(out, tuple) else out
    return logits[0]


@pytest.mark.parametrize("kind", ["ResidualAttention", "Mixture", "Recurrent", "Remembering"])
def test_logits_are_those_of_the_class(kind: str) -> None:
    model = made(kind)
    with answering(model) as asker:
        got = asker.logits(FIRST, SECOND, firsts=[2, 0])
        expected = torch.cat([of_class(model, FIRST)[2:], of_class(model, SECOND)])
        assert torch.allclose(got, expected, atol=1e-5)
        for end in range(1, len(FIRST)):  # one decode step after another
            got = asker.logits(FIRST[:end], firsts=[end - 1], prompts=[1 if end > 1 else None])
            assert torch.allclose(got, of_class(model, FIRST[:end])[-1:], atol=1e-5)


def test_own_cache_continues_only_its_sequence() -> None:
    model = made("Remembering")
    calls: list[int] = []
    forward = model.logits_and_state

    def counted(ids: Tensor, state: Any) -> Any:
        calls.append(ids.shape[1])
        return forward(ids, state)

    model.logits_and_state = counted
    with answering(model) as asker:
        asker.logits(FIRST, slots=[0])
        asker.logits(FIRST, firsts=[3], slots=[0])
        asker.logits([*FIRST, 8], firsts=[len(FIRST)], slots=[0], prompts=[len(FIRST)])
        assert calls == [7, 1]
        other = [*SECOND, *FIRST]  # another sequence takes the slot
        got = asker.logits(other, firsts=[9], slots=[0])
        assert calls == [7, 1, 10]
        assert torch.allclose(got, of_class(model, other)[-1:], atol=1e-5)
        asker.logits([*other, 1], firsts=[10], slots=[0])  # begins with the text of another
        assert calls == [7, 1, 10, 11]


@pytest.mark.parametrize("together", [False, True])
def test_lost_state_is_computed_again_in_the_same_passes(together: bool) -> None:
    """The process once computed all ids of such a sequence in one pass, whose bits differ."""
    model, calls = made("Remembering"), list[int]()
    model.embed.register_forward_pre_hook(lambda module, given: calls.append(given[0].shape[1]))
    text, prompt = [*FIRST, *SECOND], len(FIRST)
    with answering(model) as asker:
        asker.logits(FIRST, firsts=[prompt - 1])
        for end in range(prompt + 1, len(text) + 1):
            expected = asker.logits(text[:end], firsts=[end - 1], prompts=[prompt])
    with answering(model, together=together) as asker:  # a new process
        calls.clear()
        got = asker.logits(text, firsts=[len(text) - 1], prompts=[prompt])
    assert calls == ([10] if together else [7, 1, 1, 1])
    assert torch.allclose(got, expected, atol=1e-5) if together else torch.equal(got, expected)


def test_model_that_returns_the_last_position_computes_the_requested_prefixes() -> None:
    model = made("LastOnly")
    calls: list[int] = []
    model.register_forward_pre_hook(lambda module, given: calls.append(given[0].shape[1]))
    expected = of_class(made("Mixture"), FIRST)
    with answering(model) as asker:
        calls.clear()
        got = asker.logits(FIRST, firsts=[2], ends=[4])
        assert sorted(calls) == [3, 4]
        assert torch.allclose(got, expected[2:4], atol=1e-6)
        got = asker.logits(FIRST, firsts=[2], ends=[4], visit={"h.0.attn": lambda name, x: x})
        assert sorted(calls[2:]) == [3, 4, 7]
        assert torch.allclose(got, expected[2:4], atol=1e-6)


@pytest.mark.parametrize("together", [False, True])
def test_batch_gives_the_same_logits_up_to_rounding(together: bool) -> None:
    model = made("Mixture")
    with answering(model, together=together) as asker:
        got = asker.logits(FIRST, SECOND, firsts=[6, 1])
        expected = torch.cat([of_class(model, FIRST)[6:], of_class(model, SECOND)[1:]])
        assert torch.allclose(got, expected, atol=1e-5)


def test_rows_computed_alone_have_the_same_bits_in_any_company() -> None:
    with answering(made("ResidualAttention")) as asker:
        alone = asker.logits(FIRST, firsts=[6])
        assert torch.equal(asker.logits(SECOND, FIRST, firsts=[2, 6])[1:], alone)


def test_noise_is_seeded_for_each_pass() -> None:
    with answering(made("Noisy")) as asker:
        first = asker.logits(FIRST, firsts=[6])
        asker.logits(SECOND)
        assert torch.equal(asker.logits(FIRST, firsts=[6]), first)


def test_vocabulary_in_another_order() -> None:
    model, order = made("Recurrent"), [5, 3, 4]
    with answering(model, vocabulary=3, order=order) as asker:
        got = asker.logits([0, 2, 1])
    assert torch.allclose(got, of_class(model, [5, 4, 3])[:, order], atol=1e-5)


@pytest.mark.parametrize("kind", ["Mixture", "LastOnly"])
def test_stage_equals_a_forward_hooks_and_can_be_changed(kind: str) -> None:
    model, seen = made("Mixture"), dict[str, Tensor]()
    hooked: list[Tensor] = []
    handle = model.get_submodule("h.0.attn").register_forward_hook(
        lambda module, arguments, output: hooked.append(output[0].clone())
    )
    expected = of_class(model, FIRST)
    handle.remove()

    def note(name: str, value: Tensor) -> Tensor:
        seen[name] = value.clone()
        return value

    with answering(made(kind)) as asker:
        got = asker.logits(FIRST, visit={"h.0.attn": note})
        assert torch.allclose(got, expected, atol=1e-6)
        assert torch.equal(seen["h.0.attn"], hooked[0])
        zeroed = asker.logits(FIRST, visit={"h.0.attn": lambda name, value: value * 0})
    model.get_submodule("h.0.attn").register_forward_hook(
        lambda module, arguments, output: (output[0] * 0, output[1])
    )
    assert torch.allclose(zeroed, of_class(model, FIRST), atol=1e-6)
    assert not torch.allclose(zeroed, expected, atol=1e-3)


def test_lens_applies_the_norm_and_the_head() -> None:
    model, stream = made("Mixture"), torch.randn(4, 16)
    with answering(model, lens=("norm", "head")) as asker, torch.no_grad():
        got = asker.ask({"lens": [4, 16]}, stream)
        assert torch.allclose(got, model.head(model.norm(stream)), atol=1e-6)


def test_error_of_the_code_is_answered_and_the_next_pass_computed() -> None:
    model = made("Crashing")
    with answering(model) as asker:
        message = asker.logits([1, 8, 2, 3, 4])
        assert message == ("its forward failed on ids of shape [1, 5]: RuntimeError: out of order")
        assert torch.allclose(asker.logits(SECOND), of_class(model, SECOND), atol=1e-5)
