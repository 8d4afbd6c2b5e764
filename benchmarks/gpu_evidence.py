"""Whole models on one GPU, in one command: trained routers, RULER, and a model of 32,768 tokens.

    python benchmarks/gpu_evidence.py BASE --corpora DIR --longer QWEN --output-dir out/evidence --plan
    python benchmarks/gpu_evidence.py BASE --corpora DIR --longer QWEN --output-dir out/evidence --minutes 9.5
    python benchmarks/gpu_evidence.py BASE --corpora DIR --longer QWEN --output-dir out/evidence --minutes 4 --resume

BASE is SmolLM2-135M and QWEN Qwen2.5-Coder-0.5B, or models like them: folders with weights and tokenizer. DIR holds the
texts of `data_mixtures/long_local.yaml`, and redpajama_book, dolma and pile to score. RULER needs `lm-eval[ruler]`.

Parts run in order of worth. Their commands are those of this repository. They start at once, since one small model
leaves a GPU idle; what is timed is a part of its own. A part that reaches its limit is ended, and the next one begins.
`record.json` has of each command how it ended, its seconds, what it printed and its figures, and is written when a
command ends. `--resume` leaves out what ended well; training, scores and RULER go on where they were ended.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from moh_llm.evaluation.suite import load_suite
from moh_llm.files import write_json
from moh_llm.reading import read_json

ROOT = Path(__file__).resolve().parents[1]
PARTS = {  # seconds at most, seconds by estimate, and what that comes from
    "plans": (110, 60, "57 s for five budgets beside ten other runs (long_context.json)"),
    "train": (170, 100, "1.2M tokens, half as fast as the 33,000 a second of ten runs at 4,096 tokens (rivals.json)"),
    "score": (120, 70, "340 s for five models by one process beside ten other runs (long_context.json)"),
    "more": (350, 280, "4M tokens, as above; RULER beside them: 2,448 steps for base and model at an assumed 0.1 s"),
    "score-more": (100, 60, "as above"),
    "longer-plans": (130, 90, "four times the weights of `plans`, and four times as long documents"),
    "longer": (200, 150, "RULER's 1,224 steps at an assumed 0.1 s, and prompts of 16,384 tokens"),
    "longer-times": (90, 60, "6 rounds of three models, and their start"),
    "ruler": (320, 260, "as in `more`"),
}


class Sizes(NamedTuple):
    """Tokens of documents and of RULER's prompts; how much is calibrated, trained, scored and timed."""

    context: int = 8192
    window: int = 256  # of local fallbacks
    longer: int = 32768
    lengths: tuple[int, ...] = (4096, 8192)
    longer_length: int = 16384
    calibration: int = 24576
    few: int = 24  # steps of one document: 196,608 tokens
    more: int = 122  # 999,424 tokens
    documents: int = 20
    longer_documents: int = 10
    items: int = 25
    rounds: int = 5
    tasks: int | None = None  # of RULER; None: all


LINES = 60  # kept of what a command prints
TINY = Sizes(1024, 32, 1024, (4096,), 4096, 2048, 2, 3, 2, 1, 1, 1, tasks=1)


class Job(NamedTuple):
    """A command, what is there when it has ended well, and the file of its figures."""

    words: list[str]
    makes: Path | None = None
    figures: Path | None = None


