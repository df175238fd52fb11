"""Where things are, in this repository and in the user's cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"
SERIES = PATCHES / "series"
PINS = ROOT / "third_party" / "pins.toml"
PYTORCH = ROOT / "third_party" / "pytorch"
TESTS = ROOT / "test"
BUILD = ROOT / "build"
DIST = ROOT / "dist"

# Verified downloads outlive a clone; all else that is made lies in build/ and dist/.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "input-grad-buffers"

# The interpreter that the user started; this process itself runs in the tools environment.
PYTHON = Path(os.environ.get("IGB_PYTHON") or sys.executable)
