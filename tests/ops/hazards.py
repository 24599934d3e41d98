"""Find races around wgmma in compiled kernels, without a GPU. Three compiler bugs of public record are looked for.

`unfenced`: Triton before 3.7.1 leaves out `fence.proxy.async` between a copy to shared memory and the wgmma that reads
the copy (triton-lang/triton#9610). `unwritten`: ptxas 12.8 builds a descriptor of shared memory from a uniform register
that no instruction writes (triton-lang/triton#11366). `overwritten`: ptxas 12.9 reuses the registers of a left operand
while an asynchronous wgmma may still read them (triton-lang/triton#11781).

The checks follow every path through a kernel. They read the PTX of Triton and the SASS of `cuobjdump -sass`, whose
operand order and control bits are those of sm_90a.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

State = TypeVar("State")
UNIFORM = 63  # uniform registers of a warp; UR63 reads as zero
OPERAND = 4  # registers that hold the left operand of a wgmma
BARRIERS = 6  # scoreboards on which an instruction can wait; 7 stands for none


class Instruction(NamedTuple):
    """One line of SASS: `text` without its predicate, and the word of control bits."""

    address: int
    guarded: bool
    text: str
    control: int

    @property
    def opcode(self) -> str:
        """The name with its modifiers, such as `IMAD.WIDE`."""
        return self.text.split(maxsplit=1)[0]

    @property
    def name(self) -> str:
        """The name without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def operands(self) -> list[str]:
        """The operands in their order, without the predicates that come before the destination."""
        _, _, rest = self.text.partition(" ")
        words = [word.strip().removesuffix(".reuse") for word in rest.split(",")]
        while words and re.fullmatch(r"!?U?P[\dT]", words[0]):
            words.pop(0)
        return words


def unfenced(ptx: str) -> tuple[int, int]:
    """Return the number of wgmma, and of those that an unfenced `cp.async` may precede."""
    body = ptx[ptx.index("{", ptx.index(".entry")) :].splitlines()
    lines = [line.strip() for line in body if line.strip() and not line.strip().startswith("//")]
    labels = {match[1]: number for number, line in enumerate(lines) if (match := re.match(r"(\$\w+):", line))}

    def after(number: int) -> Iterable[int]:
        branch = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", lines[number])
        if branch:
            yield labels[branch[1]]
        if not (branch and not lines[number].startswith("@")) and not lines[number].startswith("ret"):
            yield number + 1

    def step(number: int, pending: bool) -> bool:
        if "fence.proxy.async" in lines[number]:
            return False
        return pending or re.search(r"\bcp\.async\.c[ga]\.", lines[number]) is not None

    pending = _flow(len(lines), after, step, False, lambda one, other: one or other)
    products = [number for number, line in enumerate(lines) if "wgmma.mma_async" in line]
    return len(products), sum(bool(pending[number]) for number in products)


def unwritten(sass: str) -> list[str]:
    """Return the instructions that read a uniform register which some path leaves unwritten."""
    program = instructions(sass)
    after = _successors(program)

    def step(number: int, written: frozenset[int]) -> frozenset[int]:
        return written | _uniform_destination(
            program[number]
        )  # a guarded write counts: its readers have the guard, too

    written = _flow(len(program), after, step, frozenset(), frozenset.intersection)
    return [
        f"{line.address:#x} {line.text} reads UR{min(missing)}"
        for line, state in zip(program, written, strict=True)
        if state is not None and (missing := _uniform_sources(line) - state)
    ]


def overwritten(sass: str) -> tuple[int, list[str]]:
    """Return the number of wgmma with a left operand in registers, and the instructions that overwrite one too early.

    An operand may be written again behind `WARPGROUP.DEPBAR.LE gsb0, 0x0`, which waits for all products, and behind an
    instruction that waits on the scoreboard which the wgmma releases when it has read its registers.
    """
    program = instructions(sass)
    after = _successors(program)
    products, errors = 0, []
    for number, line in enumerate(program):
        if line.name != "HGMMA" or not re.match(r"R\d+, R\d+(\.reuse)?, gdesc", line.text.partition(" ")[2]):
            continue
        products += 1
        first = int(line.operands[1][1:])
        operand, scoreboard = set(range(first, first + OPERAND)), line.control >> 49 & 7
        reached, waiting = set(), list(after(number))
        while waiting:
            place = waiting.pop()
            if place in reached:
                continue
            reached.add(place)
            later = program[place]
            if later.text.startswith("WARPGROUP.DEPBAR.LE gsb0, 0x0"):
                continue
            if scoreboard < BARRIERS and later.control >> 52 >> scoreboard & 1:
                continue
            if operand & _destination(later):
                errors.append(
                    f"{later.address:#x} {later.text} overwrites the operand of {line.address:#x} {line.text}"
                )
                continue
            waiting += after(place)
    return products, errors


