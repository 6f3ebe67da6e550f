"""What AMD's assembly shows, in the words that the gate knows: triton's `amdgcn` text of a kernel. Runs nothing.

The one idea: an opcode is led by NVIDIA's word for the same thing and its width ("LDG.E.128.buffer_load_dwordx4",
"MFMA.v_mfma_f32_32x32x8_bf16"), so that rules, shares and hot loops are read by one piece of code. Registers are the
vector registers of a lane (512 for a SIMD unit, accumulators among them); spilled are vector and scalar registers, by
the compiler's own count. There is no binary to disassemble: triton's assembly is the machine code, a line each.
"""

import collections
import hashlib
import re
from typing import Any

from plait.kernels import pinned_code
from plait.kernels.pinned_code import Instruction

ARCH = "gfx942"
_INSTRUCTION = re.compile(r"^\t([a-z]\w+)(?:[ \t]+([^;]*?))?[ \t]*(?:;.*)?$")
_LABEL = re.compile(r"^(\.LBB\w+):")
_LINE = re.compile(r"^\t\.loc\t.*; ([\w.]+\.py):(\d+)")
_COUNT = re.compile(r"^ +\.(\w+): +(\d+)$", re.MULTILINE)
# What an opcode begins with or has in it -> the word for it; the first that fits. Then widths, by its ending.
_WORDS = (
    (r"[vs]_(mfma|smfmac)", "MFMA"),
    (r"s_barrier", "BAR"),
    (r"(global|buffer|flat)_atomic", "ATOMG"),
    (r"(global|buffer)_load_lds", "LDGSTS"),
    (r"(global|buffer|flat)_load", "LDG"),
    (r"(global|buffer|flat)_store", "STG"),
    (r"scratch_load", "LDL"),
    (r"scratch_store", "STL"),
    (r"v_(fma|fmac)_f64", "DFMA"),
    (r"v_mul_f64", "DMUL"),
    (r"v_add_f64", "DADD"),
)
_WIDTHS = {"dwordx4": "128", "dwordx3": "96", "dwordx2": "64", "dword": "32"}
_NARROW = {"ubyte": "U8", "sbyte": "S8", "byte": "U8", "ushort": "U16", "sshort": "S16", "short": "U16"}


def worded(opcode: str) -> str:
    """The opcode behind the gate's word for it and, of an access, its width; as it is where there is no word."""
    word = next((word for begins, word in _WORDS if re.match(begins, opcode)), "")
    if word in ("LDG", "STG", "LDGSTS"):
        kind = opcode.split("_")[2] if word != "LDGSTS" else opcode.rsplit("_", 1)[-1]
        word = f"{word}.E.{(_WIDTHS | _NARROW).get(kind, '32')}"
    return f"{word}.{opcode}" if word else opcode


def parse(assembly: str) -> tuple[list[Instruction], dict[str, int]]:
    """(instructions, label -> index of the instruction that it names) of the one kernel in the text."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    place = ""
    for line in assembly.splitlines():
        if match := _INSTRUCTION.match(line):
            opcode, operands = match.groups(default="")
            target = operands if opcode.startswith(("s_branch", "s_cbranch")) else ""
            found.append(Instruction(worded(opcode), target, opcode not in ("s_branch", "s_endpgm"), place))
        elif match := _LABEL.match(line):
            labels[match.group(1)] = len(found)
        elif match := _LINE.match(line):
            place = f"{match.group(1)}:{match.group(2)}"
    return found, labels


def _hash(assembly: str) -> str:
    """Of instructions and labels alone: not of comments, line numbers and paths."""
    kept = [
        line.split(";")[0].strip() for line in assembly.splitlines() if _INSTRUCTION.match(line) or _LABEL.match(line)
    ]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def read(assembly: str) -> dict[str, Any]:
    """Resources, instructions, spilling lines, the hot loop, the hash; ValueError where the text says no registers.

    `spilled`: registers that the compiler put elsewhere, to memory or to other registers.
    """
    counts = {key: int(value) for key, value in _COUNT.findall(assembly)}
    if "vgpr_count" not in counts:
        raise ValueError("amdgcn: says no vgpr_count; this is no kernel's assembly of triton 3.9 or later")
    code, labels = parse(assembly)
    return {
        "registers": counts["vgpr_count"],
        "scalar_registers": counts["sgpr_count"],
        "stack_bytes": counts["private_segment_fixed_size"],
        "spilled": counts["vgpr_spill_count"] + counts["sgpr_spill_count"],
        "instructions": dict(collections.Counter(one.opcode for one in code)),
        "spill_lines": pinned_code.spill_lines(code),
        "loop": pinned_code.hot_loop(code, labels),
        "code": _hash(assembly),
    }
