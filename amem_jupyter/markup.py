"""The words of the pictures: numbers for people, glyphs, colours, and HTML with inline styles only. No IPython here.

Every mark is a glyph as well as a colour, since GitHub strips styles and text has none. Colours are middle tones with a
contrast of 3:1 on light and on dark pages, which is enough for marks and not for text: text has the page's own colour.
Roles and labels for screen readers are dropped in untrusted notebooks, where nothing depends on them.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

if TYPE_CHECKING:
    from amem.results import BlockInfo, ReplyMetrics

LINE = "rgba(128,128,128,0.3)"
MONO = "font-family:Menlo,Consolas,'DejaVu Sans Mono',monospace"
SMALL = "font-size:12px;line-height:1.6"

RESIDENCY = {"hot": ("■", "#d9730d"), "warm": ("▨", "#b08800"), "cold": ("□", "#5b8fc9"), "empty": ("·", "#888888")}
WHERE = {"hot": "in memory", "warm": "on disk", "cold": "to be computed", "empty": "no turn yet"}
NEW, SHARED, TAIL, OPEN = "⁺", "ˢ", "ᵗ", "ᵒ"
FAINT = 0.7
GREEN = "#2f9e5f"
ACCENT = "#5b8fc9"
STOPPED = "#c9543b"

PARTS = (
    ("queue", "queue_ms", "·", "#8a8f98"),
    ("match", "match_ms", "╌", "#8a63d2"),
    ("restore", "restore_ms", "░", "#3b8fd9"),
    ("prefill", "prefill_ms", "█", "#b97a1e"),
    ("first decode", "first_decode_ms", "▓", "#2f9e5f"),
)
BAR_WIDTH = 36
SPARKS = "▁▂▃▄▅▆▇█"


def _paragraph(renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, _env: EnvType) -> str:
    tokens[index].attrSet("style", "margin:0 0 8px 0")
    return renderer.renderToken(tokens, index, options, _env)


_markdown = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable("table").disable("image")
_markdown.add_render_rule("paragraph_open", _paragraph)


@dataclass(frozen=True)
class Picture:
    """Something to show, in both of its forms."""

    html: str
    text: str

    def bundle(self) -> dict[str, str]:
        """It as a MIME bundle."""
        return {"text/html": self.html, "text/plain": self.text}


def esc(text: object) -> str:
    """Text for HTML."""
    return html.escape(str(text))


def span(text: str, style: str, title: str = "", *, css: str = "", label: str = "", hidden: bool = False) -> str:
    """Marked-up text in a style; `css` is its class, `label` what is read out in its place, `hidden`: nothing is."""
    more = f' class="{css}"' if css else ""
    more += f' title="{esc(title)}"' if title else ""
    more += f' role="img" aria-label="{esc(label)}"' if label else ""
    more += ' aria-hidden="true"' if hidden else ""
    return f'<span style="{style}"{more}>{text}</span>'


def filled(colour: str) -> str:
    """The style of a stretch of colour, made of glyphs that are seen where styles are not."""
    return f"color:transparent;background-color:{colour}"


def div(content: str, style: str = "") -> str:
    """A line or a block of marked-up text."""
    return f'<div style="{style}">{content}</div>' if style else f"<div>{content}</div>"


def faint(text: str) -> str:
    """Text that steps back."""
    return span(text, f"opacity:{FAINT}")


def noted(text: str, colour: str) -> str:
    """A line of text with a coloured edge."""
    return div(esc(text), f"border-left:3px solid {colour};padding-left:6px")


def framed(content: str) -> str:
    """What a command shows, set off from the page by a line at its left."""
    return div(content, f"{SMALL};border-left:3px solid {LINE};padding:2px 0 2px 12px;margin:4px 0")


def markdown(text: str) -> str:
    """A reply as HTML: its own tags are shown, not obeyed, and no image is fetched."""
    return str(_markdown.render(text))


def duration(ms: float) -> str:
    """Milliseconds for a person."""
    if ms >= 10_000:
        return f"{ms / 1000:.1f} s"
    if ms >= 1000:
        return f"{ms / 1000:.2f} s"
    return f"{ms:.0f} ms" if ms >= 9.95 else f"{ms:.1f} ms"


def size(nbytes: int) -> str:
    """Bytes for a person, in powers of ten."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5 or unit == "GB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    raise AssertionError


