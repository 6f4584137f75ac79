"""The magics in a real shell: what a cell sends, shows, returns, and refuses."""

from __future__ import annotations

import pytest

import amem_jupyter
from amem.errors import ContextOverflow, InputError
from tests.jupyter.conftest import Notebook


def card_of(notebook):
    """The one output that holds a reply's metrics."""
    (card,) = [message for message in notebook.shown if "amem" in message["metadata"]]
    return card


def test_a_cell_sends_its_body_and_shows_the_reply_in_one_card(notebook, script):
    """The whole way: a message goes out as it is, and a card comes back as HTML and as text."""
    script.enqueue("First ", "**plan**.")
    result = notebook.run("%%agent planner\nPlan a launch.\n")
    assert result.success
    assert script.asked[0]["message"] == "Plan a launch."
    card = card_of(notebook)
    assert "<strong>plan</strong>" in card["data"]["text/html"]
    assert "First **plan**." in card["data"]["text/plain"]
    assert set(card["data"]) == {"text/html", "text/plain"}


def test_the_metrics_are_in_the_outputs_metadata(notebook):
    """Flat, under one key, as plain values."""
    notebook.run("%%agent planner\nHi")
    found = card_of(notebook)["metadata"]["amem"]
    assert found["agent"] == "planner"
    assert found["match"] == "EXTEND"
    assert found["ttft_ms"] == 180.5
    assert found["turn"] >= 1
    assert found["finish_reason"] == "stop"
    assert "blocks" not in found


BODIES = [
    "Use {braces} and $HOME and {{}} and 100% {100}",
    "%%agent in a body, %amem too, # and a comment",
    "  indented\n\n\tand spaced  ",
    "'quotes' \"and\" C:\\paths\\n --raw --max-tokens 5",
    'JSON: {"a": {"b": [1, 2]}}',
    "ünïcode → 猫 🐈",
]


@pytest.mark.parametrize("body", BODIES)
def test_the_body_is_sent_as_it_is(notebook, script, body):
    """No magic, shell or quoting character of it means anything."""
    assert notebook.run(f"%%agent planner\n{body}\n").success
    assert script.asked[0]["message"] == body


def test_braces_take_values_from_the_notebook(notebook, script):
    """{{name}}, once; --raw leaves them."""
    notebook.run("topic = '{{secret}}'\nn = 2")
    notebook.run("%%agent planner\n{{n + 1}} things about {{topic}}")
    notebook.run("%%agent planner --raw\n{{n}}")
    notebook.run("%agent planner about {{n}} $n {n}")
    assert [asked["message"] for asked in script.asked] == ["3 things about {{secret}}", "{{n}}", "about 2 $n {n}"]


def test_an_earlier_reply_can_be_quoted(notebook, script):
    """A reply in braces is its text."""
    script.enqueue("Step one.")
    notebook.run("%%agent planner --into plan\nPlan.")
    notebook.run("%%agent critic\nJudge: {{plan}}")
    assert script.asked[1]["message"] == "Judge: Step one."


def test_an_agents_last_reply_can_be_anchored(notebook, script):
    """By its name in braces, or quoted before the text; a variable of that name goes first."""
    script.enqueue("Step one.\nStep two.")
    notebook.run("%%agent planner\nPlan.")
    notebook.run("%%agent critic\nJudge: {{planner}}")
    notebook.run("%%agent critic --from planner --from critic\nWhich?")
    notebook.run("planner = 'mine'")
    notebook.run("%agent critic {{planner}}")
    assert [asked["message"] for asked in script.asked[1:]] == [
        "Judge: Step one.\nStep two.",
        "planner said:\n\n> Step one.\n> Step two.\n\ncritic said:\n\n> You said: Judge: Step one.\n> Step two.\n\nWhich?",
        "mine",
    ]


def test_an_anchor_waits_for_a_reply_in_the_background(notebook, script):
    """It is the last reply that is meant."""
    script.enqueue("Step ", "one.", delay_s=0.1)
    notebook.run("%%agent planner --background\nPlan.")
    notebook.run("%%agent critic\nJudge: {{planner}}")
    assert script.asked[1]["message"] == "Judge: Step one."


def test_an_agent_without_replies_cannot_be_anchored(notebook, script):
    """It says so, and nothing is sent; neither is anything to an agent that is not there."""
    notebook.run("%amem load")
    notebook.engine.agent("planner")
    assert "planner has not said anything yet" in notebook.fails("%%agent critic\nJudge: {{planner}}")
    assert "there is no agent of that name" in notebook.fails("%%agent critic --from nobody\nJudge.")
    assert "no variable or agent nobody" in notebook.fails("%%agent critic\nJudge: {{nobody}}")
    assert [] == script.asked
    assert ["planner"] == notebook.engine.agents()


