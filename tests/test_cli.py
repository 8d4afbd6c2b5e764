"""The command line: light to start, one line for bad input, and the documents' promises."""

import subprocess
import sys
from pathlib import Path

import pytest

from moh_llm.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]


def python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True)


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from moh_llm.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets', 'lm_eval', 'accelerate', 'peft'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert all(command in done.stdout for command in COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("evaluate . --suite ruler", "suite ruler: every prompt is longer than a model's context, 2,048 tokens"),
        ("train recipe.yaml --report_to [tensorboard,nowhere]", "report_to: 'nowhere' is unknown; known are aim, "),
    ],
)
def test_what_needs_no_torch_is_refused_without(words, message, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 2048}')
    (tmp_path / "recipe.yaml").write_text("model: .\noutput_dir: run\nmax_steps: 2\n")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from moh_llm.cli import main; "
    code += "print(main(sys.argv[1:]), 'torch' in sys.modules)"
    done = python("-c", code, str(ROOT), *words.split(), cwd=tmp_path)
    assert done.stdout == "2 False\n" and done.stderr.startswith(f"error: {message}"), done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert command in capsys.readouterr().out


@pytest.mark.parametrize("script", ["convert.py", "train.py", "evaluate.py"])
def test_scripts_are_the_commands(script, tmp_path):
    """From another folder, so that nothing hangs on the working directory."""
    done = python(str(ROOT / script), "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"usage: moh-llm {script.removesuffix('.py')}" in done.stdout


def test_interrupt_is_one_line(monkeypatch, capsys, tmp_path):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("moh_llm.commands.convert.run", interrupt)
    assert main(["convert", "base", "--output-dir", str(tmp_path / "out")]) == 130
    assert capsys.readouterr().err == "interrupted; nothing half-written was left in place of a result\n"
