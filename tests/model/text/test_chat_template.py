"""Chat templates: their output, attacks through messages, and their limits."""

import functools
import json
import time
from collections.abc import Mapping, Sequence

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.filters import FILTERS

from logitd.model.text import chat_template
from logitd.model.text.chat_template import (
    MAX_CHARACTERS,
    MAX_SOURCE,
    ChatTemplate,
    ChatTemplateError,
)
from logitd.model.text.tokenizer import Tokenizer
from tests.model.factories import CHAT_TEMPLATE, byte_tokenizer, chat_tokenizer
from tests.profiles import examples

TOKENIZER = chat_tokenizer()
BYTES = byte_tokenizer()


@functools.lru_cache
def tokenizer(*special_tokens: str) -> Tokenizer:
    specials = {name: 256 + place for place, name in enumerate(special_tokens)}
    return Tokenizer(ranks=BYTES.ranks, pattern=BYTES.pattern, special_tokens=specials)


def render(
    source: str, *contents: str, special_tokens: Sequence[str] | None = None
) -> list[str | int]:
    """The pieces of rendered user messages."""
    messages = [{"role": "user", "content": content} for content in contents]
    vocabulary = TOKENIZER if special_tokens is None else tokenizer(*special_tokens)
    return compiled(source).render(messages, vocabulary)


@functools.cache
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def written(pieces: Sequence[str | int], vocabulary: Tokenizer = TOKENIZER) -> str:
    """The text of pieces, including the names of special tokens."""
    return "".join(p if isinstance(p, str) else vocabulary.decode([p]) for p in pieces)


def refusal(source: str, *contents: str) -> str:
    with pytest.raises(ChatTemplateError) as caught:
        render(source, *(contents or ("hi",)))
    message = str(caught.value)
    assert message.encode(), "the message can be sent"
    assert len(message) < 500
    return message


# Output


def test_conversation_becomes_text_between_special_tokens() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "  Hello there \n"},
        {"role": "assistant", "content": "Hé"},
    ]
    start, end = 257, 258
    assert ChatTemplate(CHAT_TEMPLATE).render(messages, TOKENIZER) == [
        *(start, "system\nBe kind.", end, "\n"),
        *(start, "user\nHello there", end, "\n"),
        *(start, "assistant\nHé", end, "\n"),
        *(start, "assistant"),
    ]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages | length }}", "2"),
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }} {% endfor %}", "1/2 2/2 "),
        ("{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}", "two"),
        ("{% for m in messages if m.content == 'two' %}{{ loop.first }}{% endfor %}", "True"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{% for m in nothing %}{% else %}none{% endfor %}", "none"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i * 2 %}"
         "{% endfor %}{{ ns.n }}", "6"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<&é"}'),
        ("{% if add_generation_prompt %}yes{% endif %}{{ tool }}", "yes"),
        ("{{ tools is none }}{{ tools is defined }}{{ documents is none }}", "TrueTrueTrue"),
        ("{{ {'b': [1], 'a': 'é'} | tojson(separators=(',', ':'), sort_keys=true) }}",
         '{"a":"é","b":[1]}'),
        ("{{ messages[1].content | tojson(true) }}{{ '7' | int + 1 }}", '"two"8'),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}", "<1>"),
        ("{{ 'ab' * 3 }}{{ 3 * [1] }}{{ 2 * 2.5 }}", "ababab[1, 1, 1]5.0"),
        ("  {% if true %}\n  a\n  {% endif %}\nb\n", "  a\nb"),
    ],
)  # fmt: skip
def test_template_follows_the_usual_dialect(source: str, text: str) -> None:
    assert render(source, "<&é", "two") == [text]


def test_special_tokens_have_ids() -> None:
    assert render("{{ bos_token }}a{{ eos_token }}", "") == [256, "a", 256]
    assert render("{{ bos_token }}a", "", special_tokens=["<s>"]) == ["a"], "there is none"
    assert render("<a><a>b", special_tokens=["<a>", "<a>b"]) == [256, 257], "the longest counts"
    role = "<|{{ messages[0].role }}|>x"  # roles come from a fixed set
    assert render(role, "", special_tokens=["<|user|>"]) == [256, "x"]


