"""The command line: what the engine and the store can do, for a terminal and for scripts (``--json``)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from amem.errors import AmemError
from amem.sizes import format_size, parse_size

_DEFAULT_STORE = "~/.amem"

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; gives its exit code: 0, 1 for an error of amem's, 2 for wrong usage, 130 for Ctrl-C."""
    options = _parser().parse_args(argv)
    run: Command = options.run
    try:
        return run(options)
    except AmemError as error:
        print(f"amem: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="amem", description="Agents that keep their attention state.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Command, text: str, *, store: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print JSON")
        if store:
            sub.add_argument(
                "--store", default=os.environ.get("AMEM_STORE") or _DEFAULT_STORE, help="folder of the agents"
            )
            sub.add_argument("--space", default="default", help="agents of other spaces are not seen")
        return sub

    ask = command("ask", _ask, "Send a message to an agent.")
    ask.add_argument("name")
    ask.add_argument("text")
    ask.add_argument("--model", help="bundled name, folder or hub id")
    ask.add_argument("--codec", default="auto")
    ask.add_argument("--memory", help="most that hot K/V may take, e.g. 2GB")
    ask.add_argument("--system", help="system text of a new agent")
    ask.add_argument("--max-tokens", type=int, default=512)
    ask.add_argument("--temperature", type=float, default=0.0)
    ask.add_argument("--top-p", type=float, default=1.0)
    ask.add_argument("--seed", type=int)
    ask.add_argument("--stop", action="append", default=[], help="text at which the reply ends; may be repeated")
    command("agents", _agents, "List the agents of a space.")
    command("status", _status, "Show what the store holds.")
    check = command("verify", _verify, "Check every stored byte against its checksum.")
    check.add_argument("--repair", action="store_true", help="set aside what is damaged")
    command("delete", _delete, "Delete an agent with all of its text and state.").add_argument("name")
    export = command("export", _export, "Write an agent into one file.")
    export.add_argument("name")
    export.add_argument("file", type=Path)
    bring = command("import", _import, "Read an agent from an exported file.")
    bring.add_argument("file", type=Path)
    bring.add_argument("--name", help="another name than the one it was exported with")
    command("models", _models, "List the models that need no download.", store=False)
    fit = command("capacity", _capacity, "Tell how many agents fit into a memory.", store=False)
    fit.add_argument("model", nargs="?", help="bundled name, folder or hub id; default: the geometries of the paper")
    fit.add_argument(
        "--geometry", action="append", default=[], metavar="NAME", help="a model's shape, without the model"
    )
    fit.add_argument("--memory", default="10.2GiB", help="such as 16GB or 10.2GiB (default: %(default)s)")
    fit.add_argument("--context", type=int, action="append", metavar="TOKENS", help="may be repeated")
    return parser


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, default=str))


def _ask(options: argparse.Namespace) -> int:
    from amem.engine import Engine

    with Engine(
        options.model, options.store, space=options.space, memory=options.memory, codec=options.codec
    ) as engine:
        events = engine.agent(options.name).stream(
            options.text,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            stop=options.stop,
            system=options.system,
        )
        for event in events:
            if event.reply is not None and options.json:
                _print_json(event.reply.to_dict())
            elif not options.json:
                print(event.text, end="\n" if event.reply is not None else "", flush=True)
    return 0


def _open_store(options: argparse.Namespace) -> Any:
    from amem.store import Store

    return Store(Path(options.store))


def _agents(options: argparse.Namespace) -> int:
    with _open_store(options) as store:
        entries = store.agents(options.space)
    if options.json:
        _print_json([asdict(entry) for entry in entries])
        return 0
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        print(f"{entry.name:{width}}  {entry.n_turns:>5} turns  {format_size(entry.nbytes):>8}")
    return 0


def _status(options: argparse.Namespace) -> int:
    with _open_store(options) as store:
        entries, nbytes = store.agents(), store.disk_bytes
        reports = list(store.reports)
    spaces = sorted({entry.space for entry in entries})
    if options.json:
        _print_json({"store": options.store, "disk_bytes": nbytes, "agents": len(entries), "spaces": spaces,
                     "reports": reports})  # fmt: skip
        return 0
    print(f"store {options.store}: {len(entries)} agents in {len(spaces)} spaces, {format_size(nbytes)}")
    for report in reports:
        print(report)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from amem.store import verify

    with _open_store(options) as store:
        report = verify(store, repair=options.repair)
    if options.json:
        _print_json(asdict(report) | {"clean": report.clean})
    else:
        for problem in report.problems:
            print(problem)
        outcome = "all sound" if report.clean else f"{len(report.problems)} problems"
        print(f"{report.agents} agents, {report.blocks} blocks, {format_size(report.nbytes)}: {outcome}")
    return 0 if report.clean or options.repair else 1


def _delete(options: argparse.Namespace) -> int:
    with _open_store(options) as store:
        gone = store.delete(options.name, options.space)
    if options.json:
        _print_json(asdict(gone))
        return 0
    shared = f"; {gone.n_shared} of its files live on in forks" if gone.n_shared else ""
    print(f"deleted {options.name}: {format_size(gone.nbytes)}{shared}")
    return 0


def _export(options: argparse.Namespace) -> int:
    from amem.store import export_agent

    with _open_store(options) as store, store.open(options.name, options.space, create=False) as agent:
        nbytes = export_agent(agent, options.file)
    if options.json:
        _print_json({"file": str(options.file), "nbytes": nbytes})
    else:
        print(f"exported {options.name} to {options.file}: {format_size(nbytes)}")
    return 0


def _import(options: argparse.Namespace) -> int:
    from amem.store import import_agent

    with (
        _open_store(options) as store,
        import_agent(store, options.file, name=options.name, space=options.space) as agent,
    ):
        found: dict[str, Any] = {
            "name": agent.name,
            "space": agent.space,
            "turns": len(agent.turns()),
            "nbytes": agent.nbytes,
        }
    if options.json:
        _print_json(found)
    else:
        print(f"imported {found['name']}: {found['turns']} turns, {format_size(found['nbytes'])}")
    return 0


def _models(options: argparse.Namespace) -> int:
    from amem.model.load import models

    found = models()
    if options.json:
        _print_json([asdict(info) for info in found])
        return 0
    for info in found:
        print(
            f"{info.name:<50} {info.source:<10} {format_size(info.nbytes):>8}{'' if info.path else '  (to download)'}"
        )
    return 0


def _capacity(options: argparse.Namespace) -> int:
    from amem.model.capacity import CONTEXTS, capacity_table, format_table
    from amem.model.geometry import PAPER_GEOMETRIES, geometry

    memory = parse_size(options.memory)
    names = options.geometry or ([] if options.model else PAPER_GEOMETRIES)
    specs = {name: geometry(name) for name in names}
    if options.model:
        from amem.model.load import load
        from amem.run.checked import checked_spec

        loaded = load(options.model)
        specs[loaded.name] = checked_spec(loaded.model, loaded.fingerprint)
    rows = capacity_table(specs, memory_bytes=memory, contexts=options.context or CONTEXTS)
    if options.json:
        _print_json([asdict(row) for row in rows])
    else:
        print(f"Agents in {format_size(memory)}; in brackets with the open group at its average.")
        print(format_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
