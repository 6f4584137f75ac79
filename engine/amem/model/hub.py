"""Models from the Hugging Face hub: downloaded into its own shared cache, with errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from amem.errors import ModelError

# Weights, configuration and tokenizer. No Python files: code that comes with a model is never run.
_FILES = ["*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja"]


def download(repo_id: str) -> Path:
    """The folder of a hub model, downloaded first if it is not in the hub's cache.

    Raises
    ------
    ModelError
        No such model, no right to it, or no network and no copy in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(repo_id, allow_patterns=_FILES))
    except HFValidationError as error:
        raise ModelError(f"{repo_id!r} is not a hub id: it should look like 'owner/name'.") from error
    except GatedRepoError as error:
        raise ModelError(
            f"The model {repo_id} is gated: accept its terms on its hub page, then set HF_TOKEN to a token of yours "
            "(or run `hf auth login`)."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"The hub has no public model {repo_id}. Check its spelling; if it is private, set HF_TOKEN to a token "
            "that may read it (or run `hf auth login`)."
        ) from error
    except (LocalEntryNotFoundError, ConnectionError) as error:
        raise ModelError(
            f"The model {repo_id} is not in the local hub cache, and the hub cannot be reached. Check the network, or "
            "give the path of a model folder instead."
        ) from error
    except Exception as error:  # the HTTP client's errors have another base in every version of huggingface_hub
        raise ModelError(f"The model {repo_id} could not be downloaded: {_first_line(error)}") from error


def cached_models() -> Iterator[tuple[str, Path, int]]:
    """Hub id, folder and bytes of each model in the hub's cache that has weights in safetensors."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        for revision in sorted(repo.revisions, key=lambda revision: revision.last_modified, reverse=True)[:1]:
            folder = revision.snapshot_path
            if repo.repo_type == "model" and any(folder.glob("model*.safetensors")):
                yield repo.repo_id, folder, revision.size_on_disk


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
