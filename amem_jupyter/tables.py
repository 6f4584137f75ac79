"""Pictures of an engine, of its agents and of one agent's turns. Pure; no IPython here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from amem_jupyter.markup import (
    ACCENT,
    FAINT,
    GREEN,
    RESIDENCY,
    SMALL,
    STOPPED,
    Picture,
    block_strip,
    block_words,
    count,
    div,
    duration,
    esc,
    faint,
    framed,
    noted,
    size,
    span,
    strip_legend,
    table,
    where_mark,
)

if TYPE_CHECKING:
    from amem.model.capacity import CapacityRow
    from amem.results import AgentStatus, BlockInfo, BlockMap, EngineStatus, TurnInfo
    from amem.store import VerifyReport

EXCERPT = 72


def status_picture(status: EngineStatus) -> Picture:
    """`%amem status`: the engine in three lines, then its agents."""
    blas = f" · BLAS {status.blas}" if status.blas else ""
    engine = f"{status.model} · {status.codec} · {status.attention} attention on {status.device}{blas}"
    memory = f"memory {size(status.hot_bytes)} of {size(status.memory_budget)}"
    disk = f"disk {size(status.disk_bytes)} of {size(status.disk_quota)}"
    lines = [
        f"{engine} · context {status.context_length}",
        f"{memory} (most so far {size(status.peak_hot_bytes)}) · {disk} ({size(status.bytes_written)} written)",
        f"space {status.space} · store {status.store}",
        *([status.codec_choice] if status.codec_choice else []),
    ]
    warnings = [f"! {warning}" for warning in status.warnings]
    agents = _agents(status.agents)
    rich = "".join([
        div(f"<b>{esc(lines[0])}</b>"),
        *(div(faint(esc(line))) for line in lines[1:]),
        *(noted(warning, STOPPED) for warning in warnings),
        agents.html,
    ])  # fmt: skip
    return Picture(framed(rich), "\n".join([*lines, *warnings, "", agents.text]))


def _agents(agents: Sequence[AgentStatus]) -> Picture:
    last = [(duration(agent.last_ttft_ms) if agent.last_ttft_ms is not None else "-",) for agent in agents]
    return agent_table(agents, ("last TTFT",), last, numeric=(0,))


AGENT_HEAD = ("agent", "residency", "tokens", "turns", "memory", "disk")


def agent_table(
    agents: Sequence[AgentStatus], head: Sequence[str], rows: Sequence[Sequence[str | Picture]], numeric: Sequence[int]
) -> Picture:
    """A row of figures for each agent, with columns of one's own before the last; `numeric` counts among these."""
    if not agents:
        none = "no agents yet: %%agent NAME makes one"
        return Picture(div(faint(esc(none))), none)
    first = len(AGENT_HEAD)
    whole = [
        (
            agent.name,
            where_mark(agent.residency),
            str(agent.n_tokens),
            str(agent.n_turns),
            size(agent.hot_bytes),
            size(agent.disk_bytes),
            *own,
            ", ".join([*(["pinned"] if agent.pinned else []), *([] if agent.saved else ["not saved"])]),
        )
        for agent, own in zip(agents, rows, strict=True)
    ]
    return table((*AGENT_HEAD, *head, ""), whole, numeric=(2, 3, 4, 5, *(first + column for column in numeric)))


def agent_line(agent: AgentStatus) -> str:
    """One agent in a line."""
    pinned = " · pinned" if agent.pinned else ""
    saved = "" if agent.saved else " · not saved"
    return (
        f"{agent.name}: {RESIDENCY[agent.residency][0]} {agent.residency} · {count(agent.n_tokens, 'token')}"
        f" in {count(agent.n_turns, 'turn')} · {size(agent.hot_bytes)} in memory · {size(agent.disk_bytes)} on disk"
        f"{pinned}{saved}"
    )


def map_picture(blocks: BlockMap) -> Picture:
    """`%amem map`: one strip per group of layers, and what lies in each block."""
    every = [block for layer in blocks.layers for block in layer.blocks]
    title = f"{count(blocks.n_tokens, 'token')} · {blocks.codec} · {size(sum(block.nbytes for block in every))}"
    rich = [div(f"<b>{esc(blocks.agent)}</b> {faint('· ' + esc(title))}", "font-size:13px")]
    plain = [f"{blocks.agent} · {title}"]
    for layer in blocks.layers:
        strip = block_strip(layer.blocks, glyph_size=24, texts=[_text_of(blocks, block) for block in layer.blocks])
        rich += [div(faint(esc(layer.label))), div(strip.html)]
        plain += [layer.label, f"  {strip.text}"]
    if not every:
        rich.append(div(faint("no blocks yet")))
        plain.append("no blocks yet")
        return Picture(framed("".join(rich)), "\n".join(plain))
    legend = strip_legend(every)
    rich.append(div(legend.html))
    plain.append(legend.text)
    rows = [(block_words(block), _text_of(blocks, block)) for block in blocks.layers[0].blocks]
    texts = table(("block", "text"), rows)
    rich.append(f"<details><summary>what is in them</summary>{texts.html}</details>")
    return Picture(framed("".join(rich)), "\n".join([*plain, "", texts.text]))


