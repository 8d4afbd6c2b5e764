"""Everything is in setup.cfg but one step: recipes and data mixtures, which lie in the root, go into the wheel."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Builds the package with `recipes` and `data_mixtures` in it; an editable one finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("recipes", "data_mixtures"):
                copy = Path(self.build_lib, "moh_llm", name)
                shutil.rmtree(copy, ignore_errors=True)  # of an earlier build
                shutil.copytree(name, copy)


setup(cmdclass={"build_py": BuildWithRecipes})
