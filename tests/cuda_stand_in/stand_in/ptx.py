"""PTX as C, so that a CPU runs the kernels that a GPU would. Takes the place of `ptxas` for Triton.

    python ptx.py KERNEL.ptx -o KERNEL.so

Every thread of a block is a call of a C function, or a fibre of its own where threads wait for each
other (barriers, shuffles). An access of global memory that no allocation holds, or that is not
aligned, breaks the device as on a GPU. What is not known here is refused by name, with the line.

Registers are unsigned integers of their width. Arithmetic of floating point is not translated: the
kernels that the tests run move bytes and compute indices. Only the standard library is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
CUDA_VERSION = "13.0"
_COMPARISONS = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%"}
_BITS = {"and": "&", "or": "|", "xor": "^"}
_SHUFFLES = {"bfly": "lane ^ by", "idx": "by", "up": "lane - by", "down": "lane + by"}
_NOTHING = {
    "membar",
    "fence",
    "prefetch",
    "prefetchu",
    "discard",
    "applypriority",
    "griddepcontrol",
}
"""Instructions about caches and order: threads of a block run one after the other here."""


class Unknown(Exception):
    """PTX that is not translated."""


@dataclass
class Kernel:
    """An entry of a module."""

    name: str
    params: dict[str, int] = field(default_factory=dict)
    """Bytes of each, in order."""
    registers: set[str] = field(default_factory=set)
    shared: dict[str, int] = field(default_factory=dict)
    """Where each variable in shared memory begins."""
    local: dict[str, str] = field(default_factory=dict)
    """Variables of each thread, by their names in C."""
    tables: dict[str, list[str]] = field(default_factory=dict)
    """Targets of indexed branches."""
    lines: list[str] = field(default_factory=list)
    """Of C."""
    waits: bool = False
    """Threads wait for each other."""
    unknown: str = ""
    """Why it is not translated."""


def translate(ptx: str) -> str:
    """The module as C. A launch of a kernel that is not translated fails and says why. Raises Unknown
    where no kernel is translated.
    """
    ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.S)
    shared, shared_bytes = _shared_of(ptx)
    kernels = [_kernel(entry, ptx, shared) for entry in re.finditer(r"\.entry\s+([\w$]+)", ptx)]
    if kernels and all(kernel.unknown for kernel in kernels):
        raise Unknown(kernels[0].unknown)
    return _module(kernels, shared_bytes)


def _shared_of(ptx: str) -> tuple[dict[str, int], int]:
    """Where every variable in shared memory begins, and where memory that a launch sizes begins."""
    places, end = {}, 0
    for align, size, name, count in re.findall(
        r"\.shared\s+\.align\s+(\d+)\s+\.b(\d+)\s+([\w$]+)\[(\d*)\]", ptx
    ):
        if count:
            end = -(-end // int(align)) * int(align)
            places[name] = end
            end += int(size) // 8 * int(count)
    end = -(-end // 128) * 128
    for name in re.findall(r"\.extern\s+\.shared\s+\.align\s+\d+\s+\.b\d+\s+([\w$]+)\[\]", ptx):
        places[name] = end
    return places, end


def _kernel(entry: re.Match[str], ptx: str, shared: dict[str, int]) -> Kernel:
    kernel = Kernel(entry.group(1), shared=shared)
    opened = ptx.index("{", entry.end())
    head = ptx[entry.end() : opened]
    for kind, name, count in re.findall(
        r"\.param\s+(?:\.align\s+\d+\s+)?\.\w?(\d+)\s[^,)]*?([\w$]+)(?:\[(\d+)\])?\s*(?=[,)])", head
    ):
        kernel.params[name] = int(kind) // 8 * int(count or 1)
    body = _body(ptx, opened)
    for name, targets in re.findall(r"(\$?[\w$]+):\s*\.branchtargets([^;]*);", body):
        kernel.tables[name] = [target.strip() for target in targets.split(",")]
    body = re.sub(r"\$?[\w$]+:\s*\.branchtargets[^;]*;", "", body)
    try:
        for statement in _statements(body):
            _Statement(kernel, statement).write()
    except Unknown as error:
        kernel.unknown = str(error)
    return kernel


def _body(ptx: str, opened: int) -> str:
    depth = 0
    for at in range(opened, len(ptx)):
        depth += {"{": 1, "}": -1}.get(ptx[at], 0)
        if not depth:
            return ptx[opened + 1 : at]
    raise Unknown("a body does not end")


def _statements(body: str) -> list[str]:
    """Instructions, declarations, labels and braces of scopes."""
    found = []
    body = re.sub(r"^\s*\.(loc|pragma|file)\b[^\n]*$", "", body, flags=re.M)
    for piece in re.split(r"(;)", body):
        text = piece.strip()
        while text and text != ";":
            scope = re.match(r"[{}]", text)
            label = re.match(r"(\$?[\w$]+)\s*:(?!:)", text)
            if scope or label:
                part = (scope or label).group(0)  # type: ignore[union-attr]
                found.append(part)
                text = text[len(part) :].strip()
            else:
                found.append(re.sub(r"\s+", " ", text))
                break
    return found


def _split(operands: str) -> list[str]:
    """Operands, with those in braces or brackets as one."""
    parts, depth, last = [], 0, 0
    for at, character in enumerate(operands):
        depth += (character in "{[(") - (character in "}])")
        if character == "," and not depth:
            parts.append(operands[last:at].strip())
            last = at + 1
    return [*parts, operands[last:].strip()]


def _width(kind: str) -> int:
    """Bits of a type."""
    found = re.fullmatch(r"[usbf](\d+)", kind)
    if not found:
        raise Unknown(f"a type {kind}")
    return int(found.group(1))


class _Statement:
    """One statement of PTX on its way into the lines of its kernel."""

    def __init__(self, kernel: Kernel, text: str) -> None:
        self.kernel, self.text = kernel, text

    def write(self) -> None:
        text, lines = self.text, self.kernel.lines
        if text in "{}":
            lines.append(text)
        elif text.endswith(":"):
            lines.append(f"{_label(text[:-1].strip())}:;")
        elif text.startswith("."):
            self._declare()
        else:
            guard = re.match(r"@(!?)(%?[\w$]+)\s+", text)
            operation = text[guard.end() :] if guard else text
            code = self._instruction(operation)
            lines.append(
                f"if ({guard.group(1)}{self._value(guard.group(2))}) {{ {code} }}"
                if guard
                else code
            )

    def _declare(self) -> None:
        kernel, text = self.kernel, self.text
        register = re.match(r"\.reg \.(\w+) (.*)", text)
        local = re.match(r"\.local \.align (\d+) \.b8 ([\w$]+)\[(\d+)\]", text)
        if register:
            kind = "uint8_t" if register[1] == "pred" else f"uint{_width(register[1])}_t"
            for name in _split(register[2]):
                many = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
                names = [f"{many[1]}{n}" for n in range(int(many[2]))] if many else [name]
                kernel.registers.update(names)
                kernel.lines.append(f"{kind} {', '.join(f'{_name(one)} = 0' for one in names)};")
        elif local:
            kernel.local[local[2]] = f"local_{_name(local[2])}"
            kernel.lines.append(
                f"char {kernel.local[local[2]]}[{local[3]}] __attribute__((aligned({local[1]})));"
            )
        elif not text.startswith(".shared"):
            raise Unknown(text)

    # --- operands

    def _value(self, operand: str) -> str:
        """An operand as an unsigned integer in C."""
        kernel = self.kernel
        special = re.fullmatch(r"%(tid|ntid|ctaid|nctaid)\.([xyz])", operand)
        if special:
            axis = "xyz".index(special[2])
            return {
                "tid": f"thread[{axis}]", "ctaid": f"block[{axis}]",
                "ntid": f"launch->block[{axis}]", "nctaid": f"launch->grid[{axis}]",
            }[special[1]]  # fmt: skip
        if operand == "%laneid":
            return "(number % 32)"
        if operand == "%warpid":
            return "(number / 32)"
        if operand.startswith("!"):
            return f"!{self._value(operand[1:])}"
        if operand in kernel.registers:
            return _name(operand)
        if operand in kernel.shared:
            return f"{kernel.shared[operand]}u"
        if operand in kernel.local:
            return f"(uint64_t)(uintptr_t){kernel.local[operand]}"
        if operand in kernel.params:
            number = list(kernel.params).index(operand)
            return f"(uint64_t)(uintptr_t)launch->params[{number}]"
        if re.fullmatch(r"0[xX][0-9a-fA-F]+U?", operand):
            return operand.rstrip("U") + "ull"
        if re.fullmatch(r"-?\d+U?", operand):
            return f"((uint64_t){operand.rstrip('U')}ll)"
        raise Unknown(f"an operand {operand}, in: {self.text}")

    def _unsigned(self, operand: str, bits: int) -> str:
        return f"((uint{bits}_t)({self._value(operand)}))"

    def _signed(self, operand: str, bits: int) -> str:
        return f"((int{bits}_t)({self._value(operand)}))"

    def _typed(self, operand: str, kind: str) -> str:
        """The operand with the sign of this type."""
        bits = _width(kind)
        if kind[0] == "f":
            raise Unknown(f"floating point: {self.text}")
        return self._signed(operand, bits) if kind[0] == "s" else self._unsigned(operand, bits)

    # --- instructions

    def _instruction(self, text: str) -> str:
        operation, _, rest = text.partition(" ")
        words = operation.split(".")
        name, operands = words[0], _split(rest) if rest else []
        if name in _NOTHING:
            return ";"
        if name in ("ret", "exit"):
            return "goto ended;"
        translation = getattr(self, f"_{name}", None)
        if translation is None and name in {**_ARITHMETIC, **_BITS, "min": "", "max": ""}:
            translation = self._two
        if translation is None:
            raise Unknown(text)
        code: str = translation(words[1:], operands)
        return code

    def _set(self, target: str, expression: str) -> str:
        return f"{_name(target)} = {expression};"

    def _two(self, words: list[str], operands: list[str]) -> str:
        """add.s32 and its like."""
        name = self._name_of_operation()
        target, first, second = operands
        kind = words[-1]
        if kind == "pred":
            return self._set(target, f"({self._value(first)} {_BITS[name]} {self._value(second)})")
        bits = _width(kind)
        a, b = self._typed(first, kind), self._typed(second, kind)
        if name in ("min", "max"):
            return self._set(target, f"{a} {'<' if name == 'min' else '>'} {b} ? {a} : {b}")
        if name == "mul" and "wide" in words:
            wide = f"{'' if kind[0] == 's' else 'u'}int{2 * bits}_t"
            return self._set(target, f"({wide}){a} * ({wide}){b}")
        if name == "mul" and "hi" in words:
            wide = f"{'' if kind[0] == 's' else 'unsigned '}__int128"
            return self._set(target, f"(uint{bits}_t)((({wide}){a} * ({wide}){b}) >> {bits})")
        if name in ("div", "rem"):  # a division by zero has some result, and is no error
            return self._set(target, f"{b} == 0 ? -1 : {a} {_ARITHMETIC[name]} {b}")
        # Unsigned, so that an overflow wraps.
        a, b = self._unsigned(first, bits), self._unsigned(second, bits)
        return self._set(target, f"{a} {ARITHMETIC_AND_BITS[name]} {b}")

    def _name_of_operation(self) -> str:
        return re.sub(r"^@!?%?[\w$]+\s+", "", self.text).partition(" ")[0].split(".")[0]

    def _mad(self, words: list[str], operands: list[str]) -> str:
        target, first, second, third = operands
        kind = words[-1]
        bits = _width(kind)
        a, b = self._typed(first, kind), self._typed(second, kind)
        if "wide" in words:
            wide = f"{'' if kind[0] == 's' else 'u'}int{2 * bits}_t"
            product = f"(uint{2 * bits}_t)(({wide}){a} * ({wide}){b})"
            return self._set(target, f"{product} + {self._unsigned(third, 2 * bits)}")
        a, b = self._unsigned(first, bits), self._unsigned(second, bits)
        return self._set(target, f"{a} * {b} + {self._unsigned(third, bits)}")

    def _mov(self, words: list[str], operands: list[str]) -> str:
        target, source = operands
        if target.startswith("{"):  # unpacks
            parts = _split(target[1:-1])
            bits = _width(words[-1]) // len(parts)
            packed = self._unsigned(source, _width(words[-1]))
            return " ".join(
                self._set(part, f"(uint{bits}_t)({packed} >> {n * bits})")
                for n, part in enumerate(parts)
                if part != "_"
            )
        if source.startswith("{"):  # packs
            parts = _split(source[1:-1])
            bits, whole = _width(words[-1]) // len(parts), _width(words[-1])
            pieces = (
                f"((uint{whole}_t){self._unsigned(part, bits)} << {n * bits})"
                for n, part in enumerate(parts)
            )
            return self._set(target, " | ".join(pieces))
        return self._set(target, self._value(source))

    def _cvt(self, words: list[str], operands: list[str]) -> str:
        target, source = operands
        if len(words) != 2:
            raise Unknown(self.text)
        onto, kind = words
        value = self._typed(source, kind)
        return self._set(target, f"(uint{_width(onto)}_t)(int64_t){value}")

    def _cvta(self, words: list[str], operands: list[str]) -> str:
        if "shared" in words:
            raise Unknown(self.text)
        return self._set(operands[0], self._value(operands[1]))

    def _setp(self, words: list[str], operands: list[str]) -> str:
        target, first, second, *also = operands
        kind = words[-1]
        compared = (
            f"{self._typed(first, kind)} {_COMPARISONS[words[0]]} {self._typed(second, kind)}"
        )
        if also:
            compared = f"({compared}) {_BITS[words[1]]} {self._value(also[0])}"
        targets = target.split("|")
        code = self._set(targets[0], compared)
        if len(targets) > 1:
            code += f" {self._set(targets[1], f'!{_name(targets[0])}')}"
        return code

    def _selp(self, words: list[str], operands: list[str]) -> str:
        target, first, second, chosen = operands
        return self._set(
            target, f"{self._value(chosen)} ? {self._value(first)} : {self._value(second)}"
        )

    def _not(self, words: list[str], operands: list[str]) -> str:
        sign = "!" if words[-1] == "pred" else "~"
        return self._set(operands[0], f"{sign}{self._value(operands[1])}")

    def _neg(self, words: list[str], operands: list[str]) -> str:
        return self._set(operands[0], f"-{self._typed(operands[1], words[-1])}")

    def _abs(self, words: list[str], operands: list[str]) -> str:
        value = self._typed(operands[1], words[-1])
        return self._set(operands[0], f"{value} < 0 ? -{value} : {value}")

    def _shl(self, words: list[str], operands: list[str]) -> str:
        target, value, by = operands
        bits, count = _width(words[-1]), self._unsigned(by, 32)
        return self._set(
            target, f"{count} >= {bits} ? 0 : ({self._unsigned(value, bits)} << {count})"
        )

    def _shr(self, words: list[str], operands: list[str]) -> str:
        target, value, by = operands
        kind, count = words[-1], self._unsigned(by, 32)
        bits, typed = _width(kind), self._typed(value, kind)
        beyond = f"({typed} < 0 ? -1 : 0)" if kind[0] == "s" else "0"
        return self._set(target, f"{count} >= {bits} ? {beyond} : ({typed} >> {count})")

    def _shf(self, words: list[str], operands: list[str]) -> str:
        target, low, high, by = operands
        pair = f"((uint64_t){self._unsigned(high, 32)} << 32 | {self._unsigned(low, 32)})"
        count = self._unsigned(by, 32)
        count = f"({count} & 31)" if "wrap" in words else f"({count} > 32 ? 32 : {count})"
        if words[0] == "l":
            return self._set(target, f"(uint32_t)(({pair} << {count}) >> 32)")
        return self._set(target, f"(uint32_t)({pair} >> {count})")

    def _bfe(self, words: list[str], operands: list[str]) -> str:
        target, value, start, length = operands
        kind = words[-1]
        bits = _width(kind)
        a, first, count = (
            self._unsigned(value, bits), self._unsigned(start, 32), self._unsigned(length, 32),
        )  # fmt: skip
        function = f"bfe_{'s' if kind[0] == 's' else 'u'}{bits}"
        return self._set(target, f"{function}({a}, {first}, {count})")

    def _prmt(self, words: list[str], operands: list[str]) -> str:
        target, first, second, chosen = operands
        if words != ["b32"]:
            raise Unknown(self.text)
        a, b, c = (self._unsigned(operand, 32) for operand in (first, second, chosen))
        return self._set(target, f"bytes_chosen({a}, {b}, {c})")

    def _bra(self, words: list[str], operands: list[str]) -> str:
        return f"goto {_label(operands[0])};"

    def _brx(self, words: list[str], operands: list[str]) -> str:
        index, table = operands
        cases = (
            f"case {n}: goto {_label(target)};"
            for n, target in enumerate(self.kernel.tables[table])
        )
        return f"switch ({self._unsigned(index, 32)}) {{ {' '.join(cases)} }}"

    # --- memory

    def _address(self, operand: str) -> str:
        found = re.fullmatch(r"\[\s*(%?[\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if not found:
            raise Unknown(f"an address {operand}, in: {self.text}")
        return f"((uint64_t){self._value(found[1])} + ({found[2] or 0}))"

    def _ld(self, words: list[str], operands: list[str]) -> str:
        return self._access(words, operands[0], operands[1], writes=False)

    def _st(self, words: list[str], operands: list[str]) -> str:
        return self._access(words, operands[1], operands[0], writes=True)

    def _access(self, words: list[str], values: str, address: str, *, writes: bool) -> str:
        kind = words[-1]
        several = _split(values[1:-1]) if values.startswith("{") else [values]
        bits, at = _width(kind), self._address(address)
        nbytes = bits // 8 * len(several)
        signed = kind[0] == "s" and not writes
        cell = f"{'' if signed else 'u'}int{bits}_t"
        if "shared" in words or "shared::cta" in words:
            check = f"IN_SHARED(at, {nbytes});"
            cells = [f"*({cell} *)(shared + at + {n * bits // 8})" for n in range(len(several))]
        else:
            local = "local" in words or "param" in words
            space_known = local or "global" in words
            check = "" if local else f"ACCESS(at, {nbytes}, {int(writes)});"
            if not space_known and self.kernel.local:
                raise Unknown(f"an address of any kind: {self.text}")
            cells = [f"*({cell} *)(uintptr_t)(at + {n * bits // 8})" for n in range(len(several))]
        moves = [
            f"{place} = {self._unsigned(value, bits)};"
            if writes
            else ("" if value == "_" else self._set(value, place))
            for value, place in zip(several, cells, strict=True)
        ]
        return f"{{ uint64_t at = {at}; {check} {' '.join(moves)} }}"

    # --- threads that wait for each other

    def _bar(self, words: list[str], operands: list[str]) -> str:
        self.kernel.waits = True
        if words[:1] == ["warp"]:
            return "together(WARP);"
        if words[0] not in ("sync", "cta") or len(operands) > 1:
            raise Unknown(self.text)
        return "together(BLOCK);"

    _barrier = _bar

    def _shfl(self, words: list[str], operands: list[str]) -> str:
        self.kernel.waits = True
        target, value, by, clamp, *_members = operands
        targets = target.split("|")
        code = (
            f"{{ uint32_t by = {self._unsigned(by, 32)}, lane = number % 32, valid; "
            f"uint32_t got = shuffled({self._unsigned(value, 32)}, {_SHUFFLES[words[1]]}, "
            f"{self._unsigned(clamp, 32)}, {int(words[1] == 'up')}, &valid); "
            f"{self._set(targets[0], 'got')}"
        )
        if len(targets) > 1:
            code += f" {self._set(targets[1], 'valid')}"
        return code + " }"

    def _redux(self, words: list[str], operands: list[str]) -> str:
        self.kernel.waits = True
        target, value, members = operands
        how = {"add": "a", "min": "m", "max": "M", **_BITS}[words[1]]
        word, lanes = self._unsigned(value, 32), self._unsigned(members, 32)
        signed = int(words[-1][0] == "s")
        return self._set(target, f"reduced({word}, {lanes}, '{how}', {signed})")

    def _ldmatrix(self, words: list[str], operands: list[str]) -> str:
        """Matrices of 8 x 8 numbers of 16 bits: their rows' addresses are said by 8 threads each."""
        if "trans" in words or not any(word.startswith("shared") for word in words):
            raise Unknown(self.text)
        self.kernel.waits = True
        several = _split(operands[0][1:-1])
        rows = f"{{ uint32_t at = (uint32_t){self._address(operands[1])};"
        for n, value in enumerate(several):
            row = f"said_by(at, {8 * n} + number % 32 / 4)"
            rows += f" {{ uint32_t row = {row} + number % 4 * 4; IN_SHARED(row, 4);"
            rows += f" {self._set(value, '*(uint32_t *)(shared + row)')} }}"
        return rows + " }"


