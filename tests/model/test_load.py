"""Names, folders and hub ids become models, or one clear line."""

from __future__ import annotations

import json
import shutil
import threading

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, quantize_model

from amem.errors import ModelError, UnsupportedModel
from amem.model import bundled, hub
from amem.model import load as loading
from amem.model.load import load, models
from tests.tiny import VOCAB_SIZE, write_tiny_model

TOKENS = mx.array([[5, 80, 200, 33, 7]])


def _edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _quantize(folder, **how):
    """Quantize a tiny model's file in place, its scales in float16 where the mode has such."""
    model, config = load_model(folder)
    model.set_dtype(mx.float16)
    model, config = quantize_model(model, config, **how)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))


def test_a_folder_is_loaded(tiny_model_path):
    """All that the engine needs to know of a model comes with it."""
    said: list[str] = []

    loaded = load(tiny_model_path, progress=said.append)

    assert loaded.path == tiny_model_path
    assert loaded.name == str(tiny_model_path)
    assert loaded.context_length == 4096
    assert loaded.eos_token_ids == {2}
    assert loaded.config["model_type"] == "llama"
    assert len(loaded.fingerprint) == 32
    assert loaded.model(TOKENS).shape == (1, 5, VOCAB_SIZE)
    assert said == [f"Loading {tiny_model_path}."]


def test_a_home_folder_is_found(tiny_model_path, monkeypatch):
    """A tilde stands for the home folder."""
    monkeypatch.setenv("HOME", str(tiny_model_path.parent))

    assert load(f"~/{tiny_model_path.name}").path == tiny_model_path


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ],
)
def test_a_loaded_model_runs_on_another_thread(tmp_path, scaling):
    """Nothing of it is lazy any more, RoPE frequencies included."""
    loaded = load(write_tiny_model(tmp_path / "tiny", rope_scaling=scaling))
    results: list[object] = []

    def run():
        try:
            results.append(mx.argmax(loaded.model(TOKENS)[0, -1]).item())
        except RuntimeError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert results == [mx.argmax(loaded.model(TOKENS)[0, -1]).item()]


@pytest.mark.parametrize("how", [{"group_size": 32, "bits": 4}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}])
def test_on_linux_small_models_compute_in_float32(tmp_path, monkeypatch, how):
    """Quantized weights are widened without rounding them to 16 bits on the way."""
    folder = write_tiny_model(tmp_path / "tiny")
    _quantize(folder, **how)
    monkeypatch.setattr(loading, "_widen", lambda model: False)
    packed = load(folder)
    monkeypatch.setattr(loading, "_widen", lambda model: True)

    wide = load(folder)

    assert wide.dtype == "float32"
    packed.model.set_dtype(mx.float32)
    assert mx.allclose(wide.model(TOKENS), packed.model(TOKENS), atol=1e-4)
    assert wide.fingerprint != packed.fingerprint


def test_tied_weights_stay_tied(tmp_path, monkeypatch):
    """The head of a widened model still is its embedding."""
    folder = write_tiny_model(tmp_path / "tiny")
    _quantize(folder, group_size=32, bits=8)
    monkeypatch.setattr(loading, "_widen", lambda model: True)

    model = load(folder).model

    assert "lm_head" not in model
    assert model.model.embed_tokens.weight.dtype == mx.float32


@pytest.mark.skipif(loading.sys.platform != "linux" or mx.default_device() != mx.Device(mx.cpu), reason="Linux's CPU")
@pytest.mark.parametrize(("memory", "dtype"), [(1 << 40, "float32"), (1 << 10, "float16")])
def test_models_too_big_for_float32_stay_as_they_are(tmp_path, monkeypatch, memory, dtype):
    """A model may take a quarter of the memory as float32."""
    folder = write_tiny_model(tmp_path / "tiny")
    _quantize(folder, group_size=32, bits=4)
    monkeypatch.setattr(loading, "_memory_nbytes", lambda: memory)

    assert load(folder).dtype == dtype


def test_memory_is_the_machines_or_less():
    """A container's limit counts, and the machine's size is the most."""
    assert 1 << 28 < loading._memory_nbytes() < 1 << 50


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 2048}, 2048),
        ({"text_config": {"max_position_embeddings": 1024}}, 1024),
        ({"n_ctx": 512, "text_config": None}, 512),
        ({}, 4096),
    ],
)
def test_context_length(tiny_model_path, config, expected):
    """It is in the configuration, by one of several names; else the tokenizer says it."""
    assert loading._context_length(config, load(tiny_model_path).tokenizer) == expected


