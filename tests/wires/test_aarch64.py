"""Compiled kernels on ARM: built by zig and run in an emulator, the bytes are this machine's."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from matcha.wires import library
from matcha.wires.modulo import check_weights, signs

LIBC = r"""
typedef unsigned long size_t;
#define BYTES(A) for (size_t i = 0; i < n; i++) { ((char *)a)[i] = A; __asm__ volatile(""); }
void *memcpy(void *a, const void *b, size_t n) { BYTES(((const char *)b)[i]) return a; }
void *memset(void *a, int c, size_t n) { BYTES(c) return a; }
float sqrtf(float x) { float r; __asm__("fsqrt %s0, %s1" : "=w"(r) : "w"(x)); return r; }
float rintf(float x) { float r; __asm__("frintx %s0, %s1" : "=w"(r) : "w"(x)); return r; }
float fmaxf(float a, float b) { return a > b ? a : b; }
float fminf(float a, float b) { return a < b ? a : b; }
void matcha_encode(), matcha_compare(), matcha_move();
__attribute__((used)) void *used[] = {matcha_encode, matcha_compare, matcha_move};
void _start(void) {}
"""
NUMBER = 24


class Emulated:
    """Functions of an ELF program for aarch64, called in an emulator."""

    def __init__(self, program: bytes) -> None:
        from unicorn import UC_ARCH_ARM64, UC_MODE_ARM, Uc, arm64_const

        self.registers, self.cpu = arm64_const, Uc(UC_ARCH_ARM64, UC_MODE_ARM)
        self.cpu.mem_map(0, 0x4000000)
        self.cpu.reg_write(arm64_const.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # vectors on
        self.free, self.symbols = 0x2000000, {}
        headers, sections = struct.unpack_from("<QQ", program, 32)
        num_headers, _, num_sections = struct.unpack_from("<HHH", program, 56)
        for k in range(num_headers):
            kind, _, start, place, _, size = struct.unpack_from(
                "<IIQQQQ", program, headers + 56 * k
            )
            if kind == 1:
                self.cpu.mem_write(place, program[start : start + size])
        table = [struct.unpack_from("<IIQQQQI", program, sections + 64 * k)
                 for k in range(num_sections)]  # fmt: skip
        for _, kind, _, _, start, size, names in table:
            for at in range(start, start + size, 24) if kind == 2 else ():
                name, _, value = struct.unpack_from("<IIQ", program, at)
                text = table[names][4] + name
                self.symbols[program[text : program.index(b"\0", text)].decode()] = value

    def call(self, name: str, *values: Any) -> list[np.ndarray]:
        """Call a function; returns what its arrays hold then."""
        arrays, whole, real, rest = [], 0, 0, b""
        for value in values:
            if isinstance(value, float):
                (bits,) = struct.unpack("<I", struct.pack("<f", value))
                self.cpu.reg_write(self.registers.UC_ARM64_REG_S0 + real, bits)
                real += 1
                continue
            if isinstance(value, np.ndarray):
                arrays.append((self.free, value))
                self.cpu.mem_write(self.free, value.tobytes())
                size, value = value.nbytes, self.free
                self.free += (size + 255) // 256 * 256
            if whole < 8:
                self.cpu.reg_write(self.registers.UC_ARM64_REG_X0 + whole, value)
            else:
                rest += struct.pack("<Q", value)
            whole += 1
        stack, stop = 0x3E00000, 0x3F00000
        self.cpu.mem_write(stack, rest + b"\0" * 8)
        self.cpu.reg_write(self.registers.UC_ARM64_REG_SP, stack)
        self.cpu.reg_write(self.registers.UC_ARM64_REG_LR, stop)
        self.cpu.emu_start(self.symbols[name], stop)
        return [
            np.frombuffer(bytes(self.cpu.mem_read(at, a.nbytes)), a.dtype).reshape(a.shape)
            for at, a in arrays
        ]


def call_here(compiled, name: str, *values: object) -> list[np.ndarray]:
    """The same of the library of this machine."""
    copies = [value.copy() if isinstance(value, np.ndarray) else value for value in values]
    getattr(compiled, name)(*(c.ctypes.data if isinstance(c, np.ndarray) else c for c in copies))
    return [copy for copy in copies if isinstance(copy, np.ndarray)]


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """The kernels compiled for this machine, and for an emulated one."""
    pytest.importorskip("unicorn")
    pytest.importorskip("ziglang")
    folder = tmp_path_factory.mktemp("aarch64")
    if library.compile_kernels(folder):
        pytest.skip("there is no C compiler")
    here: ctypes.CDLL | None = library.load(library.path(folder))
    (folder / "libc.c").write_text(LIBC)
    (folder / "math.h").write_text(
        "float sqrtf(float), rintf(float), fmaxf(float, float), fminf(float, float);\n"
        "#define fabsf __builtin_fabsf\n#define isfinite __builtin_isfinite"
    )
    (folder / "string.h").write_text(
        "#include <stddef.h>\nvoid *memcpy(void *, const void *, size_t);"
    )
    flags = [flag for flag in library._FLAGS if flag not in ("-shared", "-fPIC")]
    subprocess.run(
        [
            *(sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu", *flags),
            *(f"-I{folder}", "-nostdlib", "-static", "-Wl,--no-gc-sections"),
            *("-fno-stack-protector", "-fno-sanitize=all", "-o", folder / "kernels.elf"),
            *(library._SOURCE, folder / "libc.c"),
        ],
        check=True,
        capture_output=True,
    )
    return here, Emulated((folder / "kernels.elf").read_bytes())


@pytest.mark.long("needs zig and an emulator; test_kernels.py tries the same code on this machine")
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("strange", [1.0, np.nan, np.inf, 1e-42, 3e38])
def test_an_arm_processor_sends_and_understands_the_same_bytes(machines, bits, strange) -> None:
    here, arm = machines
    random = np.random.default_rng(bits)
    values = random.standard_normal((NUMBER, 256)).astype(np.float32)
    values[3, 7] = values[5] = strange
    scales = random.random(NUMBER).astype(np.float32) + np.float32(0.1)
    sign = (signs(256) / 16).astype(np.float32)
    weights = check_weights(256).astype(np.int16)
    bytes_of = np.zeros((NUMBER, 256), np.uint8)
    packed = np.zeros(NUMBER * 32 * bits, np.uint8)
    sums, lengths = np.zeros(NUMBER, np.int32), np.zeros(NUMBER, np.float32)
    shift = 0.5 if bits == 2 else 0.0
    encode = (values, NUMBER, scales, 0.25, shift, 1, sign, weights, bits)
    encode = ("matcha_encode", *encode, bytes_of, packed, sums, lengths)
    ours, theirs = call_here(here, *encode), arm.call(*encode)
    for place in (4, 5, 6):  # residues, message, checks
        np.testing.assert_array_equal(theirs[place], ours[place])
    np.testing.assert_allclose(theirs[7], ours[7], rtol=1e-6)
    arrived, residues = np.roll(ours[5], 5), ours[4]
    compare = (arrived, residues, NUMBER, scales, 3, weights, bits, 1, bytes_of, sums, lengths)
    ours, theirs = call_here(here, "matcha_compare", *compare), arm.call("matcha_compare", *compare)
    for place in (4, 5, 6):  # differences, check sums, lengths
        np.testing.assert_array_equal(theirs[place], ours[place])
    move = (ours[4], NUMBER, 3, scales, sign, 0.3, values)
    (*_, ours), (*_, theirs) = call_here(here, "matcha_move", *move), arm.call("matcha_move", *move)
    np.testing.assert_allclose(theirs, ours, rtol=2.0**-22, atol=1e-7)
