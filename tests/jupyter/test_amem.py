"""The subcommands of %amem, each by what it changes and shows."""

from __future__ import annotations

import pytest

from amem.errors import AgentLocked
from amem.results import Residency


@pytest.fixture
def planner(notebook):
    """An agent with two turns."""
    notebook.run("%agent planner Hello")
    notebook.run("%agent planner Go on")
    return notebook.engine.agent("planner")


def test_status_shows_engine_and_agents(notebook, planner):
    """As a table, and as text."""
    notebook.run("%amem status")
    assert "scripted-1m" in notebook.text
    assert "planner" in notebook.text
    assert "<table" in notebook.shown[-1]["data"]["text/html"]


def test_amem_alone_is_status(notebook, planner):
    """The shortest way to see."""
    notebook.run("%amem")
    assert "OpenBLAS" in notebook.text


def test_status_loads_the_engine_when_there_is_none(notebook):
    """After a restart it shows what is stored."""
    notebook.run("%amem status")
    assert "loaded" in notebook.text
    assert "no agents yet" in notebook.text


def test_agents_are_listed(notebook, planner):
    """One a line."""
    notebook.run("%agent critic Hm")
    notebook.run("%amem agents")
    assert notebook.text == "critic\nplanner"


def test_snapshots_are_named_listed_gone_back_to_and_forgotten(notebook, planner):
    """And a turn's number works wherever a name does."""
    notebook.run("%amem snapshot planner")
    assert "planner has no snapshots" in notebook.text
    notebook.run("%amem snapshot planner end")
    second = planner.turns[-1].id
    assert f"end: turn {second} of planner" in notebook.text
    notebook.run(f"%amem snapshot planner start --at {planner.turns[0].id}")
    notebook.run("%amem snapshot planner")
    assert f"end: turn {second}\nstart: turn {planner.turns[0].id}" in notebook.text
    notebook.run("%amem rewind planner --to start")
    assert 1 == len(planner.turns)
    notebook.run("%amem checkout planner end")
    assert 2 == len(planner.turns)
    notebook.run("%amem snapshot planner end --forget")
    assert {"start"} == planner.snapshots.keys()
    assert "no snapshot 'end'" in notebook.fails("%amem snapshot planner end --forget")
    assert "which name" in notebook.fails("%amem snapshot planner --forget")
    assert "not both" in notebook.fails("%amem rewind planner 1 --to start")


def test_a_fork_may_keep_the_last_turns_alone(notebook, planner):
    """The way on when the context is full."""
    notebook.run("%amem fork planner short --keep-last 1")
    assert [planner.turns[-1].prompt] == [turn.prompt for turn in notebook.engine.agent("short").turns]


def test_why_tells_what_the_last_request_found(notebook, planner):
    """In the engine's words."""
    notebook.run("%amem why planner")
    assert notebook.text == "planner\nThe cell of turn 3 was edited."
    assert "no agent 'plannre'" in notebook.fails("%amem why plannre")


def test_a_fork_can_take_the_place_of_an_earlier_one(notebook, planner):
    """Asked for by --replace: the cell can run again."""
    notebook.run("%amem fork planner variant")
    notebook.run("%agent variant Once more")
    assert "add --replace" in notebook.fails("%amem fork planner variant")
    assert len(planner.turns) + 1 == len(notebook.engine.agent("variant").turns)
    assert notebook.run("%amem fork planner variant --replace").success
    assert len(planner.turns) == len(notebook.engine.agent("variant").turns)


def test_fork_rewind_and_checkout_move_heads(notebook, planner):
    """And say where the agents are now."""
    first, second = [turn.id for turn in planner.turns]
    notebook.run("%amem fork planner variant")
    assert [turn.id for turn in notebook.engine.agent("variant").turns] == [first, second]
    assert "variant: ■ hot · 400 tokens in 2 turns" in notebook.text
    notebook.run(f"%amem fork planner early --at {first}")
    assert [turn.id for turn in notebook.engine.agent("early").turns] == [first]
    notebook.run("%amem rewind planner")
    assert [turn.id for turn in planner.turns] == [first]
    notebook.run(f"%amem checkout planner {second}")
    assert [turn.id for turn in planner.turns] == [first, second]
    notebook.run("%amem rewind planner 2")
    assert planner.turns == []


def test_tree_and_history_show_turns(notebook, planner):
    """All branches, or the path to the head."""
    notebook.run("%amem rewind planner")
    notebook.run("%agent planner Another way")
    notebook.run("%amem tree planner")
    assert "Go on" in notebook.text
    assert "← here" in notebook.text
    notebook.run("%amem history planner")
    assert "Go on" not in notebook.text
    assert "you: Hello" in notebook.text
    notebook.run("%amem history planner --last 1")
    assert "you: Hello" not in notebook.text
    assert "you: Another way" in notebook.text


