#!/usr/bin/env python3
"""What ptx_to_cpp.py makes of single instructions, and what it refuses, with the line."""
import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
import ptx_to_cpp  # noqa: E402

HEAD = """.version 9.0
.target sm_90a
.address_size 64
.entry Kernel(
	.param .u64 Kernel_param_0,
	.param .align 8 .b8 Kernel_param_1[12],
	.param .u16 Kernel_param_2
)
{
	.reg .pred %p<3>;
	.reg .b32 %r<6>;
	.reg .f32 %f<4>;
	.reg .b64 %rd<4>;
"""
FIRST_LINE = HEAD.count("\n") + 1


def translate(*lines):
    text = HEAD + "\n".join(lines) + "\n\tret;\n}\n"
    return ptx_to_cpp.cpp_of(pathlib.Path("/x/k.ptx"), text)


class PtxToCppTest(unittest.TestCase):
    def refused(self, line, message, *before):
        with self.assertRaises(ptx_to_cpp.PtxError) as caught:
            translate(*before, line)
        self.assertEqual(caught.exception.line, FIRST_LINE + len(before))
        self.assertIn(message, str(caught.exception))

    def test_every_statement_names_its_line(self):
        code = translate("add.s32 %r1, %r2, 7;", "", "// a comment", "mul.f32 %f1, %f2, %f3;")
        self.assertIn(f"#line {FIRST_LINE}\nv_r1 = static_cast<uint32_t>(v_r2 + static_cast<uint32_t>(0x7u));", code)
        self.assertIn(f"#line {FIRST_LINE + 3}\nv_f1 = static_cast<float>((v_f2) * (v_f3));", code)

    def test_kernels_are_registered_by_symbol(self):
        self.assertIn('RegisterTranslated("Kernel", &Kernel0)', translate())

    def test_unknown_is_refused_with_its_line(self):
        self.refused("tex.2d.v4.f32.f32 {%f1}, [%r1];", "unknown instruction tex.2d.v4.f32.f32", "add.s32 %r1, %r2, %r3;", "")
        self.refused("add.sat.s32 %r1, %r2, %r3;", "unknown instruction add.sat.s32")
        self.refused("mul.ftz.f32 %f1, %f2, %f3;", "unknown instruction mul.ftz.f32")
        self.refused("cvt.rm.bf16.f32 %r1, %f1;", "unknown instruction")
        self.refused("setp.foo.s32 %p1, %r1, %r2;", "comparison foo of s32")
        self.refused("mov.b32 %r1, %r99;", "unknown operand %r99")
        self.refused("mov.b32 %r99, %r1;", "unknown destination %r99")
        self.refused("bar.sync 1;", "a barrier of all threads other than 0")
        self.refused("ld.global.v2.u32 %r1, [%rd1];", "the vector has another size")
        self.refused("add.s32 %r1, %r2, 0x100000000;", "does not fit")

    def test_unknown_parts_of_a_file_are_refused(self):
        for text, line in ((".version 9.0\n.func f() { ret; }\n", 2), (HEAD + "ret;\n", FIRST_LINE - 5), (".version 9.0\n", 1)):
            with self.assertRaises(ptx_to_cpp.PtxError) as caught:
                ptx_to_cpp.cpp_of(pathlib.Path("k.ptx"), text)
            self.assertEqual(caught.exception.line, line)

    def test_parameters_lie_at_their_alignment(self):
        code = translate("ld.param.u32 %r1, [Kernel_param_1+4];", "ld.param.u16 %r2, [Kernel_param_2];")
        self.assertIn("(parameters) + 8 + 0) + 4ull)", code)
        self.assertIn("(parameters) + 20 + 0) + 0ull)", code)

    def test_comparisons_know_what_is_unordered(self):
        self.assertIn("v_p1 = static_cast<bool>((v_f1 < v_f2));", translate("setp.lt.f32 %p1, %f1, %f2;"))
        self.assertIn("(std::isunordered(v_f1, v_f2) || v_f1 < v_f2)", translate("setp.ltu.f32 %p1, %f1, %f2;"))
        self.assertIn("ptx::As<int32_t>(v_r1) < ptx::As<int32_t>(v_r2)", translate("setp.lt.s32 %p1, %r1, %r2;"))
        self.assertIn("(v_r1 < v_r2) & v_p2", translate("setp.lt.and.u32 %p1, %r1, %r2, %p2;"))

    def test_words_of_another_device_are_atomic(self):
        self.assertIn("v_r1 = static_cast<uint32_t>(ptx::LoadAcquire<uint32_t>(ptx::Pointer(", translate("ld.acquire.sys.global.u32 %r1, [%rd1];"))
        self.assertIn("ptx::StoreRelease<uint32_t>(ptx::Pointer(", translate("st.release.sys.global.u32 [%rd1], %r1;"))
        self.refused("ld.acquire.gpu.global.u32 %r1, [%rd1];", "unknown instruction ld.acquire.gpu")
        self.refused("ld.relaxed.sys.global.u32 %r1, [%rd1];", "unknown instruction ld.relaxed.sys")

    def test_predicates_scopes_and_labels(self):
        code = translate("$L__BB0_1:", "{ .reg .b32 %t;", "mov.b32 %t, %r1; }", "@!%p1 bra $L__BB0_1;")
        self.assertIn("L_L__BB0_1:;", code)
        self.assertIn("if (!v_p1) { goto L_L__BB0_1; }", code)
        self.refused("mov.b32 %r1, %t;", "unknown operand %t", "{ .reg .b32 %t; }")


if __name__ == "__main__":
    unittest.main()
