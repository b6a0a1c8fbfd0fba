"""The imports between packages, and the number of files at the top."""

import ast
import graphlib
import pathlib

from support import PROJECT

# The other packages that each package may import
MAY_IMPORT = {
    package: set(others.split())
    for package, others in {
        "net": "",
        "deepspeed_trial": "",
        "data": "deepspeed_trial classify.config classify.images",
        "classify.config": "deepspeed_trial",
        "classify.images": "deepspeed_trial classify.config",
        "classify.models": "deepspeed_trial classify.config net",
        "classify.engine": "deepspeed_trial classify.config classify.images classify.models",
        "classify.reports": "deepspeed_trial classify.config classify.images classify.models classify.engine",
        "classify.tuning": "deepspeed_trial classify.config classify.engine",
        "workbench": "deepspeed_trial net data classify.config classify.images classify.models classify.engine"
        " classify.reports classify.tuning",
    }.items()
}
PROGRAMS = {"train", "search", "shards", "checkpoint", "baseline"}
FILES = [
    file
    for pattern in ("*.py", "deepspeed_trial/**/*.py", "classify/**/*.py", "workbench/**/*.py")
    for file in PROJECT.glob(pattern)
]


def module_of(file: pathlib.Path) -> str:
    return ".".join(file.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


def imported(file: pathlib.Path) -> set[str]:
    """Find the modules of this project that a file imports, at its top or in a function."""
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
    assert MAY_IMPORT.keys() <= {package_of(module) for module in MODULES}
    wrong = []
    for module, file in MODULES.items():
        mine = package_of(module)
        for other in imported(file):
            theirs = package_of(other)
            if mine in MAY_IMPORT and theirs != mine and theirs not in MAY_IMPORT[mine]:
                wrong.append(f"{module} imports {other}")
            if mine not in MAY_IMPORT and theirs in PROGRAMS:
                wrong.append(f"{module} imports the program {other}")
    assert not wrong


def test_imports_have_no_cycle():
    imports = {module: imported(file) - {module} for module, file in MODULES.items()}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError


def test_files_at_the_top_are_few():
    assert len(list(PROJECT.glob("*.py"))) <= 8
