"""Puts the magics, their hooks and their completer into a shell, and takes all of them out again."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterable

from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell

from amem_jupyter.completion import Completion
from amem_jupyter.errors import is_refusal
from amem_jupyter.firstline import lift_magic
from amem_jupyter.magics import AmemMagics
from amem_jupyter.protocol import EngineLike
from amem_jupyter.questions import keep_questions, leave_questions

BUNDLED = "smollm2-135m"

_attached: dict[InteractiveShell, tuple[AmemMagics, Completion]] = {}


def attach(shell: InteractiveShell) -> None:
    """Attach to a shell; what was attached before is taken out first, so that there is one of each."""
    detach(shell)
    magics = AmemMagics(shell)
    shell.register_magics(magics)
    magics.cells.at_start.append(lambda: magics.live.cell_began(magics.cells.cell_id))
    magics.cells.at_end.append(magics.live.cell_ended)
    magics.cells.attach()
    completion = Completion(shell, lambda kind: names_of(magics, kind))
    completion.attach()
    shell.input_transformers_cleanup.append(lift_magic)
    keep_questions(shell.input_transformer_manager)
    _attached[shell] = (magics, completion)


def detach(shell: InteractiveShell) -> None:
    """Take our magics, hooks and completer out; the engine stays with the shell's session."""
    if shell not in _attached:
        return
    magics, completion = _attached.pop(shell)
    completion.detach()
    shell.input_transformers_cleanup.remove(lift_magic)
    leave_questions(shell.input_transformer_manager)
    magics.cells.detach()
    magics.live.forget()
    manager = shell.magics_manager
    for kind, names in type(magics).magics.items():
        for name in names:
            manager.magics[kind].pop(name, None)
    manager.registry.pop(type(magics).__name__, None)
    shell.configurables[:] = [other for other in shell.configurables if id(other) != id(magics)]


def running_engine() -> EngineLike:
    """The engine of the shell that runs this code."""
    shell = get_ipython()
    if shell not in _attached:
        raise UsageError("there is no notebook engine here: %load_ext amem_jupyter comes first")
    return _attached[shell][0].engine()


@atexit.register
def _leave_pictures() -> None:
    """What is still alive when the kernel ends becomes a picture, if the front end still listens."""
    for magics, _ in _attached.values():
        with contextlib.suppress(Exception):
            magics.live.forget()


def names_of(magics: AmemMagics, kind: str) -> Iterable[str]:
    """The names that complete a word of a command. Completing loads no engine."""
    engine = magics.session.engine
    if kind == "setting":
        return magics.options()
    if kind == "model":
        return [BUNDLED]
    if kind != "agent" or engine is None:
        return []
    try:
        return engine.agents()
    except Exception as error:
        if is_refusal(error):
            return []
        raise
