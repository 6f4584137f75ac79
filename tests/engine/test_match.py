"""Prefix matching on text: a branch's own tokens take the place of others that say the same."""

from hypothesis import given, settings
from hypothesis import strategies as st

from amem.match import carry, n_common

# A vocabulary of letters and of pairs of letters: the same text has several forms in tokens. 0 to 2 are special.
SPECIAL = frozenset({0, 1, 2})
TEXTS = {0: "<s>", 1: "<u>", 2: "<e>", 3: "a", 4: "b", 5: "aa", 6: "ab", 7: "ba", 8: "bb"}
IDS = {text: id_ for id_, text in TEXTS.items()}
TOKENS = st.lists(st.sampled_from(sorted(TEXTS)), max_size=30)


def decode(ids):
    return "".join(TEXTS[id_] for id_ in ids)


def encode(text):
    """The longest token first, as merges do; special tokens before all else."""
    ids = []
    while text:
        size = 3 if text.startswith("<") else 2 if text[:2] in IDS else 1
        ids.append(IDS[text[:size]])
        text = text[size:]
    return ids


@given(wanted=TOKENS, stored=TOKENS)
@settings(max_examples=300)
def test_what_is_wanted_keeps_its_text_and_the_branch_its_tokens(wanted, stored):
    """Whatever the branch holds: the text is the wanted one, and what is reused is the branch's."""
    carried = carry(encode(decode(wanted)), stored, SPECIAL, decode)
    assert decode(wanted) == decode(carried.token_ids)
    assert stored[: carried.n_common] == carried.token_ids[: carried.n_common]
    assert carried.n_common == n_common(carried.token_ids, stored)


@given(stored=TOKENS, more=TOKENS)
@settings(max_examples=300)
def test_text_that_only_grew_after_an_end_of_turn_extends_the_branch(stored, more):
    """All of the branch's tokens are kept as they were generated, however the client's text would be cut."""
    branch = [*stored, 2]
    wanted = encode(decode(branch) + decode(more))
    carried = carry(wanted, branch, SPECIAL, decode)
    assert carried.extends
    assert branch == carried.token_ids[: len(branch)]


@given(stored=TOKENS, more=TOKENS)
@settings(max_examples=300)
def test_a_reply_without_its_end_extends_where_an_end_of_turn_follows(stored, more):
    """An interrupted reply has no terminator of its own; the template's comes after it."""
    wanted = encode(decode(stored) + "<e>" + decode(more))
    assert carry(wanted, stored, SPECIAL, decode).extends


@given(wanted=TOKENS, stored=TOKENS)
@settings(max_examples=300)
def test_no_seam_lies_where_tokens_would_merge(wanted, stored):
    """Between two special tokens stands either the branch's form or the tokenizer's, never a mixture of both."""
    canonical = encode(decode(wanted))
    carried = carry(canonical, stored, SPECIAL, decode)
    ours, theirs = pieces(canonical), pieces(stored)
    for piece in pieces(carried.token_ids):
        assert piece in ours or piece in theirs


def pieces(ids):
    """The runs of tokens between special ones."""
    found = [[]]
    for id_ in ids:
        if id_ in SPECIAL:
            found.append([])
        else:
            found[-1].append(id_)
    return found


def test_a_join_where_tokens_would_merge_is_made_by_the_tokenizer():
    """A branch that ends in "a", continued with "b" in the same message: "ab" is one token."""
    stored, wanted = [1, 3], encode("<u>ab<e>")
    carried = carry(wanted, stored, SPECIAL, decode)
    assert [1, 6, 2] == carried.token_ids
    assert 1 == carried.n_common
    assert not carried.extends


def test_generated_tokens_stay_as_they_were_generated():
    """Though the tokenizer would make others of the same text."""
    stored = [1, 3, 4, 2]
    assert [1, 3, 4, 2, 1, 6] == carry(encode("<u>ab<e><u>ab"), stored, SPECIAL, decode).token_ids
