#!/usr/bin/env python3
"""check_registers.py BUDGET OBJECT...: compares what ptxas -v said of each kernel (OBJECT.log) with its budget.

A line of BUDGET is `kernel registers`; the kernel is a name, or a name with the beginning of its template arguments. The first
line that fits counts. More registers, a spill, a stack frame, or a kernel without a budget fails."""
import re
import subprocess
import sys


def kernels(log):
    """(mangled name, registers, spilled bytes, stack frame) of each kernel in a log."""
    name, frame, spilled = None, 0, 0
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)'", line):
            name = match.group(1)
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            frame, spilled = int(match.group(1)), int(match.group(2)) + int(match.group(3))
        elif (match := re.search(r"Used (\d+) registers", line)) and name:
            yield name, int(match.group(1)), spilled, frame
            name, frame, spilled = None, 0, 0


def short(mangled):
    """`DecodeAttentionKernel<128, 1, false>` of a mangled name."""
    full = subprocess.run(["c++filt", mangled], capture_output=True, text=True, check=True).stdout.strip()
    full = re.sub(r"\((?:int|bool|unsigned int)\)", "", full)
    return re.search(r"(\w+(?:<[^()]*>)?)\(", full.replace("(anonymous namespace)::", "").replace("{anonymous}::", "")).group(1)


def main():
    budget = [line.rsplit(None, 1) for line in open(sys.argv[1]) if line.strip() and not line.startswith("#")]
    wrong, count = [], 0
    for path in sys.argv[2:]:
        for mangled, registers, spilled, frame in kernels(open(path + ".log").read()):
            count += 1
            name = short(mangled)
            limit = next((int(most) for kernel, most in budget if name.startswith(kernel)), None)
            verdict = "no budget" if limit is None else "" if registers <= limit and spilled == 0 and frame == 0 else f"budget {limit}"
            print(f"{name}: {registers} registers, {spilled} bytes spilled, {frame} bytes of stack  {verdict}")
            if verdict:
                wrong.append(name)
    if count == 0:
        sys.exit("no kernel in any log")
    if wrong:
        sys.exit(f"over budget: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
