"""The facts of an agent as transcript rows, and a database made of them: after damage, for an import, for a fork."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from amem.errors import InputError
from amem.store.database import DATABASE, Database
from amem.store.fileformat import Record, tokens_from_text, tokens_to_text
from amem.store.names import Label
from amem.store.records import BlockRecord, NewTurn, Realization, Realm, SnapshotRecord, TurnRecord
from amem.store.transcript import Row


def label_row(label: Label) -> Row:
    """Whose transcript it is."""
    return {"kind": "agent", "name": label.name, "space": label.space}


def meta_row(key: str, value: str | None) -> Row:
    """A small text that was set, or removed."""
    return {"kind": "meta", "key": key, "value": value}


def head_row(turn: int | None) -> Row:
    """Where the head was moved to. A turn moves it to itself."""
    return {"kind": "head", "turn": turn}


def turn_row(turn: TurnRecord) -> Row:
    """A turn's text."""
    return {
        "kind": "turn", "id": turn.id, "parent": turn.parent, "prompt": turn.prompt, "reply": turn.reply,
        "system": turn.system, "settings": dict(turn.settings), "finish_reason": turn.finish_reason,
        "cell_id": turn.cell_id, "execution": turn.execution, "created": turn.created,
    }  # fmt: skip


def realization_row(value: Realization) -> Row:
    """A turn's tokens, and the names of its blocks."""
    return {
        "kind": "realization", "turn": value.turn, "fingerprint": value.realm.fingerprint, "codec": value.realm.codec,
        "token_ids": tokens_to_text(value.token_ids), "n_tokens": value.n_tokens, "last_block": value.last_block,
        "tail": value.tail, "snapshot": value.snapshot,
    }  # fmt: skip


def all_rows(database: Database, label: Label, turns: Iterable[int] | None = None) -> list[Row]:
    """Everything that a database knows but for blocks; with ``turns`` only of these, the last of which is the head."""
    rows = [label_row(label), *(meta_row(key, value) for key, value in database.meta().items())]
    records = database.turns()
    chosen = list(records) if turns is None else list(turns)
    for number in chosen:
        rows.append(turn_row(records[number]))
        for realm in database.realized_in(number):
            value = database.realization(number, realm)
            assert value is not None
            rows.append(realization_row(value))
    if turns is None:
        rows.append(head_row(database.head))
    else:
        rows.append(head_row(chosen[-1] if chosen else None))
    return rows


def build(folder: Path, rows: Iterable[Row], records: Iterable[Record], transcript_nbytes: int) -> list[str]:
    """Make an agent's database of rows and of what its payload files say; returns what was lost, in plain sentences."""
    database = Database(folder / DATABASE)
    try:
        problems = add(database, rows, records, transcript_nbytes)
        database.checkpoint(force=True)
    finally:
        database.close()
    return problems


def add(database: Database, rows: Iterable[Row], records: Iterable[Record], transcript_nbytes: int) -> list[str]:
    """Add rows, and what payload files say that the database does not know; returns what was lost. One transaction."""
    problems: list[str] = []
    with database.transaction():
        turns, realizations, head = _add_texts(database, rows, problems)
        snapshots = _add_blocks(database, records)
        for value in realizations:
            if _follows(database, value, turns[value.turn]):
                _add_realization(database, value, snapshots)
            else:
                problems.append(f"turn {value.turn} lost the tokens before it; its text is kept")
        database.set_state("head", None if head is None or head not in turns else str(head))
        database.set_state("transcript_nbytes", str(transcript_nbytes))
    return problems


def _add_texts(
    database: Database, rows: Iterable[Row], problems: list[str]
) -> tuple[dict[int, int | None], list[Realization], int | None]:
    turns = {number: turn.parent for number, turn in database.turns().items()}
    realizations: dict[tuple[int, Realm], Realization] = {}
    head = database.head
    for row in rows:
        kind = row["kind"]
        if kind == "meta":
            database.set_meta(row["key"], row["value"])
        elif kind == "head":
            head = row["turn"]
        elif kind == "turn" and row["id"] not in turns:
            parent = row["parent"]
            if parent is not None and parent not in turns:
                problems.append(f"turn {row['id']} lost the turn before it ({parent}); it now starts a branch")
                parent = None
            new = NewTurn(
                parent, row["prompt"], row["reply"], row["finish_reason"], row["system"], row["settings"],
                row["cell_id"], row["execution"],
            )  # fmt: skip
            database.add_turn(new, float(row["created"]), row["id"])
            turns[row["id"]] = parent
            head = row["id"]
        elif kind == "realization":
            value = _realization(row)
            realizations[value.turn, value.realm] = value
    return turns, [value for value in realizations.values() if value.turn in turns], head


def _realization(row: Row) -> Realization:
    realm = Realm(row["fingerprint"], row["codec"])
    links: tuple[Any, ...] = (row["last_block"], row["tail"], row["snapshot"])
    return Realization(row["turn"], realm, tokens_from_text(row["token_ids"]), row["n_tokens"], *links)


def _add_blocks(database: Database, records: Iterable[Record]) -> dict[str, SnapshotRecord]:
    """Blocks whose ancestors are all there; snapshots are returned, as only a realization says what they follow."""
    snapshots: dict[str, SnapshotRecord] = {}
    blocks: list[BlockRecord] = []
    for record in records:
        if isinstance(record, SnapshotRecord):
            snapshots[record.id] = record
        else:
            blocks.append(record)
    for block in sorted(blocks, key=lambda block: block.start):
        try:
            database.tree.add_block(block, database.add_realm(block.realm))
        except InputError:
            continue  # an ancestor is lost: nothing can lead to it
    return snapshots


def _follows(database: Database, value: Realization, parent: int | None) -> bool:
    """Whether a realization holds the whole history, or goes on where its parent's ends."""
    own = len(value.token_ids)
    before = database.realization(parent, value.realm) if parent is not None else None
    return value.n_tokens in (own, own + (before.n_tokens if before is not None else 0))


def _add_realization(database: Database, value: Realization, snapshots: dict[str, SnapshotRecord]) -> None:
    database.add_realization(value)
    snapshot = snapshots.get(value.snapshot or "")
    if snapshot is None or database.tree.snapshot(snapshot.id) is not None:
        return
    ids = database.path_tokens(value.turn, value.realm, at_least=snapshot.n_open)
    if ids is None:
        return
    with contextlib.suppress(InputError):  # its blocks are lost: nothing can lead to it
        open_ids = ids[len(ids) - snapshot.n_open :]
        realm = database.add_realm(value.realm)
        database.tree.add_snapshot(snapshot, realm, value.tail or value.last_block, open_ids)
        database.add_realization(value)  # again: now the snapshot that it names is there


def known_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows of the kinds that this version knows, with the keys that they need."""
    needed = {
        "agent": "name space",
        "meta": "key value",
        "head": "turn",
        "turn": "id parent prompt reply system settings finish_reason cell_id execution created",
        "realization": "turn fingerprint codec token_ids n_tokens last_block tail snapshot",
    }
    return [row for row in rows if set(needed.get(row.get("kind", ""), "unknown").split()) <= row.keys()]
