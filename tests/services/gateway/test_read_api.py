"""What the API tells is what the run folder says, in any order of pages, while it is written and after."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from services.core.types import RunEvent, SlotSpan
from services.gateway.schema import RunDetail, RunList, Spans, Steps
from services.report.progress_file import ProgressFile
from services.report.run_folder import RunFolder
from tests.services.gateway.runs import gateway, view


@pytest.fixture
def client(finished_root: Path) -> TestClient:
    return TestClient(gateway(finished_root, fresh_s=0.0))


def lines(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [r for r in rows if kind is None or r["kind"] == kind]


def only(client: TestClient, path: str) -> Any:
    answer = client.get(f"/api/v1{path}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait_for(client: TestClient, path: str, true: Any, seconds: float = 30.0) -> Any:
    give_up = time.monotonic() + seconds
    while not true(answer := only(client, path)):
        assert time.monotonic() < give_up, f"never: {answer}"
        time.sleep(0.05)
    return answer


def test_runs_are_listed_newest_first(client: TestClient) -> None:
    listed = RunList.model_validate(only(client, "/runs"))
    assert [r.name for r in listed.runs] == ["second", "first"] and not listed.control
    assert [(r.status, r.steps_done) for r in listed.runs] == [("finished", 12), ("finished", 3)]


def test_figures_are_those_of_the_files(client: TestClient, finished_root: Path) -> None:
    run_id = only(client, "/runs")["runs"][1]["run_id"]
    folder, run = finished_root / run_id, RunDetail.model_validate(only(client, f"/runs/{run_id}"))
    steps, evaluations = lines(folder / "metrics.jsonl", "step"), lines(folder / "metrics.jsonl", "evaluation")
    assert run.num_steps_done == len(steps) and run.totals.rollouts == sum(s["num_rollouts"] for s in steps)
    assert run.totals.acceptance_length == steps[-1]["acceptance_length"]
    assert run.totals.heldout_reward == evaluations[-1]["reward_mean"]
    assert run.totals.idle_s == pytest.approx(sum(s["idle_s"] for s in steps))
    assert (run.status, run.has_report, run.error, run.unreadable_lines) == ("finished", True, None, 0)
    told = Steps.model_validate(only(client, f"/runs/{run_id}/steps"))
    for row, step in zip(steps, told.items, strict=True):
        assert step.model_dump(exclude={"energy_j"}) == {k: row[k] for k in type(step).model_fields if k != "energy_j"}
    spans = Spans.model_validate(only(client, f"/runs/{run_id}/spans"))
    assert [s.model_dump() for s in spans.items] == lines(folder / "spans.jsonl") and spans.open == ()
    versions = only(client, f"/runs/{run_id}/versions")
    assert [v["version"] for v in versions["policy"]] == [1, 2, 3]
    assert [(v["step"], v["version"]) for v in versions["drafter"]] == [(1, 0), (2, 1)]


def test_which_strategy_ran_is_what_the_folder_says(client: TestClient, finished_root: Path) -> None:
    run_id = only(client, "/runs")["runs"][1]["run_id"]
    told, kept = only(client, f"/runs/{run_id}/strategies"), lines(finished_root / run_id / "strategies.jsonl")
    assert sum(b["rounds"] for b in told["buckets"]) == sum(s["rounds"] for s in kept) > 0
    assert all(sum(b["share"].values()) == pytest.approx(1.0) for b in told["buckets"])
    assert "requests running at a server" in told["sentences"][0]
    assert only(client, f"/runs/{run_id}").get("unreadable_lines") == 0


def test_a_run_of_an_older_version_has_no_strategies_to_tell(tmp_path: Path, finished_root: Path) -> None:
    run_id = "older"
    shutil.copytree(next(finished_root.iterdir()), tmp_path / run_id)
    (tmp_path / run_id / "strategies.jsonl").unlink()
    client = TestClient(gateway(tmp_path, fresh_s=0.0))
    assert only(client, f"/runs/{run_id}/strategies") == {"sentences": [], "buckets": []}


@pytest.mark.parametrize("limit", [1, 2, 7, 2000])
@pytest.mark.parametrize("name", ["steps", "spans", "events", "evaluations"])
def test_pages_together_are_all_rows_once(client: TestClient, name: str, limit: int) -> None:
    run_id = only(client, "/runs")["runs"][1]["run_id"]
    whole, since, rows = only(client, f"/runs/{run_id}/{name}"), 0, []
    while True:
        part = only(client, f"/runs/{run_id}/{name}?since={since}&limit={limit}")
        rows += part["items"]
        assert len(part["items"]) <= limit
        if part["next"] == since:
            break
        since = part["next"]
    assert rows == whole["items"] and since == whole["next"] == len(rows)
    assert only(client, f"/runs/{run_id}/{name}?since=100000") == {**whole, "items": []}


def test_lengths_are_those_of_the_rollouts(client: TestClient, finished_root: Path) -> None:
    from services.report.rollouts_file import read_columns, rollouts_path

    run_id = only(client, "/runs")["runs"][0]["run_id"]
    told = only(client, f"/runs/{run_id}/lengths")
    rows = read_columns(rollouts_path(finished_root / run_id / "rollouts", 12), ["response_len", "finish_reason"])
    lengths = sorted(r["response_len"] for r in rows)
    assert (told["step"], told["count"], told["longest"]) == (12, 64, lengths[-1])
    assert sum(b["count"] for b in told["bins"]) == 64
    for b in told["bins"]:
        assert b["count"] == sum(b["low"] <= n <= b["high"] for n in lengths)
    assert sum(b["truncated"] for b in told["bins"]) == sum(r["finish_reason"] == "length" for r in rows)
    assert only(client, f"/runs/{run_id}/lengths?step=2")["step"] == 2
    assert only(client, f"/runs/{run_id}/lengths?step=99") | {"bins": []} == {
        "step": None, "count": 0, "p50": None, "p90": None, "p99": None, "longest": None, "bins": [],
    }  # fmt: skip


def test_a_known_answer_is_not_sent_again(client: TestClient) -> None:
    run_id = only(client, "/runs")["runs"][0]["run_id"]
    first = client.get(f"/api/v1/runs/{run_id}/steps")
    again = client.get(f"/api/v1/runs/{run_id}/steps", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"") and again.headers["etag"] == first.headers["etag"]
    other = client.get(f"/api/v1/runs/{run_id}/steps?since=1", headers={"If-None-Match": first.headers["etag"]})
    assert other.status_code == 200


def test_a_living_run_is_told_as_it_goes(living: RunFolder) -> None:
    client = TestClient(gateway(living.path.parent, fresh_s=0.0))
    path = f"/runs/{living.run_id}"
    run = wait_for(client, path, lambda r: r["progress"])
    assert run["status"] == "running" and run["last_sign_s"] < 20
    assert run["progress"]["tokens_per_s"] == 512.5 and run["progress"]["slots"]["slot 1"] == "drafting"
    assert run["now_s"] >= 40.0 and run["strategies"] == ["off"]
    spans = only(client, f"{path}/spans")
    ends = {slot: max(s["end_s"] for s in spans["items"] if s["slot"] == slot) for slot in ("slot 0", "slot 1")}
    assert spans["open"] == [
        {"slot": "slot 0", "role": "rollout", "start_s": ends["slot 0"]},
        {"slot": "slot 1", "role": "drafting", "start_s": ends["slot 1"]},
    ]
    living.span(SlotSpan("slot 1", "drafting", 50.0, 51.0, "step 4"))
    living.event(RunEvent(51.0, "paused", "coordinator", "on request"))
    new = only(client, f"{path}/spans?since={spans['next']}")
    assert [s["start_s"] for s in new["items"]] == [50.0]
    assert only(client, f"{path}/events")["items"][-1]["kind"] == "paused"
    living.progress(view(4, "policy", phase_at_s=52.0))
    wait_for(client, path, lambda r: r["progress"]["phase"] == "policy")
    assert {"slot": "policy", "role": "policy", "start_s": 52.0} in only(client, f"{path}/spans")["open"]
    living.progress(view(4, "paused"))
    wait_for(client, path, lambda r: r["status"] == "paused")
    living.finish({"status": "stopped", "steps": 3})
    run = only(client, path)
    assert run["status"] == "stopped" and only(client, f"{path}/spans")["open"] == []


def test_a_run_whose_process_was_killed_is_silent(living: RunFolder) -> None:
    living._progress_file.close()
    file = living.path / "progress.json"
    row = json.loads(file.read_text())
    file.write_text(json.dumps({**row, "alive_at": row["alive_at"] - 60, "viewed_at": row["viewed_at"] - 60}))
    client = TestClient(gateway(living.path.parent, fresh_s=0.0))
    run = only(client, f"/runs/{living.run_id}")
    assert run["status"] == "silent" and run["last_sign_s"] > 50 and run["now_s"] < 60


def test_half_written_and_damaged_files_do_not_stop_a_reader(living: RunFolder) -> None:
    client = TestClient(gateway(living.path.parent, fresh_s=0.0))
    path = f"/runs/{living.run_id}"
    before = only(client, path)["num_spans"]
    with open(living.path / "spans.jsonl", "ab") as file:
        file.write(b'{"slot": "slot 0", "role": "idle", "start_s"')
        file.flush()
        assert only(client, path)["num_spans"] == before
        file.write(b': 60.0, "end_s": 61.0, "label": ""}\n\xff\xfe not JSON\n[1]\n{"slot": 3}\n"text"\n')
    (living.path / "summary.json").write_text("{")
    after = only(client, path)
    assert (after["num_spans"], after["unreadable_lines"]) == (before + 1, 4)


def test_a_run_that_began_anew_is_read_anew(living: RunFolder) -> None:
    client = TestClient(gateway(living.path.parent, fresh_s=0.0))
    path = f"/runs/{living.run_id}"
    only(client, path)
    (living.path / "spans.jsonl").write_text("")
    living.span(SlotSpan("slot 0", "idle", 0.0, 1.0, ""))
    run = only(client, path)
    assert run["num_spans"] == 1 and run["num_steps_done"] == 3


def test_numbers_that_are_not_finite_are_null(living: RunFolder) -> None:
    row = lines(living.path / "metrics.jsonl", "step")[-1]
    living._metrics.append({**row, "step": 4, "acceptance_length": None, "policy_loss": None, "not_finite": ["x"]})
    client = TestClient(gateway(living.path.parent, fresh_s=0.0))
    step = only(client, f"/runs/{living.run_id}/steps")["items"][-1]
    assert step["step"] == 4 and step["acceptance_length"] is None


def test_an_empty_folder_has_no_runs(tmp_path: Path) -> None:
    assert only(TestClient(gateway(tmp_path)), "/runs") == {"runs": [], "control": False}


def test_answers_are_made_once_per_moment(finished_root: Path) -> None:
    from services.gateway.app import build_app
    from services.gateway.settings import Settings
    from services.gateway.source import FolderSource

    class Counted(FolderSource):
        reads = 0

        def run(self, run_id: str) -> Any:
            Counted.reads += 1
            return super().run(run_id)

    client = TestClient(build_app(Counted(finished_root), None, Settings(hosts=("*",), fresh_s=60.0)))
    run_id = only(client, "/runs")["runs"][0]["run_id"]
    for _ in range(20):
        for part in ("", "/steps", "/spans", "/events"):
            only(client, f"/runs/{run_id}{part}")
    assert Counted.reads == 1


def test_a_run_that_ended_and_goes_on_again_is_not_remembered_as_ended(living: RunFolder) -> None:
    client = TestClient(gateway(living.path.parent, fresh_s=0.0))
    living.finish({"status": "stopped", "steps": 3})
    assert [r["status"] for r in only(client, "/runs")["runs"]] == ["stopped"]
    (living.path / "summary.json").unlink()  # as resuming it does
    again = ProgressFile(living.path / "progress.json")
    again.offer(view(4))
    wait_for(client, "/runs", lambda a: a["runs"][0]["status"] == "running")
    again.close()
