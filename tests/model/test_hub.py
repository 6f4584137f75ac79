"""What can go wrong with the hub is said in one line that tells what to do."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import huggingface_hub.errors as errors
import pytest

from amem.errors import ModelError
from amem.model import hub


class _Response:
    """As much of an HTTP response as the hub's errors read."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.request = None


def _raise(error):
    def snapshot_download(*args, **kwargs):
        raise error

    return snapshot_download


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.RepositoryNotFoundError("404", response=_Response()), r"no public model owner/name.*HF_TOKEN"),
        (errors.GatedRepoError("403", response=_Response()), r"gated.*HF_TOKEN"),
        (errors.LocalEntryNotFoundError("offline\nlong story"), r"cannot be reached.*Check the network"),
        (ConnectionError("refused"), r"cannot be reached"),
        (errors.HFValidationError("bad"), r"is not a hub id"),
        (errors.HfHubHTTPError("500 Server Error\nlong story", response=_Response()), r"downloaded: 500 Server Error$"),
        (OSError(28, "No space left on device"), r"No space left on device"),
        (TimeoutError(), r"downloaded: TimeoutError"),
    ],
)
def test_errors(error, message, monkeypatch):
    """A private model, a gated one, no network, a bad id, a full disk."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _raise(error))

    with pytest.raises(ModelError, match=message) as caught:
        hub.download("owner/name")

    assert "\n" not in str(caught.value)


def test_no_code_is_downloaded(monkeypatch, tmp_path):
    """Weights, configuration and tokenizer are asked for, and no Python files."""
    asked: list[list[str]] = []

    def snapshot_download(repo_id, allow_patterns):
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    assert hub.download("owner/name") == tmp_path
    assert not [pattern for pattern in asked[0] if pattern.endswith(".py")]


def _cached_repo(cache: Path, repo_id: str, file: str) -> Path:
    folder = cache / f"models--{repo_id.replace('/', '--')}" / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder / file).write_bytes(b"12345")
    refs = folder.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    return folder


def test_models_in_the_hubs_cache_are_listed(tmp_path, monkeypatch):
    """Those with weights that MLX reads, with their size on disk."""
    folder = _cached_repo(tmp_path, "owner/mlx", "model.safetensors")
    _cached_repo(tmp_path, "owner/torch", "pytorch_model.bin")
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path))

    assert list(hub.cached_models()) == [("owner/mlx", folder, 5)]


def test_without_a_hub_cache_there_are_none(tmp_path, monkeypatch):
    """A machine that never used the hub."""
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path / "none"))

    assert list(hub.cached_models()) == []
