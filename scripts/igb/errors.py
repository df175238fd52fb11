"""The one exception that commands raise for a failure they can explain."""

from __future__ import annotations


class Problem(Exception):
    """A failure worth one sentence: what went wrong, on what, and what to do about it."""
