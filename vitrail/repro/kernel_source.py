"""Parts of the package as the text of one file that imports nothing of it: functions, classes and
constants that some symbols need, each from its source with its comments, in an order in which they
can be read. Signatures of what is no kernel lose their annotations, so that only what runs is
needed. Reads sources, imports nothing of them."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

PACKAGE = "vitrail"


class Symbol(NamedTuple):
    module: str
    name: str


class Flat(NamedTuple):
    """`imports`: lines; `text`: definitions; `names`: what symbols are called in it."""

    imports: tuple[str, ...]
    text: str
    names: dict[Symbol, str]


class Edit(NamedTuple):
    """Bytes [start, end) of a module replaced."""

    start: int
    end: int
    text: str


class Source:
    """A module's syntax: what its top level binds, and what of other modules."""

    def __init__(self, root: Path, module: str):
        base = root.joinpath(*module.split("."))
        path = base.with_suffix(".py")
        self.module = module
        self.text = (path if path.exists() else base / "__init__.py").read_bytes()
        self.tree = ast.parse(self.text)
        self.defined: dict[str, ast.stmt] = {}
        self.imported: dict[str, tuple[str, str | None]] = {}  # name -> (module, its name there)
        for node in self.tree.body:
            for name in _bound(node):
                self.defined[name] = node
            if isinstance(node, ast.Import):
                for a in node.names:
                    self.imported[a.asname or a.name.split(".")[0]] = (a.name, None)
            elif isinstance(node, ast.ImportFrom):
                for a in node.names:
                    self.imported[a.asname or a.name] = self._target(root, str(node.module), a.name)

    @staticmethod
    def _target(root: Path, module: str, name: str) -> tuple[str, str | None]:
        inner = root.joinpath(*module.split("."), name)
        found = inner.with_suffix(".py").exists() and module.split(".")[0] == PACKAGE
        return (f"{module}.{name}", None) if found else (module, name)

    @cached_property
    def _lines(self) -> list[int]:
        """Where each line begins, in bytes."""
        starts = [0]
        for line in self.text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def at(self, line: int, column: int) -> int:
        return self._lines[line - 1] + column

    def span(self, node: ast.expr | ast.arg) -> tuple[int, int]:
        end = self.at(node.end_lineno or 0, node.end_col_offset or 0)
        return self.at(node.lineno, node.col_offset), end

    def lines_of(self, node: ast.stmt) -> tuple[int, int]:
        """With its decorators and what is said behind it."""
        above = [d.lineno for d in getattr(node, "decorator_list", ())]
        return self._lines[min([node.lineno, *above]) - 1], self._lines[node.end_lineno or 0]

    def edited(self, start: int, end: int, edits: Sequence[Edit]) -> str:
        out, at = b"", start
        for edit in sorted(edits):
            out, at = out + self.text[at : edit.start] + edit.text.encode(), edit.end
        return (out + self.text[at:end]).decode()

    def lambda_at(self, line: int) -> ast.Lambda:
        found = [n for n in ast.walk(self.tree) if isinstance(n, ast.Lambda) and n.lineno == line]
        if len(found) != 1:
            raise ValueError(f"{self.module}:{line}: {len(found)} lambdas, 1 was recorded")
        return found[0]


