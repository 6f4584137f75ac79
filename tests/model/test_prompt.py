"""Conversations become tokens by the model's own template, appended turn by turn."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer

from amem.errors import InputError
from amem.model.prompt import Prompter
from tests.templates import (
    BOS_AND_TRIM,
    NO_REPLIES,
    NO_SYSTEM,
    REFUSES_REPLIES,
    SYSTEM_IGNORED,
    SYSTEM_IN_USER,
    THINKING,
    TWO_ENDS,
    WITH_DEFAULT_SYSTEM,
)
from tests.tiny import CHATML, write_tiny_tokenizer

APPENDING = {"chatml": CHATML, "default system": WITH_DEFAULT_SYSTEM, "bos": BOS_AND_TRIM, "no system": NO_SYSTEM}

EOS = 2
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Z")), min_size=1, max_size=20)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory):
    """A tokenizer for a template, by way of a folder, as a model's is."""

    @functools.cache
    def make(template, extra=()):
        folder = tmp_path_factory.mktemp("tokenizer")
        write_tiny_tokenizer(folder, template, additional_special_tokens=list(extra))
        return load_tokenizer(folder, eos_token_ids=EOS)

    return make


@pytest.fixture
def prompter(tokenizers):
    def make(template, extra=()):
        return Prompter(tokenizers(template, extra), {EOS})

    return make


@pytest.fixture
def text_of(tokenizers):
    return lambda ids: tokenizers(CHATML).decode(ids)


def test_the_first_turn(prompter, text_of):
    """System, user, and the beginning of the reply."""
    ids = prompter(CHATML).first("Be brief.", "Hello")

    assert text_of(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_templates_own_system_text(prompter, text_of):
    """A template may put one in where none is given, at the start alone."""
    prompter = prompter(WITH_DEFAULT_SYSTEM)

    assert text_of(prompter.first(None, "Hello")).startswith("<|im_start|>system\nBe kind.")
    assert "Be kind" not in text_of(prompter.first("Be brief.", "Hello"))
    assert "system" not in text_of(prompter.next("Hello", last_id=EOS))


@pytest.mark.parametrize("last_id", [2, 77, None])
def test_a_following_turn_closes_the_reply_once(prompter, text_of, last_id):
    """A reply that was cut off gets the end of turn that it lacks; another has it already."""
    closing = "" if last_id == EOS else "<|im_end|>"

    ids = prompter(CHATML).next("More", last_id=last_id)

    assert text_of(ids) == f"{closing}\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", APPENDING)
@given(messages=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3), last=TEXTS)
@settings(max_examples=25, deadline=None)
def test_appended_turns_equal_the_whole_conversation(tokenizers, name, messages, last):
    """Turn by turn or rendered at once: the same tokens, with one BOS at most."""
    tokenizer = tokenizers(APPENDING[name])
    prompter = Prompter(tokenizer, {EOS})
    ids, conversation = [], []
    for message, reply in messages:
        ids += prompter.next(message, last_id=EOS) if ids else prompter.first(None, message)
        ids += [*tokenizer.encode(reply, add_special_tokens=False), EOS]
        conversation += [{"role": "user", "content": message}, {"role": "assistant", "content": reply}]
    ids += prompter.next(last, last_id=EOS)
    conversation.append({"role": "user", "content": last})

    assert ids == prompter.history(conversation)
    assert tokenizer.decode(ids) == prompter.render(conversation)


