"""What the compiler made of a kernel: registers, spills, shared memory, instruction mix. No GPU and no driver needed.

Takes a `Launch` whose tensors may be on the meta device, compiles it for an architecture as triton would on a card
(the same hints, options and cache key), and reads the machine code with the tools in the triton wheel. Does not
judge: limits belong to the caller. Not possible in the interpreter, where kernels are not compiled.
"""

import collections
import functools
import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from plait.kernels import pinned_amd, pinned_code
from plait.kernels.launch import INTERPRETED, Launch


class Facts(NamedTuple):
    """One compiled kernel. Spills are loads and stores of local memory in the machine code; on AMD's architecture
    spill_stores is the number of registers that the compiler spilled, where that is more.

    spill_lines: source line -> such instructions; tensor_columns: of 32 bits of 128 lanes (sm_100); loop: opcode ->
    count of the hot loop (pinned_code.py); code: a hash of the instructions alone; scalar_registers: of a wave (AMD).
    """

    name: str
    arch: str
    registers: int
    stack_bytes: int
    spill_loads: int
    spill_stores: int
    shared_bytes: int
    num_warps: int
    instructions: dict[str, int]
    spill_lines: dict[str, int] = {}
    tensor_columns: int = 0
    loop: dict[str, int] = {}
    code: str = ""
    scalar_registers: int = 0

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


def target_of(arch: str) -> GPUTarget:
    """What triton compiles for: AMD's architecture by name, any other by `parse_arch`."""
    return GPUTarget("hip", arch, 64) if arch == pinned_amd.ARCH else GPUTarget("cuda", parse_arch(arch), 32)


def amd_available() -> bool:
    """Whether this triton makes AMD's code without ROCm: with a linker of its own, as 3.9 has."""
    from triton._C import libtriton

    return hasattr(getattr(libtriton, "amd", None), "link_hsaco")


@functools.cache
def _binder(kernel: Any, target: GPUTarget) -> Callable[..., Any]:
    """Triton's function from the arguments of a call to their kinds: made once, since it is compiled from text."""
    return create_function_from_signature(kernel.signature, kernel.params, make_backend(target))


def specialised(launch: Launch, arch: str) -> tuple[ASTSource, dict[str, Any], GPUTarget]:
    """(source, options, target) that `launch` is compiled from on a card of `arch`.

    Made by the functions that the JIT itself calls, so that both look under the same key of triton's cache; pointers
    of meta tensors count from 0. RuntimeError in interpreter mode, ValueError on an unknown arch.
    """
    if INTERPRETED:
        raise RuntimeError("kernels are interpreted in this process, so none is compiled; unset TRITON_INTERPRET")
    target = target_of(arch)
    backend = make_backend(target)
    kernel = launch.kernel
    keywords = launch.keywords()
    # What JITFunction.run adds: triton's own switches, each where this version has it.
    keywords["debug"] = kernel.debug or triton.knobs.runtime.debug
    for switch in ("instrumentation_mode", "fpsan_homomorphic_casts"):
        if hasattr(triton.knobs.compilation, switch):
            keywords[switch] = getattr(triton.knobs.compilation, switch)
    bound, specialization, options = _binder(kernel, target)(*launch.arguments, **keywords)
    options, signature, constants, attrs = kernel._pack_args(backend, keywords, bound, specialization, options)
    return ASTSource(kernel, signature, constants, attrs), dict(options.__dict__), target


def compile_launch(launch: Launch, arch: str = "sm_90") -> Any:
    """triton's compiled kernel, out of its cache or into it: where a launch on a card of `arch` looks for it."""
    source, options, target = specialised(launch, arch)
    return triton.compile(source, target=target, options=options)


def tool_path(name: str) -> str:
    """Where the CUDA tool of the triton wheel is."""
    import triton.backends.nvidia as nvidia

    return str(Path(nvidia.__file__).parent / "bin" / name)


def _machine_code(cubin: bytes) -> tuple[str, str]:
    """(resource usage, disassembly with source lines) as the CUDA tools print them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run(
            [tool_path("cuobjdump"), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        )
        code = subprocess.run(
            [tool_path("nvdisasm"), "-c", "-g", file.name], check=True, capture_output=True, text=True
        )  # fmt: skip
    return usage.stdout, code.stdout


def remembered(what: str, parts: Iterable[bytes], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """make()'s plain data, kept in triton's cache under `what` and a hash of `parts` and of the code that reads them.

    An entry that is no JSON, as a full disk leaves it, is made again.
    """
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("pinned*.py")):
        digest.update(source.read_bytes())
    for part in (Path(__file__).read_bytes(), what.encode(), *parts):
        digest.update(len(part).to_bytes(8, "little") + part)
    cache = triton.runtime.cache.get_cache_manager(digest.hexdigest())
    path, name = cache.get_file(f"{what}.json"), f"{what}.json"
    if path is not None:
        try:
            found: dict[str, Any] = json.loads(Path(path).read_text())
            return found
        except (OSError, ValueError):
            pass  # made again below
    data = make()
    cache.put(json.dumps(data), name, binary=False)
    return data


def _read(cubin: bytes) -> dict[str, Any]:
    """What the machine code says: resources, instructions, spilling lines, the hot loop, the hash."""
    usage, text = _machine_code(cubin)
    resources = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    code, labels = pinned_code.parse(text)
    return {
        "registers": resources.get("REG", 0),
        "stack_bytes": resources.get("STACK", 0),
        "instructions": dict(collections.Counter(one.opcode for one in code)),
        "spill_lines": pinned_code.spill_lines(code),
        "loop": pinned_code.hot_loop(code, labels),
        "code": pinned_code.code_hash(cubin),
    }


def compile_offline(launch: Launch, arch: str = "sm_90") -> Facts:
    """Compiles for `arch` and reads the result. RuntimeError in interpreter mode, ValueError on an unknown arch."""
    compiled = compile_launch(launch, arch)
    if "amdgcn" in compiled.asm:
        assembly: str = compiled.asm["amdgcn"]
        read = remembered("facts", [assembly.encode()], lambda: pinned_amd.read(assembly))
    else:
        cubin: bytes = compiled.asm["cubin"]
        read = remembered("facts", [cubin], lambda: _read(cubin))
    spilled = read.pop("spilled", 0)
    local = {kind: sum(n for op, n in read["instructions"].items() if op.startswith(kind)) for kind in ("LDL", "STL")}
    return Facts(
        name=launch.kernel.__name__,
        arch=arch if arch == pinned_amd.ARCH else f"sm_{parse_arch(arch)}",
        spill_loads=local["LDL"],
        spill_stores=max(local["STL"], spilled - local["LDL"]),
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,  # more than the launch says where the compiler adds groups
        tensor_columns=getattr(compiled.metadata, "tmem_size", 0) or 0,
        **read,
    )
