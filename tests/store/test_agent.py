import numpy as np
import pytest

from amem.errors import InputError, UnknownTurn
from amem.store import NewTurn, Store
from tests.store.samples import OTHER, REALM, SPACE, check, equal, prepare, say, tensors


def test_a_turn_is_there_after_reopening(root):
    """Text, tokens, head and every bit of the payload outlive the process."""
    ids = np.arange(600)
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        turn = say(
            agent, None, ids, prompt="Plan 🚀", reply="Ja\0wohl", system="You plan.", settings={"temperature": 0.0},
            cell_id="c1", execution="e1",
        )  # fmt: skip
    with Store(root) as store:
        agent = store.open("planner", SPACE, create=False)
        assert {turn.id: turn} == agent.turns()
        assert turn.id == agent.head
        assert np.array_equal(ids, agent.path_tokens(turn.id, REALM))
        assert check(agent, ids) == 600
        assert store.reports == []


def test_the_longest_prefix_ends_at_a_group_or_at_a_snapshot(agent):
    """A prefix is cut at 64-token boundaries, except where a turn ended."""
    ids = np.arange(600)
    say(agent, None, ids)
    assert [check(agent, ids[:n]) for n in (0, 63, 100, 300, 599, 600, 601)] == [0, 0, 64, 256, 576, 600, 600]
    changed = ids.copy()
    changed[300] = 7
    assert check(agent, changed) == 256
    assert agent.find(REALM, ids, limit=130).n_tokens == 128


def test_a_short_history_is_found_by_its_snapshot_alone(agent):
    """A turn of fewer than 64 tokens has no block, and is reused all the same."""
    say(agent, None, np.arange(10))
    found = agent.find(REALM, np.arange(50))
    assert (found.n_tokens, found.n_block_tokens, found.blocks) == (10, 0, ())


def test_models_with_recurrent_state_match_only_at_snapshots(agent):
    """With exact, the latest turn's end that is a prefix is found, however much more the blocks cover."""
    first = say(agent, None, np.arange(100))
    say(agent, first.id, np.arange(100, 900))
    longer = np.arange(899)
    assert agent.find(REALM, longer).n_tokens == 896
    assert agent.find(REALM, longer, exact=True).n_tokens == 100
    assert agent.find(REALM, np.arange(901), exact=True).n_tokens == 900
    assert agent.find(REALM, np.arange(99), exact=True).n_tokens == 0


def test_another_model_never_matches(agent):
    """State of one fingerprint or codec is not found for another; the text is there for both."""
    turn = say(agent, None, np.arange(300))
    assert agent.find(OTHER, np.arange(300)).n_tokens == 0
    assert agent.path_tokens(turn.id, OTHER) is None
    assert agent.realization(turn.id, OTHER) is None
    assert agent.realms(turn.id) == [REALM]


def test_a_turn_is_realized_for_another_model(agent):
    """After a change of model the same turns get other tokens and blocks, beside the old ones."""
    first = say(agent, None, np.arange(300))
    second = say(agent, first.id, np.arange(300, 400))
    other = np.arange(1000, 1350)
    with pytest.raises(InputError, match="realize the turns before it first"):
        agent.realize(second.id, OTHER, other[280:], 350)
    for turn, (start, stop) in zip((first, second), ((0, 280), (280, 350)), strict=True):
        blocks, last, tail, snapshot = prepare(agent, other[:stop], OTHER)
        agent.realize(
            turn.id, OTHER, other[start:stop], stop, blocks=blocks, tail=tail, snapshot=snapshot, last_block=last
        )
    assert np.array_equal(other, agent.path_tokens(second.id, OTHER))
    assert check(agent, other, OTHER) == 350
    assert check(agent, np.arange(400)) == 400
    assert second.id == agent.head


def test_the_heads_path_goes_first(agent):
    """Of several blocks with the same tokens those on the preferred turn's path are found, else the newest."""
    ids = np.arange(300)
    turns = []
    for _ in range(3):
        block = agent.write_block(REALM, None, 0, ids[:256], tensors(ids, 0, 256))
        turns.append(agent.commit(NewTurn(None, "", "", "stop"), REALM, ids, 300, blocks=[block], last_block=block.id))
        assert block.id == agent.realization(turns[-1].id, REALM).last_block
    for turn in turns:
        expected = agent.realization(turn.id, REALM).last_block
        assert expected == agent.find(REALM, ids, prefer=turn.id).blocks[0].id
        agent.set_head(turn.id)
        assert expected == agent.find(REALM, ids).blocks[0].id
    agent.set_head(None)
    assert agent.realization(turns[-1].id, REALM).last_block == agent.find(REALM, ids).blocks[0].id


def test_turns_form_a_tree(agent):
    """Branches keep their order, and a path leads from the root to each turn."""
    root = say(agent, None, np.arange(10))
    left = say(agent, root.id, np.arange(5))
    right = say(agent, root.id, np.arange(7))
    leaf = say(agent, left.id, np.arange(3))
    assert [root.id] == agent.children(None)
    assert [left.id, right.id] == agent.children(root.id)
    assert [root.id, left.id, leaf.id] == agent.path(leaf.id)
    assert leaf.id == agent.head
    assert agent.realization(leaf.id, REALM).n_tokens == 18


def test_the_clock_does_not_order_turns(agent, monkeypatch):
    """A clock that was set back changes nothing but the recorded time."""
    first = say(agent, None, np.arange(10))
    monkeypatch.setattr("time.time", lambda: 1.0)
    second = say(agent, first.id, np.arange(10))
    assert second.created < first.created
    assert [first.id, second.id] == list(agent.turns())
    assert second.id == agent.head