ARITHMETIC_AND_BITS = {**_ARITHMETIC, **_BITS}


def _name(register: str) -> str:
    """A register's name in C."""
    return "r_" + re.sub(r"\W", "_", register.lstrip("%"))


def _label(name: str) -> str:
    return "l_" + re.sub(r"\W", "_", name)


def _module(kernels: list[Kernel], shared_bytes: int) -> str:
    parts = [
        "/* Written by ptx.py. */",
        f"#define STATIC_SHARED {shared_bytes}",
        '#include "translated.h"',
    ]
    rows = []
    for number, kernel in enumerate(kernels):
        if kernel.unknown:
            rows.append(f'{{"{kernel.name}", 0, 0, 0, {json.dumps(kernel.unknown)}}},')
            continue
        sizes = list(kernel.params.values())
        parts += [
            "#undef NAME",
            f'#define NAME "{kernel.name}"',
            f"static void thread_{number}(THREAD) {{",
            *kernel.lines,
            "ended:;",
            "}",
            f"static const uint32_t params_{number}[] = {{{', '.join(map(str, sizes)) or '0'}}};",
            f"static void run_{number}(const struct stand_in_launch *launch) {{",
            f"run_blocks{'_of_fibres' if kernel.waits else ''}(launch, thread_{number});",
            "}",
        ]
        rows.append(f'{{"{kernel.name}", run_{number}, {len(sizes)}, params_{number}, 0}},')
    parts += [
        '__attribute__((visibility("default"))) const struct stand_in_kernel stand_in_kernels[] = {',
        *rows,
        "{0, 0, 0, 0, 0}};",
    ]
    return "\n".join(parts) + "\n"


