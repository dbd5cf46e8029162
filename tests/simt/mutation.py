"""Runs a test program of a build with one of its objects changed: what mutants.py and ptx_mutants.py share."""
import json
import pathlib
import shlex
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]


def compile_command(build, suffix, target):
    """(arguments, folder) that compile the file named *`suffix` as part of `target`."""
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if entry["file"].endswith(suffix) and f"/{target}.dir/" in entry["command"]:
            command = shlex.split(entry["command"])
            return command[1:] if pathlib.Path(command[0]).name == "ccache" else command
    raise SystemExit(f"{suffix} is not compiled in {build}")


def link_command(build, test):
    lines = subprocess.run(["ninja", "-C", str(build), "-t", "commands", test], capture_output=True, text=True, check=True).stdout
    return shlex.split(next(line for line in reversed(lines.splitlines()) if f"-o tests/{test} " in line).removeprefix(": && ").removesuffix(" && :"))


def compile_source(build, command, source, obj):
    """Compiles `source` instead of the command's own file."""
    command = list(command)
    command[command.index("-o") + 1] = str(obj)
    command[-1] = str(source)
    command.insert(-2, "-xc++")
    subprocess.run(command, cwd=build, check=True)


def fails(build, test, only, binary, edit_link):
    """Links `test` into `binary` with the command `edit_link` has changed; whether its tests fail, crash or hang."""
    link = link_command(build, test)
    link[link.index("-o") + 1] = str(binary)
    edit_link(link)
    subprocess.run(link, cwd=build, check=True)
    try:
        run = subprocess.run([str(binary), f"--gtest_filter={only}"], cwd=ROOT, capture_output=True, timeout=300)
    except subprocess.TimeoutExpired:
        return True
    return run.returncode != 0