def test_memory_is_moved_by_hand(notebook, planner):
    """evict, restore, pin, unpin; several at once, or none if one is unknown."""
    notebook.run("%agent critic Hm")
    notebook.run("%amem evict planner critic")
    assert planner.status.residency is Residency.WARM
    assert "critic: ▨ warm" in notebook.text
    assert "no agent 'nobody'" in notebook.fails("%amem restore planner nobody")
    assert planner.status.residency is Residency.WARM
    notebook.run("%amem restore planner")
    assert planner.status.residency is Residency.HOT
    notebook.run("%amem evict critic")
    notebook.run("%amem prefetch critic")
    assert notebook.text == "on the way into memory: critic"
    assert notebook.engine.agent("critic").status.residency is Residency.HOT
    notebook.run("%amem pin planner")
    assert planner.status.pinned
    notebook.run("%amem unpin planner")
    assert not planner.status.pinned


def test_delete_asks_first(notebook, planner):
    """It says what would be lost."""
    assert "planner with 2 turns" in notebook.fails("%amem delete planner")
    notebook.run("%amem delete planner --yes")
    assert notebook.engine.agents() == []


def test_load_opens_another_engine_and_closes_the_old_one(notebook, script, planner):
    """With what was given, and again with the same only if something differs."""
    notebook.run("%amem load other/model --codec q8 --memory 2GB --store /tmp/elsewhere")
    settings = notebook.engine.settings
    assert (settings.model, settings.codec, settings.memory, settings.store) == (
        "other/model", "q8", "2GB", "/tmp/elsewhere",
    )  # fmt: skip
    assert [engine.is_closed for engine in script.opened] == [True, False]
    notebook.run("%amem load other/model")
    assert len(script.opened) == 2


def test_a_model_that_cannot_be_loaded_leaves_the_engine(notebook, script, planner):
    """The agents go on with the old one, later loads too."""
    notebook.fails("%amem load missing/model")
    assert not notebook.engine.is_closed
    assert notebook.run("%agent planner Still there?").success
    notebook.run("%amem load --codec q8")
    assert notebook.engine.settings.model is None


def test_an_interrupted_load_is_one_line_and_leaves_the_engine(notebook, planner):
    """No frames of ours, and the agents are there."""
    seen = notebook.fails("%amem load endless/model")
    assert seen.strip() == "KeyboardInterrupt: interrupted; endless/model was not loaded"
    assert not notebook.engine.is_closed


def test_loading_tells_how_it_goes(notebook):
    """A line that changes in place, and ends with what was loaded."""
    notebook.run("%amem load")
    told = [message["data"]["text/plain"] for message in notebook.publisher.outputs]
    assert told[0] == "loading the bundled model …"
    assert "reading scripted-1m" in told
    assert told[-1].startswith("scripted-1m loaded in ")
    assert "OpenBLAS" in told[-1]
    assert len(notebook.shown) == 1


def test_an_agent_that_another_kernel_holds_does_not_stop_the_loading(notebook, script, monkeypatch):
    """It is in the way when it is asked, not before."""
    from tests.jupyter.scripted import ScriptedEngine

    def status(_engine):
        raise AgentLocked("agent 'a' is in use by process 1")

    monkeypatch.setattr(ScriptedEngine, "status", status)
    assert notebook.run("%amem load").success
    assert "loaded in" in notebook.text
    assert notebook.run("%agent planner Hi").success
    assert notebook.fails("%amem status").startswith("UsageError: agent 'a' is in use")


def test_release_closes_the_engine_and_the_next_use_opens_one_with_the_same_choice(notebook, script):
    """What was loaded by hand is loaded again."""
    notebook.run("%amem load other/model")
    notebook.run("%amem release")
    assert script.opened[0].is_closed
    assert notebook.engine is None
    notebook.run("%amem release")
    assert "no engine was loaded" in notebook.text
    notebook.run("%agent planner Hi")
    assert notebook.engine.settings.model == "other/model"


def test_the_environment_sets_the_engine(notebook, script, monkeypatch):
    """AMEM_MODEL, AMEM_STORE, AMEM_MEMORY; configuration wins over them."""
    monkeypatch.setenv("AMEM_MODEL", "env/model")
    monkeypatch.setenv("AMEM_STORE", "/tmp/env")
    monkeypatch.setenv("AMEM_MEMORY", "1GB")
    notebook.run("%config AmemMagics.memory = '3GB'")
    notebook.run("%amem load")
    settings = notebook.engine.settings
    assert (settings.model, settings.store, settings.memory) == ("env/model", "/tmp/env", "3GB")


def test_a_notebooks_space_is_its_path(notebook, monkeypatch):
    """As the server tells it."""
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/notes/first.ipynb")
    notebook.run("%amem space")
    assert notebook.text == "space /home/me/notes/first.ipynb"
    notebook.run("%amem load")
    assert notebook.engine.space == "/home/me/notes/first.ipynb"


