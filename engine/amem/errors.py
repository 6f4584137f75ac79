"""Every error that amem raises on purpose.

The tree of them::

    AmemError
    ├── InputError            a request that cannot be served as asked; nothing has changed
    │   ├── ContextOverflow   the prompt and its reply do not fit the model's context
    │   └── UnknownTurn       no such turn, or it is not on this agent's tree
    ├── ModelError            a model that cannot be found, read or carried
    │   └── UnsupportedModel  its attention does not pass through a function that we carry
    ├── MemoryBudgetError     the request needs more K/V memory than the budget leaves
    ├── StoreError            the store cannot be read or written
    │   ├── AgentLocked       another engine or process is this agent's writer
    │   ├── CorruptState      stored bytes do not match their checksum
    │   ├── StoreFull         the disk or the quota is full
    │   └── StoreTooNew       written by a newer version of amem
    ├── Cancelled             the request was cancelled; the agent is as it was before
    └── EngineClosed          the engine was closed, or its thread has died
"""

from __future__ import annotations


class AmemError(Exception):
    """Base of all errors of amem. Its text says what happened and what to do."""


class InputError(AmemError, ValueError):
    """Input that was refused before anything changed."""


class ContextOverflow(InputError):
    """The prompt and its reply do not fit the model's context length."""


class UnknownTurn(InputError):
    """No such turn in this agent's tree."""


class ModelError(AmemError):
    """A model that cannot be found or read."""


class UnsupportedModel(ModelError):
    """A model whose attention cannot be carried exactly."""


class MemoryBudgetError(AmemError):
    """The K/V that a request needs do not fit the memory budget."""


class StoreError(AmemError):
    """The store on disk cannot be read or written."""


class AgentLocked(StoreError):
    """Another engine or process holds this agent."""


class CorruptState(StoreError):
    """Stored bytes that do not match their checksum. They were set aside and are never used."""


class StoreFull(StoreError):
    """No space left on the disk or in the quota."""


class StoreTooNew(StoreError):
    """A store that a newer version of amem wrote."""


class Cancelled(AmemError):
    """The request was cancelled; its agent is as it was before."""


class EngineClosed(AmemError):
    """The engine is closed, or its thread has died."""
