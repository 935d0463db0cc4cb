"""Chat template: turns the messages of a conversation into a prompt.

A template is written in Jinja, in the dialect of Hugging Face's tokenizers (`trim_blocks`,
`lstrip_blocks`, `raise_exception`, `break` and `continue`). Its variables are `messages`, each with
`role` and `content` (and `name`, if given), and `add_generation_prompt`. `tools` and `documents`
are none. If the vocabulary has an end-of-text token, `bos_token` and `eos_token` are both its name.
Tools, the time and random numbers are not supported.

If the template itself writes the name of a special token, the prompt has that token. A message can
never produce a special token or a part of one (`model/text/message_text.py`). Added tokens that are
not special are recognized in the template's text and in messages.

A template comes with the checkpoint, never with a request. It runs in Jinja's sandbox, without
access to files, modules or private attributes. Its running time and its output are limited, but the
memory that it uses while running is not.
"""

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.meta import find_undeclared_variables
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from logitd.model.files import without_surrogates
from logitd.model.text.message_text import Hidden, MessageText, hiding
from logitd.model.text.tokenizer import Tokenizer

MAX_SOURCE = 2**16
"""Maximum length of a template in characters."""
MAX_CHARACTERS = 2**22
"""Maximum number of characters that a template may write."""
MAX_SECONDS = 5.0
"""Time limit, in seconds, of one rendering; a common template takes less than a millisecond."""

_NO_FILTERS = (
    *("random", "e", "escape", "forceescape", "striptags", "urlencode", "urlize", "xmlattr"),
    "pprint",
)
"""Jinja's filters that are removed: `random` draws random numbers; `pprint` would print the text of
a message as another object; the others write or read HTML and would not recognize the hidden
characters of a message."""
_TEXT_FILTERS = ("indent", "title", "wordcount", "wordwrap")
"""Jinja's filters that look at the characters of a text otherwise than by its methods."""
_NUMBER_FILTERS = ("filesizeformat", "float", "int")
"""Jinja's filters that would write digits of a message as digits of the template."""

# These names contain a space, so a template can neither read nor replace them.
_DEADLINE = "the deadline"
_TIMED = "timed items"

_CUT = "\ud800"
"""A mark that is put at the end of the final message if that message is to be continued. No message
can contain the mark."""

Message = Mapping[str, str]
Part = str | int
"""Plain text, or the id of an added token."""


class ChatTemplateError(ValueError):
    """Raised if a template is unusable or fails on the given messages; the error's message gives
    the reason."""


class ChatTemplate:
    """A compiled template. Several threads may use it. Raises ChatTemplateError if `source` does
    not compile."""

    def __init__(self, source: str) -> None:
        _check_source(source)
        self.source = source
        environment = _environment()
        with _explained("the chat template does not compile"):
            try:
                tree = environment.parse(source)
                _watch_loops(tree, environment)
                code = environment.compile(tree, filename="<chat template>")
            except TemplateSyntaxError as error:
                raise ChatTemplateError(
                    f"line {error.lineno} of the chat template: {error.message}"
                ) from error
            self._template = Template.from_code(environment, code, environment.globals)

    def variables(self) -> set[str]:
        """Names that the template reads and does not set itself. Names of functions that every
        template has are left out."""
        with _explained("the chat template does not compile"):
            return find_undeclared_variables(_environment().parse(self.source))

    def render(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[Part]:
        """The prompt for the assistant's next message, as plain text and the ids of added tokens.
        With `continue_final_message` it ends with the text of the final message.

        The caller must limit `role` to known values, because it is not escaped; the other texts of
        a message may be anything. Raises ChatTemplateError if the template refuses the messages
        (`raise_exception`), fails on them, or exceeds its time or output limit.
        """
        if continue_final_message:
            *before, final = messages
            messages = [*before, {**final, "content": final["content"] + _CUT}]
        hidden = _hidden(messages, tokenizer.special_tokens)
        escaped = [
            {
                name: text if name == "role" else MessageText(text, hidden)
                for name, text in message.items()
            }
            for message in messages
        ]
        try:
            text = self._run(escaped, tokenizer, add_generation_prompt=add_generation_prompt)
        except ChatTemplateError as error:  # it may quote a message
            message = str(error).replace(_CUT, "").translate(hidden.show)
            raise ChatTemplateError(without_surrogates(message)) from error
        if continue_final_message:
            text, cut, _ = text.rpartition(_CUT)
            if not cut:
                raise ChatTemplateError(
                    "the chat template's output does not contain the final message, so the message "
                    "cannot be continued"
                )
            text = text.replace(_CUT, "")
        shown = text.translate(hidden.show)
        if _has_surrogates(shown):
            raise ChatTemplateError(
                "the chat template's output contains an unpaired surrogate, which is not text"
            )
        return [
            shown[cut.start : cut.end] if cut.token_id is None else cut.token_id
            for cut in tokenizer.added.split(shown, text)
        ]

    def _run(
        self, messages: Sequence[Message], tokenizer: Tokenizer, *, add_generation_prompt: bool
    ) -> str:
        variables: dict[str, Any] = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            _DEADLINE: time.monotonic() + MAX_SECONDS,
        }
        if tokenizer.end_of_text is not None:
            name = tokenizer.end_of_text_name
            variables |= {"bos_token": name, "eos_token": name}
        parts, length = [], 0
        with _explained("the chat template failed on these messages"):
            for part in self._template.generate(variables):
                length += len(part)
                if length > MAX_CHARACTERS:
                    raise ChatTemplateError(
                        f"the chat template's output exceeds {MAX_CHARACTERS} characters"
                    )
                parts.append(part)
        return "".join(parts)


