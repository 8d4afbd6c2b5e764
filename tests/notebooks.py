"""Executing the notebooks of examples/; `python tests/notebooks.py` keeps what they print in their files.

They run in examples/, on the base that MOH_BASE names or on SmolLM2, and write to examples/out.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[1] / "examples"
EXECUTED = ("1_convert", "2_recover", "3_use_and_serve")  # each goes on from what the one before it wrote


def read(name: str) -> "NotebookNode":
    """A notebook of examples/."""
    import nbformat

    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def execute(name: str, folder: Path) -> "NotebookNode":
    """The notebook after all of its cells ran in ``folder``, with what they printed but to stderr, and ~ for the home.

    Raises CellExecutionError (nbclient) where one fails.
    """
    from nbclient import NotebookClient

    place = {"metadata": {"path": str(folder)}}
    client = NotebookClient(read(name), timeout=None, resources=place, record_timing=False, coalesce_streams=True)
    notebook = client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":  # without progress bars and warnings
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if output.output_type == "stream":
                    lines = output.text.replace(str(Path.home()), "~").splitlines(keepends=True)
                    output.text = "".join(line for line in lines if "[WARNING]" not in line)
    return notebook


def texts(notebook: "NotebookNode") -> list[str]:
    """What each code cell printed."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(o.text for o in cell.outputs if o.get("name") == "stdout") for cell in cells]


if __name__ == "__main__":
    import nbformat

    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    for name in EXECUTED:
        print(name, flush=True)
        nbformat.write(execute(name, FOLDER), FOLDER / f"{name}.ipynb")
