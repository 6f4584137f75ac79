"""What stored state costs, measured: the figures themselves, the choice of auto, the command."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from amem.cli import main
from amem.errors import InputError, MemoryBudgetError
from amem.fidelity import choice, report
from amem.fidelity.choice import CodecChoice, Measured, choose_codec
from amem.fidelity.compare import compare, greedy_divergence
from amem.fidelity.receipt import AgentReplay
from amem.fidelity.replay import Replay, exact_layout
from amem.fidelity.texts import SHORT, texts_at_hand
from amem.kv.codec import codec_for
from amem.kv.sequence import StateLayout
from amem.model.load import load
from amem.model.spec import CODECS, LayerKind, LayerSpec, ModelCacheSpec
from amem.run.checked import checked_spec
from amem.store import AgentStore


class Rows:
    """Gives the next rows of logits that were made up before, whatever it is fed."""

    def __init__(self, logits):
        self.logits = logits
        self.fed = []

    def feed(self, token_ids):
        self.fed += token_ids
        return self.logits[len(self.fed) - len(token_ids) : len(self.fed)]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """What is remembered of models, for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tiny(tiny_model_path):
    loaded = load(tiny_model_path)
    return loaded, checked_spec(loaded.model, loaded.fingerprint)


def stored(tiny, codec, **options):
    loaded, spec = tiny
    layout = exact_layout(spec) if codec == "exact" else StateLayout(spec, codec_for(codec, spec))
    return Replay.fresh(loaded.model, layout, **options)


def ids_of(tiny, n_tokens):
    return tiny[0].tokenizer.encode(SHORT)[:n_tokens]


