"""One turn on its way: match, reserve, load, stream blocks to disk, commit or leave no trace."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amem import why
from amem.blocks import block_infos
from amem.errors import ContextOverflow, MemoryBudgetError, StoreError
from amem.kv.codec import GROUP
from amem.kv.sequence import SequenceState
from amem.model.messages import same_json
from amem.restoring import Restore
from amem.results import Match, Reply, ReplyMetrics, Residency, Why
from amem.run.request import Request
from amem.saving import Saving, end_of
from amem.session import AgentSession
from amem.store.records import BLOCK_TOKENS, BlockRecord, Found, NewTurn, TurnRecord
from amem.turntree import History
from amem.wish import Place, Wish


@dataclass(frozen=True)
class Caller:
    """Who asks: a notebook's cell in one of its executions, or nobody that can be told apart."""

    cell_id: str | None = None
    execution: str | None = None


class TurnWork:
    """The `Work` of a message to an agent. It belongs to the owner thread."""

    def __init__(
        self, session: AgentSession, wish: Wish, settings: Mapping[str, Any], caller: Caller, *, cached: bool = False
    ) -> None:
        self._session = session
        self._parts = session.parts
        self._wish = wish
        self._settings = dict(settings)
        self._caller = caller
        self._cached = cached  # a recorded reply will do
        self._why: Why | None = None
        self._found = Found()
        self._wanted: list[int] = []
        self._restore: Restore | None = None
        self._reuse_hot = False
        self._match = Match.COLD
        self._residency = Residency.EMPTY
        self._saving = Saving(session)
        self._notes: list[str] = []
        self._written_before = 0
        self._place = Place(History(None, []), [], "", None)

    @property
    def _history(self) -> History:
        return self._place.history

    # -- match -----------------------------------------------------------------------------------------------------

    def match(self, request: Request) -> None:
        session = self._session
        session.last_used = self._parts.tick()
        self._written_before = self._parts.store.bytes_written
        self._residency = session.residency
        if self._parts.prefetch is not None:
            self._parts.prefetch.asked(session)
        self._place = place = self._wish.place(session)
        self._settings |= place.recorded
        if place.history.rendered:
            self._notes.append(
                "This agent's stored state is of another model or codec, so its history is computed again; that state "
                "is kept for the model it belongs to."
            )
        request.prompt_ids = [*place.history.token_ids, *place.delta]
        self._check_context(request)
        self._wanted = request.prompt_ids
        if self._cached:
            request.recorded = self._recorded(request)
        if request.recorded is None:
            self._find(request)

    def _check_context(self, request: Request) -> None:
        n_prompt, limit = len(request.prompt_ids), self._parts.context_length
        if n_prompt + request.max_tokens > limit:
            room = limit - n_prompt
            remedy = f"give max_tokens of at most {room}" if room > 0 else "shorten the message, or rewind"
            if n_last := self._room_for(limit - request.max_tokens):
                remedy += (
                    f"; or go on with a fork that keeps the system text and the last turns alone: "
                    f"fork(name, keep_last={n_last})"
                )
            raise ContextOverflow(
                f"agent {self._session.name!r}: the history and this message take {n_prompt} tokens, and with "
                f"max_tokens={request.max_tokens} that is more than the model's context of {limit}: {remedy}."
            )

    def _room_for(self, n_tokens: int) -> int:
        """How many of the last turns so many tokens hold, beside the first turn's system text and this prompt."""
        parent = self._history.parent
        if parent is None:
            return 0
        path = self._session.store.path(parent)
        left = n_tokens - len(self._place.delta) - self._session.tree.n_opening(path[0])
        for n_kept, turn in enumerate(reversed(path[1:])):
            known = self._session.store.realization(turn, self._parts.realm)
            left -= len(known.token_ids) if known is not None else n_tokens
            if left < 0:
                return n_kept
        return len(path) - 1

    def _find(self, request: Request) -> None:
        session, history = self._session, self._history
        self._found = session.find(request.prompt_ids, prefer=self._place.prefer)
        hot = session.hot
        stands_there = hot is not None and session.hot_turn == history.parent
        n_hot = hot.n_tokens if hot is not None and stands_there and self._can_be_stored(hot) else 0
        self._reuse_hot = 0 < n_hot < len(request.prompt_ids) and n_hot >= self._found.n_tokens
        request.n_reused = n_hot if self._reuse_hot else self._found.n_tokens
        self._match = self._classify(request.n_reused)

    def _classify(self, n_reused: int) -> Match:
        n_history, delta = len(self._history.token_ids), self._place.delta
        if n_reused >= (n_history + len(delta) - 1) // GROUP * GROUP and self._session.tree.repeats(self._place):
            return Match.EXACT
        if not n_reused:
            return Match.COLD
        if n_history and n_reused >= n_history // GROUP * GROUP:
            return Match.EXTEND
        return Match.DIVERGE

    # -- reserve and load --------------------------------------------------------------------------------------------

    def reserve(self, request: Request) -> bool:
        session, parts = self._session, self._parts
        n_all = len(request.prompt_ids) + request.max_tokens
        hot = session.hot if session.hot_turn == self._history.parent else None
        self._reuse_hot = self._reuse_hot and hot is not None  # it may have been evicted: then it is on disk
        if self._reuse_hot and hot is not None:
            if not parts.make_room(hot.missing_nbytes(n_all, parts.prefill_chunk), keep=session):
                return False
            hot.reserve(n_all, parts.prefill_chunk)
            request.sequence = hot
            return True
        if self._restore is None:

            def find_again() -> Found:
                return session.find(self._wanted, prefer=None)

            taken = session.take_incoming(self._history.parent, self._found.n_tokens, find_again)
            self._restore = taken or Restore(session, self._found, find_again)
        if not self._restore.start(n_all):
            if session.hot is None:
                return False
            session.evict()  # its own state at another turn is in the way
            if not self._restore.start(n_all):
                return False
        request.reading = self._restore.reading
        return True

    def no_room(self, request: Request) -> MemoryBudgetError:
        n_all = len(request.prompt_ids) + request.max_tokens
        nbytes = self._restore.room_nbytes(n_all) if self._restore else self._parts.sequence_nbytes(n_all)
        return self._parts.no_room(nbytes, self._session)

    def load(self, request: Request) -> None:
        if self._restore is not None:
            sequence = self._restore.load()
            request.sequence = sequence  # from here on `abort` releases it
            sequence.reserve(len(request.prompt_ids) + request.max_tokens, self._parts.prefill_chunk)
            self._found = self._restore.found
            self._notes += self._restore.notes
            self._restore = None  # it knows this turn: nothing of a circle is freed before Python looks for circles
            request.n_reused = self._found.n_tokens
            self._match = self._classify(request.n_reused)
        assert request.sequence is not None
        request.checkpoint = request.sequence.checkpoint()
        whole = [b for b in self._found.blocks if b.start + BLOCK_TOKENS <= self._found.n_block_tokens]
        self._saving.begin(self._base_of_hot() if self._reuse_hot else whole[-1] if whole else None)

    def answering(self, request: Request) -> None:  # noqa: ARG002  # of the protocol
        if self._parts.prefetch is not None:
            self._parts.prefetch.expect(self._session)

    # -- while it runs ---------------------------------------------------------------------------------------------

    def progress(self, request: Request) -> None:
        """Hand blocks that became full to the writer, so that a long prefill is on disk before its commit."""
        assert request.sequence is not None
        self._saving.stream(request.sequence, [*request.prompt_ids, *request.kept_ids])

    def _base_of_hot(self) -> BlockRecord | None:
        """The last sealed block that is stored of the state in memory."""
        store, parent = self._session.store, self._history.parent
        known = store.realization(parent, self._parts.realm) if parent is not None else None
        return store.block(known.last_block) if known is not None else None

    def _can_be_stored(self, hot: SequenceState) -> bool:
        """Whether a state in memory still has all that is not stored: a quota or a full disk may have left gaps."""
        return all(lane.first_group <= end_of(self._base_of_hot()) // GROUP for lane in hot.lanes)

    # -- ends --------------------------------------------------------------------------------------------------------

    def commit(self, request: Request) -> Reply:
        started = time.perf_counter()
        sequence, session = request.sequence, self._session
        assert sequence is not None
        session.unmake = None
        sequence.close_turn()
        ids = [*request.prompt_ids, *request.kept_ids]
        if sequence.n_tokens != len(ids):
            raise RuntimeError(f"{sequence.n_tokens} tokens in K/V, {len(ids)} token ids: a fault in amem")
        if request.tail_ids:
            self._saving.drop_from(len(ids) - len(request.tail_ids))
        self._saving.stream(sequence, ids)
        asked = why.Request(self._place, request.prompt_ids, self._caller.cell_id, self._match, request.n_reused)
        self._why = why.explain(session, asked)
        text = request.text.text
        new, repeated = self._new_turn(request, text), self._repeated() if self._place.may_repeat else ()
        saved = True
        try:
            turn = self._saving.save(new, self._history, sequence, ids, repeated)
        except StoreError as error:
            saved = False
            turn, note = self._saving.save_text(new, self._history, ids, error)
            self._notes.append(note)
        if turn:
            session.tree.executions[turn] = self._caller.execution
            sequence.settle()
            session.adopt(sequence, turn)
        else:
            self._drop(request)
        session.saved = saved
        session.new_from = request.n_reused
        if turn:
            self._note_what_was_left(turn)
        if saved and turn in self._history.left:
            self._notes.append(
                "Run again without a change: this is the turn that was there, and nothing was saved twice."
            )
        return self._reply(request, text, request.kept_ids, turn, saved, (time.perf_counter() - started) * 1e3)

    def _note_what_was_left(self, turn: int) -> None:
        """Say which turns are on another branch now."""
        later = [str(turn_id) for turn_id in self._history.left if turn_id != turn]
        if later:
            left = f"turn{'s' if len(later) > 1 else ''} {', '.join(later)}"
            self._notes.append(f"Run again from an earlier point; left on another branch: {left}.")
            if self._replaces_another_cell():
                self._notes.append(
                    "This front end gives cells new ids when the notebook is opened again: if what was left is another "
                    f"cell's, checkout {later[-1]} goes back to it, and --append (append=True) adds a turn instead."
                )

    def _replaces_another_cell(self) -> bool:
        """Whether the turn that this cell replaces may be another's: ids that are URIs (VS Code) count cells anew.

        Known is what this engine saw, and a prompt that is the same.
        """
        session, left = self._session, self._history.left
        if not left or left[0] in session.tree.executions or ":" not in (self._caller.cell_id or ""):
            return False
        return session.store.turns()[left[0]].prompt != self._place.prompt

    def _reply(
        self, request: Request, text: str, token_ids: Sequence[int], turn: int, saved: bool, commit_ms: float
    ) -> Reply:
        session = self._session
        metrics = self._metrics(request, saved, commit_ms)
        session.notes = []
        session.last_ttft_ms = metrics.ttft_ms
        session.last_explained = metrics.explain()
        return Reply(
            text,
            tuple(token_ids),
            request.finish_reason,
            metrics,
            turn,
            stop=request.text.stop,
            logprobs=request.kept_logprobs,
        )

    def _recorded(self, request: Request) -> Reply | None:
        """The reply that this prompt got here before with these settings; None if there is none for this model."""
        store, delta = self._session.store, self._place.delta
        for turn in reversed(self._repeated()):
            known = store.realization(turn.id, self._parts.realm)
            if known is None or known.token_ids[: len(delta)].tolist() != delta:
                continue
            store.set_head(turn.id)
            self._session.tree.executions[turn.id] = self._caller.execution
            self._notes.append(f"This is the recorded reply of turn {turn.id}: nothing was computed.")
            self._note_what_was_left(turn.id)
            self._match, request.n_reused = Match.EXACT, len(request.prompt_ids)
            self._why = Why("The reply was recorded, and asked for as such.", "Nothing.")
            request.finish_reason = turn.finish_reason
            request.marks.now(time.perf_counter())
            return self._reply(request, turn.reply, known.token_ids[len(delta) :].tolist(), turn.id, True, 0.0)
        return None

    def _new_turn(self, request: Request, text: str) -> NewTurn:
        return NewTurn(
            self._history.parent,
            self._place.prompt,
            text,
            request.finish_reason,
            self._place.system,
            self._settings,
            self._caller.cell_id,
            self._caller.execution,
        )

    def _repeated(self) -> list[TurnRecord]:
        """Turns that this cell or client made at this place, with this prompt and these settings; the newest last."""
        turns, place = self._session.store.turns(), self._place
        return [
            turn
            for turn in (turns[number] for number in self._session.store.children(place.history.parent))
            if (turn.cell_id, turn.prompt, turn.system) == (self._caller.cell_id, place.prompt, place.system)
            and _same_settings(turn.settings, self._settings)
        ]

    def abort(self, request: Request) -> None:
        """Leave the agent as it was; without it, if this request made it."""
        self._drop(request)
        if self._session.unmake is not None:
            self._session.unmake()

    def _drop(self, request: Request) -> None:
        """Leave no trace of the request, in memory or on disk."""
        self._saving.discard()
        session, sequence = self._session, request.sequence
        request.sequence = None
        if self._restore is not None:
            self._restore.abandon()
        if sequence is None:
            return
        if sequence is not session.hot:
            sequence.release()
        elif request.checkpoint is not None and sequence.rollback(request.checkpoint):
            sequence.settle()
        else:
            session.evict()

    def _metrics(self, request: Request, saved: bool, commit_ms: float) -> ReplyMetrics:
        marks, session, parts = request.marks, self._session, self._parts
        decode_s = marks.last_token - marks.first_token
        n = len(request.generated)
        restore_ms = (marks.restored - marks.matched - request.waited_s) * 1e3
        again = parts.scheduler.rate.seconds(0, request.n_reused)
        return ReplyMetrics(
            agent=session.name,
            model=parts.model_name,
            codec=parts.realm.codec,
            match=self._match,
            residency=self._residency,
            prompt_tokens=len(request.prompt_ids),
            reused_tokens=request.n_reused,
            computed_tokens=request.n_computed,
            generated_tokens=n,
            ttft_ms=(marks.first_token - marks.submitted) * 1e3,
            queue_ms=(marks.admitted - marks.submitted + request.waited_s) * 1e3,
            match_ms=(marks.matched - marks.admitted) * 1e3,
            restore_ms=restore_ms,
            prefill_ms=(marks.prefilled - marks.restored) * 1e3,
            first_decode_ms=(marks.first_token - marks.prefilled) * 1e3,
            decode_ms=decode_s * 1e3,
            commit_ms=commit_ms,
            tokens_per_second=(n - 1) / decode_s if n > 1 and decode_s > 0 else 0.0,
            hot_bytes=session.hot_bytes,
            disk_bytes=session.store.nbytes,
            bytes_written=parts.store.bytes_written - self._written_before,
            saved=saved,
            blocks=block_infos(session),
            notes=(*session.notes, *self._notes),
            recompute_ms=again * 1e3 if again is not None else None,
            saved_ms=again * 1e3 - (restore_ms if request.n_reused else 0.0) if again is not None else None,
            why=self._why,
        )


def _same_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two turns' settings are the same; a temperature of 0 is one of 0.0, which in JSON they are not."""
    return (
        dict(one) == dict(other)
        and same_json(one.get("tools"), other.get("tools"), ordered=True)
        and same_json(one.get("messages"), other.get("messages"))
    )
