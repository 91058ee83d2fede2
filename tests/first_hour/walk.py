"""The way of a new user: the commands of README.md and of two guides, in a fresh clone, with their seconds."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from docs.pages import Block, Command, blocks, commands, commands_in_text, is_shell
from first_hour.reader import Failed, Reader
from installs.environments import check, sizes
from installs.image import Image, check_packages
from support.dockerfile import instructions
from support.models.small import mlp

README = "README.md"
TRITON = "docs/guides/from_triton.md"
KUBERNETES = "docs/guides/kubernetes.md"
READY = r" ready on \S+:(\d+):"
ANSWERS = r"\d+ of \d+ right"
# Two environments of the reader's, beside the clone.
SERVER, CLIENT = "../server", "../client"
# What a reader writes in place of the demo model, and of its input.
OWN_MODEL = "../mine.onnx"
OWN_INPUT = "x=[[1,2,3,4,5,6,7,8]]"
_DEMO_MODEL = "examples/digits/digits.onnx"
_DEMO_INPUT = "image=examples/digits/images.npy"
# The load test takes the time that README says once, with the reader's model.
_SHORT = " --duration 0.3 --warmup 0.1"


@dataclass(frozen=True, slots=True)
class Milestone:
    """What a reader has, the lines typed for it since the clone, and their seconds."""

    name: str
    typed: tuple[str, ...] = ()
    seconds: float = 0.0

    def plus(self, command: Command, seconds: float) -> Milestone:
        """Return the milestone with a further command."""
        line = shlex.join(command.words) if command.page == README else command.text
        return replace(self, typed=(*self.typed, line), seconds=self.seconds + seconds)


@dataclass(frozen=True, slots=True)
class Walk:
    """The milestones, and the bytes of an install by extra."""

    milestones: tuple[Milestone, ...]
    sizes: dict[str, Counter[str]]


def walk(folder: Path, caches: Path | None, say: Callable[[str], None]) -> Walk:
    """Walk in an empty folder; raise Failed if a command does not work."""
    reader = Reader.in_fresh_clone(folder, caches)
    mlp(reader.checkout / OWN_MODEL)
    say("the demo")
    demo = first_answer_of_the_demo(reader.with_cache("demo"))
    say("a model of one's own")
    own, report = own_model(reader.with_cache("server"))
    say("README.md as written")
    readme(reader)
    say("the container file")
    container = container_file(reader.with_cache("image"), say)
    installed = {
        extra: sizes(reader.checkout / environment / "bin" / "python")
        for extra, environment in (("", CLIENT), ("[cpu]", SERVER))
    }
    return Walk((demo, own, report, *container), installed)


def find(reader: Reader, page: str, begins: str) -> Command:
    """Return the first command of a page with these characters, in its blocks or else in its sentences."""
    of_blocks = (c for b in blocks(reader.checkout) if b.page == page and is_shell(b) for c in commands(b))
    for found in (*of_blocks, *commands_in_text(page, reader.checkout)):
        if found.text.startswith(begins):
            return found
    raise Failed(f"{page} has no command that begins with: {begins}")


def of_own_model(command: Command) -> Command:
    """Return a command with the reader's model and input in place of the demo's."""
    text = command.text.replace(_DEMO_MODEL, OWN_MODEL).replace(_DEMO_INPUT, shlex.quote(OWN_INPUT))
    text = re.sub(r"\bdigits\b", "mine", text)
    if text == command.text:
        raise Failed(f"{command}\nIt does not name the demo model, in whose place a reader writes another")
    return replace(command, text=text)


def first_answer_of_the_demo(reader: Reader) -> Milestone:
    """Start the demo, and stop it after its answers."""
    command = find(reader, README, "make run")
    with reader.running(command, ANSWERS) as (_, seconds):
        return Milestone("first answer of the demo").plus(command, seconds)


def own_model(reader: Reader) -> tuple[Milestone, Milestone]:
    """Install as README says, serve and call a model of one's own, and write the report of a load test."""
    answer = Milestone("first answer of one's own model")
    environment = Command(README, 0, f"python3 -m venv {SERVER}")
    answer = answer.plus(environment, reader.run(environment))
    answer = answer.plus(Command(README, 0, f". {SERVER}/bin/activate"), 0.0)
    reader = reader.activated(SERVER)
    install = find(reader, README, "pip install '.[cpu]'")
    answer = answer.plus(install, reader.run(install))

    serve, infer, bench = (
        of_own_model(find(reader, README, f"tensorferry {name}")) for name in ("serve", "infer", "bench")
    )
    bench = replace(bench, text=f"{bench.text} --html report.html")
    with reader.running(serve, READY) as (found, seconds):
        caller = reader.calling(f"127.0.0.1:{found[1]}")
        answer = answer.plus(serve, seconds)
        answer = answer.plus(infer, caller.run(infer))
        report = replace(answer, name="first report of a load test").plus(bench, caller.run(bench))
    written = (reader.checkout / "report.html").read_text()
    if not written.rstrip().endswith("</html>"):
        raise Failed.at(bench, "report.html is not complete", written)
    return answer, report


