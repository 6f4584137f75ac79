"""The card under an agent's cell: state in, HTML and text out. Pure; no IPython here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from amem_jupyter.markup import (
    ACCENT,
    FAINT,
    LINE,
    MONO,
    SMALL,
    STOPPED,
    Picture,
    block_strip,
    count,
    div,
    duration,
    esc,
    faint,
    markdown,
    noted,
    size,
    span,
    strip_legend,
    ttft_bar,
    ttft_legend,
)

if TYPE_CHECKING:
    from amem.results import Event, Reply, ReplyMetrics

STAGES = {"queued": "waiting for its turn", "restore": "restoring from disk", "prefill": "reading the prompt"}
FOUND = {
    "EXACT": "all of the history was there",
    "EXTEND": "went on from the stored history",
    "DIVERGE": "a part of the history was reused",
    "COLD": "computed from the start",
}


def reply_card(reply: Reply, how: str = "md") -> Picture:
    """The finished card: title, reply, and what it cost."""
    metrics = reply.metrics
    title = _title(metrics.agent, f"{metrics.model} {metrics.codec}")
    found = f"{metrics.match} · was {metrics.residency}"
    title_rich = f"{title.html} {span(f'· {esc(found)}', f'opacity:{FAINT}', FOUND[metrics.match])}"
    cost = _cost(metrics)
    cut = _cut(metrics.generated_tokens) if reply.finish_reason == "length" else ""
    notes = [*([] if metrics.saved else ["not saved to disk"]), *metrics.notes]
    notes_rich = "".join(noted(f"! {note}", STOPPED) for note in notes)
    cut_rich = div(faint(f"… {esc(cut)}")) if cut else ""
    rich = _frame(title_rich, _body(reply.text, how), cut_rich + notes_rich + cost.html, ACCENT)
    plain = [
        f"{title.text} · {found}",
        reply.text.strip("\n"),
        "",
        *([f"… {cut}"] if cut else []),
        *(f"! {note}" for note in notes),
        cost.text,
    ]
    return Picture(rich, "\n".join(plain))


def live_card(agent: str, event: Event | None, text: str, how: str = "md") -> Picture:
    """The card while the reply is on its way: a stage, or the text so far."""
    title = _title(agent, f"{'writing' if text else stage_words(event)} …")
    return Picture(_frame(title.html, _body(text, how), "", ACCENT), f"{title.text}\n{text}")


def stopped_card(agent: str, reason: str, text: str, how: str = "md") -> Picture:
    """The card of a reply that did not come to its end."""
    title = _title(agent, reason)
    body = div(_body(text, how), f"opacity:{FAINT}") if text else ""
    return Picture(_frame(title.html, body, "", STOPPED), f"{title.text}\n{text}".rstrip())


def side_by_side(cards: Sequence[Picture]) -> Picture:
    """Cards in one row."""
    width = f"width:{100 // max(len(cards), 1)}%"
    cell = f"vertical-align:top;text-align:left;padding:0 8px 0 0;border:none;background:transparent;{width}"
    cells = "".join(f'<td style="{cell}">{card.html}</td>' for card in cards)
    rich = f'<table style="border:none;width:100%;table-layout:fixed"><tr>{cells}</tr></table>'
    return Picture(rich, "\n\n".join(card.text for card in cards))


def stage_words(event: Event | None) -> str:
    """What goes on before the first token."""
    if event is None or not event.stage:
        return "starting"
    if event.stage == "restore" and event.total:
        return f"restoring {count(event.total, 'token')} from disk"
    words = STAGES.get(event.stage, event.stage)
    return f"{words}, {event.done} of {event.total} tokens" if event.total else words


def _title(agent: str, rest: str) -> Picture:
    return Picture(f"<b>{esc(agent)}</b> {faint(f'· {esc(rest)}')}", f"{agent} · {rest}")


def _cut(generated_tokens: int) -> str:
    """That --max-tokens ended it; a recorded reply was cut when it was made, and generated nothing now."""
    where = f"cut at {count(generated_tokens, 'token')}" if generated_tokens else "the recorded reply was cut"
    return f"{where} (--max-tokens)"


def _cost(metrics: ReplyMetrics) -> Picture:
    bar, legend, strip = ttft_bar(metrics), ttft_legend(metrics), block_strip(metrics.blocks)
    marks = strip_legend(metrics.blocks)
    ttft = f"TTFT {duration(metrics.ttft_ms)}"
    speed = f" at {metrics.tokens_per_second:.1f} tokens/s" if metrics.tokens_per_second else ""
    prompt = f"{count(metrics.reused_tokens, 'token')} reused, {metrics.computed_tokens} computed{_saved(metrics)}"
    tokens = f"{prompt} · {metrics.generated_tokens} generated{speed}"
    stored = (
        f"{size(metrics.hot_bytes)} in memory · {size(metrics.disk_bytes)} on disk"
        f" · {size(metrics.bytes_written)} written"
    )
    rich = [
        div(f"{span(esc(ttft), 'font-weight:600')} &nbsp;{bar.html}"),
        div(legend.html),
        div(esc(tokens)),
        div(f"{strip.html} &nbsp;{marks.html}") if metrics.blocks else "",
        div(faint(esc(stored))),
    ]
    plain = [
        f"{ttft} [{bar.text}]",
        f"     {legend.text}",
        tokens,
        *([f"{strip.text}   ({marks.text})"] if metrics.blocks else []),
        stored,
    ]
    return Picture("".join(rich), "\n".join(plain))


def _saved(metrics: ReplyMetrics) -> str:
    """What reuse was worth, where that was measured and is something."""
    return f" · {duration(metrics.saved_ms)} saved" if metrics.saved_ms is not None and metrics.saved_ms >= 1 else ""


def _body(text: str, how: str) -> str:
    if how == "md":
        return markdown(text)
    wrap = "white-space:pre-wrap;background:transparent;margin:0"
    face = f"{wrap};{MONO};font-size:13px" if how == "code" else wrap
    return f'<pre style="{face}">{esc(text)}</pre>' if how == "code" else div(esc(text), face)


def _frame(title: str, body: str, foot: str, accent: str) -> str:
    """A card; its least height keeps the page from jumping while it fills."""
    box = (
        f"border:1px solid {LINE};border-left:3px solid {accent};border-radius:6px;"
        "padding:8px 14px;margin:4px 0;min-height:48px;max-width:880px"
    )
    parts = [
        div(title, "font-size:13px"),
        div(body, "margin:6px 0 2px 0;overflow-x:auto") if body else "",
        div(foot, f"{SMALL};border-top:1px solid {LINE};margin-top:6px;padding-top:6px") if foot else "",
    ]
    return div("".join(parts), box)
