"""Loading, unloading, reloading, resetting: one of each, and the engine stays."""

from __future__ import annotations

import subprocess
import sys

import amem_jupyter


def hooks(shell):
    """Our callbacks in the shell."""
    found = [*shell.events.callbacks["pre_run_cell"], *shell.events.callbacks["post_run_cell"]]
    return [hook for hook in found if "amem" in hook.__module__]


def matchers(shell):
    return [matcher for matcher in shell.Completer.custom_matchers if "amem" in matcher.__module__]


def transformers(shell):
    manager = shell.input_transformer_manager
    return [one for one in (*manager.cleanup_transforms, *manager.token_transformers) if "amem" in one.__module__]


def configurables(shell):
    return [one for one in shell.configurables if type(one).__name__ == "AmemMagics"]


def test_loading_three_times_leaves_one_of_each(notebook):
    """With and without unloading in between."""
    for source in ("%load_ext amem_jupyter", "%reload_ext amem_jupyter", "%reload_ext amem_jupyter"):
        assert notebook.run(source).success
    amem_jupyter.load_ipython_extension(notebook.shell)
    assert len(hooks(notebook.shell)) == 2
    assert len(matchers(notebook.shell)) == 1
    assert len(configurables(notebook.shell)) == 1
    ours = [one.__name__ for one in transformers(notebook.shell)]
    assert ours == ["lift_magic", "AgentLine", "AgentAssign"]


def test_the_engine_survives_a_reload(notebook, script):
    """Its agents are still hot."""
    notebook.run("%load_ext amem_jupyter")
    notebook.run("%agent planner Hi")
    engine = notebook.engine
    for _ in range(3):
        assert notebook.run("%reload_ext amem_jupyter").success
    assert notebook.engine is engine
    assert not engine.is_closed
    assert notebook.run("%agent planner Again").success
    assert len(engine.agent("planner").turns) == 2


def test_code_in_a_cell_has_the_engine_of_the_magics(notebook, script):
    """It is opened if need be, and another one after a load."""
    assert notebook.run("from amem_jupyter import engine\nfirst = engine()").success
    assert notebook.engine is notebook.shell.user_ns["first"]
    notebook.run("%agent planner Hi")
    notebook.run("%amem fork planner bold")
    notebook.run("names = engine().agents()")
    assert ["bold", "planner"] == sorted(notebook.shell.user_ns["names"])
    notebook.run("%amem load other-model")
    notebook.run("second = engine()")
    assert notebook.engine is notebook.shell.user_ns["second"] is not notebook.shell.user_ns["first"]


def test_without_the_magics_there_is_no_engine(notebook, script):
    """The error says what comes first, and nothing is opened."""
    notebook.run("from amem_jupyter import engine")
    amem_jupyter.unload_ipython_extension(notebook.shell)
    assert "%load_ext amem_jupyter comes first" in notebook.fails("engine()")
    assert [] == script.opened


def test_unloading_takes_all_out(notebook):
    """No magic, hook, completer or configurable of ours is left."""
    amem_jupyter.unload_ipython_extension(notebook.shell)
    assert hooks(notebook.shell) == []
    assert matchers(notebook.shell) == []
    assert configurables(notebook.shell) == []
    assert transformers(notebook.shell) == []
    assert notebook.shell.find_cell_magic("agent") is None
    assert notebook.shell.find_line_magic("amem") is None
    amem_jupyter.unload_ipython_extension(notebook.shell)


def test_a_reset_namespace_changes_nothing_for_us(notebook):
    """%reset -f, then load again, then ask."""
    notebook.run("%agent planner Hi")
    assert notebook.run("%reset -f").success
    assert notebook.run("%load_ext amem_jupyter").success
    assert notebook.run("%agent planner Again").success
    assert len(notebook.engine.agent("planner").turns) == 2


def test_importing_the_extension_brings_no_mlx():
    """A notebook that only loads it starts at once."""
    code = "import sys, amem_jupyter.extension; print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm')])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