def instructions(sass: str) -> list[Instruction]:
    """Return the instructions of the disassembler's text, in their order."""
    program, lines = [], sass.splitlines()
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        match = re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P[\dT]\s+)?(.*?)\s*;", line)
        if match:
            control = re.match(r"\s+/\* (0x[0-9a-f]{16}) \*/", below)
            text = re.sub(r"\s+", " ", match[3])
            program.append(
                Instruction(int(match[1], 16), match[2] is not None, text, int(control[1], 16) if control else 0)
            )
    return program


def _successors(program: Sequence[Instruction]) -> Callable[[int], Iterable[int]]:
    places = {line.address: number for number, line in enumerate(program)}

    def after(number: int) -> Iterable[int]:
        line = program[number]
        conditional = line.guarded
        if line.name == "BRA":
            target = re.search(r"0x([0-9a-f]+)", line.text)
            if target and int(target[1], 16) in places:
                yield places[int(target[1], 16)]
            conditional |= ".DIV" in line.opcode or re.match(r"BRA\S* !?U?P\d", line.text) is not None
        if conditional or line.name not in ("BRA", "EXIT", "RET", "KILL"):
            yield number + 1

    return after


def _flow(
    count: int,
    after: Callable[[int], Iterable[int]],
    step: Callable[[int, State], State],
    start: State,
    join: Callable[[State, State], State],
) -> list[State | None]:
    """Return the state before each instruction, joined over all paths to it; None where no path leads."""
    before: list[State | None] = [None] * count
    before[0] = start
    waiting = [0]
    while waiting:
        number = waiting.pop()
        state = before[number]
        assert state is not None
        result = step(number, state)
        for place in after(number):
            if place >= count:
                continue
            known = before[place]
            joined = result if known is None else join(known, result)
            if joined != known:
                before[place] = joined
                waiting.append(place)
    return before


def _destination(line: Instruction) -> set[int]:
    """Return the general registers that an instruction writes."""
    stores = (
        "STG",
        "STS",
        "STL",
        "ST",
        "STSM",
        "RED",
        "LDGSTS",
        "R2UR",
        "R2P",
        "R2B",
        "ISETP",
        "FSETP",
        "DSETP",
        "BAR",
    )
    match = re.fullmatch(r"R(\d+)(\.64)?", line.operands[0]) if line.operands else None
    if match is None or line.name in stores:
        return set()
    first = int(match[1])
    return set(range(first, first + _width(line)))


def _width(line: Instruction) -> int:
    """Return the number of consecutive registers that an instruction writes."""
    if line.name == "HGMMA":
        shape = re.search(r"\.64x(\d+)x", line.opcode)
        assert shape is not None, line.text
        return int(shape[1]) // 2
    if line.name == "HMMA":
        return 4 if "F32" in line.opcode else 2
    if line.name == "LDSM":
        return int(line.opcode[-1]) if line.opcode[-1] in "24" else 1
    if line.name in ("LDG", "LDS", "LDL", "LDC", "LD"):
        return 4 if ".128" in line.opcode else 2 if ".64" in line.opcode else 1
    return 2 if line.opcode.startswith("IMAD.WIDE") or line.name == "CS2R" and ".32" not in line.opcode else 1


def _uniform_destination(line: Instruction) -> frozenset[int]:
    """Return the uniform registers that an instruction writes."""
    match = re.fullmatch(r"UR(\d+)", line.operands[0]) if line.operands else None
    writes = line.name.startswith("U") or line.name in ("S2UR", "R2UR", "VOTEU", "REDUX")
    if match is None or not writes or line.name in ("UISETP", "UPLOP3"):
        return frozenset()
    wide = ".128" in line.opcode, any(word in line.opcode for word in (".64", "UIMAD.WIDE"))
    first = int(match[1])
    return frozenset(range(first, first + (4 if wide[0] else 2 if wide[1] else 1)))


def _uniform_sources(line: Instruction) -> frozenset[int]:
    """Return the uniform registers that an instruction reads, those of descriptors included."""
    read: set[int] = set()
    in_registers = re.match(r"R\d+, R\d+(\.reuse)?, gdesc", line.text.partition(" ")[2])
    for match in re.finditer(r"\b(g?)desc\[UR(\d+)\]", line.text):
        first = int(match[2])
        if not match[1]:
            read |= {first, first + 1}
        else:  # two pairs: descriptors of both operands; the first pair is not read where the left one is in registers
            read |= {first + 2, first + 3} if in_registers else set(range(first, first + 4))
    written = bool(_uniform_destination(line))
    for number, word in enumerate(line.operands):
        if number == 0 and written:
            continue
        for match in re.finditer(r"\bUR(\d+)\b", re.sub(r"g?desc\[UR\d+\]", "", word)):
            first = int(match[1])
            read |= {first, first + 1} if line.opcode.startswith("UIADD3.64") else {first}
    return frozenset(register for register in read if register < UNIFORM)
