"""Cards that fill while replies come in: at most ten updates a second in a notebook, plain text in a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from IPython.display import DisplayHandle, display

from amem_jupyter.markup import Picture
from amem_jupyter.render import live_card, reply_card, side_by_side, stopped_card
from amem_jupyter.reply import output_metadata, row_metadata

if TYPE_CHECKING:
    from amem.results import Event, Reply

INTERVAL_S = 0.1


class Output:
    """One output of a cell that can be changed later."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._last: Picture | None = None
        self._last_meta: dict[str, Any] | None = None

    def show(self, picture: Picture, meta: dict[str, Any] | None = None) -> None:
        """Show a picture in place of the one before; the same again sends nothing."""
        if picture == self._last and meta is None:
            return
        self._last, self._last_meta = picture, meta
        self.send(picture.bundle(), meta)

    def show_again(self) -> None:
        """Send what is shown once more."""
        if self._last is not None:
            self.send(self._last.bundle(), self._last_meta)

    def send(self, bundle: dict[str, Any], meta: dict[str, Any] | None = None) -> None:
        """Show a MIME bundle in place of what was shown before."""
        if self._handle is None:
            self._handle = display(  # type: ignore[no-untyped-call]  # IPython's own is untyped
                bundle, raw=True, metadata=meta or {}, display_id=True
            )
        else:
            self._handle.update(bundle, raw=True, metadata=meta or {})  # type: ignore[no-untyped-call]  # as above


class ReplyView(Protocol):
    """Where a reply comes in."""

    def take(self, event: Event) -> None:
        """One step of it."""
        ...

    def finish(self, reply: Reply) -> None:
        """Its end."""
        ...

    def stop(self, reason: str) -> None:
        """The end of one that was not finished."""
        ...


class CardView:
    """One agent's card on a page: what has come in so far, or how it ended."""

    def __init__(self, agent: str, how: str, page: Page) -> None:
        self._agent = agent
        self._how = how
        self._page = page
        self._event: Event | None = None
        self._text = ""
        self._end: Picture | None = None
        self.reply: Reply | None = None

    @property
    def picture(self) -> Picture:
        """The card as it is now."""
        return self._end or live_card(self._agent, self._event, self._text, self._how)

    def take(self, event: Event) -> None:
        """Show the step, unless the page was drawn less than a tenth of a second ago."""
        self._text += event.text
        self._event = event
        if event.reply is None:
            self._page.draw(begins=True)

    def finish(self, reply: Reply) -> None:
        """Turn the card into its final form."""
        self.reply, self._end = reply, reply_card(reply, self._how)
        self._page.draw(begins=True, now=True)

    def stop(self, reason: str) -> None:
        """Say on the card, if there is one, why it ends here."""
        self._end = stopped_card(self._agent, reason, self._text, self._how)
        self._page.draw(now=True)


class Page:
    """The output of one cell, with the cards of all agents that it asks; they may fill from several threads."""

    def __init__(self, agents: Sequence[str], how: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.cards = {agent: CardView(agent, how, self) for agent in agents}
        self._clock = clock
        self._output = Output()
        self._shown_at = -INTERVAL_S
        self._begun = False
        self._lock = threading.Lock()

    def draw(self, *, begins: bool = False, now: bool = False) -> None:
        """Show the cards, side by side if they are several: at once, or at most ten times a second.

        Only what `begins` puts them into the cell.
        """
        with self._lock:
            at = self._clock()
            self._begun |= begins
            if self._begun and (now or at - self._shown_at >= INTERVAL_S):
                self._shown_at = at
                self._output.show(*self._picture())

    def show_again(self) -> None:
        """Send the cards as they are once more."""
        self._output.show_again()

    def _picture(self) -> tuple[Picture, dict[str, Any] | None]:
        cards = list(self.cards.values())
        replies = [card.reply for card in cards if card.reply is not None]
        if len(cards) == 1:
            return cards[0].picture, output_metadata(replies[0]) if replies else None
        return side_by_side([card.picture for card in cards]), row_metadata(replies) if replies else None


class TerminalView:
    """A reply in a terminal: its text as it comes, and the costs after it; or all at its end, beside others."""

    def __init__(self, agent: str, *, streams: bool = True) -> None:
        self._agent = agent
        self._streams = streams
        self._wrote = False

    def take(self, event: Event) -> None:
        """Write the new text."""
        if event.text and self._streams:
            _write(event.text)
            self._wrote = True

    def finish(self, reply: Reply) -> None:
        """Write the card's text, of which the reply may be there already."""
        title, _, rest = reply_card(reply).text.partition("\n")
        said = "" if self._wrote else reply.text
        _write(f"{said}\n\n{title}\n{rest.removeprefix(reply.text.strip(chr(10))).strip()}\n")

    def stop(self, reason: str) -> None:
        """Say why it ends here."""
        if self._wrote:
            _write(f"\n{self._agent} · {reason}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
