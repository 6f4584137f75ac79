"""The page on the store's format is enough to read a store: the program on it does, without amem."""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import struct
import subprocess
import sys
import zipfile

import mlx.core as mx
import numpy as np
import pytest
import xxhash
from mlx_lm.models.cache import make_prompt_cache

from amem import Engine
from amem.model.load import load
from tests.docs.pages import DOCS, blocks

FIRST, SECOND = "One two three four five six seven eight. " * 30, "What is the capital of France?"

PRINT = """
import sys
agent = Path(sys.argv[1])
ids, files = head(agent)
print(json.dumps({"turns": transcript(agent), "ids": ids.tolist(), "kinds": [tensors(file)[0]["kind"] for file in files]}))
with open(sys.argv[2], "wb") as out:
    np.savez(out, *(array for pair in state(agent) for array in pair))
assert not {"amem", "mlx"} & {name.split(".")[0] for name in sys.modules}
"""


@pytest.fixture(scope="module", params=["q4", "q3", "q8"])
def read(request, tiny_model_path, tmp_path_factory):
    """What the engine made, and what the page's program reads of it in a process of its own."""
    folder = tmp_path_factory.mktemp("format")
    with Engine(tiny_model_path, folder / "store", codec=request.param, memory="200MB") as engine:
        agent = engine.agent("planner", system="You are a helpful assistant.")
        agent.ask(FIRST, max_tokens=8)
        agent.ask(SECOND, max_tokens=8)
        turns = {str(turn.id): [turn.prompt, turn.reply] for turn in agent.turns}
        n_tokens = agent.status.n_tokens
        agent.export(folder / "planner.amem")
    [key] = (folder / "store" / "agents").iterdir()
    program, example = (source for language, source in blocks(DOCS / "format.md") if language == "python")
    (folder / "reader.py").write_text(program + PRINT + example, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, folder / "reader.py", key, folder / "state.npz"],
        check=True, capture_output=True, text=True, env={}, cwd=folder,
    )  # fmt: skip
    said, *shown = done.stdout.splitlines()
    assert shown[0].startswith("planner {1: ")
    assert shown[1].endswith(f"K of the first layer is (2, {n_tokens}, 32)")
    said = json.loads(said)
    with np.load(folder / "state.npz") as arrays:
        state = [arrays[name] for name in arrays]
    pairs = list(zip(state[::2], state[1::2], strict=True))
    return {"engine": (turns, n_tokens), "said": said, "pairs": pairs, "bits": int(request.param[1]), "folder": folder}


def test_the_turns_and_the_tokens_are_the_engines(read):
    """In text, and as a history that goes through blocks, a tail and an open group."""
    turns, n_tokens = read["engine"]
    assert turns == read["said"]["turns"]
    assert n_tokens == len(read["said"]["ids"])
    assert n_tokens > 256
    assert ["block", "block", "snapshot"] == read["said"]["kinds"]


