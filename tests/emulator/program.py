"""PTX text as a list of instructions. Registers, constants and special registers become rows of one file per width."""

import re
from dataclasses import dataclass, field

import numpy as np

WIDTHS = {"pred": "p", "b8": "h", "b16": "h", "u16": "h", "s16": "h", "b32": "w", "u32": "w", "s32": "w", "f32": "w",
          "b64": "d", "u64": "d", "s64": "d", "f64": "d"}  # fmt: skip
STORAGE = {"p": np.bool_, "h": np.uint16, "w": np.uint32, "d": np.uint64}
TYPES = {"pred": np.bool_, "b8": np.uint16, "u8": np.uint16, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
         "f16": np.float16, "bf16": np.uint16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
         "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64, "f16x2": np.uint32,
         "bf16x2": np.uint32}  # fmt: skip

_ARGUMENT = re.compile(r"\s*([^,\[{]*(?:\[[^\]]*\]|\{[^}]*\})?[^,]*)")
_STATEMENT = re.compile(r"(?:@(!?)([%$\w]+)\s+)?([a-z_][\w.:]*)\s*(.*)$", re.S)
_PARAMETER = re.compile(r"\.param\s+\.([bsuf]\d+)(?:\s+\.ptr)?(?:\s+\.global)?(?:\s+\.align\s+\d+)?\s+(\w+)")


@dataclass(slots=True)
class Instruction:
    """One instruction as it stands in the text."""

    opcode: str
    arguments: list[str]
    predicate: str | None
    is_negated: bool
    line: int
    source: str
    """Where the kernel's source says so: file:line."""
    text: str

    @property
    def words(self) -> list[str]:
        return self.opcode.split(".")

    def __str__(self) -> str:
        return f"PTX line {self.line} ({self.source}): {self.text[:120]}"


@dataclass(slots=True)
class Program:
    """One kernel."""

    name: str
    parameters: list[tuple[str, str]]
    """(type, name)."""
    instructions: list[Instruction]
    labels: dict[str, int]
    tables: dict[str, list[str]]
    """Targets of an indirect branch."""
    num_threads: int
    cluster: int
    rows: dict[str, dict[str, int]] = field(default_factory=lambda: {width: {} for width in STORAGE})
    """Row of each register or constant in the file of its width."""

    def row(self, width: str, name: str) -> int:
        """Return the row of a name; a new one if it is new."""
        rows = self.rows[width]
        return rows.setdefault(name, len(rows))


def parse(text: str) -> Program:
    """Return the kernel of a PTX module."""
    lines = text.splitlines()
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', text))
    entry = next(at for at, line in enumerate(lines) if ".entry" in line)
    start = next(at for at in range(entry, len(lines)) if lines[at].startswith("{"))
    head = "\n".join(lines[entry:start])
    end, depth = start, 0
    while depth or end == start:
        bare = re.sub(r"//.*", "", lines[end])
        depth += bare.count("{") - bare.count("}")
        end += 1
    threads = re.search(r"\.reqntid (\d+)", head)
    cluster = re.search(r"\.reqnctapercluster (\d+)", head)
    program = Program(
        name=re.search(r"\.entry\s+(\w+)", head)[1], parameters=_PARAMETER.findall(head), instructions=[], labels={},
        tables={}, num_threads=int(threads[1]), cluster=int(cluster[1]) if cluster else 1,
    )  # fmt: skip
    body = "\n".join(re.sub(r"//.*", "", line) for line in lines[start + 1 : end - 1])
    _read_body(program, body, start + 2, files)
    return program


