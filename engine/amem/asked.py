"""What is asked of an agent: checked in the caller's thread, made a request of in the owner thread."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, Unpack

from amem.checks import check_logprobs, check_message, check_text, request_settings
from amem.errors import InputError
from amem.model.messages import plain_messages, plain_tools
from amem.options import Sampling, Seed
from amem.results import TokenLogprob
from amem.run.request import Request
from amem.run.sampler import Sampler, Scored, derive_seed
from amem.session import AgentSession
from amem.turn import Caller, TurnWork
from amem.wish import ChatWish, MessageWish, TextWish, Wish


@dataclass(frozen=True)
class Asked:
    """A wish with how to generate, who asks, and since when; nothing of it depends on the agent."""

    wish: Wish
    settings: Mapping[str, Any]
    seed: Seed
    caller: Caller = field(default_factory=Caller)
    n_logprobs: int | None = None
    cached: bool = False
    continues: bool = False  #: the reply goes on in the middle of a text
    since: float = field(default_factory=time.perf_counter)

    @classmethod
    def message(
        cls,
        text: str,
        *,
        system: str | None = None,
        append: bool = False,
        cached: bool = False,
        cell_id: str | None = None,
        execution: str | None = None,
        **sampling: Unpack[Sampling],
    ) -> Self:
        """One more message. `Agent.ask` explains the options.

        Raises
        ------
            InputError: the message or an option is not possible.
        """
        for what, given in (("the system text", system), ("cell_id", cell_id), ("execution", execution)):
            check_text(what, given)
        check_message(text)
        wish = MessageWish(text, system, cell_id, execution, append)
        return cls(wish, request_settings(**sampling), sampling.get("seed"), Caller(cell_id, execution), cached=cached)

    @classmethod
    def chat(
        cls,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        logprobs: int | None = None,
        **sampling: Unpack[Sampling],
    ) -> Self:
        """A whole conversation. `Agent.chat` explains the options.

        Raises
        ------
            InputError: the messages or an option are not possible.
        """
        settings = request_settings(**sampling)
        wish = ChatWish(plain_messages(messages), plain_tools(tools))
        return cls(wish, settings, sampling.get("seed"), n_logprobs=check_logprobs(logprobs))

    @classmethod
    def text(cls, text: str, *, logprobs: int | None = None, **sampling: Unpack[Sampling]) -> Self:
        """A text that is to be continued as it stands, without the chat template. Options as for `Agent.chat`.

        Raises
        ------
            InputError: the text is empty, or an option is not possible.
        """
        check_text("the text", text)
        if not text:
            raise InputError("the text is empty: there is nothing to continue.")
        settings, n_logprobs = request_settings(**sampling), check_logprobs(logprobs)
        return cls(TextWish(text), settings, sampling.get("seed"), n_logprobs=n_logprobs, continues=True)

    def request(self, session: AgentSession) -> Request:
        """The request to an agent. Belongs to the owner thread."""
        seed = secrets.randbits(63) if self.seed == "random" else self.seed
        if seed is None:
            seed = derive_seed(session.name, self.wish.parent(session), self.wish.text, self.settings)
        parts, settings = session.parts, self.settings
        sampler = Sampler(temperature=settings["temperature"], top_p=settings["top_p"], seed=seed & (2**63 - 1))
        logprobs: list[TokenLogprob] = []
        n_told = self.n_logprobs
        request = Request(
            work=TurnWork(session, self.wish, {**settings, "seed": seed}, self.caller, cached=self.cached),
            sample=sampler if n_told is None else Scored(sampler, n_told, parts.prompter.decode, logprobs),
            text=parts.prompter.reply_text(settings["stop"], continues=self.continues),
            max_tokens=settings["max_tokens"],
            eos_token_ids=parts.eos_token_ids,
            group=session,
            logprobs=logprobs,
        )
        request.marks.submitted = self.since
        return request
