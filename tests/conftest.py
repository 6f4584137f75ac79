"""What all rooms' tests share: the fast BLAS, small models, and the bundled one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from amem.model import blas, bundled
from tests.tiny import write_tiny_model

blas.ensure()
settings.register_profile("patient", deadline=None)  # a busy machine is no fault of the code
settings.load_profile("patient")


@pytest.fixture(scope="session")
def bundled_model_path() -> Path:
    """Folder of the bundled model, fetched and converted on first use."""
    return bundled.path()


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random llama with 2 layers, 4 query and 2 key heads of 32."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")
