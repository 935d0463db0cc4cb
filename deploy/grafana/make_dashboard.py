"""Write the Grafana dashboard, `dashboards/logitd.json`, from the panels in this file.

    python deploy/grafana/make_dashboard.py

A panel has a title, a Grafana unit, and queries with their legends. The viewer chooses `$instance`
and `$model`. The address of Prometheus is in `provisioning/`, and the alerts are in
`../prometheus/alerts.yml`.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parent / "dashboards" / "logitd.json"
SOURCE = {"type": "prometheus", "uid": "prometheus"}
HEIGHT, ROW_WIDTH = 8, 24
OF_SERVERS = (
    "logitd_http_",
    "logitd_requests_",
    "logitd_api_key_",
    "logitd_connections",
    "logitd_ready",
    "process_",
)
"""Prefixes of the metrics that describe a whole server. All other metrics have the label
`model`."""


@dataclass(frozen=True)
class Panel:
    """A graph of one or more queries, each with its legend."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    stack: bool = False


def one(title: str, unit: str, query: str, legend: str, kind: str = "timeseries") -> Panel:
    """A panel with a single query."""
    return Panel(title, unit, ((query, legend),), kind)


def shares(title: str, metric: str, label: str, unit: str = "reqps") -> Panel:
    """A panel with the rate of a counter, stacked by the values of a label."""
    return Panel(title, unit, ((rate(metric, label), f"{{{{{label}}}}}"),), stack=True)


def of(metric: str) -> str:
    """A PromQL selector for a metric of the chosen instances and, if the metric has a model label,
    of the chosen models."""
    model = "" if metric.startswith(OF_SERVERS) else ',model=~"$model"'
    return f'{metric}{{instance=~"$instance"{model}}}'


def rate(metric: str, by: str = "job") -> str:
    """The rate per second of a counter, summed by the label `by`."""
    return f"sum by ({by}) (rate({of(metric)}[$__rate_interval]))"


def ratio(part: str, whole: str, by: str = "job") -> str:
    """The ratio of the rates of two counters."""
    return f"{rate(part, by)} / {rate(whole, by)}"


def mean(histogram: str, by: str = "job") -> str:
    """The mean of the values that a histogram observed."""
    return ratio(f"{histogram}_sum", f"{histogram}_count", by)


def quantiles(title: str, histogram: str) -> Panel:
    """A panel with the 50th, 95th and 99th percentiles of a histogram, in seconds."""
    buckets = rate(f"{histogram}_bucket", "le")
    return Panel(
        title,
        "s",
        tuple((f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)),
    )


def sums(title: str, **metrics: str) -> Panel:
    """A panel with gauges, each summed over the chosen instances. `metrics` maps legends to
    gauges."""
    queries = tuple((f"sum ({of(metric)})", legend) for legend, metric in metrics.items())
    return Panel(title, "short", queries)


ROUTES_P95 = (
    f"histogram_quantile(0.95, {rate('logitd_http_request_seconds_bucket', 'le, endpoint')})"
)
CACHED, PROMPT = "logitd_prompt_tokens_cached_total", "logitd_prompt_tokens_total"
ACCEPTED, DRAFTED = "logitd_draft_tokens_accepted_total", "logitd_draft_tokens_total"
RELOADS = f"increase({of('logitd_reloads_total')}[1h])"
PROCESSOR = f"rate({of('process_cpu_seconds_total')}[$__rate_interval])"
SERVER = "{{instance}}"
MODEL = f"{SERVER}: {{{{model}}}}"

