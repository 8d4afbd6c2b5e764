"""Makes transformers know MoH models and their attention once `moh_llm` is imported, at no cost until one is loaded.

`moh_llm.modeling` and `moh_llm.attention` register themselves, but take seconds to import, since they need torch; and
they cannot be imported while transformers is in the middle of importing its own models. So transformers' list of
configurations gets an entry that imports the one when a MoH model is first asked for, and its list of attention
functions one that imports the other. The lists are found whichever of the two packages is imported first.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MODEL_TYPE = "moh_llama"
_LIST, _FUNCTIONS = "transformers.models.auto.configuration_auto", "transformers.modeling_utils"


class _Configurations(dict[str, Any]):
    """What was registered with transformers beside its own configurations, and ours, imported when asked for."""

    def __contains__(self, model_type: object) -> bool:
        return model_type == MODEL_TYPE or super().__contains__(model_type)

    def __getitem__(self, model_type: str) -> Any:
        if model_type == MODEL_TYPE and not super().__contains__(model_type):
            importlib.import_module("moh_llm.modeling")  # which registers configuration and models
        return super().__getitem__(model_type)


class _Finder(MetaPathFinder):
    """Waits for a module to be imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], Any]):
        self.name, self.then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec, whose loader also calls `then`; None for all other modules."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            fill = spec.loader.exec_module

            def fill_and_add(module: ModuleType) -> None:
                fill(module)
                self.then(module)

            spec.loader.exec_module = fill_and_add  # type: ignore[method-assign]
        return spec


def register_with_transformers() -> None:
    """Add the entries now if transformers has loaded its lists, else when it does."""
    changes: dict[str, Callable[[ModuleType], Any]] = {
        _LIST: _add_entry,
        _FUNCTIONS: lambda module: module.AttentionInterface.register("moh_interval", _attend),
        # Not when a layer first attends: compiled code cannot import.
        "moh_llm.modeling": lambda _: importlib.import_module("moh_llm.attention"),
    }
    for name, add in changes.items():
        if name in sys.modules:
            add(sys.modules[name])
        else:
            sys.meta_path.insert(0, _Finder(name, add))


def _add_entry(module: ModuleType) -> None:
    configurations = module.CONFIG_MAPPING
    configurations._extra_content = _Configurations(configurations._extra_content)


def _attend(*given: Any, **kwargs: Any) -> Any:
    """The operation of MoH layers, which takes this function's place when it is imported."""
    return importlib.import_module("moh_llm.attention").interval_attention(*given, **kwargs)
