"""Clients that other people wrote, unmodified, on the bundled model: two agents, three rounds, restarts between."""

import asyncio
import contextlib

import anthropic
import httpx
import openai
import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from langchain_openai import ChatOpenAI

from tests.serve.conftest import Place

MODEL = "smollm2-135m"
N_TOKENS = 4
OPENING = "We sell a small greenhouse kit. How do we begin?"
SYSTEMS = {
    "planner": "You are a planner. You name the next step.",
    "critic": "You are a critic. You name the weakest part.",
}


@pytest.fixture(scope="module")
def bundled(bundled_model_path, tmp_path_factory):
    """Places on the bundled model, each with a store of its own; one is open at a time, as each holds the model."""
    made = []

    def make():
        for one in made:
            one.close()
        made.append(Place(MODEL, tmp_path_factory.mktemp("serve") / "store"))
        return made[-1]

    yield make
    for one in made:
        one.close()


class OpenAI:
    """The openai package, without a stream."""

    def __init__(self, url):
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def close(self):
        self.client.close()

    def ask(self, messages):
        reply = self.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=N_TOKENS)
        return reply.choices[0].message.content, self.cached(reply.usage)

    @staticmethod
    def cached(usage):
        assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
        return usage.prompt_tokens_details.cached_tokens


class OpenAIStream(OpenAI):
    """The openai package, streaming."""

    def ask(self, messages):
        chunks = list(
            self.client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=N_TOKENS, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return text, self.cached(chunks[-1].usage)


class OpenAIAsync(OpenAI):
    """The openai package, async."""

    def __init__(self, url):
        self.url = url

    def close(self):
        """Each request has a client of its own."""

    def ask(self, messages):
        async def run():
            async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
                return await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=N_TOKENS)

        reply = asyncio.run(run())
        return reply.choices[0].message.content, self.cached(reply.usage)


class Anthropic:
    """The anthropic package, without a stream."""

    def __init__(self, url):
        self.client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def close(self):
        self.client.close()

    def ask(self, messages):
        message = self.send(messages[0]["content"], messages[1:])
        return message.content[0].text, message.usage.cache_read_input_tokens

    def send(self, system, messages):
        return self.client.messages.create(model=MODEL, system=system, messages=messages, max_tokens=N_TOKENS)


class AnthropicStream(Anthropic):
    """The anthropic package, streaming."""

    def send(self, system, messages):
        with self.client.messages.stream(model=MODEL, system=system, messages=messages, max_tokens=N_TOKENS) as stream:
            text = "".join(stream.text_stream)
            message = stream.get_final_message()
        assert text == message.content[0].text
        return message


def discussion(place, clients, *, restart):
    """Two agents that see each other's words, a round with each client: all replies, and each request's cached tokens."""
    place.open()
    histories = {name: [{"role": "system", "content": text}] for name, text in SYSTEMS.items()}
    said = OPENING
    replies, cached = [], {name: [] for name in SYSTEMS}
    for client_of in clients:
        with contextlib.closing(client_of(place.server.url)) as client:
            for name, history in histories.items():
                history.append({"role": "user", "content": said})
                said, n_cached = client.ask(history)
                history.append({"role": "assistant", "content": said})
                replies.append(said)
                cached[name].append(n_cached)
        if restart:
            place.open()
    return replies, cached


@pytest.fixture(scope="module")
def undisturbed(bundled):
    """What is said when the server is never restarted."""
    return discussion(bundled(), [OpenAI] * 3, restart=False)


class LangChain:
    """langchain-openai, which streams what it was told before as well."""

    def __init__(self, url):
        self.http = httpx.Client()
        self.model = ChatOpenAI(
            model=MODEL, base_url=f"{url}/v1", api_key="none", max_tokens=N_TOKENS, max_retries=0, http_client=self.http
        )

    def close(self):
        self.http.close()

    def ask(self, messages):
        asked = [(one["role"], one["content"]) for one in messages]
        message = self.model.invoke(asked)
        assert message.text == "".join(piece.text for piece in self.model.stream(asked))
        return message.text, message.usage_metadata["input_token_details"]["cache_read"]


