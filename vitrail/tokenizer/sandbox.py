"""The sandbox in which a checkpoint's chat template runs. A template comes with the weights and is
not trusted: it reaches no attribute of Python, no file, and every way it has to spend time or
memory draws on a budget or is not there. Knows nothing of messages and tokens."""

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateRuntimeError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.filters import FILTERS, do_indent
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARS = 1 << 24  # written by one rendering, or held by one value
MAX_STEPS = 1_000_000
MAX_SOURCE_CHARS = 1 << 20

# What Python itself raises for a template that adds None to a string, recurses for ever, and so on.
TEMPLATE_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)

# These print their first argument, so it is weighed first.
_TEXT_FILTERS = (
    "capitalize",
    "e",
    "escape",
    "forceescape",
    "lower",
    "safe",
    "string",
    "striptags",
    "title",
    "trim",
    "truncate",
    "upper",
    "urlencode",
    "wordcount",
)
_OTHER_FILTERS = (
    "abs",
    "count",
    "d",
    "default",
    "dictsort",
    "first",
    "float",
    "groupby",
    "int",
    "items",
    "last",
    "length",
    "list",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
    "round",
    "select",
    "selectattr",
    "sort",
    "unique",
)
# Methods whose result is sized by a number, or that leave text.
_NO_METHODS = frozenset(
    (
        "center",
        "encode",
        "expandtabs",
        "format",
        "format_map",
        "ljust",
        "maketrans",
        "rjust",
        "to_bytes",
        "translate",
        "zfill",
    )
)
_NO_NODES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it: trimmed blocks, `break` and `continue`, `raise_exception`,
    `strftime_now`, `{% generation %}`, a `tojson` that leaves HTML alone. Stateless between
    renderings, so one serves all threads. `max_steps`: loop turns and macro calls of one
    rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=_finalize,
        )
        self.context_class = _Budget
        self.max_steps = max_steps
        del self.globals["lipsum"]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self.filters = {name: _bounded(FILTERS[name], True) for name in _TEXT_FILTERS}
        self.filters |= {name: _bounded(FILTERS[name], False) for name in _OTHER_FILTERS}
        self.filters |= {"indent": _bounded(_indent, True), "join": _join, "tojson": _tojson}
        self.filters["replace"] = _bounded(_replace, True)

    def compile_chat(self, source: str) -> Template:
        """`source`, with its loops and macros on the budget. Raises `TEMPLATE_ERRORS`."""
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateRuntimeError(
                f"a template of {len(source)} characters; at most {MAX_SOURCE_CHARS}"
            )
        tree = self.parse(source)
        return self.from_string(_Instrument().visit(tree))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    @pass_context
    def spend(self, context: "_Budget", num_chars: int) -> None:
        """One loop turn or macro call, which writes `num_chars` of the template's own text."""
        context.num_steps += 1
        if context.num_steps > self.max_steps:
            raise TemplateRuntimeError(f"more than {self.max_steps} loop turns")
        context.write(num_chars)

    def wrap_str_format(self, value: Any) -> None:
        """Not wrapped, because `is_safe_attribute` already hides it."""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if isinstance(__obj, BuiltinMethodType | MethodType) and isinstance(__obj.__self__, str):
            if __obj.__name__ == "join" and args:
                return _join(args[0], __obj.__self__)
            if __obj.__name__ == "replace":
                return _replace(__obj.__self__, *args)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _limit(_size(left) + _size(right))
        elif operator == "*":
            _limit(_size(left) * _size(right))
        elif operator == "**":
            _limit(abs(left).bit_length() * abs(right) if isinstance(left, int) else 0)
        elif operator == "%" and isinstance(left, str):
            if re.search(r"%(?![sd%])", left):
                raise SecurityError("only %s and %d format")
            _limit(len(left) + left.count("%") * weigh(right))
        return super().call_binop(context, operator, left, right)


class _Budget(Context):
    """A rendering's context, with what it has used so far."""

    num_steps = 0
    num_chars = 0

    def write(self, num_chars: int) -> None:
        self.num_chars += num_chars
        _limit(self.num_chars)


class _Instrument(NodeTransformer):
    """Puts every body that can run more than once on the budget, and `~` through the checked
    `+`."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, _NO_NODES):
            name = type(node).__name__.lower()
            raise TemplateSyntaxError(f"{name} is not for chat templates", node.lineno)
        return super().generic_visit(node, *args, **kwargs)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._spend(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._spend(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._spend(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        texts = [nodes.Filter(n, "string", [], [], None, None) for n in node.nodes]
        return functools.reduce(nodes.Add, texts).set_lineno(node.lineno)

    def _spend(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        call = nodes.Call(nodes.EnvironmentAttribute("spend"), [nodes.Const(size)], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node


class _Generation(Extension):
    """`{% generation %}`, with which some templates mark the assistant's words for training."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def weigh(value: object) -> int:
    """About how many characters `value` prints as; more than the limit is as good as the limit."""
    total, stack = 0, [value]
    while stack and total <= MAX_CHARS:
        item = stack.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            stack += item
        total += 4
    return total


def _limit(num_chars: int) -> None:
    if num_chars > MAX_CHARS:
        raise TemplateRuntimeError(f"{num_chars} characters; a rendering has at most {MAX_CHARS}")


def _size(value: object) -> int:
    """Length of a sequence, an integer's own value: what a sum or a product is bounded by."""
    if isinstance(value, str | list | tuple):
        return len(value)
    return abs(value) if isinstance(value, int) else 1


@pass_context
def _finalize(context: _Budget, value: Any) -> Any:
    size = len(value) if isinstance(value, str) else weigh(value)
    _limit(size)
    context.write(size)
    return value


def _bounded(plain: Callable[..., Any], is_text: bool) -> Callable[..., Any]:
    """The filter `plain`, with its result bounded, and what it prints where it prints."""
    has_context = getattr(plain, "jinja_pass_arg", None) is not None

    @functools.wraps(plain)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if is_text:
            _limit(weigh(args[1 if has_context else 0]))
        result = plain(*args, **kwargs)
        if isinstance(result, str | list | tuple):
            _limit(len(result))
        return result

    return bounded


def _join(value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    if attribute is not None:
        items = [item[attribute] for item in items]
    _limit(weigh(items) + len(d) * len(items))
    return d.join(map(str, items))


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    whole = str(text)
    _limit(len(whole) + whole.count(old) * len(new))
    return whole.replace(old, new, -1 if count is None else count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    step = len(width) if isinstance(width, str) else width
    _limit(len(text) + (text.count("\n") + 1) * step)
    return do_indent(text, width, first, blank)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if ensure_ascii or (indent is not None and not 0 <= indent <= 16):
        raise TemplateRuntimeError("tojson with ensure_ascii, or an indent not in 0..16")
    _limit(weigh(value))
    return json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    if re.search(r"%[-_0^#]?\d", form):
        raise SecurityError("strftime_now without field widths")
    return datetime.datetime.now().strftime(form)
