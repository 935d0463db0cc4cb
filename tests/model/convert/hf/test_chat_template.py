"""An imported chat template writes the prompts that transformers writes from the same folder, and
added tokens have the same ids. Otherwise it is left out with a reason."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from logitd.model.convert.foreign import ForeignTokenizer
from logitd.model.convert.hf.added import with_ends
from logitd.model.convert.vocabulary.files import vocabulary_in
from logitd.model.text.chat_template import ChatTemplate
from tests.model.convert.theirs import their_tokenizer
from tests.profiles import examples

TOKENS = ("<|endoftext|>", "<|user|>", "<s>", "<pad>", "<image>")
"""Added tokens; their ids begin at 380."""
LOOP = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SAID = (
    [{"role": "user", "content": "Hi it's o'neil-smith"}],
    [
        {"role": "system", "content": " Be  nice\n"},
        {"role": "user", "content": 'é <b> & "q" X'},
        {"role": "assistant", "content": "ok\nNo"},
        {"role": "user", "content": "a"},
    ],
)


def entry(text: str, **flags: bool) -> dict[str, Any]:
    return {
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
        **flags,
    }


def tokenizer_json() -> dict[str, Any]:
    return json.loads(their_tokenizer().to_str())


BASE = tokenizer_json()


def write(
    folder: Path, files: Mapping[str, Any], tokens: Sequence[dict[str, Any]] | None = None
) -> None:
    """Write a tokenizer.json with these added tokens, or else all of `TOKENS`, and other files."""
    tokens = [entry(text) for text in TOKENS] if tokens is None else tokens
    added = [{"id": 380 + place, **token} for place, token in enumerate(tokens)]
    for name, value in {"tokenizer.json": {**BASE, "added_tokens": added}, **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        text = value if name.endswith(".jinja") else json.dumps(value)
        (folder / name).write_text(text, encoding="utf-8")


def read(folder: Path) -> ForeignTokenizer:
    vocabulary = vocabulary_in(folder / "tokenizer.json", skip_normalizer=False)
    assert vocabulary is not None
    return with_ends(vocabulary, folder)


def check_prompts(
    folder: Path, vocabulary: ForeignTokenizer, said: Sequence[list[dict[str, str]]] = SAID
) -> None:
    """Compare the prompts of an imported template with those of transformers."""
    assert vocabulary.chat_template is not None, vocabulary.notes
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    template, tokenizer = ChatTemplate(vocabulary.chat_template), vocabulary.tokenizer
    for messages in said:
        parts = template.render(messages, tokenizer)
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = [i for p in parts for i in (tokenizer.encode(p) if isinstance(p, str) else [p])]
        assert ids == theirs(expected, add_special_tokens=False).input_ids


ENDED = {"eos_token": "<|endoftext|>"}


@pytest.mark.parametrize(
    ("source", "config", "further"),
    [
        (LOOP, ENDED, {}),
        (LOOP, {}, {"generation_config.json": {"eos_token_id": 380}}),
        (LOOP, {"eos_token": "!"}, {"generation_config.json": {"eos_token_id": 380}}),
        (LOOP, ENDED, {"special_tokens_map.json": {"eos_token": "<s>"}}),
        (LOOP, ENDED, {"special_tokens_map.json": {"eos_token": None}}),
        ("{{ bos_token }}" + LOOP, {}, {"special_tokens_map.json": {"bos_token": "<s>"}}),
        ("{{ bos_token }}" + LOOP, ENDED, {}),
        ("{{ bos_token }}" + LOOP, ENDED | {"bos_token": "<|endoftext|>"}, {}),
        ("{{ bos_token is defined }}{{ bos_token }}" + LOOP, ENDED | {"bos_token": ""}, {}),
        ("\n\n {%- if bos_token is defined %}B{% endif %}" + LOOP, ENDED, {}),
        ("\n\n{{ pad_token }}" + LOOP, ENDED | {"pad_token": "<pad>"}, {}),
        ("{{ pad_token }}{{ cls_token is none }}" + LOOP, ENDED, {}),
        ("{{ image_token }}" + LOOP, ENDED | {"image_token": "<image>"}, {}),
        ("{{ image_token }}", {"image_token": "<image>"},
         {"special_tokens_map.json": {"image_token": "<s>"}}),
        ("{{ img }}" + LOOP, ENDED | {"extra_special_tokens": {"img": "<image>"}}, {}),
        ("{{ tools is none }}{{ documents is defined }}{{ tools }}" + LOOP, ENDED, {}),
        ("{% set eos_token = 'x' %}" + LOOP, ENDED, {}),
        ("{% macro f() %}{{ eos_token }}{{ unk_token }}{% endmacro %}{{ f() }}",
         {"eos_token": "<s>", "unk_token": "<pad>"}, {}),
        ("{% for m in messages %}{{ m.content | title }}{{ m.content | wordcount }}{% endfor %}",
         ENDED, {}),
        ("{{ messages | map(attribute='content') | sort | join }}{{ messages | tojson(indent=1) }}",
         ENDED, {}),
    ],
)  # fmt: skip
def test_prompts_are_those_of_transformers(
    source: str, config: dict[str, Any], further: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, {"tokenizer_config.json": config | {"chat_template": source}, **further})
    check_prompts(tmp_path, read(tmp_path))


@pytest.mark.parametrize(
    ("given", "files", "note"),
    [
        (LOOP, {"chat_template.jinja": "J" + LOOP}, None),
        ([{"name": "default", "template": LOOP}], {}, None),
        ([{"name": "tool_use", "template": "T"}, {"name": "default", "template": LOOP}], {},
         "only 'default' is imported, not 'tool_use'"),
        (LOOP, {"chat_template.jinja": "J" + LOOP, "additional_chat_templates/rag.jinja": "R"},
         "only 'default' is imported, not 'rag'"),
    ],
)  # fmt: skip
def test_one_of_several_templates_is_that_of_transformers(
    given: Any, files: dict[str, str], note: str | None, tmp_path: Path
) -> None:
    write(tmp_path, {"tokenizer_config.json": ENDED | {"chat_template": given}, **files})
    vocabulary = read(tmp_path)
    check_prompts(tmp_path, vocabulary)
    assert [note in said for said in vocabulary.notes if note] == ([True] if note else [])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}", "strftime_now"),
        ("{{ joiner is defined }}", "it uses joiner"),
        ("{{ mask_token }}", "mask_token, which is '<gone>', but the vocabulary lacks"),
        ("{{ raise_exception('no') }}", "no"),
        ([{"name": "tool_use", "template": "T"}], "none of 'tool_use' is named 'default'"),
        (5, "it is 5; expected a text"),
        ([{"name": "default"}], "it is None; expected a text"),
    ],
)
def test_other_template_is_left_out_with_a_reason(given: Any, reason: str, tmp_path: Path) -> None:
    config = ENDED | {"mask_token": "<gone>", "chat_template": given}
    write(tmp_path, {"tokenizer_config.json": config})
    vocabulary = read(tmp_path)
    assert vocabulary.chat_template is None
    assert "the chat template is not imported: " in vocabulary.notes[-1]
    assert reason in vocabulary.notes[-1]


# Random folders

FLAGS = st.fixed_dictionaries(
    {name: st.booleans() for name in ("lstrip", "rstrip", "single_word", "normalized", "special")}
)
TEXT = st.sampled_from([*TOKENS, *TOKENS, "!", "1", "<gone>"])
"""Texts of special tokens: added tokens, two tokens of ordinary text, and one that is missing."""
TOKEN = TEXT | st.builds(lambda text: {"__type": "AddedToken", **entry(text)}, TEXT)
MAPPED = TEXT | st.builds(
    lambda text: {k: v for k, v in entry(text).items() if k != "special"}, TEXT
)
ROLE_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "image_token")


def naming(token: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Members of a file that name special tokens."""
    lists = ("additional_special_tokens", "extra_special_tokens")
    optional: dict[str, Any] = dict.fromkeys(ROLE_NAMES, token)
    optional |= dict.fromkeys(lists, st.lists(TEXT, max_size=2))
    return st.fixed_dictionaries({}, optional=optional)


