"""The engine of one kernel: made when it is first needed, kept across reloads of the extension."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from weakref import WeakKeyDictionary

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from amem_jupyter.background import Background
from amem_jupyter.errors import Interrupted, is_refusal
from amem_jupyter.markup import duration
from amem_jupyter.parse import nearest
from amem_jupyter.protocol import AgentLike, EngineLike
from amem_jupyter.serving import Serving


@dataclass(frozen=True)
class EngineSettings:
    """The arguments of an engine; None leaves the choice to it."""

    model: str | None = None
    store: str | None = None
    space: str = "default"
    memory: str | None = None
    disk: str | None = None
    codec: str = "auto"
    attention: str = "auto"


OF_ENGINE = frozenset(field.name for field in fields(EngineSettings))  #: settings that an engine is made with


def open_engine(settings: EngineSettings, progress: Callable[[str], None], asked: Collection[str] = ()) -> EngineLike:
    """A real engine. Here, and only here, MLX comes in.

    `asked` are agents that are wanted at once: where another kernel has one, that is said before the model is loaded.
    """
    try:
        from amem import Engine
        from amem.inuse import refuse_if_in_use
    except ImportError as error:
        raise UsageError(f"amem's engine cannot be imported: {error}") from error
    refuse_if_in_use(asked, settings.store, settings.space)
    engine: EngineLike = Engine(
        model=settings.model,
        store=settings.store,
        space=settings.space,
        memory=settings.memory,
        disk=settings.disk,
        codec=settings.codec,
        attention=settings.attention,
        progress=progress,
    )
    return engine


class Session:
    """Holds the engine, the settings that it was made with, and what the person chose by hand."""

    def __init__(self) -> None:
        self.engine: EngineLike | None = None
        self.opened_with: EngineSettings | None = None
        self.chosen: dict[str, str] = {}  #: settings that %amem load and space gave, by name
        self.background = Background()
        self.serving = Serving()
        self.said: set[str] = set()  #: what is said once only

    def open(self, wanted: EngineSettings, tell: Callable[[str], None], asked: Collection[str] = ()) -> EngineLike:
        """The engine for these settings; the one at hand if it has them.

        A new one is made before the old one is closed, so that a model that cannot be loaded changes nothing.

        Raises
        ------
            AgentLocked: another kernel has one of the agents that are `asked` next.
        """
        if self.engine is not None and wanted == self.opened_with:
            return self.engine
        self.refuse_while_asked()
        name = wanted.model or "the bundled model"
        tell(f"loading {name} …")
        began = time.perf_counter()
        try:
            engine = open_engine(wanted, tell, asked)
        except BaseException as error:
            tell(f"{name} was not loaded")
            if isinstance(error, KeyboardInterrupt):
                raise Interrupted(f"interrupted; {name} was not loaded") from None
            raise
        old, self.engine, self.opened_with = self.engine, engine, wanted
        if old is not None:
            if (url := self.serving.stop()) is not None:
                tell(f"no longer on {url}: %amem serve serves the new engine")
            old.close()
        took = duration((time.perf_counter() - began) * 1000)
        tell(_loaded(engine, name, took))
        return engine

    def refuse_while_asked(self) -> None:
        """Refuse to close an engine under requests in the background."""
        running = self.background.running()
        if running:
            names = ", ".join(dict.fromkeys(pending.agent for pending in running))
            raise UsageError(f"still answering in the background: {names}; %amem wait or %amem cancel comes first")

    def close(self) -> bool:
        """Close the engine; False if there is none."""
        engine, self.engine, self.opened_with = self.engine, None, None
        if engine is None:
            return False
        self.serving.stop()
        engine.close()
        return True


def _loaded(engine: EngineLike, name: str, took: str) -> str:
    """What was loaded, and on what; in short if an agent that another kernel holds keeps the engine from telling."""
    try:
        status = engine.status()
    except Exception as error:
        if is_refusal(error):
            return f"{name} loaded in {took}"
        raise
    blas = f" · {status.blas}" if status.blas else ""
    return f"{status.model} loaded in {took} · {status.codec} · {status.device}, {status.attention} attention{blas}"


def existing_agent(engine: EngineLike, name: str) -> AgentLike:
    """An agent that is there; a name that is not is an error, and makes no agent."""
    names = engine.agents()
    if name not in names:
        others = nearest(name, names) or (f"; there are {', '.join(names)}" if names else "; there is none yet")
        raise UsageError(f"no agent {name!r} in this space{others}")
    return engine.agent(name)


_sessions: WeakKeyDictionary[InteractiveShell, Session] = WeakKeyDictionary()


def session_of(shell: InteractiveShell) -> Session:
    """The shell's session, made at the first call."""
    if shell not in _sessions:
        _sessions[shell] = Session()
    return _sessions[shell]


@atexit.register
def _close_all() -> None:
    for session in list(_sessions.values()):
        session.close()
