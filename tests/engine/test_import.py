"""What `import amem` costs."""

import subprocess
import sys


def test_importing_brings_nothing_that_takes_long():
    """MLX, numba and the tokenizers are imported with the first engine: a program that only names amem starts at once."""
    code = "import sys, amem; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = set(done.stdout.split())
    assert "amem" in found
    assert not found & {"mlx", "mlx_lm", "numba", "llvmlite", "transformers", "tokenizers", "huggingface_hub", "scipy"}
