"""Unpacking archives."""

from __future__ import annotations

import tarfile
from pathlib import Path

from igb.errors import Problem
from igb.log import Progress


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a tar archive into ``folder`` and return the one folder at its top."""
    try:
        with archive.open("rb") as file, tarfile.open(fileobj=file) as tar:
            # Python 3.9 to 3.11 have filters from some patch release on; without one they do what the archive says.
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            with Progress(f"unpacking {archive.name}", archive.stat().st_size, "B") as progress:
                for member in tar:
                    tar.extract(member, folder)
                    progress.advance(file.tell() - progress.done)
    except (OSError, tarfile.TarError) as error:
        raise Problem(
            f"{archive} could not be unpacked into {folder}: {error}; check the space and the permissions there, "
            "then rerun"
        ) from error
    tops = list(folder.iterdir())
    if len(tops) != 1:
        raise Problem(f"{archive} has {len(tops)} entries at its top, where one folder is expected; use a pinned one")
    return tops[0]
