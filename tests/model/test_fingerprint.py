"""Stored state is valid for one fingerprint: it must change with anything that the K/V depend on, and only then."""

from __future__ import annotations

import json
import shutil

import pytest

from amem.model.fingerprint import fingerprint
from tests.tiny import write_tiny_model, write_tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    return write_tiny_model(tmp_path / "tiny")


def _flip_byte(file, offset):
    content = bytearray(file.read_bytes())
    content[offset] ^= 1
    file.write_bytes(content)


def test_a_copy_elsewhere_has_the_same(folder, tmp_path):
    """The folder's place and name do not matter, nor its files' times."""
    shutil.copytree(folder, tmp_path / "elsewhere", copy_function=shutil.copyfile)

    assert fingerprint(folder, dtype="float32") == fingerprint(tmp_path / "elsewhere", dtype="float32")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: _flip_byte(folder / "model.safetensors", -1),
        lambda folder: _flip_byte(folder / "model.safetensors", 40),
        lambda folder: (folder / "config.json").write_text(json.dumps({"rope_theta": 1})),
        lambda folder: _flip_byte(folder / "tokenizer.json", -3),
        lambda folder: write_tiny_tokenizer(folder, chat_template="{{ messages }}"),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
        lambda folder: (folder / "model-00002.safetensors").write_bytes(b"more"),
        lambda folder: (folder / "model.safetensors").rename(folder / "model-00001.safetensors"),
        lambda folder: write_tiny_model(folder, seed=1),
    ],
)
def test_any_change_gives_another(folder, change):
    """Weights, their header, the configuration, the tokenizer, the template."""
    before = fingerprint(folder, dtype="float32")

    change(folder)

    assert fingerprint(folder, dtype="float32") != before


def test_the_compute_dtype_counts(folder):
    """K/V computed in 16 bits are not those computed in 32."""
    assert fingerprint(folder, dtype="float32") != fingerprint(folder, dtype="float16")


def test_other_files_do_not_count(folder):
    """A README beside the model changes nothing."""
    before = fingerprint(folder, dtype="float32")

    (folder / "README.md").write_text("new words")

    assert fingerprint(folder, dtype="float32") == before


def test_every_tensor_is_sampled(folder):
    """Other weights in one tensor alone, however small, are another model."""
    file = folder / "model.safetensors"
    header_nbytes = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + header_nbytes])
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    found = {fingerprint(folder, dtype="float32")}

    for end in ends:
        _flip_byte(file, 8 + header_nbytes + end - 1)
        found.add(fingerprint(folder, dtype="float32"))
        _flip_byte(file, 8 + header_nbytes + end - 1)

    assert len(ends) > 10
    assert len(found) == len(ends) + 1


@pytest.mark.parametrize(
    "content", [b"", b"1234", b"\xff" * 8, b"\xff" * 20, bytes(8) + b"x", b"\2" + bytes(7) + b"{}x"]
)
def test_damaged_weight_files_have_one_too(tmp_path, content):
    """Whether a file is whole is found when it is loaded."""
    (tmp_path / "model.safetensors").write_bytes(content)

    assert len(fingerprint(tmp_path, dtype="float32")) == 32