def test_a_recorded_reply_can_be_asked_for(notebook, script):
    """--cached goes to the engine."""
    notebook.run("%%agent planner --cached\nHi")
    notebook.run("%%agent planner\nHi")
    notebook.run("%%agents planner critic --cached\nHi")
    assert [asked["cached"] for asked in script.asked] == [True, False, True, True]


def test_options_reach_the_engine(notebook, script):
    """All of them, under the engine's names."""
    notebook.run(
        "%%agent planner --max-tokens 7 --temperature 0.5 --top-p 0.9 --seed 3 --stop END --stop '\\n' "
        "--system 'You plan.' --append\nHi"
    )
    asked = script.asked[0]
    wanted = {
        "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ("END", "\n"), "system": "You plan.",
        "append": True,
    }  # fmt: skip
    assert {name: asked[name] for name in wanted} == wanted


def test_without_options_the_defaults_of_the_design_hold(notebook, script):
    """Greedy, 512 tokens, a seed that the engine derives."""
    notebook.run("%%agent planner\nHi")
    wanted = {
        "max_tokens": 512,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": None,
        "stop": (),
        "system": None,
        "append": False,
    }
    assert {name: script.asked[0][name] for name in wanted} == wanted


def test_the_defaults_can_be_configured(notebook, script):
    """By %config and by %amem config, and a cell's own option wins."""
    notebook.run("%config AmemMagics.max_tokens = 9")
    notebook.run("%amem config temperature 0.25")
    notebook.run("%%agent planner --max-tokens 3\nHi")
    notebook.run("%%agent planner\nHi")
    assert [(asked["max_tokens"], asked["temperature"]) for asked in script.asked] == [(3, 0.25), (9, 0.25)]


def test_the_reply_is_the_cells_value_and_is_shown_once(notebook, script):
    """In _ and in the variable; its card comes again only when another cell shows it."""
    script.enqueue("Yes.")
    result = notebook.run("%%agent planner --into answer\nReally?")
    assert result.result.text == "Yes."
    assert len([message for message in notebook.shown if "Yes." in message["data"]["text/plain"]]) == 1
    notebook.run("(str(_), answer.text, answer.metrics.agent, answer.finish_reason, answer is _)")
    assert notebook.shell.user_ns["_"] == ("Yes.", "Yes.", "planner", "stop", True)
    data, metadata = notebook.shell.display_formatter.format(notebook.shell.user_ns["answer"])
    assert "Yes." in data["text/html"]
    assert metadata["amem"]["agent"] == "planner"


def test_a_line_gives_its_reply_to_a_variable(notebook, script):
    """X = %agent NAME TEXT."""
    script.enqueue("Four.")
    notebook.run("x = %agent planner What's 2 + 2?")
    assert script.asked[0]["message"] == "What's 2 + 2?"
    assert str(notebook.shell.user_ns["x"]) == "Four."


def test_a_dry_run_sends_nothing_and_loads_nothing(notebook, script):
    """But shows the text as it would go out."""
    notebook.run("topic = 'cats'")
    notebook.run("%%agent planner --dry-run --max-tokens 5\nAbout {{topic}}")
    assert "About cats" in notebook.text
    assert "max_tokens 5" in notebook.text
    assert script.asked == []
    assert notebook.engine is None


def test_several_agents_answer_side_by_side(notebook, script):
    """One message, one output, one reply each."""
    script.enqueue("I plan.")
    script.enqueue("I doubt.")
    result = notebook.run("%%agents planner critic --max-tokens 5 --into both\nYour view?")
    assert {name: str(found) for name, found in result.result.items()} == {"planner": "I plan.", "critic": "I doubt."}
    assert [asked["max_tokens"] for asked in script.asked] == [5, 5]
    assert notebook.shell.user_ns["both"] is result.result
    card = card_of(notebook)
    assert [found["agent"] for found in card["metadata"]["amem"]["agents"]] == ["planner", "critic"]


def test_the_running_cell_is_told_to_the_engine(notebook, script):
    """Its id, and one token for each execution of it."""
    notebook.run("%agent planner one\n%agent planner two", cell_id="cell-7")
    notebook.run("%agent planner three", cell_id="cell-7")
    notebook.run("%agent planner four")
    ids = [asked["cell_id"] for asked in script.asked]
    first, second, third, fourth = [asked["execution"] for asked in script.asked]
    assert ids == ["cell-7", "cell-7", "cell-7", None]
    assert first == second
    assert len({second, third, fourth}) == 3


