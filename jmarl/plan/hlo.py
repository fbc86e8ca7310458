"""Count what a compiled program does: operations, bytes of memory traffic, kernels. Nothing is run.

The counts are read off XLA's optimized program, as text. They are lower bounds of the work: launch times and waiting are left
out. A loop counts as often as it runs; the loop of a sampler, whose number of steps is not known, as often as the caller
says. Bytes are what a kernel reads and writes: of an array that it slices or updates in place, only that part.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f64": 8,
    "s64": 8,
    "u64": 8,
}
KERNELS = ("fusion", "custom-call", "copy", "sort", "scatter", "dot", "convolution", "reduce", "gather", "dynamic-update-slice")
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # written in place -> the number of the operand with what is written
SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
WORKSPACE = re.compile(r", s8\[\d+\]")  # of cuBLAS and cuDNN, the last part of what a call returns
INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    shape: str  # as text; a tuple in parentheses
    opcode: str
    operands: list[str]
    text: str  # what follows the opcode
    is_root: bool


class Cost(NamedTuple):
    """What a program, or a part of it, does."""

    operations: float = 0.0  # of products, 2 for each multiply and add
    bytes: float = 0.0
    kernels: float = 0.0
    exchanged: float = 0.0  # bytes that a device receives from others
    crossed: float = 0.0  # of these, in exchanges between devices of several hosts

    def plus(self, other: "Cost", times: float = 1.0) -> "Cost":
        """Add another cost some times."""
        return Cost(*(a + times * b for a, b in zip(self, other, strict=True)))


def size_of(shape: str) -> int:
    """Return the bytes of a shape, of all parts of a tuple."""
    return sum(BYTES.get(kind, 0) * math.prod(map(int, filter(None, dims.split(",")))) for kind, dims in SHAPE.findall(shape))


def dims_of(shape: str) -> list[int]:
    """Return the axes of a shape; of a tuple, those of its first part."""
    match = SHAPE.search(shape)
    return [int(n) for n in match[2].split(",") if n] if match else []


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Return the instructions of each computation of a program, and the name of its entry."""
    computations: dict[str, list[Instruction]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if head := COMPUTATION.match(line):
            lines = computations[head[1]] = []
            entry = head[1] if line.startswith("ENTRY") else entry
        elif match := INSTRUCTION.match(line):
            root, name, shape, opcode, rest = match.groups()
            arguments = rest[: _closing(rest)]
            lines.append(Instruction(name, shape, opcode, re.findall(r"%([\w.\-]+)", arguments), rest, bool(root)))
    return computations, entry


def _closing(text: str) -> int:
    """Return the index of the parenthesis that ends the operands."""
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return i
    return len(text)


class Program:
    """A compiled program, to be counted.

    Args:
      text: the optimized program, `jax.stages.Compiled.as_text`.
      unknown_trips: how often loops run whose number of steps is not known.
      per_host: devices of a host; 0: there is one host.
    """

    def __init__(self, text: str, unknown_trips: int = 1, per_host: int = 0) -> None:
        self.computations, self.entry = parse(text)
        self.unknown_trips, self.per_host = unknown_trips, per_host
        self._costs: dict[str, tuple[Cost, Cost]] = {}

    def cost(self, computation: str = "") -> Cost:
        """Return the cost of a computation with all that it calls; by default of the whole program.

        Of loops whose number of steps is not known, the first makes all steps: a decode loop is followed by loops over fewer
        rows, and where no row ends early, these make none.
        """
        known, loop = self._parts(computation or self.entry)
        return known.plus(loop, self.unknown_trips)

    def _parts(self, computation: str) -> tuple[Cost, Cost]:
        """Return the cost of a computation without such loops, and that of one step of the first of them."""
        if computation not in self._costs:
            shapes = {line.name: line.shape for line in self.computations[computation]}
            parts = [self._line(line, shapes) for line in self.computations[computation]]
            known = functools.reduce(Cost.plus, (known for known, _ in parts), Cost())
            self._costs[computation] = known, next((loop for _, loop in parts if loop != Cost()), Cost())
        return self._costs[computation]

    def loops(self) -> list[tuple[str, int | None, Cost]]:
        """Return the body, the number of steps and the cost of one step of each loop, the one with most kernels first."""
        lines = [line for lines in self.computations.values() for line in lines if line.opcode == "while"]
        loops = {_called(line.text, "body"): (trips(line), self.cost(_called(line.text, "body"))) for line in lines}
        return sorted(((body, *rest) for body, rest in loops.items()), key=lambda loop: -loop[2].kernels)

    def shapes(self) -> Iterable[str]:
        """Yield the shapes of the arrays that kernels write to memory."""
        for name, lines in self.computations.items():
            if not name.startswith(("fused", "wrapped")):
                yield from (line.shape for line in lines if line.opcode in KERNELS)

    def _line(self, line: Instruction, shapes: dict[str, str]) -> tuple[Cost, Cost]:
        if line.opcode == "while":
            count, body = trips(line), self.cost(_called(line.text, "body"))
            return (Cost(), body) if count is None else (Cost().plus(body, count), Cost())
        if line.opcode == "conditional":
            names = re.search(r"branch_computations=\{(.*?)\}", line.text)
            two = [_called(line.text, f"{which}_computation") for which in ("true", "false")] if names is None else []
            branches = [self._parts(name) for name in (re.findall(r"%([\w.\-]+)", names[1]) if names else two)]
            known, loops = zip(*branches, strict=True)
            return max(known, key=lambda cost: cost.bytes), max(loops, key=lambda cost: cost.bytes)
        if line.opcode == "call":
            return self._parts(_called(line.text, "to_apply"))
        return self._kernel(line, shapes), Cost()

    def _kernel(self, line: Instruction, shapes: dict[str, str]) -> Cost:
        operands = [shapes[name] for name in line.operands if name in shapes]
        if line.opcode.removesuffix("-start") in COLLECTIVES:
            received = exchanged(line, sum(map(size_of, operands)))
            return Cost(0, 0, 1, received, received if self._crosses(line) else 0.0)
        if line.opcode not in KERNELS:
            return Cost()
        if line.opcode == "fusion":
            return self._fusion(line, operands)
        in_place = UPDATES.get(line.opcode)
        read = operands if in_place is None else operands[1:]
        written = WORKSPACE.sub("", line.shape) if in_place is None else operands[in_place]
        return Cost(operations(line, operands), sum(map(size_of, read)) + size_of(written), 1)

    def _crosses(self, line: Instruction) -> bool:
        """Return whether a collective operation joins devices of several hosts."""
        groups = groups_of(line.text)
        return bool(self.per_host) and any(len({n // self.per_host for n in group}) > 1 for group in groups or [range(2**20)])

    def _fusion(self, line: Instruction, operands: list[str]) -> Cost:
        lines = self.computations[_called(line.text, "calls")]
        shapes = {inner.name: inner.shape for inner in lines}
        parameters = {inner.name: int(inner.text.split(")")[0]) for inner in lines if inner.opcode == "parameter"}
        read: dict[str, int] = {}
        for name, number in parameters.items():
            users = [inner for inner in lines if name in inner.operands]
            part = [_part(name, user, lines) for user in users]
            whole = size_of(operands[number]) if number < len(operands) else 0
            read[name] = min(whole, sum(whole if x is None else x for x in part)) if users else 0
        root = next(inner for inner in lines if inner.is_root)
        outputs = [next(x for x in lines if x.name == name) for name in root.operands] if root.opcode == "tuple" else [root]
        written = sum(_written(x, shapes, lines) for x in outputs)
        count = sum(operations(x, [shapes[name] for name in x.operands if name in shapes]) for x in lines)
        return Cost(count, sum(read.values()) + written, 1)


def _part(name: str, user: Instruction, lines: list[Instruction]) -> int | None:
    """Return the bytes that one use of a fusion's parameter reads; None: all of it."""
    if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
        return size_of(user.shape)
    if user.opcode in UPDATES and user.operands[0] == name:
        return 0  # written in place
    if user.opcode in ("bitcast", "reshape"):
        parts = [_part(user.name, other, lines) for other in lines if user.name in other.operands]
        return None if any(x is None for x in parts) or user.is_root else sum(x for x in parts if x is not None)
    return None


def _written(line: Instruction, shapes: dict[str, str], lines: list[Instruction]) -> int:
    """Return the bytes that one output of a fusion writes."""
    while line.opcode in ("bitcast", "reshape", "convert") and line.operands and line.operands[0] in shapes:
        line = next(other for other in lines if other.name == line.operands[0])
    if line.opcode in UPDATES:
        return size_of(shapes[line.operands[UPDATES[line.opcode]]])
    return size_of(line.shape)


def operations(line: Instruction, operands: list[str]) -> float:
    """Return the operations of a product or of cuDNN's attention; 0 for others."""
    if line.opcode == "dot" or "matmul" in line.text or "gemm" in line.text.split("custom_call_target")[-1][:40]:
        match = re.search(r'lhs_contracting_dim(?:ension)?s"?[=:][\[{]"?([\d,"]*)', line.text)
        if not match or not operands:
            return 0.0
        lhs = dims_of(operands[0])
        contracted = math.prod(lhs[int(i)] for i in re.findall(r"\d+", match[1]))
        return 2.0 * math.prod(dims_of(line.shape)) * contracted
    if "fmha" in line.text:
        q, k = dims_of(operands[0]), dims_of(operands[1])
        products = 5 if "Backward" in line.text else 2
        causal = q[1] == k[1]  # then on average half of the keys
        return products * 2.0 * math.prod(q) * k[1] / (1 + causal)
    return 0.0


def exchanged(line: Instruction, given: int) -> float:
    """Return the bytes that a device receives in a collective operation, at least. given: bytes that it gives to it."""
    kind = line.opcode.removesuffix("-start")
    if kind == "all-reduce":
        return 2.0 * given
    # An operation that only starts here returns what it was given, too.
    returned = size_of(line.shape) - given * (kind != line.opcode)
    return float({"all-gather": returned - given, "reduce-scatter": given - returned}.get(kind, given))


def groups_of(text: str) -> list[list[int]]:
    """Return the numbers of the devices that exchange with each other in a collective operation; []: all of them."""
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", text):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])]
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, devices = ([int(n) for n in x.split(",")] for x in match.group(1, 2))
        order = [int(n) for n in match[3].split(",")] if match[3] else None
        groups: Any = np.arange(math.prod(devices)).reshape(devices).transpose(order).reshape(shape).tolist()
        return groups
    return []


def trips(line: Instruction) -> int | None:
    """Return how often a loop runs, if the compiler knows."""
    match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line.text)
    return int(match[1]) if match else None


def _called(text: str, kind: str) -> str:
    match = re.search(rf"{kind}=%?([\w.\-]+)", text)
    assert match, f"no {kind} in: {text[:200]}"
    return match[1]


def largest(shapes: Iterable[str], test: Callable[[str, list[int]], bool]) -> int:
    """Return the bytes of the largest array, of any shape in `shapes`, for which test(type, axes) holds."""
    parts = [match for shape in shapes for match in SHAPE.finditer(shape)]
    return max((size_of(m[0]) for m in parts if test(m[1], dims_of(m[0]))), default=0)
