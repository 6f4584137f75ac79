"""What the pages show is so: programs run, commands are there with these options, links lead somewhere, all of it builds."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from amem import Engine
from amem.cli import parser
from amem.model import bundled
from amem_jupyter.commands import BY_NAME, MAGICS
from amem_jupyter.parse import parse, parse_amem
from benchmarks import peers
from tests.docs.pages import DOCS, PAGES, ROOT, blocks

SERVED = "http://127.0.0.1:8000"


def _id(page):
    return str(page.relative_to(ROOT))


def _lines(language):
    """The lines of all blocks in a language, each with its page."""
    return [
        pytest.param(line, id=f"{_id(page)}: {line[:60]}")
        for page in PAGES
        for name, text in blocks(page)
        if name == language
        for line in text.splitlines()
        if line.strip()
    ]


@pytest.fixture
def small_bundled_model(monkeypatch, tmp_path, tiny_model_path):
    """What is told of the bundled model runs on a tiny one, in a home of its own."""
    monkeypatch.setattr(bundled, "path", lambda _progress=None: tiny_model_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("AMEM_STORE", "AMEM_MODEL", "AMEM_MEMORY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "guide" / "python.md"], ids=_id)
def test_programs_run_as_they_stand(page, small_bundled_model, capsys):
    """One after the other, as a reader would type them."""
    names = {"__name__": "__main__"}
    for number, (language, source) in enumerate(blocks(page)):
        if language == "python":
            exec(compile(source, f"{page.name}, block {number}", "exec"), names)
    assert capsys.readouterr().out.strip()
    assert "engine" in names


def test_a_clients_program_is_served(small_bundled_model, tmp_path, capsys):
    """It names its agent, which is there afterwards."""
    serve = pytest.importorskip("amem.serve", reason="the serve extra is not installed")
    [source] = [text for language, text in blocks(DOCS / "guide" / "server.md") if language == "python"]
    assert SERVED in source
    with Engine("smollm2-135m", tmp_path / "store", memory="200MB") as engine:
        server = serve.Server(engine, port=0).start()
        try:
            exec(source.replace(SERVED, server.url), {})
        finally:
            server.stop()
        assert "planner" in engine.agents()
    assert capsys.readouterr().out.splitlines()[-1] == "0"


@pytest.mark.parametrize("line", _lines("sh"))
def test_shell_lines_are_ones_that_their_command_takes(line):
    """Commands with their options, targets, extras."""
    words = shlex.split(line, comments=True)
    if words[0] == "amem":
        given = words[1 : words.index("<")] if "<" in words else words[1:]
        if given != ["--help"]:
            parser().parse_args(given)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif Path(words[0]).name.startswith("python"):
        assert words[1] == "-m"
        if words[2] == "benchmarks.peers":
            peers.parser().parse_args(words[3:])
        else:
            assert words[2] == "venv"
    elif "-r" in words:
        assert (ROOT / words[words.index("-r") + 1]).exists()
    else:
        assert ["pip", "install"] == words[:2]
        extras = re.search(r"\[(.*)\]", words[2])[1].split(",")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert set(extras) <= project["optional-dependencies"].keys()


CELLS = [
    pytest.param(text, id=f"{_id(page)}: {text.splitlines()[0][:60]}")
    for page in PAGES
    for name, text in blocks(page)
    if not name and text.startswith("%")
]


@pytest.mark.parametrize("cell", CELLS)
def test_magics_are_ones_that_the_notebook_takes(cell):
    """Each with its options."""
    first, *rest = cell.splitlines()
    magic, _, line = first.partition(" ")
    if magic in MAGICS:
        parse(MAGICS[magic], line)
        assert any(rest)
        return
    for each in (first, *rest):
        magic, _, line = each.partition(" ")
        if magic == "%amem":
            parse_amem(line)
        else:
            assert each == "%load_ext amem_jupyter"


@pytest.mark.parametrize("page", PAGES, ids=_id)
def test_commands_that_are_named_are_there(page):
    """In running text and in tables."""
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"%amem ([a-z]+)", text)) <= BY_NAME.keys()
    assert set(re.findall(r"(%%?agents?)\b", text)) <= MAGICS.keys() | {"%agents"}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=_id)
def test_links_lead_somewhere(page):
    """Those of the pages in docs/ are checked when they are built."""
    text = page.read_text(encoding="utf-8")
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-")
                for line in text.splitlines() if line.startswith("#")}  # fmt: skip
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets
    for target in targets:
        if target.startswith("#"):
            assert target[1:] in headings
        elif "://" not in target:
            assert (page.parent / target.partition("#")[0]).exists(), target


def test_the_reference_has_every_public_name():
    """What `amem` exports is described there."""
    import amem

    text = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    errors = {name for name in amem.__all__ if isinstance(getattr(amem, name), type)
              and issubclass(getattr(amem, name), Exception)}  # fmt: skip
    assert ".. automodule:: amem.errors" in text
    assert {name for name in amem.__all__ if f":: amem.{name}\n" not in text} == errors


@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="the docs extra is not installed")
def test_the_documentation_builds_without_a_warning(tmp_path):
    """Every page, every link, every docstring of the reference."""
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html", "-d", tmp_path / "read"]
    done = subprocess.run([*command, DOCS, tmp_path / "site"], capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    reference = (tmp_path / "site" / "reference" / "command-line.html").read_text(encoding="utf-8")
    assert "amem capacity" in reference
    assert "made of" not in reference