def _text_of(blocks: BlockMap, block: BlockInfo) -> str:
    """The beginning of a block's text; texts are told per 256 tokens, of which several blocks may have a part."""
    stretch, offset = divmod(block.start, 256)
    if offset:
        return "(of the same 256 tokens)"
    return excerpt(blocks.texts[stretch]) if stretch < len(blocks.texts) else ""


def history_picture(agent: str, turns: Sequence[TurnInfo]) -> Picture:
    """`%amem history`: prompts and replies in full."""
    if not turns:
        none = f"{agent} has no turns yet"
        return Picture(framed(faint(esc(none))), none)
    rich, plain = [], []
    for turn in turns:
        state = f"turn {turn.id} · {count(turn.n_tokens, 'token')}"
        rich.append(div(faint(esc(state)), "margin-top:6px"))
        rich.append(div(f"<b>you</b> {esc(turn.prompt)}", "white-space:pre-wrap"))
        rich.append(div(f"<b>{esc(agent)}</b> {esc(turn.reply)}", "white-space:pre-wrap"))
        plain += [state, f"you: {turn.prompt}", f"{agent}: {turn.reply}", ""]
    return Picture(framed("".join(rich)), "\n".join(plain).rstrip())


def tree_picture(agent: str, turns: Sequence[TurnInfo]) -> Picture:
    """`%amem tree`: one line per turn, drawn as branches; the head's path is bold."""
    if not turns:
        none = f"{agent} has no turns yet"
        return Picture(framed(faint(esc(none))), none)
    rich, plain = [], []
    above: int | None = None
    with_child = {turn.parent for turn in turns if turn.on_head_path}
    for indent, turn in _lines(turns):
        here = "  ← here" if turn.on_head_path and turn.id not in with_child else ""
        left = "from the start" if turn.parent is None else f"after {turn.parent}"
        after = f"  ({left})" if indent and turn.parent != above else ""
        lead = f"{'   ' * indent}{'●' if turn.on_head_path else '○'} "
        line = f"{turn.id}  {excerpt(turn.prompt)}{after}{here}"
        above = turn.id
        plain.append(lead + line)
        look = "font-weight:600" if turn.on_head_path else f"opacity:{FAINT}"
        hint = f"turn {turn.id} · {count(turn.n_tokens, 'token')} · {excerpt(turn.reply)}"
        mark = span(lead[-2], f"color:{ACCENT}", hidden=True)
        words = span(esc(line).replace("  ", "&nbsp; "), look, hint, css="amem-turn")
        rich.append(div(f"{mark} {words}", f"padding-left:{22 * indent}px"))
    return Picture(framed("".join([div(f"<b>{esc(agent)}</b>"), *rich])), "\n".join([agent, *plain]))


def _lines(turns: Sequence[TurnInfo]) -> list[tuple[int, TurnInfo]]:
    """The turns as lines with an indent: the head's path goes straight down, only branches step to the right."""
    known = {turn.id for turn in turns}
    below: dict[int | None, list[TurnInfo]] = {}
    for turn in turns:
        below.setdefault(turn.parent if turn.parent in known else None, []).append(turn)

    def steps(parent: int | None, indent: int) -> list[tuple[int, TurnInfo]]:
        children = sorted(below.get(parent, []), key=lambda turn: not turn.on_head_path)
        return [(indent + (i > 0), turn) for i, turn in reversed(list(enumerate(children)))]

    lines: list[tuple[int, TurnInfo]] = []
    pending = steps(None, 0)
    while pending:
        indent, turn = pending.pop()
        lines.append((indent, turn))
        pending += steps(turn.id, indent)
    return lines


def verify_picture(report: VerifyReport) -> Picture:
    """`%amem verify`: the verdict, what was read, then each problem on a line of its own."""
    verdict = "✓ all is as it was written"
    if report.problems:
        mended = "set aside or rebuilt" if report.repaired else "%amem verify --repair mends what can be mended"
        verdict = f"! {count(len(report.problems), 'problem')}: {mended}"
    elif report.skipped:
        verdict = "✓ what could be read is as it was written"
    snapshots = count(report.snapshots, "snapshot")
    read = f"{count(report.agents, 'agent')}, {count(report.blocks, 'block')} and {snapshots}: {size(report.nbytes)}"
    details = [*report.problems, *(f"not checked: {reason}" for reason in report.skipped)]
    rich = [noted(verdict, STOPPED if report.problems else GREEN), div(faint(esc(f"read {read}")))]
    rich += [div(esc(detail)) for detail in details]
    return Picture(framed("".join(rich)), "\n".join([verdict, f"read {read}", *(f"  {line}" for line in details)]))


def capacity_picture(rows: Sequence[CapacityRow]) -> Picture:
    """`%amem capacity`: a line per length and codec."""
    title = f"{rows[0].model}: agents that fit {size(rows[0].memory_nbytes)} of K and V"
    head = ("tokens of each", "codec", "one takes at most", "agents")
    lines = [(str(row.context), row.codec, size(row.agent_nbytes_most), str(row.agents)) for row in rows]
    fits = table(head, lines, numeric=(0, 2, 3))
    return Picture(framed(div(f"<b>{esc(title)}</b>") + fits.html), f"{title}\n{fits.text}")


def text_picture(text: str) -> Picture:
    """Plain text, set as such."""
    return Picture(f'<pre style="margin:4px 0;{SMALL};background:transparent">{esc(text)}</pre>', text)


def excerpt(text: str, length: int = EXCERPT) -> str:
    """The beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1] + "…"
