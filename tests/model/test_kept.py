"""Compiled kernels that are kept on disk: only those of the sources that are there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import amem
from amem.kernels import forget_what_others_compiled


def test_kernels_of_other_sources_are_forgotten(tmp_path):
    """Whichever file changed; and none while nothing did."""
    kept = tmp_path / "__pycache__"
    kept.mkdir()
    (tmp_path / "one.py").write_text("a = 1")
    (tmp_path / "other.py").write_text("b = 2")
    compiled = [kept / "one.f-1.py311.nbi", kept / "one.f-1.py311.1.nbc"]
    for changes in (False, True):
        for file in compiled:
            file.write_bytes(b"")
        if changes:
            (tmp_path / "other.py").write_text("b = 3")
        assert forget_what_others_compiled(tmp_path) == 2
        assert not any(file.exists() for file in compiled)
        for file in compiled:
            file.write_bytes(b"")
        assert forget_what_others_compiled(tmp_path) == 0
        assert all(file.exists() for file in compiled)


def test_a_folder_that_cannot_be_written_is_left_alone(tmp_path):
    """No error: numba keeps its kernels elsewhere then."""
    (tmp_path / "one.py").write_text("a = 1")
    (tmp_path / "__pycache__").write_text("a file in its place")
    assert forget_what_others_compiled(tmp_path) == 0


def test_without_compilation_mlx_computes(tiny_model_path, tmp_path):
    """`NUMBA_DISABLE_JIT`, which debuggers set: a warning, and replies all the same."""
    code = (
        "from amem import Engine\n"
        f"with Engine({str(tiny_model_path)!r}, {str(tmp_path / 'store')!r}, memory='200MB') as e:\n"
        "    print(len(e.agent('a').ask('Hello.', max_tokens=2).token_ids), e.status().attention, e.status().warnings)"
    )
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.startswith("2 reference")
    assert "NUMBA_DISABLE_JIT" in done.stdout or sys.platform != "linux"


@pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("numba") is None, reason="needs numba, and Linux"
)
def test_damaged_kernels_are_compiled_again(tiny_model_path, tmp_path):
    """An empty index, as a crash may leave it, costs a compilation and nothing else: no hang, no slow replies."""
    engine = Path(amem.__file__).parent
    copied = tmp_path / "engine"
    shutil.copytree(engine, copied / "amem")
    code = (
        "from amem import Engine\n"
        f"with Engine({str(tiny_model_path)!r}, {str(tmp_path / 'store')!r}, memory='200MB') as e:\n"
        "    print(len(e.agent('a').ask('Hello.', max_tokens=2).token_ids), e.status().attention, e.status().warnings)"
    )
    environment = os.environ | {"PYTHONPATH": str(copied)}
    for _ in range(2):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300)
        assert done.stdout.startswith("2 cpu ()"), done.stdout + done.stderr
        indices = list((copied / "amem" / "kernels" / "__pycache__").glob("team._serve*.nbi"))
        assert indices
        for file in indices:
            file.write_bytes(b"")
