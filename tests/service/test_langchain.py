"""LangChain's models for OpenAI's API against a real server: their requests are accepted, and their
results equal the results of /generate.
"""

from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

from tests.service.serving import TEST_TIMEOUT, Serving


def settings(server: Serving, **more: Any) -> dict[str, Any]:
    return {"base_url": f"{server.url}/v1", "api_key": "x", "timeout": TEST_TIMEOUT, **more}


def test_invoked_and_streamed_texts_equal_generate(server: Serving) -> None:
    native = server.generate("ab", seed=3, max_tokens=12, temperature=0.7)["choices"][0]["text"]
    model = OpenAI(**settings(server, model="tiny", seed=3, max_tokens=12))
    assert model.invoke("ab") == native
    assert "".join(model.stream("ab")) == native


def test_texts_of_several_prompts_equal_generate(server: Serving) -> None:
    model = OpenAI(**settings(server, model="tiny", seed=3, max_tokens=12, n=2, best_of=2))
    result = model.generate(["ab", "c"])
    native = server.generate(["ab", "c"], seed=3, max_tokens=12, temperature=0.7, n=2)
    texts = [generation.text for row in result.generations for generation in row]
    assert texts == [choice["text"] for choice in native["choices"]]
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["prompt_tokens"] == 3


def test_invoked_and_streamed_answers_equal_the_endpoint(chatter: Serving) -> None:
    messages = [SystemMessage("Be brief."), HumanMessage("What is é?"), AIMessage("A letter."),
                HumanMessage([{"type": "text", "text": "And ö?"}])]  # fmt: skip
    plain = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is é?"},
        {"role": "assistant", "content": "A letter."},
        {"role": "user", "content": "And ö?"},
    ]
    fields: dict[str, Any] = {"seed": 3, "max_tokens": 12}
    native = chatter.json("/v1/chat/completions", {"messages": plain, **fields})
    model = ChatOpenAI(**settings(chatter, model="chatty", **fields))
    answer = model.invoke(messages)
    assert answer.content == native["choices"][0]["message"]["content"]
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["total_tokens"] == native["usage"]["total_tokens"]
    chunks = list(model.stream(messages))
    assert "".join(str(chunk.content) for chunk in chunks) == answer.content


def test_chat_logprobs(chatter: Serving) -> None:
    model = ChatOpenAI(
        **settings(chatter, model="chatty", seed=3, max_tokens=5, logprobs=True, top_logprobs=2)
    )
    logprobs = model.invoke("hi").response_metadata["logprobs"]["content"]
    assert len(logprobs) == 5
    assert all(len(one["top_logprobs"]) == 2 for one in logprobs)
