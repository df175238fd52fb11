"""Tooling of the patch set: from pinned sources to a tested wheel, and back to a pull request."""
