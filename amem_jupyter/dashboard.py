"""The picture of `%amem status --live`: budgets as bars, and each agent with its history. Pure; no IPython here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from amem_jupyter.markup import (
    LINE,
    RESIDENCY,
    SMALL,
    STOPPED,
    Picture,
    div,
    duration,
    esc,
    faint,
    level,
    size,
    sparkline,
    table,
)

if TYPE_CHECKING:
    from amem.results import AgentStatus, EngineStatus, ReplyMetrics

HEAD = ("agent", "residency", "tokens", "turns", "memory", "disk", "TTFT", "TTFT so far", "tokens/s", "reused", "")


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
        rich.append(div(f"{bar.html} {name} {esc(figures)}"))
        plain.append(f"{bar.text} {name} {figures}")
    for warning in status.warnings:
        rich.append(div(esc(f"! {warning}"), f"color:{STOPPED}"))
        plain.append(f"! {warning}")
    rows = [_row(agent, history.get(agent.name, ())) for agent in status.agents]
    agents = table(HEAD, rows, numeric=(2, 3, 4, 5, 6, 8, 9))
    if not rows:
        none = "no agents yet: %%agent NAME makes one"
        agents = Picture(div(faint(esc(none))), none)
    box = f"{SMALL};border-left:3px solid {LINE};padding:2px 0 2px 12px;margin:4px 0"
    return Picture(div("".join([*rich, agents.html]), box), "\n".join([*plain, "", agents.text]))


def _row(agent: AgentStatus, replies: Sequence[ReplyMetrics]) -> tuple[str, ...]:
    last = replies[-1] if replies else None
    speeds = [reply.tokens_per_second for reply in replies if reply.tokens_per_second]
    prompt, reused = (sum(getattr(reply, name) for reply in replies) for name in ("prompt_tokens", "reused_tokens"))
    return (
        agent.name,
        f"{RESIDENCY[agent.residency][0]} {agent.residency}",
        str(agent.n_tokens),
        str(agent.n_turns),
        size(agent.hot_bytes),
        size(agent.disk_bytes),
        duration(last.ttft_ms) if last is not None else "-",
        sparkline([reply.ttft_ms for reply in replies]),
        f"{speeds[-1]:.1f}" if speeds else "-",
        f"{reused / prompt:.0%}" if prompt else "-",
        ", ".join([*(["pinned"] if agent.pinned else []), *([] if agent.saved else ["not saved"])]),
    )
