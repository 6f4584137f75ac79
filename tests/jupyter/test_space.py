"""Where the space of a notebook comes from."""

from __future__ import annotations

from amem_jupyter.space import MAX_LENGTH, default_space


def test_vs_code_server_or_neither():
    """VS Code names the file in the namespace, jupyter-server in the environment."""
    server = {"JPY_SESSION_NAME": "/n/a.ipynb"}
    assert default_space({"__vsc_ipynb_file__": "/v/b.ipynb"}, server) == "/v/b.ipynb"
    assert default_space({}, server) == "/n/a.ipynb"
    assert default_space({}, {}) == "default"
    assert default_space({}, {"JPY_SESSION_NAME": ""}) == "default"


def test_long_paths_stay_apart():
    """Two that end alike are two spaces, and each fits."""
    long = [f"/{folder}/{'x' * 200}/n.ipynb" for folder in "ab"]
    spaces = [default_space({}, {"JPY_SESSION_NAME": path}) for path in long]
    assert len(set(spaces)) == 2
    assert all(len(space) == MAX_LENGTH and space.endswith("n.ipynb") for space in spaces)
