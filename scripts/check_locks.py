#!/usr/bin/env python3
"""Lets clang check the lock annotations (engine/base/mutex.h): who touches a guarded field must hold its mutex.

Usage: scripts/check_locks.py BUILD_DIR [FILE...]   (a built folder: generated headers must be there)
Looks at every source that names a mutex, or includes a header of its room that does; prints what clang finds.
"""
import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
LOCKS = re.compile(r"ABSL_GUARDED_BY|ABSL_EXCLUSIVE_LOCKS_REQUIRED|MutexLock")
# Flags of GCC that clang 14 does not know.
UNKNOWN = ("-fno-sanitize-recover",)


def has_locks(path):
    if LOCKS.search(path.read_text()):
        return True
    header = path.with_suffix(".h")
    return header.exists() and bool(LOCKS.search(header.read_text()))


def check(entry):
    words = shlex.split(entry["command"])
    words = words[next(i for i, word in enumerate(words) if word.endswith("c++")) + 1:]
    arguments = [word for word in words if not word.startswith(UNKNOWN)]
    run = subprocess.run(["clang++-14", *arguments, "-fsyntax-only", "-w", "-Wthread-safety", "-Werror=thread-safety"],
                         cwd=entry["directory"], capture_output=True, text=True)
    return run.returncode == 0, run.stderr


def main():
    build, wanted = pathlib.Path(sys.argv[1]), {os.path.abspath(name) for name in sys.argv[2:]}
    entries = [entry for entry in json.loads((build / "compile_commands.json").read_text())
               if (path := pathlib.Path(entry["file"])).is_relative_to(ROOT) and build.resolve() not in path.parents
               and (str(path) in wanted or not wanted and has_locks(path))]
    if not entries:
        sys.exit(f"{build} knows no such source: run make build first")
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        results = list(threads.map(check, entries))
    for good, output in results:
        if not good:
            print(output)
    bad = sum(not good for good, _ in results)
    print(f"{len(entries)} files with locks, {bad} with findings")
    sys.exit(bad != 0)


if __name__ == "__main__":
    main()
