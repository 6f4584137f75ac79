"""An agent's blocks as people see them: what each holds, where it is, and who shares it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from amem.kv.codec import GROUP
from amem.kv.run import BLOCK_GROUPS
from amem.results import BlockInfo, BlockMap, LayerBlocks, Residency
from amem.store.records import BLOCK_TOKENS

if TYPE_CHECKING:
    from amem.kv.sequence import SequenceState
    from amem.session import AgentSession


@dataclass(frozen=True)
class _Stretch:
    """Tokens of an agent, and the state in memory that has them."""

    token_ids: Sequence[int]
    residency: Residency
    state: SequenceState | None
    new_from: int  #: position from which they were computed lately


def _head(session: AgentSession) -> _Stretch:
    """The tokens up to where the agent stands."""
    state = session.hot if session.residency is Residency.HOT else None
    return _Stretch(session.head_tokens().tolist(), session.residency, state, session.new_from)


def _now(session: AgentSession) -> _Stretch:
    """Those that a request has in its state by now, if one runs; else the head's."""
    request = session.parts.scheduler.running(session)
    if request is None or (state := request.sequence) is None:
        return _head(session)
    ids = [*request.prompt_ids, *request.generated][: state.n_tokens]
    return _Stretch(ids, Residency.HOT, state, request.n_reused)


def block_infos(session: AgentSession, lane: int = 0) -> tuple[BlockInfo, ...]:
    """The blocks of an agent's head in one group of layers, from its first token on."""
    return _infos(session, _head(session), lane)


def _infos(session: AgentSession, drawn: _Stretch, lane: int) -> tuple[BlockInfo, ...]:
    parts, residency, n_tokens = session.parts, drawn.residency, len(drawn.token_ids)
    group = parts.layout.spec.groups[lane]
    size, open_size = parts.lane_group_nbytes(lane), parts.lane_open_token_nbytes(lane)
    held_from = drawn.state.lanes[lane].first_group if drawn.state is not None else 0
    shared = _shared_blocks(session, drawn.token_ids)
    infos: list[BlockInfo] = []
    for start in range(0, n_tokens, BLOCK_TOKENS):
        n = min(BLOCK_TOKENS, n_tokens - start)
        groups, n_open = n // GROUP, n % GROUP
        new = start + n > drawn.new_from
        where = residency
        if residency is Residency.HOT and group.window is not None and start // GROUP + BLOCK_GROUPS <= held_from:
            where = Residency.WARM
        is_shared = start // BLOCK_TOKENS in shared
        if groups:
            kind = "sealed" if groups == BLOCK_GROUPS else "tail"
            infos.append(BlockInfo(len(infos), start, groups * GROUP, kind, where, is_shared, new, groups * size))
        if n_open:
            at = start + groups * GROUP
            infos.append(BlockInfo(len(infos), at, n_open, "open", where, is_shared, new, n_open * open_size))
    return tuple(infos)


def block_map(session: AgentSession) -> BlockMap:
    """Every group of layers with its blocks, and the text in each; while a request runs, what it has by now."""
    parts, drawn = session.parts, _now(session)
    ids = drawn.token_ids
    layers = tuple(
        LayerBlocks(parts.lane_label(lane), len(group.layers), _infos(session, drawn, lane))
        for lane, group in enumerate(parts.layout.spec.groups)
    )
    texts = tuple(
        parts.prompter.decode(ids[start : start + BLOCK_TOKENS]) for start in range(0, len(ids), BLOCK_TOKENS)
    )
    return BlockMap(session.name, parts.realm.codec, len(ids), layers, texts)


def _shared_blocks(session: AgentSession, token_ids: Sequence[int]) -> set[int]:
    if not token_ids:
        return set()
    found = session.store.find(session.parts.realm, np.asarray(token_ids, dtype=np.int32))
    return {block.start // BLOCK_TOKENS for block in found.blocks if session.store.shared(block.id)}
