"""Constraints: which token ids may come next, so that the text is what a client described.

A regular expression, a JSON Schema, a list of choices or a grammar becomes a `Constraint`, and each
sequence has a `Matcher` of it: a mask over the vocabulary before sampling, one step on after it.
A matcher shares nothing that changes with another: the tokens of a sequence alone decide how far it
comes. The work is llguidance's, an optional dependency that is imported here alone, on the
checkpoint's own vocabulary and split pattern. Does not apply masks
(`model/inference/sampling/sampler.py`), nor protect a process from what compiling may take
(`model/inference/constraints/sandbox.py`), nor cache what was compiled
(`service/models/constraints.py`).

What the four kinds mean here:

regex        the whole text matches, in the syntax of Rust's `regex` crate
json_schema  the text is one JSON value by the schema (`json_schema.py`), on one line as
             Python's `json.dumps` writes it, properties in the order of the schema; names of
             additional properties may repeat; what the schema leaves open is bounded, so that
             the text ends (`json_bounds.py`)
choice       the text is one of a list
grammar      the text is a sentence of a context-free grammar, in llguidance's dialect of Lark

Where a grammar leaves only one way to go on, the tokens are those that the text has by itself;
where the vocabulary lacks bytes (characters, words), whatever tokens there are that make the text.

A constraint is made of text, special tokens are not. The end of text may be sampled exactly where
the text is complete and could also go on; where it could not, the sequence ends by itself.
llguidance is told of an end token of its own, one id beyond the vocabulary, so that vocabularies
with and without an end of text are one case. Without one, a text that could go on goes on.
"""

import json
import re
import time
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from logitd.model.inference.constraints.heap import Heap
from logitd.model.inference.constraints.json_bounds import bounded
from logitd.model.inference.constraints.json_schema import enforceable
from logitd.model.inference.errors import ConstraintError
from logitd.model.text.tokenizer import Tokenizer

Kind = Literal["regex", "json_schema", "choice", "grammar"]

LIMITS: Mapping[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 5_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
"""What llguidance may spend: on the lexer at first, on the lexer and the parser for one mask
(about 8 ms), and on the states that the lexer of one sequence keeps (about 1 KiB each)."""

JSON_LAYOUT: Mapping[str, str | bool] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "coerce_one_of": False,
    "lenient": False,
}
"""One layout: in free white space a small model loses itself. One spelling of each character:
spelled with `\\u0061` a property `a` would pass for another one."""

WITHOUT_EFFECT = ("capture", "stop", "stop_capture", "temperature")
"""Attributes of a grammar's rule that would change nothing here, or not what they say."""

LOCATION = re.compile(r"at \d+\(\d+\): ")
"""Line and column, as the compiler begins a message with them."""

QUICK_SECONDS = 0.002
"""Up to here a constraint is compiled for a sequence while others generate."""

MASK_CACHE_SIZE = 256
"""Masks that come again need not be unpacked again: within a string, most are the same."""

NOTHING_FOLLOWS = "no text matches from here on"


class ConstraintsUnavailable(Exception):
    """No constraint can be compiled here; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a client asked for. `text` is the expression or the grammar as it was written, the
    schema or the list of choices as JSON."""

    kind: Kind
    text: str


