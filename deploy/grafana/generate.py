"""Dashboards as code: `python deploy/grafana/generate.py` writes fleet.json and job.json, `--check` compares them.

Built with Grafana's own foundation SDK (development only); the JSON is committed and byte-identical on every run.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grafana_foundation_sdk.builders import (
    bargauge,
    dashboard,
    heatmap,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DataSourceRef

HERE = Path(__file__).resolve().parent
DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
JOB = 'job_id="$job_id"'


def query(expression: str, legend: str = "", *, is_heatmap: bool = False):  # type: ignore[no-untyped-def]
    """Return one Prometheus query."""
    made = prometheus.Dataquery().expr(expression).legend_format(legend).datasource(DATASOURCE)
    return made.format("heatmap") if is_heatmap else made


class Page:
    """Panels in rows of 24 columns; places them left to right, so that none overlap."""

    def __init__(self, title: str, uid: str) -> None:
        self.dashboard = (
            dashboard.Dashboard(title)
            .uid(uid)
            .tags(["piped"])
            .refresh("10s")
            .time("now-30m", "now")
            .timezone("browser")
            .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        )
        self._x = self._y = self._height = self._id = 0

    def add(self, panel, title: str, unit: str, *queries, width: int = 8, height: int = 8, text: str = "") -> None:  # type: ignore[no-untyped-def]
        """Place a panel with its queries."""
        from grafana_foundation_sdk.models.dashboard import GridPos

        if self._x + width > 24:
            self._x, self._y, self._height = 0, self._y + self._height, 0
        self._id += 1
        panel = panel.id(self._id).title(title).unit(unit).description(text).datasource(DATASOURCE)
        for each in queries:
            panel = panel.with_target(each)
        panel = panel.grid_pos(GridPos(h=height, w=width, x=self._x, y=self._y))
        self.dashboard = self.dashboard.with_panel(panel)
        self._x, self._height = self._x + width, max(self._height, height)

    def json(self) -> str:
        """Return the committed form."""
        return JSONEncoder(sort_keys=True, indent=2).encode(self.dashboard.build()) + "\n"


def fleet() -> Page:
    """Nodes, queue and coordinator."""
    page = Page("piped / fleet", "piped-fleet")
    page.add(stat.Panel(), "Nodes by state", "short", query("piped_coordinator_nodes", "{{state}}"), width=8, height=5)
    page.add(stat.Panel(), "Jobs by state", "short", query("piped_coordinator_jobs", "{{state}}"), width=10, height=5)
    page.add(stat.Panel(), "Slots", "short", query("piped_node_slots", "{{state}}"), width=6, height=5)
    page.add(
        timeseries.Panel(),
        "Oldest queued job",
        "s",
        query("piped_coordinator_oldest_pending_seconds", "oldest"),
        text="pipectl get jobs -o wide says why a job waits.",
    )
    page.add(
        timeseries.Panel(),
        "Lease left",
        "s",
        query("piped_coordinator_node_lease_expiry_timestamp_seconds - time()", "{{node}}"),
        text="Below zero: the node's daemon is silent.",
    )
    page.add(
        timeseries.Panel(),
        "Coordinator calls, p95",
        "s",
        query(
            "histogram_quantile(0.95, sum by (le, method) (rate(piped_coordinator_rpc_duration_seconds_bucket[5m])))",
            "{{method}}",
        ),
    )
    page.add(
        timeseries.Panel(),
        "Training by job",
        "short",
        query("sum by (job_id) (rate(piped_tokens_total[1m]))", "{{job_id}} tokens/s"),
    )
    page.add(
        timeseries.Panel(),
        "Workers that ended",
        "short",
        query("sum by (job_id, reason) (piped_worker_exits_total)", "{{job_id}} {{reason}}"),
    )
    page.add(table.Panel(), "Versions", "short", query("piped_build_info", "{{instance}} {{version}}"))
    return page


def job() -> Page:
    """One job: how fast, how well, and which stage is to blame."""
    page = Page("piped / job", "piped-job")
    page.dashboard = page.dashboard.with_variable(
        dashboard.QueryVariable("job_id")
        .label("Job")
        .datasource(DATASOURCE)
        .query("label_values(piped_job_info, job_id)")
        .refresh(2)  # type: ignore[arg-type]
    )
    _job_summary(page)
    _job_stages(page)
    _job_transfers(page)
    return page


def _job_summary(page: Page) -> None:
    page.add(
        stat.Panel(), "Shape", "short", query(f"piped_job_info{{{JOB}}}", "{{name}}: {{stages}} stages, {{schedule}}, {{chunks}} chunks"),
        width=8, height=5,
    )  # fmt: skip
    page.add(stat.Panel(), "Loss", "short", query(f"piped_loss{{{JOB}}}", "loss"), width=4, height=5)
    page.add(stat.Panel(), "Steps", "short", query(f"piped_steps_total{{{JOB}}}", "steps"), width=4, height=5)
    page.add(
        stat.Panel(),
        "Tokens/s",
        "short",
        query(f"sum(rate(piped_tokens_total{{{JOB}}}[1m]))", "tokens/s"),
        width=4,
        height=5,
    )
    page.add(
        stat.Panel(), "Age of the last step", "s", query(f"time() - piped_job_last_step_timestamp_seconds{{{JOB}}}", "age"),
        width=4, height=5,
    )  # fmt: skip
    page.add(timeseries.Panel(), "Loss", "short", query(f"piped_loss{{{JOB}}}", "loss"))
    steps = f"sum by (le) (rate(piped_step_duration_seconds_bucket{{{JOB}}}[1m]))"
    page.add(
        timeseries.Panel(),
        "Step time",
        "s",
        query(f"histogram_quantile(0.5, {steps})", "p50"),
        query(f"histogram_quantile(0.95, {steps})", "p95"),
        query(f"piped_job_expected_step_seconds{{{JOB}}}", "expected"),
    )
    page.add(
        timeseries.Panel(),
        "Bubble: measured against the schedule's own",
        "percentunit",
        query(
            f"avg(rate(piped_bubble_seconds_total{{{JOB}}}[1m])) / sum(rate(piped_step_duration_seconds_sum{{{JOB}}}[1m]))",
            "measured",
        ),
        query(f"piped_job_expected_bubble_ratio{{{JOB}}}", "expected"),
        text="Share of a step in which a rank computes nothing, mean over ranks.",
    )


def _job_stages(page: Page) -> None:
    mean = (
        f"sum by (stage) (rate(piped_chunk_duration_seconds_sum{{{JOB}}}[1m]))"
        f' / sum by (stage) (rate(piped_chunk_duration_seconds_count{{{JOB},phase="forward"}}[1m]))'
    )
    page.add(
        timeseries.Panel(),
        "Compute per chunk by stage, forward and backward",
        "s",
        query(mean, "stage {{stage}}"),
        width=12,
    )
    page.add(
        bargauge.Panel(),
        "Straggler ratio: stage over the median stage",
        "short",
        query(f"({mean}) / scalar(quantile(0.5, {mean}))", "stage {{stage}}"),
        width=6,
        text="1.5 and above alerts (StragglerStage).",
    )
    page.add(
        table.Panel(),
        "Where stages run",
        "short",
        query(
            f"max by (stage, rank, node, device) (piped_worker_info{{{JOB}}})",
            "stage {{stage}}: rank {{rank}} on {{node}}",
        ),
        width=6,
    )
    for phase in ("forward", "backward"):
        page.add(
            heatmap.Panel(),
            f"Chunk latency, {phase}",
            "s",
            query(
                f'sum by (le) (increase(piped_chunk_latency_seconds_bucket{{{JOB},phase="{phase}"}}[1m]))',
                "{{le}}",
                is_heatmap=True,
            ),
            width=12,
            text="A chunk's whole way through the pipeline, from the first stage to the last and back.",
        )


def _job_transfers(page: Page) -> None:
    page.add(
        timeseries.Panel(),
        "Waiting for transfers, seconds per second",
        "s",
        query(
            f"sum by (stage, direction) (rate(piped_p2p_wait_seconds_sum{{{JOB}}}[1m]))",
            "stage {{stage}} {{direction}}",
        ),
    )
    page.add(
        timeseries.Panel(),
        "Bytes between stages",
        "Bps",
        query(f"sum by (stage, direction) (rate(piped_p2p_bytes_total{{{JOB}}}[1m]))", "stage {{stage}} {{direction}}"),
    )
    page.add(
        timeseries.Panel(),
        "Optimizer and gradient sync per second",
        "s",
        query(f"sum by (stage) (rate(piped_optimizer_duration_seconds_sum{{{JOB}}}[1m]))", "stage {{stage}} optimizer"),
        query(f"sum by (stage) (rate(piped_grad_sync_seconds_sum{{{JOB}}}[1m]))", "stage {{stage}} gradient sync"),
        query(
            f"sum by (stage) (rate(piped_grad_sync_exposed_seconds_sum{{{JOB}}}[1m]))",
            "stage {{stage}} sync that is waited for",
        ),
    )


PAGES = {"fleet.json": fleet, "job.json": job}


def main() -> int:
    """Write the dashboards; with --check compare, and return 1 where one is stale."""
    texts = {HERE / name: make().json() for name, make in PAGES.items()}
    if "--check" not in sys.argv[1:]:
        for path, text in texts.items():
            path.write_text(text)
        return 0
    stale = [path.name for path, text in texts.items() if not path.exists() or path.read_text() != text]
    for name in stale:
        print(f"deploy/grafana/{name} is stale; run python deploy/grafana/generate.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
