"""Options that no engine can have are refused at once, before anything is loaded or made."""

from __future__ import annotations

import pytest

from amem import Engine, InputError
from amem.sizes import count


@pytest.fixture
def loads_nothing(monkeypatch):
    """Opening anything fails the test."""

    def refuse(*_args, **_options):
        raise AssertionError("an engine was opened")

    monkeypatch.setattr("amem.opening.open_parts", refuse)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_batch": 1.5}, "max_batch must be a whole number of at least 1, not 1.5."),
        ({"max_batch": 0}, "max_batch must be a whole number of at least 1, not 0."),
        ({"max_batch": True}, "max_batch must be a whole number of at least 1, not True."),
        ({"io_threads": -1}, "io_threads must be a whole number of at least 0, not -1."),
        ({"io_threads": "2"}, "io_threads must be a whole number of at least 0, not '2'."),
        ({"step_ms": "a"}, "step_ms must be a number of milliseconds above 0, not 'a'."),
        ({"step_ms": 0}, "step_ms must be a number of milliseconds above 0, not 0."),
        ({"step_ms": float("nan")}, "step_ms must be a number of milliseconds above 0, not nan."),
        ({"prefill_chunk": 64.0}, "prefill_chunk must be a whole number of at least 64, not 64.0."),
        ({"prefill_chunk": 100}, "prefill_chunk must be a multiple of 64, not 100."),
        ({"space": 7}, "space must be a text, not 7."),
        ({"memory": "1KB"}, "memory=1 kB holds no agent of any model: give at least 100 kB"),
        ({"memory": "much"}, "'much' is not a size: write it like 500MB, 2GB or 10.2GiB."),
        ({"disk": 0}, "0 is not a size"),
    ],
    ids=str,
)
def test_an_impossible_option_is_refused_in_one_line(options, said, tmp_path, loads_nothing):
    """It names the option and what it may be."""
    with pytest.raises(InputError) as told:
        Engine("smollm2-135m", tmp_path / "store", **options)
    assert str(told.value).startswith(said)
    assert "\n" not in str(told.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("below", [(), ("agents", "deeper")])
def test_a_store_that_is_a_file_is_refused(below, tmp_path, loads_nothing):
    """Or lies below one."""
    file = tmp_path / "notes.txt"
    file.write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match=r"notes\.txt is a file: name another folder"):
        Engine("smollm2-135m", file.joinpath(*below))
    assert "mine" == file.read_text(encoding="utf-8")


def test_counts_have_their_noun():
    """In the singular for one."""
    assert ["0 agents", "1 agent", "2 agents"] == [count(n, "agent") for n in range(3)]
    assert ["1 reply", "2 replies"] == [count(n, "reply", "replies") for n in (1, 2)]
