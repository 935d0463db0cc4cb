"""`logitd generate` needs no server, and streams the text that the reference generates."""

from pathlib import Path

import pytest

from logitd.model.inference.kernels.cpu.library import KernelsUnavailable, load_library
from logitd.service.cli.main import run
from tests.model.factories import save_tiny_checkpoint, tiny_config, tiny_gpt
from tests.service.serving import Serving, serving
from tests.service.spelling import ALPHABET

PROMPT = "A prompt"


def generate(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], prompt: str = PROMPT, *flags: str
) -> str:
    """The output of a successful run."""
    code = run(["generate", prompt, "--checkpoint", str(checkpoint), "--threads", "1", *flags])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        (("--seed", "7"), {"seed": 7, "temperature": 0.8}),
        (("--seed", "8", "--temperature", "1.5"), {"seed": 8, "temperature": 1.5}),
        (("--temperature", "0"), {"temperature": 0}),
        (("--seed", "9", "--top-k", "3", "--top-p", "0.9"),
         {"seed": 9, "temperature": 0.8, "top_k": 3, "top_p": 0.9}),
    ],
)  # fmt: skip
def test_text_equals_the_endpoint(
    server: Serving, checkpoint_path: Path, capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...], fields: dict[str, float],
) -> None:  # fmt: skip
    for tokens in (40, 41):  # some of these end inside a character
        printed = generate(checkpoint_path, capsys, PROMPT, "--max-tokens", str(tokens), *flags)
        (choice,) = server.generate(PROMPT, max_tokens=tokens, echo=True, **fields)["choices"]
        assert printed == choice["text"]


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_dtype_and_decoder_equal_the_services(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quantize: str
) -> None:
    try:
        load_library()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    gpt = tiny_gpt(tiny_config(head_dim=16))
    checkpoint = save_tiny_checkpoint(tmp_path / "covered", gpt=gpt).path
    flags = ("--seed", "4", "--max-tokens", "60", "--quantize", quantize)
    printed = generate(checkpoint, capsys, PROMPT, *flags)
    with serving(checkpoint, kernels="auto", quantize=quantize) as server:
        assert server.served.computation.decoding.startswith("native")
        (choice,) = server.generate(PROMPT, seed=4, max_tokens=60, temperature=0.8, echo=True)[
            "choices"
        ]
    assert printed == choice["text"]


@pytest.mark.parametrize("flags", [(), ("--seed", "-1")])
def test_random_seeds_are_printed_and_repeatable(
    checkpoint_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", PROMPT, "--checkpoint", str(checkpoint_path), "--threads", "1"]
    assert run([*arguments, *flags]) == 0
    out, err = capsys.readouterr()
    seed = err.strip().removeprefix("(seed ").removesuffix(")")
    assert int(seed) >= 0
    assert generate(checkpoint_path, capsys, PROMPT, "--seed", seed) == out


def test_several_completions_are_separated(
    server: Serving, checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = generate(checkpoint_path, capsys, PROMPT, "--seed", "5", "-n", "3")
    choices = server.generate(PROMPT, seed=5, n=3, echo=True, temperature=0.8)["choices"]
    assert printed == "\n---\n".join(choice["text"] for choice in choices)


def test_text_ends_at_the_end_token_without_split_characters(
    spelling_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(spelling_path, capsys, "xy") == "xy" + ALPHABET[ALPHABET.index("z") :]


def test_text_stays_within_the_context(
    checkpoint_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = generate(checkpoint_path, capsys, "x" * 120, "--temperature", "0")
    assert len(printed) <= 128


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([""], "the prompt is empty; give at least one token\n"),
        (["x" * 128], "the prompt has 128 tokens; the model's context is 128"),
        (["\udcff"], "the prompt is not UTF-8 text\n"),
        (
            [PROMPT, "--checkpoint", "nowhere"],
            "nowhere does not exist; expected the directory of a checkpoint or of a run",
        ),
        ([PROMPT, "--device", "tpu"], "'tpu'"),
        ([PROMPT, "--device", "abacus"], "'abacus' is not a device; try auto, cpu, cuda or cuda:0"),
        (
            [PROMPT, "--kernels", "native"],
            "kernels is native, but the native kernels cannot be used",
        ),
        ([PROMPT, "--quantize", "int8"], "quantize is int8, but the native kernels cannot be used"),
    ],
)
def test_unusable_prompts_and_flags_exit_1_with_a_sentence(
    checkpoint_path: Path, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--checkpoint", str(checkpoint_path), "--threads", "1"]
    assert run(["generate", given[0], *flags, *given[1:]]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("logitd generate: ")
    assert message in err
    assert len(err.splitlines()) == 1