def test_unknown_turns_are_refused(agent):
    """A head, a parent or a path that does not exist changes nothing."""
    for attempt in (
        lambda: agent.set_head(5), lambda: agent.path(5), lambda: agent.path_tokens(5, REALM), lambda: agent.turn(5),
        lambda: agent.commit(NewTurn(5, "", "", "stop"), REALM, [1], 1),
    ):  # fmt: skip
        with pytest.raises(UnknownTurn):
            attempt()
    assert agent.turns() == {}
    assert agent.head is None


def test_what_does_not_fit_together_is_refused(agent):
    """Tokens, blocks and snapshots of different histories are never saved as one, and a refusal leaves nothing."""
    ids = np.arange(300)
    block = agent.write_block(REALM, None, 0, ids[:256], tensors(ids, 0, 256))
    tail = agent.write_block(REALM, block.id, 256, ids[100:164], tensors(ids, 0, 64))
    snapshot = agent.write_snapshot(REALM, 301, 45, tensors(ids, 256, 300))
    turn = NewTurn(None, "", "", "stop")
    cases = [
        {"token_ids": ids, "n_tokens": 299},
        {"token_ids": ids + 1, "n_tokens": 300, "blocks": [block], "last_block": block.id},
        {"token_ids": ids[:200], "n_tokens": 200, "blocks": [block], "last_block": block.id},
        {"token_ids": ids, "n_tokens": 300, "last_block": "0" * 32},
        {"token_ids": ids, "n_tokens": 300, "blocks": [block], "tail": tail, "last_block": block.id},
        {"token_ids": ids, "n_tokens": 300, "blocks": [block], "snapshot": snapshot, "last_block": block.id},
        {"token_ids": [-1], "n_tokens": 1},
        {"token_ids": [2**31], "n_tokens": 1},
        {"token_ids": [0.5], "n_tokens": 1},
    ]
    for case in cases:
        with pytest.raises(InputError):
            agent.commit(turn, REALM, **case)
    with pytest.raises(InputError, match="surrogate"):
        agent.commit(NewTurn(None, "\ud800", "", "stop"), REALM, [1], 1)
    with pytest.raises(InputError, match="JSON"):
        agent.commit(NewTurn(None, "", "", "stop", settings={"x": object()}), REALM, [1], 1)
    assert agent.turns() == {}
    assert agent.n_blocks == 0
    assert agent.commit(turn, REALM, ids, 300, blocks=[block], last_block=block.id).id == 1


def test_blocks_of_a_cancelled_request_may_stay(agent):
    """Complete blocks can be kept as cache without a turn; what is discarded leaves no file."""
    ids = np.arange(600)
    first = agent.write_block(REALM, None, 0, ids[:256], tensors(ids, 0, 256))
    second = agent.write_block(REALM, first.id, 256, ids[256:512], tensors(ids, 256, 512))
    agent.discard([second])
    agent.keep([first])
    assert check(agent, ids) == 256
    assert len(list(agent.root.glob("*.safetensors"))) == 1


def test_every_dtype_and_shape_comes_back(agent):
    """restore(save(x)) == x for all dtypes, empty and zero-dimensional arrays, and arrays that are views."""
    given = {
        dtype: np.arange(24).reshape(2, 3, 4).astype(dtype)
        for dtype in ("bool", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8")
    }
    given |= {"empty": np.empty((0, 3), "f4"), "scalar": np.array(3.5), "view": np.arange(24).reshape(2, 3, 4).T}
    given |= {"nan": np.array([np.nan, -0.0], "f2"), 'quo"te\n': np.ones(3, "u1"), "odd": np.ones(1, "f8")}
    record = agent.write_snapshot(REALM, 0, 0, given)
    assert equal(given, agent.read(record))
    assert equal({"view": given["view"], "f2": given["f2"]}, agent.read(record, ["view", "f2"]))
    with pytest.raises(InputError, match="no tensor"):
        agent.read(record, ["missing"])
    big_endian = agent.read(agent.write_snapshot(REALM, 0, 0, {"x": np.arange(3, dtype=">i4")}))["x"]
    assert big_endian.tolist() == [0, 1, 2]
    for wrong in ({"x": np.zeros(1, "c8")}, {"x": [1]}, {"__metadata__": np.zeros(1)}):
        with pytest.raises(InputError):
            agent.write_snapshot(REALM, 0, 0, wrong)


def test_files_are_valid_safetensors(agent):
    """Any safetensors reader can read a block, and its metadata says what it is."""
    safetensors = pytest.importorskip("safetensors")
    ids = np.arange(64)
    record = agent.write_block(REALM, None, 0, ids, tensors(ids, 0, 64))
    with safetensors.safe_open(agent.root / f"{record.id}.safetensors", "numpy") as file:
        metadata = file.metadata()
        assert ("block", record.id, "0", "model-a", "k4v4") == tuple(
            metadata[key] for key in ("kind", "id", "start", "fingerprint", "codec")
        )
        assert equal(tensors(ids, 0, 64), {key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118


def test_misplaced_blocks_are_refused(agent):
    """A block has whole groups, starts at a multiple of 256, and has a parent unless it is the first."""
    for parent, start, n in (
        (None, 0, 63),
        (None, 0, 0),
        (None, 0, 320),
        (None, 64, 64),
        (None, 256, 64),
        ("x", 0, 64),
    ):
        with pytest.raises(InputError):
            agent.write_block(REALM, parent, start, np.arange(n), {})
    with pytest.raises(InputError):
        agent.write_snapshot(REALM, 100, 35, {})


def test_small_texts_about_an_agent(root):
    """Settings such as the system prompt are kept until they are removed."""
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        agent.set_meta("system", "You plan.")
        agent.set_meta("note", "x")
        agent.set_meta("note", None)
    with Store(root) as store:
        assert store.open("planner", SPACE).meta == {"system": "You plan."}