def test_a_model_that_states_no_context_length_has_a_high_limit():
    """Recurrent models have none; tokenizers then say a huge number."""

    class Tokenizer:
        model_max_length = int(1e30)

    assert loading._context_length({}, Tokenizer()) == 1 << 20


def test_several_end_tokens_are_all_known(tmp_path):
    """generation_config.json may name more than the tokenizer does."""
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')

    assert load(folder).eos_token_ids == {0, 2}


def _without(name):
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without("config.json"), "has no config.json"),
        (_without("model.safetensors"), "has no model.safetensors"),
        (_without("tokenizer.json"), "has no tokenizer.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda folder: (folder / "config.json").write_text("[]"), "does not say its model_type"),
        (lambda folder: (folder / "config.json").write_text("{}"), "does not say its model_type"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 4), "cannot be loaded"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot be loaded"),
        (lambda folder: _edit(folder, num_hidden_layers=3), "cannot be loaded"),
    ],
)
def test_a_folder_that_is_no_model(tmp_path, spoil, message):
    """The error says which file is missing or wrong, in one line."""
    folder = write_tiny_model(tmp_path / "tiny")
    spoil(folder)

    with pytest.raises(ModelError, match=message) as caught:
        load(folder)

    assert "\n" not in str(caught.value)


def test_a_file_is_no_folder(tiny_model_path):
    """The error says what to give instead."""
    with pytest.raises(ModelError, match="is a file; give the folder"):
        load(tiny_model_path / "config.json")


@pytest.mark.parametrize("change", [{"model_type": "frobnicator"}, {"model_file": "evil.py"}])
def test_unknown_architectures_and_code_are_refused(tmp_path, change):
    """Code that comes with a model is never run."""
    folder = write_tiny_model(tmp_path / "tiny")
    _edit(folder, **change)
    (folder / "evil.py").write_text("raise SystemExit('ran')")

    with pytest.raises(UnsupportedModel):
        load(folder)


def test_code_of_a_tokenizer_is_not_run(tmp_path):
    """Nor does loading ask on the terminal whether it may be run."""
    folder = write_tiny_model(tmp_path / "tiny")
    file = folder / "tokenizer_config.json"
    changed = json.loads(file.read_text()) | {
        "auto_map": {"AutoTokenizer": ["evil.Tok", None]},
        "tokenizer_class": "Tok",
    }
    file.write_text(json.dumps(changed))
    (folder / "evil.py").write_text("raise SystemExit('ran')")

    with pytest.raises(ModelError):
        load(folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", "did you mean smollm2-135m?"),
        ("SmolLM2-135M", "did you mean smollm2-135m?"),
        ("frobnicator", "known: smollm2-135m"),
        ("", "Unknown model ''"),
        (" ", "Unknown model ' '"),
        ("./no/such/folder", "There is no folder"),
        ("/no/such", "There is no folder"),
        ("~/no-such-folder", "There is no folder"),
        ("a/b/c", "There is no folder"),
    ],
)
def test_an_unknown_name(name, message):
    """The error names what was probably meant, or that there is no such folder."""
    with pytest.raises(ModelError) as caught:
        load(name)

    assert message in str(caught.value)


def test_a_hub_id_is_downloaded(tiny_model_path, monkeypatch):
    """What the hub gives is loaded like any folder, under the id's name."""
    asked: list[str] = []
    monkeypatch.setattr(hub, "download", lambda repo_id: asked.append(repo_id) or tiny_model_path)

    loaded = load("owner/name-4bit")

    assert asked == ["owner/name-4bit"]
    assert loaded.name == "owner/name-4bit"


def test_the_list_of_models(tmp_path, tiny_model_path, monkeypatch):
    """The bundled model is in it before it was fetched, and the hub's cache is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(hub, "cached_models", lambda: iter([("owner/name", tiny_model_path, 123)]))

    before = models()
    shutil.copytree(tiny_model_path, bundled.cache_folder() / bundled.NAME)
    after = models()

    assert [(info.name, info.source, info.nbytes) for info in before] == [
        ("smollm2-135m", "bundled", bundled.DOWNLOAD_NBYTES),
        ("owner/name", "hub cache", 123),
    ]
    assert before[0].path is None
    assert after[0].path == bundled.cached()
    assert after[0].nbytes == sum(file.stat().st_size for file in tiny_model_path.iterdir())
