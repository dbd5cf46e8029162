"""What each PTX instruction means, as C++ over tests/simt/ptx_runtime.h.

A rule is a pattern for the whole opcode, modifiers included, and a function that writes the C++ statement. An opcode without a rule,
or with a modifier that no rule names, is refused: nothing is translated by guess. Only what nvcc emits for our kernels, with its
near relatives, is here.
"""
import re

INT = r"[bus](?:16|32|64)"
FLOAT = r"f32|f64"
ROUND = r"(?:\.(r[nzmp]))?"
CPP_TYPES = {"pred": "bool", "f32": "float", "f64": "double"}
for _bits in ("8", "16", "32", "64"):
    CPP_TYPES.update({f"u{_bits}": f"uint{_bits}_t", f"b{_bits}": f"uint{_bits}_t", f"s{_bits}": f"int{_bits}_t"})
SYMBOLS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
RULES = []


def bits_of(kind):
    return int(kind[1:])


def unsigned(kind):
    return f"u{bits_of(kind)}"


def rule(pattern):
    def keep(function):
        RULES.append((re.compile(pattern), function))
        return function
    return keep


def split_operands(text):
    """Operands at commas outside braces and brackets."""
    operands, depth, current = [], 0, ""
    for char in text:
        depth += char in "{["
        depth -= char in "}]"
        if char == "," and depth == 0:
            operands.append(current.strip())
            current = ""
        else:
            current += char
    return operands + [current.strip()] if current.strip() else operands


def vector(operand):
    return split_operands(operand[1:-1]) if operand.startswith("{") else [operand]


# ---- Control --------------------------------------------------------------------------------------------------------------------

@rule(r"bra(?:\.uni)?")
def _(k, m, a):
    return f"goto {k.label(a[0])};"


@rule(r"ret|exit")
def _(k, m, a):
    return "return;"


@rule(r"trap")
def _(k, m, a):
    return "__trap();"


@rule(r"nanosleep\.u32")
def _(k, m, a):
    return "YieldToPeer(Site::current());"  # kernels sleep where they wait for another device


# ---- Moves, memory --------------------------------------------------------------------------------------------------------------

@rule(rf"mov\.({INT}|{FLOAT}|pred)")
def _(k, m, a):
    kind = m[1]
    if a[0].startswith("{"):
        parts = vector(a[0])
        width = bits_of(kind) // len(parts)
        value = k.read(a[1], f"u{bits_of(kind)}")
        return f"{{ const auto v = {value}; " + " ".join(
            k.write(part, f"b{width}", f"v >> {width * i}") for i, part in enumerate(parts)) + " }"
    if a[1].startswith("{"):
        parts = vector(a[1])
        wide, width = f"u{bits_of(kind)}", bits_of(kind) // len(parts)
        return k.write(a[0], wide, " | ".join(
            f"static_cast<{CPP_TYPES[wide]}>({k.read(part, f'u{width}')}) << {width * i}" for i, part in enumerate(parts)))
    return k.write(a[0], kind, k.read(a[1], kind))


@rule(r"cvta\.to\.(global|local)\.u64")
def _(k, m, a):
    return k.write(a[0], "u64", k.read(a[1], "u64"))


@rule(r"cvta\.to\.shared\.u64")
def _(k, m, a):
    return k.write(a[0], "u64", f"ptx::SharedOffset({k.read(a[1], 'u64')})")


@rule(r"cvta\.shared\.u64")
def _(k, m, a):
    return k.write(a[0], "u64", f"ptx::Generic({k.read(a[1], 'u64')})")


@rule(r"cvta\.(local|global)\.u64")
def _(k, m, a):
    return k.write(a[0], "u64", k.read(a[1], "u64"))


@rule(rf"ld(?:\.(param|global|shared|local))?(?:\.(?:nc|cg|cs|ca))?(?:\.v([24]))?\.({INT}|[bus]8|{FLOAT})")
def _(k, m, a):
    into = vector(a[0])
    k.require(len(into) == int(m[2] or 1), "the vector has another size")
    return (f"{{ const auto v = ptx::Load<{CPP_TYPES[m[3]]}, {len(into)}>({k.address(a[1], m[1])}); "
            + " ".join(k.write(part, m[3], f"v[{i}]") for i, part in enumerate(into)) + " }")


