"""The picture of `%amem status --live`: budgets as bars, and each agent with its history. Pure; no IPython here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from amem_jupyter.markup import STOPPED, Picture, count, div, duration, esc, framed, level, noted, size, ttft_sparks
from amem_jupyter.tables import agent_table

if TYPE_CHECKING:
    from amem.results import EngineStatus, PrefetchStatus, ReplyMetrics

HEAD = ("TTFT", "TTFT so far", "tokens/s", "reused")


def board_picture(status: EngineStatus, history: Mapping[str, Sequence[ReplyMetrics]]) -> Picture:
    """The engine's budgets, and a row for each agent; `history` has the agents' latest replies, the oldest first."""
    title = f"{status.model} · {status.codec} · space {status.space}"
    rich = [div(f"<b>{esc(title)}</b>")]
    plain = [title]
    for name, used, limit in (
        ("memory", status.hot_bytes, status.memory_budget),
        ("disk", status.disk_bytes, status.disk_quota),
    ):
        bar, figures = level(used, limit), f"{size(used)} of {size(limit)}"
        rich.append(div(f"{bar.html} &nbsp;{name} {esc(figures)}"))
        plain.append(f"{bar.text} {name} {figures}")
    if status.prefetch is not None:
        rich.append(div(esc(_prefetch_words(status.prefetch))))
        plain.append(_prefetch_words(status.prefetch))
    for warning in status.warnings:
        rich.append(noted(f"! {warning}", STOPPED))
        plain.append(f"! {warning}")
    rows = [_row(history.get(agent.name, ())) for agent in status.agents]
    agents = agent_table(status.agents, HEAD, rows, numeric=(0, 2, 3))
    return Picture(framed("".join([*rich, agents.html])), "\n".join([*plain, "", agents.text]))


def _prefetch_words(prefetch: PrefetchStatus) -> str:
    """How often the next agent was guessed right, and its state in memory or on its way when it was asked."""
    tried = f"{count(prefetch.restored, 'agent')} restored ahead"
    return f"prefetch: {count(prefetch.hits, 'hit')}, {count(prefetch.misses, 'miss', 'misses')} · {tried}"


def _row(replies: Sequence[ReplyMetrics]) -> tuple[str | Picture, ...]:
    last = replies[-1] if replies else None
    speeds = [reply.tokens_per_second for reply in replies if reply.tokens_per_second]
    prompt, reused = (sum(getattr(reply, name) for reply in replies) for name in ("prompt_tokens", "reused_tokens"))
    return (
        duration(last.ttft_ms) if last is not None else "-",
        ttft_sparks([reply.ttft_ms for reply in replies]),
        f"{speeds[-1]:.1f}" if speeds else "-",
        f"{reused / prompt:.0%}" if prompt else "-",
    )
