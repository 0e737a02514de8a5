"""Writes docs/errors.md, every error that hapi raises, read off the code, and docs/errors-by-call.md, what each public
call says of wrong arguments, which are those of tests/wrong_arguments.py.

    python tools/make_errors_page.py            writes the pages
    python tools/make_errors_page.py --check    says whether they are up to date

A message has three parts: what was received, why that cannot work, what to write. Values that a message is filled in
with stand in braces.
"""

import ast
import importlib
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
PAGE_BY_CALL = ROOT / "docs" / "errors-by-call.md"
KINDS = ("TypeError", "ValueError", "RuntimeError", "OSError", "FileNotFoundError", "ImportError", "AttributeError",
         "UsageError", "SpawnError", "IndexError")  # fmt: skip
# The first sentence of what to write starts with one of these.
CURE = re.compile(
    r"(?:^|[.:;,}]) +(?=(?:Or|Bring|Write|Pass|Give|Use|Leave|Make|Call|Run|Keep|Set|Choose|Say|Put|Derive|Start|Move|"
    r"Install|Check|Resume|Let|Correct|Unwrap|Pick|Train|Draw|Load|Save|Name|Add|Free|Wait|Raise|Lower|Remove|Define|"
    r"Wrap|Return|Export|Create|Change|Look|Build|Split|Take|To start anew|It takes|Known ones|Hooks are)\b)"
)

HEAD = """# Errors

Faults are found before the first step where they can be, on every process, and nothing on disk is touched. Each message
says what was received, why it cannot work, and what to write instead.

This page lists all of them, by place in the code; `tools/make_errors_page.py` makes it. What a message is filled in
with stands in braces. To find one, search for words of yours that are not values. What each public call says of an
argument of a wrong kind is on [a page of its own](errors-by-call.md).

"""
HEAD_BY_CALL = """# Errors by call

What the public calls say of wrong arguments, as the tests make them say it: the first wrong value that they try for an
argument. [All errors](errors.md) are on another page.

"""


@dataclass(frozen=True)
class Fault:
    """A message: where it is made, of which class, and its three parts."""

    place: str
    kind: str
    text: str


def sources() -> list[tuple[str, Path]]:
    """Module name and file, of all that is installed."""
    found = [
        (prefix + ".".join(path.relative_to(top).with_suffix("").parts), path)
        for top, folder, prefix in ((ROOT, "hapi", ""), (ROOT, "datasets", "hapi."))
        for path in sorted((top / folder).rglob("*.py"))
        if not path.is_relative_to(ROOT / "hapi" / "datasets")
    ]
    return [(name.removesuffix(".__init__"), path) for name, path in found]


def text_of(node: ast.expr, module: str) -> str | None:
    """A message as it is written: constants as they are, values in braces. None: it is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else filled(part, module) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left, module), text_of(node.right, module)
        return None if left is None else left + (right or "{...}")
    if isinstance(node, ast.IfExp):
        return text_of(node.body, module) or text_of(node.orelse, module)
    if isinstance(node, ast.Name):
        value = getattr(importlib.import_module(module), node.id, None)
        return value if isinstance(value, str) else None
    return None


def filled(part: ast.FormattedValue, module: str) -> str:
    """What stands in a message for a value: a constant of the module as it is, else the expression, if it is short."""
    constant = text_of(part.value, module) if isinstance(part.value, ast.Name) else None
    if constant is not None:
        return constant
    written = ast.unparse(part.value)
    named = re.search(r"type\(([\w.]+)\)\.__name__", written)
    if named:
        return "{type of " + named[1].split(".")[-1] + "}" if named[1] != "self" else "{class}"
    return "{" + (written if re.fullmatch(r"[\w.]+", written) else "...") + "}"


def faults(module: str, path: Path) -> list[Fault]:
    found: list[Fault] = []

    def visit(node: ast.AST, owner: str) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            owner = f"{owner}.{node.name}" if owner else node.name
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS and node.args:
            text = text_of(node.args[0], module)
            if text and " " in text:
                found.append(Fault(owner or "(module)", node.func.id, " ".join(text.split())))
        for child in ast.iter_child_nodes(node):
            visit(child, owner)

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def parts(text: str) -> tuple[str, str, str]:
    """What was received, why it cannot work, what to write; what a message leaves out is empty."""
    match = CURE.search(text)
    rest, cure = (text[: match.start() + 1], text[match.end() :]) if match else (text, "")
    comma = re.search(r", (?=which|with which|but|so|of which|where|whose|since|in which|and |that |as )|: ", rest)
    received, why = (rest[: comma.start()], rest[comma.end() :]) if comma else (rest, "")
    return received.rstrip(".:;, "), why.rstrip(".:;, "), cure


def cell(text: str) -> str:
    """Text for a cell of a table, in which no character means anything."""
    return re.sub(r"([\\|*_<>\[\]`{}#])", r"\\\1", text).replace("\\{", "{").replace("\\}", "}")


def page() -> str:
    sections = []
    for module, path in sources():
        found = sorted(set(faults(module, path)), key=lambda fault: (fault.place, fault.kind, fault.text))
        if not found:
            continue
        rows = [
            f"| {' | '.join(cell(part) for part in parts(fault.text))} | `{fault.kind}` in `{fault.place}` |"
            for fault in found
        ]
        head = f"## `{module}`\n\n| received | why it cannot work | what to write | |\n| --- | --- | --- | --- |\n"
        sections.append(head + "\n".join(rows) + "\n")
    return HEAD + "\n".join(sections)


def page_by_call() -> str:
    """Made by making the calls."""
    sys.path.insert(0, str(ROOT / "tests"))
    from wrong_arguments import CASES, make

    rows: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        # Nothing is written; if it were, then there.
        os.chdir(folder)
        for name, argument, value in CASES:
            if argument in rows.setdefault(name, {}):
                continue
            try:
                make(name, argument, value)
            except (TypeError, ValueError, RuntimeError) as error:
                text = " ".join(str(error).split())
                # An object's address is another one each time, and so are numbers that are drawn.
                if " at 0x" not in text and "tensor(" not in text:
                    kind = type(error).__name__
                    rows[name][argument] = f"| `{argument}` | {' | '.join(map(cell, parts(text)))} | `{kind}` |"
        os.chdir(ROOT)
    head = "| argument | received | why it cannot work | what to write | |\n| --- | --- | --- | --- | --- |\n"
    sections = [f"## `{name}`\n\n{head}" + "\n".join(found.values()) + "\n" for name, found in rows.items() if found]
    return HEAD_BY_CALL + "\n".join(sections)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for path, made in ((PAGE, page()), (PAGE_BY_CALL, page_by_call())):
        if "--check" not in sys.argv:
            path.write_text(made, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != made:
            sys.exit(f"docs/{path.name} is not what the code says. Run python tools/make_errors_page.py")
