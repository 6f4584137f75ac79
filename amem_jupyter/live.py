"""Cards that fill while a reply comes in: at most ten updates a second in a notebook, plain text in a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from IPython.display import DisplayHandle, display

from amem_jupyter.markup import Picture
from amem_jupyter.render import live_card, reply_card, stopped_card
from amem_jupyter.reply import output_metadata

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
    """A card in a notebook."""

    def __init__(self, agent: str, how: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._agent = agent
        self._how = how
        self._clock = clock
        self._output = Output()
        self._shown_at = -INTERVAL_S
        self._text = ""
        self._begun = False

    def begin(self) -> None:
        """Put the card into the running cell, before there is anything to show."""
        self._begun = True
        self._output.show(live_card(self._agent, None, "", self._how))

    def take(self, event: Event) -> None:
        """Show the step, unless the last one was shown less than a tenth of a second ago."""
        self._text += event.text
        self._begun = True
        now = self._clock()
        if event.reply is None and now - self._shown_at >= INTERVAL_S:
            self._shown_at = now
            self._output.show(live_card(self._agent, event, self._text, self._how))

    def finish(self, reply: Reply) -> None:
        """Turn the card into its final form."""
        self._output.show(reply_card(reply, self._how), output_metadata(reply))

    def show_again(self) -> None:
        """Send the card as it is once more."""
        self._output.show_again()

    def stop(self, reason: str) -> None:
        """Say on the card, if there is one, why it ends here."""
        if self._begun:
            self._output.show(stopped_card(self._agent, reason, self._text, self._how))


class TerminalView:
    """A reply in a terminal: its text as it comes, and the costs after it."""

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._wrote = False

    def take(self, event: Event) -> None:
        """Write the new text."""
        if event.text:
            _write(event.text)
            self._wrote = True

    def finish(self, reply: Reply) -> None:
        """Write the card's text without the reply, which is there already."""
        if not self._wrote:
            _write(reply.text)
        title, _, rest = reply_card(reply).text.partition("\n")
        _write(f"\n\n{title}\n{rest.removeprefix(reply.text.strip(chr(10))).strip()}\n")

    def stop(self, reason: str) -> None:
        """Say why it ends here."""
        if self._wrote:
            _write(f"\n{self._agent} · {reason}\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
