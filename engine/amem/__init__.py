"""Notebook agents that keep their attention state: the engine.

>>> from amem import Engine
>>> with Engine(store="/tmp/agents") as engine:  # doctest: +SKIP
...     engine.agent("planner").ask("Plan a launch.").text
"""

from amem.agent import Agent
from amem.capture import Capture, LayerCapture, capture_attention
from amem.engine import Engine
from amem.errors import (
    AgentLocked,
    AmemError,
    Cancelled,
    ContextOverflow,
    CorruptState,
    EngineClosed,
    InputError,
    MemoryBudgetError,
    ModelError,
    StoreError,
    StoreFull,
    StoreTooNew,
    UnknownTurn,
    UnsupportedModel,
)
from amem.fidelity.figures import Fidelity, Receipt
from amem.results import (
    AgentStatus,
    BlockInfo,
    BlockMap,
    EngineStatus,
    Event,
    InterToken,
    LayerBlocks,
    Match,
    PrefetchStatus,
    Reply,
    ReplyMetrics,
    Residency,
    TurnInfo,
    Why,
)

__all__ = [
    "Agent",
    "AgentLocked",
    "AgentStatus",
    "AmemError",
    "BlockInfo",
    "BlockMap",
    "Cancelled",
    "Capture",
    "ContextOverflow",
    "CorruptState",
    "Engine",
    "EngineClosed",
    "EngineStatus",
    "Event",
    "Fidelity",
    "InputError",
    "InterToken",
    "LayerBlocks",
    "LayerCapture",
    "Match",
    "MemoryBudgetError",
    "ModelError",
    "PrefetchStatus",
    "Receipt",
    "Reply",
    "ReplyMetrics",
    "Residency",
    "StoreError",
    "StoreFull",
    "StoreTooNew",
    "TurnInfo",
    "UnknownTurn",
    "UnsupportedModel",
    "Why",
    "capture_attention",
]
