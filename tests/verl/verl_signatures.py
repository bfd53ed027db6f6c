"""What the shim uses of verl, found in its source, against the verl that is installed.

python tests/verl/verl_signatures.py            names, in one line each, what this verl lacks
python tests/verl/verl_signatures.py --write    declares anew, from this verl, what is used

Imports verl and TransferQueue where it looks symbols up, never the shim: its source is read only,
so that a verl which the shim can't be imported with can be asked too. A symbol is written
`module:name`; the declarations are in verl_signatures.txt, one a line.
"""

from __future__ import annotations

import ast
import enum
import importlib
import importlib.metadata
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).parent
SHIM = HERE.parents[1] / "shims" / "verl"
DECLARED = HERE / "verl_signatures.txt"
#: top-level packages that are looked at
FOREIGN = ("verl", "transfer_queue")
#: the seam is in no release on PyPI; tests/verl holds one written from its pull request
SEAM = "verl.remote_backend"

#: functions whose result is the module that they are given the name of
IMPORTERS = ("import_module", "_require")
#: classes of the shim that verl uses in the place of one of its own, without a common base
STANDS_FOR = {"ForwardingWorker": "verl.workers.engine_workers:ActorRolloutRefWorker"}
#: what the shim reads of objects whose class its source doesn't say
BY_HAND = (
    "verl.checkpoint_engine:CheckpointEngineManager.actor_wg",
    "verl.checkpoint_engine:CheckpointEngineManager.config",
    "verl.checkpoint_engine:CheckpointEngineManager.replicas",
    "verl.experimental.agent_loop.agent_loop:AgentLoopManager.agent_loop_workers",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer._wait_for_next_poll",
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer.poll_interval",
    "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync.standalone_checkpoint_manager",
    "verl.utils.checkpoint.checkpoint_manager:BaseCheckpointManager.ensure_checkpoint_capacity",
    "verl.utils.checkpoint.checkpoint_manager:BaseCheckpointManager.previous_saved_paths",
    "verl.utils.checkpoint.checkpoint_manager:BaseCheckpointManager.register_checkpoint",
    "verl.workers.rollout.replica:RolloutReplicaRegistry.register",
)

VALUE, ATTRIBUTE, MODULE, CLASS = "value", "attribute", "module", "class"


@attrs.frozen
class Call:
    """Arguments of one call: how many by position, which by name, and whether more may come."""

    where: str
    positional: int
    named: tuple[str, ...]
    more: bool


@attrs.frozen
class Override:
    """A method of the shim in the place of one of verl's."""

    where: str
    arguments: ast.arguments


@attrs.define
class Use:
    """How one symbol is used."""

    calls: list[Call] = attrs.Factory(list)
    overrides: list[Override] = attrs.Factory(list)


@attrs.define
class _Class:
    name: str
    bases: list[str]  # symbols of verl, or names of classes of the shim
    own: set[str]
    methods: dict[str, Override]
    read: set[str]
    calls: list[tuple[str, Call]]
    of_seam: bool = False


