"""The stand-ins for seq, grep, awk, wc, tr, cut, head and tail: from arguments and text to text. Only the forms that launch scripts use."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fuligo.importer.limits import Budget
from fuligo.importer.patterns import PatternError, grep_pattern, matches, search

_MAX_NUMBERS = 100_000


class UsageError(Exception):
    """Arguments that a stand-in does not understand; the text says what it does."""


def seq(arguments: Sequence[str], budget: Budget) -> str:
    """`seq LAST`, `seq FIRST LAST`, `seq FIRST STEP LAST`, integers; `-s SEPARATOR`."""
    rest, separator = list(arguments), "\n"
    if rest[:1] == ["-s"]:
        separator, rest = "".join(rest[1:2]), rest[2:]
    if not 1 <= len(rest) <= 3 or not all(re.fullmatch(r"-?\d{1,18}", number) for number in rest):
        raise UsageError("seq takes one to three integers")
    numbers = [int(number) for number in rest]
    first, last = (1, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[-1])
    step = numbers[1] if len(numbers) == 3 else 1
    if step == 0:
        raise UsageError("seq's step must not be 0")
    count = max(0, (last - first) // step + 1)
    if count > _MAX_NUMBERS:
        raise UsageError(f"seq would make {count:,} numbers, more than {_MAX_NUMBERS:,}")
    budget.spend(count * 20)
    text = separator.join(str(first + step * index) for index in range(count))
    return text + "\n" if count else ""


def awk(arguments: Sequence[str], text: str) -> str:
    """`awk '{print $N}'`, `{print $NF}`, `{print}`, with `-F SEPARATOR` and a `NR==N` or `NF` in front."""
    rest, separator = list(arguments), None
    if rest[:1] == ["-F"]:
        separator, rest = "".join(rest[1:2]), rest[2:]
    elif rest and rest[0].startswith("-F"):
        separator, rest = rest[0][2:], rest[1:]
    program = re.fullmatch(r"\s*(?:NR\s*==\s*(\d+)|(NF))?\s*\{\s*print(?:\s*\$(\d{1,6}|NF))?;?\s*\}\s*", rest[0] if rest else "")
    if program is None or len(rest) != 1:
        raise UsageError("awk is understood with '{print $1}' alone ($N, $NF, -F, NR==N)")
    wanted_line, only_filled, column = program.groups()
    found: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        columns = line.split(separator or None)
        if (wanted_line and number != int(wanted_line)) or (only_filled and not columns):
            continue
        if column in (None, "0"):
            found.append(line)
        else:
            index = len(columns) if column == "NF" else int(column)
            found.append(columns[index - 1] if 0 < index <= len(columns) else "")
    return "".join(line + "\n" for line in found)


def grep(arguments: Sequence[str], text: str, budget: Budget) -> tuple[str, int]:
    """What `grep` prints and its status; options -o -v -c -q -i -E -F, one simple pattern."""
    options, rest = _options(arguments, "ovcqiEF", "grep")
    if len(rest) != 1:
        raise UsageError("grep is understood with one pattern")
    try:
        pattern = grep_pattern(rest[0].removeprefix("^") if "F" not in options else rest[0], "E" in options, "F" in options, "i" in options)
    except PatternError as error:
        raise UsageError(f"grep: {error}") from None
    at_start = "F" not in options and rest[0].startswith("^")
    found: list[str] = []
    for line in text.splitlines():
        budget.spend_on_pattern(len(line))
        spans = [span for span in search(pattern, line) if not at_start or span[0] == 0]
        hit = bool(spans) or matches(pattern, "")
        if hit == ("v" in options):
            continue
        found += [line[start:end] for start, end in spans] if "o" in options else [line]
    status = int(not found)
    if "q" in options:
        return "", status
    return (f"{len(found)}\n" if "c" in options else "".join(line + "\n" for line in found)), status


def wc(arguments: Sequence[str], text: str) -> str:
    """`wc -l`, `-w`, `-c`."""
    match list(arguments):
        case ["-l"]:
            return f"{text.count(chr(10))}\n"
        case ["-w"]:
            return f"{len(text.split())}\n"
        case ["-c"]:
            return f"{len(text.encode())}\n"
    raise UsageError("wc is understood with -l, -w or -c")


def tr(arguments: Sequence[str], text: str) -> str:
    """`tr A B` for sets of single characters of equal length, and `tr -d A`."""
    sets = [argument.replace("\\n", "\n").replace("\\t", "\t") for argument in arguments]
    if len(sets) != 2 or "-" in "".join(sets[1:]) or "[" in "".join(sets):
        raise UsageError("tr is understood with two sets of characters, such as `tr ',' '\\n'`, or with -d and one")
    if sets[0] == "-d":
        return "".join(character for character in text if character not in sets[1])
    if len(sets[0]) != len(sets[1]) or "-" in sets[0]:
        raise UsageError("tr is understood with two sets of equally many characters, without ranges")
    return text.translate(str.maketrans(sets[0], sets[1]))


def cut(arguments: Sequence[str], text: str) -> str:
    """`cut -d X -f N`."""
    options = " ".join(arguments)
    match = re.fullmatch(r"-d\s*(\S| ) -f\s*(\d{1,6})", options)
    if match is None:
        raise UsageError("cut is understood with -d CHARACTER -f NUMBER")
    index = int(match[2]) - 1
    lines = [line.split(match[1]) for line in text.splitlines()]
    return "".join((columns[index] if index < len(columns) else "" if len(columns) > 1 else columns[0]) + "\n" for columns in lines)


def ends_of(name: str, arguments: Sequence[str], text: str) -> str:
    """`head` and `tail` with `-n N` or `-N`."""
    match = re.fullmatch(r"-n?\s*(\d{1,9})", " ".join(arguments)) if arguments else None
    if arguments and match is None:
        raise UsageError(f"{name} is understood with -n NUMBER")
    count = int(match[1]) if match else 10
    lines = text.splitlines(keepends=True)
    return "".join(lines[:count] if name == "head" else lines[max(0, len(lines) - count) :])


def printf(form: str, values: Sequence[str], budget: Budget) -> str:
    """printf's %s, %d, %0Nd, %% and escapes; the format is used again while values are left."""
    holes = re.findall(r"%(?:0?\d{0,3}[sd]|%)", form)
    if form.count("%") != sum(hole.count("%") for hole in holes):
        raise UsageError(f"printf understands %s, %d and %%, not {form!r}")
    num_values = sum(hole != "%%" for hole in holes)
    rest, found = list(values), ""
    while True:
        taken, rest = rest[:num_values], rest[num_values:]
        budget.spend(len(form) + sum(map(len, taken)) + 1000)
        found += _filled(form, taken)
        if not rest or not num_values:
            return found


def _filled(form: str, values: list[str]) -> str:
    remaining = iter(values)
    return re.sub(r"%(0?\d{0,3})([sd])|%%", lambda m: "%" if m[0] == "%%" else _formatted(m[1], m[2], next(remaining, "")), _unescape(form))


def _formatted(width: str, kind: str, value: str) -> str:
    if kind == "s":
        return value.rjust(int(width or 0))
    if not re.fullmatch(r"-?\d{0,18}", value):
        raise UsageError(f"printf %d: {value!r} is no integer")
    return f"{int(value or 0):{width}d}"


def _unescape(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t").replace('\\"', '"').replace("\\\\", "\\")


def _options(arguments: Sequence[str], known: str, name: str) -> tuple[set[str], list[str]]:
    options: set[str] = set()
    rest = list(arguments)
    while rest and re.fullmatch(r"-[a-zA-Z]+", rest[0]):
        options.update(rest.pop(0)[1:])
    if rest[:1] in (["--"], ["-e"]):
        rest.pop(0)
    if options - set(known):
        raise UsageError(f"{name} is understood with the options {', '.join('-' + option for option in known)}")
    return options, rest
