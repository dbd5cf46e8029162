#!/usr/bin/env python3
"""ptx_to_cpp.py IN.ptx OUT.cc: turns the PTX that nvcc emits into C++ that the emulator runs (ptx_runtime.h).

Every kernel of the file becomes a function of its parameters' bytes, registered under its symbol; a register is a variable, a branch
a goto, shared memory the emulator's. What is not known stops the translation with `IN.ptx:LINE: what`. The C++ says which line of
the PTX it comes from, so the emulator's and the compiler's reports do too."""
import pathlib
import re
import sys

import ptx_instructions
from ptx_instructions import CPP_TYPES, split_operands

INDICES = {"tid": "threadIdx", "ctaid": "blockIdx", "ntid": "blockDim", "nctaid": "gridDim"}
SPECIAL = {f"%{name}.{axis}": f"{cuda}.{axis}" for name, cuda in INDICES.items() for axis in "xyz"}
SPECIAL.update({"%laneid": "current_thread->lane", "WARP_SZ": "32u"})
POISON = {"bool": "false", "float": "ptx::kPoisonF32", "double": "ptx::kPoisonF64"}
# Directives that end with their line.
LINE_DIRECTIVE = re.compile(r"\s*\.(version|target|address_size|file|loc)\b")
ARRAY = re.compile(r"(?:\.align (\d+) )?\.([bus]8|[bus]16|[bus]32|[bus]64|f32|f64) ([\w$]+)(?:\[(\d*)\])?")


class PtxError(Exception):
    """What is wrong, with its line."""

    def __init__(self, line, message):
        super().__init__(message)
        self.line = line


def size_of(kind):
    return int(kind[1:]) // 8


