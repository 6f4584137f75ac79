"""The command line: ``amem ask``, ``agents``, ``status``, ``verify``, ``capacity`` and the like."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from amem.errors import AmemError, InputError
from amem.sizes import count, format_size, parse_size

if TYPE_CHECKING:
    from amem.model.spec import ModelCacheSpec
    from amem.store import Store, VerifyReport

FAILED = 1  #: exit code of an error that was told in one line; argparse's own for a wrong usage is 2
INTERRUPTED = 130  #: what shells use for Ctrl-C

DEFAULT_SPACE = "default"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; gives its exit code.

    Raises
    ------
        SystemExit: the usage is wrong (2), or help was asked for (0).
    """
    options = parser().parse_args(argv)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except AmemError as error:
        sys.stderr.write(f"amem: {' '.join(str(error).split())}\n")
        return FAILED
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # else the interpreter complains when it flushes at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("\namem: interrupted; nothing that was saved is lost.\n")
        return INTERRUPTED
    return code


# -- usage -----------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The grammar of all commands."""
    whole = argparse.ArgumentParser(prog="amem", description="Agents that keep their attention state.")
    whole.add_argument("--version", action="version", version=f"amem {metadata.version('amem')}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="write JSON")
    stored = argparse.ArgumentParser(add_help=False, parents=[common])
    stored.add_argument("--store", metavar="FOLDER", help="folder of all agents (default: $AMEM_STORE, else ~/.amem)")
    stored.add_argument("--space", help=f'space of the agents (default: "{DEFAULT_SPACE}"; lists show all)')
    loaded = argparse.ArgumentParser(add_help=False)
    loaded.add_argument("--model", help="name, folder or hub id (default: $AMEM_MODEL, else smollm2-135m)")

    def command(name: str, run: Any, text: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", parents=list(parents))
        made.set_defaults(run=run)
        return made

    ask = command("ask", _ask, "send a message to an agent and write its reply", stored, loaded)
    ask.add_argument("name", metavar="NAME", help="the agent's; its first use makes it")
    ask.add_argument("text", metavar="TEXT", help='the message; "-" reads it from standard input')
    ask.add_argument("--system", metavar="TEXT", help="system text, with which its conversation starts")
    ask.add_argument("--max-tokens", type=int, default=512, metavar="N", help="the most tokens to generate")
    ask.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest token")
    ask.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample from this much of the probability")
    ask.add_argument(
        "--seed", type=_seed, metavar="N", help='of the sampling, or "random"; without it a request repeats itself'
    )
    ask.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated")
    ask.add_argument("--memory", metavar="SIZE", help="the most that K and V may take in memory, e.g. 2GB")

    command("agents", _agents, "list the agents of a store", stored)
    command("status", _status, "show a store, or with --model the engine on it", stored, loaded)
    verify = command("verify", _verify, "check every stored byte against its checksum", stored)
    verify.add_argument("--repair", action="store_true", help="set damaged files aside and rebuild what can be rebuilt")
    delete = command("delete", _delete, "delete an agent, its transcript and every stored byte of it", stored)
    delete.add_argument("name", metavar="NAME", help="the agent's")
    delete.add_argument("--yes", action="store_true", help="really: nothing brings it back")
    export = command("export", _export, "write an agent to one file", stored)
    export.add_argument("name", metavar="NAME", help="the agent's")
    export.add_argument("file", metavar="FILE", type=Path, help="to write; it must not exist yet")
    imported = command("import", _import, "make an agent of an exported file", stored)
    imported.add_argument("file", metavar="FILE", type=Path, help="that an export wrote")
    imported.add_argument("--as", "--name", dest="name", metavar="NAME", help="its name here, not the exported one")
    command("models", _models, "list the models that need no download", common)

    kernel = command("kernel", _kernel_install, "register a Jupyter kernel that has the notebook layer loaded", common)
    kernel.add_argument("action", choices=["install"], help="what to do")
    where = kernel.add_mutually_exclusive_group()
    where.add_argument("--sys-prefix", action="store_true", help="only for the Jupyter of this Python's environment")
    where.add_argument("--prefix", metavar="FOLDER", type=Path, help="for a Jupyter that looks under this prefix")
    kernel.add_argument("--name", default="amem", help="of the kernel (default: %(default)s)")
    kernel.add_argument("--display-name", default="amem (agents)", metavar="TEXT", help="on the launcher's tile")

    _add_serving(
        command("serve", _serve, "serve agents over HTTP, to clients of OpenAI and of Anthropic", stored, loaded)
    )

    _add_measures(command, common)
    return whole


def _add_measures(command: Any, common: argparse.ArgumentParser) -> None:
    """The commands that count or measure, and touch no store."""
    capacity = command("capacity", _capacity, "tell how many agents a memory holds", common)
    which = capacity.add_mutually_exclusive_group()
    which.add_argument(
        "model", metavar="MODEL", nargs="?", help="a model to load and ask (default: the three of the paper)"
    )
    which.add_argument("--geometry", action="append", metavar="NAME", help="a well-known model's; may be repeated")
    capacity.add_argument("--memory", default="10.2GiB", metavar="SIZE", help="default: %(default)s, the paper's")
    capacity.add_argument("--context", type=int, nargs="+", metavar="TOKENS", help="of each agent (default: 4K to 32K)")
    capacity.add_argument(
        "--codec", nargs="+", metavar="NAME", help="forms of K and V (default: q4, the paper's q4-affine, fp16)"
    )

    fidelity = command("fidelity", _fidelity, "measure what each codec costs on a model, in a minute or two", common)
    fidelity.add_argument("model", metavar="MODEL", nargs="?", help="default: $AMEM_MODEL, else smollm2-135m")
    fidelity.add_argument("--codec", nargs="+", metavar="NAME", help="default: all of them")
    fidelity.add_argument("--texts", type=int, default=2, metavar="N", help="prose and code in turns (default: 2)")
    fidelity.add_argument("--tokens", type=int, default=512, metavar="N", help="of each text (default: %(default)s)")


def _add_serving(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--host", default="127.0.0.1", help="default: %(default)s; any other needs an API key")
    serve.add_argument("--port", type=int, default=8000, help="default: %(default)s; 0 takes a free one")
    serve.add_argument(
        "--api-key",
        action="append",
        metavar="[NAME:]KEY",
        help="a key that requests must bring; each further one needs a name, and has agents of its own "
        "(default: $AMEM_API_KEY, which a list of processes does not show)",
    )
    serve.add_argument("--memory", metavar="SIZE", help="the most that K and V may take in memory, e.g. 2GB")
    serve.add_argument("--max-requests", type=int, metavar="N", help="that run or wait at once (default: 64)")
    serve.add_argument(
        "--timeout", type=float, metavar="SECONDS", help="the most that one request takes (default: 600)"
    )
    serve.add_argument(
        "--grace", type=float, metavar="SECONDS", help="that running requests get at the end (default: 30)"
    )
    serve.add_argument(
        "--session-ttl",
        type=float,
        metavar="SECONDS",
        help="after which an idle session without a name is deleted (default: a day)",
    )


def _seed(text: str) -> int | Literal["random"]:
    if text == "random":
        return "random"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is neither a whole number nor "random"') from None


def _write(options: argparse.Namespace, data: object, text: str) -> None:
    sys.stdout.write((json.dumps(data, indent=1, default=str) if options.json else text) + "\n")


# -- with a model ------------------------------------------------------------------------------------------------------


def _progress(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


def _ask(options: argparse.Namespace) -> int:
    from amem import Engine
    from amem.checks import check_message, request_settings
    from amem.inuse import refuse_if_in_use
    from amem.store import names

    space = options.space or DEFAULT_SPACE
    names.label(options.name, space)  # a model takes seconds to load: what is refused is told before
    text = sys.stdin.read() if options.text == "-" else options.text
    check_message(text)
    settings = request_settings(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        stop=options.stop,
    )
    refuse_if_in_use([options.name], options.store, space)
    reply = None
    with Engine(
        options.model,
        options.store,
        space=space,
        memory=options.memory,
        prefetch=False,  # it ends before anybody else is asked
        progress=_progress,
    ) as engine:
        events = engine.agent(options.name, create=False).stream(
            text, system=options.system, seed=options.seed, **settings
        )
        for event in events:
            reply = event.reply or reply
            if not options.json and event.text:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    assert reply is not None
    for note in reply.metrics.notes:
        _progress(note)
    _write(options, reply.to_dict(), "")
    return 0


def _serve(options: argparse.Namespace) -> int:
    try:
        from amem.serve import Keys, Limits, Server
        from amem.serve.server import take_address
    except ImportError as error:
        raise InputError(f"serving needs more packages ({error.name}): pip install 'amem[serve]'.") from error
    from amem import Engine

    given = {
        "requests": ("--max-requests", options.max_requests),
        "timeout_s": ("--timeout", options.timeout),
        "grace_s": ("--grace", options.grace),
        "idle_s": ("--session-ttl", options.session_ttl),
    }
    for flag, value in given.values():
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{flag} must be above zero, not {value}.")
    limits = Limits(**{name: value for name, (_, value) in given.items() if value is not None})
    keys = Keys.parse(options.api_key or os.environ.get("AMEM_API_KEY", "").split())
    space = options.space or DEFAULT_SPACE
    with (
        take_address(options.host, options.port, keys) as taken,
        Engine(options.model, options.store, space=space, memory=options.memory, progress=_progress) as engine,
    ):
        server = Server(engine, options.host, options.port, keys=keys, limits=limits, taken=taken)
        _write(options, {"url": server.url}, f"serving {engine.status().model} on {server.url}/v1")
        sys.stdout.flush()
        server.run()
    return 0


def _status(options: argparse.Namespace) -> int:
    if options.model is None:
        return _store_status(options)
    from amem import Engine

    with Engine(options.model, options.store, space=options.space or DEFAULT_SPACE, progress=_progress) as engine:
        status = engine.status()
    lines = [
        f"model    {status.model} ({status.model_path})",
        f"codec    {status.codec}; attention {status.attention} on {status.device}",
        *([f"         {status.codec_choice}"] if status.codec_choice else []),
        f"memory   {format_size(status.hot_bytes)} of {format_size(status.memory_budget)}",
        f"store    {status.store}: {format_size(status.disk_bytes)} of {format_size(status.disk_quota)}",
        f"agents   {len(status.agents)} in space {status.space!r}",
        *(
            f"  {a.name}: {a.residency}, {count(a.n_tokens, 'token')}, {count(a.n_turns, 'turn')}"
            for a in status.agents
        ),
        *(f"warning  {warning}" for warning in status.warnings),
    ]
    _write(options, status.to_dict(), "\n".join(lines))
    return 0


# -- the store alone ---------------------------------------------------------------------------------------------------


def _root(options: argparse.Namespace) -> Path:
    from amem.engine import store_folder

    return store_folder(options.store)


def _store(options: argparse.Namespace) -> Store:
    """The store, which must be there already."""
    from amem.store import Store

    root = _root(options)
    if not root.is_dir():
        raise InputError(f"there is no store at {root}: name its folder with --store.")
    return Store(root)


def _agents(options: argparse.Namespace) -> int:
    with _store(options) as store:
        entries = store.agents(options.space)
    table = [("name", "space", "turns", "bytes")]
    table += [(entry.name, entry.space, str(entry.n_turns), format_size(entry.nbytes)) for entry in entries]
    _write(options, [asdict(entry) for entry in entries], _columns(table) if entries else "no agents yet")
    return 0


def _store_status(options: argparse.Namespace) -> int:
    with _store(options) as store:
        entries = store.agents(options.space)
        status = {
            "store": str(store.root),
            "space": options.space,
            "disk_bytes": store.disk_bytes,
            "agents": [asdict(entry) for entry in entries],
            "reports": list(store.reports),
        }
        lines = [f"store    {store.root}: {format_size(store.disk_bytes)}", f"agents   {len(entries)}", *store.reports]
    _write(options, status, "\n".join(lines))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from amem.store import verify

    with _store(options) as store:
        report = verify(store, repair=options.repair)
        reports = list(store.reports)
    counted = ", ".join(
        (count(report.agents, "agent"), count(report.blocks, "block"), count(report.snapshots, "snapshot"))
    )
    lines = [
        *report.problems,
        *reports,
        *(f"skipped: {reason}" for reason in report.skipped),
        f"{counted}, {format_size(report.nbytes)} read: {_verdict(report)}",
    ]
    _write(options, asdict(report) | {"clean": report.clean, "reports": reports}, "\n".join(lines))
    nothing_read = bool(report.skipped) and not report.agents
    return 0 if report.clean and not nothing_read else FAILED


def _verdict(report: VerifyReport) -> str:
    if report.problems:
        said = "repaired" if report.repaired else "not repaired (--repair does)"
        return f"{count(len(report.problems), 'problem')}, {said}"
    if report.skipped:
        checked = "what could be read is as it was written" if report.agents else "nothing could be read"
        n_skipped = len(report.skipped)
        return f"{checked}; {count(n_skipped, 'agent')} in use {'was' if n_skipped == 1 else 'were'} not checked"
    return "all as it was written"


def _delete(options: argparse.Namespace) -> int:
    if not options.yes:
        raise InputError(f"deleting {options.name!r} cannot be undone: repeat with --yes, or export it first.")
    with _store(options) as store:
        deleted = store.delete(options.name, options.space or DEFAULT_SPACE)
    text = f"deleted {options.name!r}: {format_size(deleted.nbytes)}"
    if deleted.n_shared:
        live = "lives" if deleted.n_shared == 1 else "live"
        text += f"; {count(deleted.n_shared, 'block file')} {live} on in agents that share them"
    _write(options, asdict(deleted), text)
    return 0


def _export(options: argparse.Namespace) -> int:
    from amem.store import export_agent

    with _store(options) as store, store.open(options.name, options.space or DEFAULT_SPACE, create=False) as agent:
        nbytes = export_agent(agent, options.file)
    _write(
        options,
        {"name": options.name, "file": str(options.file), "nbytes": nbytes},
        f"exported {options.name!r} to {options.file}: {format_size(nbytes)}",
    )
    return 0


def _import(options: argparse.Namespace) -> int:
    from amem.store import Store, import_agent

    with (
        Store(_root(options)) as store,
        import_agent(store, options.file, name=options.name, space=options.space) as agent,
    ):
        name, space, nbytes = agent.name, agent.space, agent.nbytes
    text = f"imported {name!r} into space {space!r}: {format_size(nbytes)}"
    _write(options, {"name": name, "space": space, "nbytes": nbytes}, text)
    return 0


# -- models and sizes --------------------------------------------------------------------------------------------------


def _models(options: argparse.Namespace) -> int:
    from amem.model.load import models

    infos = models()
    table = [("name", "source", "bytes", "folder")]
    table += [(i.name, i.source, format_size(i.nbytes), str(i.path or "fetched when first used")) for i in infos]
    _write(options, [asdict(info) for info in infos], _columns(table))
    return 0


def _kernel_install(options: argparse.Namespace) -> int:
    from amem.kernelspec import install

    prefix = Path(sys.prefix) if options.sys_prefix else options.prefix
    folder = install(name=options.name, display_name=options.display_name, prefix=prefix)
    text = f"installed the kernel {options.display_name!r} in {folder}; choose it in Jupyter's launcher"
    _write(options, {"name": options.name, "folder": str(folder), "python": sys.executable}, text)
    return 0


def _capacity(options: argparse.Namespace) -> int:
    from amem.model.capacity import CONTEXTS, TABLE_CODECS, capacity_table, format_table
    from amem.model.geometry import PAPER_GEOMETRIES, geometry
    from amem.model.spec import check_codec

    memory = parse_size(options.memory)
    if options.context and min(options.context) < 1:
        raise InputError("a context has at least one token.")
    for codec in options.codec or ():
        check_codec(codec)
    if options.model:
        specs = {options.model: _spec(options.model)}
    else:
        specs = {name: geometry(name) for name in options.geometry or PAPER_GEOMETRIES}
    contexts, codecs = options.context or CONTEXTS, options.codec or TABLE_CODECS
    rows = capacity_table(specs, memory_bytes=memory, contexts=contexts, codecs=codecs)
    _write(options, [row.to_dict() for row in rows], format_table(rows))
    return 0


def _fidelity(options: argparse.Namespace) -> int:
    from amem.engine import DEFAULT_MODEL
    from amem.model.spec import CODECS, check_codec

    for codec in options.codec or ():
        check_codec(codec)
    from amem.fidelity.report import format_report, measure_model

    report = measure_model(
        options.model or os.environ.get("AMEM_MODEL") or DEFAULT_MODEL,
        codecs=options.codec or CODECS,
        n_texts=options.texts,
        n_tokens=options.tokens,
        progress=_progress,
    )
    _write(options, report.to_dict(), format_report(report))
    return 0


def _spec(model: str) -> ModelCacheSpec:
    """What a model caches, by loading it and asking."""
    from amem.model.load import load
    from amem.run.checked import checked_spec

    loaded = load(model, progress=_progress)
    return checked_spec(loaded.model, loaded.fingerprint, _progress)


def _columns(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(main())
