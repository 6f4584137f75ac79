"""A reply's text arrives piece by piece, and ends before the first stop string."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import NaiveStreamingDetokenizer, TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

from amem.errors import InputError
from amem.model.reply import ReplyText, StopStrings
from tests.tiny import write_tiny_tokenizer

EOS = 2
LETTERS = st.text("abc", max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")), eos_token_ids=EOS)


@pytest.fixture(scope="session", params=["byte-level", "naive"])
def either_tokenizer(request, tokenizer):
    """One whose detokenizer works byte by byte, and one with mlx-lm's general detokenizer."""
    if request.param == "byte-level":
        return tokenizer
    return TokenizerWrapper(tokenizer._tokenizer, NaiveStreamingDetokenizer, eos_token_ids=[EOS])


def first_cut(text, stops):
    """Where the stop string that is complete first begins, by trying every end."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_streamed_text_is_the_whole_text_cut_at_the_first_stop(pieces, stops):
    """However the text is cut into pieces."""
    strings = StopStrings(stops)
    whole = "".join(pieces)
    cut = first_cut(whole, stops)

    streamed = "".join([strings.add(piece) for piece in pieces] + [strings.flush()])

    assert streamed == whole[:cut]
    assert (strings.found is not None) == (cut is not None)


@given(pieces=st.lists(LETTERS, max_size=8), stops=STOPS)
def test_no_more_is_held_back_than_could_be_a_stop(pieces, stops):
    """What is held back is a beginning of a stop string, so text without any streams at once."""
    strings = StopStrings(stops)
    given_out = whole = ""
    for piece in pieces:
        whole += piece
        given_out += strings.add(piece)
        held = whole[len(given_out) :]
        assert strings.found or held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_an_empty_stop_string_is_refused():
    """It would end every reply at once."""
    with pytest.raises(InputError, match="stop string is empty"):
        StopStrings(["ok", ""])


def test_text_streams_and_ends_without_the_end_token(tokenizer):
    """The end of turn is counted, but is no text."""
    ids = [*tokenizer.encode("The plan is ready.", add_special_tokens=False), EOS]
    reply = ReplyText(tokenizer, {EOS})

    streamed = [reply.add(id_) for id_ in ids]
    streamed.append(reply.finish())

    assert "".join(streamed) == reply.text == "The plan is ready."
    assert len([piece for piece in streamed if piece]) > 3
    assert reply.ended
    assert not reply.stopped
    assert reply.n_kept == len(ids)


def test_characters_of_several_tokens_arrive_whole(either_tokenizer):
    """No replacement characters in between."""
    text = "naïve 日本語 🙂 end"
    reply = ReplyText(either_tokenizer, {EOS})

    streamed = [reply.add(id_) for id_ in either_tokenizer.encode(text, add_special_tokens=False)]
    streamed.append(reply.finish())

    assert "".join(streamed) == text
    assert not any("\ufffd" in piece for piece in streamed)


def test_a_stop_string_within_tokens_cuts_text_and_tokens(either_tokenizer):
    """Tokens up to the stop string are kept; what one that reaches into it says before it is in other tokens."""
    ids = either_tokenizer.encode("one two STOP three", add_special_tokens=False)
    reply = ReplyText(either_tokenizer, {EOS}, stops=["STOP"])

    fed = list(itertools.takewhile(lambda _: not reply.stopped, (reply.add(id_) for id_ in ids)))
    reply.finish()

    assert reply.text == "one two "
    assert reply.n_kept <= len(fed) + 1 < len(ids)
    assert either_tokenizer.decode([*ids[: reply.n_kept], *reply.tail_ids]) == "one two "


def test_after_the_stop_nothing_is_added(tokenizer):
    """A caller may be a token late."""
    reply = ReplyText(tokenizer, {EOS}, stops=["b"])
    for id_ in tokenizer.encode("a b c", add_special_tokens=False):
        reply.add(id_)

    assert reply.finish() == ""
    assert reply.text == "a "


def test_held_back_text_comes_at_the_end(tokenizer):
    """The beginning of a stop string that is never completed is text after all."""
    reply = ReplyText(tokenizer, {EOS}, stops=["STOP"])
    streamed = "".join(reply.add(id_) for id_ in tokenizer.encode("go ST", add_special_tokens=False))

    assert streamed == "go "
    assert reply.finish() == "ST"
    assert reply.text == "go ST"
    assert not reply.stopped


@given(text=st.text("ab é🙂", max_size=20), stops=st.lists(st.text("ab é", min_size=1, max_size=3), max_size=2))
def test_kept_tokens_are_the_longest_list_before_the_stop(tokenizers, text, stops):
    """Their text is a beginning of the reply's, and no token that lies before the stop is lost but for spaces."""
    tokenizer = tokenizers()
    ids = tokenizer.encode(f"x{text}", add_special_tokens=False)
    reply = ReplyText(tokenizer, {EOS}, stops=stops)
    for id_ in ids:
        reply.add(id_)
        if reply.stopped:
            break
    reply.finish()

    cut = first_cut(f"x{text}", stops)
    kept = tokenizer.decode(ids[: reply.n_kept])
    assert reply.text == f"x{text}"[:cut]
    assert reply.text.startswith(kept)
    if not reply.stopped:
        assert reply.tail_ids == []
    else:
        assert tokenizer.decode([*ids[: reply.n_kept], *reply.tail_ids]) == reply.text
        missing = next(
            (n for n in range(reply.n_kept + 1, len(ids)) if reply.text.startswith(tokenizer.decode(ids[:n]))), None
        )
        assert missing is None or not reply.text[len(kept) :].strip()


@pytest.fixture(scope="session")
def tokenizers(tokenizer):
    """The tokenizer for Hypothesis, which wants no fixture that is made anew."""
    return functools.cache(lambda: tokenizer)