class Compiler:
    """Makes constraints for one vocabulary. Safe to use from several threads.

    Raises ConstraintsUnavailable without llguidance, when that cannot read the vocabulary, or for a
    model of token ids alone: a constraint is about text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.has_text:
            raise ConstraintsUnavailable(
                "this model has no vocabulary, and a constraint is about text; "
                "allowed_token_ids limits the ids that may come"
            )
        try:
            import llguidance
        except ImportError as error:
            raise ConstraintsUnavailable(
                "constraints (regex, json_schema, choice, grammar) need llguidance, which is not "
                "installed here: pip install llguidance, or the extra `constrain`, adds it"
            ) from error
        self.heap = Heap()
        self._llguidance = llguidance
        self._limits = llguidance.LLParserLimits(**LIMITS)
        # To look ahead llguidance encodes text itself, which takes all of the bytes.
        self._looks_ahead = all(bytes([byte]) in tokenizer.tokens for byte in range(256))
        self.vocab_size = tokenizer.vocab_size
        self.ends = tokenizer.ends
        added = {text.encode(): i for text, i in tokenizer.added_tokens.items()}
        tokens = tokenizer.tokens | added  # of one text, the id that encoding gives
        try:
            self._vocabulary = llguidance.LLTokenizer.from_tiktoken(  # type: ignore[attr-defined]
                encoder=tokens,
                special_tokens={},
                pattern=tokenizer.pattern,
                eos_token=self.vocab_size,
                n_vocab=self.vocab_size + 1,
            )
        except ValueError as error:
            raise ConstraintsUnavailable(
                f"constraints cannot be compiled for this vocabulary: {error}"
            ) from error
        self._seen: dict[bytes, tuple[np.ndarray, bool]] = {}
        # Special tokens, and the gaps that published encodings have between them.
        self._no_text = np.ones(self.vocab_size, dtype=np.bool_)
        self._no_text[list(tokens.values())] = False

    def compile(self, source: Source) -> "Constraint":
        """Raises ConstraintError, in the words of the compiler, for what is wrong or too large."""
        grammar = _grammar(source, looks_ahead=self._looks_ahead)
        began = time.thread_time()
        matcher = self.matcher(source, grammar)
        seconds = time.thread_time() - began
        allowed, complete = self.look(matcher)
        if complete:
            raise ConstraintError("only the empty text matches; there is nothing to generate")
        return Constraint(source, self, grammar, allowed, seconds)

    def matcher(self, source: Source, grammar: str) -> Any:
        """llguidance's matcher before the first token, which shares nothing with any other: a copy
        would share its lexer, whose states and costs depend on all that use it."""
        matcher = self._llguidance.LLMatcher(
            self._vocabulary, grammar, log_level=0, limits=self._limits
        )
        if matcher.is_error():
            words = _readable(matcher.get_error())
            # The grammar that is built here around an expression or choices is left out.
            raise ConstraintError(words if source.kind == "grammar" else LOCATION.sub("", words))
        return matcher

    def look(self, matcher: Any) -> tuple[np.ndarray, bool]:
        """What may follow where an llguidance matcher stands: booleans over the vocabulary, which
        are not to be changed, and whether it is only the end. Raises ConstraintError when it is
        nothing at all."""
        bits = matcher.compute_bitmask()
        seen = self._seen.get(bits)
        if seen is not None and not seen[1]:
            return seen
        if seen is None:
            if matcher.is_error():
                raise ConstraintError(_readable(matcher.get_error()))
            if len(self._seen) >= MASK_CACHE_SIZE:
                self._seen.clear()
            seen = self._seen[bits] = self._unpacked(bits)
        elif matcher.is_error():  # an error's bits are the end token alone, too
            raise ConstraintError(_readable(matcher.get_error()))
        return seen

    def _unpacked(self, bits: bytes) -> tuple[np.ndarray, bool]:
        mask = np.unpackbits(
            np.frombuffer(bits, np.uint8), count=self.vocab_size + 1, bitorder="little"
        ).view(np.bool_)
        allowed, ends = mask[: self.vocab_size], bool(mask[self.vocab_size])
        allowed[self._no_text] = False
        goes_on = bool(allowed.any())
        if not goes_on and not ends:
            raise ConstraintError(NOTHING_FOLLOWS)
        allowed[list(self.ends)] = ends
        allowed.flags.writeable = False
        return allowed, not goes_on


class Constraint:
    """A compiled constraint (`TokenConstraint` of the engine), shared by sequences."""

    def __init__(
        self, source: Source, compiler: Compiler, grammar: str, allowed: np.ndarray, seconds: float
    ) -> None:
        self.source = source
        self.compiler = compiler
        self.allowed = allowed  # what may come first
        self.is_quick = seconds <= QUICK_SECONDS  # to compile
        self._grammar = grammar
        self._starts: list[Any] = []  # compiled ahead

    @property
    def kind(self) -> Kind:
        return self.source.kind

    @property
    def vocab_size(self) -> int:
        return self.compiler.vocab_size

    def matcher(self) -> "Matcher":
        return Matcher(self)

    def without_starts(self) -> "Constraint":
        """The same, for a request that compiles ahead for its own sequences (`prepare`)."""
        one = copy(self)
        one._starts = []
        return one

    def prepare(self) -> None:
        """Compile for one more sequence ahead, in another thread than the one that generates."""
        self._starts.append(self.compiler.matcher(self.source, self._grammar))

    def start(self) -> Any:
        """llguidance's matcher for one sequence, before the first token."""
        if self._starts:
            return self._starts.pop()
        return self.compiler.matcher(self.source, self._grammar)


