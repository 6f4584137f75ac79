"""Kernels for notebooks."""

import os

import pytest

from tests.jupyter.kernels import ROOT


@pytest.fixture
def environment(monkeypatch):
    """What a kernel inherits: this checkout, the bundled model, plots as pictures."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "engine"), str(ROOT)]))
    for name in ("AMEM_MODEL", "AMEM_MEMORY", "MPLBACKEND"):
        monkeypatch.delenv(name, raising=False)
