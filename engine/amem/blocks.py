"""An agent's blocks as people see them: what each holds, where it is, and who shares it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amem.kv.codec import GROUP
from amem.kv.run import BLOCK_GROUPS
from amem.results import BlockInfo, BlockMap, LayerBlocks, Residency
from amem.store.records import BLOCK_TOKENS

if TYPE_CHECKING:
    from amem.session import AgentSession


def block_infos(session: AgentSession, lane: int = 0) -> tuple[BlockInfo, ...]:
    """The blocks of an agent's head in one group of layers, from its first token on."""
    parts, residency = session.parts, session.residency
    n_tokens = len(session.head_tokens())
    group = parts.layout.spec.groups[lane]
    size, open_size = parts.lane_group_nbytes(lane), parts.lane_open_token_nbytes(lane)
    held_from = session.hot.lanes[lane].first_group if session.hot is not None and residency is Residency.HOT else 0
    shared = _shared_blocks(session)
    infos: list[BlockInfo] = []
    for start in range(0, n_tokens, BLOCK_TOKENS):
        n = min(BLOCK_TOKENS, n_tokens - start)
        groups, n_open = n // GROUP, n % GROUP
        new = start + n > session.new_from
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
    """Every group of layers with its blocks, and the text that lies in each."""
    parts, ids = session.parts, session.head_tokens()
    layers = tuple(
        LayerBlocks(parts.lane_label(lane), len(group.layers), block_infos(session, lane))
        for lane, group in enumerate(parts.layout.spec.groups)
    )
    texts = tuple(
        parts.prompter.decode(ids[start : start + BLOCK_TOKENS].tolist()) for start in range(0, len(ids), BLOCK_TOKENS)
    )
    return BlockMap(session.name, parts.realm.codec, len(ids), layers, texts)


def _shared_blocks(session: AgentSession) -> set[int]:
    ids = session.head_tokens()
    if not len(ids):
        return set()
    found = session.store.find(session.parts.realm, ids)
    return {block.start // BLOCK_TOKENS for block in found.blocks if session.store.shared(block.id)}