def test_a_front_end_without_cell_ids_is_named_once(notebook):
    """So that nobody wonders why a cell that runs again adds a turn."""
    notebook.run("%agent planner one")
    assert "no cell ids" in notebook.text
    notebook.run("%agent planner two")
    assert "no cell ids" not in notebook.text


REFUSED = [
    ("%%agent\nHi", "no NAME. Usage: %%agent NAME"),
    ("%%agent planner\n", "the cell body is empty"),
    ("%%agent planner\n   \n", "there is no message"),
    ("%agent planner", "there is no message: write it after the name"),
    ("%%agent planner --max-tokens 0\nHi", "--max-tokens must be a whole number of at least 1"),
    ("%%agent planner --max-tokns 5\nHi", "did you mean --max-tokens?"),
    ("%%agent planner\n{{nobody}}", "you have no variable or agent nobody"),
    ("%%agent planner --system @nowhere.txt\nHi", "No such file"),
    ("%amem frob", "%amem has no command 'frob'"),
    ("%amem map planer", "no agent 'planer' in this space; did you mean planner?"),
    ("%amem rewind planner 5", "cannot be taken back"),
    ("%amem checkout planner 99", "has no turn 99"),
    ("%amem fork planner planner", "there is an agent 'planner' already"),
    ("%amem delete planner", "add --yes to do it"),
    ("%amem load missing/model", "there is no model 'missing/model'"),
    ("%amem config max_tokns", "did you mean max_tokens?"),
    ("%amem config max_tokens many", "max_tokens cannot be 'many'"),
    ("%amem help forkk", "did you mean fork?"),
]


@pytest.mark.parametrize(("source", "says"), REFUSED)
def test_bad_input_is_one_clear_line_and_changes_nothing(notebook, script, source, says):
    """No traceback of ours, and the agent as it was."""
    notebook.run("%agent planner Hello")
    before = notebook.engine.agent("planner").tree()
    seen = notebook.fails(source)
    assert seen.startswith("UsageError: ")
    assert says in seen
    assert len(seen.strip().splitlines()) == 1
    assert notebook.engine.agent("planner").tree() == before
    assert notebook.engine.agents() == ["planner"]


@pytest.mark.parametrize("error", [InputError("Not like this."), ContextOverflow("Too long: rewind it.")])
def test_what_the_engine_refuses_is_one_line_too(notebook, script, error):
    """Its own words, no traceback."""
    script.enqueue(error=error)
    assert notebook.fails("%%agent planner\nHi").strip() == f"UsageError: {error}"


def test_a_defect_keeps_its_traceback(notebook, script):
    """Only what was raised on purpose is shortened."""
    script.enqueue("a", error=RuntimeError("broken"), error_at=0)
    assert "Traceback" in notebook.fails("%%agent planner\nHi")


def test_an_interrupt_leaves_the_agent_and_is_raised_on(notebook, script):
    """In mid-stream: the card says so, the turn is not there, the kernel sees a KeyboardInterrupt."""
    notebook.run("%agent planner Hello")
    before = notebook.engine.agent("planner").tree()
    script.enqueue("This ", "is ", "cut", error=KeyboardInterrupt(), error_at=2)
    seen = notebook.fails("%%agent planner\nGo on")
    assert "KeyboardInterrupt: interrupted; planner is as it was before" in seen
    assert "Traceback" not in seen
    assert "interrupted; planner is as it was before" in notebook.text
    assert notebook.engine.agent("planner").tree() == before


def test_an_interrupt_while_the_card_is_drawn_cancels_the_request(notebook, script, monkeypatch):
    """The stream is closed at once, not when it is collected."""
    from amem_jupyter import live

    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(live, "live_card", interrupted)
    script.enqueue("a", "b")
    result = notebook.run("%%agent planner\nHi")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert notebook.engine.n_cancelled + len(notebook.engine.agent("planner").tree()) <= 1
    assert notebook.engine.agent("planner").tree() == []


def test_a_terminal_gets_text_as_it_comes(script, shell, capsys):
    """No kernel, no page: the reply is written, then what it cost."""
    amem_jupyter.load_ipython_extension(shell)
    script.enqueue("One, ", "two.")
    try:
        Notebook(shell, shell.display_pub, capsys)
        shell.run_cell("%agent planner Count.")
        written = capsys.readouterr().out
    finally:
        amem_jupyter.unload_ipython_extension(shell)
    assert written.count("One, two.") == 1
    assert "TTFT 180 ms" in written