@settings(deadline=None, max_examples=25)
@given(n=st.integers(1, 300), vocabulary=st.integers(2, 40), seed=st.integers(0, 99), scale=st.floats(0.1, 30))
def test_every_figure_is_what_its_formula_says(n, vocabulary, seed, scale):
    """KL, likelihoods and agreement of each prediction, from probabilities in double precision; the last token is not fed."""
    rng = np.random.default_rng(seed)
    one, other = (rng.normal(size=(n, vocabulary)).astype(np.float32) * np.float32(scale) for _ in range(2))
    ids = rng.integers(0, vocabulary, n + 1).tolist()
    p, q = (np.exp(x.astype(np.float64) - x.max(-1, keepdims=True)) for x in (one, other))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    exact, fed = Rows(one), Rows(other)
    found = compare(ids, exact, {"other": fed})["other"]
    assert ids[:-1] == exact.fed == fed.fed
    assert n == len(found)
    np.testing.assert_allclose(found.kl, (p * np.log(p / q)).sum(-1), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.nll, -np.log(q[np.arange(n), ids[1:]]), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(found.nll_exact, -np.log(p[np.arange(n), ids[1:]]), rtol=1e-6, atol=1e-9)
    assert ((one.argmax(-1) == other.argmax(-1)) == found.same_top).all()
    summary = found.summary()
    assert summary.kl_mean == pytest.approx(found.kl.mean())
    assert summary.perplexity_change == pytest.approx(np.exp(found.nll.mean() - found.nll_exact.mean()) - 1)


def test_the_same_logits_are_not_apart():
    """Zero divergence, full agreement, no change of perplexity."""
    logits = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    found = compare(list(range(5)) * 2, Rows(logits), {"same": Rows(logits)})["same"].summary()
    assert (0.0, 0.0, 1.0) == (found.kl_mean, found.perplexity_change, found.top1_agreement)


def test_a_text_of_one_token_predicts_nothing():
    """And is refused, not divided by zero."""
    empty = compare([1, 2], Rows(np.zeros((1, 3))), {"same": Rows(np.zeros((1, 3)))})["same"][:0]
    with pytest.raises(InputError, match="at least two tokens"):
        empty.summary()


def test_own_groups_are_exact_and_earlier_ones_are_read_back(tiny):
    """Through real caches: up to 64 tokens no codec costs anything; after that coarser codecs cost more."""
    ids = ids_of(tiny, 256)
    found = compare(ids, stored(tiny, "exact"), {codec: stored(tiny, codec) for codec in CODECS})
    for codec in CODECS:
        assert found[codec].kl[:64].max() < 1e-9
        assert found[codec].kl[64:].mean() > 1e-12
    kl = {codec: found[codec].kl.mean() for codec in CODECS}
    assert kl["q8"] < kl["q4"] < kl["q3"] < kl["q2"]
    assert kl["fp16"] < min(kl["q4"], kl["q4-affine"])


def test_another_chunking_is_the_floor(tiny):
    """Full precision against itself in steps of 8 tokens lies far below the finest codec."""
    ids = ids_of(tiny, 256)
    others = {"floor": stored(tiny, "exact", chunk=8), "q4": stored(tiny, "q4")}
    found = compare(ids, stored(tiny, "exact"), others)
    assert 100 * max(0.0, found["floor"].kl.mean()) < found["q4"].kl.mean()


def test_greedy_divergence_is_that_of_decoding_freely(tiny):
    """The same number as two replies that are decoded apart, for a codec coarse enough to differ."""
    ids = ids_of(tiny, 192)

    def replies(codec, n):
        one = stored(tiny, codec)
        one.feed(ids[:-1])
        said = []
        for _ in range(n):
            said.append(int(one.feed([said[-1] if said else ids[-1]])[0].argmax()))
        return said

    exact, q2 = replies("exact", 24), replies("q2", 24)
    wanted = next((i for i, (a, b) in enumerate(zip(exact, q2, strict=True)) if a != b), 24)
    forms = {"exact": stored(tiny, "exact"), "q2": stored(tiny, "q2"), "again": stored(tiny, "exact")}
    for form in forms.values():
        form.feed(ids[:-1])
    found = greedy_divergence(ids[-1], forms.pop("exact"), forms, 24)
    assert {"q2": wanted, "again": 24} == found


def test_the_divergence_is_the_first_and_not_a_later_one():
    """Said 1, 2, 3, 4; the other would have said 1, 2, 0, 4."""
    said, other = (np.eye(5)[row] for row in ([1, 2, 3, 4], [1, 2, 0, 4]))
    exact, fed = Rows(said), Rows(other)
    assert {"other": 2} == greedy_divergence(9, exact, {"other": fed}, 4)
    assert [9, 1, 2, 3] == exact.fed == fed.fed


def test_the_papers_form_is_mlx_lms_quantized_cache(tiny_model_path):
    """The benchmark's stand-in gives the logits of the cache that keeps the packed form, but for 16-bit scales."""
    from benchmarks import fidelity

    loaded = load(tiny_model_path)
    model = loaded.model
    ids = loaded.tokenizer.encode(SHORT)[:128]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fidelity, "PAPER_GROUP", 32)  # its heads are of 32
        paper = fidelity.Paper(model).feed(ids)
    caches = [QuantizedKVCache(group_size=32, bits=4) for _ in make_prompt_cache(model)]
    stock = np.array(model(mx.array([ids]), cache=caches)[0])
    plain = np.array(model(mx.array([ids]))[0])
    assert np.abs(paper - stock).mean() < 0.05 * np.abs(paper - plain).mean()


# -- auto --------------------------------------------------------------------------------------------------------------


def test_auto_measures_once_and_remembers(open_engine, own_cache, monkeypatch):
    """The first engine measures, the next one knows; a codec that is named is not measured."""
    measured = []
    measure = choice._measure
    monkeypatch.setattr(choice, "_measure", lambda *given: measured.append(given[2]) or measure(*given))
    told = []
    first = open_engine("one", progress=told.append).status()
    assert ["q4"] == measured
    assert any("true enough" in sentence for sentence in told)
    second = open_engine("two", progress=told.append).status()
    assert (first.codec, first.codec_choice) == (second.codec, second.codec_choice)
    assert "auto chose q4 (q4 KL" in first.codec_choice
    assert "of 255 tokens" in first.codec_choice
    assert "" == open_engine("three", codec="q8").status().codec_choice
    assert ["q4"] == measured


