"""A fast BLAS for MLX on Linux's CPU.

MLX's wheel for Linux is linked with the reference BLAS, whose matrix product is scalar and runs on one core: a few
GFLOP/s where an optimized library gives hundreds. So the calls that ``libmlx.so`` makes into BLAS are sent to MKL, if
it is installed, or to OpenBLAS (the wheel ``scipy-openblas32``, whose functions have a prefix, so that it cannot
simply be loaded in the other's place). This works before and after ``mlx`` is imported. A Mac (Accelerate, Metal) and
CUDA need nothing of it. Whatever is not as expected leaves MLX as it is, and `warning` says so.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from amem.model import elf

_FUNCTIONS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
_PREFIX = "scipy_"


_rows_sent: dict[int, int] = {}  # slot -> address of the library's function, where the slot no longer has it


@dataclass(frozen=True)
class _Mlx:
    library: ctypes.CDLL
    path: Path
    slots: dict[str, int]


@cache
def ensure() -> str:
    """Send MLX's matrix products to the best BLAS that is installed; say which is in use, as `in_use` does.

    Imports nothing of MLX, and may be called before or after others do. The first call decides for this process.
    """
    mlx = _mlx()
    library = _fast_library() if mlx is not None else None
    if mlx is not None and library is not None:
        found = {name: address for name in mlx.slots if (address := _address(library, name))}
        for name, address in found.items():
            elf.write_slot(mlx.slots[name], address)
    return in_use()


def in_use() -> str:
    """The BLAS that MLX's matrix products really call, asked of the library itself.

    For example "OpenBLAS 0.3.34 (SkylakeX, up to 2 threads)". "" where MLX is not linked with a BLAS of its own choice
    (macOS, or no MLX).
    """
    mlx = _mlx()
    if mlx is None:
        return ""
    return _describe(_bound_file(mlx))


def library_address() -> int | None:
    """Where the ``cblas_sgemm`` of the optimized library that is in use lies; None without one."""
    mlx = _mlx()
    if mlx is None or not _is_fast(_bound_file(mlx)):
        return None
    return _rows_sent.get(mlx.slots["cblas_sgemm"], elf.read_slot(mlx.slots["cblas_sgemm"]))


def send_rows(address: int) -> None:
    """Send MLX's products to another ``cblas_sgemm``, which hands on to the library what it does not compute.

    It may do so from several threads at once: from now on the library computes each product in the thread that calls.
    """
    library, mlx = library_address(), _mlx()
    if library is not None and mlx is not None and address not in {library, elf.read_slot(mlx.slots["cblas_sgemm"])}:
        _rows_sent[mlx.slots["cblas_sgemm"]] = library
        if (threads := _openblas_threads()) is not None:
            threads[0](1)
        elf.write_slot(mlx.slots["cblas_sgemm"], address)


def rows_sent() -> bool:
    """Whether products of a few rows are computed elsewhere than in the library."""
    return bool(_rows_sent)


def set_threads(n: int) -> None:
    """Let the next products run on ``n`` threads (0: as many as there are cores); only OpenBLAS is told.

    A product with one row is bound by memory, and OpenBLAS's threads wait for each other by spinning: where another
    process wants a core too, each of a token's 200 small products can then cost a time slice. Once products are sent
    elsewhere (`send_rows`) they are divided there, and the library keeps to one thread.
    """
    threads = _openblas_threads()
    if threads is not None and not _rows_sent:
        setter, most = threads
        setter(min(n or most, most))


def can_set_threads() -> bool:
    """Whether `set_threads` has an effect."""
    return _openblas_threads() is not None


@cache
def _openblas_threads() -> tuple[Callable[[int], None], int] | None:
    mlx = _mlx()
    path = _bound_file(mlx) if mlx is not None else ""
    if "openblas" not in Path(path).name.lower():
        return None
    library = ctypes.CDLL(path)
    prefix = _PREFIX if hasattr(library, _PREFIX + "openblas_set_num_threads") else ""
    return library[f"{prefix}openblas_set_num_threads"], int(library[f"{prefix}openblas_get_num_threads"]())


def warning() -> str | None:
    """What to do if MLX computes on the CPU with a slow BLAS; None if all is well. Imports MLX."""
    ensure()
    mlx = _mlx()
    if mlx is None or _is_fast(_bound_file(mlx)):
        return None
    import mlx.core as mx

    if mx.default_device() != mx.Device(mx.cpu):
        return None
    if _fast_library() is None:
        remedy = f"install an optimized one (`{sys.executable} -m pip install scipy-openblas32`) and restart"
    else:
        remedy = "an optimized one is installed but could not be bound to this build of MLX; please report it"
    return f"MLX uses {in_use()}, which makes the model 10 to 50 times slower than it could be: {remedy}."


@cache
def _mlx() -> _Mlx | None:
    """The loaded library of MLX and its calls into BLAS; None where there is nothing to do."""
    if not elf.supported():
        return None
    spec = importlib.util.find_spec("mlx")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / "lib" / "libmlx.so"
        if path.is_file():
            try:
                library = ctypes.CDLL(str(path))
            except OSError:  # a broken install: importing mlx itself will tell
                return None
            slots = elf.call_slots(library, _FUNCTIONS)
            return _Mlx(library, path, slots) if "cblas_sgemm" in slots else None
    return None


@cache
def _fast_library() -> ctypes.CDLL | None:
    for path in _candidates():
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # not for this machine, or a part of it is missing: the next one may do
            continue
    return None


def _candidates() -> list[Path]:
    """Installed optimized BLAS libraries, best first."""
    found = sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"), reverse=True)
    spec = importlib.util.find_spec("scipy_openblas32")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        found.extend(sorted(Path(folder, "lib").glob("libscipy_openblas.so*")))
    return found


def _address(library: ctypes.CDLL, name: str) -> int | None:
    for symbol in (name, _PREFIX + name):
        function = getattr(library, symbol, None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


def _bound_file(mlx: _Mlx) -> str:
    """Path of the library that ``cblas_sgemm`` goes to."""
    slot = mlx.slots["cblas_sgemm"]
    path = elf.file_of(_rows_sent.get(slot, elf.read_slot(slot)))
    if path and Path(path).resolve() != mlx.path.resolve():
        return path
    # Not bound yet: the slot still leads back to the loader, which will look in the global scope first.
    address = _address(ctypes.CDLL(None), "cblas_sgemm") or _address(mlx.library, "cblas_sgemm")
    return elf.file_of(address) if address is not None else ""


def _is_fast(path: str) -> bool:
    return any(word in Path(path).name.lower() for word in ("openblas", "mkl", "blis", "nvpl", "armpl"))


def _describe(path: str) -> str:
    name = Path(path).name
    if "openblas" in name.lower():
        return _describe_openblas(ctypes.CDLL(path))
    if "mkl" in name.lower():
        version = ctypes.create_string_buffer(256)
        ctypes.CDLL(path).mkl_get_version_string(version, len(version))
        return " ".join(version.value.decode().split()) or "MKL"
    return name if _is_fast(path) else f"the reference BLAS ({name or 'unknown'})"


def _describe_openblas(library: ctypes.CDLL) -> str:
    prefix = _PREFIX if hasattr(library, _PREFIX + "openblas_get_config") else ""
    config, corename = (library[f"{prefix}openblas_get_{what}"] for what in ("config", "corename"))
    config.restype = corename.restype = ctypes.c_char_p
    version = " ".join(config().decode().split()[:2])
    threads = _openblas_threads()  # not the number of the last product: it changes from step to step
    n_threads = threads[1] if threads else int(library[f"{prefix}openblas_get_num_threads"]())
    return f"{version} ({corename().decode()}, up to {n_threads} threads)"
