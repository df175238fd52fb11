"""The command line: finds the command's module in ``igb.commands`` and runs it."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys

from igb import commands, log
from igb.errors import Problem
from igb.log import logger


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/run.py", description="Build, test and maintain the patch set.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for info in sorted(pkgutil.iter_modules(commands.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"igb.commands.{info.name}")
        name = info.name.replace("_", "-")
        subparser = subparsers.add_parser(name, help=module.HELP, description=module.__doc__)
        subparser.add_argument("-v", "--verbose", action="store_true", help="log each program that is run")
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    return parser


def main() -> int:
    arguments = build_parser().parse_args()
    log.configure(arguments.verbose)
    try:
        arguments.run(arguments)
    except Problem as problem:
        logger.error("%s", problem)
        return 1
    except KeyboardInterrupt:
        logger.error("interrupted; run the same command again to go on from here")
        return 130
    except OSError as error:
        where = f" on {error.filename}" if error.filename else ""
        logger.error("%s%s; free space or fix the permissions there, then rerun", error.strerror or error, where)
        return 1
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.umask(0o022)
    sys.exit(main())
