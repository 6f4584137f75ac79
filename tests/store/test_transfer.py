"""An agent as one file."""

import json
import shutil
import stat
import zipfile

import numpy as np
import pytest

from amem.errors import CorruptState, InputError, StoreTooNew
from amem.store import Store, export_agent, import_agent, verify
from tests.store.samples import OTHER, REALM, SPACE, check, say

IDS = np.arange(900)


@pytest.fixture
def exported(root, tmp_path):
    """The file of an agent of two branches, whose store is gone."""
    with Store(root) as store:
        agent = store.open("planner ü", SPACE)
        agent.set_meta("system", "You plan.")
        say(agent, None, IDS[:600], prompt="a", reply="b", settings={"seed": 1})
        say(agent, 1, IDS[600:])
        say(agent, 1, IDS[:100])
        agent.set_head(2)
        nbytes = export_agent(agent, tmp_path / "planner.amem")
        assert (tmp_path / "planner.amem").stat().st_size == nbytes
    shutil.rmtree(root)
    return tmp_path / "planner.amem"


def test_an_imported_agent_is_the_exported_one(exported, root):
    """Turns, branches, head, settings, tokens and every bit of the payload."""
    with Store(root) as store:
        agent = import_agent(store, exported, expect=REALM)
        assert (agent.name, agent.space, agent.head) == ("planner ü", SPACE, 2)
        assert agent.meta == {"system": "You plan."}
        assert [(turn.parent, turn.settings) for turn in agent.turns().values()] == [
            (None, {"seed": 1}),
            (1, {}),
            (1, {}),
        ]
        assert check(agent, IDS) == 900
        assert check(agent, np.concatenate([IDS[:600], IDS[:100]])) == 700
        assert verify(store).problems == []
        assert agent.set_head(3) is None
        with pytest.raises(InputError, match="already"):
            import_agent(store, exported)
        other = import_agent(store, exported, name="second", space="elsewhere")
        assert (other.name, other.space, check(other, IDS)) == ("second", "elsewhere", 900)
        assert not other.shared(other.find(REALM, IDS).blocks[0].id)
    with Store(root) as store:
        assert check(store.open("second", "elsewhere"), IDS) == 900
        assert store.reports == []


def test_the_file_is_a_private_zip_that_any_tool_can_check(exported):
    """Stored, not compressed; names without folders; only its owner can read it."""
    assert stat.S_IMODE(exported.stat().st_mode) == 0o600
    with zipfile.ZipFile(exported) as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert not any("/" in name for name in archive.namelist())


def test_another_model_is_refused_with_the_reason(exported, root):
    """The error names both fingerprints; nothing is made."""
    with Store(root) as store:
        with pytest.raises(InputError, match="state of model-a with codec k4v4, and the model in use is model-b"):
            import_agent(store, exported, expect=OTHER)
        assert store.agents() == []


def rewrite(source, target, change):
    """Copy an export, changing its files (a dict of bytes by name)."""
    with zipfile.ZipFile(source) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    change(contents)
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    return target


def edit_manifest(contents, edit):
    manifest = json.loads(contents["manifest.json"])
    edit(manifest)
    contents["manifest.json"] = json.dumps(manifest).encode()


def first_block(contents):
    return min(name for name in contents if name.endswith(".safetensors"))


def spoil(contents, name):
    contents[name] = contents[name][:-1] + bytes([contents[name][-1] ^ 1])


def smuggle(contents, name):
    contents[name] = contents[first_block(contents)]
    edit_manifest(contents, lambda m: m["files"].update({name: m["files"][first_block(m["files"])]}))


CASES = {
    "flipped block": (lambda c: spoil(c, first_block(c)), CorruptState),
    "flipped transcript": (lambda c: spoil(c, "transcript.jsonl"), CorruptState),
    "missing block": (lambda c: c.pop(first_block(c)), CorruptState),
    "missing transcript": (lambda c: c.pop("transcript.jsonl"), CorruptState),
    "missing manifest": (lambda c: c.pop("manifest.json"), CorruptState),
    "extra file": (lambda c: c.update({"0" * 32 + ".safetensors": b"x"}), CorruptState),
    "parent folder": (lambda c: smuggle(c, "../../evil.safetensors"), InputError),
    "absolute": (lambda c: smuggle(c, "/tmp/evil.safetensors"), InputError),
    "database": (lambda c: smuggle(c, "agent.sqlite3"), InputError),
    "lock": (lambda c: smuggle(c, "lock"), InputError),
    "block under another name": (lambda c: smuggle(c, "f" * 32 + ".safetensors"), CorruptState),
    "wrong size": (lambda c: edit_manifest(c, lambda m: m["files"]["transcript.jsonl"].update(nbytes=3)), CorruptState),
    "no files": (lambda c: edit_manifest(c, lambda m: m.pop("files")), CorruptState),
    "no dictionary": (lambda c: c.update({"manifest.json": b"[]"}), CorruptState),
    "no JSON": (lambda c: c.update({"manifest.json": b"{"}), CorruptState),
    "bad name": (lambda c: edit_manifest(c, lambda m: m.update(name="a\nb")), InputError),
    "newer": (lambda c: edit_manifest(c, lambda m: m.update(amem=2)), StoreTooNew),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_file_leaves_nothing(exported, root, tmp_path, case):
    """Damaged, forged or newer: refused, and neither the store nor any place outside it has a new file."""
    change, error = CASES[case]
    bad = rewrite(exported, tmp_path / "bad.amem", change)
    with Store(root) as store:
        with pytest.raises(error):
            import_agent(store, bad)
        assert store.agents() == []
        assert list((root / "agents").iterdir()) == []
        assert {path.name for path in tmp_path.iterdir()} == {"planner.amem", "bad.amem"}


@pytest.mark.parametrize("data", [b"", b"no zip at all", None])
def test_what_is_no_export_is_said_so(root, tmp_path, data):
    """Another file, or none."""
    path = tmp_path / "x.amem"
    if data is not None:
        path.write_bytes(data)
    with Store(root) as store, pytest.raises((CorruptState, InputError), match=r"x\.amem"):
        import_agent(store, path)


def test_every_flipped_byte_of_an_export_is_harmless(exported, root, tmp_path):
    """A sample: either the import is refused, or what it made is what was exported."""
    whole = exported.read_bytes()
    chance = np.random.default_rng(3)
    with Store(root) as store:
        for position in chance.integers(0, len(whole), 60):
            bad = bytearray(whole)
            bad[position] ^= 1 << chance.integers(8)
            (tmp_path / "bad.amem").write_bytes(bad)
            try:
                agent = import_agent(store, tmp_path / "bad.amem")
            except (CorruptState, InputError, StoreTooNew):
                assert store.agents() == []
                continue
            assert check(agent, IDS) == 900
            agent.delete()


def test_a_file_is_not_overwritten(agent, tmp_path):
    """Exporting to an existing file is refused."""
    (tmp_path / "x").write_text("mine")
    with pytest.raises(InputError, match="exists"):
        export_agent(agent, tmp_path / "x")
    assert (tmp_path / "x").read_text() == "mine"


def test_a_damaged_block_is_left_out(agent, tmp_path, store):
    """An export holds what is good."""
    say(agent, None, IDS)
    bad = agent.find(REALM, IDS).blocks[1]
    (agent.root / f"{bad.id}.safetensors").write_bytes(b"x")
    export_agent(agent, tmp_path / "x")
    assert check(import_agent(store, tmp_path / "x", name="copy"), IDS) == 256
