"""The command line, called in this process."""

import json

import pytest

from amem.cli import main


@pytest.fixture
def cli(tmp_path, capsys):
    """Runs a command on a store of its own: exit code, output, errors."""

    def run(*words, store=True):
        code = main([*map(str, words), *(["--store", str(tmp_path / "store")] if store else [])])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def asked(cli, tiny_model_path):
    assert (
        0
        == cli("ask", "planner", "Hello there.", "--model", tiny_model_path, "--max-tokens", 5, "--memory", "100MB")[0]
    )


def test_ask_prints_the_reply_and_json_all_of_it(cli, tiny_model_path, asked):
    """The second message goes on from what the first process left on disk."""
    code, out, _ = cli("ask", "planner", "More.", "--model", tiny_model_path, "--max-tokens", 5, "--json")
    assert 0 == code
    assert "EXTEND" == json.loads(out)["metrics"]["match"]


def test_the_store_is_shown_without_a_model(cli, asked):
    """agents, status and verify read the store alone."""
    assert "planner" in cli("agents")[1]
    assert 1 == json.loads(cli("agents", "--json")[1])[0]["n_turns"]
    assert [] == json.loads(cli("agents", "--space", "other", "--json")[1])
    assert 1 == json.loads(cli("status", "--json")[1])["agents"]
    assert "1 agents in 1 spaces" in cli("status")[1]
    assert "all sound" in cli("verify")[1]
    assert json.loads(cli("verify", "--json")[1])["clean"]


def test_damage_is_found(cli, asked, tmp_path):
    """Verify names it and fails; --repair sets it aside."""
    victim = next(tmp_path.glob("store/agents/*/*.safetensors"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    code, out, _ = cli("verify")
    assert 1 == code
    assert victim.stem in out
    assert 0 == cli("verify", "--repair")[0]
    assert 0 == cli("verify")[0]


def test_an_agent_can_be_carried_off_and_deleted(cli, asked, tmp_path):
    """Export, delete, import under another name."""
    file = tmp_path / "planner.amem"
    assert 0 == cli("export", "planner", file)[0]
    assert 0 == cli("delete", "planner")[0]
    assert [] == json.loads(cli("agents", "--json")[1])
    assert 0 == cli("import", file, "--name", "other")[0]
    assert "other" == json.loads(cli("agents", "--json")[1])[0]["name"]


@pytest.mark.parametrize(
    "words",
    [
        ("delete", "nobody"),
        ("export", "nobody", "file"),
        ("import", "missing-file"),
        ("ask", "planner", " ", "--model", "no-such-model"),
        ("ask", "planner", "Hi", "--memory", "plenty"),
    ],
)
def test_errors_are_one_line(cli, words):
    """And end with exit code 1, without a traceback."""
    code, _, err = cli(*words)
    assert 1 == code
    assert err.startswith("amem: ")
    assert 1 == err.count("\n")


def test_wrong_usage_ends_with_2(cli):
    """Argparse says what was expected."""
    with pytest.raises(SystemExit) as ended:
        cli("fly")
    assert 2 == ended.value.code


def test_capacity_counts_for_geometries_and_for_a_model(cli, tiny_model_path):
    """The paper's models by default; any other by name."""
    code, out, _ = cli("capacity", "--json", store=False)
    assert 0 == code
    assert {"gemma-3-12b", "deepseek-coder-v2-lite", "llama-3.1-8b"} == {row["model"] for row in json.loads(out)}
    one = cli("capacity", "--geometry", "llama-3.1-8b", "--memory", "16GB", "--context", 8192, store=False)[1]
    assert "gemma" not in one
    rows = json.loads(cli("capacity", tiny_model_path, "--memory", "1GB", "--json", store=False)[1])
    assert all(row["agents"] > 0 for row in rows)
    assert 1 == cli("capacity", "--memory", "none", store=False)[0]
    assert 1 == cli("capacity", "--geometry", "gpt-9", store=False)[0]


def test_models_are_listed(cli):
    """The bundled one in any case."""
    assert "smollm2-135m" in cli("models", store=False)[1]
