"""Makes the Auto classes of transformers know MoH models once `moh_llm` is imported, at no cost until one is loaded.

`moh_llm.modeling` registers the classes with them, but takes seconds to import, since it needs
torch; and it cannot be imported while transformers is in the middle of importing its own models. So
transformers' list of configurations gets an entry that imports it when a MoH model is first asked
for. The list is found whichever of the two packages is imported first.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

MODEL_TYPE = "moh_llama"
_LIST = "transformers.models.auto.configuration_auto"


class _Configurations(dict[str, Any]):
    """What was registered with transformers beside its own configurations, and ours, imported when asked for."""

    def __contains__(self, model_type: object) -> bool:
        return model_type == MODEL_TYPE or super().__contains__(model_type)

    def __getitem__(self, model_type: str) -> Any:
        if model_type == MODEL_TYPE and not super().__contains__(model_type):
            importlib.import_module("moh_llm.modeling")  # which registers configuration and models
        return super().__getitem__(model_type)


class _Finder(MetaPathFinder):
    """Waits for the list to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The list's spec, whose loader also adds the entry; None for all other modules."""
        if fullname != _LIST:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            fill = spec.loader.exec_module

            def fill_and_add(module: ModuleType) -> None:
                fill(module)
                _add_entry(module)

            spec.loader.exec_module = fill_and_add  # type: ignore[method-assign]
        return spec


def register_with_transformers() -> None:
    """Add the entry now if transformers has loaded its list, else when it does."""
    if _LIST in sys.modules:
        _add_entry(sys.modules[_LIST])
    else:
        sys.meta_path.insert(0, _Finder())


def _add_entry(module: ModuleType) -> None:
    configurations = module.CONFIG_MAPPING
    configurations._extra_content = _Configurations(configurations._extra_content)