ROWS: dict[str, tuple[Panel, ...]] = {
    "Traffic": (
        shares("Requests", "logitd_http_requests_total", "endpoint"),
        Panel(
            "Tokens per second",
            "short",
            (
                (rate("logitd_generation_tokens_total"), "generated"),
                (rate("logitd_prefill_tokens_total"), "prompts, computed"),
            ),
        ),
        shares("Tokens generated, by model", "logitd_generation_tokens_total", "model", "short"),
        shares("Requests by API key", "logitd_api_key_requests_total", "key"),
    ),
    "Latency": (
        quantiles("Time to first token", "logitd_time_to_first_token_seconds"),
        quantiles("Time between tokens", "logitd_inter_token_latency_seconds"),
        quantiles("Time in the queue", "logitd_sequence_queue_seconds"),
        one("Duration by route, p95", "s", ROUTES_P95, "{{endpoint}}"),
        quantiles("Sequence duration", "logitd_sequence_seconds"),
        one("Mean step duration by kind", "s", mean("logitd_step_seconds", "kind"), "{{kind}}"),
    ),
    "Saturation": (
        sums(
            "Sequences",
            running="logitd_num_sequences_running",
            waiting="logitd_num_sequences_waiting",
            paused="logitd_num_sequences_paused",
        ),
        one("Cache in use", "percentunit", of("logitd_kv_cache_use_ratio"), MODEL),
        one("Engine busy", "percentunit", rate("logitd_step_seconds_sum", "instance"), SERVER),
        one("Sequences decoded together", "short", mean("logitd_step_batch_size"), "mean"),
        one("Prompt tokens per prefill step", "short", mean("logitd_step_prefill_tokens"), "mean"),
        sums("Output elements waiting or running", elements="logitd_queue_elements"),
        sums("Connections", open="logitd_connections"),
    ),
    "Cache and drafts": (
        one("Prompt tokens copied from the cache", "percentunit", ratio(CACHED, PROMPT), "share"),
        one("Accepted draft tokens", "percentunit", ratio(ACCEPTED, DRAFTED), "share"),
        one("Evicted sequences", "short", rate("logitd_sequences_evicted_total"), "1/s"),
    ),
    "Errors": (
        shares("Responses by status", "logitd_http_requests_total", "status"),
        shares("Rejected requests by limit", "logitd_requests_rejected_total", "limit"),
        shares("Finished sequences", "logitd_sequences_finished_total", "reason", "short"),
        shares("Connections ended by the server", "logitd_connections_ended_total", "reason"),
        shares("Constraints", "logitd_constraints_total", "outcome", "short"),
    ),
    "Processes and checkpoints": (
        one("Memory", "bytes", of("process_resident_memory_bytes"), SERVER),
        one("Processor", "percentunit", PROCESSOR, SERVER),
        one("Open files", "short", of("process_open_fds"), SERVER),
        one(
            "Checkpoints served",
            "none",
            of("logitd_checkpoint_info"),
            f"{SERVER}: {{{{name}}}}, step {{{{step}}}}",
            "stat",
        ),
        one("Reloads in the last hour", "short", RELOADS, f"{MODEL}, {{{{result}}}}", "stat"),
        one("Models loaded", "none", of("logitd_model_ready"), MODEL, "stat"),
        one("Ready", "none", of("logitd_ready"), SERVER, "stat"),
    ),
}


def panel_json(panel: Panel, number: int, x: int, y: int, width: int) -> dict[str, Any]:
    """A panel in Grafana's JSON format."""
    stacking = {"mode": "normal" if panel.stack else "none"}
    custom = {"fillOpacity": 20 if panel.stack else 5, "showPoints": "never", "stacking": stacking}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": width, "x": x, "y": y},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": custom if panel.kind == "timeseries" else {},
            },
            "overrides": [],
        },
        "options": {"textMode": "name"} if panel.title == "Checkpoints served" else {},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": query,
                "legendFormat": legend,
            }
            for i, (query, legend) in enumerate(panel.queries)
        ],
    }


def variable(name: str, label: str, values: str) -> dict[str, Any]:
    """A dashboard variable. The viewer selects some or all of its values."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": values, "refId": f"{name}s"},
        "definition": values,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"text": "All", "value": "$__all"},
    }


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's JSON format, with up to three panels side by side."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"h": 1, "w": ROW_WIDTH, "x": 0, "y": y}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place})
        y += 1
        for first in range(0, len(row), 3):
            some = row[first : first + 3]
            width = ROW_WIDTH // len(some)
            for column, panel in enumerate(some):
                panels.append(panel_json(panel, len(panels) + 1, column * width, y, width))
            y += HEIGHT
    return {
        "uid": "logitd",
        "title": "logitd",
        "tags": ["logitd"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "annotations": {"list": []},
        "templating": {
            "list": [
                variable("instance", "Server", "label_values(logitd_ready, instance)"),
                variable("model", "Model", "label_values(logitd_model_ready, model)"),
            ]
        },
        "panels": panels,
    }


def main() -> None:
    PLACE.write_text(f"{json.dumps(dashboard(), indent=1)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
