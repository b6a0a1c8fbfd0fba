"""Write the page of the public names: ``PYTHONPATH=. python3 tests/api_page.py > docs/api.md``."""

import inspect
from collections.abc import Iterator
from typing import Any

import deepspeed_trial

HEAD = """# The public names of `deepspeed_trial`

`from deepspeed_trial import NAME` imports a name; `help(NAME)` shows its arguments and errors.
`tests/api_page.py` writes this page. All other modules and names may change with any release.
"""
WIDTH = 110


class Bare:
    """An annotation that a signature shows without quotes."""

    def __init__(self, text: Any) -> None:
        self.text = text

    def __repr__(self) -> str:
        return str(self.text)


def signature(name: str, function: Any) -> str:
    """Return the name and the arguments of a function or a class, and the result of a function."""
    found = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=Bare(parameter.annotation))
        for parameter in found.parameters.values()
        if parameter.name != "self"
    ]
    result = Bare(found.return_annotation) if inspect.isroutine(function) else found.empty
    line = name + str(found.replace(parameters=parameters, return_annotation=result))
    if len(line) <= WIDTH:
        return line
    rows = [str(parameter) for parameter in parameters]
    positional = sum(parameter.kind is not parameter.KEYWORD_ONLY for parameter in parameters)
    if positional < len(rows):
        rows.insert(positional, "*")
    return f"{name}(\n    " + ",\n    ".join(rows) + ",\n" + line[line.rindex(")") :]


def sentence(thing: Any) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join((thing.__doc__ or "").partition("\n\n")[0].split()).replace("``", "`")


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class defines, with their docstrings."""
    for name, member in vars(kind).items():
        function = member.__func__ if isinstance(member, staticmethod) else member
        function = function.fget if isinstance(function, property) else function
        is_own = inspect.isfunction(function) and function.__qualname__.startswith(kind.__name__)
        if not name.startswith("_") and is_own and function.__doc__:
            shown = name if isinstance(member, property) else signature(name, function)
            yield f"{kind.__name__}.{shown}", function


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for name in sorted(deepspeed_trial.__all__, key=str.lower):
        thing = getattr(deepspeed_trial, name)
        is_made_by_init = name == "TrialContext"
        shown = [(name if is_made_by_init else signature(name, thing), thing)]
        shown += members(thing) if inspect.isclass(thing) else []
        parts.append(f"## {name}\n")
        parts += [f"```python\n{code}\n```\n\n{sentence(of)}\n" for code, of in shown]
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