@pytest.mark.parametrize(
    "clients",
    [[OpenAI, OpenAIStream, OpenAIAsync], [Anthropic, AnthropicStream, Anthropic], [LangChain] * 3],
    ids=["openai", "anthropic", "langchain"],
)
def test_two_agents_go_on_through_restarts(bundled, undisturbed, clients):
    """They say what they say undisturbed, and what is reused grows with every round."""
    replies, cached = discussion(bundled(), clients, restart=True)
    assert undisturbed[0] == replies
    assert undisturbed[1] == cached
    for of_agent in cached.values():
        assert 0 == of_agent[0] < of_agent[1] < of_agent[2]


def test_autogen_agents_go_on_through_restarts(bundled, undisturbed):
    """AssistantAgent with its OpenAI client, streaming in the last round; each round has agents made of saved states."""
    info = {"vision": False, "function_calling": False, "json_output": False, "family": "unknown",
            "structured_output": False, "multiple_system_messages": False}  # fmt: skip
    states, replies, cached = {}, [], {name: [] for name in SYSTEMS}

    async def answer(name, said, *, stream):
        client = OpenAIChatCompletionClient(
            model=MODEL, base_url=f"{place.server.url}/v1", api_key="none", model_info=info, max_tokens=N_TOKENS,
            include_name_in_message=False,
        )  # fmt: skip
        agent = AssistantAgent(name, client, system_message=SYSTEMS[name], model_client_stream=stream)
        if name in states:
            await agent.load_state(states[name])
        result = await agent.run(task=said)
        states[name] = await agent.save_state()
        await client.close()
        return result.messages[-1].content

    place, said = bundled(), OPENING
    for number in range(3):
        place.open()
        for name in SYSTEMS:
            before = reused(place)
            said = asyncio.run(answer(name, said, stream=number == 2))
            replies.append(said)
            cached[name].append(reused(place) - before)
    assert undisturbed == (replies, cached)


def reused(place):
    """Prompt tokens that the server has reused so far."""
    lines = [line for line in place.http.get("/metrics").text.splitlines() if 'source="reused"' in line]
    return next((float(line.split()[-1]) for line in lines if "_total" in line), 0.0)


def test_the_openai_client_raises_its_own_errors(bundled):
    """By status, with our reason."""
    place = bundled().open(keys=["sk-own"], limits={"requests": 1})
    url = f"{place.server.url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as wrong,
        pytest.raises(openai.AuthenticationError, match="no such API key"),
    ):
        wrong.models.list()
    client = openai.OpenAI(base_url=url, api_key="sk-own", max_retries=0)
    assert [MODEL] == [model.id for model in client.models.list()]
    with pytest.raises(openai.NotFoundError, match="gpt-4o"):
        client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "Hi."}])
    with pytest.raises(openai.BadRequestError, match="response_format"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi."}], response_format={"type": "json_object"}
        )
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Count to a hundred."}], max_tokens=400, stream=True
    )
    next(iter(stream))
    with pytest.raises(openai.RateLimitError, match="come back"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi."}])
    stream.close()
    client.close()
    with (
        anthropic.Anthropic(base_url=place.server.url, api_key="wrong", max_retries=0) as wrong,
        pytest.raises(anthropic.AuthenticationError),
    ):
        wrong.messages.create(model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "Hi."}])


def test_the_anthropic_client_counts_tokens_and_lists_the_model(bundled):
    """In its own types."""
    place = bundled().open()
    with anthropic.Anthropic(base_url=place.server.url, api_key="none", max_retries=0) as client:
        asked = {"model": MODEL, "system": SYSTEMS["critic"], "messages": [{"role": "user", "content": "Hi."}]}
        counted = client.messages.count_tokens(**asked)
        usage = client.messages.create(max_tokens=1, **asked).usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
        (model,) = client.models.list()
        assert ("model", MODEL, MODEL) == (model.type, model.id, model.display_name)


def test_a_named_agent_is_reached_with_an_extra_field(bundled):
    """As the openai package sends it."""
    place = bundled().open()
    client = openai.OpenAI(base_url=f"{place.server.url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "Hi."}]
    reply = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=2, extra_body={"agent": "planner"}
    )
    assert "planner" == reply.amem["agent"]
    raw = client.with_options(default_headers={"X-Agent": "critic"})
    assert "critic" == raw.chat.completions.create(model=MODEL, messages=messages, max_tokens=2).amem["agent"]
    assert {"planner", "critic"} == set(place.engine.agents())
    client.close()