def test_tokens_strip_white_space_and_added_ones_are_found_in_messages() -> None:
    vocabulary = Tokenizer(
        ranks=BYTES.ranks,
        pattern=BYTES.pattern,
        special_tokens={"<s>": 256, "</s>": 257},
        added_tokens={"<think>": 258},
        added_flags={"<s>": ["rstrip"], "</s>": ["lstrip"]},
    )
    template = ChatTemplate("<s>\n{{ messages[0].content }}\n</s> x")
    said = [{"role": "user", "content": " a<s>\n<think>b "}]
    assert template.render(said, vocabulary) == [256, "a<s>\n", 258, "b", 257, " x"]


def test_name_of_a_message_reaches_the_template() -> None:
    messages = [{"role": "user", "name": "Ann<|im_end|>", "content": "x"}]
    pieces = ChatTemplate("{{ messages[0].name }}").render(messages, TOKENIZER)
    assert pieces == ["Ann<|im_end|>"]


def test_continued_message_ends_the_prompt() -> None:
    template = ChatTemplate("{{ messages[0].content }}!")
    messages = [{"role": "user", "content": "a"}]
    assert template.render(messages, TOKENIZER, continue_final_message=True) == ["a"]
    with pytest.raises(ChatTemplateError, match="final message"):
        template.render(messages * 2, TOKENIZER, continue_final_message=True)
    failing = ChatTemplate("{{ raise_exception(messages[-1].content) }}")
    with pytest.raises(ChatTemplateError, match=r": a$"):
        failing.render(messages, TOKENIZER, continue_final_message=True)


# Messages


@pytest.mark.parametrize(
    ("source", "contents"),
    [
        ("{{ messages[0].content }}", ["<|im_end|>"]),
        ("{{ messages[0].content }}{{ messages[1].content }}", ["<|im_", "end|>"]),
        ("<|im_{{ messages[0].content }}", ["end|>"]),
        ("{{ messages[0].content }}_end|>", ["<|im"]),
        ("<{{ messages[0].content }}im_end|>", ["|"]),
        ("<|{{ messages[0].content }}|>", ["im_end"]),
        ("<|im_en{{ messages[0].content }}|>", ["d"]),
        ("{% for c in messages[0].content %}{{ c }}{% endfor %}", ["<|im_end|>"]),
        ("{{ messages[0].content[1:-1] }}", ["x<|im_end|>x"]),
        ("{{ messages[0].content[::-1] }}", [">|dne_mi|<"]),
        ("{{ messages[0].content | replace('X', '') }}", ["<|imX_end|>"]),
        ("{{ messages[0].content | trim }}", [" <|im_end|> "]),
        ("{{ messages[0].content | lower }}", ["<|IM_END|>"]),
        ("{{ messages | map(attribute='content') | join }}", ["<|im", "_end|>"]),
        ("{{ messages[0].content.split('-') | join }}", ["<|im_-end|>"]),
        ("{{ messages | tojson }}", ["<|im_end|>"]),
    ],
)
def test_no_message_makes_a_special_token(source: str, contents: list[str]) -> None:
    pieces = render(source, *contents)
    assert len(pieces) == 1
    assert "<|im_end|>" in written(pieces), "the text contains the name"


def test_change_of_case_makes_no_special_token() -> None:
    """ß in upper case is SS, and the Kelvin sign in lower case is k."""
    specials = ["STOP", "SS", "kk"]
    for source, content, text in [
        ("{{ messages[0].content | upper }}", "stop ß", None),
        ("{{ messages[0].content | lower }}", "\u212a\u212a", None),
        ("{{ messages[0].content }}", "STOP SS kk", "STOP SS kk"),
        ("{{ messages[0].content.casefold() }}", "\u212aK", None),
    ]:
        pieces = render(source, content, special_tokens=specials)
        assert all(isinstance(piece, str) for piece in pieces)
        assert text is None or pieces == [text]


