"""Mutants of a module: its syntax tree with one small change, as text.

Changed are comparisons, arithmetic, numbers, ``and`` and ``or``, conditions, ``min`` and ``max``, calls that are statements of
their own, what functions return, ``True`` and ``False``. Left alone is what only people read, and what only finds faults of the
program itself: docstrings, annotations, errors, assertions, functions that make texts, and what is printed.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Operators in place of each; the first of a comparison moves its boundary, the last negates it.
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_EXTREMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
#: What a function returns in place of its result, by its annotation.
_RETURNS = {"int": "{} + 1", "float": "{} + 1", "bool": "not {}"}
#: Functions with these annotations make texts.
_TEXTS = {"str", "list[str]", "str | None"}
#: Methods and functions that print, or say what is printed.
_PRINTERS = {"line", "print", "print_line", "point_to", "add_note", "Group", "Parameter", "track"}
#: Arguments that only find faults of the program itself.
_GUARDS = {"strict"}
_SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        path: Module, relative to the root of the repository.
        place: Function or class, with those around it.
        before, after: The line that changes, as Python writes it.
        number: Among equal changes of the place.
        line: Where it is, for people.
    """

    path: str
    place: str
    before: str
    after: str
    number: int
    line: int

    @property
    def key(self) -> str:
        """The change without its line number: the same after edits elsewhere."""
        return f"{self.path} {self.place}: {self.before} => {self.after}" + f" ({self.number})" * bool(self.number)


@dataclass
class _Change:
    """A field, or an item of a field that is a list, that gets another value."""

    owner: ast.AST
    field: str
    value: Any
    item: int | None = None

    @property
    def deletes(self) -> bool:
        """Whether a statement is left out."""
        return (
            isinstance(self.value, ast.Pass)
            or self.item is not None
            and isinstance(getattr(self.owner, self.field)[self.item], ast.Pass)
        )

    def swap(self) -> None:
        """Exchange the value in the tree with the other one."""
        if self.item is None:
            old = getattr(self.owner, self.field)
            setattr(self.owner, self.field, self.value)
        else:
            items = getattr(self.owner, self.field)
            old, items[self.item] = items[self.item], self.value
        self.value = old


def mutants(path: str, text: str) -> list[Mutant]:
    """All mutants of a module, in its order.

    Args:
        path: The module, relative to the root of the repository.
        text: Its source.
    """
    return [mutant for mutant, _ in _changed(path, ast.parse(text))]


def unchanged(path: str) -> Mutant:
    """No change: the control of a trial."""
    return Mutant(path, "module", "nothing", "nothing", 0, 1)


def mutated(mutant: Mutant, text: str) -> str:
    """The source of a module with the change of one of its ``mutants``."""
    tree = ast.parse(text)
    if mutant.before == mutant.after:
        return ast.unparse(tree)
    return next(ast.unparse(tree) for each, _ in _changed(mutant.path, tree) if each == mutant)


def _changed(path: str, tree: ast.Module) -> Iterator[tuple[Mutant, ast.Module]]:
    """Each mutant of a module, while its change is made in the tree."""
    seen = Counter[tuple[str, str, str]]()
    for place, statement, change in _Finder(tree).found:
        before = _header(statement)
        change.swap()
        after = "pass" if change.deletes else _header(statement)
        mutant = Mutant(path, place, before, after, seen[place, before, after], statement.lineno)
        seen[place, before, after] += 1
        yield mutant, tree
        change.swap()


def _header(statement: ast.stmt) -> str:
    """A statement without those that it holds."""
    lines = ast.unparse(statement).split("\n")
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return next(line for line in lines if not line.startswith("@"))
    return lines[0] if hasattr(statement, "body") else "\n".join(lines)


