"""Fingerprints of a conversation's beginnings."""

from hypothesis import given
from hypothesis import strategies as st

from amem.model.said import Said
from amem.serve.marks import PIECE, marks_of, marks_of_text

TEXTS = st.text(alphabet="ab\0 ", max_size=6).map(lambda text: text * 60)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXTS}), max_size=5
)


def said(text):
    return Said(text.strip(), text.strip(), "", text.strip(), ())


@given(messages=MESSAGES, more=MESSAGES)
def test_the_marks_of_a_beginning_are_a_beginning_of_the_marks(messages, more):
    """So that the longest match is found by walking on."""
    short, long = marks_of(messages, [], said), marks_of([*messages, *more], [], said)
    assert short == long[: len(short)]


@given(one=MESSAGES, other=MESSAGES)
def test_conversations_have_the_same_last_mark_only_if_they_say_the_same(one, other):
    """Roles, texts and where they end; white space around a reply does not count."""

    def plain(messages):
        return [(m["role"], m["content"].strip() if m["role"] == "assistant" else m["content"]) for m in messages]

    marks, others = marks_of(one, [], said), marks_of(other, [], said)
    assert (marks == others) == (plain(one) == plain(other))
    if one and other:
        assert (marks[-1].digest == others[-1].digest) == (plain(one) == plain(other))


def test_tools_and_bare_texts_are_conversations_of_their_own():
    """They render otherwise from the start."""
    messages = [{"role": "user", "content": "x"}]
    tool = {"type": "function", "function": {"name": "weather"}}
    roots = [marks_of(messages, [], said), marks_of(messages, [tool], said), marks_of_text("x")]
    assert 3 == len({marks[0].digest for marks in roots})


@given(text=st.text(min_size=1, max_size=4).map(lambda text: text * 200), more=st.text(max_size=300))
def test_a_longer_text_has_all_whole_pieces_of_a_shorter_one(text, more):
    """At steps of the size that can be reused."""
    short, long = marks_of_text(text), marks_of_text(text + more)
    n = len(text) // PIECE
    assert short[:n] == long[:n]
    assert [PIECE * (i + 1) for i in range(n)] == [mark.n_chars for mark in short[:n]]
    assert len(text) == short[-1].n_chars
