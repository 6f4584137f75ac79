"""Bodies of requests: what is taken, what is refused because it could not be kept, and what is passed over.

A field that would change the reply and that is not served is refused, never ignored. Fields that only concern billing,
storing or tracing at the service that they were made for are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from amem.serve.errors import HttpError

Text = Annotated[str, Field(max_length=4_000_000)]
Count = Annotated[int, Field(ge=1, le=10_000_000)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=128)]
Json = dict[str, Any]
Tools = Annotated[list[Json], Field(max_length=128)]
PROMPTS = 32  #: of one request

#: by field: the values that ask for nothing, and what to do in place of any other
Neutral = Mapping[str, tuple[tuple[object, ...], str]]
_LEAVE = "leave it out"
_ONCE = "send the request once for each choice, with another seed"

#: a field that is of no effect: its value is not looked at
Passed = Annotated[Any, Field(default=None, description="Passed over.")]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    #: any other value of these fields is refused
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="after")
    def _refuse_what_is_not_served(self) -> Self:
        for name, (values, remedy) in self.neutral.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                said = "as given" if values else "here"
                raise HttpError(400, f"{name} is not supported {said}: {remedy}.", code="unsupported", param=name)
        return self


class _Sampling(_Body):
    model: Text | None = None
    agent: Name | None = Field(None, description="The agent that answers; none: a session of its own is found or made.")
    temperature: Temperature | None = None
    top_p: Share | None = None
    stream: bool | None = None

    def sampling(self, max_tokens: int, stop: list[str], seed: int | None, logprobs: int | None) -> Json:
        """The engine's settings. Nothing said means greedy; a temperature without a seed, a fresh sample each time."""
        temperature = self.temperature or 0.0
        return {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "seed": "random" if temperature and seed is None else seed,
            "stop": stop,
            "logprobs": logprobs,
        }


class StreamOptions(BaseModel):
    """What a stream tells besides."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class _OpenAI(_Sampling):
    stream_options: StreamOptions | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Json | None = None
    user: Passed = None
    metadata: Passed = None
    store: Passed = None
    service_tier: Passed = None
    safety_identifier: Passed = None
    prompt_cache_key: Passed = None
    prompt_cache_retention: Passed = None

    @property
    def stops(self) -> list[str]:
        """Stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def with_usage(self) -> bool:
        """Whether a stream is to tell its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    neutral: ClassVar[Neutral] = {
        "n": ((1,), _ONCE),
        "frequency_penalty": ((0,), _LEAVE),
        "presence_penalty": ((0,), _LEAVE),
        "logit_bias": (({},), _LEAVE),
    }


class ChatMessage(BaseModel):
    """A message. Fields that are not known here are passed over: clients send replies back as they got them."""

    model_config = ConfigDict(strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[Json] | None = None
    name: Text | None = None
    tool_calls: list[Json] | None = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None

    def plain(self) -> Json:
        """As the engine takes it."""
        role = "system" if self.role == "developer" else self.role
        return {**{name: value for name, value in self if value is not None}, "role": role}


class ChatBody(_OpenAI):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | Json | None = None
    parallel_tool_calls: bool | None = None
    response_format: Json | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    functions: list[Json] | None = None
    function_call: str | Json | None = None
    audio: Json | None = None
    prediction: Json | None = None
    web_search_options: Json | None = None

    neutral: ClassVar[Neutral] = {
        **_OpenAI.neutral,
        "tool_choice": (("none", "auto"), 'no model can be made to call a tool; give "auto", and ask for the call'),
        "parallel_tool_calls": ((True,), "a reply has the calls that the model makes; leave it out, and answer each"),
        "response_format": (({"type": "text"},), "leave it out, ask for the form in a message, and check the reply"),
        "modalities": ((["text"],), _LEAVE),
        "functions": ((), "give tools"),
        "function_call": ((), "give tools, and tool_choice"),
        **dict.fromkeys(("reasoning_effort", "verbosity", "audio", "prediction", "web_search_options"), ((), _LEAVE)),
    }


class CompletionBody(_OpenAI):
    """The body of /v1/completions."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=PROMPTS)]
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    neutral: ClassVar[Neutral] = {
        **_OpenAI.neutral,
        "best_of": ((1,), _ONCE),
        "echo": ((False,), "the prompt is what was sent; leave it out"),
        "suffix": (("",), _LEAVE),
    }

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class MessagesMessage(BaseModel):
    """A message of /v1/messages."""

    model_config = ConfigDict(strict=True)
    role: Literal["user", "assistant"]
    content: Text | list[Json]


class CountBody(_Body):
    """The body of /v1/messages/count_tokens: a conversation in Anthropic's form."""

    model: Text | None = None
    messages: Annotated[list[MessagesMessage], Field(min_length=1)]
    system: Text | list[Json] | None = None
    tools: Tools | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    cache_control: Passed = None

    neutral: ClassVar[Neutral] = {
        "tool_choice": (
            ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}, {"type": "none"}),
            'no model can be made to call a tool, nor to call one alone; give {"type": "auto"}, and ask for the call',
        ),
        "thinking": (
            ({"type": "disabled"},),
            "a model thinks as its chat template has it, without a budget; leave it out",
        ),
    }


class MessagesBody(CountBody, _Sampling):
    """The body of /v1/messages."""

    max_tokens: Count
    stop_sequences: Annotated[list[Text], Field(max_length=16)] | None = None
    top_k: int | None = None
    metadata: Passed = None
    service_tier: Passed = None

    neutral: ClassVar[Neutral] = {
        **CountBody.neutral,
        "top_k": ((), "give top_p"),
    }
