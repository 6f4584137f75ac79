"""`%amem fidelity NAME`: what it will cost, then what the agent's stored state costs in fidelity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amem_jupyter.errors import Interrupted
from amem_jupyter.live import Output
from amem_jupyter.markup import duration
from amem_jupyter.protocol import AgentLike
from amem_jupyter.tables import text_picture

if TYPE_CHECKING:
    from amem.fidelity.figures import Receipt


def show_receipt(agent: AgentLike, n_tokens: int) -> None:
    """Say what it takes, and then show the receipt in its place.

    Raises
    ------
        Interrupted: the cell was interrupted; the agent is as it was.
    """
    output = Output()
    try:
        receipt = agent.fidelity(n_tokens, progress=lambda sentence: output.show(text_picture(f"{sentence} …")))
    except KeyboardInterrupt:
        output.show(text_picture("interrupted: no receipt"))
        raise Interrupted(f"interrupted; {agent.name} is as it was") from None
    output.show(text_picture(receipt_text(receipt)))


def receipt_text(receipt: Receipt) -> str:
    """Three lines."""
    found = receipt.fidelity
    likeliest = f"the likeliest token is the same in {found.top1_agreement:.1%}"
    return f"""\
{receipt.agent}: {found.n_predictions} predictions from its stored state ({receipt.codec}), beside full precision
KL {found.kl_mean:.2g} nats on average, p99 {found.kl_p99:.2g} · {likeliest} · perplexity {found.perplexity_change:+.2%}
{receipt.n_history} tokens of history were computed again; it took {duration(receipt.seconds * 1000)}"""
