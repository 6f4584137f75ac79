"""What a person installs: the live widgets' files are in the wheel, and load nothing from elsewhere."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from amem_jupyter.widgets.block_map import BlockMapWidget
from amem_jupyter.widgets.status_board import StatusBoardWidget
from amem_jupyter.widgets.turn_tree import TurnTreeWidget

ROOT = Path(__file__).parents[2]
WIDGETS = {"block_map": BlockMapWidget, "status_board": StatusBoardWidget, "turn_tree": TurnTreeWidget}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The names of the files in a wheel of this tree."""
    builder = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling (the test extra brings it)")
    folder = tmp_path_factory.mktemp("wheel")
    (made,) = builder.WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return set(zipfile.ZipFile(made).namelist())


def test_each_widget_is_one_file_of_python_one_of_javascript_and_one_of_css(wheel):
    """And all of them have one more in common."""
    for name in (*WIDGETS, "panel"):
        for kind in ("py", "js", "css"):
            assert f"amem_jupyter/widgets/{name}.{kind}" in wheel


@pytest.mark.parametrize("widget", WIDGETS.values())
def test_a_widget_asks_nobody_else_for_code_or_style(widget):
    """It works without a network, and tells nobody what is shown."""
    for source in (str(widget._esm), str(widget._css)):
        assert len(source) > 100
        for words in ("http:", "https:", "//cdn", "import ", "import(", "@import", "url(", "fetch("):
            assert words not in source
