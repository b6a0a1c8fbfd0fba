"""The house: which package may import which, how many files there are at the top, and how long they may be."""

import ast
import pathlib

from support import PROJECT

# What each package may import of the others, beside itself.
MAY_IMPORT = {
    "net": set(),
    "harness": set(),
    "classify.config": {"harness"},
    "classify.images": {"harness", "classify.config"},
    "classify.models": {"harness", "classify.config", "net"},
    "classify.engine": {"harness", "classify.config", "classify.images", "classify.models"},
    "classify.reports": {
        "harness",
        "classify.config",
        "classify.images",
        "classify.models",
        "classify.engine",
    },
    "classify.publish": {
        "harness",
        "classify.config",
        "classify.images",
        "classify.models",
        "classify.reports",
        "net",
        "data",
    },
    "classify.tuning": {
        "harness",
        "classify.config",
        "classify.images",
        "classify.engine",
        "classify.reports",
    },
    "data": {"harness", "classify.config", "classify.images"},
}
PROGRAMS = {"train", "search", "shards", "checkpoint", "baseline", "model_def"}
FOLDERS = ("harness", "classify")
FILES = [*PROJECT.glob("*.py"), *(file for name in FOLDERS for file in (PROJECT / name).rglob("*.py"))]


def module_of(file: pathlib.Path) -> str:
    return ".".join(file.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


def imported(file: pathlib.Path) -> set[str]:
    """The modules of ours that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: a relative import"
            within = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            names |= within or {str(node.module)}
    return names & MODULES.keys()


def package_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "classify" and len(parts) > 1 else parts[0]


def test_packages_import_in_one_direction():
    wrong = []
    for module, file in MODULES.items():
        mine = package_of(module)
        for other in imported(file):
            theirs = package_of(other)
            if mine in MAY_IMPORT and theirs != mine and theirs not in MAY_IMPORT[mine]:
                wrong.append(f"{module} imports {other}")
            if mine not in MAY_IMPORT and theirs in PROGRAMS - {"model_def"}:
                wrong.append(f"{module} imports the program {other}")
    assert not wrong


def test_no_module_imports_itself_by_way_of_others():
    reached: dict[str, set[str]] = {module: imported(file) - {module} for module, file in MODULES.items()}
    for module in MODULES:
        seen, new = set(), set(reached[module])
        while new:
            seen |= new
            new = {other for each in new for other in reached[each]} - seen
        assert module not in seen, module


def test_files_are_few_at_the_top_and_short():
    assert len(list(PROJECT.glob("*.py"))) <= 8
    lines = {file: len(file.read_text().splitlines()) for file in FILES}
    assert not [str(file) for file, count in lines.items() if count > 300]
    assert lines[PROJECT / "model_def.py"] <= 170
