"""The magics %%agent, %%agents, %agent and %amem, with their configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, cell_magic, line_cell_magic, line_magic, magics_class, no_var_expand
from traitlets import Bunch, Enum, Float, Integer, TraitError, Unicode, validate
from traitlets.config import Config

from amem_jupyter.asking import (
    Request,
    Settings,
    dry_run_text,
    replies_behind,
    reply_behind,
    request_of,
    stream_reply,
    wait_for_all,
)
from amem_jupyter.background import PendingReplies, PendingReply
from amem_jupyter.boards import Boards
from amem_jupyter.cells import Cells
from amem_jupyter.commands import CELL_AGENT, CELL_AGENTS, FORMATS, LINE_AGENT, SAMPLING
from amem_jupyter.errors import SettingRefused, in_one_line
from amem_jupyter.live import Output, Page, ReplyView, TerminalView
from amem_jupyter.manual import describe, overview
from amem_jupyter.parse import Arguments, nearest, parse, parse_amem
from amem_jupyter.project import project_settings
from amem_jupyter.protocol import EngineLike
from amem_jupyter.reply import CellReplies, CellReply
from amem_jupyter.session import OF_ENGINE, EngineSettings, Session, session_of
from amem_jupyter.space import adopt, default_space, notebook_path
from amem_jupyter.subcommands import Subcommands
from amem_jupyter.tables import text_picture


@magics_class
class AmemMagics(Magics):
    """amem's defaults in this notebook. Those of the engine count from the next %amem load on."""

    model = Unicode("", help="model to load: a hub id or a folder (default: AMEM_MODEL, or the bundled one)").tag(
        config=True
    )
    store = Unicode("", help="folder that keeps the agents (default: AMEM_STORE, or ~/.amem)").tag(config=True)
    space = Unicode("", help="space of the agents (default: the notebook's path)").tag(config=True)
    memory = Unicode("", help='most memory for K and V, e.g. "2GB" (default: AMEM_MEMORY)').tag(config=True)
    disk = Unicode("", help='most disk for the store, e.g. "10GB"').tag(config=True)
    codec = Unicode("auto", help="how K and V are stored").tag(config=True)
    attention = Enum(["auto", "reference", "cpu"], "auto", help="attention backend").tag(config=True)
    max_tokens = Integer(512, help="most tokens of a reply").tag(config=True)
    temperature = Float(0.0, help="0 is greedy").tag(config=True)
    top_p = Float(1.0, help="sample from the likeliest tokens that make up this much").tag(config=True)
    format = Enum(FORMATS, "md", help="how replies are shown").tag(config=True)

    shell: InteractiveShell

    @validate("max_tokens", "temperature", "top_p")
    def _check_sampling(self, proposal: Bunch) -> object:
        """The bounds of a cell's own options; NaN is within none."""
        name, value = proposal["trait"].name, proposal["value"]
        try:
            (option,) = (option for option in SAMPLING if option.name == name)
            option.convert(str(value))
        except ValueError as error:
            raise TraitError(f"it must be {error}") from None
        return value

    @validate("memory", "disk")
    def _check_size(self, proposal: Bunch) -> str:
        """A size that the engine can read; empty leaves the choice to it."""
        from amem.sizes import parse_size

        return _checked(parse_size, proposal["value"], "")

    @validate("codec")
    def _check_codec(self, proposal: Bunch) -> str:
        """One of the engine's codecs, or its own choice."""
        from amem.model.spec import check_codec

        return _checked(check_codec, proposal["value"], "auto")

    def _forget_choice(self, change: Bunch) -> None:
        """A setting that was made later than %amem load or space takes its place."""
        self.session.chosen.pop(change["name"], None)

    def __init__(self, shell: InteractiveShell) -> None:
        self.session: Session = session_of(shell)
        try:
            super().__init__(shell)
        except TraitError as error:
            raise UsageError(f"{type(self).__name__} in IPython's configuration: {error}") from None
        self._take_project_settings()
        self.observe(self._forget_choice, list(OF_ENGINE))
        self.cells = Cells(shell)
        self.live = Boards(lambda: self.session.engine)  #: whatever shows agents as they change
        self._subcommands = Subcommands(self)

    @no_var_expand
    @line_cell_magic
    def agent(self, line: str, cell: str | None = None) -> CellReply | PendingReply | None:
        """Send the cell, or the rest of the line, to an agent."""
        with in_one_line():
            return self._ask_one(parse(LINE_AGENT if cell is None else CELL_AGENT, line), cell)

    @no_var_expand
    @cell_magic
    def agents(self, line: str, cell: str) -> CellReplies | PendingReplies | None:
        """Send the cell to several agents."""
        with in_one_line():
            return self._ask_all(parse(CELL_AGENTS, line), cell)

    @no_var_expand
    @line_magic
    def amem(self, line: str) -> None:
        """Commands on the engine and its agents."""
        with in_one_line():
            self._subcommands.run(parse_amem(line))

    def engine(self, *asked: str) -> EngineLike:
        """The engine: the one at hand, or a new one with this notebook's settings. `asked` are agents wanted next."""
        return self.session.engine or self.open(self.settings(), *asked)

    def open(self, settings: EngineSettings, *asked: str) -> EngineLike:
        """An engine with these settings, and a line that says how its loading goes."""
        output = Output()
        before = self.session.engine
        engine = self.session.open(settings, lambda words: output.show(text_picture(words)), asked)
        if engine is not before:
            self.live.forget()
            self._adopt(engine, settings.space)
        return engine

    def _adopt(self, engine: EngineLike, space: str) -> None:
        """Find the agents of a notebook that was renamed, if this is its default space."""
        path = notebook_path(self.shell.user_ns)
        old = adopt(engine, path) if space == path else ""
        if old:
            names = ", ".join(engine.agents())
            Output().show(text_picture(f"this notebook was at {old}; its agents came along: {names}"))

    def settings(self, **changes: str | None) -> EngineSettings:
        """The engine's arguments: `changes`, else what was chosen by hand, the configuration, the environment."""
        configured = EngineSettings(
            model=self.model or os.environ.get("AMEM_MODEL") or None,
            store=self.store or os.environ.get("AMEM_STORE") or None,
            space=self.space or default_space(self.shell.user_ns),
            memory=self.memory or os.environ.get("AMEM_MEMORY") or None,
            disk=self.disk or None,
            codec=self.codec,
            attention=self.attention,
        )
        given = {name: value for name, value in changes.items() if value is not None}
        return replace(configured, **{**self.session.chosen, **given})

    def options(self) -> dict[str, Any]:
        """The configuration by name."""
        return {name: getattr(self, name) for name in type(self).class_own_traits(config=True)}

    def set_option(self, name: str, text: str) -> None:
        """Set one option from a text; an empty one sets it back to its default."""
        if text:
            self._set(name, text)
        else:
            self.set_trait(name, self.trait_defaults(name))
        self.session.chosen.pop(name, None)

    def _set(self, name: str, text: str) -> None:
        try:
            self.set_trait(name, self.traits()[name].from_string(text))
        except (TraitError, ValueError) as error:
            raise UsageError(f"{name} cannot be {text!r}: {error}") from None

    def update_config(self, config: Config) -> None:
        """Take what %config gives; what cannot be is one line that ends its cell."""
        given = config.get(type(self).__name__, {})
        try:
            for name in given:
                self.known_option(name)
            super().update_config(config)
        except UsageError as error:
            raise SettingRefused(str(error)) from None
        except TraitError as error:
            wanted = ", ".join(f"{name} cannot be {value!r}" for name, value in given.items())
            raise SettingRefused(f"{wanted}: {error}") from None

    def known_option(self, name: str) -> None:
        """Refuse the name of no setting."""
        names = list(self.options())
        if name not in names:
            raise UsageError(f"there is no setting {name!r}{nearest(name, names) or '; %amem config lists them'}")

    def _take_project_settings(self) -> None:
        """Defaults of the project that the notebook lies in; IPython's own configuration wins over them."""
        file, found = project_settings(Path.cwd(), list(self.options()))
        for name in found.keys() - self.shell.config.get(type(self).__name__, {}).keys():
            try:
                self._set(name, found[name])
            except UsageError as error:
                raise UsageError(f"[tool.amem] in {file}: {error}") from None

    def _ask_one(self, arguments: Arguments, body: str | None) -> CellReply | PendingReply | None:
        request = self._request(arguments, body)
        if request is None:
            return None
        (name,) = request.names
        agent = self.engine(name).agent(name, create=False)
        reply: CellReply | PendingReply
        if request.background:
            reply = reply_behind(agent, request, Page([name], request.how), self.live, self.cells)
            self.session.background.add(reply)
        else:
            view = Page([name], request.how).cards[name] if self._has_page else TerminalView(name)
            reply = stream_reply(agent, request, view, self.live, self.cells)
        self._say_if_cells_have_no_ids()
        self._keep(request, reply)
        return reply

    def _ask_all(self, arguments: Arguments, body: str) -> CellReplies | PendingReplies | None:
        request = self._request(arguments, body)
        if request is None:
            return None
        page = Page(request.names, request.how)
        views: Mapping[str, ReplyView] = page.cards
        if not self._has_page:
            views = {name: TerminalView(name, streams=False) for name in request.names}
        engine = self.engine(*request.names)
        pending = replies_behind(engine, request, views, self.live, self.cells, page.show_again)
        replies: CellReplies | PendingReplies = pending
        if request.background:
            page.draw(begins=True)
            for one in pending.values():
                self.session.background.add(one)
        else:
            replies = wait_for_all(pending)
        self._say_if_cells_have_no_ids()
        self._keep(request, replies)
        return replies

    def _request(self, arguments: Arguments, body: str | None) -> Request | None:
        """What a cell asks for; None if that was only to be shown."""
        defaults = Settings(self.max_tokens, self.temperature, self.top_p, None, ())
        request = request_of(arguments, body, self.shell.user_ns, defaults, self.format, self._last_reply)
        if request.dry_run:
            Output().show(text_picture(dry_run_text(request)))
            return None
        if request.background and not self._has_page:
            raise UsageError("--background needs a notebook: a terminal has no place for a reply that comes later")
        return request

    def _last_reply(self, name: str) -> str | None:
        """What an agent said where it stands, once its requests in the background are done; None if there is none."""
        engine = self.engine(name)
        if name not in engine.agents():
            return None
        for pending in self.session.background.running([name]):
            pending.wait()
        turns = engine.agent(name).turns
        if not turns:
            raise UsageError(f"{name} has not said anything yet")
        return turns[-1].reply

    def _keep(self, request: Request, value: object) -> None:
        if request.into is not None:
            self.shell.user_ns[request.into] = value

    def _say_if_cells_have_no_ids(self) -> None:
        """Say, once in a kernel, that running a cell again adds a turn here."""
        if self._has_page and self.cells.cell_id is None and "no cell ids" not in self.session.said:
            self.session.said.add("no cell ids")
            Output().show(text_picture("no cell ids come from this front end: a cell that is run again adds a turn"))

    @property
    def _has_page(self) -> bool:
        """Whether outputs go to a notebook, and not to a terminal."""
        return hasattr(self.shell, "kernel")


def _checked(check: Callable[[str], object], text: str, default: str) -> str:
    """A text that the engine takes, or the default; a trait's error with the engine's words for any other."""
    try:
        if text != default:
            check(text)
    except ValueError as error:
        raise TraitError(str(error)) from None
    return text


AmemMagics.agent.__doc__ = f"{describe(CELL_AGENT)}\n\n{describe(LINE_AGENT)}"
AmemMagics.agents.__doc__ = describe(CELL_AGENTS)
AmemMagics.amem.__doc__ = overview()
