"""Relink the release wheel with the series, into dist/.

Compiles the translation units that the series touches against the release's own headers, links them into two small
libraries, rewires the release's libraries to them and packs everything else as it is. Running it again does only what
has become necessary.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from igb import audit, compile, elf, layout, paths, payload, pins, wheelfile
from igb.commands import source
from igb.compile import Build, Replacement
from igb.errors import Problem
from igb.lock import locked
from igb.log import logger
from igb.release import Release, obtain
from igb.stamp import Stamp
from igb.tree import Tree
from igb.wheelfile import Wheel

HELP = "relink the release wheel with the series into dist/"

SUFFIX = "igb.1"
DISK = 5 << 30  # bytes: the release wheel, its unpacked part, the rewired libraries and the new wheel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    source.add_arguments(parser)
    parser.add_argument(
        "--wheel", type=Path, metavar="PATH", help="relink this wheel of torch, whether or not the pins know it"
    )


def run(arguments: argparse.Namespace) -> None:
    check_machine()
    with locked(paths.BUILD / "lock"):
        source.run(arguments)
        pinned = pins.load()
        release = obtain(pinned.source.version, pinned.wheels, arguments.wheel)
        relink(Tree(paths.PYTORCH), release)


def check_machine() -> None:
    """Fail early, and in one sentence, for want of what the build will need."""
    compile.find_compiler()
    compile.python_include()
    compile.jobs()
    paths.BUILD.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(paths.BUILD).free
    if free < DISK and not any(paths.DIST.glob("*.whl")):
        raise Problem(f"{paths.BUILD} has {free / 1e9:.1f} GB left, and {DISK / 1e9:.1f} GB are needed; free some")


def relink(tree: Tree, release: Release) -> Path:
    """The wheel of ``release`` with the series in ``tree``; made unless it is there already."""
    touched = payload.touched(tree)
    headers = [name for path in touched if (name := payload.include_name(path)) and (release.include / name).exists()]
    build = compile.build(release, tree.path, headers)
    members: dict[str, bytes | Path] = {**payload.files(tree, release, touched, build.sources)}
    check(build, release, tree, touched)
    for replacement in build.replacements:
        members |= rewired(replacement, release)
    wheel, beyond = name_of(release, build)
    members |= payload.renamed(release, wheel)
    target = paths.DIST / wheel.file_name
    contents = [part for name in sorted(members) for part in (name, content(members[name]))]
    date = str(wheelfile.moment())
    stamp = Stamp(paths.BUILD / "wheel.stamp", Path(wheelfile.__file__), release.sha256, target.name, date, *contents)
    if target.exists() and stamp.holds():
        logger.info("%s is up to date", target)
        return target
    if beyond:
        logger.info("the wheel needs %s and is tagged for systems as new as this one", ", ".join(beyond))
    stamp.clear()
    wheelfile.repack(release.wheel, members, wheel, paths.DIST)
    for other in paths.DIST.glob(f"{wheel.distribution}-{wheel.version}-*.whl"):
        if other != target:
            other.unlink()
    stamp.set()
    logger.info("%s is ready", target)
    return target


def content(member: bytes | Path) -> str | Path:
    return member if isinstance(member, Path) else member.hex()


def check(build: Build, release: Release, tree: Tree, touched: list[str]) -> None:
    """Audit the build, unless the same one has passed."""
    objects = [unit.object for replacement in build.replacements for unit in replacement.units]
    code = [Path(module.__file__ or "") for module in (audit, layout)]
    types = [build.types_before, build.types_after]
    stamp = Stamp(paths.BUILD / "audit" / "passed", release.sha256, *touched, *code, *types, *objects)
    if stamp.holds():
        return
    layout.check(build.types_before, build.types_after, tree.path, build.sources)
    libraries = [*release.lib.iterdir(), *(replacement.new for replacement in build.replacements)]
    for replacement in build.replacements:
        audit.audit(replacement, touched, tree.path, libraries)
    stamp.set()


def rewired(replacement: Replacement, release: Release) -> dict[str, bytes | Path]:
    """The two libraries to pack: the release's, rewired, and the one it is rewired to."""
    output = replacement.new.parent / "rewired" / replacement.old.name
    stamp = Stamp(output.with_suffix(".stamp"), Path(elf.__file__), release.sha256, replacement.new)
    if not (output.exists() and stamp.holds()):
        names = elf.rewire(replacement.old, replacement.new, output)
        stamp.set()
        logger.info("%s: %d symbols now come from %s", output.name, len(names), replacement.new.name)
    return {f"torch/lib/{output.name}": output, f"torch/lib/{replacement.new.name}": replacement.new}


def name_of(release: Release, build: Build) -> tuple[Wheel, list[str]]:
    """The name of the new wheel, and what it needs of the system beyond what the release does.

    The new libraries may need newer C and C++ libraries, as those that they were compiled with. No tag tells the
    version of the C++ library, but systems with the same C library are of about the same age.
    """
    old = Wheel.named(release.wheel.name)
    wheel = replace(old, version=f"{old.version}{'.' if '+' in old.version else '+'}{SUFFIX}")
    before = newest(release.lib.iterdir())
    beyond = sorted(
        f"{family}_{'.'.join(map(str, number))}"
        for family, number in newest(replacement.new for replacement in build.replacements).items()
        if number > before.get(family, ())
    )
    if not beyond:
        return wheel, beyond
    python, abi, platform = old.tags.split("-")
    machine = re.sub(r".*?_(?=x86_64|aarch64)", "", platform)
    version = (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2].replace(".", "_")
    return replace(wheel, tags=f"{python}-{abi}-manylinux_{version}_{machine}"), beyond


def newest(libraries: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    result: dict[str, tuple[int, ...]] = {}
    for library in libraries:
        for family, number in elf.newest_versions(library).items():
            result[family] = max(result.get(family, ()), number)
    return result