def count(n: int, one: str, many: str = "") -> str:
    """A number with its noun."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def shares(values: Sequence[float], width: int) -> list[int]:
    """`width` cells dealt out in proportion; what is above a two hundredth of the whole gets at least one."""
    total = sum(values)
    if total <= 0:
        return [0] * len(values)
    cells = [max(round(value / total * width), int(value > total / 200)) for value in values]
    cells[cells.index(max(cells))] += width - sum(cells)
    return cells


def ttft_bar(metrics: ReplyMetrics) -> Picture:
    """The parts of the time to first token as a bar of glyphs."""
    cells = shares([getattr(metrics, name) for _, name, _, _ in PARTS], BAR_WIDTH)
    marks = [(glyph * n, colour) for n, (_, _, glyph, colour) in zip(cells, PARTS, strict=True) if n]
    colours = "".join(span(text, filled(colour)) for text, colour in marks)
    bar = span(colours, f"{MONO};font-size:10px;line-height:1;white-space:nowrap", hidden=True)  # the legend has it all
    return Picture(bar, "".join(text for text, _ in marks))


def ttft_legend(metrics: ReplyMetrics) -> Picture:
    """The parts in numbers, each with its glyph of the bar."""
    rich, plain = [], []
    for label, name, glyph, colour in PARTS:
        value = duration(getattr(metrics, name))
        swatch = span(glyph, f"{filled(colour)};{MONO};font-size:9px", hidden=True)
        rich.append(f"{swatch} {faint(f'{label} {value}')}")
        plain.append(f"{glyph} {label} {value}")
    return Picture(" &nbsp;".join(rich), "  ".join(plain))


def sparkline(values: Sequence[float]) -> str:
    """A row of bars, the highest of which is the largest value."""
    most = max(values, default=0.0)
    return "".join(
        SPARKS[min(int(value / most * len(SPARKS)), len(SPARKS) - 1)] if most else SPARKS[0] for value in values
    )


def ttft_sparks(values_ms: Sequence[float]) -> Picture:
    """Times to first token as a row of bars; they are read out in numbers."""
    bars, said = sparkline(values_ms), ", ".join(duration(value) for value in values_ms)
    return Picture(span(bars, f"{MONO};color:{ACCENT}", said, label=said) if bars else "", bars)


def where_mark(residency: str) -> Picture:
    """Where an agent is: glyph and word."""
    glyph, colour = RESIDENCY[residency]
    return Picture(f"{span(glyph, f'color:{colour}', hidden=True)} {residency}", f"{glyph} {residency}")


def level(part: float, whole: float, width: int = 20) -> Picture:
    """How much of a budget is taken, as a bar of glyphs; a little is never nothing."""
    share = min(part / whole, 1.0) if whole > 0 else 0.0
    n = max(round(share * width), int(part > 0))
    colour = STOPPED if share > 0.9 else ACCENT
    rich = span("█" * n, filled(colour)) + span("░" * (width - n), filled(LINE))
    return Picture(span(rich, f"{MONO};font-size:9px;line-height:1", hidden=True), "█" * n + "░" * (width - n))


def block_mark(block: BlockInfo) -> str:
    """The glyphs of one block: where it is, then what else is true of it."""
    flags = (OPEN if block.kind == "open" else TAIL if block.kind == "tail" else "") + (SHARED if block.shared else "")
    return RESIDENCY[block.residency][0] + flags + (NEW if block.new else "")


def block_words(block: BlockInfo) -> str:
    """One block in words."""
    words = [
        f"block {block.index}",
        f"tokens {block.start}-{block.start + block.n_tokens - 1}",
        block.kind,
        WHERE[block.residency],
        *(["shared"] if block.shared else []),
        *(["new"] if block.new else []),
        size(block.nbytes),
    ]
    return " · ".join(words)


def block_strip(blocks: Sequence[BlockInfo], glyph_size: int = 15, texts: Sequence[str] = ()) -> Picture:
    """One mark per block; hovering tells about it, and its text if `texts` has one for each.

    A live map finds strips and marks by their classes.
    """
    rich = []
    for number, block in enumerate(blocks):
        glyph, colour = RESIDENCY[block.residency]
        words = "\n".join([block_words(block), *texts[number : number + 1]])
        flags = block_mark(block)[1:]
        under = f"2px solid {GREEN if block.new else 'transparent'}"
        mark = span(glyph, f"color:{colour};border-bottom:{under}")
        mark += span(flags, "font-family:sans-serif;font-size:75%;vertical-align:25%") if flags else ""
        rich.append(span(mark, "white-space:nowrap", words, css="amem-block"))
    style = f"{MONO};font-size:{glyph_size}px;line-height:1.5"
    strip = span(" ".join(rich), style, css="amem-strip", label=_strip_words(blocks))
    return Picture(strip, " ".join(block_mark(block) for block in blocks))


def _strip_words(blocks: Sequence[BlockInfo]) -> str:
    """What a strip is to who cannot see it."""
    where = [f"{n} {WHERE[place]}" for place in RESIDENCY if (n := sum(block.residency == place for block in blocks))]
    more = [("shared", sum(block.shared for block in blocks)), ("new", sum(block.new for block in blocks))]
    return f"{count(len(blocks), 'block')}: {', '.join([*where, *(f'{n} {what}' for what, n in more if n)])}"


def strip_legend(blocks: Sequence[BlockInfo]) -> Picture:
    """What the marks of these blocks mean: only those that occur."""
    marks = [(glyph, WHERE[where], f"color:{colour}") for where, (glyph, colour) in RESIDENCY.items()
             if any(block.residency == where for block in blocks)]  # fmt: skip
    marks += [(SHARED, "shared", "")] if any(block.shared for block in blocks) else []
    marks += [(NEW, "new", f"border-bottom:2px solid {GREEN}")] if any(block.new for block in blocks) else []
    marks += [(TAIL, "partly filled", "")] if any(block.kind == "tail" for block in blocks) else []
    marks += [(OPEN, "open, exact", "")] if any(block.kind == "open" for block in blocks) else []
    rich = " &nbsp;".join(f"{span(glyph, style, hidden=True)} {faint(words)}" for glyph, words, style in marks)
    return Picture(rich, "  ".join(f"{glyph} {words}" for glyph, words, _ in marks))


def table(
    head: Sequence[str], rows: Sequence[Sequence[str | Picture]], numeric: Sequence[int] = (), *, wrap: bool = False
) -> Picture:
    """A table of texts or pictures; columns in `numeric` are set to the right, the others' texts may be broken."""
    cell = f"padding:2px 10px 2px 0;border:none;border-bottom:1px solid {LINE};background:transparent"

    def aligned(index: int) -> str:
        side, broken = ("right", False) if index in numeric else ("left", wrap)
        return f"{cell};white-space:{'normal' if broken else 'nowrap'};text-align:{side}"

    def row(cells: Sequence[str | Picture], start: str) -> str:
        rich = [cell.html if isinstance(cell, Picture) else esc(cell) for cell in cells]
        tag = start[:2]
        return "<tr>" + "".join(f'<{start} style="{aligned(i)}">{c}</{tag}>' for i, c in enumerate(rich)) + "</tr>"

    top, body = row(head, 'th scope="col"'), "".join(row(cells, "td") for cells in rows)
    plain = [[cell.text if isinstance(cell, Picture) else cell for cell in cells] for cells in (head, *rows)]
    rich = (
        f'<table style="border-collapse:collapse;border:none;margin:4px 0;{SMALL}">'
        f"<thead>{top}</thead><tbody>{body}</tbody></table>"
    )
    widths = [max(len(cells[i]) for cells in plain) for i in range(len(head))]
    lines = [
        "  ".join(
            c.rjust(w) if i in numeric else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        )
        for cells in plain
    ]
    return Picture(rich, "\n".join(line.rstrip() for line in lines))
