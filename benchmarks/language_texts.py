"""Texts of two languages and of code, to score conversions on or to calibrate with.

    python benchmarks/language_texts.py out/texts --data-dir BENCHMARKS

writes english.jsonl and chinese.jsonl, the questions of MMLU and CMMLU with their options and answers, a document for
each subject, so that both have one form; chinese_read.jsonl, every second of CMMLU's subjects, which chinese.jsonl then
lacks; and code.jsonl, the modules of Python's standard library. `--data-dir` is as for evaluate.py.
"""

import argparse
import json
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from command import status_of

from moh_llm.errors import UserError
from moh_llm.files import new_folder

LETTERS = "ABCD"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder that is made")
    parser.add_argument("--data-dir", type=Path, required=True, help="folder of moh-llm data fetch-benchmarks")
    return status_of(run, parser.parse_args())


def run(args: argparse.Namespace) -> None:
    english = list(documents_of(args.data_dir / "cais__mmlu", mmlu))
    chinese = list(documents_of(args.data_dir / "haonan-li__cmmlu", cmmlu))
    library = Path(sysconfig.get_path("stdlib"))
    code = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(library.glob("*.py"))]
    texts = {"english": english, "chinese": chinese[1::2], "chinese_read": chinese[::2], "code": code}
    with new_folder(args.output) as folder:
        for name, documents in texts.items():
            lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
            print(f"{name}: {len(documents)} documents, {sum(map(len, documents)):,} characters")
    print(f"code is that of Python {platform.python_version()}")


def documents_of(folder: Path, show: Callable[[dict[str, Any]], str]) -> Iterator[str]:
    """The test questions of each subject of a benchmark as one document, each question by `show`.

    Raises UserError where there are none.
    """
    files = sorted(folder.glob("*/test.jsonl"))
    if not files:
        raise UserError(f"{folder} has no SUBJECT/test.jsonl; give the folder that fetch-benchmarks filled")
    for path in files:
        with path.open(encoding="utf-8") as lines:
            yield "\n\n".join(show(json.loads(line)) for line in lines)


def mmlu(row: dict[str, Any]) -> str:
    """A question of MMLU with its options and its answer's letter."""
    options = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=True)]
    return "\n".join([row["question"], *options, f"Answer: {LETTERS[row['answer']]}"])


def cmmlu(row: dict[str, Any]) -> str:
    """The same of CMMLU."""
    return "\n".join([row["Question"], *(f"{letter}. {row[letter]}" for letter in LETTERS), f"答案: {row['Answer']}"])


if __name__ == "__main__":
    sys.exit(main())