@rule(rf"st(?:\.(global|shared|local))?(?:\.(?:cg|cs|wb))?(?:\.v([24]))?\.({INT}|[bus]8|{FLOAT})")
def _(k, m, a):
    parts = vector(a[1])
    k.require(len(parts) == int(m[2] or 1), "the vector has another size")
    values = ", ".join(k.read(part, m[3]) for part in parts)
    return f"ptx::Store<{CPP_TYPES[m[3]]}, {len(parts)}>({k.address(a[0], m[1])}, {{{values}}});"


@rule(r"ld\.acquire\.sys\.global\.([bus](?:32|64))")
def _(k, m, a):
    return k.write(a[0], m[1], f"ptx::LoadAcquire<{CPP_TYPES[m[1]]}>({k.address(a[1], 'global')})")


@rule(r"st\.release\.sys\.global\.([bus](?:32|64))")
def _(k, m, a):
    return f"ptx::StoreRelease<{CPP_TYPES[m[1]]}>({k.address(a[0], 'global')}, {k.read(a[1], m[1])});"


ATOMICS = {"add": "old + v", "min": "v < old ? v : old", "max": "old < v ? v : old", "and": "old & v", "or": "old | v",
           "xor": "old ^ v", "exch": "v"}


@rule(r"(atom|red)(?:\.(global|shared))?\.(add|min|max|and|or|xor|exch)\.([bus](?:32|64)|f32)")
def _(k, m, a):
    into, operands = (a[0], a[1:]) if m[1] == "atom" else ("_", a)
    kind = CPP_TYPES[m[4]]
    update = (f"ptx::Atomic<{kind}>({k.address(operands[0], m[2])}, [v = {k.read(operands[1], m[4])}]([[maybe_unused]] {kind} old) "
              f"{{ return static_cast<{kind}>({ATOMICS[m[3]]}); }})")
    return k.write(into, m[4], update)


@rule(r"atom(?:\.(global|shared))?\.cas\.(b32|b64)")
def _(k, m, a):
    kind = CPP_TYPES[m[2]]
    return k.write(a[0], m[2], f"ptx::Atomic<{kind}>({k.address(a[1], m[1])}, [w = {k.read(a[2], m[2])}, v = {k.read(a[3], m[2])}]"
                               f"({kind} old) {{ return old == w ? v : old; }})")


@rule(r"membar\.(?:gl|cta|sys)|fence\.(?:acq_rel|sc)\.(?:gpu|cta|sys)")
def _(k, m, a):
    return "__threadfence();"


# ---- Integers -------------------------------------------------------------------------------------------------------------------

@rule(rf"(add|sub)\.({INT})")
def _(k, m, a):  # wraps around, so without signs
    kind = unsigned(m[2])
    return k.write(a[0], kind, f"{k.read(a[1], kind)} {SYMBOLS[m[1]]} {k.read(a[2], kind)}")


@rule(rf"(mul|mad)\.(lo|wide|hi)\.([us](?:16|32|64))")
def _(k, m, a):
    kind, bits = m[3], bits_of(m[3])
    k.require(bits < 64 or m[2] == "lo", "a product of 128 bits")
    if m[2] == "lo":
        kind = unsigned(kind)
        product, result = f"uint64_t{{{k.read(a[1], kind)}}} * {k.read(a[2], kind)}", kind
    else:
        wide = f"{kind[0]}{2 * bits}"
        product = f"static_cast<{CPP_TYPES[wide]}>({k.read(a[1], kind)}) * static_cast<{CPP_TYPES[wide]}>({k.read(a[2], kind)})"
        product, result = (f"({product}) >> {bits}", kind) if m[2] == "hi" else (product, wide)
    if m[1] == "mad":
        product = f"static_cast<uint64_t>({product}) + {k.read(a[3], unsigned(result))}"
    return k.write(a[0], result, product)


@rule(r"(div|rem)\.([us](?:16|32|64))")
def _(k, m, a):
    function = "Divide" if m[1] == "div" else "Remainder"
    return k.write(a[0], m[2], f"ptx::{function}<{CPP_TYPES[m[2]]}>({k.read(a[1], m[2])}, {k.read(a[2], m[2])})")


@rule(r"(min|max)\.([us](?:16|32|64))")
def _(k, m, a):
    return k.write(a[0], m[2], f"std::{m[1]}<{CPP_TYPES[m[2]]}>({k.read(a[1], m[2])}, {k.read(a[2], m[2])})")


@rule(r"(neg|abs)\.(s(?:16|32|64))")
def _(k, m, a):
    negative = f"0 - {k.read(a[1], unsigned(m[2]))}"
    if m[1] == "neg":
        return k.write(a[0], unsigned(m[2]), negative)
    return k.write(a[0], unsigned(m[2]), f"{k.read(a[1], m[2])} < 0 ? {negative} : {k.read(a[1], unsigned(m[2]))}")


