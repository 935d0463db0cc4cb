"""Chat: converts messages to a prompt with the checkpoint's chat template, and translates replies
of /generate into replies of /v1/chat/completions."""

from collections.abc import Iterator
from typing import Any

from logitd.model.checkpoint.checkpoint import CheckpointInfo
from logitd.model.operations.operation import Subject
from logitd.model.operations.prompts import check_length, encode_within, no_vocabulary
from logitd.model.text.chat_template import ChatTemplateError, Message
from logitd.service.errors import bad_request
from logitd.service.openai import chat_schemas
from logitd.service.openai.chat_schemas import ChatRequest
from logitd.service.openai.envelope import head, last_chunk, named_seed, usage, usage_member
from logitd.service.openai.logprobs import ShownTokens, chat_logprobs
from logitd.service.openai.tools import GrowingCall, text_of_calls


def chat_prompt(body: ChatRequest, subject: Subject) -> tuple[int, ...]:
    """The token ids of a conversation, written with the checkpoint's chat template. They end where
    the assistant's next message begins. Raises ApiError. A template may be slow."""
    checkpoint = subject.checkpoint
    if not checkpoint.tokenizer.has_text:
        raise no_vocabulary("messages")
    if checkpoint.chat_template is None:
        raise bad_request(
            f"{checkpoint.name} has no chat template to write the messages as text. Send the "
            "text to /v1/completions, or add a template to the checkpoint: with `logitd train "
            "--chat-template FILE`, or as chat_template in the tokenizer section of its "
            "config.json",
            "messages",
            "no_chat_template",
        )
    messages = [_message(message) for message in body.messages]
    # First, because the template and the search for special tokens in its output take long.
    check_length("".join(message["content"] for message in messages), "messages", subject)
    try:
        pieces = checkpoint.chat_template.render(
            messages,
            checkpoint.tokenizer,
            add_generation_prompt=body.begins_answer,
            continue_final_message=bool(body.continue_final_message),
        )
    except ChatTemplateError as error:
        raise bad_request(str(error), "messages", "chat_template_failed") from error
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(piece)
        else:
            ids += encode_within(piece, "messages", subject)
    if not ids:
        raise bad_request("the chat template produces no text for these messages", "messages")
    return tuple(ids)


def _message(message: chat_schemas.Message) -> Message:
    """A message in the form that templates accept. Function calls become text."""
    texts = [message.content or "", text_of_calls(message.tool_calls or ())]
    known = {
        "role": "system" if message.role == "developer" else message.role,
        "content": "\n".join(filter(None, texts)),
    }
    return known if message.name is None else {**known, "name": message.name}


class ChatFormat:
    """Formats the replies to one request."""

    def __init__(self, body: ChatRequest, model: str, checkpoint: CheckpointInfo) -> None:
        self._head = head("chatcmpl", "chat.completion", model, checkpoint)
        self._tokenizer = checkpoint.tokenizer
        self._body = body
        self._tokens: dict[int, ShownTokens] = {}  # by choice
        self._functions = body.callable_tools
        self._calls: dict[int, GrowingCall] = {}

    def reply(self, reply: dict[str, Any]) -> dict[str, Any]:
        choices = [
            {
                "index": native["index"],
                "message": self._message(native),
                "logprobs": self._logprobs(native),
                "finish_reason": self._finish_reason(native),
                "seed": named_seed(self._body.seed, native["seed"]),
            }
            for native in reply["choices"]
        ]
        return {**self._head, "choices": choices, "usage": usage(reply["usage"])}

    def chunks(self, chunk: dict[str, Any], counts: dict[str, int]) -> Iterator[dict[str, Any]]:
        """OpenAI's chunks for a chunk of /generate: one for the role, one for each new piece of
        text, and one for the finish reason."""
        options = self._body.stream_options
        chunk_head = {**self._head, "object": "chat.completion.chunk"}
        for native in chunk["choices"]:
            seed = named_seed(self._body.seed, native["seed"])
            for choice in self._deltas(native):
                choices = [{**choice, "seed": seed}]
                yield {**chunk_head, "choices": choices, **usage_member(options, counts)}
        yield from last_chunk(chunk_head, options, chunk)

    def _message(self, native: dict[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": native["text"], "refusal": None}
        if not self._functions:
            return message
        call = self._call(native)
        calls = {} if call is None else {"tool_calls": [call]}
        return {**message, "content": None, **calls}

    def _finish_reason(self, native: dict[str, Any]) -> str | None:
        reason: str | None = native["finish_reason"]
        return "tool_calls" if self._functions and reason == "stop" else reason

    def _call(self, native: dict[str, Any]) -> dict[str, Any] | None:
        """The new part of the function call in a choice; None if there is none."""
        growing = self._calls.setdefault(native["index"], GrowingCall(self._functions))
        return growing.push(native["text"], reason=native["finish_reason"])

    def _deltas(self, native: dict[str, Any]) -> Iterator[dict[str, Any]]:
        index = native["index"]
        if index not in self._tokens:
            content = None if self._functions else ""
            yield _delta(index, {"role": "assistant", "content": content, "refusal": None})
        logprobs = self._logprobs(native)
        listed = logprobs is not None and logprobs["content"]
        if self._functions:
            call = self._call(native)
            calls = {} if call is None else {"tool_calls": [{"index": 0, **call}]}
            if calls or listed:
                yield _delta(index, calls, logprobs)
        elif native["text"] or listed:
            yield _delta(index, {"content": native["text"]}, logprobs)
        if native["finish_reason"] is not None:
            yield _delta(index, {}, finish_reason=self._finish_reason(native))

    def _logprobs(self, native: dict[str, Any]) -> dict[str, Any] | None:
        shown = self._tokens.setdefault(native["index"], ShownTokens()).push(native)
        if not self._body.logprobs:
            return None
        if shown and isinstance(native["stop_reason"], int):
            shown = shown[:-1]  # without the special token that ended the answer
        return chat_logprobs(self._tokenizer, shown)


def _delta(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
