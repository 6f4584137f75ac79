"""An engine's agents over HTTP, in the forms that clients of OpenAI and of Anthropic speak."""

from amem.serve.keys import Keys
from amem.serve.limits import Limits
from amem.serve.server import Server

__all__ = ["Keys", "Limits", "Server"]
