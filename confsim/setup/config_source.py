"""What Hydra searches beside the `conf` package: the user's folders, and classes by dotted path or entry point."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from confsim.setup.registry import GROUPS
from confsim.setup.search_path import folders
from traces.registry import by_path, entry_point_path, entry_points


class UserSearchPath(SearchPathPlugin):
    """Appends the user's folders, and classes, to what Hydra searches."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra whenever it is initialised."""
        for folder in folders():
            search_path.append("user", f"file://{folder}")
        search_path.append("classes", f"{ClassSource.scheme()}://")


class ClassSource(ConfigSource):
    """`scheme=package.module.Class`: a configuration of the class with the defaults of its fields."""

    @staticmethod
    def scheme() -> str:
        """The prefix by which a search path names this source."""
        return "classes"

    def available(self) -> bool:
        """Always."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Whether classes can be chosen in a group."""
        return config_path in GROUPS

    def is_config(self, config_path: str) -> bool:
        """Whether a choice is a dotted path or an entry point."""
        return target_of(*_split(config_path)) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Names of the entry points that a group has."""
        wanted = config_path in GROUPS and results_filter in (None, ObjectType.CONFIG)
        return entry_points(GROUPS[config_path]) if wanted else []

    def load_config(self, config_path: str) -> ConfigResult:
        """The configuration of a class.

        Raises:
            InputError: where the path leads to no class.
        """
        config = OmegaConf.create(class_config(*_split(config_path)))
        return ConfigResult(self.provider, f"{self.scheme()}://", config, {"package": None})


def _split(config_path: str) -> tuple[str, str]:
    group, _, name = config_path.removesuffix(".yaml").rpartition("/")
    return group, name


def target_of(group: str, name: str) -> str | None:
    """The dotted path of the class that a group's choice stands for; None where it is a file's."""
    if group not in GROUPS:
        return None
    return name if "." in name else entry_point_path(GROUPS[group], name)


def class_config(group: str, name: str) -> dict[str, Any]:
    """`_target_` and the defaults of a class, as a YAML file of the group would have them.

    Raises:
        InputError: where the name leads to no class.
    """
    target = target_of(group, name)
    assert target is not None, f"{group}={name} is no class"
    return {"_target_": target, **_defaults(by_path(target, group))}


def _defaults(made: Any) -> dict[str, Any]:
    """Options with their defaults, "???" where one has to be given."""
    if not dataclasses.is_dataclass(made):
        options = inspect.signature(made).parameters.values()
        return {o.name: "???" if o.default is o.empty else o.default for o in options}
    return {field.name: _plain(field) for field in dataclasses.fields(made) if field.init}


def _plain(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        value = "???" if field.default is dataclasses.MISSING else field.default
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        return {"_target_": f"{kind.__module__}.{kind.__qualname__}", **dataclasses.asdict(value)}
    return list(value) if isinstance(value, tuple) else value


def register() -> None:
    """Tell Hydra, once per process."""
    for plugin in (UserSearchPath, ClassSource):
        Plugins.instance().register(plugin)