@given(message=st.text(max_size=40).filter(str.strip))
@settings(max_examples=50, deadline=None)
def test_any_message_is_in_its_turn_unchanged(tokenizers, message):
    """Whatever the user writes, braces and sentinels included, arrives as it is."""
    tokenizer = tokenizers(CHATML)
    prompter = Prompter(tokenizer, {EOS})

    assert tokenizer.decode(prompter.next(message, last_id=None)) == (
        f"<|im_end|>\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_message_may_hold_the_sentinel(prompter, text_of):
    """The word that stands for the reply is chosen so that the message does not hold it."""
    ids = prompter(CHATML).next("Qz0xReplyx0zQ and Qz1xReplyx1zQ", last_id=EOS)

    assert text_of(ids).startswith("\n<|im_start|>user\nQz0xReplyx0zQ and Qz1xReplyx1zQ<|im_end|>")


def test_no_bos_in_mid_stream(prompter, text_of):
    """What a template writes at the start of a conversation is not written again."""
    prompter = prompter(BOS_AND_TRIM)

    assert text_of(prompter.first(None, " Hi ")) == (
        "<|endoftext|><|im_start|>user\n\nHi<|im_end|><|im_start|>assistant\n\n"
    )
    assert 0 not in prompter.next("More", last_id=EOS)


@pytest.mark.parametrize("template", [NO_SYSTEM, SYSTEM_IGNORED])
def test_a_template_without_a_system_role(prompter, template):
    """It is an error only when a system text is given, whether the template refuses it or drops it."""
    prompter = prompter(template)

    with pytest.raises(InputError, match="no place for a system text"):
        prompter.first("Be brief.", "Hello")
    assert prompter.first(None, "Hello")
    assert prompter.next("More", last_id=EOS)


def test_a_system_text_may_go_into_the_first_message(prompter, text_of):
    """Some templates fold it into the user's first message; later turns have none, and close with their space."""
    prompter = prompter(SYSTEM_IN_USER)

    assert text_of(prompter.first("Be brief.", "Hello")) == "<|endoftext|>[INST] Be brief.\n\nHello [/INST]"
    assert text_of(prompter.next("More", last_id=EOS)) == "<|endoftext|>[INST] More [/INST]"
    assert text_of(prompter.next("More", last_id=77)) == " <|im_end|><|endoftext|>[INST] More [/INST]"


def test_templates_that_drop_thoughts(prompter, text_of):
    """A reply stays as it was generated, thoughts and all; only what follows it is rendered."""
    prompter = prompter(THINKING)

    ids = prompter.next("More", last_id=EOS)

    assert text_of(ids) == "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_templates_with_two_ends_of_turn(prompter, tokenizers):
    """The token that stands for the end of turn inside a conversation is not put after the end of turn."""
    extra = ("<|msg|>", "<|end|>")
    prompter, tokenizer = prompter(TWO_ENDS, extra), tokenizers(TWO_ENDS, extra)

    assert tokenizer.decode(prompter.next("More", last_id=EOS)) == (
        "<|im_start|>user<|msg|>More<|end|><|im_start|>assistant"
    )
    assert tokenizer.decode(prompter.next("More", last_id=77)).startswith("<|end|><|im_start|>user")


@pytest.mark.parametrize(("template", "turn"), [(NO_REPLIES, "Q: More\nA:"), (REFUSES_REPLIES, "More")])
def test_templates_without_replies(prompter, text_of, template, turn):
    """The message is rendered as a first one, after an end of turn."""
    prompter = prompter(template)

    assert text_of(prompter.next("More", last_id=77)).removeprefix("<|im_end|>").removeprefix("<|endoftext|>") == turn
    assert prompter.next("More", last_id=EOS).count(EOS) == 0


def test_a_model_without_a_template(prompter, text_of):
    """Base models get a plain form."""
    prompter = prompter(None)

    assert text_of(prompter.first("Facts.", "Hello")) == "Facts.\n\nUser: Hello\n\nAssistant:"
    assert text_of(prompter.first(None, "Hello")) == "User: Hello\n\nAssistant:"
    assert text_of(prompter.next("More", last_id=77)) == "\n\nUser: More\n\nAssistant:"
    assert (
        prompter.render(
            [
                {"role": "system", "content": "Facts."},
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hi."},
                {"role": "user", "content": "More"},
            ]
        )
        == "Facts.\n\nUser: Hello\n\nAssistant: Hi.\n\nUser: More\n\nAssistant:"
    )


@pytest.mark.parametrize("message", ["", "  \n"])
def test_an_empty_message(prompter, message):
    """There is nothing to answer."""
    with pytest.raises(InputError, match="message is empty"):
        prompter(CHATML).first(None, message)
    with pytest.raises(InputError, match="message is empty"):
        prompter(CHATML).next(message, last_id=EOS)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "no messages"),
        ([{"role": "critic", "content": "x"}], "Message 0 has the role 'critic'"),
        ([{"content": "x"}], "Message 0 has the role None"),
        ([{"role": "user", "content": ["x"]}], "Message 0 has no text"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "last message must be the user's"),
        ([{"role": "user", "content": " "}], "message is empty"),
        ([{"role": "user", "content": "x"}] * 2, "template refuses these messages: Roles must alternate"),
    ],
)
def test_histories_that_are_refused(prompter, messages, error):
    """Each with its reason."""
    with pytest.raises(InputError, match=error):
        prompter(NO_SYSTEM).history(messages)