@rule(r"(and|or|xor)\.(b(?:16|32|64)|pred)")
def _(k, m, a):
    return k.write(a[0], m[2], f"{k.read(a[1], m[2])} {SYMBOLS[m[1]]} {k.read(a[2], m[2])}")


@rule(r"not\.(b(?:16|32|64)|pred)")
def _(k, m, a):
    return k.write(a[0], m[1], f"{'!' if m[1] == 'pred' else '~'}{k.read(a[1], m[1])}")


@rule(r"(shl|shr)\.([bus](?:16|32|64))")
def _(k, m, a):
    function = "ShiftLeft" if m[1] == "shl" else "ShiftRight"
    return k.write(a[0], m[2], f"ptx::{function}<{CPP_TYPES[m[2]]}>({k.read(a[1], m[2])}, {k.read(a[2], 'u32')})")


@rule(r"bfi\.(b32|b64)")
def _(k, m, a):
    values = f"{k.read(a[1], m[1])}, {k.read(a[2], m[1])}"
    return k.write(a[0], m[1], f"ptx::InsertBits<{CPP_TYPES[m[1]]}>({values}, {k.read(a[3], 'u32')}, {k.read(a[4], 'u32')})")


@rule(r"prmt\.b32")
def _(k, m, a):
    return k.write(a[0], "b32", f"ptx::PermuteBytes({', '.join(k.read(x, 'b32') for x in a[1:4])})")


# ---- Floating point -------------------------------------------------------------------------------------------------------------

@rule(rf"(add|sub|mul){ROUND}\.({FLOAT})")
def _(k, m, a):
    return k.write(a[0], m[3], rounded(m[2], m[3], f"x {SYMBOLS[m[1]]} y", x=k.read(a[1], m[3]), y=k.read(a[2], m[3])))


@rule(rf"fma\.(r[nzmp])\.({FLOAT})")
def _(k, m, a):
    x, y, z = (k.read(operand, m[2]) for operand in a[1:4])
    return k.write(a[0], m[2], rounded(m[1], m[2], "std::fma(x, y, z)", x=x, y=y, z=z))


@rule(rf"div\.(?:(r[nzmp])|approx|full)\.({FLOAT})")
def _(k, m, a):
    return k.write(a[0], m[2], rounded(m[1], m[2], "x / y", x=k.read(a[1], m[2]), y=k.read(a[2], m[2])))


@rule(rf"(rcp|sqrt)\.(?:(r[nzmp])|approx|approx\.ftz)\.({FLOAT})")
def _(k, m, a):
    value = "1 / x" if m[1] == "rcp" else "std::sqrt(x)"
    return k.write(a[0], m[3], rounded(m[2], m[3], value, x=k.read(a[1], m[3])))


@rule(r"rsqrt\.approx\.f32")
def _(k, m, a):
    return k.write(a[0], "f32", f"1 / std::sqrt({k.read(a[1], 'f32')})")


@rule(r"ex2\.approx(\.ftz)?\.f32")
def _(k, m, a):
    return k.write(a[0], "f32", f"ptx::Exp2({k.read(a[1], 'f32')}, {'true' if m[1] else 'false'})")


@rule(rf"(neg|abs)\.({FLOAT})")
def _(k, m, a):
    value = k.read(a[1], m[2])
    return k.write(a[0], m[2], f"-{value}" if m[1] == "neg" else f"std::abs({value})")


@rule(rf"(min|max)\.({FLOAT})")
def _(k, m, a):  # of a NaN and a number: the number
    return k.write(a[0], m[2], f"std::f{m[1]}({k.read(a[1], m[2])}, {k.read(a[2], m[2])})")


def rounded(mode, kind, expression, **values):
    """`expression` of the named values, rounded to nearest or, out of line, in another direction."""
    if mode in (None, "rn"):
        names = re.sub(r"\b([xyz])\b", lambda match: f"({values[match[1]]})", expression)
        return names
    parameters = ", ".join(f"{CPP_TYPES[kind]} {name}" for name in values)
    return f"ptx::Rounded<ptx::k{mode.capitalize()}>([]({parameters}) {{ return {expression}; }}, {', '.join(values.values())})"


# ---- Comparing ------------------------------------------------------------------------------------------------------------------