def test_a_space_can_be_changed(notebook, script):
    """Before an engine is there, and after."""
    notebook.run("%amem space team")
    assert script.opened == []
    notebook.run("%agent planner Hi")
    assert notebook.engine.space == "team"
    notebook.run("%amem space other")
    assert notebook.engine.space == "other"
    assert notebook.engine.agents() == []
    assert "space other (was team)" in notebook.text


def test_verify_gives_its_verdict_and_each_problem_a_line(notebook, script, planner):
    """--repair mends what it can."""
    notebook.run("%amem verify")
    assert notebook.text == "✓ all is as it was written\nread 1 agent, 3 blocks and 1 snapshot: 34.2 kB"
    script.problems = ["agent 'planner': block abc is damaged: its checksum differs", "agent 'critic': <b>"]
    notebook.run("%amem verify")
    verdict, _, first, _last = notebook.text.splitlines()
    assert verdict == "! 2 problems: %amem verify --repair mends what can be mended"
    assert first == "  agent 'planner': block abc is damaged: its checksum differs"
    assert "&lt;b&gt;" in notebook.shown[-1]["data"]["text/html"]
    notebook.run("%amem verify --repair")
    assert notebook.text.startswith("✓")


def test_an_agent_goes_into_a_file_and_comes_out_of_it(notebook, planner, tmp_path):
    """And the file is never written over."""
    file = tmp_path / "planner.amem"
    notebook.run(f"%amem export planner '{file}'")
    assert notebook.text == f"planner is written to {file} (1.5 kB)"
    assert "exists already" in notebook.fails(f"%amem export planner '{file}'")
    notebook.run(f"%amem import '{file}' --as again")
    assert "again: ■ hot · 200 tokens in 1 turn" in notebook.text
    assert "there is no file" in notebook.fails("%amem import nowhere.amem")
    taken = notebook.fails(f"%amem import '{file}' --as again").strip()
    assert taken == "UsageError: there is an agent 'again' already: give this one another name (--as NAME)"


def test_capacity_is_a_table(notebook):
    """For these lengths, or for some usual ones."""
    notebook.run("%amem capacity 1000 2000")
    title, _, *rows = [line.split() for line in notebook.text.split("loaded", 1)[-1].splitlines()[1:]]
    assert "".join(title) == "scripted-1m:agentsthatfit4GBofKandV"
    assert [row[0] for row in rows] == ["1000", "2000"]
    assert [row[-1] for row in rows] == ["40000", "20000"]


def test_a_setting_counts_after_a_choice_by_hand(notebook, script):
    """%amem config and %config, made later, replace what load and space chose; the open engine stays until load."""
    notebook.run("%amem load first/model")
    notebook.run("%amem space team")
    notebook.run("%amem config model second/model")
    assert notebook.text == "model = 'second/model' (from the next %amem load on)"
    notebook.run("%config AmemMagics.space = 'others'")
    notebook.run("%amem space")
    assert notebook.text == "space team"
    notebook.run("%amem load")
    assert (notebook.engine.model, notebook.engine.space) == ("second/model", "others")
    notebook.run("%amem load first/model")
    notebook.run("%amem config model second/model")
    notebook.run("%amem load")
    assert notebook.engine.model == "second/model"


@pytest.mark.parametrize("setting", ["temperature nan", "temperature -1", "temperature inf", "top_p 0", "top_p nan"])
def test_a_setting_has_the_bounds_of_the_option(notebook, setting):
    """Refused at once, not at the next cell."""
    before = notebook.shell.magics_manager.registry["AmemMagics"].options()
    assert "it must be a number" in notebook.fails(f"%amem config {setting}")
    assert notebook.shell.magics_manager.registry["AmemMagics"].options() == before


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        *(
            (size, value, "is not a size")
            for size in ("memory", "disk")
            for value in ("1XB", "nan", "-1GB", "0", "0.1B")
        ),
        ("codec", "q5", "choose one of auto, q4, "),
        ("codec", "auto/bf16", "choose one of auto, q4, "),
    ],
)
def test_a_setting_that_no_engine_takes_is_refused_at_once(notebook, name, value, says):
    """By %amem config, and by %config as well, in one line that names the setting; nothing changes."""
    magics = notebook.shell.magics_manager.registry["AmemMagics"]
    before = magics.options()
    for source in (f"%amem config {name} {value}", f"%config AmemMagics.{name} = {value!r}"):
        seen = notebook.fails(source).strip()
        assert seen.startswith(f"UsageError: {name} cannot be '{value}': ")
        assert says in seen
        assert "\n" not in seen
    assert magics.options() == before


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("max_tokens = 0", "max_tokens cannot be 0: it must be a whole number of at least 1"),
        ("max_tokens = 'many'", "max_tokens cannot be 'many': "),
        ("temperature = -1", "temperature cannot be -1: it must be a number from 0"),
        ("format = 'html'", "format cannot be 'html': "),
        ("max_tokns = 3", "there is no setting 'max_tokns'; did you mean max_tokens?"),
    ],
)
def test_config_of_ipython_is_refused_in_one_line_and_ends_its_cell(notebook, caplog, setting, says):
    """It is no line of a log, what the cell does next is not done, and a right value is taken afterwards."""
    seen = notebook.fails(f"%config AmemMagics.{setting}\nreached = True").strip()
    assert seen.startswith(f"UsageError: {says}")
    assert len(seen.splitlines()) == 1
    assert caplog.text == ""
    assert "reached" not in notebook.shell.user_ns
    assert notebook.run("%config AmemMagics.max_tokens = 7").success
    notebook.run("%amem config max_tokens")
    assert notebook.text == "max_tokens = 7"


