"""Small C++ libraries for the tests of relinking, compiled as PyTorch's are: hidden unless exported."""

from __future__ import annotations

import subprocess
from pathlib import Path

from igb.compile import Unit

EXPORTED = '__attribute__((visibility("default"))) '


def compile_library(folder: Path, name: str, sources: dict[str, str]) -> tuple[Path, tuple[Unit, ...]]:
    """Compile ``sources``, which lie in torch/csrc of ``folder``, and link them into torch/lib."""
    units = []
    for file_name, text in sources.items():
        source = folder / "torch" / "csrc" / file_name
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(text)
        unit = Unit(source.relative_to(folder).as_posix(), source.with_suffix(".o"))
        flags = ["-O2", "-fPIC", "-fvisibility=hidden", "-ffunction-sections", "-fno-inline"]
        subprocess.run(["g++", *flags, "-c", source, "-o", unit.object], check=True)
        units.append(unit)
    library = folder / "torch" / "lib" / name
    library.parent.mkdir(parents=True, exist_ok=True)
    objects = [unit.object for unit in units]
    subprocess.run(["g++", "-shared", *objects, "-o", library, f"-Wl,-soname,{name}"], check=True)
    return library, tuple(units)
