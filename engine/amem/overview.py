"""An engine at one instant: what its status says."""

from __future__ import annotations

from amem.errors import AgentLocked
from amem.opening import Opened
from amem.results import AgentStatus, EngineStatus, Residency

_RATE_TOKENS = 256  #: of the chunk by which the prefill rate is told


def engine_status(opened: Opened, space: str) -> EngineStatus:
    """The engine and the agents of a space. Every figure is read or measured now, in the owner thread."""
    parts = opened.parts
    agents, in_use = _agents(opened, space)
    seconds = parts.scheduler.rate.seconds(0, _RATE_TOKENS)
    return EngineStatus(
        model=parts.model_name,
        model_path=str(opened.model_path),
        fingerprint=parts.realm.fingerprint,
        codec=parts.realm.codec,
        codec_choice=opened.codec_choice,
        attention=opened.attention,
        device=opened.device,
        blas=opened.blas,
        context_length=parts.context_length,
        memory_budget=parts.pool.total,
        hot_bytes=parts.pool.used,
        peak_hot_bytes=parts.pool.peak,
        disk_quota=opened.quota,
        disk_bytes=parts.store.disk_bytes,
        bytes_written=parts.store.bytes_written,
        store=str(opened.root),
        space=space,
        agents=tuple(agents),
        warnings=(*opened.warnings, *parts.store.reports, *in_use),
        prefetch=parts.prefetch.status() if parts.prefetch is not None else None,
        inter_token=parts.scheduler.gaps.percentiles(),
        prefill_tokens_per_second=_RATE_TOKENS / seconds if seconds else None,
    )


def _agents(opened: Opened, space: str) -> tuple[list[AgentStatus], list[str]]:
    """All agents of a space, and who holds those that others use."""
    agents: list[AgentStatus] = []
    in_use: list[str] = []
    for entry in opened.parts.store.agents(space):
        try:
            agents.append(opened.roster.status(entry))
        except AgentLocked as error:
            in_use.append(str(error))
            where = Residency.WARM if entry.n_turns else Residency.EMPTY
            agents.append(
                AgentStatus(entry.name, entry.space, where, 0, entry.n_turns, 0, entry.nbytes, None, False, True)
            )
    return agents, in_use