class _Module(ast.NodeVisitor):
    """One module of the shim: `symbols` it uses, and its `classes`."""

    def __init__(self, path: Path) -> None:
        self.where = path.name
        self.of_seam = path.parent.name == SEAM.rpartition(".")[2]
        self.bound: dict[str, str] = {}  # name -> "module:" or "module:name"
        self.uses: dict[str, Use] = {}
        self.classes: list[_Class] = []
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            self._bind(node)
        self.visit(tree)

    def _bind(self, node: ast.AST) -> None:
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0) if _foreign(module):
                for each in names:
                    self.bound[each.asname or each.name] = f"{module}:{each.name}"
            case ast.Import(names=names):
                for each in names:
                    if _foreign(each.name):
                        self.bound[each.asname or each.name.partition(".")[0]] = f"{each.name}:"
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(func=called, args=[ast.Constant(value=str(module))]),
            ) if _foreign(module) and ast.unparse(called).endswith(IMPORTERS):
                self.bound[name] = f"{module}:"

    def _symbol(self, node: ast.AST) -> str | None:
        """What a name or a chain of attributes stands for."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.bound:
            return None
        start = self.bound[node.id]
        return start + ("" if start.endswith(":") or not parts else ".") + ".".join(parts)

    def _use(self, symbol: str) -> Use:
        return self.uses.setdefault(symbol, Use())

    def visit_Attribute(self, node: ast.Attribute) -> None:
        symbol = self._symbol(node)
        if symbol is None:
            self.generic_visit(node)
        else:
            self._use(symbol)

    def visit_Name(self, node: ast.Name) -> None:
        symbol = self._symbol(node)
        if symbol is not None and not symbol.endswith(":"):
            self._use(symbol)

    def visit_Call(self, node: ast.Call) -> None:
        symbol = self._symbol(node.func)
        if symbol is not None:
            self._use(symbol).calls.append(self._call(node))
        self.generic_visit(node)

    def _call(self, node: ast.Call) -> Call:
        stars = any(isinstance(each, ast.Starred) for each in node.args)
        return Call(
            where=f"{self.where}:{node.lineno}",
            positional=sum(not isinstance(each, ast.Starred) for each in node.args),
            named=tuple(each.arg for each in node.keywords if each.arg is not None),
            more=stars or any(each.arg is None for each in node.keywords),
        )

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        found = _Class(node.name, [], set(), {}, set(), [], self.of_seam)
        for base in node.bases:
            if symbol := self._symbol(base):
                found.bases.append(symbol)
            elif isinstance(base, ast.Name):
                found.bases.append(base.id)
        for statement in node.body:
            match statement:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.own.add(name)
                    found.methods[name] = Override(
                        f"{self.where}:{statement.lineno}", statement.args
                    )
                case ast.Assign(targets=[ast.Name(id=name)]):
                    found.own.add(name)
        for inner in ast.walk(node):
            match inner:
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    found.own.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name):
                    found.read.add(name)
                case ast.Call(func=ast.Attribute(value=holder, attr=name)) if _is_super(holder):
                    found.read.add(name)
                    found.calls.append((name, self._call(inner)))
                case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
                    found.calls.append((name, self._call(inner)))
        self.classes.append(found)
        self.generic_visit(node)


def _foreign(module: str) -> bool:
    top = module.partition(".")[0]
    return top in FOREIGN and not f"{module}.".startswith(f"{SEAM}.")


def _is_super(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )


def scan(declared: dict[str, str], folder: Path = SHIM) -> dict[str, Use]:
    """Every symbol of verl that the modules below `folder` use.

    A member of a subclass is verl's where it is `declared` so or the installed verl has it.
    """
    modules = [_Module(path) for path in sorted(folder.rglob("*.py"))]
    uses: dict[str, Use] = {}
    for module in modules:
        for symbol, use in module.uses.items():
            found = uses.setdefault(symbol, Use())
            found.calls += use.calls
    classes = {each.name: each for module in modules for each in module.classes}
    for each in classes.values():
        _members(each, classes, uses, declared)
    for symbol in BY_HAND:
        uses.setdefault(symbol, Use())
    # a module alone, or a special method that a class is called by
    return {symbol: use for symbol, use in uses.items() if not symbol.endswith((":", "__"))}


def _members(
    each: _Class, classes: dict[str, _Class], uses: dict[str, Use], declared: dict[str, str]
) -> None:
    bases = list(dict.fromkeys(_verl_bases(each, classes)))
    inherited = set().union(*(above.own for above in _above(each, classes)))

    def find(name: str) -> str | None:
        candidates = [f"{base}.{name}" for base in bases]
        for symbol in candidates:
            if symbol in declared:
                return symbol
        return next((symbol for symbol in candidates if look_up(symbol) is not None), None)

    made_as = bases
    if each.name in STANDS_FOR:
        made_as = [STANDS_FOR[each.name]]
    elif each.of_seam or "__init__" not in {name for name, _ in each.calls}:
        made_as = []  # the seam, or the shim's own code, makes the objects of such a class
    for base in made_as:
        use = uses.setdefault(base, Use())
        use.calls += [call for name, call in each.calls if name == "__init__"]
        if "__init__" in each.methods:
            use.overrides.append(each.methods["__init__"])
    for name, override in each.methods.items():
        if (symbol := find(name)) and not name.startswith("__"):
            uses.setdefault(symbol, Use()).overrides.append(override)
    for name in each.read - each.own - inherited:
        if symbol := find(name):
            uses.setdefault(symbol, Use())
    for name, call in each.calls:
        if (symbol := find(name)) and not name.startswith("__"):
            uses.setdefault(symbol, Use()).calls.append(call)


def _above(each: _Class, classes: dict[str, _Class]) -> Iterator[_Class]:
    for base in each.bases:
        if base in classes:
            yield classes[base]
            yield from _above(classes[base], classes)


def _verl_bases(each: _Class, classes: dict[str, _Class]) -> Iterator[str]:
    if each.name in STANDS_FOR:
        yield STANDS_FOR[each.name]
    for base in each.bases:
        if ":" in base:
            yield base
        elif base in classes:
            yield from _verl_bases(classes[base], classes)


def look_up(symbol: str) -> str | None:
    """How the installed verl defines `symbol`: a signature, or what else it is; None where it has
    no such symbol."""
    module, _, name = symbol.partition(":")
    try:
        value: Any = importlib.import_module(module)
    except ImportError:
        return None
    holder: Any = None
    for part in name.split("."):
        holder, value = value, inspect.getattr_static(value, part, _ABSENT)
        if value is _ABSENT and inspect.ismodule(holder):
            value = _submodule(f"{holder.__name__}.{part}")
        if value is _ABSENT:
            return ATTRIBUTE if _assigned(holder, part) else None
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
    return _describe(value)


_ABSENT = object()


def _submodule(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return _ABSENT


def _assigned(holder: Any, name: str) -> bool:
    """Whether an instance of the class gets this attribute."""
    if not inspect.isclass(holder):
        return False
    for cls in holder.__mro__[:-1]:
        if name in getattr(cls, "__annotations__", ()):
            return True
        try:
            source = inspect.getsource(cls)
        except (OSError, TypeError):
            continue
        if re.search(rf"\bself\.{name}\b\s*(:[^=\n]+)?(=[^=]|,)", textwrap.dedent(source)):
            return True
    return False


def _describe(value: Any) -> str:
    if inspect.ismodule(value):
        return MODULE
    if not callable(value) or inspect.ismethoddescriptor(value):
        return VALUE
    if inspect.isclass(value) and issubclass(value, enum.Enum):
        return CLASS
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return CLASS if inspect.isclass(value) else VALUE
    text = str(
        signature.replace(
            parameters=[
                _plain(each)
                for each in signature.parameters.values()
                if each.name != "_ray_trace_ctx"  # Ray's own, where it has seen the class
            ],
            return_annotation=inspect.Signature.empty,
        )
    )
    return f"{CLASS} {text}" if inspect.isclass(value) else text


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default
    literal = default is inspect.Parameter.empty or isinstance(
        default, (bool, int, float, str, tuple, type(None))
    )
    return parameter.replace(
        annotation=inspect.Parameter.empty, default=default if literal else _Other()
    )


class _Other:
    def __repr__(self) -> str:
        return "..."


def declared() -> dict[str, str]:
    """The declarations of verl_signatures.txt."""
    lines = DECLARED.read_text(encoding="utf-8").splitlines() if DECLARED.exists() else []
    return dict(line.split(" ", 1) for line in lines)


def _parameters(description: str) -> dict[str, ast.expr | None] | None:
    """Name (with its stars) -> default, as written; None where it is no signature."""
    text = description.removeprefix(f"{CLASS} ")
    if not text.startswith("("):
        return None
    return _of(ast.parse(f"def f{text}: pass").body[0].args)  # type: ignore[attr-defined]


def _of(arguments: ast.arguments) -> dict[str, ast.expr | None]:
    by_position = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(by_position) - len(arguments.defaults)) + list(arguments.defaults)
    found: dict[str, ast.expr | None] = {each.arg: d for each, d in zip(by_position, defaults)}
    if arguments.vararg:
        found[f"*{arguments.vararg.arg}"] = None
    elif arguments.kwonlyargs:
        found["*"] = None
    found |= {each.arg: d for each, d in zip(arguments.kwonlyargs, arguments.kw_defaults)}
    if arguments.kwarg:
        found[f"**{arguments.kwarg.arg}"] = None
    return found


def differences(symbol: str, wanted: str, use: Use) -> Iterator[str]:
    """What of the installed verl does not fit the declaration and the use, in one line each."""
    there = look_up(symbol)
    if there is None:
        yield f"{symbol} is missing (declared: {wanted})"
        return
    if there.partition(" ")[0].partition("(")[0] != wanted.partition(" ")[0].partition("(")[0]:
        yield f"{symbol} is {there}, not {wanted}"
    parameters, before = _parameters(there), _parameters(wanted)
    if parameters is None or before is None:
        return
    for call in use.calls:
        yield from _unfit(symbol, there, call, parameters, before)
    for override in use.overrides:
        yield from _uncovered(symbol, there, override, parameters)


def _unfit(
    symbol: str,
    there: str,
    call: Call,
    parameters: dict[str, ast.expr | None],
    before: dict[str, ast.expr | None],
) -> Iterator[str]:
    names = [name for name in parameters if name not in ("self", "cls", "*")]
    unknown = [name for name in call.named if name not in names]
    if unknown and not any(each.startswith("**") for each in names):
        yield f"{symbol} {there} does not take {', '.join(unknown)}, passed at {call.where}"
        return
    if call.more:
        return
    given = {*names[: call.positional], *call.named}
    for name in names:
        if name in given or name.startswith("*"):
            continue
        if parameters[name] is None:
            yield f"{symbol} {there} wants {name!r}, not passed at {call.where}"
        elif name in before and _text(parameters[name]) != _text(before[name]):
            yield (
                f"{symbol} {there} has another default of {name!r} than "
                f"{_text(before[name])}, not passed at {call.where}"
            )


def _uncovered(
    symbol: str, there: str, override: Override, parameters: dict[str, ast.expr | None]
) -> Iterator[str]:
    """The override takes all that verl may pass, by position in verl's order and by name, and no
    more than that has to be passed."""
    ours, where = _of(override.arguments), override.where
    open_names = any(name.startswith("**") for name in ours)
    for name, default in parameters.items():
        if name in ours:
            mine = ours[name]
            if default is not None and mine is None:
                yield f"{symbol} {there} may be called without {name!r}; not at {where}"
            elif default is not None and _text(mine) != _text(default):
                yield f"{symbol} {there} has another default of {name!r} at {where}"
        elif not name.startswith("*") and not open_names:
            yield f"{symbol} {there} may be called with {name!r}; not at {where}"
    for name, default in ours.items():
        required = default is None and name != "self" and not name.startswith("*")
        if required and name not in parameters:
            yield f"{symbol} {there} is called without {name!r}, which is required at {where}"
    if [name for name in parameters if name in ours] != [
        name for name in ours if name in parameters
    ]:
        yield f"{symbol} {there} has its parameters in another order at {where}"


def _text(node: ast.expr | None) -> str:
    return "nothing" if node is None else ast.unparse(node)


def problems() -> list[str]:
    """All differences with the installed verl, sorted."""
    wanted = declared()
    uses = scan(wanted)
    found = []
    for symbol, description in wanted.items():
        found += differences(symbol, description, uses.get(symbol, Use()))
    return sorted(found)


def main(arguments: list[str]) -> int:
    """The exit code: 1 where something does not fit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl and what it imports warn freely as they load
        version = importlib.metadata.version("verl")
        if arguments == ["--write"]:
            lines = [f"{symbol} {look_up(symbol)}" for symbol in sorted(scan({}))]
            DECLARED.write_text("\n".join(lines) + "\n", encoding="utf-8")
            print(f"{len(lines)} symbols of verl {version}")
            return 0
        found = problems()
    for line in found:
        print(line)
    print(f"verl {version}: {len(found)} of {len(declared())} symbols do not fit the shim")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
