"""Where a loaded shared library keeps the addresses of the functions that it calls in others (Linux, 64 bit).

A call into another library goes through a slot of the caller's global offset table. The dynamic section lists the
slots: one relocation of type JUMP_SLOT each (System V ABI, "Procedure Linkage Table").
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

_JUMP_SLOT = {"x86_64": 7, "aarch64": 1026}
_RTLD_DI_LINKMAP = 2
_DT_NULL, _DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_JMPREL = 0, 2, 5, 6, 23


class _LinkMap(ctypes.Structure):
    _fields_ = (("base", ctypes.c_uint64), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_uint64))


class _Rela(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("info", ctypes.c_uint64), ("addend", ctypes.c_int64))


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_uint32),
        ("info", ctypes.c_uint8),
        ("other", ctypes.c_uint8),
        ("section", ctypes.c_uint16),
        ("value", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def supported() -> bool:
    """Whether this is a system whose libraries can be read here: glibc on 64-bit x86 or Arm."""
    return (
        sys.platform == "linux"
        and platform.machine() in _JUMP_SLOT
        and sys.maxsize > 2**32
        and platform.libc_ver()[0] == "glibc"
    )


def call_slots(library: ctypes.CDLL, names: Collection[str]) -> dict[str, int]:
    """Addresses of the slots through which ``library`` calls the functions in ``names``; those it calls."""
    link_map = ctypes.POINTER(_LinkMap)()
    handle = ctypes.c_void_p(library._handle)  # noqa: SLF001  # ctypes has no public name for what dlopen returned
    if ctypes.CDLL(None).dlinfo(handle, _RTLD_DI_LINKMAP, ctypes.byref(link_map)) != 0:
        return {}
    base = link_map.contents.base
    tags = dict(_dynamic_entries(link_map.contents.dynamic))
    if not {_DT_PLTRELSZ, _DT_STRTAB, _DT_SYMTAB, _DT_JMPREL} <= tags.keys():
        return {}
    # glibc has made these addresses absolute in memory; another loader may have left them relative.
    relocations, symbols, strings = (
        tags[tag] if tags[tag] >= base else base + tags[tag] for tag in (_DT_JMPREL, _DT_SYMTAB, _DT_STRTAB)
    )
    wanted = {name.encode(): name for name in names}
    slots: dict[str, int] = {}
    for relocation in (_Rela * (tags[_DT_PLTRELSZ] // ctypes.sizeof(_Rela))).from_address(relocations):
        if relocation.info & 0xFFFFFFFF != _JUMP_SLOT[platform.machine()]:
            continue
        symbol = _Symbol.from_address(symbols + (relocation.info >> 32) * ctypes.sizeof(_Symbol))
        name = wanted.get(ctypes.string_at(strings + symbol.name))
        if name is not None:
            slots[name] = base + relocation.offset
    return slots


def read_slot(slot: int) -> int:
    """The address that calls through this slot go to."""
    return int(ctypes.c_uint64.from_address(slot).value)


def write_slot(slot: int, target: int) -> bool:
    """Send the calls through this slot to ``target``; False, and nothing done, if its page is read-only."""
    if not _writable(slot):
        return False
    ctypes.c_uint64.from_address(slot).value = target
    return True


def file_of(address: int) -> str:
    """Path of the loaded file that holds this address, or "" if none does."""
    info = _DlInfo()
    found = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info))
    return info.file.decode() if found and info.file else ""


def _dynamic_entries(address: int) -> Iterator[tuple[int, int]]:
    while (tag := ctypes.c_int64.from_address(address).value) != _DT_NULL:
        yield tag, ctypes.c_uint64.from_address(address + 8).value
        address += 16


def _writable(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        span, permissions = line.split(maxsplit=2)[:2]
        first, end = (int(part, 16) for part in span.split("-"))
        if first <= address < end:
            return "w" in permissions
    return False
