"""The path of Metal and CUDA, MLX's operations alone, as it runs on any machine."""

import subprocess
import sys

from tests.engine.test_restart import LONG, talk


def test_a_restart_changes_no_token(open_engine):
    """Each turn in an engine of its own, against all turns in one."""
    messages = [LONG, "And then?", LONG, "The end."]
    through = open_engine(space="through", attention="reference")
    assert "reference" == through.status().attention
    wanted = [reply.token_ids for reply in talk(through.agent("planner"), messages)]
    through.close()
    got = []
    for message in messages:
        engine = open_engine(space="restarted", attention="reference")
        got.append(engine.agent("planner").ask(message, max_tokens=20).token_ids)
        engine.close()
    assert wanted == got


def test_a_batch_and_a_fork_go_on(open_engine):
    """Several agents in one step, one of them on what another one computed."""
    engine = open_engine(attention="reference")
    engine.agent("planner").ask(LONG, max_tokens=4)
    engine.agent("planner").fork("critic")
    replies = engine.ask_all({"planner": "Your view?", "critic": "Your view?", "new": "Hello."}, max_tokens=8)
    assert replies["planner"].token_ids == replies["critic"].token_ids
    assert replies["critic"].metrics.reused_tokens > 200


def test_no_kernel_for_a_cpu_is_loaded(tiny_model_path, tmp_path):
    """Attention and gates are MLX's, in a process of its own."""
    code = (
        "import sys; from amem import Engine\n"
        f"with Engine({str(tiny_model_path)!r}, {str(tmp_path / 'store')!r}, memory='200MB', attention='reference') as e:\n"
        "    e.agent('a').ask('Hello.', max_tokens=2)\n"
        "print([name for name in ('amem.kv.cpu', 'amem.kernels.attention', 'amem.kernels.gate') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]" == done.stdout.splitlines()[-1]
