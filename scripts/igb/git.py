"""Git, made to act the same whoever runs it: no user or system configuration, hooks, attributes or identity."""

from __future__ import annotations

import os
from pathlib import Path

from igb import process

SETTINGS = {
    "advice.detachedHead": "false",
    "color.ui": "false",
    "commit.gpgSign": "false",
    "core.autocrlf": "false",
    "core.fsmonitor": "false",
    "core.hooksPath": os.devnull,
    "core.quotePath": "false",
    "gc.auto": "0",
    "init.defaultBranch": "series",
    # In a container the repository often belongs to another user; hooks and monitors are off anyway.
    "safe.directory": "*",
}
IDENTITY = {"NAME": "make source", "EMAIL": "make-source@localhost"}


def environment(date: str | None = None) -> dict[str, str]:
    """What git runs in. Commits of a fixed identity and ``date`` have the same hash on every machine."""
    # GIT_DIR and its like are set when a hook or an alias of an outer repository runs us.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    variables.update(
        GIT_CONFIG_GLOBAL=os.devnull,
        GIT_CONFIG_NOSYSTEM="1",
        GIT_ATTR_NOSYSTEM="1",
        XDG_CONFIG_HOME=os.devnull,
        GIT_TERMINAL_PROMPT="0",
        LC_ALL="C",
    )
    for role in ("AUTHOR", "COMMITTER"):
        variables.update({f"GIT_{role}_{field}": value for field, value in IDENTITY.items()})
        if date:
            variables[f"GIT_{role}_DATE"] = date
    return variables


class Repository:
    """A git repository with a working tree at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return os.path.relpath(self.path)

    def git(self, *arguments: str | Path, date: str | None = None, explain: str = "") -> str:
        settings = [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
        command = ["git", *settings, *arguments]
        # A folder that is no repository must not be taken for a part of one around it.
        variables = {**environment(date), "GIT_CEILING_DIRECTORIES": str(self.path.absolute().parent)}
        return process.run(command, cwd=self.path, env=variables, explain=explain)

    def commit_of(self, revision: str) -> str:
        return self.git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