@pytest.mark.parametrize(
    ("costs", "chosen"),
    [
        ({"q4": 0.0099}, "q4"),
        ({"q4": 0.0101, "q8": 0.001}, "q8"),
        ({"q4": float("nan"), "q8": 0.02, "fp16": 1e-6}, "fp16"),
        ({"q4": 0.3, "q8": 0.2, "fp16": 0.1}, "fp16"),
    ],
)
def test_auto_takes_the_smallest_that_is_true_enough(tiny, own_cache, monkeypatch, costs, chosen):
    """The bound is 0.01 nats; what is no number is not within it; the last resort needs no bound."""
    monkeypatch.setattr(
        choice, "_measure", lambda _loaded, _spec, codec, ids, _backend: Measured(codec, costs[codec], 1.0, len(ids))
    )
    found = choose_codec(*tiny)
    assert chosen == found.codec
    assert list(costs) == [one.codec for one in found.measured]
    monkeypatch.setattr(choice, "_measure", None)
    assert str(found) == str(choose_codec(*tiny))


def test_auto_passes_over_what_cannot_pack_the_heads(tiny, own_cache, monkeypatch):
    """Heads of 80 go into no group of 64 or 32: 16-bit numbers need none."""
    monkeypatch.setattr(
        choice, "_measure", lambda _loaded, _spec, codec, ids, _backend: Measured(codec, 0.0, 1.0, len(ids))
    )
    odd = ModelCacheSpec((LayerSpec(0, LayerKind.FULL, 1, 80, 80, 1),), "float32")
    assert "fp16" == choose_codec(tiny[0], odd).codec


def test_a_choice_that_cannot_be_read_is_made_again(tiny, own_cache, tmp_path):
    """A damaged or foreign file is no error."""
    first = choose_codec(*tiny)
    [file] = (tmp_path / "cache").rglob("codec/*.json")
    for text in ("", "[]", json.dumps(json.loads(file.read_text()) | {"found": {"codec": "q4"}})):
        file.write_text(text)
        assert first == choose_codec(*tiny)