def compiled(ptx: str, kept: Path) -> Path:
    """The shared object of this module, from the folder `kept` where its content is known."""
    header = (HERE / "native/translated.h").read_text() + (HERE / "native/kernel.h").read_text()
    content = "\n".join((ptx, header, Path(__file__).read_text()))
    digest = hashlib.sha256(content.encode()).hexdigest()[:32]
    made = kept / f"{digest}.so"
    if made.exists():
        return made
    kept.mkdir(parents=True, exist_ok=True)
    source, partial = kept / f"{digest}.{os.getpid()}.c", kept / f"{digest}.{os.getpid()}.so"
    source.write_text(translate(ptx))
    subprocess.run(
        ["gcc", "-std=gnu11", "-O1", "-w", "-fPIC", "-shared", "-fvisibility=hidden", "-fwrapv", "-fno-strict-aliasing",
         f"-I{HERE / 'native'}", str(source), "-o", str(partial)],
        check=True,
    )  # fmt: skip
    source.unlink()
    partial.rename(made)
    return made


def _version() -> str:
    """As Triton asks for it: it compiles again when this changes."""
    content = b"".join(
        path.read_bytes() for path in [*sorted((HERE / "native").glob("*.h")), Path(__file__)]
    )
    mark = hashlib.sha256(content).hexdigest()[:16]
    return (
        "ptx.py of the CUDA stand-in: PTX to C for a CPU\n"
        f"Cuda compilation tools, release {CUDA_VERSION}, V{CUDA_VERSION}.0\nBuild {mark}"
    )


def main(arguments: list[str]) -> int:
    """As `ptxas`: one source, `-o` and options that do not matter here."""
    if "--version" in arguments:
        print(_version())
        return 0
    target = arguments[arguments.index("-o") + 1]
    [source] = [
        word
        for word in arguments
        if not word.startswith("-") and word != target and Path(word).is_file()
    ]
    kept = Path(os.environ.get("CUDA_STAND_IN_KERNELS") or HERE / "kernels")
    try:
        shutil.copyfile(compiled(Path(source).read_text(), kept), target)
    except Unknown as error:
        print(f"cuda stand-in: PTX that is not translated: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
