"""Folders that cannot be written, for real: a read-only mount, and a process without the right."""

import os
import shutil
import subprocess

import numpy as np
import pytest

from amem.errors import StoreError
from amem.store import Store, verify
from tests.store.child import received, run
from tests.store.samples import SPACE, check, say

IDS = np.arange(900)
NOBODY = 65534


def mount(*arguments):
    """Whether a mount could be made."""
    program = shutil.which("mount")
    return (
        program is not None and not subprocess.run([program, *arguments], check=False, capture_output=True).returncode
    )


@pytest.fixture
def read_only(tmp_path):
    """Makes a folder read-only, for everybody, root too; and writable again."""
    mounted = []

    def make(folder):
        if not mount("--bind", folder, folder):
            pytest.skip("needs the right to mount a folder read-only")
        mounted.append(folder)
        assert mount("-o", "remount,ro,bind", folder)

    def undo():
        while mounted:
            subprocess.run(["umount", "-l", mounted.pop()], check=True)

    yield make, undo
    undo()


def contents(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != "lock"}


def test_a_store_on_a_read_only_disk_is_refused_and_stays_as_it_is(tmp_path, read_only):
    """One clear line says why, and what to do; nothing is changed."""
    make, undo = read_only
    root = tmp_path / "store"
    with Store(root) as store:
        say(store.open("planner", SPACE), None, IDS)
    before = contents(root)
    make(root)
    with pytest.raises(StoreError, match="make it writable or choose another store"):
        Store(root)
    undo()
    assert before == contents(root)
    with Store(root) as store:
        assert verify(store).problems == []
        assert check(store.open("planner", SPACE), IDS) == 900


def test_a_disk_that_becomes_read_only_loses_nothing(tmp_path, read_only):
    """Turns are refused, those before them can be read; writable again, the agent goes on."""
    make, undo = read_only
    root = tmp_path / "store"
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        say(agent, None, IDS[:600])
        turns = agent.turns()
        make(root)
        for _ in range(2):
            with pytest.raises(StoreError, match="cannot be written"):
                say(agent, 1, IDS[600:])
        with pytest.raises(StoreError, match="cannot be written"):
            store.open("critic", SPACE)
        assert turns == agent.turns()
        assert check(agent, IDS) == 600
        undo()
        say(agent, 1, IDS[600:])
    with Store(root) as store:
        agent = store.open("planner", SPACE)
        assert check(agent, IDS) == 900
        assert verify(store).problems == []
        assert store.reports == []


def open_as_nobody(told, root):
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        Store(root).open("planner", SPACE)
    except StoreError as error:
        told.send(str(error))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without rights")
def test_a_process_without_the_right_to_write_is_told_so(tmp_path):
    """Another person's folder: the store says which, and what to do."""
    root = tmp_path / "store"
    with Store(root) as store:
        say(store.open("planner", SPACE), None, IDS)
    for folder in (root, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder.is_relative_to(tmp_path.parent.parent):
            folder.chmod(0o755)
    before = contents(root)
    child, pipe = run(open_as_nobody, root)
    (error,) = received(pipe)
    child.join()
    assert "make it writable or choose another store" in error
    assert before == contents(root)
