"""The code blocks of a Markdown page, and what is done with each; run as a program, it runs a page.

    python tests/docs/pages.py docs/quickstart.md

Every fenced block is one of

* python: executed, all of a page in order, in one namespace; one that begins indented goes on
  where the last one ended (a class told in pieces);
* console: each line after "$ " is run by bash; the lines below it must be in its output, in this
  order, where "..." stands for any text. After `<!-- background -->` the command is a server: it
  runs until the page ends, and the page goes on once the expected lines were printed;
* toml, json: parsed;
* any of these after `<!-- file: NAME -->`: written to that file, for the blocks after it;
* anything else, or one of the above that can't be run here, after `<!-- not run: REASON -->`.

A block that is none of these is an error. "7700" is replaced by a free port, so that pages can run
at the same time. All of it happens in the working directory.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

COMMAND_SECONDS = 120.0
PORT = "7700"
_DIRECTIVE = re.compile(
    r"<!-- (?:(?P<background>background)|not run: (?P<reason>\S.*)|file: (?P<file>\w[\w.-]*)) -->"
)
_RUN = {"python", "console", "toml", "json"}


class Block(NamedTuple):
    """One fenced block. line: of its first line of code. reason: why it isn't run, or empty.
    file: which file it is, or empty."""

    language: str
    code: str
    line: int
    background: bool = False
    reason: str = ""
    file: str = ""


def blocks_of(text: str) -> list[Block]:
    """All blocks of a page; `ValueError` where one is not accounted for."""
    found: list[Block] = []
    directive: re.Match[str] | None = None
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        stripped = line.strip()
        if stripped.startswith(("<!-- not run", "<!-- background", "<!-- file")):
            directive = _DIRECTIVE.fullmatch(stripped)
            if directive is None:
                raise ValueError(f"line {number}: a directive without a reason: {stripped}")
        elif stripped.startswith("```"):
            indent = len(line) - len(line.lstrip())
            code: list[str] = []
            for _, inner in lines:
                if inner.strip() == "```":
                    break
                code.append(inner[indent:])
            else:
                raise ValueError(f"line {number}: this block never ends")
            said = {} if directive is None else directive.groupdict(default="")
            reason = said.get("reason", "")
            block = Block(
                stripped.strip("`"),
                "\n".join(code) + "\n",
                number + 1,
                bool(said.get("background")),
                reason,
                said.get("file", ""),
            )
            if not reason and block.language not in _RUN:
                raise ValueError(
                    f"line {number}: a block of {block.language or 'no language'!r} isn't run; say "
                    "why in <!-- not run: REASON --> before it"
                )
            found.append(block)
            directive = None
        elif stripped:
            directive = None
    return found


class Page:
    """Runs the blocks of one page."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.port = str(_free_port())
        self.namespace: dict[str, Any] = {"__name__": "__main__"}
        self.source = ""
        self.servers: list[subprocess.Popen[str]] = []
        here = str(Path(sys.executable).parent)
        self.environment = {**os.environ, "PATH": here + os.pathsep + os.environ.get("PATH", "")}

    def run(self) -> tuple[int, int]:
        """How many blocks were run, and how many were not, for a reason."""
        blocks = blocks_of(self.path.read_text(encoding="utf-8"))
        try:
            for block in blocks:
                if not block.reason:
                    self._run_block(block)
        finally:
            for server in self.servers:
                server.send_signal(signal.SIGTERM)
                server.wait(30)
        left_out = sum(bool(block.reason) for block in blocks)
        return len(blocks) - left_out, left_out

    def _run_block(self, block: Block) -> None:
        code = block.code.replace(PORT, self.port)
        if block.file:
            Path(block.file).write_text(code, encoding="utf-8")
        elif block.language == "python":
            if not code.startswith(" "):
                self.source = ""
            missing = block.line - 1 - self.source.count("\n")
            self.source += "\n" * missing + code  # every line at its place, for tracebacks
            exec(compile(self.source, str(self.path), "exec"), self.namespace)
        elif block.language == "toml":
            tomllib.loads(code)
        elif block.language == "json":
            json.loads(code)
        else:
            for command, expected in commands_of(code):
                self._run_command(block, command, expected)

    def _run_command(self, block: Block, command: str, expected: list[str]) -> None:
        where = f"{self.path.name}:{block.line}: {command}"
        if block.background:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                stdout=subprocess.PIPE,
                text=True,
                env=self.environment,
            )
            self.servers.append(server)
            assert server.stdout is not None
            printed = "".join(server.stdout.readline() for _ in expected)
        else:
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", command],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=self.environment,
                timeout=COMMAND_SECONDS,
            )
            printed = done.stdout
            if done.returncode != 0:
                raise SystemExit(f"{where}\nended with {done.returncode}:\n{printed}")
        if not holds_in_order(printed, expected):
            raise SystemExit(f"{where}\nprinted\n{printed}\ninstead of\n" + "\n".join(expected))


def commands_of(code: str) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with the lines that it must print; a line that ends in
    a backslash goes on in the next one."""
    commands: list[tuple[str, list[str]]] = []
    continued = False
    for line in code.splitlines():
        if continued:
            command, expected = commands.pop()
            commands.append((f"{command}\n{line}", expected))
        elif line.startswith("$ "):
            commands.append((line[2:], []))
        elif not commands:
            raise SystemExit(f"a console block begins with '$ ', not with {line!r}")
        elif line.strip():
            commands[-1][1].append(line)
        continued = line.endswith("\\")
    return commands


def holds_in_order(printed: str, expected: list[str]) -> bool:
    """Whether the lines come in this order, with "..." for any text. (Not by a regular expression:
    one with many gaps takes for ever to find that it does not match.)"""
    place = 0
    for line in expected:
        for piece in line.rstrip().split("..."):
            place = printed.find(piece, place)
            if place < 0:
                return False
            place += len(piece)
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    ran, left_out = Page(Path(sys.argv[1]).resolve()).run()
    print(f"{ran} blocks ran, {left_out} not run for a stated reason")
