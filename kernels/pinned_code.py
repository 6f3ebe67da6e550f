"""What machine code shows beyond opcodes: loops, spills by source line, a hash. Reads nvdisasm's text, runs nothing.

The one idea: a hot loop is found by the control flow, not by the layout. A loop is a branch back to a block that
every way to the branch goes through (a natural loop); waits that the compiler moved behind the code branch back too
and are none. The hot one is the innermost loop with the most matrix instructions, else with the most global accesses.
"""

import collections
import hashlib
import re
import struct
from typing import NamedTuple

# An instruction: an optional predicate, then the opcode, after the address comment.
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_\w+):")
_LINE = re.compile(r'^\s*//## File "([^"]*)", line (\d+)')
_TARGET = re.compile(r"`\((\.L_\w+)\)")
MATRIX = ("UTCHMMA", "HGMMA", "HMMA", "MFMA")  # tcgen05, wgmma, mma, AMD's; fp8 and integers have no kernel here
GLOBAL = ("LDG", "STG", "LDGSTS", "UTMALDG", "UTMASTG")
_TEXT = b".text."


class Instruction(NamedTuple):
    """One line of the disassembly: the opcode, where it goes, whether it may fall through, and its source line."""

    opcode: str
    target: str  # label of a branch, '' for any other
    falls: bool  # the next instruction may follow
    place: str  # "file.py:12", '' where nothing is known


def parse(code: str) -> tuple[list[Instruction], dict[str, int]]:
    """(instructions, label -> index of the instruction that it names) of `nvdisasm -c -g`."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    place = ""
    for line in code.splitlines():
        if match := _INSTRUCTION.match(line):
            predicate, opcode, operands = match.groups()
            jump = opcode.split(".")[0] in ("BRA", "EXIT", "RET")
            target = _TARGET.search(operands) if opcode.startswith("BRA") else None
            always = jump and not predicate and (target is None or operands.startswith("`"))
            found.append(Instruction(opcode, target.group(1) if target else "", not always, place))
        elif match := _LABEL.match(line):
            labels[match.group(1)] = len(found)
        elif match := _LINE.match(line):
            place = f"{match.group(1).rsplit('/', 1)[-1]}:{match.group(2)}"
    return found, labels


def _blocks(code: list[Instruction], labels: dict[str, int]) -> tuple[list[range], list[list[int]]]:
    """(blocks as ranges of instructions, successors of each); block 0 is where the kernel begins."""
    jumps = {index + 1 for index, one in enumerate(code) if one.target or not one.falls}
    starts = sorted({0, *(place for place in labels.values() if place < len(code)), *jumps} - {len(code)})
    blocks = [range(a, b) for a, b in zip(starts, [*starts[1:], len(code)], strict=True)]
    index_of = {block.start: index for index, block in enumerate(blocks)}
    after = []
    for index, block in enumerate(blocks):
        last = code[block[-1]]
        onward = [index + 1] if last.falls and index + 1 < len(blocks) else []
        target = index_of.get(labels.get(last.target, -1))
        after.append([*onward, *([target] if target is not None else [])])
    return blocks, after


def _dominators(after: list[list[int]]) -> list[set[int]]:
    """Of each block, the blocks that every way from block 0 to it goes through; all of them where no way leads."""
    everything = set(range(len(after)))
    before: list[list[int]] = [[] for _ in after]
    for block, following in enumerate(after):
        for other in following:
            before[other].append(block)
    found = [{0}, *(set(everything) for _ in after[1:])]
    changed = True
    while changed:
        changed = False
        for block in range(1, len(after)):
            ways = [found[other] for other in before[block]]
            new = {block} | (set.intersection(*ways) if ways else everything)
            if new != found[block]:
                found[block], changed = new, True
    return found


def loops(code: list[Instruction], labels: dict[str, int]) -> list[list[int]]:
    """The natural loops, each as indices of its instructions in order; loops of one head are one."""
    if not code:
        return []
    blocks, after = _blocks(code, labels)
    dominators = _dominators(after)
    bodies: dict[int, set[int]] = {}
    for block, following in enumerate(after):
        for head in following:
            unreached = block > 0 and len(dominators[block]) == len(blocks)  # padding behind the last EXIT
            if head not in dominators[block] or unreached:
                continue
            body, todo = bodies.setdefault(head, {head}), [block]
            while todo:
                one = todo.pop()
                if one not in body:
                    body.add(one)
                    todo += [other for other, onward in enumerate(after) if one in onward]
    return [[i for block in sorted(body) for i in blocks[block]] for _, body in sorted(bodies.items())]


def hot_loop(code: list[Instruction], labels: dict[str, int]) -> dict[str, int]:
    """Opcode -> count of the hot loop; empty where no loop has a matrix instruction or a global access."""

    def number(loop: list[int], kinds: tuple[str, ...]) -> int:
        return sum(code[index].opcode.split(".")[0] in kinds for index in loop)

    found = loops(code, labels)
    for kinds in (MATRIX, GLOBAL):
        busy = [loop for loop in found if number(loop, kinds)]
        inner = [loop for loop in busy if not any(set(other) < set(loop) for other in busy)]
        if inner:
            hottest = max(inner, key=lambda loop: (number(loop, kinds), -loop[0]))
            return dict(collections.Counter(code[index].opcode for index in hottest))
    return {}


def spill_lines(code: list[Instruction]) -> dict[str, int]:
    """Source line -> loads and stores of local memory that it costs."""
    return dict(collections.Counter(one.place for one in code if one.opcode.startswith(("LDL", "STL"))))


def code_hash(cubin: bytes) -> str:
    """Hash of the instructions alone, 16 hex digits: not of line numbers and paths, which move with the checkout.

    ValueError where `cubin` is no 64-bit ELF file with a section of code.
    """
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"cubin: begins with {cubin[:5]!r}; expected a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + size * index) for index in range(count)]
    begin = headers[names][4]
    digest, seen = hashlib.sha256(), False
    for name, _, _, _, offset, length in headers:
        if cubin.startswith(_TEXT, begin + name):
            digest.update(cubin[offset : offset + length])
            seen = True
    if not seen:
        raise ValueError("cubin: has no section of code")
    return digest.hexdigest()[:16]
