"""The command line: what it writes, its exit codes, and that lists need no model."""

import io
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata

import pytest

from amem import Engine, cli, engine
from amem.cli import main
from amem.store import Store, verify


@pytest.fixture(scope="module")
def filled(tiny_model_path, tmp_path_factory):
    """A store with a planner in the default space and a critic in another. Tests that change it make their own."""
    root = tmp_path_factory.mktemp("cli") / "store"
    assert 0 == main(["ask", "planner", "Hello.", *asked(tiny_model_path, root), "--max-tokens", "70"])
    assert 0 == main(["ask", "critic", "Hello.", *asked(tiny_model_path, root), "--space", "other"])
    return root


def asked(model, root):
    return ["--model", str(model), "--store", str(root), "--memory", "100MB", "--max-tokens", "5"]


def told(capsys, *argv):
    """What a command that succeeds writes, as JSON."""
    assert 0 == main([*argv, "--json"])
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def no_model(monkeypatch):
    """Loading a model fails."""

    def refuse(*_args, **_options):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("amem.model.load.load", refuse)
    monkeypatch.setattr(engine.Engine, "__init__", refuse)


def test_ask_streams_the_reply_and_goes_on_where_it_was(tiny_model_path, tmp_path, capsys):
    """The text that is streamed is the reply's; the next process, so to say, finds the turn."""
    options = asked(tiny_model_path, tmp_path / "store")
    assert 0 == main(["ask", "planner", "Hello.", "--system", "Be brief.", *options])
    streamed = capsys.readouterr().out
    reply = told(capsys, "ask", "planner", "And then?", *options)
    assert "EXTEND" == reply["metrics"]["match"]
    assert 5 >= len(reply["token_ids"])
    with Engine(tiny_model_path, tmp_path / "store", memory="100MB") as opened:
        first, second = opened.agent("planner").turns
        assert "Be brief." == opened.agent("planner").system
    assert streamed == first.reply + "\n"
    assert reply["text"] == second.reply


