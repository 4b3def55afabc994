"""A real Prometheus server over our own configuration, and what our rules and dashboards ask it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import yaml

from tests.support.cluster import wait_until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_OPERATORS = r"\s(?:>|<|==|and on \([a-z_]+\)|on \([a-z_]+\) group_left \(\)|on \([a-z_]+\))(?=\s)"


class Prometheus:
    """`with Prometheus(folder, sd_url) as server`: scrapes once a second what the coordinator lists."""

    def __init__(self, folder: Path, sd_url: str) -> None:
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOY / "prometheus" / "rules.yml")]
        (only,) = config["scrape_configs"]
        only["http_sd_configs"] = [{"url": sd_url, "refresh_interval": "1s"}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        command = [
            "prometheus",
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/tsdb",
            f"--web.listen-address={self.address}",
            "--enable-feature=exemplar-storage",
        ]
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)

    def __enter__(self) -> Prometheus:
        wait_until(self._is_ready, 30, "Prometheus")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        self._log.close()

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text()
        try:
            with urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=1) as response:
                return response.status == 200
        except OSError:
            return False

    def exemplars(self, expression: str) -> list[dict[str, str]]:
        """Return the labels of every exemplar of the series that `expression` names."""
        wanted = urllib.parse.urlencode({"query": expression, "start": "0", "end": "9999999999"})
        with urllib.request.urlopen(f"http://{self.address}/api/v1/query_exemplars?{wanted}", timeout=10) as response:
            return [each["labels"] for series in json.load(response)["data"] for each in series["exemplars"]]

    def query(self, expression: str) -> list[dict[str, object]]:
        """Return the instant vector (a scalar as one sample without labels)."""
        url = f"http://{self.address}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(url, timeout=10) as response:
            data = json.load(response)["data"]
        return data["result"] if data["resultType"] == "vector" else [{"metric": {}, "value": data["result"]}]

    def values(self, expression: str, label: str) -> dict[str, float]:
        """Return the samples by one label."""
        return {row["metric"].get(label, ""): float(row["value"][1]) for row in self.query(expression)}


def dashboard_expressions(job_id: str) -> dict[str, str]:
    """Return every query of every dashboard, for this job."""
    found = {}
    for path in sorted((DEPLOY / "grafana").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for number, target in enumerate(panel["targets"]):
                found[f"{path.name}: {panel['title']} [{number}]"] = target["expr"].replace("$job_id", job_id)
    return found


def rule_expressions() -> dict[str, str]:
    """Return what the rules measure: each record's expression, and both sides of each alert's comparison."""
    found = {}
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                found[rule["record"]] = rule["expr"]
                continue
            parts = [part.strip() for part in re.split(_OPERATORS, rule["expr"])]
            for number, part in enumerate(p for p in parts if re.search("[a-z]", p)):
                found[f"{rule['alert']} [{number}]"] = part
    return found
