"""One agent as one file: a zip, not compressed, of its transcript and block files, with a SHA-256 of each."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sqlite3
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from amem.errors import AmemError, CorruptState, InputError
from amem.store import facts, fileformat, files, names, transcript
from amem.store.agent import AgentStore
from amem.store.blockfiles import SUFFIX
from amem.store.fileformat import FORMAT, Record
from amem.store.index import NameTakenError
from amem.store.names import Label
from amem.store.payload import DamagedError
from amem.store.records import Realm
from amem.store.store import Store

MANIFEST = "manifest.json"
_NAME = re.compile(r"[0-9a-f]{32}\.safetensors|transcript\.jsonl")
_MAX_MANIFEST = 64 << 20
_PIECE = 1 << 20


def export_agent(agent: AgentStore, target: Path) -> int:
    """Write all of an agent to a file that must not exist yet; returns its bytes. The agent may go on afterwards.

    Damaged blocks are set aside and left out, as their tokens can be computed again. Raises InputError, StoreError.
    """
    if target.exists():
        raise InputError(f"{target} exists already; choose another file name")
    if not target.parent.is_dir():
        raise InputError(f"there is no folder {target.parent}: make it first, or choose another file name")
    with files.explained(f"export agent {agent.name!r}", target.parent), agent.inspecting() as database:
        rows = facts.all_rows(database, Label(agent.name, agent.space))
        temporary = target.with_name(target.name + ".tmp")
        listed: dict[str, Any] = {}
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                text = "".join(map(transcript.line, rows)).encode()
                listed[transcript.TRANSCRIPT] = _put(archive, transcript.TRANSCRIPT, [text])
                for record in database.tree.records():
                    if not database.tree.knows(record.id):  # it depended on a block that was set aside a moment ago
                        continue
                    with contextlib.suppress(CorruptState):
                        agent.read(record)
                        name = record.id + SUFFIX
                        listed[name] = _put(archive, name, _pieces(agent.root / name))
                manifest = {
                    "amem": FORMAT, "name": agent.name, "space": agent.space,
                    "realms": [dataclasses.asdict(realm) for realm in database.realms()], "files": listed,
                }  # fmt: skip
                _put(archive, MANIFEST, [json.dumps(manifest, indent=1).encode()])
            with temporary.open("rb") as written:
                os.fsync(written.fileno())
            temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)
        return target.stat().st_size


def _put(archive: zipfile.ZipFile, name: str, pieces: Iterator[bytes] | list[bytes]) -> dict[str, Any]:
    """Add a file; its size and SHA-256 for the manifest."""
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o600 << 16
    digest, nbytes = hashlib.sha256(), 0
    with archive.open(info, "w", force_zip64=True) as entry:
        for piece in pieces:
            entry.write(piece)
            digest.update(piece)
            nbytes += len(piece)
    return {"sha256": digest.hexdigest(), "nbytes": nbytes}


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece


def import_agent(
    store: Store, source: Path, *, name: str | None = None, space: str | None = None, expect: Realm | None = None
) -> AgentStore:
    """Make an agent of an exported file, whole or not at all; ``name`` and ``space`` default to the exported ones.

    With ``expect`` a file without state for this model and codec is refused. Every checksum is verified. Raises
    InputError (another model, a forged path, a name that is taken), CorruptState (damaged, or no export), StoreTooNew,
    StoreError.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            manifest = _manifest(archive, source)
            _check_realms(manifest, source, expect)
            label = names.label(name or manifest["name"], manifest["space"] if space is None else space)
            store.reserve(sum(entry["nbytes"] for entry in manifest["files"].values()))
            return store.create(label, lambda folder: _fill(store, folder, label, archive, manifest))
    except NameTakenError as error:
        taken = f"there is an agent {label.name!r} already"
        raise InputError(f"{taken}: give this one another name (--as NAME; from Python, name=...)") from error
    except AmemError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"there is no file {source}") from error
    except (zipfile.BadZipFile, ValueError, KeyError, TypeError, AttributeError, NotImplementedError) as error:
        raise CorruptState(f"{source} is no export of an agent, or was damaged on its way ({error})") from error


def _manifest(archive: zipfile.ZipFile, source: Path) -> dict[str, Any]:
    """The manifest, once it is sure that the archive holds exactly its files, under names that we chose."""
    entries = {info.filename: info for info in archive.infolist()}
    unique = len(entries) == len(archive.infolist())
    if not unique or MANIFEST not in entries or entries[MANIFEST].file_size > _MAX_MANIFEST:
        raise CorruptState(f"{source} is no export of an agent; nothing was imported")
    manifest: dict[str, Any] = json.loads(archive.read(MANIFEST))
    names.check_format(int(manifest["amem"]), source)
    listed = manifest["files"]
    for entry in entries.values():
        if entry.filename == MANIFEST:
            continue
        if not _NAME.fullmatch(entry.filename):
            raise InputError(f"{source} holds a file that no export has: {entry.filename!r}; nothing was imported")
        known = listed.get(entry.filename)
        if known is None or entry.file_size != known["nbytes"] or entry.compress_type != zipfile.ZIP_STORED:
            raise CorruptState(f"{source}: {entry.filename} is not as its manifest says; nothing was imported")
    if listed.keys() != entries.keys() - {MANIFEST} or transcript.TRANSCRIPT not in listed:
        raise CorruptState(f"{source} lacks files that its manifest names; nothing was imported")
    return manifest


def _check_realms(manifest: dict[str, Any], source: Path, expect: Realm | None) -> None:
    realms = [Realm(**entry) for entry in manifest["realms"]]
    if expect is not None and realms and expect not in realms:
        known = ", ".join(f"{realm.fingerprint} with codec {realm.codec}" for realm in realms)
        raise InputError(
            f"{source} holds state of {known}, and the model in use is {expect.fingerprint} with codec {expect.codec};"
            " load that model, or import without naming a model: the text is then computed again when it is needed"
        )


def _fill(store: Store, folder: Path, label: Label, archive: zipfile.ZipFile, manifest: dict[str, Any]) -> None:
    records: list[Record] = []
    for name, listed in manifest["files"].items():
        with archive.open(name) as entry:
            digest = hashlib.sha256()
            store.count(files.write_durably(folder / name, _hashed(entry, digest)))
        if digest.hexdigest() != listed["sha256"]:
            raise CorruptState(f"{name} does not match its SHA-256; nothing was imported")
        if name.endswith(SUFFIX):
            try:
                record = fileformat.read_record(folder / name)
                fileformat.read(folder / name, record)
            except DamagedError as error:
                raise CorruptState(f"{name} is damaged ({error}); nothing was imported") from error
            records.append(record)
    rows, bad = transcript.read(folder)
    if bad:
        raise CorruptState("the transcript is damaged; nothing was imported")
    kept = [row for row in facts.known_rows(rows) if row["kind"] != "agent"]
    length = transcript.write_whole(folder, [facts.label_row(label), *kept])
    try:
        facts.build(folder, kept, records, length)
    except sqlite3.Error as error:
        raise CorruptState(f"the transcript holds what no agent has ({error}); nothing was imported") from error


def _hashed(entry: IO[bytes], digest: Any) -> Iterator[bytes]:
    while piece := entry.read(_PIECE):
        digest.update(piece)
        yield piece
