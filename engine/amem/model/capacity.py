"""How many bytes an agent's attention state takes, and how many agents a memory holds: pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from amem.errors import InputError
from amem.model.spec import (
    BLOCK_TOKENS,
    CHANNEL_BITS,
    GROUP_TOKENS,
    LayerGroup,
    ModelCacheSpec,
    exact_first_tokens,
    group_nbytes,
)
from amem.sizes import format_size

CONTEXTS = (4096, 8192, 16384, 32768)
TABLE_CODECS = ("q4", "q4-affine", "fp16")  #: of the table, unless others are asked for

#: What the paper's Q4 takes of FP16 (arXiv 2603.04428, section 3): 4.5 bits of 16, rounded as there.
PAPER_Q4_RATIO = 0.281

_BLOCK_GROUPS = BLOCK_TOKENS // GROUP_TOKENS


@dataclass(frozen=True)
class Capacity:
    """The attention state of one agent in bytes, part by part, and how many such agents fit a memory."""

    codec: str
    context: int  #: tokens of each agent
    memory_nbytes: int
    full_nbytes: int  #: sealed groups of layers that see everything
    window_nbytes: int  #: sealed blocks that the windows of the others touch
    first_nbytes: int  #: the first tokens, where the codec keeps them exactly
    state_nbytes: int  #: recurrent state
    open_nbytes_average: int  #: an open group of 32 tokens, exact
    open_nbytes_most: int  #: one of 64 tokens

    @property
    def sealed_nbytes(self) -> int:
        """All that does not depend on how full the open group is."""
        return self.full_nbytes + self.window_nbytes + self.first_nbytes + self.state_nbytes

    @property
    def agent_nbytes_average(self) -> int:
        """One agent's bytes, averaged over where its open group ends."""
        return self.sealed_nbytes + self.open_nbytes_average

    @property
    def agent_nbytes_most(self) -> int:
        """One agent's bytes with its open group full."""
        return self.sealed_nbytes + self.open_nbytes_most

    @property
    def agents(self) -> int:
        """Agents that fit, each with its open group full."""
        return _fitting(self.memory_nbytes, self.agent_nbytes_most)

    @property
    def agents_average(self) -> int:
        """Agents that fit, with open groups half full as they are on average."""
        return _fitting(self.memory_nbytes, self.agent_nbytes_average)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain values that `json.dumps` takes, the totals included."""
        totals = ("agent_nbytes_average", "agent_nbytes_most", "agents_average", "agents")
        return asdict(self) | {name: getattr(self, name) for name in totals}


def _fitting(memory_nbytes: int, agent_nbytes: int) -> int:
    return memory_nbytes // agent_nbytes if agent_nbytes else 0


def capacity(spec: ModelCacheSpec, *, memory_bytes: int, context: int, codec: str) -> Capacity:
    """How many agents of ``context`` tokens fit ``memory_bytes``.

    Layers that see everything hold their whole groups; windowed ones the blocks of 256 tokens that the next token's
    window touches; all of them an open group and, where the codec says so, the first tokens in the compute dtype.

    Raises
    ------
    InputError
        An unknown codec, or a negative size.
    """
    if context < 0 or memory_bytes < 0:
        raise InputError("context and memory cannot be negative.")
    full = windowed = 0
    for group in spec.groups:
        nbytes = group_nbytes(codec, group, spec.dtype)
        if group.window is None:
            full += nbytes * (context // GROUP_TOKENS)
        else:
            windowed += nbytes * _BLOCK_GROUPS * _blocks_touched(group, context)
    n_first = exact_first_tokens(codec) if context >= GROUP_TOKENS else 0
    return Capacity(
        codec=codec,
        context=context,
        memory_nbytes=memory_bytes,
        full_nbytes=full,
        window_nbytes=windowed,
        first_nbytes=spec.exact_nbytes(n_first),
        state_nbytes=spec.state_nbytes,
        open_nbytes_average=spec.exact_nbytes(GROUP_TOKENS // 2),
        open_nbytes_most=spec.exact_nbytes(GROUP_TOKENS),
    )


def _blocks_touched(group: LayerGroup, context: int) -> int:
    """Blocks with sealed groups, from the first that the token at position ``context`` sees."""
    assert group.window is not None
    sealed = context // GROUP_TOKENS * GROUP_TOKENS
    first_block = max(0, context - group.window + 1) // BLOCK_TOKENS
    return max(0, -(-sealed // BLOCK_TOKENS) - first_block)


def paper_nbytes(spec: ModelCacheSpec, *, context: int, codec: str) -> int:
    """One agent's bytes as the paper counts them: every layer at full length, Q4 at 0.281 of FP16, nothing else.

    Codecs that it does not have are counted in the same way: half a bit of scale and bias beside each value's code.
    """
    fp16 = sum(group.exact_nbytes(context, "float16") for group in spec.groups)
    if codec.startswith("q4"):
        return int(fp16 * PAPER_Q4_RATIO)
    return int(fp16 * (CHANNEL_BITS[codec] + 0.5) / 16) if codec in CHANNEL_BITS else fp16


@dataclass(frozen=True)
class CapacityRow:
    """A line of the table: our count beside the paper's way of counting."""

    model: str
    context: int  #: tokens of each agent
    codec: str
    memory_nbytes: int
    agent_nbytes_average: int
    agent_nbytes_most: int
    agents_average: int
    agents: int
    paper_agent_nbytes: int
    paper_agents: int

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of plain values that `json.dumps` takes."""
        return asdict(self)


def capacity_table(
    specs: Mapping[str, ModelCacheSpec],
    *,
    memory_bytes: int,
    contexts: Iterable[int] = CONTEXTS,
    codecs: Iterable[str] = TABLE_CODECS,
) -> tuple[CapacityRow, ...]:
    """A row for each model, context and codec, in the order given."""
    contexts, codecs = tuple(contexts), tuple(codecs)
    return tuple(
        _row(name, spec, capacity(spec, memory_bytes=memory_bytes, context=context, codec=codec))
        for name, spec in specs.items()
        for context in contexts
        for codec in codecs
    )


def _row(name: str, spec: ModelCacheSpec, ours: Capacity) -> CapacityRow:
    paper = paper_nbytes(spec, context=ours.context, codec=ours.codec)
    return CapacityRow(
        model=name,
        context=ours.context,
        codec=ours.codec,
        memory_nbytes=ours.memory_nbytes,
        agent_nbytes_average=ours.agent_nbytes_average,
        agent_nbytes_most=ours.agent_nbytes_most,
        agents_average=ours.agents_average,
        agents=ours.agents,
        paper_agent_nbytes=paper,
        paper_agents=_fitting(ours.memory_nbytes, paper),
    )


_HEADINGS = ("model", "context", "codec", "bytes per agent", "agents", "paper's count", "agents")


def format_table(rows: Sequence[CapacityRow]) -> str:
    """The rows as a Markdown table that reads well in a terminal too.

    "bytes per agent" has the open group at its average; "agents" says how many fit with it full, then at its average
    where that makes a difference.
    """
    lines = [_HEADINGS, *(_cells(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADINGS))]
    rule = ["-" * width if column in {0, 2} else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    out = [_join(lines[0], widths), "|" + "|".join(f" {cell} " for cell in rule) + "|"]
    out += [_join(line, widths) for line in lines[1:]]
    return "\n".join(out)


def _cells(row: CapacityRow) -> tuple[str, ...]:
    agents = str(row.agents) if row.agents == row.agents_average else f"{row.agents} ({row.agents_average})"
    return (
        row.model,
        f"{row.context // 1024}K" if row.context % 1024 == 0 else str(row.context),
        row.codec,
        format_size(row.agent_nbytes_average),
        agents,
        format_size(row.paper_agent_nbytes),
        str(row.paper_agents),
    )


def _join(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell.ljust(width) if column in {0, 2} else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "| " + " | ".join(padded) + " |"
