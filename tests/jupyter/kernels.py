"""A real kernel for tests: run cells as a front end does, read their outputs, interrupt."""

from __future__ import annotations

import os
import queue
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600


@dataclass
class Ran:
    """What came of one cell."""

    status: str
    ename: str = ""
    outputs: dict = field(default_factory=dict)  #: the last form of each display, by display id or number
    stream: str = ""
    error: str = ""  #: the error output

    @property
    def text(self):
        return "\n".join(output["data"].get("text/plain", "") for output in self.outputs.values()) + self.stream

    @property
    def metrics(self):
        return [output["metadata"]["amem"] for output in self.outputs.values() if "amem" in output["metadata"]]


class Kernel:
    """One running kernel and a client of it."""

    def __init__(self, manager, client):
        self.manager = manager
        self.client = client

    def send(self, source, cell_id=None):
        """Queue a cell, and return its request's id."""
        self.client.session.metadata = {"cellId": cell_id} if cell_id else {}
        return self.client.execute(source)

    def wait(self, request, until=None):
        """Read what a cell shows until it is idle again, or until its text holds `until`."""
        ran = Ran("")
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            message = self.client.get_iopub_msg(timeout=TIMEOUT_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind in ("display_data", "update_display_data", "execute_result"):
                key = content.get("transient", {}).get("display_id") or len(ran.outputs)
                ran.outputs[key] = content
            elif kind == "stream":
                ran.stream += content["text"]
            elif kind == "error":
                ran.error = "\n".join(content["traceback"])
            if until is not None and until in ran.text:
                return ran
            if kind == "status" and content["execution_state"] == "idle":
                reply = self.reply(request)
                ran.status, ran.ename = reply["status"], reply.get("ename", "")
                return ran
        raise TimeoutError(ran.text)

    def reply(self, request):
        """The reply to a request."""
        while True:
            try:
                message = self.client.get_shell_msg(timeout=TIMEOUT_S)
            except queue.Empty:
                raise TimeoutError from None
            if message["parent_header"].get("msg_id") == request:
                return message["content"]

    def run(self, source, cell_id=None):
        """Run a cell to its end."""
        return self.wait(self.send(source, cell_id))


@contextmanager
def kernel(*, spec=None, **environment):
    """A kernel, ended at the block's end; of Python's own kernelspec, or of one in a folder."""
    environ = {name: value for name, value in os.environ.items() if name != "JPY_SESSION_NAME"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "engine"), str(ROOT)])
    specs = KernelSpecManager() if spec is None else KernelSpecManager(kernel_dirs=[str(spec.parent)])
    name = "python3" if spec is None else spec.name
    manager = KernelManager(kernel_name=name, kernel_spec_manager=specs, transport="ipc")
    manager.start_kernel(env={**environ, **environment}, cwd=str(ROOT))
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=TIMEOUT_S)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=False)
        manager.cleanup_resources()