SOURCE = st.lists(
    st.sampled_from(
        [
            *(f"{{{{ {role} }}}}" for role in (*ROLE_NAMES, "tools", "mask_token")),
            *(f"{{% if {role} is defined %}}D{{% endif %}}" for role in (*ROLE_NAMES, "documents")),
            "{{ strftime_now is defined }}",
            "<|user|>\n",
            " <image> ",
            "{% for m in messages %}{{ m.content }}<s>{% endfor %}",
            "{% for m in messages %}{{ m.content | trim | title }}{{ eos_token }}{% endfor %}",
        ]
    ),
    min_size=1,
    max_size=4,
).map("".join)
PLACES: dict[str, Any] = {
    "config": lambda source: {"tokenizer_config.json": {"chat_template": source}},
    "list": lambda source: {
        "tokenizer_config.json": {"chat_template": [{"name": "default", "template": source}]}
    },
    "file": lambda source: {"chat_template.jinja": source},
}
PART = st.sampled_from([*TOKENS, "!", " ", "\n", "a", "it's", "1", "<"])


@st.composite
def folders(draw: st.DrawFn) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Files of a folder, and the added tokens of its tokenizer.json: all tokens, or only the first
    if another file lists the rest."""
    files = PLACES[draw(st.sampled_from(sorted(PLACES)))](draw(SOURCE))
    tokens = [entry(text, **draw(FLAGS)) for text in TOKENS]
    count, listed = len(tokens), draw(st.sampled_from(["nowhere", "decoder", "older"]))
    config = draw(naming(TEXT if listed == "older" else TOKEN))
    if listed != "nowhere":
        count = draw(st.integers(1, len(tokens)))
    if listed == "decoder":
        flags = [draw(FLAGS) for _ in tokens]
        config["added_tokens_decoder"] = {
            str(380 + i): entry(text, **flags[i]) for i, text in enumerate(TOKENS)
        }
    if listed == "older":
        files["added_tokens.json"] = {text: 380 + i for i, text in enumerate(TOKENS)}
    if draw(st.booleans()):
        files["special_tokens_map.json"] = draw(naming(MAPPED))
    files["tokenizer_config.json"] = files.get("tokenizer_config.json", {}) | config
    return files, tokens[:count]


@settings(max_examples=examples(300, fast=8))
@given(folders(), st.lists(PART, max_size=8).map("".join), st.lists(PART, max_size=4).map("".join))
def test_random_folder_is_read_as_by_transformers(
    folder: tuple[dict[str, Any], list[dict[str, Any]]], text: str, content: str
) -> None:
    for token in TOKENS:  # in a message, logitd recognizes no special token
        content = content.replace(token, "x")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        write(path, *folder)
        vocabulary = read(path)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(path)
        ids = vocabulary.tokenizer.encode(text, special_ids=True)
        assert ids == theirs(text, add_special_tokens=False).input_ids
        if theirs.eos_token in vocabulary.tokenizer.special_tokens:
            assert vocabulary.tokenizer.end_of_text == theirs.eos_token_id
        if vocabulary.chat_template is not None:
            check_prompts(path, vocabulary, [[{"role": "user", "content": content}]])
        else:
            assert any("chat template is not imported" in note for note in vocabulary.notes)
