"""What `benchmarks.peers` prepares is kept as long as it is what this version would make."""

from __future__ import annotations

import json

import pytest

from benchmarks import peers
from benchmarks.peers import Environment


@pytest.fixture
def made(monkeypatch):
    """The processes that were started, in place of starting them."""
    started = []

    def in_new_process(*arguments, python="here"):
        started.append((arguments[0], python))
        if arguments[0] == "--tell":
            arguments[3].mkdir(parents=True)
        return {"reply_ids": [1]}

    monkeypatch.setattr(peers, "in_new_process", in_new_process)
    return started


def _where(**more):
    return {"amem": Environment("here", {"mlx": "1"}), "mlx-lm": Environment("here", {"mlx": "1"}), **more}


def test_what_is_prepared_is_prepared_once(made, tmp_path):
    """The second time its folder is only opened."""
    folder = peers.prepared(tmp_path, 512, _where())
    assert [name for name, _ in made] == ["--tell", "--prepare"]
    assert peers.prepared(tmp_path, 512, _where()) == folder
    assert len(made) == 2


def test_what_other_versions_prepared_is_prepared_anew(made, tmp_path):
    """Of amem's packages, of a peer's; a folder that does not say what made it; one that lacks a peer."""
    folder = peers.prepared(tmp_path, 512, _where())
    for where in (
        _where(amem=Environment("here", {"mlx": "2"})),
        _where(**{"llama.cpp": Environment("here", {"llama-cpp-python": "1"})}),
        _where(transformers=Environment("there", {"torch": "1", "transformers": "1"})),
    ):
        made.clear()
        peers.prepared(tmp_path, 512, where)
        assert made
    (folder / "done").write_text("", encoding="utf-8")
    made.clear()
    peers.prepared(tmp_path, 512, _where())
    assert made


def test_a_store_that_other_sources_wrote_is_prepared_anew(made, tmp_path):
    """The sources are in what is kept, and decide."""
    folder = peers.prepared(tmp_path, 512, _where())
    kept = json.loads((folder / "done").read_text(encoding="utf-8"))
    kept["amem"]["sources"] = "others"
    (folder / "done").write_text(json.dumps(kept), encoding="utf-8")
    made.clear()
    peers.prepared(tmp_path, 512, _where())
    assert made


def test_fewer_peers_find_what_was_prepared_for_more(made, tmp_path):
    """Each peer's part is told by itself."""
    there = Environment("there", {"torch": "1", "transformers": "1", "optimum-quanto": "1"})
    peers.prepared(tmp_path, 512, _where(transformers=there))
    assert ("--prepare-transformers", "there") in made
    made.clear()
    peers.prepared(tmp_path, 512, _where())
    assert not made


def test_peers_are_those_whose_packages_are_there():
    """The quantized cache of Transformers needs quanto besides."""
    there = {"torch": "1", "transformers": "1"}
    assert peers.peers(_where()) == ["amem", "mlx-lm", "mlx-lm q4"]
    assert peers.peers(_where(transformers=Environment("there", there)))[3:] == ["transformers"]
    with_quanto = Environment("there", there | {"optimum-quanto": "1"})
    assert peers.peers(_where(transformers=with_quanto))[3:] == ["transformers", "transformers q4"]


def test_an_interpreter_without_torch_is_refused(monkeypatch):
    """Before anything is measured."""
    monkeypatch.setattr(peers, "in_new_process", lambda *_, **__: {"transformers": "5.24.0"})
    with pytest.raises(SystemExit, match="has no torch and transformers"):
        peers.environments("there")
