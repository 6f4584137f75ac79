"""What each subcommand of %amem does: a method per row of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError

from amem_jupyter.commands import BY_NAME, MAGICS
from amem_jupyter.errors import Interrupted
from amem_jupyter.live import Output
from amem_jupyter.manual import describe, overview
from amem_jupyter.markup import Picture, count, size
from amem_jupyter.parse import Arguments, nearest
from amem_jupyter.protocol import AgentLike, EngineLike
from amem_jupyter.receipt import show_receipt
from amem_jupyter.session import OF_ENGINE, existing_agent
from amem_jupyter.tables import (
    agent_line,
    capacity_picture,
    history_picture,
    status_picture,
    text_picture,
    verify_picture,
)

if TYPE_CHECKING:
    from amem_jupyter.magics import AmemMagics


class Subcommands:
    """The subcommands, on the magics' engine."""

    def __init__(self, magics: AmemMagics) -> None:
        self._magics = magics

    def run(self, arguments: Arguments) -> None:
        """Do what a parsed line says."""
        handler: Callable[[Arguments], None] = getattr(self, f"_{arguments.command.name}")
        handler(arguments)

    @property
    def _engine(self) -> EngineLike:
        return self._magics.engine()

    def _agent(self, arguments: Arguments) -> AgentLike:
        name = arguments.get("NAME")
        return existing_agent(self._magics.engine(name), name)

    def _agents_of(self, arguments: Arguments) -> list[AgentLike]:
        """All agents that a line names, once all of them are known to be there."""
        names = arguments.get("NAME")
        engine = self._magics.engine(*names)
        return [existing_agent(engine, name) for name in names]

    def _status(self, arguments: Arguments) -> None:
        if arguments.get("live", False):
            self._magics.live.open_status(self._engine, self._magics.cells.cell_id)
        else:
            _show(status_picture(self._engine.status()))

    def _load(self, arguments: Arguments) -> None:
        chosen = {
            "model": arguments.get("MODEL"),
            **{name: arguments.get(name) for name in ("codec", "memory", "disk", "store")},
        }
        self._open(chosen)

    def _agents(self, _arguments: Arguments) -> None:
        names = self._engine.agents()
        _say("\n".join(names) if names else "no agents yet: %%agent NAME makes one")

    def _map(self, arguments: Arguments) -> None:
        self._magics.live.open_map(self._agent(arguments), self._magics.cells.cell_id)

    def _tree(self, arguments: Arguments) -> None:
        self._magics.live.open_tree(self._agent(arguments), self._magics.cells.cell_id)

    def _history(self, arguments: Arguments) -> None:
        agent = self._agent(arguments)
        turns = agent.turns
        _show(history_picture(agent.name, turns[-arguments.get("last", len(turns)) :]))

    def _fork(self, arguments: Arguments) -> None:
        agent, new, replace = self._agent(arguments), arguments.get("NEW"), arguments.get("replace", False)
        if new in self._engine.agents() and not replace:
            raise UsageError(f"there is an agent {new!r} already; choose another name, or add --replace to delete it")
        variant = agent.fork(new, at=arguments.get("at"), keep_last=arguments.get("keep_last"), replace=replace)
        self._changed(agent, variant)

    def _rewind(self, arguments: Arguments) -> None:
        agent = self._agent(arguments)
        agent.rewind(turns=arguments.get("TURNS", 1), to=arguments.get("to"))
        self._changed(agent)

    def _checkout(self, arguments: Arguments) -> None:
        agent = self._agent(arguments)
        agent.checkout(arguments.get("TURN"))
        self._changed(agent)

    def _snapshot(self, arguments: Arguments) -> None:
        agent, name = self._agent(arguments), arguments.get("SNAPSHOT")
        if name is None:
            if {"at", "forget"} & arguments.values.keys():
                raise UsageError("no SNAPSHOT: which name?")
            named = agent.snapshots
            _say("\n".join(f"{key}: turn {turn}" for key, turn in named.items()) or f"{agent.name} has no snapshots")
        elif arguments.get("forget", False):
            agent.forget_snapshot(name)
            _say(f"{agent.name} has no snapshot {name} any more; its turn is still there")
        else:
            turn = agent.snapshot(name, at=arguments.get("at"))
            _say(f"{name}: turn {turn} of {agent.name}")

    def _why(self, arguments: Arguments) -> None:
        agent = self._agent(arguments)
        _say(f"{agent.name}\n{agent.why()}")

    def _evict(self, arguments: Arguments) -> None:
        self._each(arguments, lambda agent: agent.evict())

    def _restore(self, arguments: Arguments) -> None:
        self._each(arguments, lambda agent: agent.restore())

    def _prefetch(self, arguments: Arguments) -> None:
        agents = self._agents_of(arguments)
        for agent in agents:
            agent.restore(background=True)
        _say(f"on the way into memory: {', '.join(agent.name for agent in agents)}")

    def _pin(self, arguments: Arguments) -> None:
        self._each(arguments, lambda agent: agent.pin())

    def _unpin(self, arguments: Arguments) -> None:
        self._each(arguments, lambda agent: agent.unpin())

    def _delete(self, arguments: Arguments) -> None:
        agent = self._agent(arguments)
        if not arguments.get("yes", False):
            turns = count(len(agent.tree()), "turn")
            raise UsageError(f"this deletes {agent.name} with {turns} for good; add --yes to do it")
        agent.delete()
        self._magics.live.forget(lambda board: board.agent == agent.name)
        self._magics.live.changed(agent.name)
        _say(f"{agent.name} is deleted")

    def _wait(self, arguments: Arguments) -> None:
        background, wanted = self._magics.session.background, arguments.get("NAME", ())
        engine = self._magics.session.engine
        if engine is not None:  # without one nothing goes on, and waiting loads none
            for name in wanted:
                if not background.has(name):  # a request that failed may have left no agent, and is still told
                    existing_agent(engine, name)
        taken = background.take(wanted)
        names = ", ".join(dict.fromkeys(pending.agent for pending in taken))
        if not taken:
            _say("nothing is going on in the background")
            return
        output = Output()
        output.show(text_picture(f"waiting for {names} …"))
        try:
            for pending in taken:
                pending.wait()
        except KeyboardInterrupt:
            background.put_back(taken)
            left = ", ".join(dict.fromkeys(pending.agent for pending in taken if not pending.done))
            output.show(text_picture(f"still answering: {left}"))
            raise Interrupted(f"no longer waiting; still answering: {left}") from None
        failures = [f"{pending.agent}: {pending.failure}" for pending in taken if pending.failure]
        output.show(text_picture("\n".join(failures) or f"{names}: done"))
        if failures:
            raise UsageError("; ".join(failures))

    def _cancel(self, arguments: Arguments) -> None:
        background, names = self._magics.session.background, arguments.get("NAME")
        idle = [name for name in names if not background.running([name])]
        if idle:
            raise UsageError(f"{', '.join(idle)}: no request in the background")
        running = background.take(names)
        for pending in running:
            pending.cancel()
        for pending in running:
            pending.wait()
        ends = ["had answered already" if pending.answered else "cancelled; it is as it was" for pending in running]
        _say("\n".join(f"{pending.agent}: {end}" for pending, end in zip(running, ends, strict=True)))

    def _export(self, arguments: Arguments) -> None:
        agent, file = self._agent(arguments), arguments.get("FILE")
        _say(f"{agent.name} is written to {file} ({size(agent.export(file))})")

    def _import(self, arguments: Arguments) -> None:
        self._changed(self._engine.import_agent(arguments.get("FILE"), name=arguments.get("as")))

    def _verify(self, arguments: Arguments) -> None:
        _show(verify_picture(self._engine.verify(repair=arguments.get("repair", False))))

    def _fidelity(self, arguments: Arguments) -> None:
        show_receipt(self._agent(arguments), arguments.get("tokens", 128))

    def _capacity(self, arguments: Arguments) -> None:
        _show(capacity_picture(self._engine.capacity(arguments.get("N", ()))))

    def _space(self, arguments: Arguments) -> None:
        opened = self._magics.session.opened_with
        space, wanted = (opened or self._magics.settings()).space, arguments.get("SPACE")
        if wanted is None or wanted == space:
            _say(f"space {space}")
            return
        if self._magics.session.engine is None:
            self._magics.session.chosen["space"] = wanted
        else:
            self._open({"space": wanted})
        _say(f"space {wanted} (was {space})")

    def _serve(self, arguments: Arguments) -> None:
        serving = self._magics.session.serving
        if arguments.get("stop", False):
            url = serving.stop()
            _say(f"no longer on {url}" if url else "nothing was served")
            return
        host, port, keys = (arguments.get(*one) for one in (("host", "127.0.0.1"), ("port", 8000), ("api_key", ())))
        url = f"{serving.start(self._magics.engine, host, port, keys)}/v1"
        if (name := arguments.get("into")) is not None:
            self._magics.shell.user_ns[name] = url
        _say(f"serving this kernel's agents on {url}; %amem serve --stop ends it")

    def _release(self, _arguments: Arguments) -> None:
        self._magics.session.refuse_while_asked()
        self._magics.live.forget()
        closed = self._magics.session.close()
        _say("the engine is closed; agents are on disk" if closed else "no engine was loaded")

    def _config(self, arguments: Arguments) -> None:
        name, value = arguments.get("OPTION"), arguments.get("VALUE")
        if name is not None:
            self._magics.known_option(name)
        if value is not None:
            self._magics.set_option(name, value)
        options = self._magics.options()
        shown = {name: options[name]} if name is not None else options
        lines = [f"{key} = {shown[key]!r}" for key in shown]
        if value is not None and name in OF_ENGINE and self._magics.session.engine is not None:
            lines[0] += " (from the next %amem load on)"
        _say("\n".join(lines))

    def _help(self, arguments: Arguments) -> None:
        name = arguments.get("COMMAND")
        commands = {**BY_NAME, **MAGICS, **{key.lstrip("%"): MAGICS[key] for key in reversed(MAGICS)}}
        if name is not None and name not in commands:
            raise UsageError(f"there is no command {name!r}{nearest(name, list(commands)) or '; see %amem help'}")
        _say(overview() if name is None else describe(commands[name]))

    def _open(self, chosen: Mapping[str, str | None]) -> None:
        """Open an engine with what was chosen, and remember the choice if that went well."""
        self._magics.open(self._magics.settings(**chosen))
        self._magics.session.chosen.update({name: value for name, value in chosen.items() if value is not None})

    def _each(self, arguments: Arguments, act: Callable[[AgentLike], object]) -> None:
        """Do `act` for all agents that the line names."""
        agents = self._agents_of(arguments)
        for agent in agents:
            act(agent)
        self._changed(*agents)

    def _changed(self, *agents: AgentLike) -> None:
        """Show how agents are now, here and wherever else they are shown."""
        for agent in agents:
            self._magics.live.changed(agent.name)
        _say("\n".join(agent_line(agent.status) for agent in agents))


def _say(text: str) -> None:
    _show(text_picture(text))


def _show(picture: Picture, metadata: dict[str, Any] | None = None) -> None:
    Output().show(picture, metadata)