def test_a_choice_says_what_it_rests_on():
    """Every candidate that was measured, and the bound."""
    made = CodecChoice("q8", (Measured("q4", 0.0212, 0.91, 255), Measured("q8", 0.00004, 0.998, 255)))
    assert (
        "auto chose q8 (q4 KL 0.021 nats, top-1 91.0% of 255 tokens; q8 KL 4e-05 nats, top-1 99.8% of 255 tokens; "
        "the bound is KL 0.01)"
    ) == str(made)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_measures_all_codecs(tiny_model_path, capsys):
    """As JSON and as a table, on texts that need no download."""
    asked = ["fidelity", str(tiny_model_path), "--tokens", "192"]
    assert 0 == main([*asked, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [192, 2, list(CODECS)] == [found["n_tokens"], len(found["texts"]), [row["codec"] for row in found["rows"]]]
    assert all(2 * 191 == row["n_predictions"] for row in found["rows"])
    q4 = found["rows"][0]
    assert 0 < q4["kl_mean"] <= q4["kl_p99"]
    assert 0 == main([*asked, "--codec", "q4", "--texts", "1"])
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["codec", "of", "FP16", "perplexity", "KL", "mean", "KL", "p99", "top-1"]
    assert "q4" == table[1].split()[0]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--codec", "q5"], "unknown codec 'q5'"),
        (["--tokens", "100"], "a text needs 128 tokens"),
        (["--texts", "0"], "the number of texts must be from 1"),
        ([], "There is no folder /nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(argv, told, capsys):
    """The model named does not exist, which is looked at last."""
    assert 1 == main(["fidelity", "/nowhere", *argv])
    assert told in capsys.readouterr().err


def test_a_text_longer_than_the_context_is_refused(tiny_model_path, capsys):
    """With the context's length."""
    assert 1 == main(["fidelity", str(tiny_model_path), "--tokens", "5000"])
    assert "has a context of 4096 tokens" in capsys.readouterr().err


def test_effective_bytes_count_the_open_group():
    """SmolLM2's shapes in float32: q4 at 4K within 0.30 of FP16, q3 within 0.24; with a 16-bit model q4 within 0.29."""
    layers = tuple(LayerSpec(i, LayerKind.FULL, 3, 64, 64, 9) for i in range(30))
    wide, narrow = ModelCacheSpec(layers, "float32"), ModelCacheSpec(layers, "float16")
    # sealed 4.5 / 16, four first tokens and the open group twice as wide as FP16
    wanted = np.mean([(4096 * 4.5 / 16 + 2 * (4 + n)) / (4096 + n) for n in range(64)])
    assert wanted == pytest.approx(report.effective_bytes(wide, "q4"))
    assert wanted <= 0.30
    assert report.effective_bytes(wide, "q3") <= 0.24
    assert report.effective_bytes(narrow, "q4") <= 0.29


def test_the_texts_at_hand_are_prose_and_code_in_turns():
    """Both kinds, each long enough for the default."""
    texts = texts_at_hand()[:8]
    assert [name.endswith(".py") for name, _ in texts] == [False, True] * 4
    assert all(len(text) > 10_000 for _, text in texts)


# -- receipts ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def told_agent(open_engine):
    """An agent with some hundred tokens in two turns, in 2 bits: coarse enough to show."""
    engine = open_engine(codec="q2")
    planner = engine.agent("planner")
    planner.ask(SHORT[:600], max_tokens=20)
    planner.ask("And then?", max_tokens=20)
    return engine, planner


def test_a_receipt_compares_the_stored_state_with_full_precision(told_agent):
    """The same figures as a replay of the agent's own tokens with nothing but models and caches."""
    engine, planner = told_agent
    planner.evict()
    sentences = []
    receipt = planner.fidelity(50, progress=sentences.append)
    ids = engine.with_session("planner", lambda session: session.head_tokens().tolist())
    start = (len(ids) - 1 - 50) // 64 * 64
    assert ("planner", "q2", start, len(ids) - start) == (
        receipt.agent, receipt.codec, receipt.n_history, receipt.n_sampled,
    )  # fmt: skip
    [sentence] = sentences
    assert sentence.startswith(
        f"planner: computes {start} tokens again at full precision and reads the {len(ids) - start}"
    )
    assert "of K/V memory" in sentence

    def alone():
        loaded, spec = engine._owner.call(lambda: (engine._parts.runner._model, engine._parts.layout.spec))
        exact, other = Replay.fresh(loaded, exact_layout(spec)), Replay.fresh(loaded, engine._parts.layout)
        for one in (exact, other):
            one.feed(ids[:start])
        return compare(ids[start:], exact, {"q2": other})["q2"].summary()

    wanted = engine._owner.call(alone)
    assert wanted.n_predictions == receipt.fidelity.n_predictions
    assert wanted.kl_mean == pytest.approx(receipt.fidelity.kl_mean, rel=0.05)
    assert wanted.top1_agreement == pytest.approx(receipt.fidelity.top1_agreement, abs=0.05)
    assert receipt.fidelity.kl_mean > 1e-6
    assert receipt.to_dict()["fidelity"]["kl_mean"] == receipt.fidelity.kl_mean


def test_a_receipt_reads_the_very_bytes_that_are_stored(told_agent, monkeypatch):
    """Other state in their place gives another receipt: it is not computed from the tokens again."""
    _, planner = told_agent
    before = planner.fidelity(50).fidelity.kl_mean
    assert before == planner.fidelity(50).fidelity.kl_mean

    read, read_into = AgentStore.read, AgentStore.read_into

    def zeros(*given):
        return {name: np.zeros_like(array) for name, array in read(*given).items()}

    def zeros_into(store, block, targets):
        read_into(store, block, targets)
        for target in targets.values():
            target[...] = 0

    monkeypatch.setattr(AgentStore, "read", zeros)
    monkeypatch.setattr(AgentStore, "read_into", zeros_into)
    assert planner.fidelity(50).fidelity.kl_mean > 3 * before


def test_a_receipt_changes_nothing(told_agent):
    """Not the agent's place, state, files or memory; what it says next is what it would have said."""
    engine, planner = told_agent
    variant = planner.fork("variant")
    before, memory = planner.status, engine.status().hot_bytes
    planner.fidelity(50)
    assert (before, memory) == (planner.status, engine.status().hot_bytes)
    assert variant.ask("Go on.", max_tokens=12).token_ids == planner.ask("Go on.", max_tokens=12).token_ids


def test_others_are_served_while_a_receipt_is_made(told_agent, monkeypatch):
    """A reply that is being decoded gets tokens between the steps."""
    engine, planner = told_agent
    other = engine.agent("other").stream("Hello.", max_tokens=300)
    seen, step = [], AgentReplay.step

    def counting(replay):
        seen.append(len(other._request.kept_ids))
        return step(replay)

    monkeypatch.setattr(AgentReplay, "step", counting)
    planner.fidelity(50)
    other.close()
    assert len(seen) > 3
    assert seen[-1] > seen[0]


@pytest.mark.parametrize("n_steps", [0, 2, 100])
def test_an_interrupted_receipt_gives_its_memory_back(told_agent, monkeypatch, n_steps):
    """Before its first step, in the middle of a chunk of the history, in the sample; and the agent goes on."""
    engine, planner = told_agent
    memory = engine.status().hot_bytes
    monkeypatch.setattr("amem.fidelity.receipt._STEP_S", 0)
    monkeypatch.setattr("amem.fidelity.receipt._SAMPLE_CHUNK", 1)
    step, done = AgentReplay.step, []

    def interrupted(replay):
        if len(done) == n_steps:
            raise KeyboardInterrupt
        done.append(step(replay))
        assert done[-1] is None

    monkeypatch.setattr(AgentReplay, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        planner.fidelity(100)
    assert n_steps == len(done)
    assert memory == engine.status().hot_bytes
    assert planner.ask("Go on.", max_tokens=3).text is not None


def test_a_receipt_without_room_or_state_is_refused(open_engine):
    """In one line, and nothing is held afterwards."""
    engine = open_engine(memory="1500kB", codec="q2")
    planner = engine.agent("planner")
    with pytest.raises(InputError, match="has 0 tokens in stored form"):
        engine.agent("new", system="Say little.").fidelity()
    planner.ask(SHORT * 2, max_tokens=4)
    memory = engine.status().hot_bytes
    with pytest.raises(InputError, match="at least 1 token"):
        planner.fidelity(0)
    with pytest.raises(MemoryBudgetError, match="a receipt of agent 'planner' needs"):
        planner.fidelity(64)
    assert memory == engine.status().hot_bytes
    with pytest.raises(InputError, match="no agent"):
        engine.fidelity("nobody")


def test_damaged_state_is_told_and_the_rest_is_measured(open_engine):
    """A flipped byte in the first block leaves nothing to test; verify names it."""
    engine = open_engine()
    planner = engine.agent("planner")
    planner.ask(SHORT[:900], max_tokens=4)
    planner.evict()
    root = engine.status().store
    for file in Path(root).rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-100] ^= 0xFF
        file.write_bytes(data)
    memory = engine.status().hot_bytes
    with pytest.raises(InputError, match="its stored state is damaged"):
        planner.fidelity(50)
    assert memory == engine.status().hot_bytes
