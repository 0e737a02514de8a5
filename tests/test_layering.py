"""The rules of CONTRIBUTING.md that a reader of the code relies on, read off the code itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Imports run downwards. Entries of one line do not import each other; a package is one entry.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("hapi",),
    ("hapi.model", "hapi.sizing", "hapi.debug"),
    ("hapi.tuning",),
    ("hapi.session", "hapi.single", "hapi.flop_count"),
    ("hapi.loop", "hapi.engine", "hapi.report", "hapi.layer_table", "hapi.export", "hapi.trial"),
    ("hapi.resuming",),
    ("hapi.setup", "hapi.agreement", "hapi.predictions", "hapi.cursor", "hapi.draws", "hapi.heap"),
    ("hapi.step", "hapi.data", "hapi.callbacks"),
    ("hapi.outcome",),
    ("hapi.metrics", "hapi.checkpoint", "hapi.objective", "hapi.precision", "hapi.scheduling"),
    ("hapi.optimizers", "hapi.arguments", "hapi.tensorfile", "hapi.pairs", "hapi.fitting", "hapi.scores"),
    ("hapi.checks", "hapi.files", "hapi.modes", "hapi.restore", "hapi.datasets", "hapi.signals", "hapi.writer"),
    ("hapi.batch", "hapi.distributed"),
    ("hapi.data.order",),  # arithmetic that DistributedBatchSampler shares with the feeds
    ("hapi.data.permutation",),
    ("hapi.device", "hapi.rng", "hapi.archive", "hapi.compiling"),
    ("hapi.distributed.launchers", "hapi._version", "hapi.kinds", "hapi.refused"),
    ("hapi.distributed.leftovers", "hapi.elsewhere"),
    ("hapi.distributed.environment",),
)
LAYER = {name: depth for depth, names in enumerate(LAYERS) for name in names}

# The process group, how it sends objects, and its wrapper; the launcher is built on torch's elastic agent.
SPEAK_TO_TORCH_DISTRIBUTED = (
    "hapi.distributed.group", "hapi.distributed.objects", "hapi.distributed.parallel", "hapi.distributed.launch",
)  # fmt: skip
LONGEST_FILE = 400
LONGEST_FUNCTION = 40

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Definition = FunctionNode | ast.ClassDef


def sources() -> dict[str, Path]:
    """Module name -> file, of all that is installed."""
    found = {}
    for folder, prefix in ((ROOT / "hapi", ""), (ROOT / "datasets", "hapi.")):
        for path in folder.rglob("*.py"):
            if path.is_relative_to(ROOT / "hapi" / "datasets"):
                continue  # the link to datasets/, which is read itself
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[prefix + ".".join(part for part in parts if part != "__init__")] = path
    return found


SOURCES = sources()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}
modules = pytest.mark.parametrize("module", sorted(TREES))


def layer_entry(module: str) -> str:
    """The entry of LAYERS that a module belongs to: itself, else the nearest package around it but `hapi`."""
    name = module
    while name not in LAYER:
        name = name.rpartition(".")[0]
        if name in ("", "hapi"):
            raise AssertionError(f"{module} has no place in LAYERS: add it there and to CONTRIBUTING.md's module map")
    return name


def at_run_time(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        children = node.orelse if guarded else ast.iter_child_nodes(node)
        waiting.extend(children)


def imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every module imported when the code runs, and the line; `from a import b` may mean the module a.b."""
    for node in at_run_time(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute in this project"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in SOURCES or node.module == "torch" else str(node.module)), node.lineno


def definitions(tree: ast.Module) -> Iterator[Definition]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node


def place(module: str, line: int) -> str:
    return f"{SOURCES[module].relative_to(ROOT)}:{line}"


@modules
def test_imports_run_downwards(module: str) -> None:
    own = layer_entry(module)
    for target, line in imports(TREES[module]):
        if target.split(".")[0] == "datasets":
            raise AssertionError(f"{place(module, line)} imports {target}: write hapi.{target}")
        if target.split(".")[0] != "hapi":
            continue
        entry = layer_entry(target)
        assert entry == own or LAYER[entry] > LAYER[own], (
            f"{place(module, line)} imports {target}, which lies above or beside {own} (LAYERS in {__file__})"
        )


@modules
def test_one_place_speaks_to_torch_distributed(module: str) -> None:
    if f"{module}.".startswith(tuple(f"{name}." for name in SPEAK_TO_TORCH_DISTRIBUTED)):
        return
    found = [line for target, line in imports(TREES[module]) if f"{target}.".startswith("torch.distributed.")]
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            found.append(node.lineno)
    assert not found, f"{place(module, found[0])}: ask hapi.distributed.group instead of torch.distributed"


@pytest.mark.parametrize("module", ["hapi.model", "hapi.loop"])
def test_the_loop_knows_no_ranks(module: str) -> None:
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Compare):
            assert "rank" not in ast.unparse(node), f"{place(module, node.lineno)} compares a rank"


@modules
def test_files_and_functions_fit_a_screen(module: str) -> None:
    lines = len(SOURCES[module].read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST_FILE, f"{place(module, 1)} has {lines} lines"
    for node in definitions(TREES[module]):
        if isinstance(node, ast.ClassDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
        assert length <= LONGEST_FUNCTION, f"{place(module, node.lineno)}: {node.name} has {length} lines"


def docstring_lines(node: FunctionNode) -> int:
    if ast.get_docstring(node) is None:
        return 0
    return (node.body[0].end_lineno or 0) - node.body[0].lineno + 1


@modules
def test_what_is_public_is_documented(module: str) -> None:
    tree = TREES[module]
    assert ast.get_docstring(tree), f"{place(module, 1)}: the module has no docstring"
    for node in tree.body:
        if not isinstance(node, Definition) or node.name.startswith("_"):
            continue
        assert ast.get_docstring(node), f"{place(module, node.lineno)}: {node.name} has no docstring"
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, FunctionNode) and not member.name.startswith("_") and not is_setter(member):
                where = place(module, member.lineno)
                assert ast.get_docstring(member), f"{where}: {node.name}.{member.name} has no docstring"


def is_setter(node: FunctionNode) -> bool:
    return any(ast.unparse(decorator).endswith(".setter") for decorator in node.decorator_list)


@modules
def test_all_lists_what_a_module_exports(module: str) -> None:
    tree = TREES[module]
    listed = exported_by_all(tree)
    is_package = SOURCES[module].name == "__init__.py"
    if listed is None:
        assert not is_package, f"{place(module, 1)}: a package lists its public names in __all__"
        return
    assert len(listed) == len(set(listed)), f"{place(module, 1)}: a name stands twice in __all__"
    defined = set(public_definitions(tree))
    missing = defined - set(listed)
    if is_package and not defined:  # it is there to export what it imports
        missing = set(own_imports(tree)) - set(listed)
    assert not missing, f"{place(module, 1)}: __all__ lacks {sorted(missing)}"
    unknown = set(listed) - defined - set(imported_names(tree))
    assert not unknown, f"{place(module, 1)}: __all__ has {sorted(unknown)}, which the module does not define"


def exported_by_all(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def public_definitions(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, Definition):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def imported_names(tree: ast.Module, root: str = "") -> Iterator[str]:
    """The names that a module imports by `from`, for type checkers too; with a root, only from that package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(root):
            yield from (alias.asname or alias.name for alias in node.names)


def own_imports(tree: ast.Module) -> Iterator[str]:
    """What a package's `__init__` takes from this project."""
    return (name for name in imported_names(tree, "hapi.") if not name.startswith("_") or name == "__version__")
