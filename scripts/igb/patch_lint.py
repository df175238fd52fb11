"""Checks of the patches that need nothing but the patches; each finding is ``file:line: problem``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from igb import diff, series

SUBJECT_LENGTH = 72
BODY_LENGTH = 76  # `git log` indents by four
STANDINGS = ("Pending", "Submitted", "Backport", "Inappropriate")
TRAILERS = ("Upstream-Status", "Drop-When")


@dataclass(frozen=True)
class Message:
    """A patch's commit message: the subject, the body's lines with their numbers, and the trailers among them."""

    subject: str
    subject_place: int
    body: list[tuple[int, str]]
    trailers: dict[str, tuple[int, str]]
    end: int


def check(folder: Path) -> list[str]:
    """Every problem of the series in ``folder``."""
    problems = series.disorder(folder)
    changes: list[tuple[str, diff.File]] = []
    for patch in series.listed(folder):
        where = f"{folder.name}/{patch.name}"
        try:
            lines = patch.content.decode().split("\n")
        except UnicodeDecodeError as error:
            line = patch.content.count(b"\n", 0, error.start) + 1
            problems.append(f"{where}:{line}: not UTF-8")
            continue
        start = next((number for number, line in enumerate(lines) if line.startswith("diff --git ")), len(lines))
        message = read_message(lines[:start])
        files = diff.parse(lines[start:], start + 1)
        changes += [(where, file) for file in files]
        findings = [*check_message(message, patch.name), *check_added_lines(files)]
        problems += [f"{where}:{place}: {problem}" for place, problem in sorted(findings)]
    return problems + check_new_files(changes)


def read_message(lines: list[str]) -> Message:
    """Take apart what stands before the diff."""
    blank = lines.index("") if "" in lines else len(lines)
    place = next((number for number, line in enumerate(lines[:blank], 1) if line.startswith("Subject:")), 1)
    subject = lines[place - 1].partition(":")[2]
    for line in lines[place:blank]:
        if not line.startswith(" "):
            break
        subject += line
    body = list(enumerate(lines[blank:], blank + 1))
    while body and not body[-1][1]:
        body.pop()
    paragraph = len(body)
    while paragraph and body[paragraph - 1][1]:
        paragraph -= 1
    trailers: dict[str, tuple[int, str]] = {}
    name = ""
    for number, line in body[paragraph:]:
        if match := re.match(r"([A-Z][A-Za-z-]+): (.*)", line):
            name = match[1]
            trailers[name] = (number, match[2])
        elif name and line.startswith(" "):
            trailers[name] = (trailers[name][0], f"{trailers[name][1]} {line.strip()}")
        else:
            trailers, paragraph = {}, len(body)
            break
    text = body[:paragraph]
    return Message(re.sub(r"^ *\[PATCH\] *", "", subject), place, text, trailers, len(lines) or 1)


def check_message(message: Message, name: str) -> Iterator[tuple[int, str]]:
    subject, place = message.subject, message.subject_place
    title = re.sub(r"^\[[^\]]*\] ", "", subject)
    if len(subject) > SUBJECT_LENGTH:
        yield place, f"the subject has {len(subject)} characters; {SUBJECT_LENGTH} are allowed"
    if not re.match(r"[A-Z]", title):
        yield place, "the subject does not begin with a capital letter"
    if subject.endswith("."):
        yield place, "the subject ends with a period"
    if name != series.slug(subject):
        yield place, f"the subject belongs to a file named {series.slug(subject)}; run `make patches`"
    for number, line in [(place, subject), *message.body]:
        if match := re.search(r"\bpatch(es)? (no\. |#)?\d+|\b\d+/\d+\b", line, re.IGNORECASE):
            yield number, f"`{match[0]}` counts patches, which goes stale; name the patch instead"
    if not any(line for _, line in message.body):
        yield message.end, "there is no body; say why the patch exists"
    for number, line in message.body:
        if len(line) > BODY_LENGTH and " " in line.strip():
            yield number, f"the line has {len(line)} characters; {BODY_LENGTH} are allowed"
    for trailer in TRAILERS:
        if not message.trailers.get(trailer, (0, ""))[1].strip():
            yield message.end, f"the trailer `{trailer}:` is missing"
    if "Upstream-Status" in message.trailers:
        number, value = message.trailers["Upstream-Status"]
        if not re.match(rf"({'|'.join(STANDINGS)})\W+\w", value):
            yield number, f"`Upstream-Status:` does not begin with one of {', '.join(STANDINGS)} and go on to say more"


def check_added_lines(files: list[diff.File]) -> Iterator[tuple[int, str]]:
    for file in files:
        if file.is_binary:
            yield file.place, f"{file.path} is changed as a binary file"
        for line in file.added:
            if line.text.endswith("\r"):
                yield line.place, f"{file.path} gets a line with a carriage return"
            elif line.text != line.text.rstrip():
                yield line.place, f"{file.path} gets a line with trailing whitespace"
            if re.match(r" +\t", line.text):
                yield line.place, f"{file.path} gets a line with a space before a tab in its indentation"
            if re.match(r"(<{7}|>{7}|\|{7})( |$)", line.text):
                yield line.place, f"{file.path} gets a conflict marker"
        for hunk in file.hunks:
            if hunk.lines[-1].startswith("\\") and hunk.lines[-2].startswith("+"):
                yield hunk.added[-1].place, f"{file.path} gets a last line without a newline"
        if file.is_new and re.match(r"test/(.*/)?test_[^/]*\.py$", file.path):
            first = next(file.added, None)
            if not first or not re.match(r'# Owner\(s\): \["[^"]+"(, "[^"]+")*\]$', first.text):
                yield file.place, f'{file.path} does not begin with `# Owner(s): ["..."]`'


def check_new_files(changes: list[tuple[str, diff.File]]) -> list[str]:
    """New C++ sources that no patch of the series lists where upstream's builds look for them."""
    listed = {
        path
        for _, file in changes
        if file.path == "build_variables.bzl"
        for line in file.added
        for path in re.findall(r'"([^"]+)"', line.text)
    }
    return [
        f"{where}:{file.place}: {file.path} is new and not listed in build_variables.bzl"
        for where, file in changes
        if file.is_new and re.match(r"torch/csrc/.*\.(cpp|cc|cu)$", file.path) and file.path not in listed
    ]
