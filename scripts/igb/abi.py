"""How a release was compiled, read from its own libraries."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

from igb.errors import Problem

# The build records its compiler flags, as one string, for torch.__config__.show(). This is one of them.
RECORDED = b"-fvisibility-inlines-hidden"

# Of the recorded flags, those that change generated code or what headers declare. Warnings are left to the compiler
# at hand, and -fPIC and optimisation to CMake.
KEPT = re.compile(
    r"-D\S+|-fabi-version=\d+|-f(?:no-)?(?:math-errno|trapping-math)|-faligned-new|-fvisibility-inlines-hidden"
)

OPTIMISATION = re.compile(r"(?<!\S)-O\d(?!\S)")


def compile_flags(libtorch_cpu: Path) -> list[str]:
    """The flags with which translation units of the release are compiled anew."""
    recorded = recorded_flags(libtorch_cpu)
    optimisation = OPTIMISATION.findall(recorded)[-1:] or ["-O2"]
    return [*dict.fromkeys(KEPT.findall(recorded)), *optimisation]


def recorded_flags(libtorch_cpu: Path) -> str:
    with libtorch_cpu.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        place = content.find(RECORDED)
        if place < 0:
            raise Problem(f"{libtorch_cpu} does not tell how it was compiled; this wheel cannot be relinked")
        return content[content.rfind(b"\0", 0, place) + 1 : content.find(b"\0", place)].decode()