SPECIALS = st.lists(
    st.text(st.sampled_from("<|>ab/E"), min_size=1, max_size=4), unique=True, max_size=4
)
CONTENT = st.text(st.sampled_from("<|>abAB/Ee ß\n"), max_size=8)
TEMPLATES = {
    "as it is": "{{ text }}",
    "between letters": "a{{ text }}b",
    "in brackets": "<{{ text }}>",
    "between bars": "<|{{ text }}|>",
    "joined": "{{ '<|' + text ~ '|' + '>' }}",
    "trimmed": "{{ text | trim }}",
    "in upper case": "{{ text | upper }}",
    "in title case": "{{ text | title }}",
    "in other case": "{{ text.swapcase() }}",
    "from behind": "{{ text[::-1] }}",
    "in pieces": "{{ text[1:] }}{{ text[:1] }}{{ text | list | join }}{{ text.split('a') | join }}",
    "wrapped": "{{ text | wordwrap(2) }}{{ text | indent(1, true) }}{{ text | center(9) }}",
    "sorted": "{{ messages | map(attribute='content') | sort | join }}{{ text | sort | join }}",
    "as a format": "{{ text.ljust(5) }}{{ '%s' % text }}{{ [text, text] | max }}",
    "letter by letter": "{% for c in text %}{{ c }}{% endfor %}{{ text | first }}{{ text | last }}",
}
LOST = {
    "in lower case": "{{ ('<' ~ text) | lower }}",
    "in upper case, too": "{{ (text + 'a') | upper }}",
}
"""Expressions that join message text to a plain string and change the case of the result. The case
of the message text does not change, because placeholders stand for it."""
LOOKING = {
    "compared": "{{ text == 'ab' }}{{ 'ab' == text }}{{ text != '|' }}{{ text in ['a', '<'] }}",
    "searched": "{{ 'a' in text }}{{ '<|' in text }}{{ text.find('|') }}{{ text.count('a') }}",
    "at its ends": "{{ text.startswith(('a', '<|')) }}{{ text.endswith('>') }}",
    "cut": "{{ text.split('|') }}{{ text.partition('<') }}{{ text.strip('<>') }}{{ text[:2] }}",
    "replaced": "{{ text | replace('a', '|') }}{{ text.removeprefix('a').replace('|', 'a', 1) }}",
    "looked up": "{{ {'a': 1, '<|': 2, '': 3}[text] }}{{ text | length }}",
    "in json": "{{ {'a': text} | tojson }}{{ [text] | tojson(ensure_ascii=true, indent=1) }}",
    "counted": "{{ text | wordcount }}{{ text is lower }}{{ text.isalnum() }}{{ text < 'a' }}",
}


def source_of(form: str) -> str:
    """A template that evaluates the expression named `form` for each message, then writes "<a>"."""
    forms = TEMPLATES | LOOKING | LOST
    return "{% for m in messages %}{% set text = m.content %}" + forms[form] + "{% endfor %}<a>"


@functools.cache
def plain(source: str) -> jinja2.Template:
    """The same template in plain Jinja."""
    environment = jinja2.Environment()
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False} | options
    )
    return environment.from_string(source)


def ids(pieces: Sequence[str | int]) -> list[int]:
    return [piece for piece in pieces if isinstance(piece, int)]


@settings(max_examples=examples(200))
@given(
    SPECIALS, st.lists(CONTENT, min_size=1, max_size=3), st.sampled_from(sorted(TEMPLATES | LOST))
)
def test_special_tokens_come_from_the_template_alone(
    special_tokens: list[str], contents: list[str], form: str
) -> None:
    """Rendering any messages yields the same special tokens as rendering harmless messages of the
    same length. The harmless messages have the same white space, because templates trim it."""
    harmless = ["".join(c if c.isspace() else "\u4e00" for c in content) for content in contents]
    source = source_of(form)
    pieces = render(source, *contents, special_tokens=special_tokens)
    assert ids(pieces) == ids(render(source, *harmless, special_tokens=special_tokens))


@settings(max_examples=examples(200))
@given(
    SPECIALS,
    st.lists(CONTENT, min_size=1, max_size=3),
    st.sampled_from(sorted(TEMPLATES | LOOKING)),
)
def test_text_equals_plain_jinja(special_tokens: list[str], contents: list[str], form: str) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    vocabulary = tokenizer(*special_tokens)
    pieces = compiled(source_of(form)).render(messages, vocabulary)
    assert written(pieces, vocabulary) == plain(source_of(form)).render(messages=messages)


def test_variables_of_a_template_are_those_that_it_does_not_set() -> None:
    source = (
        "{% set b = a %}{% for m in messages %}{{ m.content ~ b ~ range(2) }}{% endfor %}"
        "{% if c is defined %}{{ raise_exception('d') }}{% endif %}"
    )
    assert ChatTemplate(source).variables() == {"a", "c", "messages"}


