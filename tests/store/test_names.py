"""Which names work, and who can read what."""

import os
import stat

import numpy as np
import pytest

from amem.errors import InputError
from amem.store import Store
from tests.store.samples import REALM, SPACE, check, say

IDS = np.arange(900)


@pytest.mark.parametrize(
    "name",
    [
        "a", "ü", "日本語", "🤖👩‍🚀", "..", ".", "/", "../../etc/passwd", "a/b", "CON", "NUL", "C:\\x", "~", "-rf", " a ", "\u200d🤖", "%s", "'; DROP",
        "x" * 128, "🚀" * 128, "index.sqlite3",
    ],
)  # fmt: skip
def test_any_name_of_one_line_works_and_reaches_no_path(root, name):
    """The folder is a random key, whatever the name; and the name comes back as it was given."""
    with Store(root) as store:
        agent = store.open(name, name)
        say(agent, None, IDS[:10])
        assert len(agent.root.name) == 32
        assert root / "agents" == agent.root.parent
    with Store(root) as store:
        assert [(name, name)] == [(entry.name, entry.space) for entry in store.agents()]
        assert check(store.open(name, name, create=False), IDS[:10]) == 10
        store.delete(name, name)
        assert store.agents() == []


@pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", "a\0b", "\t", "\x7f", "\ud800", "a\u2028b", "\r", None, 5,
                                  " ", "\u00a0\u3000", "\u200b"])  # fmt: skip
def test_other_names_are_refused(store, name):
    """Empty, invisible, too long, more than a line, control or half characters: refused before anything is made."""
    with pytest.raises(InputError):
        store.open(name, SPACE)
    assert store.agents() == []


def test_the_same_name_in_two_spaces(store):
    """Two notebooks that both say planner do not meet."""
    first, second = store.open("planner", "one.ipynb"), store.open("planner", "two.ipynb")
    say(first, None, IDS)
    assert second.find(REALM, IDS).n_tokens == 0
    assert [entry.space for entry in store.agents("one.ipynb")] == ["one.ipynb"]


@pytest.mark.parametrize(("typed", "other"), [("é", "e\u0301"), ("Å", "\u212b"), ("한", "\u1112\u1161\u11ab")])
def test_names_that_look_the_same_are_the_same(root, typed, other):
    """A keyboard and a file system may give an accent as a character of its own: that is no other agent, nor space."""
    assert typed != other
    with Store(root) as store:
        agent = store.open(other, f"{other}.ipynb")
        say(agent, None, IDS)
        assert (typed, f"{typed}.ipynb") == (agent.name, agent.space)
        assert agent is store.opened(store.agents(f"{other}.ipynb")[0].key)
        agent.close()
    with Store(root) as store:
        agent = store.open(typed, f"{typed}.ipynb", create=False)
        assert check(agent, IDS) == 900
        with pytest.raises(InputError, match="already"):
            agent.fork(other, f"{other}.ipynb")
        assert store.has(other, f"{other}.ipynb")
        store.delete(other, f"{typed}.ipynb")
        assert store.agents() == []


def test_an_unknown_agent_comes_with_a_hint(store):
    """Opening without create says which agent may have been meant."""
    store.open("planner", SPACE)
    with pytest.raises(InputError, match="did you mean 'planner'"):
        store.open("planer", SPACE, create=False)
    with pytest.raises(InputError, match="none yet"):
        store.delete("x", "empty")


def test_only_the_owner_can_read(root):
    """Folders are 0700, files 0600, whatever the umask."""
    before = os.umask(0)
    try:
        with Store(root) as store:
            say(store.open("planner", SPACE), None, IDS)
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    finally:
        os.umask(before)
    assert {0o700} == {mode for path, mode in modes.items() if path.is_dir()}
    assert {0o600} == {mode for path, mode in modes.items() if path.is_file()}