class Flattener:
    """Gathers symbols and all that they need. `instead`: texts to stand for some symbols."""

    def __init__(self, root: Path, instead: Mapping[Symbol, str] | None = None):
        self._root = root
        self._instead = instead or {}
        self._sources: dict[str, Source] = {}
        self._names: dict[Symbol, str] = {}
        self._taken: dict[str, object] = {}
        self._imports: dict[str, None] = {}
        self._texts: dict[object, str] = {}

    def add(self, symbol: Symbol) -> str:
        """Its name in the file. Raises `ValueError` for what no source defines."""
        source = self.source(symbol.module)
        if symbol.name in source.imported and symbol.name not in source.defined:
            module, name = source.imported[symbol.name]
            if name is None or module.split(".")[0] != PACKAGE:
                raise ValueError(f"{symbol.module} has {symbol.name} from {module}")
            return self.add(Symbol(module, name))
        if symbol not in self._names:
            self._names[symbol] = self._free(symbol)
            self._write(source, symbol)
        return self._names[symbol]

    def add_lambda(self, module: str, line: int, name: str) -> dict[str, tuple[str, ...]]:
        """The lambda on a line as a function `name`. Which fields of its parameters it reads."""
        source = self.source(module)
        node = source.lambda_at(line)
        start, end = source.span(node.body)
        body = source.edited(start, end, list(self._edits(source, node)))
        given = [a.arg for a in node.args.args]
        called = f"def {name}({', '.join(given)}):\n    return (\n        {body}\n    )\n"
        self._texts[name] = called
        read: dict[str, dict[str, None]] = {a: {} for a in given}
        for inner in ast.walk(node.body):
            if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
                read.get(inner.value.id, {})[inner.attr] = None
        return {a: tuple(names) for a, names in read.items()}

    def flat(self) -> Flat:
        text = "\n\n".join(part.strip("\n") + "\n" for part in self._texts.values())
        return Flat(tuple(self._imports), text, dict(self._names))

    def source(self, module: str) -> Source:
        if module not in self._sources:
            self._sources[module] = Source(self._root, module)
        return self._sources[module]

    def _free(self, symbol: Symbol) -> str:
        name = symbol.name
        for part in (*symbol.module.split(".")[:0:-1], PACKAGE):
            if self._taken.setdefault(name, symbol) == symbol:
                return name
            name = f"{part}_{name}"
        raise ValueError(f"no name is left for {symbol}")

    def _write(self, source: Source, symbol: Symbol) -> None:
        if symbol in self._instead:
            self._texts[symbol] = self._instead[symbol]
            return
        if symbol.name not in source.defined:
            raise ValueError(f"{symbol.module} does not define {symbol.name}")
        node = source.defined[symbol.name]
        if node in self._texts:
            return
        for name in _bound(node):  # several names of one statement
            self._names.setdefault(made := Symbol(source.module, name), self._free(made))
        edits = list(self._edits(source, node))  # what it needs is written by now
        self._texts[node] = source.edited(*source.lines_of(node), edits)

    def _edits(self, source: Source, top: ast.stmt | ast.Lambda) -> Iterator[Edit]:
        """Annotations out, names of other modules and new names in; adds what is named."""
        skipped: set[int] = set()
        if not is_kernel(top):
            for node in ast.walk(top):
                for edit, annotation in _annotations(source, node):
                    skipped.update(id(inner) for inner in ast.walk(annotation))
                    yield edit
        local = _locals(top)
        for node in ast.walk(top):
            if id(node) in skipped:
                continue
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(PACKAGE):
                raise ValueError(f"{source.module}:{node.lineno} imports {node.module} inside")
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module, name = source.imported.get(node.value.id, ("", ""))
                if name is None and module.split(".")[0] == PACKAGE and node.value.id not in local:
                    yield Edit(*source.span(node), self.add(Symbol(module, node.attr)))
            elif isinstance(node, ast.Name) and node.id not in local:
                made = self._named(source, node.id)
                if made != node.id:
                    yield Edit(*source.span(node), made)
        if isinstance(top, ast.FunctionDef | ast.ClassDef):
            made = self._names[Symbol(source.module, top.name)]
            if made != top.name:
                word = "class" if isinstance(top, ast.ClassDef) else "def"
                start = source.at(top.lineno, top.col_offset) + len(word) + 1
                yield Edit(start, start + len(top.name.encode()), made)

    def _named(self, source: Source, name: str) -> str:
        """What a name of a module is in the file: its own if it is a builtin."""
        if name in source.defined:
            return self.add(Symbol(source.module, name))
        if name not in source.imported:
            return name
        module, there = source.imported[name]
        if module.split(".")[0] == PACKAGE:
            return name if there is None else self.add(Symbol(module, there))
        if there is None:
            line = f"import {module}" + (f" as {name}" if name != module.split(".")[0] else "")
        else:
            line = f"from {module} import {there}" + (f" as {name}" if name != there else "")
        if self._taken.setdefault(name, line) != line:
            raise ValueError(f"{name} is {line!r} in {source.module} and another thing elsewhere")
        self._imports[line] = None
        return name


def _bound(node: ast.stmt) -> list[str]:
    """Names that a statement of the top level defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    return []


def is_kernel(node: ast.AST | None) -> bool:
    """Whether a definition is compiled by Triton."""
    return any(
        "jit" in (getattr(n, "id", ""), getattr(n, "attr", ""))
        for d in getattr(node, "decorator_list", ())
        for n in ast.walk(d)
    )


def _annotations(source: Source, node: ast.AST) -> Iterator[tuple[Edit, ast.expr]]:
    """Edits that take an annotation out; of a field, that say nothing by it."""
    if isinstance(node, ast.arg) and node.annotation is not None:
        start, end = source.span(node)
        yield Edit(start + len(node.arg.encode()), end, ""), node.annotation
    elif isinstance(node, ast.AnnAssign):
        yield Edit(*source.span(node.annotation), "object"), node.annotation
    elif isinstance(node, ast.FunctionDef) and node.returns is not None:
        start, end = source.span(node.returns)
        arrow = source.text.rindex(b"->", 0, start)
        yield Edit(source.text.rindex(b")", 0, arrow) + 1, end, ""), node.returns


def _locals(top: ast.stmt | ast.Lambda) -> set[str]:
    """Names that belong to a function: parameters, and what it assigns."""
    if not isinstance(top, ast.FunctionDef | ast.Lambda):
        return set()
    found: set[str] = set()
    for node in ast.walk(top):
        if isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found
