"""A reader's terminal: it runs the lines of ``sh`` blocks, in a folder of its own, against a real broker.

``headrace`` runs in this process, which takes milliseconds; other programs run in bash. What would not end is
started as a process and interrupted when it has shown something. The reader's folders, ports and hosts are
replaced (:meth:`Terminal.mine`), and nothing else is; a command that would run for ever ends when it has done
all that there is (:func:`ending`).
"""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from headrace.cli import main
from tests.cli.rig import SCRIPT, clean_environment, stdin_of
from tests.docs.blocks import Block

WAIT_S = 60.0
FOLDERS = ("/var/lib", "/backup", "/lake", "/shared", "/state", "/opt")
PASSWORD = "correct horse battery"
ASKING = ("delete-topic", "delete-subscription", "dlq purge")
"""Commands that ask on a terminal before they do it. The reader says yes."""
TYPED = {"sql": b"SHOW TABLES;\n"}
"""What the reader types where a command asks for more than a password."""
CURL = Path(__file__).with_name("curl.py")


def ending(arguments: list[str]) -> list[str]:
    """So that a command ends when it has done all that there is, and ``bench`` sooner than the reader would like."""
    if arguments[0] == "bench" and "--messages" not in arguments:
        return ["--messages", "300"]
    runs = arguments[:2] in (["archive", "run"], ["pipeline", "run"])
    return ["--once"] if runs and "--once" not in arguments else []


class Command(NamedTuple):
    """One command of a line."""

    words: list[str]
    environment: dict[str, str]
    piped: bool
    """Its input is the output of the command before."""

    @property
    def is_ours(self) -> bool:
        return self.words[0] == "headrace"


def commands_of(text: str) -> Iterator[list[Command]]:
    """The commands of each line: ``a | b && c`` are three."""
    for tokens in _lines_of(text.replace("\\\n", " ")):
        found: list[Command] = []
        words: list[str] = []
        piped = False
        for token in [*tokens, "&&"]:
            if token not in ("|", "&&"):
                words.append(token)
                continue
            environment = {}
            while words and "=" in words[0] and words[0].partition("=")[0].isupper():
                name, _, environment[name] = words.pop(0).partition("=")
            if words:
                found.append(Command(words, environment, piped))
            words, piped = [], token == "|"
        if found:
            yield found


def _lines_of(text: str) -> Iterator[list[str]]:
    """The words of each line. A text in quotes may go on in the next line."""
    begun = ""
    for line in text.splitlines(keepends=True):
        lexer = shlex.shlex(begun + line, posix=True, punctuation_chars="|&")
        lexer.whitespace_split = True
        try:
            yield list(lexer)
        except ValueError:  # the quotation is not closed yet
            begun += line
        else:
            begun = ""
    assert not begun, f"a quotation is not closed: {begun}"


