"""The settings that a project gives its notebooks: the table [tool.amem] of its pyproject.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path

from IPython.core.error import UsageError

from amem_jupyter.parse import nearest

FILE = "pyproject.toml"


def project_settings(folder: Path, known: Collection[str]) -> tuple[Path, dict[str, str]]:
    """The nearest table [tool.amem] at or above a folder, as texts; `known` are the settings that there are.

    Raises
    ------
    UsageError
        A file that cannot be read, or a setting that does not exist.
    """
    for above in (folder, *folder.parents):
        file = above / FILE
        if not file.is_file():
            continue
        try:
            table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("amem")
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read: {error}") from None
        if table is None:
            continue
        for name in table:
            if name not in known:
                hint = nearest(name, list(known)) or f"; there are {', '.join(known)}"
                raise UsageError(f"[tool.amem] in {file} has no setting {name!r}{hint}")
        return file, {name: str(value) for name, value in table.items()}
    return folder, {}
