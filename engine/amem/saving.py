"""How a turn gets to the disk: blocks while it runs, the rest with its commit; without room for them, its text."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from amem.errors import StoreError
from amem.kv.codec import GROUP
from amem.kv.run import BLOCK_GROUPS
from amem.store.records import BLOCK_TOKENS, BlockRecord, NewTurn, SnapshotRecord, Tokens, TurnRecord

if TYPE_CHECKING:
    from amem.kv.sequence import Buffers, SequenceState
    from amem.session import AgentSession
    from amem.turntree import History


class Saving:
    """What one turn writes. Files that no commit names in the end are removed. It belongs to the owner thread."""

    def __init__(self, session: AgentSession) -> None:
        self._session = session
        self._store, self._realm, self._writer = session.store, session.parts.realm, session.parts.writer
        self._base: BlockRecord | None = None  # the last sealed block that the turn builds on
        self._first_new = 0  # block of the turn
        self._writes: list[Future[BlockRecord]] = []
        self._loose: list[BlockRecord | SnapshotRecord] = []  # files that no commit has named yet

    def begin(self, base: BlockRecord | None) -> None:
        """The last sealed block that is stored of what the turn goes on from."""
        self._base, self._first_new = base, end_of(base) // BLOCK_TOKENS

    # -- while it runs

    def stream(self, sequence: SequenceState, ids: Sequence[int]) -> None:
        """Hand blocks that became full to the writer. ``ids`` are those of all tokens from the first on."""
        n_full = sequence.n_groups // BLOCK_GROUPS
        for index in range(self._first_new + len(self._writes), n_full):
            tensors = sequence.export_block(index * BLOCK_GROUPS, BLOCK_GROUPS)
            before = self._writes[-1] if self._writes else None
            until = np.asarray(ids[: (index + 1) * BLOCK_TOKENS], dtype=np.int32)
            self._writes.append(self._writer.submit(self._write_block, before, index, until, tensors))

    def drop_from(self, position: int) -> None:
        """Give up blocks that reach over a position from which other tokens were fed after they were full."""
        n_same = max(position // BLOCK_TOKENS - self._first_new, 0)
        if other := self._writes[n_same:]:
            self._writer.submit(self._discard, other, [])
            self._writes = self._writes[:n_same]

    def discard(self) -> None:
        """Leave nothing on disk, once the writes that are under way are done."""
        self._writer.submit(self._discard, self._writes, self._loose)
        self._writes, self._loose = [], []

    def _discard(self, writes: Sequence[Future[BlockRecord]], loose: Sequence[BlockRecord | SnapshotRecord]) -> None:
        written = [write.result() for write in writes if write.exception() is None]
        with contextlib.suppress(StoreError):  # closed meanwhile: it is swept then
            self._store.discard([*written, *loose])

    def _write_block(
        self, before: Future[BlockRecord] | None, index: int, ids: Tokens, tensors: Buffers
    ) -> BlockRecord:
        last = before.result() if before is not None else self._base
        parent = last.id if last is not None else None
        stored = self._store.find(self._realm, ids).blocks[index:]
        if stored and stored[0].parent == parent and stored[0].sealed and self._same_bits(stored[0], tensors):
            return stored[0]
        return self._store.write_block(self._realm, parent, index * BLOCK_TOKENS, ids[index * BLOCK_TOKENS :], tensors)

    # -- at its end

    def save(
        self,
        new: NewTurn,
        history: History,
        sequence: SequenceState,
        ids: Sequence[int],
        repeated: Sequence[TurnRecord],
    ) -> int:
        """Write what is not on disk yet, then the turn; gives its id. If it repeats a turn to the last bit: that one's.

        Args:
            new: the turn.
            history: what it follows.
            sequence: the state at its end, whose turn is closed.
            ids: all tokens of that state.
            repeated: turns that it may repeat.

        Raises
        ------
            StoreError: there is no room, or the disk refuses. No turn was made.
        """
        n_full = sequence.n_groups // BLOCK_GROUPS
        blocks = [write.result() for write in self._writes[: n_full - self._first_new]]
        last = blocks[-1].id if blocks else self._base.id if self._base is not None else None
        start, n_tail = n_full * BLOCK_TOKENS, sequence.n_groups % BLOCK_GROUPS
        groups = sequence.export_block(n_full * BLOCK_GROUPS, n_tail) if n_tail else {}
        open_group = sequence.export_snapshot()
        own_ids = np.asarray(ids[len(history.token_ids) :], dtype=np.int32)
        same = self._same_turn(repeated, new.reply, own_ids, last, groups, open_group)
        if same is not None:
            self._store.set_head(same)
            return same
        tail = snapshot = None
        if groups:
            tail_ids = np.asarray(ids[start : start + n_tail * GROUP], dtype=np.int32)
            tail = self._store.write_block(self._realm, last, start, tail_ids, groups)
            self._loose.append(tail)
        if open_group:
            snapshot = self._store.write_snapshot(self._realm, len(ids), len(ids) % GROUP, open_group)
            self._loose.append(snapshot)
        self._realize(history)
        return self._store.commit(
            new, self._realm, own_ids, len(ids), blocks=blocks, tail=tail, snapshot=snapshot, last_block=last
        ).id

    def save_text(self, new: NewTurn, history: History, ids: Sequence[int], error: StoreError) -> tuple[int, str]:
        """Save a turn without its blocks, which found no room, or remember it in this process.

        What of its state is not stored is stored with a later turn as long as it is in memory, and else computed again.

        Returns
        -------
            The turn's id, or 0 if not even that was possible; and a sentence that tells it.
        """
        self.discard()
        last = self._base.id if self._base is not None else None
        # all ids of the history, if the turns before it have none for this model
        own_ids = np.asarray(ids if history.rendered else ids[len(history.token_ids) :], dtype=np.int32)
        saved = (
            f"The text of this turn is saved, its attention state is not saved: {error}. It is saved with a later "
            "turn once there is room, and computed again if it leaves memory before."
        )
        held = (
            f"This turn is not saved: {error}. The agent remembers it until this process ends, and saves it with a "
            "later turn once there is room."
        )
        for keep, note in ((self._store.commit, saved), (self._store.hold, held)):
            with contextlib.suppress(StoreError):
                return keep(new, self._realm, own_ids, len(ids), last_block=last).id, note
        return 0, f"This turn is not saved, and the agent will not remember it: {error}"

    def _same_turn(
        self,
        repeated: Sequence[TurnRecord],
        text: str,
        own_ids: Tokens,
        last: str | None,
        groups: Buffers,
        open_group: Buffers,
    ) -> int | None:
        """The turn of these that is the same to the last bit."""
        for turn in repeated:
            known = self._store.realization(turn.id, self._realm)
            if (
                known is not None
                and turn.reply == text
                and np.array_equal(known.token_ids, own_ids)
                and known.last_block == last
                and self._same_bits(self._store.block(known.tail), groups)
                and self._same_bits(self._store.snapshot(known.snapshot), open_group)
            ):
                return turn.id
        return None

    def _same_bits(self, record: BlockRecord | SnapshotRecord | None, tensors: Buffers) -> bool:
        """Whether a stored record holds just these buffers; without a record, whether there are none."""
        if record is None:
            return not tensors
        try:
            stored = self._store.read(record)
        except StoreError:
            return False
        return stored.keys() == tensors.keys() and all(
            stored[name].tobytes() == tensors[name].tobytes() for name in stored
        )

    def _realize(self, history: History) -> None:
        """Record the ids of turns that were rendered from text for this model; their blocks are the new turn's."""
        n_tokens = len(history.token_ids) - sum(len(own) for _, own in history.rendered)
        for turn, own in history.rendered:
            n_tokens += len(own)
            own_ids = np.asarray(own, dtype=np.int32)
            self._store.realize(
                turn, self._realm, own_ids, n_tokens, blocks=(), tail=None, snapshot=None, last_block=None
            )


def end_of(block: BlockRecord | None) -> int:
    """The position after a block's last token; 0 without a block."""
    return block.start + len(block.token_ids) if block is not None else 0