def readme(reader: Reader) -> None:
    """Run README's commands and Python as written, and its client's commands with the base install, too."""
    # A sentence of README has this command, no block.
    install = find(reader, README, "pip install .")
    base = reader.with_cache("client")
    base.run(Command(README, install.line, f"python3 -m venv {CLIENT}"))
    base = base.activated(CLIENT)
    base.run(install)
    callers = [reader.activated(SERVER), base]
    with ExitStack() as servers:
        for block in blocks(reader.checkout):
            if block.page != README:
                continue
            if block.language == "python":
                callers[0].run(_as_command(block, callers[0]))
            for command in commands(block) if is_shell(block) else ():
                match command.words:
                    case ["pip", "install", ".[cpu]"]:
                        pass  # own_model has run it.
                    case ["tensorferry", "serve", *_]:
                        found, _ = servers.enter_context(callers[0].running(command, READY))
                        callers = [caller.calling(f"127.0.0.1:{found[1]}") for caller in callers]
                    case ["tensorferry", "bench", *_]:
                        for caller in callers:
                            caller.run(replace(command, text=command.text + _SHORT))
                    case ["tensorferry", "infer", *_]:
                        for caller in callers:
                            caller.run(command)
                    case ["grpcurl", *_]:
                        if callers[0].has("grpcurl"):
                            callers[0].run(command)
                    case _:
                        raise Failed(f"{command}\ntests/first_hour/walk.py does not have this command yet")


def _as_command(block: Block, reader: Reader) -> Command:
    """Write a block of Python to a file, and return the command that runs it."""
    script = reader.folder / f"line_{block.line}.py"
    script.write_text(reader.adapted(block.text))
    return Command(block.page, block.line, f"python {shlex.quote(str(script))}")


def container_file(reader: Reader, say: Callable[[str], None]) -> tuple[Milestone, ...]:
    """Do what `docker build` and `docker run` do, for an image with a model of one's own; Docker is not needed.

    Return no milestone on a machine without the image's version of Python.
    """
    base, build, start = (
        _of_own_image(find(reader, KUBERNETES, f"docker {begins}"))
        for begins in ("build -f", "build -t", "run")
    )
    options = dict(pairwise(base.words))
    image = Image(reader.checkout / base.words[-1], options["-f"], options["--target"])
    if image.python is None:
        say(f"no container file: this machine has no Python {image.version}, which the image has")
        return ()
    context = reader.checkout / build.words[-1]
    written = find_dockerfile(reader)
    *_, source, target = dict(instructions(written.text))["COPY"].split()

    milestone = Milestone("first container file")
    place = of_own_model(find(reader, TRITON, "mkdir -p models"))
    place = replace(place, text=place.text.replace(" models/", f" {build.words[-1]}/{source}/"))
    milestone = milestone.plus(place, reader.run(place))
    (context / "Dockerfile").write_text(written.text)
    for line in written.text.splitlines()[1:]:
        milestone = milestone.plus(replace(place, text=line), 0.0)

    began = time.monotonic()
    try:
        python = image.build(reader.folder / "image", reader.variables)
    except subprocess.CalledProcessError as error:
        raise Failed.at(base, f"{error.cmd}: exit code {error.returncode}", error.output) from None
    milestone = milestone.plus(base, time.monotonic() - began)
    check_packages(python)
    began = time.monotonic()
    copied = reader.folder / "image" / target.strip("/")
    shutil.copytree(context / source, copied)
    milestone = milestone.plus(build, time.monotonic() - began)

    program, *arguments = (word.replace(f"={target}", f"={copied}") for word in image.command)
    container = replace(start, text=shlex.join([str(python.with_name(program)), *arguments]))
    infer = of_own_model(find(reader, README, "tensorferry infer"))
    with reader.running(container, READY) as (found, seconds):
        milestone = milestone.plus(start, seconds)
        reader.activated(SERVER).calling(f"127.0.0.1:{found[1]}").run(infer)
    check(python, reader.folder, "lane", python.with_name("tensorferry"))
    return (milestone,)


def find_dockerfile(reader: Reader) -> Block:
    """Return the block of the guide with the build file of a model's image."""
    for block in blocks(reader.checkout):
        if block.page == KUBERNETES and block.language == "dockerfile":
            return block
    raise Failed(f"{KUBERNETES} has no block of the language dockerfile")


def _of_own_image(command: Command) -> Command:
    return replace(command, text=command.text.replace("/rents:", "/mine:"))