def test_ask_reads_standard_input_and_passes_the_sampling_on(tiny_model_path, tmp_path, capsys, monkeypatch):
    """A dash stands for the input; a seed makes the reply repeat itself."""
    options = [*asked(tiny_model_path, tmp_path / "store"), "--temperature", "1.5", "--seed", "7", "--top-p", "0.9"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me."))
    from_input = told(capsys, "ask", "a", "-", *options)
    assert from_input["text"] == told(capsys, "ask", "b", "Tell me.", *options)["text"]


def test_lists_need_no_model(filled, capsys, no_model):
    """Agents of all spaces or of one, and the store's figures."""
    assert {"planner", "critic"} == {entry["name"] for entry in told(capsys, "agents", "--store", str(filled))}
    [critic] = told(capsys, "agents", "--store", str(filled), "--space", "other")
    assert ("critic", 1) == (critic["name"], critic["n_turns"])
    status = told(capsys, "status", "--store", str(filled))
    assert 2 == len(status["agents"])
    assert status["disk_bytes"] > 0
    assert 0 == main(["agents", "--store", str(filled)])
    assert "planner" in capsys.readouterr().out


def test_status_with_a_model_is_the_engines(filled, tiny_model_path, capsys):
    """The same figures as Engine.status."""
    status = told(capsys, "status", "--store", str(filled), "--model", str(tiny_model_path))
    assert ["planner"] == [agent["name"] for agent in status["agents"]]
    assert "q4" == status["codec"]


def test_the_store_can_be_named_by_the_environment(filled, capsys, monkeypatch, no_model):
    """AMEM_STORE sets the default."""
    monkeypatch.setenv("AMEM_STORE", str(filled))
    assert 2 == len(told(capsys, "agents"))


def test_verify_fails_on_damage_until_it_is_repaired(tiny_model_path, tmp_path, capsys):
    """A flipped bit is named with exit code 1; --repair sets it aside."""
    root = tmp_path / "store"
    assert 0 == main(["ask", "planner", "Hello.", *asked(tiny_model_path, root)])
    capsys.readouterr()
    assert told(capsys, "verify", "--store", str(root))["clean"]
    file = max(root.glob("agents/*/*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert 1 == main(["verify", "--store", str(root)])
    assert "is damaged" in capsys.readouterr().out
    assert told(capsys, "verify", "--repair", "--store", str(root))["repaired"]
    assert told(capsys, "verify", "--store", str(root))["clean"]


def test_verify_does_not_praise_what_it_could_not_read(filled, capsys):
    """An agent that is in use is not checked, and the verdict says so."""
    with Store(filled) as store:
        entries = store.agents()
        first = store.open(entries[0].name, entries[0].space)
        assert 0 == main(["verify", "--store", str(filled)])
        assert "1 agent in use was not checked" in capsys.readouterr().out
        others = [store.open(entry.name, entry.space) for entry in entries[1:]]
        assert 1 == main(["verify", "--store", str(filled)])
        assert "nothing could be read" in capsys.readouterr().out
        for agent in (first, *others):
            agent.close()


def test_a_deletion_says_what_lives_on_in_forks(filled, tmp_path, capsys, no_model):
    """The fork has the prefix as its own, and all of it can be read."""
    root = tmp_path / "store"
    shutil.copytree(filled, root)
    with Store(root) as store, store.open("planner", "default") as agent:
        with agent.fork("variant", "default") as fork:
            n_files = len(list(fork.root.glob("*.safetensors")))
            turns = fork.turns()
        assert n_files > 0
    assert 0 == main(["delete", "planner", "--yes", "--store", str(root)])
    files = "1 block file lives" if n_files == 1 else f"{n_files} block files live"
    assert f"{files} on in agents that share them" in capsys.readouterr().out
    with Store(root) as store:
        assert verify(store).problems == []
        assert turns == store.open("variant", "default", create=False).turns()


def test_an_agent_moves_as_one_file_and_is_deleted(filled, tmp_path, capsys, no_model):
    """Export, import under another name, delete; what is not there is an error in one line."""
    file, other = str(tmp_path / "planner.amem"), str(tmp_path / "other")
    assert told(capsys, "export", "planner", file, "--store", str(filled))["nbytes"] > 0
    moved = told(capsys, "import", file, "--store", other, "--as", "moved", "--space", "s")
    assert ("moved", "s") == (moved["name"], moved["space"])
    assert 1 == main(["import", file, "--store", other, "--name", "moved", "--space", "s"])
    assert "already: give this one another name (--as NAME; from Python, name=...)" in capsys.readouterr().err
    assert told(capsys, "delete", "moved", "--yes", "--store", other, "--space", "s")["nbytes"] > 0
    assert [] == told(capsys, "agents", "--store", other)
    for argv in (
        ["delete", "planner", "--store", str(filled)],
        ["export", "planner", str(tmp_path / "nowhere" / "file"), "--store", str(filled)],
        ["delete", "moved", "--yes", "--store", other, "--space", "s"],
        ["export", "planner", file, "--store", str(filled)],
        ["import", str(tmp_path / "none"), "--store", other],
        ["agents", "--store", str(tmp_path / "none")],
        ["capacity", "--memory", "lots"],
        ["capacity", "--memory", "1GB", "--context", "0"],
        ["capacity", "--memory", "1GB", "--geometry", "llama-3-8b"],
    ):
        assert 1 == main(argv)
        said = capsys.readouterr()
        assert "" == said.out
        assert said.err.startswith("amem: ")
        assert 1 == said.err.count("\n")


def test_an_agent_in_use_is_told_of_before_a_model_is_loaded(filled, capsys, no_model):
    """By `amem ask`, in one line that says who has it."""
    with Store(filled) as store, store.open("planner", "default"):
        assert 1 == main(["ask", "planner", "Hello.", "--store", str(filled)])
    assert "agent 'planner' is in use by this process" in capsys.readouterr().err


def test_a_refused_message_is_one_line_and_leaves_no_turn(tiny_model_path, tmp_path, capsys):
    """Input errors of the engine end with exit code 1."""
    assert 1 == main(["ask", "planner", " ", *asked(tiny_model_path, tmp_path / "store")])
    assert "the message is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["ask", "", "hi"], "an agent needs a name of 1 to 128 characters"),
        (["ask", "two\nlines", "hi"], "use one line without control characters"),
        (["ask", "planner", "hi", "--store", "FILE"], "is a file: name another folder"),
        (["ask", "planner", "hi", "--memory", "1KB"], "holds no agent of any model"),
        (["status", "--model", "smollm2-135m", "--store", "FILE"], "is a file: name another folder"),
        (["agents", "--store", "FILE"], "is a file: name another folder"),
        (["verify", "--store", "FILE"], "is a file: name another folder"),
        (["import", "planner.amem", "--store", "FILE"], "is a file: name another folder"),
        (["serve", "--port", "0", "--store", "FILE"], "is a file: name another folder"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(argv, said, tmp_path, capsys, monkeypatch):
    """In one line; nothing is made."""

    def refuse(*_args, **_options):
        raise AssertionError("an engine was opened")

    monkeypatch.setattr("amem.opening.open_parts", refuse)
    monkeypatch.setenv("AMEM_STORE", str(tmp_path / "store"))
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert 1 == main([str(tmp_path / "notes.txt") if word == "FILE" else word for word in argv])
    told_of = capsys.readouterr()
    assert said in told_of.err
    assert 1 == told_of.err.count("\n")
    assert ["notes.txt"] == [path.name for path in tmp_path.iterdir()]


def test_the_version_is_told(capsys):
    """As the package has it."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert 0 == ended.value.code
    assert f"amem {metadata.version('amem')}\n" == capsys.readouterr().out


def test_a_seed_that_is_none_is_a_wrong_usage(capsys):
    """And says what a seed is."""
    with pytest.raises(SystemExit) as ended:
        main(["ask", "planner", "hi", "--seed", "often"])
    assert 2 == ended.value.code
    assert "'often' is neither a whole number nor \"random\"" in capsys.readouterr().err


def test_capacity_counts_geometries_without_a_model(capsys, no_model):
    """Gemma 3 12B at 8K in the paper's memory: 40 agents, and 12 by the paper's count."""
    rows = told(
        capsys, "capacity", "--geometry", "gemma-3-12b", "--geometry", "llama-3.1-8b", "--memory", "10.2GiB",
        "--context", "8192",
    )  # fmt: skip
    assert 6 == len(rows)
    assert ("gemma-3-12b", "q4", 40, 12) == tuple(rows[0][key] for key in ("model", "codec", "agents", "paper_agents"))
    assert 0 == main(["capacity", "--memory", "10.2GiB"])
    assert 2 + 3 * 4 * 3 == len(capsys.readouterr().out.splitlines())
    rows = told(capsys, "capacity", "--geometry", "llama-3.1-8b", "--context", "4096", "--codec", "q8", "q3", "q2")
    assert ["q8", "q3", "q2"] == [row["codec"] for row in rows]
    assert [0.53, 0.22, 0.16] == [round(row["paper_agent_nbytes"] / (4096 * 32 * 8 * 256 * 2), 2) for row in rows]
    assert 1 == main(["capacity", "--codec", "q5"])
    assert "choose one of auto, q4" in capsys.readouterr().err


def test_capacity_of_a_model_is_asked_of_the_model(tiny_model_path, capsys):
    """Two layers, two heads of 32, float32: an open group of 64 tokens is in the figure."""
    [row, *_] = told(capsys, "capacity", str(tiny_model_path), "--memory", "1GB", "--context", "63")
    assert 64 * 2 * 2 * 64 * 4 == row["agent_nbytes_most"]


def test_models_name_the_bundled_one(capsys):
    """It is listed whether it is there or not."""
    assert "smollm2-135m" == told(capsys, "models")[0]["name"]


@pytest.mark.parametrize(
    "argv", [[], ["asks"], ["ask", "planner"], ["capacity", "--context"], ["ask", "a", "b", "--seed", "x"]]
)
def test_a_wrong_usage_ends_with_2(argv, capsys):
    """As argparse has it."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert 2 == ended.value.code


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["planner", ""], "the message is empty"),
        (["planner", "Hi", "--max-tokens", "0"], "max_tokens must be"),
        (["planner", "Hi", "--temperature", "nan"], "temperature must be"),
        (["planner", "Hi", "--top-p", "0"], "top_p must be"),
        (["planner", "Hi", "--stop", ""], "a stop string is empty"),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_a_model_is_loaded(argv, told, capsys):
    """The model named does not exist, which is not even looked at."""
    assert 1 == main(["ask", *argv, "--model", "/nowhere"])
    assert told in capsys.readouterr().err


def test_an_interrupt_and_a_closed_pipe_end_quietly(filled, capsys, monkeypatch):
    """Exit codes 130 and 1, and no traceback."""
    monkeypatch.setattr(cli, "_store", raising(KeyboardInterrupt))
    assert 130 == main(["agents"])
    assert "interrupted" in capsys.readouterr().err
    monkeypatch.undo()
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "amem.cli", "agents", "--store", str(filled)],
            stdout=pipe, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (1, "") == (done.returncode, done.stderr)


def raising(error):
    def run(*_args):
        raise error

    return run


def test_help_and_lists_bring_no_mlx(filled):
    """`amem --help` and lists are quick: MLX is imported with a model only."""
    code = (
        "import sys\nfrom amem.cli import main\n"
        f"main(['agents', '--store', {str(filled)!r}])\nassert 'mlx.core' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
