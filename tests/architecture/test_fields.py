"""How many settings there are: each is a line to read, to test and to keep."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator

PACKAGES = ("data_prep", "launch", "pipeline", "experiments")
_MOST = 503


def _config_fields() -> Iterator[str]:
    """Leaf fields of all config classes; those of a base class count there, sections inside."""
    for package in map(importlib.import_module, PACKAGES):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "__main__" in found.name:
                continue
            for cls in vars(importlib.import_module(found.name)).values():
                if not isinstance(cls, type) or cls.__module__ != found.name:
                    continue
                if not dataclasses.is_dataclass(cls):
                    continue
                bases = filter(dataclasses.is_dataclass, cls.__mro__[1:])
                inherited = {field.name for base in bases for field in dataclasses.fields(base)}
                for field in dataclasses.fields(cls):
                    is_section = dataclasses.is_dataclass(field.default_factory)
                    if "meaning" in field.metadata and not is_section | (field.name in inherited):
                        yield f"{cls.__name__}.{field.name}"


def test_there_are_not_too_many_settings() -> None:
    fields = list(_config_fields())
    assert len(fields) == len(set(fields))
    assert "TrainConfig.lr" in fields
    assert "PretrainConfig.train" not in fields
    assert len(fields) <= _MOST