class _Finder:
    """Walks through a module and gathers its changes, each with its place and statement."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[str, ast.stmt, _Change]] = []
        self._place: list[str] = []
        self._returns: list[str] = []
        self._statement: ast.stmt = tree.body[0]
        self._block(tree, "body")

    # --- Statements ---

    def _block(self, owner: ast.AST, field: str) -> None:
        for item, statement in enumerate(getattr(owner, field)):
            outer, self._statement = self._statement, statement
            self._visit_statement(owner, field, item, statement)
            self._statement = outer

    def _visit_statement(self, owner: ast.AST, field: str, item: int, statement: ast.stmt) -> None:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            self._definition(statement)
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call | ast.YieldFrom):
            if not _prints(statement.value):
                self._note(owner, field, ast.Pass(), item)
                self._visit(statement.value)
        elif isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            return
        elif isinstance(statement, ast.AugAssign):
            self._operator(statement)
            self._visit(statement.value)
        elif isinstance(statement, ast.AnnAssign):
            if statement.value is not None:
                self._visit(statement.value)
        elif not isinstance(statement, _SKIPPED):
            if isinstance(statement, ast.Return) and statement.value is not None:
                self._returned(statement)
            self._fields(statement)

    def _definition(self, statement: ast.FunctionDef | ast.ClassDef) -> None:
        self._place.append(statement.name)
        if isinstance(statement, ast.FunctionDef):
            returns = ast.unparse(statement.returns) if statement.returns else ""
            if returns not in _TEXTS:
                self._returns.append(returns)
                self._fields(statement.args)
                self._block(statement, "body")
                self._returns.pop()
        else:
            self._block(statement, "body")
        self._place.pop()

    def _returned(self, statement: ast.Return) -> None:
        """Another result of a function; ``None`` where there may be none."""
        annotation, value = self._returns[-1], statement.value
        assert value is not None
        if annotation in _RETURNS:
            text = _RETURNS[annotation].format(f"({ast.unparse(value)})")
            if not (annotation == "bool" and isinstance(value, ast.Constant)):
                self._note(statement, "value", ast.parse(text, mode="eval").body)
        elif annotation.endswith("| None") and ast.unparse(value) != "None":
            self._note(statement, "value", ast.Constant(None))

    # --- Expressions ---

    def _fields(self, node: ast.AST) -> None:
        """All below a node, but for annotations, and handlers that make the text of another error."""
        if isinstance(node, ast.ExceptHandler) and isinstance(node.body[-1], ast.Raise):
            return
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_params", "decorator_list"):
                continue
            if field in ("test", "ifs"):
                self._conditions(node, field)
            if isinstance(value, ast.AST):
                self._visit(value, node, field)
            elif isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                self._block(node, field)
            elif isinstance(value, list):
                for item, each in enumerate(value):
                    if isinstance(each, ast.AST):
                        self._visit(each, node, field, item)

    def _conditions(self, node: ast.AST, field: str) -> None:
        """Negated conditions; comparisons are negated as such."""
        value = getattr(node, field)
        for item, test in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(test, ast.Compare | ast.Constant) and not _is_not(test):
                place = item if isinstance(value, list) else None
                self._note(node, field, ast.UnaryOp(ast.Not(), test), place)

    def _visit(self, node: ast.AST, owner: ast.AST | None = None, field: str = "", item: int | None = None) -> None:
        if isinstance(node, _SKIPPED) or isinstance(node, ast.expr) and _prints(node):
            return
        if isinstance(node, ast.keyword) and node.arg in _GUARDS:
            return
        if isinstance(node, ast.Compare):
            for place, operator in enumerate(node.ops):
                for other in _COMPARISONS[type(operator)]:
                    self._note(node, "ops", other(), place)
        elif isinstance(node, ast.BinOp):
            self._operator(node)
        elif isinstance(node, ast.BoolOp):
            self._note(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
        elif isinstance(node, ast.UnaryOp) and owner is not None and isinstance(node.op, ast.Not | ast.USub):
            self._note(owner, field, node.operand, item)
        elif isinstance(node, ast.Constant):
            self._constant(node)
        elif isinstance(node, ast.Call):
            self._extreme(node.func)
        self._fields(node)

    def _operator(self, node: ast.BinOp | ast.AugAssign) -> None:
        other = _ARITHMETIC.get(type(node.op))
        is_text = isinstance(node, ast.BinOp) and any(
            isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
            for part in (node.left, node.right)
        )
        if other is not None and not is_text:
            self._note(node, "op", other())

    def _constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._note(node, "value", not node.value)
        elif isinstance(node.value, int | float) and node.value + 1 != node.value:
            self._note(node, "value", node.value + 1)
            self._note(node, "value", node.value - 1)

    def _extreme(self, function: ast.expr) -> None:
        if isinstance(function, ast.Name) and function.id in _EXTREMES:
            self._note(function, "id", _EXTREMES[function.id])
        elif isinstance(function, ast.Attribute) and function.attr in _EXTREMES:
            self._note(function, "attr", _EXTREMES[function.attr])

    def _note(self, owner: ast.AST, field: str, value: Any, item: int | None = None) -> None:
        change = _Change(owner, field, value, item)
        self.found.append((".".join(self._place) or "module", self._statement, change))


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _prints(call: ast.expr) -> bool:
    """Whether a call prints, or only says what is printed."""
    if not isinstance(call, ast.Call):
        return False
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in _PRINTERS
