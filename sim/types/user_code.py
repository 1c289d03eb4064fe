"""Modules of user code: neither of this package, nor of Python, nor of an installed package.

``imported_files`` follows the ``import`` statements of a plug-in's module, and of the modules that they name, also those within
functions, which run later or never. Modules that were loaded while the plug-in was imported count as well, however they were
named. A module that a function imports by a computed name is not found, and files that are no modules are not.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from functools import cache, lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path

_PACKAGE = __name__.partition(".")[0]
#: Functions that import the module that their first argument names.
_IMPORTERS = ("import_module", "__import__")
#: Modules that were loaded while another one was imported.
_LOADED: dict[str, frozenset[str]] = {}


def is_user_module(name: str, path: Path, plugins: Collection[str] = ()) -> bool:
    """Whether a module is user code.

    Args:
        name, path: Its full name and its file.
        plugins: Modules of plug-ins. Their packages are user code even if they are installed.
    """
    top = name.partition(".")[0]
    if top == _PACKAGE or (top in sys.stdlib_module_names and top != "__main__"):
        return False
    if any(plugin.partition(".")[0] == top for plugin in plugins):
        return True
    path = path.resolve()
    return not any(path.is_relative_to(folder) for folder in _installed())


@cache
def _installed() -> frozenset[Path]:
    """Folders of installed packages."""
    return frozenset(Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib"))


def note_loaded(name: str, modules: Iterable[str]) -> None:
    """Note the modules that were loaded while a module was imported for the first time."""
    _LOADED.setdefault(name, frozenset(modules))


def imported_files(plugin: str) -> dict[str, Path]:
    """Files of user code that a module imports, by the names of their modules, itself included.

    Args:
        plugin: Full name of a module of a plug-in.
    """
    found: dict[str, Path] = {}
    pending = [plugin, *_LOADED.get(plugin, ())]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        pending += [parent] if (parent := name.rpartition(".")[0]) else []
        path, package = _file_of(name)
        if path is not None and is_user_module(name, path, (plugin,)):
            found[name] = path
            if path.suffix == ".py":
                pending += _imports(path.read_bytes(), package)
    return dict(sorted(found.items()))


def _file_of(name: str) -> tuple[Path | None, str]:
    """File of a module, None without one, and the package that its relative imports begin at."""
    module = sys.modules.get(name)
    spec = _spec_of(name)
    if spec is None:
        file = getattr(module, "__file__", None)
        return (Path(file) if file else None), name.rpartition(".")[0]
    package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
    path = Path(spec.origin) if spec.has_location and spec.origin else None
    return (path if path is not None and path.is_file() else None), package


def _spec_of(name: str) -> ModuleSpec | None:
    """Where a module is found, or would be; unlike ``importlib.util.find_spec`` it imports no parent."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    parent, path = name.rpartition(".")[0], None
    if parent:
        above = _spec_of(parent)
        if above is None or above.submodule_search_locations is None:
            return None
        path = list(above.submodule_search_locations)
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except (ImportError, ValueError, AttributeError):
            # Not a name that it can look for.
            continue
        if spec is not None:
            return spec
    return None


@lru_cache(maxsize=1024)
def _imports(source: bytes, package: str) -> tuple[str, ...]:
    """Names that may be modules, of all imports in a module's source.

    Args:
        package: See ``_file_of``.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        # A module that a function would import in vain.
        return ()
    return tuple(dict.fromkeys(name for node in ast.walk(tree) for name in _named(node, package)))


def _named(node: ast.AST, package: str) -> Iterator[str]:
    """Names that may be modules, of one node."""
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            base = _absolute("." * level + (module or ""), package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in names)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(text)), *_]):
            if name in _IMPORTERS:
                yield _absolute(text, package)


def _absolute(name: str, package: str) -> str:
    """A name without leading dots."""
    level = len(name) - len(name.lstrip("."))
    if not level:
        return name
    parts = package.split(".")
    return ".".join(part for part in (*parts[: len(parts) - level + 1], name[level:]) if part)
