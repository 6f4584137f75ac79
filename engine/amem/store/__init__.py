"""Agents on disk: a prefix tree of blocks, the turns as text, and nothing that a crash can break."""

from amem.store.agent import AgentStore
from amem.store.records import (
    BLOCK_TOKENS,
    GROUP_TOKENS,
    AgentEntry,
    BlockRecord,
    Deleted,
    Found,
    NewTurn,
    Realization,
    Realm,
    SnapshotRecord,
    Tensors,
    Tokens,
    TurnRecord,
    Written,
)
from amem.store.store import Store
from amem.store.transfer import export_agent, import_agent
from amem.store.verify import VerifyReport, verify

__all__ = [
    "BLOCK_TOKENS",
    "GROUP_TOKENS",
    "AgentEntry",
    "AgentStore",
    "BlockRecord",
    "Deleted",
    "Found",
    "NewTurn",
    "Realization",
    "Realm",
    "SnapshotRecord",
    "Store",
    "Tensors",
    "Tokens",
    "TurnRecord",
    "VerifyReport",
    "Written",
    "export_agent",
    "import_agent",
    "verify",
]
