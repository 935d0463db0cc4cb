"""Exportable: the formats to which a model can be exported, and what prevents an export to
the others.

Both depend only on the shape (`family.py`) and the vocabulary, so they are known before a model is
trained. `require` raises one error with all objections.
"""

from collections.abc import Mapping, Sequence

from logitd.model.convert.family import GPT2, GPT_NEOX, family_of
from logitd.model.convert.family import objections as shape_objections
from logitd.model.convert.foreign import ConvertError
from logitd.model.convert.hf.dialect import to_oniguruma
from logitd.model.convert.hf.merges import merges_of
from logitd.model.convert.hf.tokenizer import GPT2_PATTERN, QWEN2_PATTERN
from logitd.model.text.published import KNOWN_FILES
from logitd.model.text.tokenizer import Tokenizer
from logitd.model.transformer.config import GPTConfig

PRE_TOKENIZERS: Mapping[str, str] = {
    GPT2_PATTERN: "gpt-2",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt-2",
    **{pattern: "gpt-2" for pattern, special in KNOWN_FILES.values() if len(special) == 1},
    QWEN2_PATTERN: "qwen2",
    QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"): "llama-bpe",
}
"""The names of llama.cpp's pre-tokenizers, by split pattern."""

GGUF_ENDS = 3
"""Maximum number of end tokens in a GGUF file: one each for the end of a text, a turn and a
message."""

HF_INSTEAD = "export it with --to hf"


def hf_objections(config: GPTConfig, tokenizer: Tokenizer) -> list[str]:
    """Everything that prevents an export to a Hugging Face folder."""
    found = [str(each) for each in shape_objections(config, tokenizer.pattern)]
    if not tokenizer.has_text:
        return found
    named = tokenizer.special_tokens | tokenizer.added_tokens
    if tokenizer.vocab_size != len({*tokenizer.tokens.values(), *named.values()}):
        found.append(
            "the vocabulary has ids without a token between its special tokens, but Hugging "
            "Face's tokenizers have none"
        )
    try:
        to_oniguruma(tokenizer.pattern)
    except ConvertError as error:
        found.append(str(error))
    return found


def gguf_objections(config: GPTConfig, tokenizer: Tokenizer, pre: str | None) -> list[str]:
    """Everything that prevents an export to GGUF. `pre` is the name of a llama.cpp pre-tokenizer,
    if the user chose one."""
    found = [str(each) for each in shape_objections(config)]
    family = "" if found else family_of(config)
    if family == GPT2 and config.activation != "gelu_tanh":
        found.append(
            f"activation is {config.activation!r}: llama.cpp computes GPT-2 only with gelu_tanh; "
            f"{HF_INSTEAD}"
        )
    if family == GPT_NEOX:
        found.append(
            f"positions are {config.positions!r} and norm is {config.norm!r}: that is GPT-NeoX, "
            f"which is not written as GGUF; {HF_INSTEAD}"
        )
    if config.rope_scaling is not None:
        found.append(
            f"rope_scaling is {config.rope_scaling}: scaled rotary positions are not written as "
            f"GGUF; {HF_INSTEAD}"
        )
    return found + _gguf_objections_to_vocabulary(tokenizer, pre)


def _gguf_objections_to_vocabulary(tokenizer: Tokenizer, pre: str | None) -> list[str]:
    if tokenizer.kind != "bpe":
        what = "whole words" if tokenizer.has_text else "token ids without a text"
        return [
            f"this checkpoint's vocabulary is {what}, but llama.cpp needs byte pairs; {HF_INSTEAD}"
        ]
    found = list[str]()
    flags = {flag for flags in tokenizer.added_flags.values() for flag in flags}
    if lost := sorted(flags & {"lstrip", "rstrip", "single_word"}):
        found.append(
            f"added tokens have {', '.join(lost)}, which GGUF cannot express; {HF_INSTEAD}"
        )
    if len(tokenizer.ends) > GGUF_ENDS:
        found.append(
            f"{len(tokenizer.ends)} tokens end a text, but a GGUF file has at most {GGUF_ENDS}; "
            f"{HF_INSTEAD}"
        )
    if pre is None and tokenizer.pattern not in PRE_TOKENIZERS:
        found.append(
            "llama.cpp has no name for this checkpoint's split pattern "
            f"({tokenizer.pattern[:50]}...). --pre qwen2 (or another of its names) writes the "
            "file anyway: some texts then have different ids in llama.cpp than in logitd"
        )
    if missing := len(tokenizer.ranks) - len(tokenizer.tokens):
        found.append(
            f"{missing} of the 256 bytes are not tokens of this vocabulary, and llama.cpp needs "
            f"them all; {HF_INSTEAD}"
        )
        return found
    merges, alone = merges_of(tokenizer.ranks)
    if alone:
        found.append(
            f"no merges form {len(alone)} tokens; the first is {alone[0]!r}; llama.cpp would "
            f"never use them. {HF_INSTEAD.capitalize()}"
        )
    elif not merges:
        found.append(
            "the vocabulary has only single bytes, but GGUF's list of merges may not be empty; "
            f"{HF_INSTEAD}"
        )
    return found


def require(found: Sequence[str], then: str = "") -> None:
    """Raise ConvertError if there are objections. The message lists them all and ends with
    `then`."""
    if found:
        raise ConvertError("; ".join(found) + then)


def describe(config: GPTConfig, tokenizer: Tokenizer) -> str:
    """A line that names the formats to which a model can be exported, and the reasons why it cannot
    be exported to the others."""
    if found := hf_objections(config, tokenizer):
        return f"export: not possible with this model: {'; '.join(found)}"
    folder = family_of(config, tokenizer.pattern)
    line = f"export: --to hf writes this model, as {folder}, and --to gguf "
    if not gguf_objections(config, tokenizer, None):
        return f"{line}too"
    if not (found := gguf_objections(config, tokenizer, "any")):
        return (
            f"{line}with --pre, because llama.cpp has no name for how its vocabulary splits texts"
        )
    reasons = "; ".join(each.removesuffix(f"; {HF_INSTEAD}") for each in found)
    return f"{line}does not: {reasons}"
