"""Every figure of the records of models with value and local fallbacks is computed again, and none is unknown."""

import json

import pytest

from recount import conversion, run_record
from recount.leaves import Exempt, Near, differences
from recount.models import KINDS


def check(found, expected, name):
    """Fail with a line for each field that is not as expected."""
    wrong = [*differences(found, expected, name)]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.mark.usefixtures("one_thread")
def test_the_record_of_the_conversion(kind, recount_of):
    recount = recount_of(kind)
    check(recount.read("moh", "conversion.json"), conversion.expected_conversion(recount), "conversion")
    check(recount.read("moh", "lineage.json"), conversion.expected_lineage(recount), "lineage")


@pytest.mark.usefixtures("one_thread")
def test_the_log_of_the_run(kind, recount_of):
    run = recount_of(kind)
    log = [json.loads(line) for line in (run.run / "log.jsonl").read_text().splitlines()]
    check(log, run.log, "log")


@pytest.mark.usefixtures("one_thread")
def test_the_record_of_the_run(kind, recount_of):
    run = recount_of(kind)
    check(run.read("run", "run.json"), run_record.expected_run(run), "run")
    check(run.read("run", "model", "lineage.json"), run_record.expected_lineage(run), "lineage")


def test_a_field_that_is_wrong_unknown_or_missing_is_named():
    record = {"kl": 0.1001, "new": 1, "layers": [{"load": 0.5002}], "seconds": 3.0, "documents": 3.0}
    expected = {"kl": 0.1, "tokens": 12, "layers": [{"load": Near(0.5, 1e-4)}], "seconds": Exempt("a time")}
    found = [line.partition(":")[0] for line in differences(record, expected | {"documents": 3}, "record")]
    assert found == [f"record.{name}" for name in ("new", "kl", "tokens", "layers[0].load", "documents")]
    assert not [*differences({"kl": 0.1}, {"kl": 0.1, "seconds": Exempt("a time")}, "record")]
