"""Rebuilds one object of a finished build from a changed source and links a test with it; for mutants.py, protocol_mutants.py and ptx_mutants.py."""
import json
import pathlib
import shlex
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]


def compile_command(build, suffix, target):
    """Arguments that compile the file named *`suffix` as part of `target`."""
    for entry in json.loads((build / "compile_commands.json").read_text()):
        if entry["file"].endswith(suffix) and f"/{target}.dir/" in entry["command"]:
            command = shlex.split(entry["command"])
            return command[1:] if pathlib.Path(command[0]).name == "ccache" else command
    raise SystemExit(f"{suffix} is not compiled in {build}")


def compile_source(build, command, source, obj):
    """Compiles `source` instead of the command's own file. The language stays that of the file's own rule."""
    command = list(command)
    command[command.index("-o") + 1] = str(obj)
    command[-1] = str(source)
    subprocess.run(command, cwd=build, check=True)


def link_command(build, test):
    lines = subprocess.run(["ninja", "-C", str(build), "-t", "commands", test], capture_output=True, text=True, check=True).stdout
    return shlex.split(next(line for line in reversed(lines.splitlines()) if f"-o tests/{test} " in line).removeprefix(": && ").removesuffix(" && :"))


def link(build, command, binary, target, stem, obj):
    """Links with `obj` in the place of what `target` made of `stem`: an object of the command's, or one that is in an archive."""
    command = list(command)
    command[command.index("-o") + 1] = str(binary)
    at = [i for i, argument in enumerate(command) if f"/{target}.dir/" in argument and argument.endswith(f"/{stem}.o")]
    if at:
        command[at[0]] = str(obj)
    else:  # (the first that has a symbol is taken)
        command.insert(command.index("-o"), str(obj))
    subprocess.run(command, cwd=build, check=True)


def fails(binary, only, timeout, environment=None):
    """Whether the tests that `only` names fail, crash or hang."""
    try:
        run = subprocess.run([str(binary), f"--gtest_filter={only}", "--gtest_fail_fast"], cwd=ROOT, capture_output=True, text=True,
                             timeout=timeout, env=environment, errors="replace")
    except subprocess.TimeoutExpired:
        return True
    if "[==========] Running 0 tests" in run.stdout:
        raise SystemExit(f"{pathlib.Path(binary).name} has no test {only}")
    return run.returncode != 0
