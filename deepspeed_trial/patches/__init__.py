"""The registry of this project's patches of DeepSpeed.

A patch is a function with the decorator ``@patch``. A call of the function applies the patch if the installed
release needs it. Before that, a guard compares the source of the patched functions with the source that
the patch was written for. A difference ends the program with one line: after an upstream fix a patch could do
silent harm, e.g. scale a loss twice.

The modules are ``engine`` (for every engine), ``zero``, ``pipeline``, ``muon`` and ``process`` (applied
before the first engine of a process). ``docs/patches.md`` lists all patches.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import inspect
import logging
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

from packaging.specifiers import SpecifierSet

from deepspeed_trial.errors import InvalidInput

NOT_REPORTED = "not reported"
KNOWN = {"deepspeed": ("0.19.8", "0.13.*")}  # the pinned release comes first

P = ParamSpec("P")
logger = logging.getLogger("deepspeed_trial")


@dataclass(frozen=True)
class Patch:
    """One patch of the registry.

    Attributes:
        name: name of the function that applies the patch.
        why: the fault that the patch fixes, in one sentence.
        target: the patched attribute, as ``module:attribute``.
        versions: the releases of the target's package that need the patch, as a ``packaging`` specifier.
        report: the upstream issue, or the pull request that fixes or introduced the fault, as
            ``owner/repository#number``, or ``NOT_REPORTED``.
        guards: the functions whose source is compared, as ``module:attribute``; empty if the patch only wraps
            calls of a public name.
        digests: the digests of the source that the patch was written for, one for each known variant.
    """

    name: str
    why: str
    target: str
    versions: str
    report: str
    guards: tuple[str, ...]
    digests: tuple[str, ...]

    @property
    def package(self) -> str:
        """The package that the patch changes."""
        return self.target.partition(":")[0].partition(".")[0]

    def is_needed(self) -> bool:
        """Whether the installed release is one of ``versions``."""
        return SpecifierSet(self.versions).contains(installed(self.package), prereleases=True)

    def check(self) -> None:
        """Compare the source of the guarded functions with the source that the patch was written for.

        Raises:
            InvalidInput: if the sources differ.
        """
        if self.guards and digest(self.guards) not in self.digests:
            raise InvalidInput(
                f"{self.package} {installed(self.package)}: {self.target} differs from the code that patch "
                f"{self.name} is written for; install {self.package}=={KNOWN[self.package][0]}"
            )


REGISTRY: dict[str, Patch] = {}


def patch(
    target: str,
    *,
    versions: str,
    report: str = NOT_REPORTED,
    guards: tuple[str, ...] | None = None,
    digests: tuple[str, ...] = (),
    when: Callable[..., bool] = lambda *_: True,
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register the decorated function as a patch; the first sentence of its docstring states the fault.

    Args:
        target: see ``Patch``.
        versions: see ``Patch``.
        report: see ``Patch``.
        guards: see ``Patch``; by default the target itself.
        digests: see ``Patch``.
        when: a function of the patch's arguments; the patch is checked and applied only if it returns True.
    """

    def register(apply: Callable[P, None]) -> Callable[P, None]:
        why = " ".join((apply.__doc__ or "").partition("\n\n")[0].split())
        guarded = (target,) if guards is None else guards
        entry = REGISTRY[apply.__name__] = Patch(
            apply.__name__, why, target, versions, report, guarded, digests
        )

        @functools.wraps(apply)
        def apply_where_needed(*args: P.args, **kwargs: P.kwargs) -> None:
            if entry.is_needed() and when(*args, **kwargs):
                entry.check()
                apply(*args, **kwargs)

        return apply_where_needed

    return register


@functools.cache
def installed(package: str) -> str:
    """Return the installed release of a package."""
    return importlib.metadata.version(package)


@functools.cache
def digest(functions: tuple[str, ...]) -> str:
    """Return the digest of functions' source without white space; empty if a source is missing.

    A replacement made with ``functools.wraps`` counts as the original.
    """
    try:
        sources = [inspect.getsource(pkgutil.resolve_name(each)) for each in functions]
    except (AttributeError, ImportError, OSError, TypeError):
        return ""
    return hashlib.sha256("".join("".join(sources).split()).encode()).hexdigest()[:12]


@functools.cache  # once a process
def warn_of_unknown_release() -> None:
    """Warn, on rank 0, about a DeepSpeed release that the patches were not tested with."""
    for package, known in KNOWN.items():
        is_known = any(installed(package) in SpecifierSet(f"=={release}") for release in known)
        if not is_known and os.environ.get("RANK", "0") == "0":
            logger.warning(
                f"{package} {installed(package)} is untested, and each patch of it is checked before use; "
                f"tested: {', '.join(known)}"
            )


def follow_calls(call: Any, before: Callable[[], None]) -> Any:
    """Wrap a function so that ``before`` is called first."""

    @functools.wraps(call)
    def followed(*args: Any, **kwargs: Any) -> Any:
        before()
        return call(*args, **kwargs)

    return followed