class Kernel:
    """One .entry. `symbols` maps a name of memory to (C++ expression, "u32" or "u64")."""

    def __init__(self, symbols):
        self.symbols = dict(symbols)
        self.parameters = {}
        self.scopes = [{}]
        self.code = []
        self.line = self.last_line = 0

    def refuse(self, message):
        raise PtxError(self.line, message)

    def require(self, condition, message):
        if not condition:
            self.refuse(message)

    # ---- Operands

    def register(self, operand):
        return next((scope[operand] for scope in reversed(self.scopes) if operand in scope), None)

    def read(self, operand, kind):
        """`operand` as a C++ value of PTX type `kind`."""
        cpp = CPP_TYPES[kind]
        if operand.startswith("!"):
            return f"!{self.read(operand[1:], kind)}"
        if register := self.register(operand):
            name, declared = register
            return name if declared == cpp else f"ptx::As<{cpp}>({name})"
        if operand in SPECIAL:
            return f"static_cast<{cpp}>({SPECIAL[operand]})"
        if match := re.fullmatch(r"0[fF]([0-9A-Fa-f]{8})|0[dD]([0-9A-Fa-f]{16})", operand):
            return f"ptx::As<{cpp}>(std::bit_cast<float>(0x{match[1]}u))" if match[1] else f"std::bit_cast<double>(uint64_t{{0x{match[2]}}})"
        if re.fullmatch(r"-?(0[xX][0-9A-Fa-f]+|\d+)U?", operand):
            return self.literal(int(operand.rstrip("U"), 0), kind)
        name = operand.split("+")[0].strip()
        if name in self.symbols:
            expression, _ = self.symbols[name]
            offset = int(operand.split("+")[1], 0) if "+" in operand else 0
            return f"static_cast<{cpp}>({expression} + {offset})"
        return self.refuse(f"unknown operand {operand}")

    def literal(self, value, kind):
        cpp = CPP_TYPES[kind]
        if kind == "pred":
            return "true" if value else "false"
        self.require(kind[0] in "bus", f"an integer as {kind}")
        bits = int(kind[1:])
        self.require(-(1 << (bits - 1)) <= value < 1 << bits, f"{value} does not fit {kind}")
        return f"static_cast<{cpp}>(0x{value % (1 << bits):x}u{'ll' if bits == 64 else ''})"

    def write(self, operand, kind, expression):
        """A statement that puts the C++ value into a register."""
        if operand == "_":
            return f"static_cast<void>({expression});"
        register = self.register(operand)
        self.require(register is not None, f"unknown destination {operand}")
        name, declared = register
        value = f"static_cast<{CPP_TYPES[kind]}>({expression})"
        return f"{name} = {value};" if declared == CPP_TYPES[kind] else f"{name} = ptx::As<{declared}>({value});"

    def address(self, operand, space):
        """A C++ pointer to what `[base+offset]` names; a space of None is the generic one."""
        match = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
        self.require(match, f"unknown address {operand}")
        base, offset = match[1], int(match[2] or "0", 0)
        if space == "shared":
            return f"ptx::Shared({self.read(base, 'u32')} + {offset % (1 << 32)}u)"
        return f"ptx::Pointer({self.read(base, 'u64')} + {offset % (1 << 64)}ull)"

    def label(self, name):
        return name.replace("$", "L_")

    # ---- Statements

    def emit(self, code):
        if self.line != self.last_line:
            self.code.append(f"#line {self.line}")
        self.last_line = self.line
        self.code.append(code)

    def declare_parameters(self, text, line):
        self.line = line
        end = 0
        for parameter in split_operands(text):
            match = re.fullmatch(r"\.param " + ARRAY.pattern, " ".join(parameter.split()))
            self.require(match, f"unknown parameter {parameter}")
            alignment = int(match[1] or size_of(match[2]))
            end = (end + alignment - 1) // alignment * alignment
            self.symbols[match[3]] = (f"reinterpret_cast<uintptr_t>(parameters) + {end}", "u64")
            end += size_of(match[2]) * int(match[4] or 1)

    def open_scope(self):
        self.scopes.append({})
        self.emit("{")

    def close_scope(self):
        self.scopes.pop()
        self.emit("}")

    def statement(self, text):
        if text.startswith(".reg "):
            return self.declare_registers(text)
        if match := re.fullmatch(r"\.shared " + ARRAY.pattern, text):
            return self.declare_shared(match)
        if match := re.fullmatch(r"\.local " + ARRAY.pattern, text):
            return self.declare_local(match)
        if text.startswith(".pragma"):
            return None
        predicate = ""
        if match := re.match(r"@(!?)(%\w+)\s+(.*)", text):
            predicate, text = f"if ({match[1]}{self.read(match[2], 'pred')}) ", match[3]
        opcode, _, operands = text.partition(" ")
        code = ptx_instructions.translate(self, opcode, split_operands(operands))
        return self.emit(f"{predicate}{{ {code} }}" if predicate else code)

    def declare_registers(self, text):
        match = re.fullmatch(r"\.reg \.(\w+) (.*)", text)
        self.require(match and match[1] in CPP_TYPES, f"unknown registers {text}")
        cpp = CPP_TYPES[match[1]]
        names = []
        for name in split_operands(match[2]):
            many = re.fullmatch(r"(%\w+)<(\d+)>", name)
            names += [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
        for name in names:
            self.scopes[-1][name] = (name.replace("%", "v_"), cpp)
        poison = POISON.get(cpp, f"static_cast<{cpp}>(~0ull)")
        self.emit(f"{cpp} " + ", ".join(f"{name.replace('%', 'v_')} = {poison}" for name in names) + ";")

    def declare_shared(self, match):
        number = len(self.symbols)
        self.symbols[match[3]] = (f"shared{number}", "u32")
        size = size_of(match[2]) * int(match[4] or 1)
        self.emit(f"static thread_local SharedDeclaration declaration{number}; "
                  f"const uint32_t shared{number} = ptx::StaticShared(&declaration{number}, {size}, {match[1] or size_of(match[2])});")

    def declare_local(self, match):
        number = len(self.symbols)
        size = size_of(match[2]) * int(match[4] or 1)
        self.symbols[match[3]] = (f"reinterpret_cast<uintptr_t>(local{number})", "u64")
        self.emit(f"alignas(16) unsigned char local{number}[{size}]; std::memset(local{number}, 0xff, {size});")

    def translate(self, body, line):
        for self.line, end, text in pieces(body, line):
            if end == "{":
                self.open_scope()
            elif end == "}":
                self.close_scope()
            elif end == ":":
                self.emit(f"{self.label(text)}:;")
            elif text:
                self.statement(text)
        self.require(len(self.scopes) == 1, "the kernel does not end")


def pieces(text, line):
    """(line, end, text) of each piece of a kernel's body. end: the brace, `:` or `;` that closes it."""
    current, begin, depth = "", line, 0
    for char in text:
        if not current.strip():
            begin, current = line, ""
        line += char == "\n"
        alone = not current and char in "{}"
        if alone or (depth == 0 and (char == ";" or (char == ":" and re.fullmatch(r"[\w$]+", current.strip())))):
            yield begin, char, " ".join(current.split())
            current = ""
            continue
        depth += char in "{["
        depth -= char in "}]"
        current += char
    if current.strip():
        raise PtxError(begin, f"unfinished: {current.strip()}")


class Module:
    """A whole PTX file."""

    def __init__(self, text):
        self.text = "\n".join("" if LINE_DIRECTIVE.match(line) else line.split("//")[0] for line in text.split("\n"))
        self.symbols = {}
        self.shared = []  # declarations outside kernels: each kernel that names one has its own
        self.kernels = []  # (name, Kernel)
        at = 0
        while at < len(self.text):
            at = self.next_part(at)

    def line_of(self, at):
        return self.text.count("\n", 0, at) + 1

    def next_part(self, at):
        """Reads what begins at `at`; where the next part begins."""
        if match := re.compile(r"\s+|;|\.section\s+[\w.$]+\s*\{[^}]*\}").match(self.text, at):
            return match.end()
        if match := re.compile(r"\.extern \.shared (?:\.align \d+ )?\.b8 ([\w$]+)\[\];").match(self.text, at):
            self.symbols[match[1]] = ("ptx::SharedOffset(DynamicSharedMemory())", "u32")
            return match.end()
        if match := re.compile(r"(\.shared [^;{]*);").match(self.text, at):
            self.shared.append(" ".join(match[1].split()))
            return match.end()
        match = re.compile(r"(?:\.(?:visible|weak)\s+)?\.entry\s+([\w$]+)\s*\(([^)]*)\)[^{]*\{").match(self.text, at)
        if not match:
            raise PtxError(self.line_of(at), f"unknown part of a module: {self.text[at:].split(chr(10))[0]}")
        kernel = Kernel(self.symbols)
        kernel.declare_parameters(match[2], self.line_of(match.start(2)))
        end = self.end_of_braces(match.end())
        body = self.text[match.end():end]
        for declaration in self.shared:
            if ARRAY.search(declaration)[3] in body:
                kernel.statement(declaration)
        kernel.translate(body, self.line_of(match.end()))
        self.kernels.append((match[1], kernel))
        return end + 1

    def end_of_braces(self, at):
        depth = 1
        for brace in re.compile(r"[{}]").finditer(self.text, at):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return brace.start()
        raise PtxError(self.line_of(at), "a brace is missing")


def cpp_of(path, text):
    """The C++ of a PTX file. Raises PtxError."""
    module = Module(text)
    if not module.kernels:
        raise PtxError(1, "no kernel")
    out = [f"// Made by ptx_to_cpp.py from {path.name}.", '#include "tests/simt/ptx_runtime.h"', "namespace baton::simt {", "namespace {"]
    for number, (_, kernel) in enumerate(module.kernels):
        out += [f'#line 1 "{path}"', f"void Kernel{number}([[maybe_unused]] const unsigned char* parameters) {{", *kernel.code, "}"]
    names = ", ".join(f'RegisterTranslated("{name}", &Kernel{number})' for number, (name, _) in enumerate(module.kernels))
    return "\n".join(out + [f"const bool registered[] = {{{names}}};", "}", "}", ""])


def main():
    source, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    try:
        code = cpp_of(source.resolve(), source.read_text())
    except PtxError as error:
        sys.exit(f"{source}:{error.line}: {error}")
    if not target.exists() or target.read_text() != code:  # the same C++ need not be compiled again
        target.write_text(code)


if __name__ == "__main__":
    main()
