"""Find the packages that read each field of a configuration, with a static search.

A field is read where its name follows an expression whose type is the configuration. The types of
expressions come from annotations and assignments, without an import of the code.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Loop = ast.For | ast.AsyncFor | ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
#: Types by the name of a variable. A type is the name of a class.
_Scope = dict[str, str]

#: Assignments may depend on attributes of classes that are read later. Chains are short.
_PASSES = 3


class FieldReaders:
    """The modules that read fields of classes.

    Args:
        modules: source text by the module's name. Classes of equal name count as one class.
    """

    def __init__(self, modules: dict[str, str]) -> None:
        self._bases: dict[str, list[str]] = {}
        self._attributes: dict[str, _Scope] = defaultdict(dict)
        self._results: _Scope = {}  # types that functions return
        self._readers: dict[tuple[str, str], set[str]] = defaultdict(set)
        trees = {name: ast.parse(text) for name, text in modules.items()}
        for _ in range(_PASSES):
            for name, tree in trees.items():
                self._visit(tree, {}, "", name)

    def modules(self, owner: str, field: str) -> set[str]:
        """Return the names of the modules that read `field` of the class `owner`."""
        return self._readers[owner, field]

    def _visit(self, node: ast.AST, scope: _Scope, owner: str, module: str) -> None:
        """Record the types and reads in `node`, which is in the class `owner` if not empty."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                self._bases[child.name] = [ast.unparse(base) for base in child.bases]
                self._visit(child, scope, child.name, module)
            elif isinstance(child, _Function):
                results = self._attributes[owner] if owner else self._results
                _set(results, child.name, _named(child.returns))
                self._visit(child, scope | _parameters(child, owner), "", module)
            else:
                for name, type_ in self._assigned(child, scope):
                    _set(self._attributes[owner] if owner else scope, name, type_)
                if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load):
                    self._readers[self._type(child.value, scope), child.attr].add(module)
                self._visit(child, scope, owner, module)

    def _assigned(self, node: ast.AST, scope: _Scope) -> Iterator[tuple[str, str]]:
        """Yield (variable, type) of an assignment. Attributes of objects are recorded."""
        pairs: Iterable[tuple[ast.expr, str]] = ()
        if isinstance(node, ast.AnnAssign):
            pairs = [(node.target, _named(node.annotation))]
        elif isinstance(node, _Loop):
            loops = [node] if isinstance(node, ast.For | ast.AsyncFor) else node.generators
            pairs = [(_last(loop.target), _item(self._type(loop.iter, scope))) for loop in loops]
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if not isinstance(target, ast.Tuple):
                    pairs = [(target, self._type(node.value, scope))]
                elif isinstance(node.value, ast.Tuple):
                    types = (self._type(value, scope) for value in node.value.elts)
                    pairs = zip(target.elts, types, strict=False)
                else:  # such as tuple[Config, Namespace]
                    types = re.findall(r"[\w.]+", self._type(node.value, scope))[1:]
                    pairs = zip(target.elts, types, strict=False)
        for target, type_ in pairs:
            if isinstance(target, ast.Name):
                yield target.id, type_
            elif isinstance(target, ast.Attribute) and (owner := self._type(target.value, scope)):
                _set(self._attributes[owner], target.attr, type_)

    def _type(self, node: ast.expr, scope: _Scope) -> str:
        """Return the name of the expression's class. Empty: it is not known."""
        if isinstance(node, ast.Name):
            return scope.get(node.id, "")
        if isinstance(node, ast.Attribute):
            return self._attribute(self._type(node.value, scope), node.attr)
        if isinstance(node, ast.BoolOp):  # configs or []
            return self._type(node.values[0], scope)
        if isinstance(node, ast.Subscript):
            return _item(self._type(node.value, scope))
        if isinstance(node, ast.Call):
            for keyword in node.keywords:  # msgspec.json.decode(body, type=Config)
                if keyword.arg == "type":
                    return _named(keyword.value)
            if isinstance(node.func, ast.Name):
                name = node.func.id
                return name if name in self._bases else self._results.get(name, "")
            if ast.unparse(node.func) == "msgspec.structs.replace":
                return self._type(node.args[0], scope)
            if isinstance(node.func, ast.Attribute) and node.func.attr == "parse_args":
                return "argparse.Namespace"
            if isinstance(node.func, ast.Attribute) and node.func.attr in ("items", "values"):
                return self._type(node.func.value, scope)
            return self._type(node.func, scope)
        return ""

    def _attribute(self, owner: str, name: str) -> str:
        if type_ := self._attributes[owner].get(name):
            return type_
        inherited = (self._attribute(base, name) for base in self._bases.get(owner, ()))
        return next(filter(None, inherited), "")


def read_modules(folders: Iterable[Path]) -> dict[str, str]:
    """Return the source text of the modules below `folders`, by the module's name."""
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts): path.read_text()
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
    }


def _parameters(function: _Function, owner: str) -> _Scope:
    arguments = function.args
    declared = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    types = {argument.arg: _named(argument.annotation) for argument in declared}
    if owner and declared:
        types[declared[0].arg] = types[declared[0].arg] or owner
    return types


def _named(annotation: ast.expr | None) -> str:
    """Return the name of the class in an annotation such as `Config` or `Config | None`."""
    if isinstance(annotation, ast.BinOp):
        return _named(annotation.left)
    return ast.unparse(annotation).strip("'") if annotation else ""


def _last(target: ast.expr) -> ast.expr:
    """Return the variable of a value: `config` in `name, config`, from `items()`."""
    return target.elts[-1] if isinstance(target, ast.Tuple) else target


def _item(container: str) -> str:
    """Return the type of the items of `list[Config]`, or of the values of `dict[str, Config]`."""
    if "[" not in container:
        return ""
    inside = ast.parse(container, mode="eval").body
    assert isinstance(inside, ast.Subscript)
    items = inside.slice.elts if isinstance(inside.slice, ast.Tuple) else [inside.slice]
    typed = [item for item in items if not isinstance(item, ast.Constant)]  # tuple[Config, ...]
    return _named(typed[-1]) if typed else ""


def _set(scope: _Scope, name: str, type_: str) -> None:
    if type_:
        scope[name] = type_
