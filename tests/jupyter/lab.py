"""A real JupyterLab in a real browser, for tests: its own folders, its own server, Debian's chromium."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TIMEOUT_MS = 300_000  #: for what the machine may be slow at; every wait ends as soon as its condition holds


@contextmanager
def server(folder, **environment):
    """A JupyterLab on a folder; gives its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("JPY_")}
    for name in ("CONFIG", "DATA", "RUNTIME"):
        environ[f"JUPYTER_{name}_DIR"] = str(folder / f".{name.lower()}")
    environ["JUPYTER_PLATFORM_DIRS"] = "1"
    environ["IPYTHONDIR"] = str(folder / ".ipython")
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "engine"), str(ROOT)])
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root",
        "--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={folder}",
        "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    with (folder / ".server.log").open("wb") as log:
        process = subprocess.Popen(command, env={**environ, **environment}, stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(f"{address}/api/status", folder / ".server.log")
            yield address
        finally:
            process.terminate()
            process.wait(30)


def _wait_for(url, log):
    for _ in range(TIMEOUT_MS // 250):
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                json.load(answer)
                return
        except OSError:
            time.sleep(0.25)
    raise TimeoutError(log.read_text())


@contextmanager
def browser():
    """A chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
            timeout=TIMEOUT_MS,
        )
        try:
            yield chromium
        finally:
            chromium.close()


class Lab:
    """One notebook, open in one browser page."""

    def __init__(self, browser, address, path, *, width=1200, scale=1):
        self.path = path
        self._url = f"{address}/lab/tree/{path.name}?reset"
        self.page = browser.new_page(viewport={"width": width, "height": 1600}, device_scale_factor=scale)
        self.page.set_default_timeout(TIMEOUT_MS)
        self.open()

    def open(self):
        """Open the notebook, or open it again."""
        self.page.goto(self._url)
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self.page.wait_for_function("() => window.jupyterapp !== undefined")
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.ready")
        self.page.wait_for_function(
            "() => window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'",
        )

    def command(self, name, **options):
        """Run one of JupyterLab's commands, without waiting for what it starts."""
        self.page.evaluate(
            "([name, options]) => { window.jupyterapp.commands.execute(name, options) }", [name, options]
        )

    def run_all(self):
        """Run all cells to their end. What they show may take a moment more to be drawn."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")

    def wait_text(self, text, cell=None):
        """Wait until a text is in an output, or in that of a cell; what was written into cells does not count."""
        where = f".jp-Notebook .jp-Cell{'' if cell is None else f':nth-child({cell + 1})'} .jp-Cell-outputArea"
        self.page.wait_for_function(
            "([where, text]) => [...document.querySelectorAll(where)].some(e => e.innerText.includes(text))",
            arg=[where, text],
        )  # fmt: skip

    def wait_idle(self):
        """Wait until no cell is waiting or running."""
        self.page.wait_for_function(
            "() => ![...document.querySelectorAll('.jp-InputPrompt')].some(e => e.innerText.includes('*'))"
        )

    def watch(self, where):
        """Note from now on every text that some elements of the notebook go through."""
        self.page.evaluate(
            """(where) => {
                window.watched = new Set();
                const note = () => document.querySelectorAll(where).forEach((e) => window.watched.add(e.innerText));
                const kinds = { childList: true, subtree: true, characterData: true };
                new MutationObserver(note).observe(document.querySelector(".jp-Notebook"), kinds);
            }""",
            where,
        )

    def watched(self):
        """These texts."""
        return self.page.evaluate("() => [...window.watched]")

    def cell(self, number):
        """A cell, counted from 0."""
        return self.page.locator(f".jp-Notebook .jp-Cell:nth-child({number + 1})")

    def edit(self, number, source):
        """Write something else into a cell."""
        self.page.evaluate(
            "([n, text]) => window.jupyterapp.shell.currentWidget.content.widgets[n].model.sharedModel.setSource(text)",
            [number, source],
        )

    def run(self, number):
        """Run one cell."""
        self.page.evaluate(
            """(number) => {
                const notebook = window.jupyterapp.shell.currentWidget.content;
                notebook.deselectAll();
                notebook.activeCellIndex = number;
                window.jupyterapp.commands.execute('notebook:run-cell');
            }""", number
        )  # fmt: skip

    def shoot(self, number, file):
        """A picture of what a cell shows."""
        shown = self.cell(number).locator(".jp-OutputArea-output").last
        shown.screenshot(path=file, animations="disabled", style=".Toastify { display: none }")

    def text(self):
        """All that the notebook shows."""
        return self.page.locator(".jp-Notebook").inner_text()

    def save(self):
        """Save, and give what was written."""
        self.page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
        return nbformat.read(self.path, as_version=4)

    def restart(self):
        """Restart the kernel, and wait for the new one."""
        self.command("kernelmenu:restart")
        self.page.locator(".jp-Dialog .jp-mod-accept").click()
        self.page.wait_for_selector(".jp-Dialog", state="detached")

    def theme(self, name):
        """Change to another theme, and wait until its colours are there."""
        colour = "getComputedStyle(document.body).getPropertyValue('--jp-layout-color0')"
        before = self.page.evaluate(colour)
        self.page.evaluate("(theme) => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", name)
        self.page.wait_for_function(f"(before) => !['', before].includes({colour})", arg=before)

    def colours(self, element):
        """An element's background and its text's colour upon that, each as red, green and blue from 0 to 255."""
        return element.evaluate(
            """(element) => {
                const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
                let ground = element;
                while ((parts(getComputedStyle(ground).backgroundColor)[3] ?? 1) === 0) ground = ground.parentElement;
                const below = parts(getComputedStyle(ground).backgroundColor).slice(0, 3);
                const [red, green, blue, alpha = 1] = parts(getComputedStyle(element).color);
                const over = [red, green, blue].map((value, at) => Math.round(alpha * value + (1 - alpha) * below[at]));
                return [below, over];
            }"""
        )

    def shutdown(self):
        """End the kernel, as the menu does."""
        self.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.shutdown()")

    def focused(self):
        """What has the focus, as it is read out."""
        return self.page.evaluate(
            "() => document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText"
        )


def write_notebook(path, *sources):
    """A notebook of code cells, of which the ids are c0, c1, ..."""
    cells = [nbformat.v4.new_code_cell(source, id=f"c{i}") for i, source in enumerate(sources)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path