def comparison(k, name, kind, x, y):
    if kind.startswith("f"):
        if name in ("num", "nan"):
            return f"({'!' if name == 'num' else ''}(std::isnan({x}) || std::isnan({y})))"
        if name.endswith("u") and name[:-1] in ("eq", "ne", "lt", "le", "gt", "ge"):  # or not comparable
            return f"(std::isunordered({x}, {y}) || {x} {COMPARE[name[:-1]]} {y})"
        if name == "ne":
            return f"({x} < {y} || {x} > {y})"
    k.require(name in COMPARE, f"comparison {name} of {kind}")
    return f"({x} {COMPARE[name]} {y})"


@rule(rf"setp\.(\w+?)(?:\.(and|or|xor))?\.({INT}|{FLOAT})")
def _(k, m, a):
    kind = m[3]
    condition = comparison(k, m[1], kind, k.read(a[1], kind), k.read(a[2], kind))
    join = f" {SYMBOLS[m[2]]} {k.read(a[3], 'pred')}" if m[2] else ""
    into = a[0].split("|")
    k.require(len(a) == (4 if m[2] else 3), "operands of setp")
    return " ".join(k.write(into[i], "pred", ("!" if i else "") + condition + join) for i in range(len(into)))


@rule(rf"selp\.({INT}|{FLOAT})")
def _(k, m, a):
    return k.write(a[0], m[1], f"{k.read(a[3], 'pred')} ? {k.read(a[1], m[1])} : {k.read(a[2], m[1])}")


# ---- Conversions ----------------------------------------------------------------------------------------------------------------

@rule(r"cvt\.([us](?:8|16|32|64))\.([us](?:8|16|32|64))")
def _(k, m, a):
    return k.write(a[0], m[1], k.read(a[1], m[2]))


@rule(rf"cvt\.rn\.({FLOAT})\.([us](?:16|32|64))|cvt\.rn\.(f32)\.(f64)|cvt\.(f64)\.(f32)")
def _(k, m, a):
    into, source = (group for group in m.groups() if group)
    return k.write(a[0], into, k.read(a[1], source))


@rule(rf"cvt\.(r[nzmp])i\.([us](?:16|32|64))\.({FLOAT})")
def _(k, m, a):
    value = f"ptx::RoundToInteger<ptx::k{m[1].capitalize()}>({k.read(a[1], m[3])})"
    return k.write(a[0], m[2], f"ptx::Saturate<{CPP_TYPES[m[2]]}>({value})")


@rule(r"cvt\.(r[nzmp])i\.(f32\.f32|f64\.f64)")
def _(k, m, a):
    return k.write(a[0], m[2][:3], f"ptx::RoundToInteger<ptx::k{m[1].capitalize()}>({k.read(a[1], m[2][:3])})")


@rule(r"cvt\.sat\.f32\.f32")
def _(k, m, a):
    return k.write(a[0], "f32", f"ptx::Clamp01({k.read(a[1], 'f32')})")


@rule(r"cvt\.(rn|rz)\.(bf16|f16)\.f32")
def _(k, m, a):
    return k.write(a[0], "b16", f"ptx::Encode<ptx::k{m[2].capitalize()}, ptx::k{m[1].capitalize()}>({k.read(a[1], 'f32')})")


@rule(r"cvt\.(rn|rz)\.(bf16|f16)x2\.f32|cvt\.(rn)\.satfinite\.(e4m3)x2\.f32")
def _(k, m, a):  # the first source is the high half
    mode, kind = (group for group in m.groups() if group)
    high, low = (f"uint32_t{{ptx::Encode<ptx::k{kind.capitalize()}, ptx::k{mode.capitalize()}>({k.read(x, 'f32')})}}" for x in a[1:3])
    width = 8 if kind == "e4m3" else 16
    return k.write(a[0], f"b{2 * width}", f"{high} << {width} | {low}")


@rule(r"cvt\.f32\.(bf16|f16)")
def _(k, m, a):
    return k.write(a[0], "f32", f"ptx::Decode<ptx::k{m[1].capitalize()}>({k.read(a[1], 'b16')})")


@rule(r"cvt\.rn\.f16x2\.e4m3x2")
def _(k, m, a):
    return k.write(a[0], "b32", f"ptx::HalvesOfE4m3x2({k.read(a[1], 'b16')})")


# ---- Barriers and warps ---------------------------------------------------------------------------------------------------------

@rule(r"bar\.(sync|arrive)|barrier\.sync")
def _(k, m, a):
    if len(a) == 1:
        k.require(a[0] == "0" and m[1] != "arrive", "a barrier of all threads other than 0")
        return "__syncthreads();"
    wait = "false" if m[1] == "arrive" else "true"
    return f"NamedBarrier({k.read(a[0], 's32')}, {k.read(a[1], 'u32')}, {wait}, Site::current());"