def _read_body(program: Program, body: str, first_line: int, files: dict[str, str]) -> None:
    scopes: list[int] = []
    local: dict[int, dict[str, str]] = {}
    branches: list[tuple[Instruction, list[int]]] = []
    source, at_line, num_scopes = "?", first_line, 0
    # Statements end with a semicolon; labels, scopes and directives of a line stand for themselves.
    token = re.compile(r"\s*(?:(\.loc[^\n]*)|(\.(?:file|section)[^\n]*)|([$\w]+):(?!:)|([{}])|([^;]*);)", re.S)
    position = 0
    while match := token.match(body, position):
        at_line = first_line + body.count("\n", 0, match.start(match.lastindex))
        position = match.end()
        loc, _, label, brace, statement = match.groups()
        if loc:
            words = loc.split()
            source = f"{files.get(words[1], words[1]).rpartition('/')[2]}:{words[2]}"
        elif brace == "{":
            num_scopes += 1
            scopes.append(num_scopes)
            local[num_scopes] = {}
        elif brace == "}":
            scopes.pop()
        elif label:
            program.labels[_scoped(label, scopes, local, declare=bool(scopes))] = len(program.instructions)
        elif statement and statement.strip():
            _read_statement(program, " ".join(statement.split()), at_line, source, scopes, local, branches)
    for branch, around in branches:  # a label of the same scope may stand further down
        branch.arguments = [_scoped(name.partition("@")[0], around, local) for name in branch.arguments]


def _scoped(name: str, scopes: list[int], local: dict[int, dict[str, str]], *, declare: bool = False) -> str:
    """Return the name with its scope and, of a register, the file that it is in: `complete@3p`."""
    if declare and not name.startswith("$"):
        local[scopes[-1]][name] = ""
    inner = next((scope for scope in reversed(scopes) if name in local[scope]), None)
    return name if inner is None else f"{name}@{inner}{local[inner][name]}"


def _read_statement(
    program: Program, text: str, line: int, source: str, scopes: list[int], local: dict[int, dict[str, str]],
    branches: list[tuple[Instruction, list[int]]],
) -> None:  # fmt: skip
    if text.startswith(".reg"):
        if scopes:
            _, kind, names = text.split(None, 2)
            local[scopes[-1]] |= {name.strip(): WIDTHS[kind.lstrip(".")] for name in names.split(",")}
        return
    if text.startswith(".branchtargets"):  # the label that stands before it
        name = next(name for name, at in reversed(program.labels.items()) if at == len(program.instructions))
        program.tables[name] = [target.strip() for target in text.split(None, 1)[1].split(",")]
        return
    if text.startswith((".pragma", ".b8", ".b32", ".b64")):
        return
    negated, predicate, opcode, rest = _STATEMENT.match(text).groups()
    arguments = split_arguments(rest)
    if scopes:
        arguments = [re.sub(r"[%$\w.]+", lambda name: _scoped(name[0], scopes, local), each) for each in arguments]
        predicate = _scoped(predicate, scopes, local) if predicate else None
    made = Instruction(
        opcode=opcode, arguments=arguments, predicate=predicate, is_negated=bool(negated), line=line, source=source,
        text=text,
    )  # fmt: skip
    program.instructions.append(made)
    if scopes and made.words[0] == "bra":
        branches.append((made, list(scopes)))


def split_arguments(text: str) -> list[str]:
    """Split at the commas outside brackets and braces."""
    found, depth, current = [], 0, ""
    for char in text:
        depth += (char in "[{") - (char in "]}")
        if char == "," and depth == 0:
            found.append(current.strip())
            current = ""
        else:
            current += char
    return [*found, current.strip()] if current.strip() else found


def in_braces(argument: str) -> list[str]:
    """Return the parts of `{a, b}`, or the argument itself as the only one."""
    return [part.strip() for part in argument.strip("{} ").split(",")]


def width_of(type_name: str) -> str:
    """Return the register file that holds a type."""
    return {1: "h", 2: "h", 4: "w", 8: "d"}[np.dtype(TYPES[type_name]).itemsize] if type_name != "pred" else "p"


def constant(name: str, width: str) -> np.generic | None:
    """Return the value of an immediate operand, None for a name."""
    storage = STORAGE[width]
    if name.startswith("0f") and len(name) == 10:
        return np.uint32(int(name[2:], 16))
    if name.startswith("0d") and len(name) == 18:
        return np.uint64(int(name[2:], 16))
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", name):
        value = int(name.rstrip("U"), 0)
        return storage(value != 0) if width == "p" else storage(value % (1 << 8 * np.dtype(storage).itemsize))
    return None
