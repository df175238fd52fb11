"""Relink the release wheel with the series, into dist/.

Compiles the translation units that the series touches against the release's own headers, links them into two small
libraries, rewires the release's libraries to them and packs everything else as it is. Running it again does only what
has become necessary.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
from pathlib import Path

from igb import audit, compile, elf, paths, payload, pins, wheelfile
from igb.commands import source
from igb.errors import Problem
from igb.log import logger
from igb.release import Release, obtain
from igb.tree import Tree

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
    source.run(arguments)
    pinned = pins.load()
    release = obtain(pinned.source.version, pinned.wheels, arguments.wheel)
    build(Tree(paths.PYTORCH), release, paths.DIST)


def check_machine() -> None:
    """Fail early, and in one sentence, for want of what the build will need."""
    compile.find_compiler()
    compile.python_include()
    paths.BUILD.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(paths.BUILD).free
    if free < DISK and not any(paths.DIST.glob("*.whl")):
        raise Problem(f"{paths.BUILD} has {free / 1e9:.1f} GB left of the {DISK / 1e9:.1f} GB needed; free some")


def build(tree: Tree, release: Release, folder: Path) -> Path:
    """The relinked wheel of ``release`` with the series in ``tree``; made unless it is there already."""
    version = f"{wheelfile.Wheel.named(release.wheel).version}+{SUFFIX}"
    members: dict[str, bytes | Path] = {**payload.files(tree, release, version)}
    touched = payload.changed_paths(tree)
    for replacement in compile.replacements(release, tree.path):
        audit.audit_once(replacement, touched, tree.path)
        members |= relinked(replacement)
    stamp = paths.BUILD / "wheel.sha256"
    digest = digest_of(release, members)
    target = folder / wheelfile.Wheel(
        "torch", version, wheelfile.Wheel.named(release.wheel).tags
    ).file_name
    if target.exists() and stamp.exists() and stamp.read_text() == digest:
        logger.info("%s is up to date", target)
        return target
    stamp.unlink(missing_ok=True)
    wheelfile.repack(release.wheel, members, version, folder)
    stamp.write_text(digest)
    logger.info("%s is ready", target)
    return target


def relinked(replacement: compile.Replacement) -> dict[str, bytes | Path]:
    """The two libraries to pack: the release's, rewired, and the one it is rewired to."""
    output = replacement.new.parent / "rewired" / replacement.old.name
    if not elf.is_newer(output, replacement.new, replacement.old):
        names = elf.rewire(replacement.old, replacement.new, output)
        logger.info("%s: %d symbols now come from %s", output.name, len(names), replacement.new.name)
        report_versions(replacement)
    return {f"torch/lib/{output.name}": output, f"torch/lib/{replacement.new.name}": replacement.new}


def report_versions(replacement: compile.Replacement) -> None:
    """Say what the new library needs of the system beyond what the release does."""
    def newest(path: Path) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for version in elf.needed_versions(path):
            family, _, number = version.rpartition("_")
            if number.replace(".", "").isdigit():
                found[family] = max(found.get(family, ()), tuple(map(int, number.split("."))))
        return found

    before = newest(replacement.old)
    beyond = {
        f"{family}_{'.'.join(map(str, number))}"
        for family, number in newest(replacement.new).items()
        if number > before.get(family, ())
    }
    if beyond:
        logger.info(
            "%s needs %s: it runs on systems as new as this one; build on an older one for older ones",
            replacement.new.name,
            ", ".join(sorted(beyond)),
        )


def digest_of(release: Release, members: dict[str, bytes | Path]) -> str:
    digest = hashlib.sha256(release.sha256.encode())
    for name, content in sorted(members.items(), key=lambda item: item[0]):
        digest.update(name.encode() + b"\0")
        digest.update((content if isinstance(content, bytes) else pins.digest(content).encode()) + b"\0")
    return digest.hexdigest()