@contextmanager
def _explained(problem: str) -> Iterator[None]:
    """Turn any error of Jinja, or of an expression in a template, into a ChatTemplateError."""
    try:
        yield
    except ChatTemplateError:
        raise
    except Exception as error:
        raise ChatTemplateError(f"{problem}: {type(error).__name__}: {str(error)[:200]}") from error


class _Code(CodeGenerator):
    """Jinja's compiler, except that constant expressions are evaluated later, during rendering: the
    compiler has no time limit, and a filter could run for minutes there."""

    def _output_child_to_const(self, node: nodes.Expr, *rest: Any) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, *rest)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, extended to check the time limit at each call, to limit the size of results
    of `*`, and to refuse `**`."""

    code_generator_class = _Code
    intercepted_binops = frozenset(("*", "**"))

    # The parameters have Jinja's names, with underscores so that they differ from all keywords of a
    # call in a template.
    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_time(__context)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or _too_large(left, right):
            raise ChatTemplateError(
                "the chat template computes a power, which is not allowed, or a product that is "
                "too large"
            )
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
        optimized=False,  # see _Code
    )
    # Jinja's other globals are random or have a state; without them the prompt depends only on the
    # messages.
    environment.globals = {
        name: environment.globals[name] for name in ("range", "dict", "namespace")
    }
    environment.globals["raise_exception"] = _raise_exception
    for name in _NO_FILTERS:
        del environment.filters[name]
    environment.filters["tojson"] = _tojson
    for name in (*_TEXT_FILTERS, "tojson"):
        environment.filters[name] = hiding(environment.filters[name])
    for name in _NUMBER_FILTERS:
        environment.filters[name] = _without_messages(name, environment.filters[name])
    environment.filters[_TIMED] = _timed
    return environment


def _watch_loops(tree: nodes.Template, environment: ImmutableSandboxedEnvironment) -> None:
    for loop in list(tree.find_all(nodes.For)):
        if loop.recursive:
            raise ChatTemplateError(
                f"line {loop.lineno} of the chat template: recursive loops are not supported"
            )
        loop.iter = nodes.Filter(
            loop.iter, _TIMED, [], [], None, None, lineno=loop.lineno, environment=environment
        )


@pass_context
def _timed(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _check_time(context)
        yield item


def _check_time(context: Context) -> None:
    if time.monotonic() > context.parent[_DEADLINE]:
        raise ChatTemplateError(f"the chat template took more than {MAX_SECONDS:g} s")


def _raise_exception(message: object) -> None:
    raise ChatTemplateError(f"the chat template raised an error: {str(message)[:300]}")


def _without_messages(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def function(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, MessageText):
            raise ChatTemplateError(
                f"the chat template uses the filter {name} on text of a message, which is not "
                "allowed"
            )
        return plain(value, *args, **kwargs)

    return function


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's filter `tojson`, which would escape characters for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _too_large(left: Any, right: Any) -> bool:
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return max(abs(left), abs(right)) > 2**64
    many, times = (right, left) if isinstance(left, int) else (left, right)
    return (
        isinstance(times, int) and hasattr(many, "__len__") and (len(many) * times > MAX_CHARACTERS)
    )


def _check_source(source: str) -> None:
    if len(source) > MAX_SOURCE:
        raise ChatTemplateError(
            f"the chat template has {len(source)} characters, but the limit is {MAX_SOURCE}"
        )
    if not source.strip():
        raise ChatTemplateError("the chat template is empty")
    if _has_surrogates(source):
        raise ChatTemplateError(
            "the chat template contains an unpaired surrogate, which is not text"
        )


def _hidden(messages: Sequence[Message], special_tokens: Iterable[str]) -> Hidden:
    texts = (text for message in messages for name, text in message.items() if name != "role")
    try:
        return Hidden.of(special_tokens, texts)
    except ValueError as error:
        raise ChatTemplateError(str(error)) from error


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in set(text))