def test_a_wrong_configuration_file_is_one_line_too(notebook):
    """As c.AmemMagics in IPython's own would be; nothing is loaded."""
    notebook.run("%unload_ext amem_jupyter")
    notebook.shell.config.AmemMagics.max_tokens = 0
    seen = notebook.fails("%load_ext amem_jupyter").strip()
    assert seen == "UsageError: AmemMagics in IPython's configuration: it must be a whole number of at least 1"
    assert notebook.shell.find_line_magic("amem") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("memory", "10.2GiB"), ("disk", "500"), *(("codec", codec) for codec in ("auto", "q8", "q4-affine", "q4/bf16"))],
)
def test_a_setting_that_an_engine_takes_is_kept_as_written(notebook, name, value):
    """And given to the next engine."""
    assert notebook.run(f"%amem config {name} {value}").success
    notebook.run("%amem load")
    assert getattr(notebook.engine.settings, name) == value


def test_an_empty_value_resets_a_setting(notebook, monkeypatch):
    """To its default, which for memory is the environment's; also what %amem load chose."""
    monkeypatch.setenv("AMEM_MEMORY", "1GB")
    magics = notebook.shell.magics_manager.registry["AmemMagics"]
    first = magics.options()
    for setting in ("memory 3GB", "disk 3GB", "codec q8", "max_tokens 9", "temperature 0.5", "format code"):
        name = setting.split()[0]
        notebook.run(f"%amem config {setting}")
        assert magics.options() != first
        assert notebook.run(f'%amem config {name} ""').success
        assert notebook.text == f"{name} = {first[name]!r}"
        assert magics.options() == first
    notebook.run("%amem load --memory 2GB")
    notebook.run('%amem config memory ""')
    notebook.run("%amem load")
    assert notebook.engine.settings.memory == "1GB"
    assert "an empty name" in notebook.fails('%amem config "" 3')


def test_config_lists_and_sets(notebook):
    """The same settings as %config AmemMagics."""
    notebook.run("%amem config")
    assert "max_tokens = 512" in notebook.text
    notebook.run("%amem config format code")
    assert notebook.text == "format = 'code'"


def test_help_is_there_for_all_and_for_one(notebook):
    """%amem help, %amem help fork, %amem help %%agent or agent."""
    notebook.run("%amem help")
    assert "%amem fork NAME NEW" in notebook.text
    notebook.run("%amem help fork")
    assert "--at TURN" in notebook.text
    notebook.run("%amem help agent")
    assert "--max-tokens N" in notebook.text


def test_a_receipt_says_what_it_takes_and_then_what_was_found(notebook, planner):
    """The cost is shown before the work, and the figures take its place."""
    notebook.run("%amem fidelity planner --tokens 64")
    assert [64] == notebook.engine.receipts
    cost, figures = (sent["data"]["text/plain"] for sent in notebook.publisher.outputs[-2:])
    assert "planner: computes 336 tokens again at full precision and reads the 64 after them twice" in cost
    assert "about 12 s and 31 MB of K/V memory" in cost
    assert "63 predictions from its stored state (q4)" in figures
    assert "KL 0.0021 nats on average, p99 0.019" in figures
    assert "97.4%" in figures
    assert "perplexity +0.30%" in figures
    notebook.run("%amem fidelity planner")
    assert [64, 128] == notebook.engine.receipts


def test_a_receipt_that_cannot_be_is_one_line(notebook, planner):
    """An agent that is not there, a number that is none, an interrupt."""
    assert "no agent 'planer'" in notebook.fails("%amem fidelity planer")
    assert "at least 1" in notebook.fails("%amem fidelity planner --tokens 0")
    notebook.run("%agent interrupt-me Hello")
    assert "interrupt-me is as it was" in notebook.fails("%amem fidelity interrupt-me")
