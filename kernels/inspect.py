"""What the compiler made of a kernel: registers, spills, shared memory, instruction mix. No GPU and no driver needed.

Takes a `Launch` whose tensors may be on the meta device, compiles it for an architecture as triton would on a card
(same hints: divisible by 16, equal to 1), and reads the machine code with the tools in the triton wheel. Does not
judge: limits belong to the caller. Not possible in the interpreter, where kernels are not compiled.
"""

import collections
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from plait.kernels.launch import INTERPRETED, Launch

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_DIVISIBLE = [["tt.divisibility", 16]]


class Facts(NamedTuple):
    """One compiled kernel. Spills are loads and stores of local memory in the machine code."""

    name: str
    arch: str
    registers: int
    stack_bytes: int
    spill_loads: int
    spill_stores: int
    shared_bytes: int
    num_warps: int
    instructions: dict[str, int]

    def count(self, prefix: str) -> int:
        """Instructions whose opcode starts with `prefix`, such as "HGMMA", "LDG.E.128" or "DFMA"."""
        return sum(number for opcode, number in self.instructions.items() if opcode.startswith(prefix))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of this shape without memory: what a launch to be inspected takes."""
    return torch.empty(shape, dtype=dtype, device="meta")


def parse_arch(arch: str) -> int:
    """ "sm_90" or "90" as 90; ValueError otherwise."""
    match = re.fullmatch(r"(?:sm_)?(\d{2,3})a?", arch)
    if match is None:
        raise ValueError(f"arch is {arch!r}; expected a name such as sm_80, sm_90 or sm_100")
    return int(match.group(1))


def _source(launch: Launch) -> Any:
    """The launch's kernel specialised as triton specialises its arguments."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    hints: dict[tuple[int, ...], Any] = {}
    names = launch.kernel.arg_names
    values = dict(zip(names, launch.arguments, strict=False)) | launch.constants
    for position, name in enumerate(names):
        value = values[name]
        if name in launch.constants or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = _POINTERS[value.dtype]
            hints[(position,)] = _DIVISIBLE
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                hints[(position,)] = _DIVISIBLE
    return ASTSource(launch.kernel, signature, constexprs=constants, attrs=hints)


def _tool(name: str) -> str:
    import triton.backends.nvidia as nvidia

    return str(Path(nvidia.__file__).parent / "bin" / name)


def _machine_code(cubin: bytes) -> tuple[str, str]:
    """(resource usage, disassembly) as the CUDA tools print them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [_tool("cuobjdump"), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        )
        code = subprocess.run(
            [_tool("nvdisasm"), "-c", file.name], check=True, capture_output=True, text=True
        )  # fmt: skip
    return usage.stdout, code.stdout


def compile_offline(launch: Launch, arch: str = "sm_90") -> Facts:
    """Compiles for `arch` and reads the result. RuntimeError in interpreter mode, ValueError on an unknown arch."""
    if INTERPRETED:
        raise RuntimeError("compile_offline: kernels are interpreted in this process; unset TRITON_INTERPRET")
    number = parse_arch(arch)
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(_source(launch), target=GPUTarget("cuda", number, 32), options=options)
    usage, code = _machine_code(compiled.asm["cubin"])
    resources = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    # An instruction: an optional predicate, then the opcode, after the address comment.
    opcodes = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.MULTILINE)
    mix = dict(collections.Counter(opcodes))
    local = {kind: sum(n for op, n in mix.items() if op.startswith(kind)) for kind in ("LDL", "STL")}
    return Facts(
        name=launch.kernel.__name__,
        arch=f"sm_{number}",
        registers=resources.get("REG", 0),
        stack_bytes=resources.get("STACK", 0),
        spill_loads=local["LDL"],
        spill_stores=local["STL"],
        shared_bytes=compiled.metadata.shared,
        num_warps=launch.num_warps,
        instructions=mix,
    )
