"""What the processes of a deployment agree on: the job, the layout, and who may use the directory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from whimbrel.cli.main import make_app
from whimbrel.core.errors import Conflict, Refused, Unavailable, UnknownName
from whimbrel.deploy import deployment
from whimbrel.deploy.deployment import Deployment, agreed, load_job
from whimbrel.deploy.orchestrator import OrchestratorProcess
from whimbrel.deploy.site import SiteProcess
from whimbrel.host.contract import INLINE
from whimbrel.log.lock import lock_all, lock_role
from whimbrel.orchestrator.directory import claim_directory
from whimbrel.orchestrator.journal import Journal
from whimbrel.rpc.access import make_token

HEAD = "import whimbrel as wb\nfrom tests.app.test_pipeline import Count\n"
JOB = 'pipeline = wb.Pipeline("p", source=[{"k": "a"}], key="k").stage("count", Count())\n'


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


def write(folder: Path, name: str, text: str) -> str:
    file = folder / f"{name}.py"
    file.write_text(HEAD + text)
    return str(file)


@pytest.mark.usefixtures("path")
def test_a_job_is_the_pipeline_of_a_file(tmp_path: Path) -> None:
    assert load_job(write(tmp_path, "job_a", JOB + "same = pipeline\n")).name == "p"
    two = write(tmp_path, "job_b", JOB + JOB.replace("pipeline", "other", 1).replace('"p"', '"q"'))
    assert load_job(f"{two}:other").name == "q"
    with pytest.raises(Refused, match=r"it has pipeline, other. If there are several, name one: .*job_b.py:name"):
        load_job(two)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("job_c", "", "it has none"),
        ("job_d", f"if __name__ == '__main__':\n    {JOB}", "not inside a function or `if __name__"),
        ("job_e", JOB.partition(".stage")[0] + "\n", "has no stage"),
        ("job_f:nothing", JOB, "it has none"),
    ],
)
def test_a_file_that_makes_no_pipeline_is_refused(tmp_path: Path, name: str, text: str, told: str) -> None:
    stem, _, wanted = name.partition(":")
    file = write(tmp_path, stem, text)
    with pytest.raises(Refused, match=told):
        load_job(f"{file}:{wanted}" if wanted else file)


@pytest.mark.parametrize("name", ["nothing.py", ".", "job.txt"])
def test_what_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "job.txt").touch()
    with pytest.raises(Refused, match="is not a Python file"):
        load_job(str(tmp_path / name))


@pytest.mark.usefixtures("path")
def test_all_go_by_what_the_orchestrator_has_decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = load_job(write(tmp_path, "job_g", JOB))
    journal = Journal(tmp_path / "journal.db")
    monkeypatch.setattr(deployment, "JOURNAL_TIMEOUT", 0.0)
    with pytest.raises(Unavailable, match="start it first: whimbrel orchestrator"):
        agreed(tmp_path, pipeline)
    decided = Deployment(["cloud", "edge-1"], "delay=5ms", "1 second", True, 7)
    claim_directory(tmp_path, journal, pipeline.name, [stage.name for stage in pipeline.stages], decided.sites)
    decided.save(journal)
    assert agreed(tmp_path, pipeline) == decided
    pipeline.name = "another"
    with pytest.raises(Refused, match="belongs to pipeline 'p'"):
        agreed(tmp_path, pipeline)
    journal.close()


@pytest.mark.usefixtures("path")
def test_a_site_runs_its_instances_on_the_deployments_host(tmp_path: Path) -> None:
    pipeline = load_job(write(tmp_path, "job_h", JOB))
    journal = Journal(tmp_path / "journal.db")
    claim_directory(tmp_path, journal, pipeline.name, [stage.name for stage in pipeline.stages], ["cloud"])
    Deployment(["cloud"], host=INLINE).save(journal)
    with pytest.raises(Refused, match=r"on the host 'inline', not 'micro-batch': start this site with --host inline"):
        SiteProcess("cloud", pipeline, tmp_path)
    with pytest.raises(UnknownName, match="unknown host 'flink'; there is: inline, micro-batch"):
        SiteProcess("cloud", pipeline, tmp_path, host="flink")
    journal.close()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("name", "host", "stage", "told"),
    [
        ("job_i", "flink", "Count()", "unknown host 'flink'; there is: inline, micro-batch"),
        ("job_j", INLINE, "Count(), prepare=lambda frame: frame", "stage count has a prepare"),
    ],
)
def test_a_host_that_cannot_run_the_job_is_refused_before_anything_runs(
    tmp_path: Path, name: str, host: str, stage: str, told: str
) -> None:
    job, data = write(tmp_path, name, JOB.replace("Count()", stage)), tmp_path / "data"
    with pytest.raises(Refused, match=told):
        OrchestratorProcess(load_job(job), data, Deployment(["cloud"], host=host))
    shown = CliRunner().invoke(make_app(), ["up", job, "--data", str(data), "--host", host])
    assert isinstance(shown.exception, Refused)
    assert told in str(shown.exception)
    assert not (data / "journal.db").exists()


def test_one_of_each_role_and_no_run_of_all_beside_them(tmp_path: Path) -> None:
    with lock_role(tmp_path, "gateway"), lock_role(tmp_path, "site-cloud"):
        with lock_role(tmp_path, "site-edge-1"):
            pass
        with pytest.raises(Conflict, match="site-cloud is running already"):
            lock_role(tmp_path, "site-cloud")
        with pytest.raises(Conflict, match="another run uses"):
            lock_all(tmp_path)
    with lock_all(tmp_path), pytest.raises(Conflict, match="another run uses"):
        lock_role(tmp_path, "gateway")
    with lock_role(tmp_path, "gateway"):
        pass


def test_whoever_makes_the_token_all_get_the_same_and_nobody_else_may_read_it(tmp_path: Path) -> None:
    token = make_token(tmp_path / "data")
    assert make_token(tmp_path / "data") == token
    assert len(token) >= 43
    assert (tmp_path / "data" / "token").stat().st_mode & 0o777 == 0o600
    assert [file.name for file in (tmp_path / "data").iterdir()] == ["token"]


@pytest.mark.parametrize(
    "option", [("--durability", "power"), ("--store", "s3://b/x"), ("--host", "inline"), ("--keep",)]
)
def test_what_the_deployment_file_says_is_not_said_twice(tmp_path: Path, option: tuple[str, ...]) -> None:
    file = tmp_path / "deployment.toml"
    file.write_text('job = "job.py"\n[places.cloud]\n')
    done = CliRunner().invoke(make_app(), ["up", "--deployment", str(file), "--data", str(tmp_path / "d"), *option])
    assert isinstance(done.exception, Refused)
    assert f"{option[0]} cannot be combined with --deployment" in str(done.exception)
    assert not (tmp_path / "d").exists()
