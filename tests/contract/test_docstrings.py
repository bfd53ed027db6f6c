"""What a user meets has a docstring, and the fields of a class are explained by name."""

import builtins
import inspect
import re

import attrs
import pytest

import remote_rl

PUBLIC = {name: getattr(remote_rl, name) for name in remote_rl.__all__ if not name.startswith("__")}
CALLABLE = {name: value for name, value in PUBLIC.items() if callable(value)}
WITH_FIELDS = {
    name: value for name, value in CALLABLE.items() if isinstance(value, type) and attrs.has(value)
}


def test_every_public_name_is_documented():
    assert [name for name, value in PUBLIC.items() if not (inspect.getdoc(value) or "")] == []


@pytest.mark.parametrize(
    "name", sorted(each for each in CALLABLE if inspect.isclass(CALLABLE[each]))
)
def test_every_public_method_and_property_is_documented(name):
    cls = CALLABLE[name]
    undocumented = []
    for attribute, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else value
        if isinstance(function, (classmethod, staticmethod)):
            function = function.__func__
        if attribute.startswith("_") or not inspect.isfunction(function):
            continue
        if not (function.__doc__ or "").strip():
            undocumented.append(attribute)
    assert undocumented == []


@pytest.mark.parametrize("name", sorted(WITH_FIELDS))
def test_the_docstring_of_a_class_mentions_each_of_its_fields(name):
    words = set(re.findall(r"\w+", WITH_FIELDS[name].__doc__))
    fields = [
        field.name for field in attrs.fields(WITH_FIELDS[name]) if not field.name.startswith("_")
    ]
    assert [field for field in fields if field not in words] == []


@pytest.mark.parametrize("module", [remote_rl, remote_rl.losses, remote_rl.errors])
def test_an_import_of_everything_replaces_no_builtin(module):
    assert not {name for name in module.__all__ if name[0] != "_"} & set(dir(builtins))
    assert all(hasattr(module, name) for name in module.__all__)
    assert remote_rl.losses.sum() == remote_rl.losses.token_sum()


def test_reprs_and_tracebacks_show_the_public_module():
    assert {value.__module__ for value in CALLABLE.values()} == {"remote_rl"}
