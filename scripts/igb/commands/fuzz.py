"""Compare many more random graphs, with the property and without, than `make test` does.

The seed is printed, with each thousand graphs; given again it makes the same graphs. See test/test_random_graphs.py.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
from pathlib import Path

from igb import paths, testing
from igb.errors import Problem

HELP = "run the random-graph test for long"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graphs", type=int, default=100_000, metavar="N", help="how many graphs (default: 100000)")
    parser.add_argument("--seed", type=int, metavar="N", help="the first seed (default: any)")
    parser.add_argument("--wheel", type=Path, metavar="PATH", help="test this wheel instead of the one in dist/")


def run(arguments: argparse.Namespace) -> None:
    python = testing.environment("venv", arguments.wheel or testing.the_wheel(paths.DIST))
    seed = random.randrange(1_000_000_000) if arguments.seed is None else arguments.seed
    variables = {**os.environ, "IGB_GRAPHS": str(arguments.graphs), "IGB_SEED": str(seed)}
    test = f"{paths.TESTS / 'test_random_graphs.py'}::test_random_graphs"
    if subprocess.run([python, "-m", "pytest", "-qs", test], cwd=paths.ROOT, env=variables, check=False).returncode:
        raise Problem("a graph is wrong; keep the one above in EXAMPLES of test/test_random_graphs.py")