class Matcher:
    """How far one sequence has come (`TokenMatcher` of the engine)."""

    def __init__(self, constraint: Constraint) -> None:
        self.complete = False
        """Whether nothing may follow: the text is whole."""
        self._constraint, self._heap = constraint, constraint.compiler.heap
        self._look, self._ends = constraint.compiler.look, constraint.compiler.ends
        self._state: Any = None  # llguidance's; none before the first token
        self._allowed: np.ndarray | None = constraint.allowed  # None: not looked for yet

    def allowed(self) -> np.ndarray:
        """Which ids may come next: booleans (V,). Computed when it is first asked for after a
        token. None is true if the text turns out to be whole; then the matcher is `complete`.
        Raises ConstraintError when nothing can follow, though it is not."""
        if self._allowed is None:
            self._allowed, self.complete = self._look(self._state)
        return self._allowed

    def advance(self, token_id: int) -> None:
        """Take in an allowed token. Raises ConstraintError for one that was not."""
        if token_id in self._ends:
            self.complete = True
            return
        if self._state is None:
            self._heap.begin()
            self._state = self._constraint.start()
        self._allowed = None
        if not self._state.consume_token(token_id):
            raise ConstraintError(_readable(self._state.get_error()))
        if self._state.is_stopped():  # nothing goes on here: whole, or a dead end
            self.allowed()

    def __del__(self) -> None:
        if self._state is not None:
            self._state = None
            self._heap.end()


def _grammar(source: Source, *, looks_ahead: bool) -> str:
    """A source in llguidance's own form; `looks_ahead` is whether it may encode text to force it.
    Raises ConstraintError for what llguidance would let pass without honouring it."""
    match source.kind:
        case "regex":
            lark = f"start: /{_quoted(source.text)}/"
        case "choice":
            texts = map(json.dumps, json.loads(source.text))
            lark = f"start: CHOICE\nCHOICE: {' | '.join(texts)}"
        case "grammar":
            _check_lark(source.text)
            lark = source.text
        case "json_schema":
            schema = bounded(enforceable(json.loads(source.text)))
            schema["x-guidance"] = JSON_LAYOUT
            if looks_ahead:
                return json.dumps({"grammars": [{"json_schema": schema}]})
            lark = f"start: %json {json.dumps(schema)}"
    if not looks_ahead:  # at the end, so that lines keep their numbers
        lark += '\n%llguidance {"no_forcing": true}'
    # By itself a text that begins like JSON would be read as a list of grammars.
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _quoted(expression: str) -> str:
    """A regular expression as it stands between slashes. Raises ConstraintError for one that ends
    in the middle of an escape, and would take the closing slash for its own."""
    if (len(expression) - len(expression.rstrip("\\"))) % 2:
        raise ConstraintError("the expression ends with a backslash that escapes nothing")
    plain = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
    parts = re.findall(r"\\.|.", expression, flags=re.DOTALL)
    return "".join(plain.get(part[-1], part) for part in parts)


def _check_lark(text: str) -> None:
    bare = re.sub(r'//.*|#.*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/', "", text)  # no strings
    if "%json" in bare:
        raise ConstraintError(
            "%json is not supported in a grammar; json_schema is a field of its own"
        )
    if named := re.search(r"<[^>\n]*>", bare):
        raise ConstraintError(f"the token {named[0][:40]} cannot be part of it: it is made of text")
    for attributes in re.findall(r"^[ \t]*[!?]?[\w-]+[ \t]*\[(.*)\][ \t]*:", bare, re.MULTILINE):
        names = {attribute.partition("=")[0].strip() for attribute in attributes.split(",")}
        if refused := sorted(names.intersection(WITHOUT_EFFECT)):
            raise ConstraintError(f"the attribute {refused[0]} of a rule has no effect here")


def _readable(message: str) -> str:
    """The compiler's words in one line, without the excerpts, advice and files that are its own."""
    if message.startswith("NoExtensionBias"):
        return NOTHING_FOLLOWS
    if message.startswith("lexer error: too many "):
        return (
            f"a text needs more than {LIMITS['max_lexer_states']} states of the lexer, or "
            "too many at once; shorten repetitions that overlap, such as (.*a.{9})+"
        )
    location = LOCATION.match(message)
    if "(in regex): " in message:
        reason = message.rpartition("(in regex): ")[2].rpartition("\nerror: ")[2].partition("\n")[0]
        message = f"{location[0] if location else ''}invalid regular expression: {reason}"
    message = message[:1000]  # what follows takes time by the square of a word's length
    own = r"<non-verbose/>|^\s*\d+ \|.*$|^\s*\^\s*$|; either increase .*|\S*\.rs(:\d+)*"
    return " ".join(re.sub(own, "", message, flags=re.MULTILINE).split())[:300]