def test_k_and_v_are_the_models_own_up_to_the_codecs_step(read, tiny_model_path):
    """The first layer's, which depend on no other token's state; the first four tokens and the open group exactly."""
    model = load(tiny_model_path).model
    cache = make_prompt_cache(model)
    model(mx.array([read["said"]["ids"]]), cache=cache)
    n_tokens = len(read["said"]["ids"])
    exact = np.r_[0:4, n_tokens // 64 * 64 : n_tokens]
    assert len(read["pairs"]) == len(cache)
    for stored, array in zip(read["pairs"][0], (cache[0].keys, cache[0].values), strict=True):
        computed = np.array(array.astype(mx.float32))[0, :, :n_tokens]
        assert computed.shape == stored.shape
        np.testing.assert_allclose(stored[:, exact], computed[:, exact], atol=1e-5)
        step = (computed.max() - computed.min()) / (2 ** read["bits"] - 1)
        assert np.abs(stored - computed).max() < step
        assert np.abs(stored - computed).mean() < step / 4


def row_sum(values):
    pieces = [value if isinstance(value, bytes) else repr(value).encode() for value in values]
    kinds = [type(value).__name__ for value in values]
    return xxhash.xxh3_64_hexdigest(
        b"".join(f"{kind}{len(piece)}:".encode() + piece for kind, piece in zip(kinds, pieces, strict=True))
    )


def test_checksums_and_hashes_are_made_as_the_page_says(read):
    """Of the name, of each line of the transcript, of each file, of each block's history."""
    [folder] = (read["folder"] / "store" / "agents").iterdir()
    name = json.loads((folder / "name.json").read_text(encoding="utf-8"))
    assert name.pop("xxh3") == xxhash.xxh3_64_hexdigest(json.dumps(name, sort_keys=True).encode())
    for line in (folder / "transcript.jsonl").read_text(encoding="utf-8").splitlines():
        said, text = re.fullmatch(r'\{"xxh3":"(\w{16})","row":(.*)\}', line).groups()
        assert said == xxhash.xxh3_64_hexdigest(text.encode())
    database = sqlite3.connect(folder / "agent.sqlite3")
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        end = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:end])
        metadata, text = header.pop("__metadata__"), data[8 : data.rindex(b'"__metadata__":', 0, end)]
        spans, held = [xxhash.xxh3_64()], 0
        for tensor in header.values():
            if held >= 256 * 1024:
                spans, held = [*spans, xxhash.xxh3_64()], 0
            begin, stop = tensor["data_offsets"]
            spans[-1].update(data[end + begin : end + stop])
            held += stop - begin
        assert metadata["sums"] == "".join(span.hexdigest() for span in spans)
        assert metadata["checksum"] == xxhash.xxh3_128_hexdigest(text + metadata["sums"].encode())
        query = "SELECT checksum FROM blocks WHERE id = ? UNION SELECT checksum FROM snapshots WHERE id = ?"
        assert [(metadata["checksum"],)] == database.execute(query, (file.stem, file.stem)).fetchall()
    ids, chain = np.array(read["said"]["ids"], "<i4").tobytes(), bytes(16)
    chains = []
    for at in range(0, len(ids) // 256 * 256, 256):
        chain = xxhash.xxh3_128_digest(chain + ids[at : at + 256])
        chains.append(chain)
    [(last,)] = database.execute("SELECT chain FROM snapshots ORDER BY seq DESC LIMIT 1")
    assert chains[-1] == last
    assert set(chains) <= {row[0] for row in database.execute("SELECT chain FROM prefixes")}
    turn = database.execute(
        "SELECT id, parent, prompt, reply, system, settings, finish_reason, cell_id, execution, created, sum FROM turns"
    ).fetchone()
    assert turn[-1] == row_sum(turn[:-1])
    for table in ("blocks", "snapshots"):
        for _, *row, total in database.execute(f"SELECT * FROM {table}").fetchall():
            realm = row[2] if table == "blocks" else row[1]
            named = database.execute("SELECT fingerprint, codec FROM realms WHERE id = ?", (realm,)).fetchone()
            assert total == row_sum([*named, *row])
    database.close()
    [row] = sqlite3.connect(read["folder"] / "store" / "index.sqlite3").execute("SELECT key, digest FROM agents")
    label = f"{name['space']}\0{name['name']}".encode()
    assert row == (folder.name, hashlib.blake2b(label, digest_size=16).hexdigest())


def test_an_export_is_what_the_page_says(read):
    """A zip of the manifest and the files that it names."""
    with zipfile.ZipFile(read["folder"] / "planner.amem") as archive:
        manifest = json.loads(archive.read("manifest.json"))
        assert {"amem", "name", "space", "realms", "files"} == manifest.keys()
        assert {*manifest["files"], "manifest.json"} == set(archive.namelist())
        for name, entry in manifest["files"].items():
            assert entry["nbytes"] == len(archive.read(name))


def test_the_page_names_every_table_and_column(read):
    """So that a change of the tables changes the page."""
    page = (DOCS / "format.md").read_text(encoding="utf-8")
    [key] = (read["folder"] / "store" / "agents").iterdir()
    database = sqlite3.connect(key / "agent.sqlite3")
    tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    columns = {row[1] for table in tables for row in database.execute(f"PRAGMA table_info({table})")}
    database.close()
    for name in {*tables, *columns} - {"sqlite_sequence"}:
        assert f"`{name}`" in page or f"`{name}s`" in page, name
