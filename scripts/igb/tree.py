"""``third_party/pytorch``: the pinned sources as one base commit, and one commit a patch on top of it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path

from igb import diff, series
from igb.errors import Problem
from igb.git import Repository

BASE = "base"  # a tag, so that `git rebase -i base` edits the series

# Debian's repack lacks upstream's own list.
IGNORED = ["__pycache__/", "*.py[cod]", "*.orig", "*.rej", ".pytest_cache/", ".hypothesis/"]

APPLY = [
    "--keep-non-patch",
    "--keep-cr",
    "--no-3way",
    "--no-scissors",
    "--no-message-id",
    "--whitespace=nowarn",
    "--committer-date-is-author-date",
]

DIFF = [
    "--binary",
    "--diff-algorithm=histogram",
    "--dst-prefix=b/",
    "--full-index",
    "--indent-heuristic",
    "--inter-hunk-context=0",
    "--no-color",
    "--no-ext-diff",
    "--no-renames",
    "--no-textconv",
    "--src-prefix=a/",
    "--unified=3",
]

FORMAT = [
    *DIFF,
    "--no-add-header",
    "--no-attach",
    "--no-base",
    "--no-cc",
    "--no-cover-letter",
    "--no-encode-email-headers",
    "--no-from",
    "--no-notes",
    "--no-numbered",
    "--no-signature",
    "--no-stat",
    "--no-thread",
    "--no-to",
    "--numbered-files",
    "--subject-prefix=PATCH",
    "--zero-commit",
]


WAITING = {
    "rebase-apply": "rebase",
    "rebase-merge": "rebase",
    "MERGE_HEAD": "merge",
    "CHERRY_PICK_HEAD": "cherry-pick",
}


class Status(str, Enum):
    """What was done last, and whether it came to its end."""

    IN_STEP = "in step"  # the commits up to `commit` and the patches were the same
    IMPORTING = "importing"  # being moved by `make source`; nobody's work is in the tree
    STOPPED = "stopped"  # the patch after `commit` did not apply and waits for the user
    EXPORTING = "exporting"  # `make patches` is replacing the patches by those of `commit`


@dataclass(frozen=True)
class State:
    status: Status
    commit: str
    patches: str  # their digest


class Conflict(Exception):
    """The patch at ``index`` of the series does not apply on ``commit``."""

    def __init__(self, index: int, patch: series.Patch, commit: str, reason: str) -> None:
        super().__init__(reason)
        self.index, self.patch, self.commit = index, patch, commit
        self.summary = "it does not apply"
        self.hunk: diff.Hunk | None = None
        if match := re.search(r"patch failed: (.*):(\d+)$", reason, re.MULTILINE):
            self.summary = f"this hunk does not fit {match[1]} at line {match[2]}"
            for file in diff.parse(patch.content.decode(errors="replace").split("\n")):
                for hunk in file.hunks:
                    if (file.path, str(hunk.old_start)) == match.groups():
                        self.hunk = hunk
        elif match := re.search(r"^(?:error|fatal): (.*)", reason, re.MULTILINE):
            self.summary = match[1]


class Tree(Repository):
    """The tree that ``make source`` fills and ``make patches`` exports."""

    @property
    def _state_file(self) -> Path:
        return self.path / ".git" / "igb.json"

    @property
    def state(self) -> State:
        try:
            entries = json.loads(self._state_file.read_text(encoding="utf-8"))
            return State(Status(entries.pop("status")), **entries)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise Problem(
                f"{self} is there but was not made by `make source`; move it away and run `make source`"
            ) from error

    @state.setter
    def state(self, state: State) -> None:
        new = self._state_file.with_suffix(".new")
        new.write_text(json.dumps(asdict(state)), encoding="utf-8")
        new.replace(self._state_file)

    def lay_base(self, message: str, date: str) -> None:
        """Turn the plain folder into a repository whose one commit holds every file of it."""
        self.git("init", "--quiet", "--template=")
        self.git("config", "core.autocrlf", "false")
        (self.path / ".git" / "info").mkdir()
        (self.path / ".git" / "info" / "exclude").write_text("".join(f"{line}\n" for line in IGNORED))
        self.git("add", "--all", "--force")
        self.git("commit", "--quiet", "--message", message, date=date)
        self.git("tag", BASE)
        self.state = State(Status.IN_STEP, self.commit_of(BASE), series.digest(()))

    def base_message(self) -> str:
        return self.git("log", "-1", "--format=%B", BASE).strip()

    def operation_in_progress(self) -> str | None:
        """The git command that waits for the user in this tree, if any."""
        folder = self.path / ".git"
        if (folder / "rebase-apply" / "applying").exists():
            return "am"
        return next((command for name, command in WAITING.items() if (folder / name).exists()), None)

    def check_settled(self) -> None:
        """Refuse a tree in which something is not committed or not finished."""
        if operation := self.operation_in_progress():
            raise Problem(f"`git {operation}` waits in {self}; end it there with --continue or --abort, then rerun")
        if changes := self.git("status", "--porcelain", "--untracked-files=all").splitlines():
            message = f"{self} has changes that are not committed; commit or remove them, then rerun"
            raise Problem("\n".join([message, *changes[:9], *["..."] * (len(changes) > 9)]))

    def move_to(self, commit: str) -> None:
        """Make HEAD and the files those of ``commit``, touching only files that differ."""
        (self.path / ".git" / "index.lock").unlink(missing_ok=True)
        shutil.rmtree(self.path / ".git" / "rebase-apply", ignore_errors=True)
        self.git("reset", "--quiet", "--hard", commit)
        self.git("clean", "--quiet", "--force", "-d")

    @contextmanager
    def scratch(self, commit: str) -> Iterator[Repository]:
        """A second working tree on ``commit``; its files are checked out only as git needs them."""
        path = self.path.with_name(f"{self.path.name}.scratch")
        shutil.rmtree(path, ignore_errors=True)
        self.git("worktree", "add", "--quiet", "--force", "--no-checkout", "--detach", path, commit)
        scratch = Repository(path)
        try:
            scratch.git("read-tree", "HEAD")
            yield scratch
        finally:
            self.git("worktree", "remove", "--force", path)

    def apply(self, patches: series.Series) -> str:
        """Commit each patch on the base, strictly and outside the working tree; return the last commit."""
        with self.scratch(BASE) as scratch, tempfile.TemporaryDirectory() as folder:
            for index, patch in enumerate(patches):
                file = Path(folder, patch.name)
                file.write_bytes(patch.content)
                try:
                    scratch.git("am", "--quiet", *APPLY, file)
                except Problem as problem:
                    raise Conflict(index, patch, scratch.commit_of("HEAD"), str(problem)) from problem
            return scratch.commit_of("HEAD")

    def stop_at(self, conflict: Conflict, patches: series.Series) -> None:
        """Leave the tree with `git am` waiting in it, and what does not apply in .rej files."""
        self.move_to(conflict.commit)
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, patch.name) for patch in patches[conflict.index :]]
            for file, patch in zip(files, patches[conflict.index :]):
                file.write_bytes(patch.content)
            try:
                self.git("am", "--quiet", "--reject", *APPLY, *files)
            except Problem:
                return

    def export(self, commit: str) -> series.Series:
        """The commits from the base to ``commit`` as patches, the same bytes each time."""
        span = f"{BASE}..{commit}"
        if self.git("rev-list", BASE, f"^{commit}") or self.git("rev-list", "--merges", span):
            raise Problem(f"{self} is no straight line of commits from `{BASE}`; run `git rebase {BASE}` there")
        subjects = self.git("log", "--reverse", "--format=%s", span).splitlines()
        names = [series.slug(subject) for subject in subjects]
        for subject in subjects:
            if subject.startswith(("fixup!", "squash!", "amend!")):
                command = f"git -C {self} rebase -i --autosquash {BASE}"
                raise Problem(f"the commit `{subject}` is to be melted into another; run `{command}`")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise Problem(f"several commits would be exported as {twice[0]}; give one of them another subject")
        with tempfile.TemporaryDirectory() as folder:
            self.git("format-patch", "--quiet", *FORMAT, "--output-directory", folder, span)
            contents = [path.read_bytes() for path in sorted(Path(folder).iterdir(), key=lambda path: int(path.name))]
        if not all(contents):
            raise Problem(f"{self} has commits that change nothing; drop them with `git rebase -i {BASE}` there")
        return tuple(series.Patch(name, content) for name, content in zip(names, contents))

    def changes(self, commit: str) -> list[diff.File]:
        """What the series changes in all."""
        return diff.parse(self.git("diff", *DIFF, BASE, commit).split("\n"))