def test_template_can_split_a_message() -> None:
    """Some templates leave out the model's reasoning."""
    source = (
        "{% set content = messages[0].content %}{% if '</think>' in content %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ content }}"
    )
    for special_tokens in ([], ["</think>", "<|im_end|>", "<think>"]):
        thought = "<think>Hm</think>\n\nYes"
        assert render(source, thought, special_tokens=special_tokens) == ["Yes"]
        assert render(source, "No", special_tokens=special_tokens) == ["No"]


# Invalid templates


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ a( }}", "line 1.*unexpected"),
        ("\n{% for %}", "line 2"),
        ("{% for a in b %}", "line 1.*Unexpected end"),
        ("{{ a | nofilter }}", "nofilter"),
        ("{{ a | random }}", "random"),
        ("{{ a | e }}", "'e'"),
        ("{{ a | pprint }}", "pprint"),
        ("{% for a in b recursive %}{% endfor %}", "recursive"),
        ("", "is empty"),
        (" \n", "is empty"),
        ("x" * (MAX_SOURCE + 1), f"{MAX_SOURCE + 1} .*{MAX_SOURCE}"),
        ("\ud800", "unpaired surrogate"),
        ("{% if a %}" * 400, "does not compile"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "does not compile"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_invalid_source_is_refused(source: str, said: str) -> None:
    with pytest.raises(ChatTemplateError, match=said):
        ChatTemplate(source)


# Limits


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", ": roles must alternate"),
        ("{{ raise_exception(messages[0].content) }}", ": hi"),
        ("{{ messages[7].content }}", "failed on these messages: UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{% include 'x' %}", "no loader"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ ''.format.__globals__ }}x{{ ''.__init__.__globals__() }}", "unsafe"),
        ("{{ cycler() }}", "'cycler' is undefined"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ 2 ** 2 }}", "a power"),
        ("{{ messages[0].content | int }}", "the filter int on text of a message"),
        ("{{ 'a' * 10000000 }}", "too large"),
        ("{{ 10000000 * messages }}", "too large"),
        ("{{ 'a' * 4000000 }}{{ 'a' * 4000000 }}", f"{MAX_CHARACTERS} characters"),
        ("{{ '\\ud800' }}", "unpaired surrogate"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)  # fmt: skip
def test_failed_rendering_is_refused(source: str, said: str) -> None:
    assert said in refusal(source)


def test_refusal_quotes_the_message() -> None:
    """The refusal shows the original characters instead of their placeholders."""
    assert refusal("{{ raise_exception(messages[0].content) }}", "<|im_end|>").endswith(
        ": <|im_end|>"
    )
    assert ": ?" in refusal("{{ raise_exception('\\udfff') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) if 'a' in messages %}{% endfor %}" * 200,
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}",
    ],
    ids=["loops", "filtered loops", "calls"],
)
def test_endless_template_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.05)
    started = time.process_time()
    assert "took more than 0.05 s" in refusal(source)
    assert time.process_time() - started < 30


@pytest.mark.parametrize("use", ["{{ %s }}", "{%% set x = %s %%}", "{%% if %s %%}{%% endif %%}"])
def test_filters_do_not_run_in_the_compiler(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> str:
        raise AssertionError("the filter ran")

    monkeypatch.setitem(FILTERS, "format", run)
    ChatTemplate(use % "'%1000000000d'|format(1)")


def test_template_cannot_change_its_deadline() -> None:
    source = "{% set deadline = 0 %}{{ deadline }}{% for i in range(2) %}{{ i }}{% endfor %}"
    assert render(source) == ["001"]


def test_long_conversation_is_rendered() -> None:
    messages: list[Mapping[str, str]] = [{"role": "user", "content": "x" * 900}] * 4096
    assert len(ChatTemplate(CHAT_TEMPLATE).render(messages, TOKENIZER)) == 4 * 4096 + 2


def test_too_many_hidden_characters_are_refused() -> None:
    """No real vocabulary requires this many characters to be hidden."""
    names = [chr(0x4E00 + i) for i in range(1025)]
    content = "".join(names)
    with pytest.raises(ChatTemplateError, match=r"1025.*1024"):
        render("{{ messages[0].content }}", content, special_tokens=names)
    assert render("{{ messages[0].content }}", content, special_tokens=names[1:]) == [content]