def folder(name: str) -> Path:
    path = Path(name).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{name} is no folder")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=folder, help="SmolLM2-135M")
    parser.add_argument("--corpora", type=folder, required=True, help="texts")
    parser.add_argument("--longer", type=folder, help="Qwen2.5-Coder-0.5B (default: none, and none of its parts)")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.5, help="of all parts (default: 9.5)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="not all of them")
    parser.add_argument("--resume", action="store_true", help="go on after what record.json has")
    parser.add_argument("--plan", action="store_true", help="print parts, limits and estimates, and run nothing")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, two commands at once, no limits")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # commands end with this one
    args.output_dir = out = args.output_dir.resolve()
    sizes, path = TINY if args.tiny else Sizes(), out / "record.json"
    parts = {name: jobs for name, jobs in make_parts(args, sizes).items() if name in args.parts}
    for name, jobs in parts.items():
        most, estimate, why = PARTS[name]
        print(f"{name + ':':<13} {len(jobs)} commands, at most {most} s, by estimate {estimate} s: {why}")
    print(f"by estimate {sum(PARTS[name][1] for name in parts)} s; {60 * args.minutes:.0f} s are given", flush=True)
    if args.plan:
        return 0
    record = open_record(path, args.resume)
    tasks = list(dict.fromkeys(one.name.split()[0] for one in load_suite("ruler").benchmarks))[: sizes.tasks]
    for name, lengths in (("ruler", sizes.lengths), ("longer", (sizes.longer_length,))):
        entries = [{"from": "ruler", "name": f"{task} {length}"} for length in lengths for task in tasks]
        write_json(out / f"{name}.yaml", {"name": name, "title": "RULER", "benchmarks": entries})
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # what is compiled stays on disk
    os.environ |= {"CORPORA": str(args.corpora), "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    end = time.monotonic() + 60 * args.minutes
    for name, jobs in parts.items():
        begin, (most, estimate, _) = time.monotonic(), PARTS[name]
        if (waiting := left(jobs, record)) and end - begin > estimate / 2:
            run_jobs(name, waiting, path, record, end if args.tiny else min(end, begin + most), 2 if args.tiny else 99)
    print(f"seconds: {', '.join(f'{name} {seconds}' for name, seconds in record['seconds'].items())}")
    print(f"left: {', '.join(name for jobs in parts.values() for name in left(jobs, record)) or 'nothing'}")
    return int(any(left(jobs, record) for jobs in parts.values()))


def make_parts(args: argparse.Namespace, sizes: Sizes) -> dict[str, dict[str, Job]]:
    """The jobs of each part, by name. Raises SystemExit where texts are missing."""
    base, longer, out = args.base, args.longer, args.output_dir

    def texts(*patterns: str) -> list[Path]:
        found = {pattern: sorted(args.corpora.glob(pattern)) for pattern in patterns}
        if missing := [pattern for pattern, files in found.items() if not files]:
            raise SystemExit(f"error: --corpora {args.corpora} has no {', '.join(missing)}; --help says what it holds")
        return [file for files in found.values() for file in files]

    def job(makes: Path | None, figures: Path | None, script: str, *words: Any) -> Job:
        return Job([str(word) for word in (sys.executable, ROOT / script, *words)], makes, figures)

    calibration = "--calibration", *texts("redpajama_arxiv/train-00000*", "redpajama_wikipedia/train-00000*")
    held_out = texts("redpajama_book/train*", "dolma/train-00000*", "pile/train-00000*")

    def plans(name: str, *words: Any, of: Path = base, context: int = sizes.context) -> Job:
        words += "--context", context, "--calibration-tokens", sizes.calibration, *calibration
        words += "--windows", sizes.window, "--output-dir", out / "plans" / name
        return job(out / "plans" / name, None, "benchmarks/local_plans.py", of, *words)

    def trained(plan: str, steps: int = sizes.few, seed: int = 0) -> Path:
        return out / "runs" / f"{plan}-{steps}-steps-seed-{seed}" / "model"

    def train(plan: str, steps: int = sizes.few, seed: int = 0) -> Job:
        model = trained(plan, steps, seed)
        words = "--model", untrained[plan], "--output-dir", model.parent, "--max_steps", steps, "--seed", seed
        words += "--data.mixture", ROOT / "data_mixtures/long_local.yaml", "--data.sequence_length", sizes.context
        words += "--evaluation.max_tokens", 2 * sizes.context, "--checkpoint.save_steps", 24
        return job(model, model.parent / "run.json", "train.py", ROOT / "recipes/smollm2_long.yaml", *words)

    def score(name: str, *models: Path, of: Path = base, **more: Any) -> Job:
        file = out / f"kl-{name}.json"
        words = {"context": sizes.context, "documents": sizes.documents, "prompts": 0, "base": of, "json": file} | more
        options = [word for key, value in words.items() for word in (f"--{key}", value)]
        return job(file, file, "benchmarks/long_context.py", *models[:1], *held_out, *options, "--also", *models[1:])

    def scores(steps: int, *runs: tuple[str, int]) -> dict[str, Job]:
        """Of trained models and of what they began as; at a third of the keys also what they retrieve."""
        asked = {name: {"prompts": sizes.documents if name == "0.33" else 0} for name in untrained}
        own = {f"{name}-{steps}-{seed}": (trained(name, steps, seed), name) for name, seed in runs}
        return {key: score(key, model, untrained[name], **asked[name]) for key, (model, name) in own.items()}

    def rulers(models: dict[str, Path], *plans: str, of: Path = base, suite: str = "ruler") -> dict[str, Job]:
        words = "--base", of, "--suite", out / f"{suite}.yaml", "--limit", sizes.items, "--no-analysis"
        words += "--batch-size", sizes.items if of == base else min(sizes.items, 8)
        found = {}
        for name, model in (models | {f"{plan}-trained": trained(plan) for plan in plans}).items():
            more = "--output-dir", (report := out / f"{suite}-{name}")
            found[f"ruler-{name}"] = job(report, report / "report.json", "evaluate.py", model, *words, *more)
        return found

    heads = {name: out / f"plans/heads/{name}-threshold-head-{sizes.window}" for name in ("0.67", "0.5", "0.33", "0.2")}
    untrained = heads | {"groups": out / f"plans/groups/0.5-threshold-kv_group-{sizes.window}"}
    fixed, streaming = (out / f"plans/fixed/0.5-{router}-head-{sizes.window}" for router in ("none", "streaming"))
    budgets, paper = ("0.33", "0.5", "0.2", "groups"), out / "plans/paper"
    seeds = [*((plan, 0) for plan in budgets), ("0.33", 1), ("0.33", 2)]
    parts = {
        "plans": {
            "heads": plans("heads", "--keys", *heads),
            "groups": plans("groups", "--keys", 0.5, "--granularities", "kv_group"),
            "fixed": plans("fixed", "--keys", 0.5, "--routers", "none", "streaming"),
            "paper": job(paper, None, "convert.py", base, "--preset", "paper", "--heldout-tokens", 0, "--context",
                         sizes.context, "--output-dir", paper),
        },
        "train": {f"{plan}-{seed}": train(plan, seed=seed) for plan, seed in seeds},
        "score": scores(sizes.few, *seeds) | {"fixed": score("fixed", fixed, streaming)},
        "more": {plan: train(plan, sizes.more) for plan in budgets}
        | rulers({"0.5": heads["0.5"], "0.5-fixed": fixed}, "0.5", "0.33"),
        "score-more": scores(sizes.more, *seeds[:4]),
        "ruler": rulers({"0.67": heads["0.67"], "streaming": streaming, "paper": paper}, "0.2", "groups"),
    }  # fmt: skip
    if longer:
        made = {keys: out / f"plans/longer-heads/{keys}-threshold-head-{sizes.window}" for keys in ("0.5", "0.33")}
        made["groups"] = out / f"plans/longer-groups/0.5-threshold-kv_group-{sizes.window}"
        own = {"context": sizes.longer, "of": longer}
        kl = score("longer", *made.values(), **own, documents=sizes.longer_documents, **{"compute-dtype": "bfloat16"})
        timed = "--models", *made.values(), "--text", *held_out, "--lengths", sizes.longer, "--rounds", sizes.rounds
        parts["longer-plans"] = {
            "heads": plans("longer-heads", "--keys", 0.5, 0.33, **own),
            "groups": plans("longer-groups", "--keys", 0.5, "--granularities", "kv_group", **own),
        }
        parts["longer"] = {"kl": kl} | rulers(made, of=longer, suite="longer")
        parts["longer-times"] = {"speed": job(None, None, "benchmarks/speed.py", longer, *timed)}
    return {name: {f"{name}/{key}": one for key, one in parts[name].items()} for name in PARTS if name in parts}


# ---- commands that run at once, with a record of each that is written when it ends


def open_record(path: Path, resume: bool) -> dict[str, Any]:
    """By command how it ended, its seconds, words, the end of what it printed, and figures; seconds by part.

    Raises SystemExit where the folder of `path` holds something, and no record to resume is asked for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if any(path.parent.iterdir()) and not (resume and path.exists()):
        raise SystemExit(f"error: {path.parent} is not empty; name another, or --resume where it has a {path.name}")
    return read_json(path) if path.exists() else {"seconds": {}, "commands": {}}


def left(jobs: dict[str, Job], record: dict[str, Any]) -> dict[str, Job]:
    """The jobs that have not ended well, by the record and by what they make."""

    def done(name: str, job: Job) -> bool:
        known = record["commands"].get(name, {})
        return known.get("status") == 0 and known["command"] == job.words and (not job.makes or job.makes.exists())

    return {name: job for name, job in jobs.items() if not done(name, job)}


def run_jobs(part: str, jobs: dict[str, Job], path: Path, record: dict[str, Any], until: float, at_once: int) -> None:
    """Run jobs, `at_once` of them, and kill with all their processes those that run when it is `until`.

    `until` is by `time.monotonic()`. Jobs go into the `record` of earlier ones, which is at `path`, and their seconds
    to its `part`; what they print goes into files beside it.
    """
    waiting, running, begin = list(jobs), {}, time.monotonic()
    try:
        while (waiting or running) and time.monotonic() < until:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                running[name] = start(jobs[name], path.parent / "printed" / name.replace("/", "-")), time.monotonic()
            time.sleep(0.1)
            for name in [name for name, (process, _) in running.items() if process.poll() is not None]:
                note(path, record, name, jobs[name], *running.pop(name))
    finally:
        for name, (process, since) in running.items():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            note(path, record, name, jobs[name], process, since)
        record["seconds"][part] = round(record["seconds"].get(part, 0) + time.monotonic() - begin, 1)
        write_json(path, record)


def start(job: Job, printed: Path) -> subprocess.Popen:
    """Start a command in a group of processes of its own; it prints into `printed.out` and `printed.err`."""
    if job.makes and job.makes.is_dir():  # an unfinished one; checkpoints and finished tasks lie beside it
        shutil.rmtree(job.makes)
    printed.parent.mkdir(exist_ok=True)
    with open(f"{printed}.out", "w") as out, open(f"{printed}.err", "w") as errors:
        return subprocess.Popen(job.words, cwd=printed.parent, stdout=out, stderr=errors, start_new_session=True)


def note(path: Path, record: dict[str, Any], name: str, job: Job, process: subprocess.Popen, since: float) -> None:
    """Record and print how a command ended; of one that failed also its errors."""
    seconds, status, lines = time.monotonic() - since, process.returncode, []
    for kind in ("out", "err") if status else ("out",):
        printed = path.parent / "printed" / f"{name.replace('/', '-')}.{kind}"
        lines += printed.read_text(errors="replace").splitlines()[-LINES:]
    found = {"status": status, "seconds": round(seconds, 1), "command": job.words, "printed": lines}
    if job.figures and job.figures.exists():
        found["figures"] = read_json(job.figures)
    record["commands"][name] = found
    write_json(path, record)
    fault = f", status {status}: {(lines or [''])[-1][-200:]}" if status else ""
    print(f"{name}: {seconds:.0f} s{fault}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