NOT_IGNORED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Programs that a shell starts in the background ignore Ctrl-C, and so do those that they start."""


class Terminal:
    """Runs commands; every one of them has to succeed."""

    def __init__(self, folder: Path, monkeypatch: Any, capsys: Any, ports: tuple[str, str]):
        self.folder = folder
        self._patch, self._capsys = monkeypatch, capsys
        self._ports = ports
        self.instead: dict[str, str] = {}
        """What else is written in another way here: the address of a bucket, for example."""
        self._servers: list[subprocess.Popen[str]] = []
        """Not known to be ready yet."""
        self._stopping: list[subprocess.Popen[str]] = []
        """To be stopped at the end of the block."""
        for name in set(os.environ) - set(clean_environment()):
            monkeypatch.delenv(name)
        stand_in = folder / "commands" / "curl"
        stand_in.parent.mkdir()
        stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{CURL}" "$@"\n')
        stand_in.chmod(0o755)
        path = [str(SCRIPT.parent), os.environ["PATH"], str(stand_in.parent)]
        monkeypatch.setenv("PATH", os.pathsep.join(path))
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        monkeypatch.chdir(folder)

    # --- the reader's world -----------------------------------------------------------------------
    def mine(self, word: str) -> str:
        """The word with this terminal's folders, hosts and ports."""
        for each in FOLDERS:
            if word.startswith(each):
                word = str(self.folder / word[1:])
        for theirs, ours in self.instead.items():
            word = word.replace(theirs, ours)
        word = word.replace("0.0.0.0", "127.0.0.1").replace("mill:", "localhost:")
        return word.replace(":9999", f":{self._ports[0]}").replace(":8080", f":{self._ports[1]}")

    # --- running ------------------------------------------------------------------------------------
    def run(self, block: Block, prepare: Callable[[str], None] = lambda line: None) -> list[str]:
        """The outputs of a block's lines. Servers that it starts are stopped at its end."""
        ports, outputs = self._ports, []
        try:
            for line in commands_of(block.text):
                prepare(" ".join(line[-1].words))
                output = b""
                for command in line:
                    output = self.execute(command, output if command.piped else b"")
                outputs.append(output.decode())
            self._await_servers()
        finally:
            self._ports = ports
            servers, self._servers, self._stopping = self._stopping + self._servers, [], []
            for server in servers:
                server.send_signal(signal.SIGTERM)
            for server in servers:
                server.communicate(timeout=WAIT_S)
                assert server.returncode == 0, server.args
        return outputs

    def execute(self, command: Command, given: bytes = b"") -> bytes:
        if command.words[:2] != ["headrace", "serve"]:
            self._await_servers()
        words = [self.mine(word) for word in command.words]
        with self._patch.context() as patch:
            for name, value in command.environment.items():
                patch.setenv(name, os.environ["HEADRACE_TOKEN"] if value == "…" else value)
            if words[:2] == ["headrace", "serve"]:
                return self._serve(words)
            if command.is_ours:
                return self.headrace(words[1:], given)
            if words[0] == "export":  # for the lines after it; … is what the reader has already
                for name, _, value in (word.partition("=") for word in words[1:]):
                    self._patch.setenv(name, os.environ[name] if value == "…" else value)
                return b""
            ended = subprocess.run(words, input=given, capture_output=True, timeout=WAIT_S)
            assert ended.returncode == 0, (words, ended.stderr)
            return ended.stdout

    def headrace(self, arguments: list[str], given: bytes = b"") -> bytes:
        """A command of ours, in this process. The reader has a password at hand, and says yes."""
        asks = " ".join(arguments).startswith(ASKING) and "--yes" not in arguments
        typed = given or (b"y\n" if asks else TYPED.get(arguments[0], PASSWORD.encode() + b"\n"))
        more = ending(arguments)
        with self._patch.context() as patch:
            patch.setattr(sys, "argv", ["headrace", *arguments, *more])
            patch.setattr(sys, "stdin", stdin_of(typed, terminal=asks))
            self._capsys.readouterr()
            code: object = 0
            try:
                main()
            except SystemExit as ended:
                code = ended.code
            out, err = self._capsys.readouterr()
        assert not code, f"headrace {shlex.join(arguments)}: {code}: {err}{out}"
        assert "Traceback" not in err
        return bytes(out.encode())

    def _serve(self, words: list[str]) -> bytes:
        """Alternatives may run side by side, so each has a folder of its own."""
        home = str(self.folder / f"served-{len(self._servers)}")
        ports = {"HEADRACE_PORT": "0", "HEADRACE_HTTP_PORT": "0"}
        environment = os.environ | ports | {"HEADRACE_DATA_DIR": home}
        process = subprocess.Popen(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._servers.append(process)
        return b""

    def _await_servers(self) -> None:
        """Until each says that it is ready. The lines after it are about the last one."""
        for process in self._servers:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready.startswith("Headrace is ready: "), (process.args, ready)
            addresses = ready.partition(": ")[2].split(" (")[0].split(", ")
            self._ports = (addresses[0].rpartition(":")[2], addresses[1].rpartition(":")[2])
        self._stopping, self._servers = self._stopping + self._servers, []

    @contextmanager
    def following(self, command: Command) -> Iterator[str]:
        """What a command that does not end shows first: it is interrupted after it, and that is its exit code.

        It has a real terminal, without which ``--watch`` and ``top`` would print once and end.
        """
        words = [self.mine(word) for word in command.words]
        start = [sys.executable, "-c", NOT_IGNORED, *words]
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            start, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
        )  # fmt: skip
        os.close(theirs)
        try:
            shown = ""
            while not re.search(r"\w", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]?", "", shown)):
                assert select.select([ours], [], [], WAIT_S)[0], (words, shown)
                shown += os.read(ours, 1 << 16).decode()
            yield shown
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=WAIT_S)
            assert process.returncode == 130, (words, process.returncode, err)
        finally:
            process.kill()
            process.communicate()
            os.close(ours)