@rule(r"bar\.red\.(popc\.u32|and\.pred|or\.pred)")
def _(k, m, a):
    k.require(len(a) == 3 and a[1] == "0", "a barrier other than 0")
    kind, result = {"popc.u32": ("u32", "count"), "and.pred": ("pred", "all"), "or.pred": ("pred", "any")}[m[1]]
    return k.write(a[0], kind, f"BlockBarrier({k.read(a[2], 'pred')}, Site::current()).{result}")


@rule(r"bar\.warp\.sync")
def _(k, m, a):
    return f"__syncwarp({k.read(a[0], 'b32')});"


@rule(r"shfl\.sync\.(idx|up|down|bfly)\.b32")
def _(k, m, a):
    into = a[0].split("|")
    operands = ", ".join(k.read(operand, "b32") for operand in a[1:5])
    code = f"const auto v = ptx::ShuffleLanes<ptx::k{m[1].capitalize()}>({operands}); " + k.write(into[0], "b32", "v.value")
    return f"{{ {code} {k.write(into[1], 'pred', 'v.in_range') if len(into) > 1 else ''} }}"


@rule(r"vote\.sync\.(any|all)\.pred|vote\.sync\.(ballot)\.b32")
def _(k, m, a):
    name = m[1] or m[2]
    return k.write(a[0], "pred" if m[1] else "b32", f"__{name}_sync({k.read(a[2], 'b32')}, {k.read(a[1], 'pred')})")


@rule(r"match\.any\.sync\.(b32|b64)")
def _(k, m, a):
    return k.write(a[0], "b32", f"__match_any_sync({k.read(a[2], 'b32')}, {k.read(a[1], m[1])})")


@rule(r"redux\.sync\.(?:(add|min|max)\.([us]32)|(and|or|xor)\.(b32))")
def _(k, m, a):
    name, kind = (group for group in m.groups() if group)
    return k.write(a[0], kind, f"__reduce_{name}_sync({k.read(a[2], 'b32')}, {k.read(a[1], kind)})")


# ---- Asynchronous copies, tensor cores ------------------------------------------------------------------------------------------

@rule(r"cp\.async\.(cg|ca)\.shared\.global")
def _(k, m, a):
    k.require(m[1] == "ca" or a[2] == "16", "cp.async.cg copies 16 bytes")
    valid = k.read(a[3], "u32") if len(a) > 3 else a[2]
    return f"AsyncCopy({k.address(a[0], 'shared')}, {k.address(a[1], 'global')}, {a[2]}, {valid}, Site::current());"


@rule(r"cp\.async\.commit_group")
def _(k, m, a):
    return "AsyncCommit();"


@rule(r"cp\.async\.wait_group")
def _(k, m, a):
    return f"AsyncWait({k.read(a[0], 'u32')});"


@rule(r"ldmatrix\.sync\.aligned\.m8n8\.x4(\.trans)?\.shared\.b16")
def _(k, m, a):
    into = vector(a[0])
    return (f"{{ uint32_t v[4]; LdMatrixX4(v, {k.address(a[1], 'shared')}, {'true' if m[1] else 'false'}, Site::current()); "
            + " ".join(k.write(part, "b32", f"v[{i}]") for i, part in enumerate(into)) + " }")


@rule(r"mma\.sync\.aligned\.(m16n8k16|m16n8k32)\.row\.col\.f32\.(bf16|f16|e4m3)\.(\w+)\.f32")
def _(k, m, a):
    k.require(m[2] == m[3] and (m[1] == "m16n8k32") == (m[2] == "e4m3"), "factors of another type")
    d, x, y, c = (vector(operand) for operand in a)
    lists = [", ".join(k.read(part, kind) for part in parts) for parts, kind in ((x, "b32"), (y, "b32"), (c, "f32"))]
    return (f"{{ const auto v = ptx::MultiplyAdd<MmaType::k{m[2].capitalize()}>({{{lists[0]}}}, {{{lists[1]}}}, {{{lists[2]}}}); "
            + " ".join(k.write(part, "f32", f"v[{i}]") for i, part in enumerate(d)) + " }")


def translate(kernel, opcode, operands):
    for pattern, function in RULES:
        if match := pattern.fullmatch(opcode):
            return function(kernel, match, operands)
    return kernel.refuse(f"unknown instruction {opcode}")
